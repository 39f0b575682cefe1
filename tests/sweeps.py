"""Wide sweeps: the quick suite runs a few combinations of a test's parameters, the slow one those that let every two
values meet, and the others run on demand.

In the folders ``SWEPT``, where a case trains a model, a test that runs for all combinations of its parameters keeps a
covering choice of them in the quick suite, and the others are marked ``slow``. Every value of every parameter is in the
choice, as few times as possible: each program once, each precision in turn. Of placements (``where``) one is enough for
a test, and not the one where nothing moves: tests are many, and meet all of them between them. The choice begins
elsewhere in each test, by the test's name, so that tests of one shape meet in different combinations; the same cases
are quick on every machine and in every process.

``@pytest.mark.sweep(every=3)`` on a test, in any folder, keeps each third value of its parameters (both of two), for a
long list of one kind (lengths, states, draws), and ``every=1`` makes a test of another folder a sweep.

Slow are as many of the other cases as it takes for every two values of two parameters to meet: all of them for one or
two parameters. What is left of three and more is ``exhaustive`` besides: ``pytest -m slow`` runs it, ``make test-slow``
does not. A case that is asked for by its id (``pytest "test_x.py::test_y[ram-bf16]"``) is a family of its own, and
runs.
"""

import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest

SWEPT = ("train", "ranks", "integrations")


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark as slow the cases of sweeps that the quick suite leaves out, and as exhaustive what the slow one does."""
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            if item.path.parent.name in SWEPT or item.get_closest_marker("sweep"):
                families[item.nodeid.partition("[")[0]].append(item)
    for name, family in families.items():
        marker = family[0].get_closest_marker("sweep")
        every = marker.kwargs["every"] if marker else 1
        cases = [item.callspec._idlist for item in family]
        quick = covering(cases, start=zlib.crc32(name.encode()), every=every, one_of=axis_of("where", family))
        wide = quick | meeting(cases, quick)
        for number, item in enumerate(family):
            if number not in quick:
                item.add_marker(pytest.mark.slow)
            if number not in wide:
                item.add_marker(pytest.mark.exhaustive)


def axis_of(name: str, family: Sequence[pytest.Item]) -> int | None:
    """Which of the ids of a family's cases is the value of parameter ``name``; None if that has no id of its own."""
    values = [str(item.callspec.params.get(name)) for item in family]
    axes = zip(*(item.callspec._idlist for item in family), strict=True)
    return next((number for number, axis in enumerate(axes) if list(axis) == values), None)


def covering(cases: Sequence[Sequence[str]], *, start: int = 0, every: int = 1, one_of: int | None = None) -> set[int]:
    """The numbers of a few cases in which each value (or each ``every``-th one) of each parameter occurs.

    Always the case with most values that no chosen one has; of equals the one whose values were chosen least often, and
    of those the first, counted from ``start`` on. Of the values of parameter ``one_of`` one will do, other than "ram".
    """
    axes = [list(dict.fromkeys(values)) for values in zip(*cases, strict=True)]
    missing = set[tuple[int, str]]()
    for axis, values in enumerate(axes):
        if axis == one_of:
            moving = [value for value in values if value != "ram"] or values
            missing.add((axis, moving[start % len(moving)]))
        else:
            missing |= {(axis, value) for value in values[start % min(every, len(values)) :: every]}
    pairs = [set(enumerate(case)) for case in cases]
    order = [(start + number) % len(cases) for number in range(len(cases))]
    chosen, uses = set[int](), Counter[tuple[int, str]]()
    while missing:
        best = max(order, key=lambda n: (len(missing & pairs[n]), -sum(uses[pair] for pair in pairs[n])))
        chosen.add(best)
        uses.update(pairs[best])
        missing -= pairs[best]
    return chosen


def meeting(cases: Sequence[Sequence[str]], beside: set[int]) -> set[int]:
    """The numbers of a few more cases, so that with those ``beside`` every two values meet that do so in any case."""
    if len(cases[0]) < 3:  # two equal values of one parameter meet nobody
        return {*range(len(cases))} - beside
    pairs = [set(itertools.combinations(enumerate(case), 2)) for case in cases]
    missing = set().union(*pairs).difference(*(pairs[number] for number in beside))
    chosen = set[int]()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(missing & pairs[number]))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
