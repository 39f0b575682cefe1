"""Sweeps: what is quick covers every value, what is not is slow, and both together are all cases."""

from __future__ import annotations

import itertools

import pytest

from tests.sweeps import covering

pytest_plugins = ["pytester"]

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
    assert covering([[str(value)] for value in range(8)], start=5, every=3) == {0, 3, 6}
    assert covering([["a", "1"], ["b", "2"], ["b", "3"]]) == {0, 1, 2}


TESTS = """
import pytest

@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("where", ["ram", "disk"])
@MARK
def test_sweep(where, precision):
    pass
"""


@pytest.mark.parametrize(
    ("folder", "mark", "num_quick"),
    [("train", "", 2), ("planning", "", 4), ("planning", "@pytest.mark.sweep(every=1)", 2)],
)
def test_the_quick_and_the_slow_ones_are_all(folder: str, mark: str, num_quick: int, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "from tests import sweeps\n"
        "def pytest_configure(config):\n"
        "    for marker in ('slow', 'sweep'):\n"
        "        config.addinivalue_line('markers', marker)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    sweeps.mark_slow(items)\n"
    )
    (pytester.mkdir(folder) / "test_it.py").write_text(TESTS.replace("@MARK", mark))
    found = [pytester.inline_run("-m", what).listoutcomes()[0] for what in ("not slow", "slow")]
    assert [len(passed) for passed in found] == [num_quick, 4 - num_quick]
    assert len({report.nodeid for passed in found for report in passed}) == 4
    alone = pytester.inline_run("-m", "not slow", *[report.nodeid for report in found[1][:1]])
    assert len(alone.listoutcomes()[0]) == (1 if found[1] else num_quick)
