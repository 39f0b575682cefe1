"""Kill runs with a durable store at random moments, resume them, and compare with one that ended by itself.

    python -m tests.hunts.kill_durable [--kills 100] [--seed 0]

A run commits after every step and says so when the commit is whole. Each kill ends it by SIGKILL; the next process must
go on from the last commit that was said, or the one behind it, and at the end every bit is that of an unbroken run.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import gemini
from gemini.memory.durable.folder import is_store
from tests.train.helpers import snapshot, train
from tests.train.test_durable import durable


def work(store: Path, steps: int, where: str) -> None:
    """Train to the end, from wherever the store is."""
    model, optimizer = durable(where, store)
    torch.manual_seed(1)
    at = gemini.load_checkpoint(store, model, optimizer) if is_store(store) and list(store.glob("*/record-*")) else 0
    print("began", at, flush=True)
    pending = None
    for position in range(at, steps):
        train(model, optimizer, [position % 7])
        if pending is not None:
            pending.wait()
            print("has", position, flush=True)
        pending = gemini.save_checkpoint(store, model, optimizer, extra=position + 1, wait=False)
    if pending is not None:
        pending.wait()
    digest = hashlib.sha256()
    for name, planes in sorted(snapshot(model).items()):
        for kind, value in sorted(planes.items()):
            digest.update(f"{name} {kind}".encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    print("bits", digest.hexdigest(), flush=True)


def started(store: Path, steps: int, where: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.hunts.kill_durable", "--work", str(store), str(steps), where]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--where", default="half")
    parser.add_argument("--seconds", type=float, default=3, help="a run trains at most so long before it is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(Path(options.work[0]), int(options.work[1]), options.work[2])
        return 0
    rng, kills, runs = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "whole").mkdir()
        whole = started(Path(folder) / "whole", options.steps, options.where).communicate()[0].split("\n")[-2]
        while kills < options.kills:
            store, said = Path(folder) / f"run-{runs}", 0
            store.mkdir()
            while True:
                process = started(store, options.steps, options.where)
                assert process.stdout is not None
                began = int(process.stdout.readline().split()[1])
                if began < said:
                    print(f"run {runs}: began at {began}, after a commit of {said} was said")
                    return 1
                time.sleep(rng.uniform(0, options.seconds))
                process.kill()
                lines = process.communicate()[0].split("\n")
                said = max([began, *(int(line.split()[1]) for line in lines[:-1] if line.startswith("has "))])
                if lines[-2:-1] and lines[-2].startswith("bits"):
                    break
                kills += 1
            runs += 1
            if lines[-2] != whole:
                print(f"run {runs}: other bits than an unbroken run: {lines[-2]}, {whole}")
                return 1
            print(f"{kills} kills, {runs} runs ended with the bits of an unbroken one", flush=True)
            shutil.rmtree(store)
    return 0


if __name__ == "__main__":
    sys.exit(main())
