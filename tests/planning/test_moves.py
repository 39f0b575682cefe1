"""Which chunks stay gathered: never more bytes than any other order of evictions, checked against all of them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import fetched_bytes, least_bytes, one_by_one, random_instance, sequence, walk

from gemini.errors import BudgetExceeded
from gemini.planning.policy import (
    EvictionPolicy,
    NextUse,
    cheapest_moves,
    first_of,
    moves_by_policy,
)
from tests.planning.policies import DoneThenLeastRecent, FirstInFirstOut, StaticFraction


@pytest.mark.sweep(every=4)
@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_the_optimum_on_random_instances(seed: int) -> None:
    rng = random.Random(seed)
    worst = 0.0
    for _ in range(250):
        accesses, sizes, room = random_instance(rng, equal=rng.random() < 0.3)
        moves = cheapest_moves(accesses, sizes=sizes, room=room)
        walk(moves, accesses, sizes, room)
        worst = max(worst, fetched_bytes(moves, sizes) / least_bytes(accesses, sizes, room))
    assert worst <= 1.02, worst


def test_next_use_never_moves_more_than_lru_or_fifo_on_equal_chunks() -> None:
    rng = random.Random(7)
    less = 0
    for _ in range(1000):
        accesses, sizes, room = random_instance(rng, equal=True)
        moved = {
            type(policy): fetched_bytes(moves_by_policy(accesses, sizes=sizes, room=room, policy=policy), sizes)
            for policy in (NextUse(), DoneThenLeastRecent(), FirstInFirstOut())
        }
        assert moved[NextUse] <= min(moved.values())
        less += moved[NextUse] < min(moved[DoneThenLeastRecent], moved[FirstInFirstOut])
    assert less > 100, "the traces tell the policies apart"


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from((NextUse, DoneThenLeastRecent, FirstInFirstOut)))
def test_every_policy_makes_legal_moves(rng: random.Random, policy: type[EvictionPolicy]) -> None:
    accesses, sizes, room = random_instance(rng, equal=False)
    walk(moves_by_policy(accesses, sizes=sizes, room=room, policy=policy()), accesses, sizes, room)


def test_a_palindrome_moves_what_the_closed_form_says() -> None:
    """Forward 0..n-1, backward n-1..0 with room for k chunks: n at first, and n - k again in backward."""
    for n in (2, 3, 4, 5, 8, 13, 21, 34):
        accesses = one_by_one([*range(n), *reversed(range(n))])
        for k in range(1, n + 1):
            moves = cheapest_moves(accesses, sizes=dict.fromkeys(range(n), 10), room=10 * k + 9)
            assert sum(len(m.fetch) for m in moves) == 2 * n - k


def test_frozen_chunks_stay_from_step_to_step() -> None:
    """In a steady state only what does not fit crosses: twice n - k of n frozen chunks with room for k."""
    n, k = 6, 4
    accesses = one_by_one([*range(n), *reversed(range(n))])
    sizes, lasting = dict.fromkeys(range(n), 10), frozenset(range(n))
    for moves in (
        cheapest_moves(accesses, sizes=sizes, room=10 * k, lasting=lasting),
        moves_by_policy(accesses, sizes=sizes, room=10 * k, policy=NextUse(), lasting=lasting),
    ):
        assert sum(len(m.fetch) for m in moves) == 2 * (n - k)
    roomy = cheapest_moves(accesses, sizes=sizes, room=10 * n, lasting=lasting)
    assert not any(m.fetch for m in roomy), "all stay, from the step before"


def test_what_costs_more_to_gather_stays() -> None:
    accesses = one_by_one([0, 1, 2, 0, 1])
    sizes = {0: 10, 1: 10, 2: 10}
    cheap_first = cheapest_moves(accesses, sizes=sizes, room=20, costs={0: 1, 1: 9, 2: 1})
    assert [m.fetch for m in cheap_first].count((1,)) == 1
    cheap_second = cheapest_moves(accesses, sizes=sizes, room=20, costs={0: 9, 1: 1, 2: 1})
    assert [m.fetch for m in cheap_second].count((0,)) == 1


def test_chunks_that_need_no_window_take_no_room() -> None:
    accesses = sequence((0, 7), (1, 7), (0, 7))
    moves = cheapest_moves(accesses, sizes={0: 10, 1: 10}, room=20)
    assert [m.fetch for m in moves] == [(0,), (1,), ()]


def test_a_moment_that_needs_more_than_there_is() -> None:
    with pytest.raises(BudgetExceeded, match="moment 1 needs 20 B .* raise .* by 5 B"):
        cheapest_moves(sequence((0,), (0, 1)), sizes={0: 10, 1: 10}, room=15)


def test_micro_batches_keep_what_the_next_one_reads_first() -> None:
    """The moves of one follow on those of the one before, and together they move no more than each for itself."""
    rng = random.Random(11)
    less = 0
    for _ in range(150):
        accesses, sizes, room = random_instance(rng, equal=rng.random() < 0.3)
        times, every = rng.randint(2, 4), frozenset(sizes)
        alone = cheapest_moves(accesses, sizes=sizes, room=room)
        again = cheapest_moves(accesses, sizes=sizes, room=room, lasting=every, renewed=every, times=times)
        whole = (*first_of(again, accesses, every), *again * (times - 1))
        walk(whole, [*accesses] * times, sizes, room)
        moved, without = fetched_bytes(whole, sizes), times * fetched_bytes(alone, sizes)
        assert moved <= 1.02 * without
        less += moved < without
    assert less > 75


def test_a_stretch_of_moments_is_gathered_for_once() -> None:
    accesses = sequence((0,), (0, 1), (1,), (1, 2), (0,))
    moves = cheapest_moves(accesses, sizes={0: 10, 1: 10, 2: 10}, room=20)
    assert moves == (((), (0,)), ((), (1,)), ((0,), ()), ((), (2,)), ((1, 2), (0,)))


def test_a_static_fraction_stays_until_nothing_else_will_do() -> None:
    policy = StaticFraction.of([10, 10, 10, 10], 0.5)
    assert policy.staying == {0, 1}
    accesses = one_by_one([0, 1, 2, 3, 3, 2, 1, 0])
    moves = moves_by_policy(accesses, sizes=dict.fromkeys(range(4), 10), room=30, policy=policy)
    assert [i for m in moves for i in m.fetch] == [0, 1, 2, 3, 2]
    tight = moves_by_policy(accesses, sizes=dict.fromkeys(range(4), 10), room=10, policy=policy)
    assert sum(len(m.fetch) for m in tight) == 7, "one slot: only 3, 3 is used twice"
    with pytest.raises(ValueError, match="between 0 and 1"):
        StaticFraction.of([1], 1.5)
