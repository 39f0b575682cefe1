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
    for outcome in found:
        state = sum(outcome.report["cpu"]["holders"][kind] for kind in ("weights", "residual", "exp_avg", "exp_avg_sq"))
        moved = outcome.report["moved"]
        assert moved["cpu->gpu"] >= state and moved["gpu->cpu"] >= state, "the whole shard went up and came back"
        assert outcome.report["gpu"]["holders"]["staging"] > 0
        assert outcome.report["gpu"]["peak"] <= outcome.report["gpu"]["budget"]
