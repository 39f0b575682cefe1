"""Several ranks stream the updates of their shards through their devices: the same bits as in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks.cases import Job, run
from tests.ranks.pool import Pool
from tests.ranks.test_rank_exactness import assert_same_bits


@pytest.mark.parametrize("gradients", ["retain", "transient"])
def test_streaming_changes_no_bit(gradients: str, pool_of: Callable[[int], Pool], tmp_path: Path) -> None:
    job = Job("llama", num_steps=3, gradients=gradients, path=str(tmp_path), reads=False)
    wanted = pool_of(2).run(run, replace(job, tight=False))
    found = pool_of(2).run(run, replace(job, where="streamed"))
    assert_same_bits(found, wanted, gradients)
    states = 12 * found[0].report["params"]
    for way in ("cpu->gpu", "gpu->cpu"):
        assert sum(outcome.report["moved"][way] for outcome in found) >= states, "every shard went up and came back"
    for outcome in found:
        assert outcome.report["gpu"]["holders"]["staging"] > 0
        assert outcome.report["gpu"]["peak"] <= outcome.report["gpu"]["budget"]
