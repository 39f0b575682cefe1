"""The program of homes decides how many of the chunks that are alike take what; which of them do is told afterwards."""

from __future__ import annotations

from itertools import pairwise

from gemini.planning.homes import HomeChoice, _assigned
from gemini.planning.planes import GRAD, WEIGHTS
from gemini.planning.program import solve
from gemini.tiers import Tier

STATES = ("exp_avg", "exp_avg_sq")


def choice(*kinds: str, tier: Tier, chunks: range = range(8)) -> HomeChoice:
    return HomeChoice(chunks, dict.fromkeys(kinds, tier), kinds, {}, {})


def test_chunks_that_are_alike_take_what_excludes_nothing_of_theirs() -> None:
    """Those on the GPU are the first ones, those on a drive at even distances, and one plane has one home."""
    whole, weights = choice(WEIGHTS, GRAD, *STATES, tier=Tier.GPU), choice(WEIGHTS, tier=Tier.GPU)
    states, other = choice(*STATES, tier=Tier.NVME), choice(WEIGHTS, tier=Tier.CPU, chunks=range(8, 9))
    taken = [*_assigned([(weights, 3), (states, 2), (other, 1), (whole, 2)])]
    chunks = {id(each): [index for index, own in taken if own is each] for each in (whole, weights, states, other)}
    assert (chunks[id(whole)], chunks[id(weights)], chunks[id(other)]) == ([0, 1], [2, 3, 4], [8])
    on_drive = sorted(chunks[id(states)])
    assert on_drive == [3, 6], "two of six at the distance of three"
    planes = [(index, kind) for index, own in taken for kind in own.excludes]
    assert len(planes) == len({*planes})


def test_the_few_that_are_left_where_most_take_one_choice_are_no_neighbours() -> None:
    whole = choice(WEIGHTS, GRAD, *STATES, tier=Tier.GPU, chunks=range(12))
    taken = {times: {index for index, _ in _assigned([(whole, times)])} for times in (7, 8, 9, 12)}
    assert taken[7] == {*range(7)} and taken[12] == {*range(12)}, "as many as not are left, or none"
    for times in (8, 9):
        left = sorted({*range(12)} - taken[times])
        assert len(left) == 12 - times and left[0] > 0
        assert all(b - a > 1 for a, b in pairwise(left))


def test_a_column_is_taken_as_often_as_it_pays_and_may_be() -> None:
    """Within what there is room for and how often it may be; None where that is not enough."""
    rows = [({0: 2.0, 1: 1.0}, 7.0), ({0: 1.0, 1: 1.0}, 4.0)]
    assert solve([-3.0, -0.5], rows, [4, 4], gap=0.0, nodes=50) == {0: 3, 1: 1}
    assert solve([-3.0, -0.5], rows, [2, 4], gap=0.0, nodes=50) == {0: 2, 1: 2}
    assert solve([1.0, 1.0], [({0: -1.0}, -3.0)], [2, 4], gap=0.0, nodes=50) is None
