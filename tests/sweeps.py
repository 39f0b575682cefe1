"""Wide sweeps: the quick suite runs a few combinations of a test's parameters, the slow one those that let every two
values meet, and the others run on demand.

In the folders ``SWEPT``, where a case trains a model, a test that runs for all combinations of its parameters keeps a
covering choice of them in the quick suite, and the others are marked ``slow``. Every value of every parameter is in the
choice, as few times as possible: each program once, each precision in turn. Of placements (``where``) one is enough for
a test, and not the one where nothing moves: tests are many, and meet all of them between them. Of more than ``LONG``
values beside those of another parameter each second one will do. The choice begins elsewhere in each test, by the
test's name, so that tests of one shape meet in different combinations; the same cases are quick on every machine and in
every process.

``@pytest.mark.sweep(every=3)`` on a test, in any folder, keeps each third value of its parameters (both of two), for a
long list of one kind (lengths, states, draws); ``every=1`` keeps each, and makes a test of another folder a sweep.

Slow are as many of the other cases as it takes

- for every value of every parameter to be in a case of its test, all placements too;
- for every two values of two parameters to meet in some test of the file. Where placements and precisions have met in
  one test of a file, its next test need not repeat all of it;
- but for lists of more than ``LONG`` values (families, rules, states): of those each meets ``TURNS`` values of every
  other parameter, not all, and the next one others. On ranks, where a case is one of several processes, it meets one.
  ``@pytest.mark.sweep(every=3, turns=2)`` says another number.

Parameters of one name are one parameter in all tests of a file. What is left is ``exhaustive`` besides: ``pytest -m
slow`` runs it, ``make test-slow`` does not. So does what says itself that it is ``exhaustive``; what says that it is
``slow`` is never quick. A case that is asked for by its id (``pytest "test_x.py::test_y[ram-bf16]"``) is a family of
its own, and runs; a test that is asked for alone need not share with its file.
"""

import itertools
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import pytest

SWEPT = ("train", "ranks", "integrations")
LONG = 4
TURNS = {"ranks": 1}
"""By folder; two in others."""

Value = tuple[str, str]
"""The name of a parameter (or of several that come together), and the id of its value."""
Met = dict[Hashable, set[Value]]


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark as slow the cases of sweeps that the quick suite leaves out, and as exhaustive what the slow one does."""
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)
        elif hasattr(item, "callspec"):
            if item.path.parent.name in SWEPT or item.get_closest_marker("sweep"):
                families[item.nodeid.partition("[")[0]].append(item)
    met: dict[Any, Met] = defaultdict(lambda: defaultdict(set))
    for name, family in families.items():
        marker = family[0].get_closest_marker("sweep")
        how = marker.kwargs if marker else {}
        able = [number for number, item in enumerate(family) if not item.get_closest_marker("slow")]
        start, quick = zlib.crc32(name.encode()), set[int]()
        if able:
            cases = [family[number].callspec._idlist for number in able]
            one_of = axis_of("where", [family[number] for number in able])
            quick = {able[number] for number in covering(cases, start=start, every=how.get("every"), one_of=one_of)}
        path, names = family[0].path, names_of(family)
        named = [list(zip(names, item.callspec._idlist, strict=True)) for item in family]
        turns = how.get("turns", TURNS.get(path.parent.name, 2))
        wide = quick | meeting(named, quick, met[path], start=start, turns=turns)
        for number, item in enumerate(family):
            if number not in quick:
                item.add_marker(pytest.mark.slow)
            if number not in wide:
                item.add_marker(pytest.mark.exhaustive)


def names_of(family: Sequence[pytest.Item]) -> list[str]:
    """The names of the parameters of a test, in the order of ids; of those that come together all in one."""
    together: dict[str, str] = {}  # by the name of a parameter, all those that come with it
    for mark in family[0].iter_markers("parametrize"):
        names = re.findall(r"\w+", mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0]))
        together |= dict.fromkeys(names, ",".join(names))
    names = list(dict.fromkeys(together.get(name, name) for name in family[0].callspec.params))
    axes = [set(axis) for axis in zip(*(item.callspec._idlist for item in family), strict=True)]
    if len(names) != len(axes):
        names = [str(number) for number in range(len(axes))]
    own = family[0].nodeid.partition("[")[0]
    for number, (name, axis) in enumerate(zip(names, axes, strict=True)):
        counted = re.compile("|".join(rf"\b{part}\d+\b" for part in name.split(",")))
        if any(map(counted.search, axis)):  # "make0" is another thing in each test
            names[number] = f"{own}:{name}"
    return names


def axis_of(name: str, family: Sequence[pytest.Item]) -> int | None:
    """Which of the ids of a family's cases is the value of parameter ``name``; None if that has no id of its own."""
    values = [str(item.callspec.params.get(name)) for item in family]
    axes = zip(*(item.callspec._idlist for item in family), strict=True)
    return next((number for number, axis in enumerate(axes) if list(axis) == values), None)


