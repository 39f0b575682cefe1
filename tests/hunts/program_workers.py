"""Processes that run programs, many each, and may die or hang: that is an outcome, and the rest goes on elsewhere.

A worker says what it begins and how it ended. The parent notes the time of the last word of each; one that is silent
for longer than ``limit`` seconds is asked for its stacks (SIGUSR1) and killed.
"""

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tests import plain_programs
from tests.hunts.program_draw import Program, program_of
from tests.hunts.program_run import Result, kind_of, run_managed, run_plain
from tests.hunts.program_source import source

PRELOADED = ["tests.hunts.program_run", "tests.hunts.program_source", "transformers", "peft"]
PROGRAMS_EACH = 300
"""Programs after which a worker is replaced by a fresh one: what a program leaves behind ends there."""


START = 120.0
"""Seconds that a process may take to import torch."""


@dataclass(frozen=True)
class Task:
    """One program (or the text of one) in one precision, at some placements."""

    seed: int
    precision: str
    placements: tuple[str, ...]
    text: str = ""


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    stacks: Path
    task: Task | None = None
    begun: str = ""
    done: list[str] = field(default_factory=list)
    last_word: float = field(default_factory=time.monotonic)
    count: int = 0


def run_tasks(
    tasks: Iterable[Task], *, jobs: int, limit: float, on_result: Callable[[Any], None], work: Any = None
) -> None:
    """Run every task in ``jobs`` processes; ``on_result`` is told of each result as it comes."""
    waiting = deque(tasks)
    folder = Path(tempfile.mkdtemp(prefix="gemini-programs-"))
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    workers: list[_Worker] = []

    def start() -> None:
        ours, theirs = context.Pipe()
        stacks = folder / f"stacks-{time.monotonic_ns()}"
        process = context.Process(target=work or _work, args=(theirs, str(folder), str(stacks)), daemon=True)
        process.start()
        theirs.close()
        workers.append(_Worker(process, ours, stacks))

    def give(worker: _Worker) -> None:
        worker.task = waiting.popleft() if waiting else None
        worker.begun, worker.done = "", []
        worker.last_word = time.monotonic()
        if worker.task is not None:
            worker.count += 1
            worker.pipe.send(worker.task)

    def lost(worker: _Worker, outcome: str, told: str) -> None:
        """It hung or died: note the run it was at, and let another one go on with the rest of the task."""
        workers.remove(worker)
        task = worker.task
        if task is None:
            return
        on_result(Result(task.seed, worker.begun, task.precision, outcome, told, kind_of(told.split("\n")[0])))
        left = tuple(name for name in task.placements if name not in (*worker.done, worker.begun))
        if left and worker.begun != "plain":
            waiting.appendleft(replace(task, placements=left))

    try:
        while waiting or any(worker.task for worker in workers):
            for worker in [w for w in workers if w.task is None]:
                if worker.count >= PROGRAMS_EACH or not waiting:
                    _end(worker)
                    workers.remove(worker)
                else:
                    give(worker)
            while len(workers) < jobs and waiting:
                start()
                give(workers[-1])
            for pipe in wait([worker.pipe for worker in workers], timeout=1.0):
                worker = next(w for w in workers if w.pipe is pipe)
                try:
                    word, value = worker.pipe.recv()
                except EOFError:
                    worker.process.join(10)
                    lost(
                        worker, "RAW", f"the process died: exit code {worker.process.exitcode}\n{_read(worker.stacks)}"
                    )
                    continue
                worker.last_word = time.monotonic()
                if word == "begin":
                    worker.begun = value
                elif word == "result":
                    worker.done.append(value.placement)
                    on_result(value)
                else:
                    worker.task = None
            for worker in [w for w in workers if w.task is not None]:
                if time.monotonic() - worker.last_word > (limit if worker.begun else max(limit, START)):
                    stacks = _stacks(worker)
                    _kill(worker)
                    lost(worker, "HANG", f"no end after {limit:.0f} s\n{stacks}")
    finally:
        for worker in workers:
            _kill(worker)
        shutil.rmtree(folder, ignore_errors=True)


def _stacks(worker: _Worker) -> str:
    with contextlib.suppress(OSError):
        os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(1)
    return _read(worker.stacks)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _end(worker: _Worker) -> None:
    with contextlib.suppress(OSError):
        worker.pipe.send(None)
    worker.process.join(20)
    _kill(worker)


def _kill(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join(10)
    worker.pipe.close()


# ---- in the worker -------------------------------------------------------------------------------------------------


def _work(pipe: Connection, folder: str, stacks: str) -> None:
    with prepared(stacks), contextlib.suppress(EOFError, BrokenPipeError):  # whoever asked is gone
        torch.set_num_threads(1)
        plain_programs.prepare()  # before anything is managed here
        simplest = source(Program(0))  # what is imported late, is imported now
        run_managed(simplest, 0, "fp32", "memory", Path(folder), run_plain(simplest, 0, "fp32"))
        for number in itertools.count():
            task = pipe.recv()
            if task is None:
                return
            if number % 25 == 0:  # what is there by now need not be looked at after every run
                gc.collect()
                gc.freeze()
            pipe.send(("begin", "plain"))
            text = task.text or source(program_of(task.seed))
            plain = run_plain(text, task.seed, task.precision)
            for placement in task.placements:
                pipe.send(("begin", placement))
                own = Path(tempfile.mkdtemp(dir=folder))
                result = run_managed(text, task.seed, task.precision, placement, own, plain)
                shutil.rmtree(own, ignore_errors=True)
                pipe.send(("result", result))
            pipe.send(("done", None))


@contextlib.contextmanager
def prepared(stacks: str) -> Iterator[None]:
    """Faults and SIGUSR1 leave the stacks of all threads in a file; what programs print goes nowhere."""
    with open(stacks, "w") as file, open(os.devnull, "w") as nowhere:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)
        # An exception in a thread or a finalizer is printed by Python; a program's own are part of it.
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
        sys.stdout.flush()
