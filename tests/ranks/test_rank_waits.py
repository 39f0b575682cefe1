"""A rank that does not come is waited for no longer than the timeout; and the pool that tests of ranks use: a dead or
hanging rank must not stop the suite.
"""

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


def groups_of_refused() -> tuple[int, int]:
    """Before and after wraps that are refused; each error is kept, as a debugger keeps it."""
    import pytest
    from torch import nn

    import gemini

    before, kept = num_groups(0), []
    for _ in range(2):
        with pytest.raises(gemini.BudgetExceeded) as refused:
            gemini.GeminiDDP(nn.Linear(16, 16), gemini.GeminiConfig(device="cpu", memory=gemini.MemoryBudget(cpu=1000)))
        kept.append(refused)
    return before, num_groups(0)


def test_a_refused_wrap_leaves_no_group(pool_of: Pools) -> None:
    for before, after in pool_of(2).run(groups_of_refused):
        assert before == after
