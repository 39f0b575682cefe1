"""What is tried in turn where the first choice does not fit: with less staging, and in tiles of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from gemini.errors import BudgetExceeded
from gemini.planning.trace import MemoryTrace

Chosen = TypeVar("Chosen")


def with_staging(choose: Callable[[bool], Chosen], *, overlap: bool) -> Chosen:
    """What ``choose`` makes with staging for every worker, or, where only that does not fit, with one tile of it.

    Raises:
        BudgetExceeded: if it does not fit without the workers' either.
    """
    if overlap:
        try:
            return choose(True)
        except BudgetExceeded:
            pass  # then what has to be staged is updated in turn
    return choose(False)


def with_tiles(choose: Callable[[MemoryTrace], Chosen], trace: MemoryTrace) -> Chosen:
    """What ``choose`` makes of the step as it is, or, where that does not fit, of the one in tiles, if there is one.

    Raises:
        BudgetExceeded: if neither fits; of the one in tiles, which is nearer to it.
    """
    if trace.tiled is None:
        return choose(trace)
    try:
        return choose(replace(trace, tiled=None))
    except BudgetExceeded:
        return choose(trace.tiled)
