"""The same hunt on several ranks: every rank runs the program on the same batches, so the mean of equal gradients is
the gradient of one, exactly, and the plain loop of a single process still defines the bits.

(The norm of sharded gradients is summed in another order than that of one process, so programs that clip are left out.)
Ranks are processes that stay (tests/ranks/pool.py). After a run that was not right they meet in a new process group;
ranks that died or hang are replaced.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.hunts.program_draw import program_of
from tests.hunts.program_run import (
    FAILURES,
    HANG,
    RAW,
    REFUSED,
    RIGHT,
    SILENT,
    Ran,
    Result,
    judge,
    kind_of,
    run_plain,
    run_side,
)
from tests.hunts.program_sides import PLACEMENTS, ManagedSide
from tests.hunts.program_source import source
from tests.hunts.program_workers import Task
from tests.ranks.pool import Failure, Pool

TIMEOUT = 30.0
"""Seconds the process group waits for a rank: one that raised alone leaves the other waiting."""

_plain: dict[tuple[str, str], Ran] = {}


def run_on_rank(text: str, task: Task, placement: str, folder: str, size: int) -> Result:
    """One run, on one rank of ``size``."""
    key = (text, task.precision)
    if key not in _plain:
        _plain.clear()
        _plain[key] = run_plain(text, task.seed, task.precision, size)
    whole = SimpleNamespace(size=1)  # nobody else has parts of a sequence, and there is one of the model
    ranks = SimpleNamespace(size=size, local_size=size, context=whole, replicas=whole, smallest=lambda values: values)

    def make(model: Any) -> ManagedSide:
        return ManagedSide(model, task.precision, PLACEMENTS[placement], Path(folder), ranks)

    result = judge(_plain[key], run_side(text, f"program_{task.seed}", make, task.precision))
    result.seed, result.placement, result.precision = task.seed, placement, task.precision
    return result


def run_tasks(tasks: Iterable[Task], *, size: int, limit: float, on_result: Callable[[Result], None]) -> None:
    """Run every task on ``size`` ranks; ``on_result`` is told of the worst that a rank had."""
    pool = Pool(size, TIMEOUT)
    try:
        for task in tasks:
            text = task.text or source(program_of(task.seed))
            for placement in task.placements:
                if not pool.alive:
                    pool.close()
                    pool = Pool(size, TIMEOUT)
                folder = tempfile.mkdtemp(prefix="gemini-programs-")
                outcomes = pool.outcomes(run_on_rank, text, task, placement, folder, size, seconds=limit)
                shutil.rmtree(folder, ignore_errors=True)
                result = worst(task, placement, outcomes)
                on_result(result)
                if result.outcome != RIGHT and pool.alive:
                    pool.renew()
    finally:
        pool.close()


def worst(task: Task, placement: str, outcomes: list[Any]) -> Result:
    """What is said of a run that every rank saw an end of."""
    results = []
    for rank, found in enumerate(outcomes):
        if isinstance(found, Failure):
            told = f"rank {rank}: {found.kind}: {found.text}\n{found.traceback}"
            outcome = HANG if found.kind == "Hung" else RAW
            found = Result(task.seed, placement, task.precision, outcome, told, kind_of(f"{found.kind}: {found.text}"))
        results.append(found)
    # A rank that refuses drops its model, and with it the connections in which another may still be told of that.
    if any(result.outcome == REFUSED for result in results):
        results = [result for result in results if not result.detail.startswith("RankLost: ")]
    by_name = {result.outcome: result for result in reversed(results)}
    for name in (HANG, RAW, SILENT, *FAILURES):
        if name in by_name:
            return by_name[name]
    if len(by_name) > 1:
        told = ", ".join(f"rank {rank}: {result.outcome}" for rank, result in enumerate(results))
        return Result(task.seed, placement, task.precision, RAW, told, "ranks ended differently")
    return results[0]
