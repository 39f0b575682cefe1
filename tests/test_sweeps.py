"""Sweeps: quick cases cover every value, slow ones every two in a file; with the exhaustive ones it is all cases."""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sweeps import covering, mark_slow, meeting, names_of

PRODUCT = [list(case) for case in itertools.product("abcde", "123", "xy")]


@pytest.mark.parametrize("start", range(10))
def test_every_value_is_there_in_as_few_cases_as_can_be(start: int) -> None:
    chosen = covering(PRODUCT, start=start, every=1)
    assert len(chosen) == 5 and {value for number in chosen for value in PRODUCT[number]} == set("abcde123xy")
    for axis in (1, 2):  # in turn, not one value for all that is left
        values = [PRODUCT[number][axis] for number in chosen]
        assert max(map(values.count, values)) - min(map(values.count, values)) <= 1


def test_tests_of_one_shape_meet_in_different_combinations() -> None:
    assert len({frozenset(covering(PRODUCT, start=start)) for start in range(30)}) > 3


@pytest.mark.parametrize("start", range(3))
def test_of_a_long_list_beside_others_each_second_one(start: int) -> None:
    chosen = covering(PRODUCT, start=start)
    assert len(chosen) == 3 and {PRODUCT[number][0] for number in chosen} >= {*"abcde"[start % 2 :: 2]}
    assert {PRODUCT[number][1] for number in chosen} == {*"123"} and {PRODUCT[number][2] for number in chosen} == {
        *"xy"
    }
    assert len(covering([[value] for value in "abcdefgh"], start=start)) == 8, "beside no other"


def test_a_case_alone_is_chosen() -> None:
    assert covering([["x", "1"]], start=7, every=5) == {0}


def test_each_third_of_a_list_and_values_that_do_not_meet() -> None:
    assert covering([[str(value)] for value in range(8)], start=3, every=3) == {0, 3, 6}
    assert covering([[str(value)] for value in range(8)], start=5, every=3) == {2, 5}
    assert covering([["a", "1"], ["b", "2"], ["b", "3"]]) == {0, 1, 2}


