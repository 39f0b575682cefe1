"""Rounds in which all contenders take turns, so that a busy machine hurts everybody alike; medians over rounds, and
ratios that are taken inside a round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)


def in_turn(names: Iterable[T], rounds: int, warm_up: int = 1, order: str = "rotated") -> Iterator[tuple[int, T]]:
    """The number of the round and whose turn it is; what warms up has numbers below 0.

    ``order``: "rotated" begins each round with another one; "reversed" goes back and forth; "shuffled" so that nobody
    always comes after the same one, whose writes the drive may still be busy with; "as given".
    """
    everyone = list(names)
    for number in range(-warm_up, rounds):
        turn, order_now = number + warm_up, everyone
        if order == "rotated":
            order_now = everyone[turn % len(everyone) :] + everyone[: turn % len(everyone)]
        elif order == "shuffled":
            order_now = random.Random(turn).sample(everyone, len(everyone))
        elif order == "reversed" and number % 2:
            order_now = everyone[::-1]
        for name in order_now:
            yield number, name


def measure_in_turn(
    names: Sequence[T], rounds: int, measure: Callable[[T], float], warm_up: int = 1
) -> dict[T, list[float]]:
    """What ``measure`` says of each, by round."""
    found: dict[T, list[float]] = {name: [] for name in names}
    for number, name in in_turn(names, rounds, warm_up):
        value = measure(name)
        if number >= 0:
            found[name].append(value)
    return found


def seconds_of(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    return statistics.median(ratios(numerators, denominators))


class Spread(NamedTuple):
    """Median, least and most of some measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def told(self, digits: int = 3) -> str:
        """``1.234 (1.1-1.3)``"""
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}-{self.most:.{digits}f})"
