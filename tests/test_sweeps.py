"""Sweeps: what is quick covers every value, with what is slow every two; with what is exhaustive it is all cases."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sweeps import covering, mark_slow, meeting

PRODUCT = [list(case) for case in itertools.product("abcde", "123", "xy")]


@pytest.mark.parametrize("start", range(10))
def test_every_value_is_there_in_as_few_cases_as_can_be(start: int) -> None:
    chosen = covering(PRODUCT, start=start)
    assert len(chosen) == 5 and {value for number in chosen for value in PRODUCT[number]} == set("abcde123xy")
    for axis in (1, 2):  # in turn, not one value for all that is left
        values = [PRODUCT[number][axis] for number in chosen]
        assert max(map(values.count, values)) - min(map(values.count, values)) <= 1


def test_tests_of_one_shape_meet_in_different_combinations() -> None:
    assert len({frozenset(covering(PRODUCT, start=start)) for start in range(30)}) > 3


def test_a_case_alone_is_chosen() -> None:
    assert covering([["x", "1"]], start=7, every=5) == {0}


def test_each_third_of_a_list_and_values_that_do_not_meet() -> None:
    assert covering([[str(value)] for value in range(8)], start=3, every=3) == {0, 3, 6}
    assert covering([[str(value)] for value in range(8)], start=5, every=3) == {2, 5}
    assert covering([["a", "1"], ["b", "2"], ["b", "3"]]) == {0, 1, 2}


def test_with_two_parameters_all_cases_meet() -> None:
    cases = [list(case) for case in itertools.product("abc", "12")]
    assert meeting(cases, {0, 3}) == {1, 2, 4, 5} and not meeting(PRODUCT, set(range(len(PRODUCT))))


class Case:
    """What a pytest item says of itself, and the marks it gets."""

    def __init__(self, folder: str, every: int | None, *values: str):
        self.path, self.nodeid = Path("tests", folder, "test_it.py"), f"test_it.py::test[{'-'.join(values)}]"
        self.callspec = SimpleNamespace(_idlist=values, params={"where": values[-1]})
        self.marks = {} if every is None else {"sweep": pytest.mark.sweep(every=every)}

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def add_marker(self, mark: Any) -> None:
        self.marks[mark.name] = mark


@pytest.mark.parametrize(
    ("folder", "every", "num_quick"), [("train", None, 5), ("train", 2, 3), ("planning", None, 30), ("planning", 1, 5)]
)
def test_tests_that_train_are_sweeps_and_others_if_they_say_so(folder: str, every: int | None, num_quick: int) -> None:
    cases: list[Any] = [Case(folder, every, *values) for values in PRODUCT]
    mark_slow(cases)
    quick, slow = ([case for case in cases if ("slow" in case.marks) is which] for which in (False, True))
    assert len(quick) == num_quick
    run = [case.callspec._idlist for case in cases if "exhaustive" not in case.marks]
    if folder == "train":
        pairs = [set(itertools.combinations(enumerate(values), 2)) for values in run]
        assert set().union(*pairs) == {p for values in PRODUCT for p in itertools.combinations(enumerate(values), 2)}
    assert len(run) == 30 if folder == "planning" and every is None else 15 <= len(run) < 25
    for case in slow[:1]:
        alone: Any = Case(folder, every, *case.callspec._idlist)
        mark_slow([alone])
        assert "slow" not in alone.marks, "asked for by its id it runs"


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
