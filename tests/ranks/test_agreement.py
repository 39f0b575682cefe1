"""What ranks agree on is a pure function of what they want, tested like a game, without processes.

And the handshake of a checkpoint: all ranks do their part or none goes on, and what one of them fails with all raise.
"""

import errno
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import gemini
from gemini.ranks.agree import Facts, Handshake, Point, Request, agree, choose
from gemini.ranks.wire import Wire
from tests.ranks.pool import Pools

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


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_programs_that_make_the_same_backwards_always_end(first: int) -> None:
    for seed in range(first, first + 50):
        assert_end(seed)


def assert_end(seed: int) -> None:
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


def test_alone_the_steps_are_taken_as_they_are() -> None:
    ranks = Handshake(None, "saving")
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.step(lambda: 3, lambda given: [*given, 4]) == [3, 4]
    with pytest.raises(OSError, match="full"):
        ranks.step(lambda: _raise(OSError(errno.ENOSPC, "full")), lambda given: given)


def _raise(error: BaseException) -> Any:
    raise error


def outcome(work: Callable[[int], Any], conclude: Callable[[list[Any]], Any]) -> str:
    ranks = Handshake(dist.group.WORLD, "saving it")
    concluded: list[Any] = []

    def noted(given: list[Any]) -> Any:
        concluded.append(given)
        return conclude(given)

    try:
        result = str(ranks.step(lambda: work(ranks.rank), noted))
    except BaseException as e:
        result = f"{type(e).__name__}: {e}"
    again = ranks.step(lambda: ranks.rank, sum)  # and nobody is out of step afterwards
    return f"{result}; concluded {len(concluded)} times; {again}"


def steps() -> list[str]:
    return [
        outcome(lambda rank: rank * 10, lambda given: [*given, "done"]),
        outcome(lambda rank: _raise(OSError(errno.ENOSPC, "no space")) if rank == 1 else rank, sum),
        outcome(lambda rank: _raise(gemini.PlanMismatch("another")) if rank else rank, sum),
        outcome(lambda rank: _raise(KeyError("x")) if rank == 2 else rank, sum),
        outcome(lambda rank: _raise(KeyboardInterrupt("stop")) if rank == 1 else rank, sum),
        outcome(lambda rank: rank, lambda given: _raise(gemini.StorageError("not there"))),
    ]


def test_what_fails_on_one_rank_fails_on_all(pool_of: Pools) -> None:
    said = pool_of(4).run(steps)
    for rank, (went, full, another, key, stopped, end) in enumerate(said):
        ending = f"; concluded {{}} times; {0 + 1 + 2 + 3}"
        once, never = ending.format(1 if rank == 0 else 0), ending.format(0)
        assert went == "[0, 10, 20, 30, 'done']" + once
        assert full == "StorageError: saving it failed on rank 1: no space" + never
        assert another == "PlanMismatch: saving it failed on rank 1 (and 2 more ranks): another" + never
        assert key == "GeminiError: saving it failed on rank 2: KeyError: 'x'" + never
        interrupt = "GeminiError: saving it failed on rank 1: KeyboardInterrupt: stop"
        assert stopped == ("KeyboardInterrupt: stop" if rank == 1 else interrupt) + never
        assert end == "StorageError: saving it failed on rank 0: not there" + once


def unsaid(*text: str) -> str:
    """A rank whose facts cannot be said."""
    wire = Wire(dist.new_group(backend="gloo"))
    try:
        agree(wire, "writing", lambda: Facts({"it": _raise(ValueError(*text)) if wire.rank else 1}))
    except Exception as e:
        agree(wire, "going on", lambda: Facts({"it": 1}))  # nobody is out of step
        return f"{type(e).__name__}: {e}"
    return "agreed"


def test_a_rank_that_cannot_say_its_facts_refuses(pool_of: Pools) -> None:
    first, second = pool_of(2).run(unsaid, "a meta tensor")
    assert first == "RankMismatch: rank 1 refused writing: a meta tensor"
    assert second == "ValueError: a meta tensor"
    # One without words, as an interrupt is, by its name.
    assert pool_of(2).run(unsaid)[0] == "RankMismatch: rank 1 refused writing: ValueError"