def covering(
    cases: Sequence[Sequence[str]], *, start: int = 0, every: int | None = None, one_of: int | None = None
) -> set[int]:
    """The numbers of a few cases in which each value (or each ``every``-th one) of each parameter occurs.

    Where nothing is said of ``every``, it is each, or each second one of a long list beside another parameter. Always
    the case with most values that no chosen one has; of equals the one whose values were chosen least often, and of
    those the first, counted from ``start`` on. Of the values of parameter ``one_of`` one will do, other than "ram".
    """
    axes = [list(dict.fromkeys(values)) for values in zip(*cases, strict=True)]
    missing = set[tuple[int, str]]()
    for axis, values in enumerate(axes):
        if axis == one_of:
            moving = [value for value in values if value != "ram"] or values
            missing.add((axis, moving[start % len(moving)]))
        else:
            step = every or 1 + (len(values) > LONG and len(axes) > 1)
            missing |= {(axis, value) for value in values[start % min(step, len(values)) :: step]}
    pairs = [set(enumerate(case)) for case in cases]
    order = [(start + number) % len(cases) for number in range(len(cases))]
    chosen, uses = set[int](), Counter[tuple[int, str]]()
    while missing:
        best = max(order, key=lambda n: (len(missing & pairs[n]), -sum(uses[pair] for pair in pairs[n])))
        chosen.add(best)
        uses.update(pairs[best])
        missing -= pairs[best]
    return chosen


def meeting(
    cases: Sequence[Sequence[Value]], beside: set[int], met: Met | None = None, *, start: int = 0, turns: int = 2
) -> set[int]:
    """The numbers of a few more cases, so that with those ``beside`` all is met that is to be met.

    ``met`` is what has met in other tests, and is added to. Always the case with most that is missing; of equals the
    first, counted from ``start`` on.
    """
    met = defaultdict(set) if met is None else met
    sizes = Counter(name for name, _ in {value for case in cases for value in case})
    long = {name for name, size in sizes.items() if size > LONG}
    meetings = [list(meetings_of(case, long)) for case in cases]
    possible: Met = defaultdict(set)
    for key, value in itertools.chain(*meetings):
        possible[key].add(value)
    limit = {key: min(turns, len(values)) for key, values in possible.items()}
    own = {value for case in cases for value in case}.difference(*(cases[number] for number in beside))

    def gain(number: int) -> int:
        news = sum(value not in met[key] and len(met[key]) < limit[key] for key, value in meetings[number])
        return news + len(own.intersection(cases[number]))

    def choose(number: int) -> None:
        own.difference_update(cases[number])
        for key, value in meetings[number]:
            met[key].add(value)

    for number in beside:
        choose(number)
    order = [(start + number) % len(cases) for number in range(len(cases))]
    chosen = set[int]()
    while gain(best := max(order, key=gain)):
        chosen.add(best)
        choose(best)
    return chosen


def meetings_of(case: Sequence[Value], long: set[str]) -> Iterator[tuple[Hashable, Value]]:
    """What meets in a case: two values, or a value of a long list and one of those that it meets in turn."""
    for one, other in itertools.permutations(case, 2):
        if one[0] in long:
            yield (one, other[0]), other
        elif other[0] not in long:
            yield frozenset((one, other)), min(one, other)
