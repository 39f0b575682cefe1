"""A rank that waits for one that is in no call of the model is told where that one stands; and the pool that tests of
ranks use: a dead or hanging rank must not stop the suite.
"""

import os
import threading
import time
import types
import warnings

import pytest
import torch
import torch.distributed as dist

import gemini
from gemini.ranks import watch
from tests.ranks.pool import Failure, Pools
from tests.ranks.test_rank_disagreements import backward, small
from tests.world import world_of


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenths of a second instead of seconds."""
    for name, seconds in {"TICK_S": 0.05, "OUTSIDE_S": 0.2, "WAIT_S": 0.4}.items():
        monkeypatch.setattr(watch, name, seconds)


def evaluate_on_rank_0_then_barrier(trained: bool) -> tuple[list[str], str]:
    """Rank 1 goes to a barrier at once: what rank 0 hears while it waits, and what it hears in the end."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as heard:
        hurry(patch)
        warnings.simplefilter("always")
        model = small()
        if trained:
            optimizer = gemini.HybridAdam(model.parameters())
            backward(model)
            optimizer.step()
        error = ""
        try:
            if dist.get_rank() == 0:
                with torch.no_grad():
                    model(torch.ones(1, 16))
            dist.barrier()
        except (gemini.RankLost, RuntimeError) as e:
            error = str(e)
        return [str(warning.message) for warning in heard], error


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("trained", [False, True])
def test_who_waits_for_a_rank_in_a_barrier_is_told_so(trained: bool, pool_of: Pools) -> None:
    pool = pool_of(2)
    pool.renew(timeout=5)
    heard, error = pool.run(evaluate_on_rank_0_then_barrier, trained)[0]
    place = "in evaluate_on_rank_0_then_barrier, in torch.distributed.barrier"
    assert heard and all("s for rank 1 in a forward or backward" in text for text in heard), heard
    assert "must come to the next model call" in heard[-1] and "test_rank_waits.py:" in heard[-1] and place in heard[-1]
    assert "rank 1 did not answer" in error and "rank 1 was in no call of this model, but at" in error, error
    assert place in error


def slow_on_one_rank() -> tuple[int, int]:
    """Rank 1 takes its time inside of a forward, at work of ours, then outside, and comes: only the last is told."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as heard:
        hurry(patch)
        warnings.simplefilter("always")
        model = small()
        sleep = model[1].register_forward_hook(lambda *_: time.sleep(1.2 * dist.get_rank()))
        backward(model)
        sleep.remove()
        inside = len(heard)
        if dist.get_rank() == 1:
            work = types.FunctionType((lambda: time.sleep(1.2)).__code__, {"__name__": "gemini.train.x", "time": time})
            work()  # a checkpoint that takes its time, say
        backward(model, 1)
        inside = len(heard)
        if dist.get_rank() == 1:
            time.sleep(1.2)
        backward(model, 2)
        outside = len(heard) - inside
        named = sum(thread.name == "gemini-watch" for thread in threading.enumerate())
        world_of(model).close()
        assert named - sum(thread.name == "gemini-watch" for thread in threading.enumerate()) == 1
        return inside, outside


def test_a_slow_rank_is_named_only_where_it_is_outside(pool_of: Pools) -> None:
    first, second = pool_of(2).run(slow_on_one_rank)
    assert first[0] == 0 and first[1] >= 1, "told once, or again after twice the time"
    assert second == (0, 0)


def models_in_other_orders() -> tuple[list[str], str]:
    """Each rank waits in another one of two models."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as heard:
        hurry(patch)
        warnings.simplefilter("always")
        both = [small(), small()]
        try:
            with torch.no_grad():
                for model in both[:: 1 - 2 * dist.get_rank()]:
                    model(torch.ones(1, 16))
        except gemini.RankLost as e:
            return [str(warning.message) for warning in heard], str(e)
        return [], ""


def test_ranks_that_wait_in_different_models_are_told_so(pool_of: Pools) -> None:
    pool = pool_of(2)
    pool.renew(timeout=5)
    for heard, error in pool.run(models_in_other_orders):
        place = "in forward, waiting in a forward or backward (it needs weights) of another model"
        assert any(place in text for text in heard) and "did not answer" in error, (heard, error)


def wrapped_alone() -> None:
    if dist.get_rank() == 0:
        small()


def test_a_model_that_one_rank_wraps_alone_is_not_waited_for_longer_than_the_timeout(pool_of: Pools) -> None:
    pool = pool_of(2)
    pool.renew(timeout=4)
    alone, other = pool.outcomes(wrapped_alone)
    assert other is None and isinstance(alone, Failure) and alone.kind == "RankLost"
    assert "making a process group for the model failed" in alone.text


def my_rank(offset: int) -> int:
    import torch.distributed as dist

    return dist.get_rank() + offset


def fail_on(rank: int) -> None:
    if my_rank(0) == rank:
        raise ValueError("on purpose")


def die_on(rank: int) -> None:
    if my_rank(0) == rank:
        os._exit(7)


def hang_on(rank: int) -> None:
    if my_rank(0) == rank:
        time.sleep(60)


def num_groups(more: int) -> int:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    for _ in range(more):
        dist.new_group()
    return len(c10d._world.pg_names)


def test_a_renewed_pool_has_no_groups_of_before(pool_of: Pools) -> None:
    pool = pool_of(2)
    assert pool.run(num_groups, 3) == [4, 4]
    pool.renew()
    assert pool.run(num_groups, 0) == [1, 1] and pool.run(my_rank, 0) == [0, 1]


@pytest.mark.slow
def test_a_pool_runs_reports_and_survives_failures(pool_of: Pools) -> None:
    pool = pool_of(2)
    assert pool.run(my_rank, 10) == [10, 11]
    outcomes = pool.outcomes(fail_on, 1)
    assert outcomes[0] is None and isinstance(outcomes[1], Failure) and outcomes[1].kind == "ValueError"
    with pytest.raises(AssertionError, match="rank 0 failed: ValueError"):
        pool.run(fail_on, 0)
    pool = pool_of(2)  # a failed run ends its pool: ranks may stand at different points
    assert [outcome and outcome.kind for outcome in pool.outcomes(die_on, 1)] == [None, "Died"]
    pool = pool_of(2)
    assert pool.run(my_rank, 0) == [0, 1]  # they have started: that takes as long as it takes
    hung, fine = pool.outcomes(hang_on, 0, seconds=6)
    assert hung.kind == "Hung" and "hang_on" in hung.traceback and fine is None, "and says where"