def named(*axes: str, **others: str) -> list[list[tuple[str, str]]]:
    """All cases of the parameters a, b (by their places) and others, whose values are letters."""
    lists = dict(zip("ab", axes, strict=False)) | others
    return [list(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def test_every_two_values_meet_in_some_test_of_a_file() -> None:
    cases, met = named("xyz", "12"), defaultdict[Hashable, set[tuple[str, str]]](set)
    assert meeting(cases, {0, 3}, met) == {1, 2, 4, 5}
    assert not meeting(cases, {0, 3, 4}, met), "each value is in one, and what meets has met in the test before"
    assert len(meeting(cases, {0, 3}, met)) == 1, "of z there was none yet"
    assert len(meeting(named("xyz", c="12"), {0, 3}, met)) == 4, "another parameter"
    assert len(meeting(named("xyz", "12"), set())) == 6


@pytest.mark.parametrize("turns", [1, 2])
def test_of_a_long_list_each_meets_some_of_the_others(turns: int) -> None:
    cases = named("pqrstuvw", "xyz", c="12")
    run = [cases[number] for number in meeting(cases, set(), turns=turns)]
    pairs = {pair for case in run for pair in itertools.permutations(case, 2)}
    assert {frozenset(pair) for pair in pairs if pair[0][0] != "a" != pair[1][0]} == {
        frozenset(pair) for pair in itertools.product([("b", v) for v in "xyz"], [("c", v) for v in "12"])
    }
    for letter in "pqrstuvw":
        for name in "bc":
            assert len({other for one, other in pairs if one == ("a", letter) and other[0] == name}) >= turns
    assert len(run) <= 8 * turns + 2 and meeting(cases, set(), start=3) == meeting(cases, set(), start=3)


class Case:
    """What a pytest item says of itself, and the marks it gets."""

    def __init__(self, folder: str, every: int | None, *values: str, test: str = "test"):
        self.path, self.nodeid = Path("tests", folder, "test_it.py"), f"test_it.py::{test}[{'-'.join(values)}]"
        first = {f"p{number}": value for number, value in enumerate(values[:-1])}
        self.callspec = SimpleNamespace(_idlist=values, params=first | {"where": values[-1]})
        self.marks = {} if every is None else {"sweep": pytest.mark.sweep(every=every)}

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def iter_markers(self, name: str) -> Iterator[Any]:
        return iter([pytest.mark.parametrize(("p0",), ["it"])])

    def add_marker(self, mark: Any) -> None:
        self.marks[mark.name] = mark


@pytest.mark.parametrize(
    ("folder", "every", "num_quick"), [("train", None, 3), ("train", 2, 3), ("planning", None, 30), ("planning", 1, 5)]
)
def test_tests_that_train_are_sweeps_and_others_if_they_say_so(folder: str, every: int | None, num_quick: int) -> None:
    cases: list[Any] = [Case(folder, every, *values) for values in PRODUCT]
    mark_slow(cases)
    quick, slow = ([case for case in cases if ("slow" in case.marks) is which] for which in (False, True))
    assert len(quick) == num_quick
    run = [case for case in cases if "exhaustive" not in case.marks]
    assert len(run) == 30 if folder == "planning" and every is None else 10 <= len(run) < 15
    if folder == "train":
        again: list[Any] = [Case(folder, every, *values, test="test_other") for values in PRODUCT]
        mark_slow([*cases, *again])
        assert sum("exhaustive" not in case.marks for case in again) < len(run)
    for case in slow[:1]:
        alone: Any = Case(folder, every, *case.callspec._idlist)
        mark_slow([alone])
        assert "slow" not in alone.marks, "asked for by its id it runs"


def test_what_says_itself_that_it_is_slow_or_exhaustive() -> None:
    cases: list[Any] = [Case("train", None, *values) for values in PRODUCT]
    for case in cases:
        case.add_marker(pytest.mark.slow)
    cases[0].add_marker(pytest.mark.exhaustive)
    del cases[0].marks["slow"]
    mark_slow(cases)
    assert all("slow" in case.marks for case in cases), "none of them is quick"
    assert 10 <= sum("exhaustive" not in case.marks for case in cases) < 15


def test_a_name_of_one_test_is_not_that_of_another() -> None:
    """Ids that pytest makes of a name and a number say nothing, and two that come together are one parameter."""
    case: Any = Case("train", None, "a", "b1", "ram")
    case.callspec.params = {"p0": "a", "b": None, "where": "ram"}
    assert names_of([case]) == ["p0", "test_it.py::test:b", "where"]
    case.iter_markers = lambda name: iter([pytest.mark.parametrize("p0, b", [])])
    case.callspec._idlist = ("a-b", "ram")
    assert names_of([case]) == ["p0,b", "where"]


@pytest.mark.parametrize("start", range(4))
def test_of_placements_one_will_do_but_not_where_nothing_moves(start: int) -> None:
    places = ["ram", "disk", "standin"]
    (chosen,) = covering([[place] for place in places], start=start, one_of=0)
    assert places[chosen] != "ram" and covering([["ram"]], start=start, one_of=0) == {0}
    cases: list[Any] = [Case("train", None, kind, place) for kind in "ab" for place in places]
    mark_slow(cases)
    quick = [case.callspec._idlist for case in cases if "slow" not in case.marks]
    assert sorted(kind for kind, _ in quick) == ["a", "b"] and {place for _, place in quick} != {"ram"}


@pytest.mark.parametrize("last", ["x", "y"])
@pytest.mark.parametrize("first", ["a"])
def test_pytest_says_the_values_of_a_case(first: str, last: str, request: pytest.FixtureRequest) -> None:
    assert sorted(request.node.callspec._idlist) == [first, last]
