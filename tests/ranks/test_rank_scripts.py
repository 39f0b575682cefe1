"""Ranks that follow a script: one question a step, the bits of ranks that ask, and the errors of today."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks.pool import Failure, Pool, Pools
from tests.ranks.schedules import Event, Outcome, Play, run, until_error

_BEGIN, _STEP = 1, 1
"""The rounds of a step that follows a script: as it begins, and in ``optimizer.step()``. What is needed for the norm
travels at the end of backward."""


def both_ways(pool: Pool, play: Play) -> list[Outcome]:
    """With overlap, after comparing it with the same without."""
    plain, found = pool.run(run, replace(play, overlap=False, seed=-1)), pool.run(run, play)
    for one, other in zip(plain, found, strict=True):
        assert not any(one.scripted), "without overlap ranks ask each other"
        assert until_error(one) == until_error(other), "losses, norms, bits, or the error and what was before it"
        assert other.met == found[0].met or other.error, "the library's collectives are in one order"
    return found


by_whom = pytest.mark.parametrize("launched", [False, True], ids=["wire", "library"])
"""Whose the collectives are: messages of our own, or the library's, launched from one place as on GPUs."""


@by_whom
@pytest.mark.parametrize("where", ["roomy", "tight", "nvme", "checkpointed"])
def test_a_step_asks_at_its_beginning_and_its_end(where: str, launched: bool, pool_of: Pools, tmp_path: Path) -> None:
    """Whatever is gathered again, and however late messages are."""
    play = Play(
        num_steps=4, seed=1, tight=where != "roomy", precision="bf16" if where == "nvme" else "fp32",
        checkpointing=where == "checkpointed", nvme=str(tmp_path) if where == "nvme" else "", launched=launched,
    )  # fmt: skip
    for outcome in both_ways(pool_of(2), play):
        assert outcome.scripted == [False, True, True, True], "the first one says where gradients are complete"
        assert outcome.rounds[1:] == [_BEGIN + _STEP] * 3


@pytest.mark.slow
@by_whom
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_diverge_end_with_the_same_bits_and_follow_the_next_script(
    ranks: int, launched: bool, pool_of: Pools
) -> None:
    kinds = ("skip", "extra", "evaluate", "forward alone", "raise in forward")
    events = tuple(Event(kind, i % ranks, 2 + 2 * i, i) for i, kind in enumerate(kinds))
    play = Play(events, num_steps=3 + 2 * len(kinds), seed=ranks, tight=ranks == 2, launched=launched)
    for outcome in both_ways(pool_of(ranks), play):
        assert not outcome.error
        assert all(outcome.scripted[event.step + 1] for event in events)


@pytest.mark.sweep(every=2)
@by_whom
def test_a_rank_that_lacks_a_gradient_lets_the_others_go_on(launched: bool, pool_of: Pools) -> None:
    """It gathers what the others do; only the chunk without its gradient is never reduced behind backward."""
    for outcome in both_ways(pool_of(2), Play((Event("lacks a gradient", 0, 2, 3),), tight=True, launched=launched)):
        assert outcome.scripted == [False, True, True, True, True]


@pytest.mark.slow
def test_gradients_that_no_script_reduces_have_room(pool_of: Pools) -> None:
    """What a rank had no gradients of is left out of the next script, and kept whole until its end. What is gathered
    ahead leaves the room for it: were it called back when it is on the wire already, the script would end there. In one
    of eight runs it was; so there are twenty.
    """
    for seed in range(20):
        play = Play((Event("skip", 0, 2, 0), Event("extra", 1, 4, 1)), num_steps=5, seed=seed, tight=True)
        for outcome in pool_of(2).run(run, play):
            assert outcome.scripted == [False, True, True, True, True], seed


@pytest.mark.slow
@by_whom
def test_micro_batches_in_other_orders(launched: bool, pool_of: Pools) -> None:
    """F0 F1 B0 B1 on all ranks, and gradients that are added up, sent or not."""
    both = tuple(Event("two forwards", rank, 2) for rank in range(2))
    for outcome in both_ways(pool_of(2), Play(both, num_micro=2, tight=True, launched=launched)):
        assert all(outcome.scripted), "two forwards left their scripts, and the next step follows its own again"
    for outcome in both_ways(pool_of(2), Play(num_micro=2, no_sync=True, num_steps=3, launched=launched)):
        assert all(outcome.scripted[1:])


@by_whom
@pytest.mark.parametrize("kind", ["data ends", "raise in backward"])
def test_what_is_an_error_is_one_on_all_ranks(kind: str, launched: bool, pool_of: Pools) -> None:
    for outcome in both_ways(pool_of(2), Play((Event(kind, 1, 2, 3),), tight=True, launched=launched)):
        assert outcome.error == "RankMismatch"


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("mesh", [(2, 2), (2, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("where", ["roomy", "tight", "nvme", "twice"])
def test_replicas_add_up_once_per_step(mesh: tuple[int, int], where: str, pool_of: Pools, tmp_path: Path) -> None:
    """Also when a backward adds to what the one before has left, and with gradients on the drive."""
    play = Play(
        num_steps=4, seed=3, tight=where == "tight", precision="bf16" if where == "nvme" else "fp32",
        num_micro=2 if where == "twice" else 1, nvme=str(tmp_path) if where == "nvme" else "", replicas=mesh[0],
    )  # fmt: skip
    at_once = pool_of(mesh[0] * mesh[1]).run(run, replace(play, gradients="accumulate", tight=False))
    for outcome, other in zip(both_ways(pool_of(mesh[0] * mesh[1]), play), at_once, strict=True):
        assert outcome.norms == pytest.approx(other.norms, rel=2e-2 if play.precision == "bf16" else 1e-5)


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("kind", ["skip", "evaluate", "raise in forward", "data ends"])
@pytest.mark.parametrize("mesh", [(2, 2), (2, 1)], ids=str)
def test_a_rank_of_a_replica_that_diverges(mesh: tuple[int, int], kind: str, pool_of: Pools) -> None:
    for outcome in both_ways(pool_of(mesh[0] * mesh[1]), Play((Event(kind, 1, 2, 3),), seed=5, replicas=mesh[0])):
        assert outcome.error == ("RankMismatch" if kind == "data ends" else "")


@by_whom
@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("message", [2, 3, 4])
def test_a_rank_that_is_killed_is_lost_on_all_others(message: int, launched: bool, pool_of: Pools) -> None:
    """At every message: ``tests/hunts/script_hunt.py --kills``."""
    died, other = pool_of(2).outcomes(run, Play(num_steps=3, kill=(0, message), launched=launched))
    assert isinstance(died, Failure) and died.kind == "Died"
    assert isinstance(other, Failure) and other.kind == "RankLost"
