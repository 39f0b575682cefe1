"""Processes that stay: a test hands a function to all ranks of a pool and gets what each of them returned.

Starting a process imports torch and transformers, which takes longer than most tests; so ranks are forked from a
process that has imported them, those of one pool are started once per test session, and every test runs its function on
them. A function must be importable (module level) and leave nothing behind. If a rank dies or hangs the pool is ended
and the next test gets a new one.

Process groups are left behind all the same: torch keeps each of them until it is destroyed, and gloo has a thread for
each that wakes some hundred times a second. After a test its pools meet in a new default group (:meth:`Pool.renew`):
ranks that wait for work with the groups of a hundred tests would keep a processor busy.
"""

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._progress import NoProgress, Progress


class Failure(NamedTuple):
    """What a function raised on one rank."""

    kind: str
    text: str
    traceback: str


class Pool:
    """``size`` processes of one gloo group. ``timeout``: seconds the group waits for a rank."""

    def __init__(self, size: int, timeout: float = 60.0):
        self.size = size
        self._timeout = timeout
        self._num_stores = 0
        self._folder = tempfile.TemporaryDirectory(prefix="gemini-ranks-")
        store = self._new_store()
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.ranks.preloaded"])
        self.processes = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, store, timeout, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def outcomes(self, function: Callable[..., Any], *args: Any, seconds: float = 240.0) -> list[Any]:
        """Run ``function(*args)`` on every rank: what each returned, or its :class:`Failure`.

        A rank that died gives a ``Failure`` of kind "Died"; when all have done nothing for ``seconds``, those that have
        not answered give one of kind "Hung".
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        results: list[Any] = [Failure("Hung", f"no answer after {seconds} s", "")] * self.size
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        broken = False
        progress = Progress([process.pid for process in self.processes if process.pid], "ranks", patience=seconds)
        while pending:
            ready = wait(list(pending), timeout=0.5)
            hung = False
            try:
                progress.check()
            except NoProgress:
                hung = not ready
            if hung:
                broken = True
                for rank in pending.values():
                    results[rank] = results[rank]._replace(traceback=self._stacks(rank))
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    results[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    results[rank] = Failure("Died", f"exit code {self.processes[rank].exitcode}", "")
                    broken = True
        if broken:
            self.close()
        return results

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 240.0) -> list[Any]:
        """The same, and no rank may fail."""
        results = self.outcomes(function, *args, seconds=seconds)
        failed = [
            f"rank {rank} failed: {result.kind}: {result.text}\n{result.traceback}"
            for rank, result in enumerate(results)
            if isinstance(result, Failure)
        ]
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        return results

    def renew(self, timeout: float | None = None) -> None:
        """All ranks leave all process groups and meet in a new default one; a pool that cannot do it is ended.

        ``timeout``: of the new group, if it is to be another than the pool's.
        """
        with contextlib.suppress(AssertionError):
            self.run(_meet, self._new_store(), self._timeout if timeout is None else timeout)

    def _new_store(self) -> str:
        self._num_stores += 1
        return str(Path(self._folder.name) / f"store-{self._num_stores}")

    def _stacks(self, rank: int) -> str:
        """Where every thread of a rank stands."""
        pid = self.processes[rank].pid
        assert pid is not None, "it was started"
        with contextlib.suppress(OSError):  # it ended meanwhile, or never came so far
            os.kill(pid, signal.SIGUSR1)
            time.sleep(1)
            return (Path(self._folder.name) / f"stacks-{rank}").read_text()
        return ""

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self.processes = []
        self._folder.cleanup()


Pools = Callable[[int], Pool]
"""The fixture ``pool_of``: a pool of so many ranks."""


def failures(outcomes: list[Any], kind: str) -> list[str]:
    """All ranks raised the same kind of error: what each of them says."""
    assert all(isinstance(outcome, Failure) and outcome.kind == kind for outcome in outcomes), outcomes
    return [outcome.text for outcome in outcomes]


def started(size: int) -> Pool:
    """A pool whose ranks have met. Gloo may drop a connection between processes that begin at once: they go again."""
    for _ in range(2):
        pool = Pool(size)
        with contextlib.suppress(AssertionError):  # it has closed itself
            pool.run(os.getpid)
            return pool
    return Pool(size)


def _meet(store: str, timeout: float) -> None:
    """Run by every rank: the default group, as if the process had just started."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )


def _work(rank: int, size: int, store: str, timeout: float, pipe: Connection) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    # Ranks have a thread for each message that comes, and to let it interrupt the one that computes costs half of their
    # time where all of them share a few cores. Threads that are made later inherit it.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    import torch

    torch.set_num_threads(1)
    stacks = open(Path(store).parent / f"stacks-{rank}", "w")  # noqa: SIM115 - for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    _meet(store, timeout)
    num_modules = 0
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            result = function(*args)
        except BaseException as e:
            result = Failure(type(e).__name__, str(e), traceback.format_exc())
            del e
        gc.collect()
        if len(sys.modules) > num_modules:  # what was imported stays: not looked at in every collection
            num_modules = len(sys.modules)
            gc.freeze()
        pipe.send(result)
        del result
