"""Kill runs with a durable store at random moments, resume them, and compare with one that ended by itself.

    python -m tests.hunts.kill_durable [--kills 100] [--seed 0] [--ranks 2]

A run commits after every step and says so when the commit is whole. Each kill ends all ranks of it by SIGKILL; the next
run must go on from the last commit that was said, or the one behind it, and at the end every bit is that of an
unbroken run. With ``--guess`` updates begin inside backward and every third step undoes them; the unbroken run makes
them behind backward. Every rank is a process of its own, forked from a server that has imported everything.
"""

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

import gemini
from gemini.memory.durable.folder import is_store
from tests.hunts.race_recipes import AlwaysPays
from tests.train.helpers import adam, snapshot, train
from tests.train.test_durable import durable
from tests.world import world_of

_CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["tests.train.test_durable", "transformers.models.llama.modeling_llama", "torch._dynamo"]
"""What every rank would import by itself, in seconds."""


def work(
    store: Path, steps: int, where: str, guess: bool, meeting: str, rank: int, ranks: int, heard: Connection
) -> None:
    """Train to the end, from wherever the store is; the first rank says how far it is."""
    if ranks > 1:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)

    def say(what: str, value: object) -> None:
        if rank == 0:
            heard.send((what, value))

    model, optimizer = durable(where, store)
    if guess:
        optimizer = adam(model, step_in_backward=True, speculate=True)
        world_of(model).guess_by(AlwaysPays())
    torch.manual_seed(1)
    at = gemini.load_checkpoint(store, model, optimizer) if is_store(store) and list(store.glob("*/record-*")) else 0
    say("began", at)
    pending = None
    for position in range(at, steps):
        train(model, optimizer, [position % 7], clip=1e6 if position % 3 else 1e-3)
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


class Run:
    """The ranks of a run, and what the first one says."""

    def __init__(self, store: Path, steps: int, where: str, ranks: int, *, guess: bool):
        meeting = f"file://{store.parent}/{uuid.uuid4()}"
        self._said, heard = _CONTEXT.Pipe(duplex=False)
        self._ranks = [
            _CONTEXT.Process(target=work, args=(store, steps, where, guess, meeting, rank, ranks, heard))
            for rank in range(ranks)
        ]
        for rank in self._ranks:
            rank.start()
        heard.close()

    def next(self) -> tuple[str, object]:
        """Raises EOFError where it says nothing more."""
        found: tuple[str, object] = self._said.recv()
        return found

    def rest(self) -> Iterator[tuple[str, object]]:
        """Until it has ended."""
        with contextlib.suppress(EOFError):
            while True:
                yield self.next()
        for rank in self._ranks:
            rank.join()

    def kill(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                assert rank.pid is not None
                os.kill(rank.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--where", default="half")
    parser.add_argument("--seconds", type=float, default=3, help="a run trains at most so long before it is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--guess", action="store_true", help="updates inside backward that may be undone")
    options = parser.parse_args()
    _CONTEXT.set_forkserver_preload(PRELOADED)
    rng, kills, runs = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "whole").mkdir()
        *_, whole = Run(Path(folder) / "whole", options.steps, options.where, options.ranks, guess=False).rest()
        while kills < options.kills:
            store, said, last = Path(folder) / f"run-{runs}", 0, None
            store.mkdir()
            while last is None:
                run = Run(store, options.steps, options.where, options.ranks, guess=options.guess)
                began = run.next()[1]
                assert isinstance(began, int)
                if began < said:
                    print(f"run {runs}: began at {began}, after a commit of {said} was said")
                    return 1
                time.sleep(rng.uniform(0, options.seconds))
                run.kill()
                for what, value in run.rest():
                    if what == "bits":
                        last = what, value
                    else:
                        assert what == "has" and isinstance(value, int)
                        said = value
                kills += last is None
            runs += 1
            if last != whole:
                print(f"run {runs}: other bits than an unbroken run: {last}, {whole}")
                return 1
            print(f"{kills} kills, {runs} runs ended with the bits of an unbroken one", flush=True)
            shutil.rmtree(store)
    return 0


if __name__ == "__main__":
    sys.exit(main())
