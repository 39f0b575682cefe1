"""The handshake of a checkpoint: all ranks do their part or none goes on, and what one of them fails with all raise."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import gemini
from gemini.ranks.agree import Handshake
from tests.ranks.pool import Pool

PoolOf = Callable[[int], Pool]


def test_alone_the_steps_are_taken_as_they_are() -> None:
    ranks = Handshake(None, "saving")
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.step(lambda: 3, lambda given: [*given, 4]) == [3, 4]
    with pytest.raises(OSError, match="full"):
        ranks.step(lambda: _raise(OSError(errno.ENOSPC, "full")), lambda given: given)


def _raise(error: BaseException) -> Any:
    raise error


def outcome(work: Callable[[int], Any], conclude: Callable[[list[Any]], Any]) -> str:
    ranks = Handshake(dist.group.WORLD, "saving it")
    concluded: list[Any] = []

    def noted(given: list[Any]) -> Any:
        concluded.append(given)
        return conclude(given)

    try:
        result = str(ranks.step(lambda: work(ranks.rank), noted))
    except BaseException as e:
        result = f"{type(e).__name__}: {e}"
    again = ranks.step(lambda: ranks.rank, sum)  # and nobody is out of step afterwards
    return f"{result}; concluded {len(concluded)} times; {again}"


def steps() -> list[str]:
    return [
        outcome(lambda rank: rank * 10, lambda given: [*given, "done"]),
        outcome(lambda rank: _raise(OSError(errno.ENOSPC, "no space")) if rank == 1 else rank, sum),
        outcome(lambda rank: _raise(gemini.PlanMismatch("another")) if rank else rank, sum),
        outcome(lambda rank: _raise(KeyError("x")) if rank == 2 else rank, sum),
        outcome(lambda rank: _raise(KeyboardInterrupt("stop")) if rank == 1 else rank, sum),
        outcome(lambda rank: rank, lambda given: _raise(gemini.StorageError("not there"))),
    ]


def test_what_fails_on_one_rank_fails_on_all(pool_of: PoolOf) -> None:
    said = pool_of(4).run(steps)
    for rank, (went, full, another, key, stopped, end) in enumerate(said):
        ending = f"; concluded {{}} times; {0 + 1 + 2 + 3}"
        once, never = ending.format(1 if rank == 0 else 0), ending.format(0)
        assert went == "[0, 10, 20, 30, 'done']" + once
        assert full == "StorageError: saving it failed on rank 1: no space" + never
        assert another == "PlanMismatch: saving it failed on rank 1 (and 2 more ranks): another" + never
        assert key == "GeminiError: saving it failed on rank 2: KeyError: 'x'" + never
        interrupt = "GeminiError: saving it failed on rank 1: KeyboardInterrupt: stop"
        assert stopped == ("KeyboardInterrupt: stop" if rank == 1 else interrupt) + never
        assert end == "StorageError: saving it failed on rank 0: not there" + once
