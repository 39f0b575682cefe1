"""Kill runs with a durable store at random moments, resume them, and compare with one that ended by itself.

    python -m tests.hunts.kill_durable [--kills 100] [--seed 0] [--ranks 2]

A run commits after every step and says so when the commit is whole. Each kill ends all ranks of it by SIGKILL; the next
run must go on from the last commit that was said, or the one behind it, and at the end every bit is that of an
unbroken run.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

import gemini
from gemini.memory.durable.folder import is_store
from tests.train.helpers import snapshot, train
from tests.train.test_durable import durable


def work(store: Path, steps: int, where: str, meeting: str, rank: int, ranks: int) -> None:
    """Train to the end, from wherever the store is."""
    if ranks > 1:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)

    def say(*what: object) -> None:
        if rank == 0:
            print(*what, flush=True)

    model, optimizer = durable(where, store)
    torch.manual_seed(1)
    at = gemini.load_checkpoint(store, model, optimizer) if is_store(store) and list(store.glob("*/record-*")) else 0
    say("began", at)
    pending = None
    for position in range(at, steps):
        train(model, optimizer, [position % 7])
        if pending is not None:
            pending.wait()
            say("has", position)
        pending = gemini.save_checkpoint(store, model, optimizer, extra=position + 1, wait=False)
    if pending is not None:
        pending.wait()
    digest = hashlib.sha256()
    for name, planes in sorted(snapshot(model).items()):
        for kind, value in sorted(planes.items()):
            digest.update(f"{name} {kind}".encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    say("bits", digest.hexdigest())


def started(store: Path, steps: int, where: str, ranks: int) -> subprocess.Popen[str]:
    """The first rank, whose process group all of them are in; the others say nothing."""
    command = [sys.executable, "-m", "tests.hunts.kill_durable", "--work", str(store), str(steps), where]
    first = None
    meeting = f"file://{store.parent}/{uuid.uuid4()}"
    for rank in range(ranks):
        group = 0 if first is None else first.pid
        process = subprocess.Popen(
            [*command, "--meeting", meeting, str(rank), str(ranks)], stdout=subprocess.PIPE if rank == 0 else None,
            text=True, preexec_fn=functools.partial(os.setpgid, 0, group),
        )  # fmt: skip
        first = first or process
    assert first is not None
    return first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--where", default="half")
    parser.add_argument("--seconds", type=float, default=3, help="a run trains at most so long before it is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        meeting, rank, ranks = options.meeting
        work(Path(options.work[0]), int(options.work[1]), options.work[2], meeting, int(rank), int(ranks))
        return 0
    rng, kills, runs = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "whole").mkdir()
        whole = (
            started(Path(folder) / "whole", options.steps, options.where, options.ranks)
            .communicate()[0]
            .split("\n")[-2]
        )
        while kills < options.kills:
            store, said = Path(folder) / f"run-{runs}", 0
            store.mkdir()
            while True:
                process = started(store, options.steps, options.where, options.ranks)
                assert process.stdout is not None
                began = int(process.stdout.readline().split()[1])
                if began < said:
                    print(f"run {runs}: began at {began}, after a commit of {said} was said")
                    return 1
                time.sleep(rng.uniform(0, options.seconds))
                os.killpg(process.pid, signal.SIGKILL)
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
