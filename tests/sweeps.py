"""Wide sweeps: of a test that runs for every combination of its parameters, a few cases in the quick suite, all in slow.

``@pytest.mark.sweep`` on a test (or ``pytestmark = pytest.mark.sweep`` on a file) keeps a covering choice of its cases
and marks the others ``slow``: every value of every parameter is in the choice, as few times as possible, so each program
runs once in the quick suite, each placement and each precision in turn. Where the choice begins differs from test to
test, by the name of the test, so that tests of the same shape meet in different combinations. No random number is in it:
the same cases are quick on every machine and in every process.

``sweep(every=3)`` is for a long list of one kind (lengths, states, draws), where each value is a case of its own: every
third value is kept. Nothing is ever dropped: what is not quick is slow, and ``make test-slow`` runs it. Cases asked for
by their ids alone (``pytest "test_x.py::test_y[ram-bf16]"``) are a family of their own, and run.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark as slow the cases of sweeps that the quick suite leaves out."""
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            families[item.nodeid.partition("[")[0]].append(item)
    for name, family in families.items():
        every = family[0].get_closest_marker("sweep").kwargs.get("every", 1)
        quick = covering([item.callspec.indices for item in family], start=zlib.crc32(name.encode()), every=every)
        for number, item in enumerate(family):
            if number not in quick:
                item.add_marker(pytest.mark.slow)


def covering(cases: Sequence[Mapping[str, int]], *, start: int = 0, every: int = 1) -> set[int]:
    """The numbers of a few cases in which each value (or each ``every``-th one) of each parameter occurs.

    Always the case with most values that no chosen one has; of equals the first, counted from ``start`` on.
    """
    kept = {name: set(sorted({case[name] for case in cases})[::every]) for name in cases[0]}
    values = [{(name, value) for name, value in case.items() if value in kept[name]} for case in cases]
    order = [(start + number) % len(cases) for number in range(len(cases))]
    missing, chosen = set().union(*values), set[int]()
    while missing:
        best = max(order, key=lambda number: len(values[number] & missing))
        chosen.add(best)
        missing -= values[best]
    return chosen
