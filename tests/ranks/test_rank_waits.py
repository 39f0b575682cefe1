"""A rank that does not come is waited for no longer than the timeout; and the pool that tests of ranks use: a dead or
hanging rank must not stop the suite.
"""

import os
import time

import pytest
import torch.distributed as dist

from tests.ranks.pool import Failure, Pools
from tests.ranks.test_rank_disagreements import small


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
