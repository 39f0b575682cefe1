"""The quickest of some ways to make a step, each with more and more of its blocks kept, by branch and bound: what takes
least by what is known of it is looked at next. It is planned, which tells more; then it is played; and what cannot be
quicker than the best one is neither.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import Generic, NamedTuple, TypeVar

from gemini.errors import BudgetExceeded
from gemini.planning.hardware import Hardware
from gemini.planning.plan import Plan
from gemini.planning.simulate import bound_of, step_seconds
from gemini.planning.sizes import with_kept
from gemini.planning.trace import MemoryTrace

PARTS = 8  # none, an eighth of all, a quarter, ... are kept
CLOSE = 0.005  # what could be quicker by less than this part of a step is not looked at

W = TypeVar("W")


class Found(NamedTuple, Generic[W]):
    """A way to make the step, its plan and how long it takes: seconds, or micro-batches where no speeds are known."""

    way: W
    plan: Plan
    seconds: float
    is_played: bool  # else it takes at least as long, which is longer than the best one


def numbers_up_to(most: int) -> list[int]:
    """The numbers of kept blocks that are looked at."""
    return sorted({most * part // PARTS for part in range(PARTS + 1)})


@dataclass
class _Numbers(Generic[W]):
    """A way with more and more kept blocks; ``least``: what it takes at least, by their number."""

    keeping: Callable[[int], W]
    least: Mapping[int, float]
    planned: dict[int, float] = field(default_factory=dict)  # the same, as the plans of the first of them have it

    def left(self) -> float:
        """The least that those take which are not planned yet."""
        least = min((own for number, own in self.least.items() if number not in self.planned), default=math.inf)
        return max(least, _least_with_more(self.planned, max(self.least)))

    def plan_next(
        self, plan_of: Callable[[W], Plan | None], seconds_of: Callable[[W, Plan, bool], float]
    ) -> Found[W] | None:
        """Plan it with the next number; None if it does not fit: then it does with no larger one."""
        number = next(number for number in self.least if number not in self.planned)
        way = self.keeping(number)
        if (plan := plan_of(way)) is None:  # it was a lower bound of what it needs
            return None
        self.planned[number] = seconds_of(way, plan, False)
        return Found(way, plan, max(self.planned[number], self.least[number]), False)


def quickest(
    ways: Iterable[tuple[Callable[[int], W], Mapping[int, float]]],
    plan_of: Callable[[W], Plan | None],
    seconds_of: Callable[[W, Plan, bool], float],
) -> list[Found[W]]:
    """The quickest first, which was played, then the others that were planned, by what they take; empty if none fits.

    Args:
        ways: each as a function of the number of its blocks that are kept, and what it takes at least, by ascending
            numbers.
        plan_of: the plan of a way; None if it does not fit.
        seconds_of: how long it takes, or if it is not to be played (False), takes at least.
    """
    found, planned, order = list[Found[W]](), list[Found[W]](), count()
    waiting: list[tuple[float, int, _Numbers[W] | Found[W]]] = []

    def wait(least: float, what: _Numbers[W] | Found[W]) -> None:
        if least < math.inf:
            heappush(waiting, (least, next(order), what))

    for keeping, least in ways:
        wait(min(least.values()), _Numbers(keeping, least))
    while waiting and (not found or waiting[0][0] <= (1 - CLOSE) * found[0].seconds):
        what = heappop(waiting)[2]
        if isinstance(what, Found):
            seconds = seconds_of(what.way, what.plan, True)
            planned.remove(what)
            insort(found, what._replace(seconds=seconds, is_played=True), key=lambda each: each.seconds)
        elif new := what.plan_next(plan_of, seconds_of):
            planned.append(new)
            wait(new.seconds, new)
            wait(what.left(), what)
    return found[:1] + sorted([*found[1:], *planned], key=lambda each: each.seconds)


def _least_with_more(planned: Mapping[int, float], most: int) -> float:
    """The least seconds with more blocks kept, up to ``most``, than were planned: no block saves more than the most
    that one has saved so far. (The last gain may be less than that: plans of some numbers have other homes.)
    """
    if len(planned) < 2:
        return -math.inf
    gains = [(before - now) / (many - few) for (few, before), (many, now) in pairwise(planned.items())]
    return [*planned.values()][-1] - max(*gains, 0.0) * (most - max(planned))


def quickest_kept(
    trace: MemoryTrace, hardware: Hardware, schedule: str, plan: Callable[[MemoryTrace], Plan]
) -> tuple[Plan, float]:
    """The plan with the quickest number of kept blocks, and its seconds, of a trace with ``all_kept``. Raises
    BudgetExceeded if none fits, and MissingFigure for a machine that lacks a speed.
    """
    none, every = replace(trace, tiled=None, all_kept=None), trace.all_kept
    assert every is not None
    numbers = numbers_up_to(every.kept_blocks)
    try:
        with_kept(none, every, numbers[1])
    except ValueError:  # no walk through the blocks and back
        numbers = [0, every.kept_blocks]

    def keeping(number: int) -> MemoryTrace:
        return every if number == every.kept_blocks else with_kept(none, every, number)

    def plan_of(step: MemoryTrace) -> Plan | None:
        with suppress(BudgetExceeded):
            return plan(step)
        return None

    def seconds_of(_: MemoryTrace, plan: Plan, is_played: bool) -> float:
        return (step_seconds if is_played else bound_of)(plan, hardware, schedule)

    if found := quickest([(keeping, dict.fromkeys(numbers, 0.0))], plan_of, seconds_of):
        return found[0].plan, found[0].seconds
    return plan(none), math.inf
