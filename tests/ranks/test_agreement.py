"""What ranks agree on is a pure function of what they want: tested like a game, without processes."""

from __future__ import annotations

import itertools
import random

import pytest

from gemini.ranks.agreement import Point, Request, choose

GATHER, READ, REDUCE, END, SYNC_GRADS, SAVE, BEGIN = (
    Point.GATHER, Point.READ, Point.REDUCE, Point.END_BACKWARD, Point.SYNC_GRADS, Point.SAVE_CHECKPOINT,
    Point.BEGIN_STEP,
)  # fmt: skip


@pytest.mark.parametrize(
    ("requests", "chosen"),
    [
        ([Request(GATHER, 3), Request(GATHER, 3)], (GATHER, 3)),
        ([Request(GATHER, 5), Request(GATHER, 3)], (GATHER, 3)),  # the first in the layout
        ([Request(REDUCE, 9), Request(GATHER, 3)], (GATHER, 3)),  # what someone needs to go on comes first
        ([Request(SYNC_GRADS), Request(GATHER, 3)], (GATHER, 3)),
        ([Request(SAVE), Request(READ, 7)], (READ, 7)),
        ([Request(READ, 0), Request(GATHER, 9)], (GATHER, 9)),
        ([Request(REDUCE, 7), Request(REDUCE, 6)], (REDUCE, 7)),  # backward goes from the end
        ([Request(END), Request(REDUCE, 6)], (REDUCE, 6)),
        ([Request(END), Request(END)], (END, 0)),
        (
            [Request(SYNC_GRADS), Request(SYNC_GRADS, 0, 5)],
            (SYNC_GRADS, 0),
        ),  # details may differ: they are what is exchanged
        ([Request(SYNC_GRADS), Request(END)], None),
        ([Request(SYNC_GRADS), Request(REDUCE, 2)], None),
        ([Request(SYNC_GRADS), Request(SAVE)], None),
        ([Request(SAVE), Request(SAVE), Request(SYNC_GRADS)], None),
        ([Request(BEGIN, 0, 5), Request(BEGIN, 0, 5)], (BEGIN, 0)),
        ([Request(BEGIN), Request(GATHER, 3)], (GATHER, 3)),
        ([Request(BEGIN), Request(SAVE)], (BEGIN, 0)),  # it goes on by itself, as far as it comes
        ([Request(BEGIN), Request(REDUCE, 6)], (BEGIN, 0)),
    ],
)
def test_choice(requests: list[Request], chosen: tuple[Point, int] | None) -> None:
    for order in itertools.permutations(requests):
        assert choose(order) == chosen, "who wants it does not matter"


@pytest.mark.parametrize("seed", range(200))
def test_programs_that_make_the_same_backwards_always_end(seed: int) -> None:
    """Each rank has a program of its own (other gathers, other orders of reduction); all must reach the end, and every
    chunk that any rank reduces is reduced on all before the backward is over.
    """
    rng = random.Random(seed)
    num_ranks = rng.choice((2, 3, 4))
    backwards = rng.randint(1, 3)
    programs: list[list[Request]] = []
    for _ in range(num_ranks):
        program: list[Request] = []
        for _ in range(backwards):
            chunks = [c for c in range(6) if rng.random() < 0.7]
            program += [Request(rng.choice((GATHER, READ)), c) for c in rng.sample(range(6), rng.randint(0, 6))]
            order = sorted(chunks, reverse=True) if rng.random() < 0.7 else rng.sample(chunks, len(chunks))
            program += [Request(REDUCE, c) for c in order] + [Request(END)]
        programs.append([*program, Request(SYNC_GRADS)])
    at = [0] * num_ranks
    rounds, reduced, ends = 0, 0, 0
    while any(at[r] < len(programs[r]) for r in range(num_ranks)):
        requests = [programs[r][at[r]] for r in range(num_ranks)]
        chosen = choose(requests)
        assert chosen is not None, (seed, requests)
        moved = [r for r in range(num_ranks) if requests[r].subject == chosen]
        assert moved, "somebody goes on in every round"
        ends += chosen[0] is END
        assert chosen[0] is not END or len(moved) == num_ranks
        reduced += chosen[0] is REDUCE
        for r in moved:
            at[r] += 1
        rounds += 1
        assert rounds <= sum(map(len, programs))
    assert ends == backwards
    wanted = sum(w.point is REDUCE for program in programs for w in program)
    assert reduced <= wanted
