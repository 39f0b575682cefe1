"""Which blocks a stage has: by operations, and by seconds that were measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import gemini
from gemini.planning.parallel import balanced
from gemini.planning.trace import with_seconds
from tests.ranks.parallel_cases import config_for, llama, mesh_of
from tests.ranks.pipeline_cases import Pools, deep, ids_of


def test_stages_are_balanced() -> None:
    assert balanced([1, 1, 1, 1, 0], 2) == [(0, 2), (2, 4)]
    assert balanced([1, 1, 1, 1, 2], 2) == [(0, 3), (3, 4)]
    assert balanced([5, 1, 1, 1, 0], 2) == [(0, 1), (1, 4)]
    assert balanced([1, 1, 1, 0], 3) == [(0, 1), (1, 2), (2, 3)]


def timed(model: nn.Module, slow: int) -> Any:
    """A measured trace in which block ``slow`` takes five times as long as another one."""
    ids = ids_of(0, 0)
    with gemini.MemoryTracer(model) as tracer:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()
    slow_part = f"layers.{slow}."
    return with_seconds(
        tracer.trace, [5.0 if slow_part in f"{moment.module}." else 1.0 for moment in tracer.trace.moments]
    )


@pytest.mark.parametrize("slow", [0, 7])
def test_stages_are_balanced_by_measured_seconds(slow: int, tmp_path: Any) -> None:
    """By operations alone all blocks are the same."""
    config = config_for("ram", str(tmp_path))
    assert gemini.Pipeline(deep(), config, micro_batches=2, schedule="bfs", stages=2)._ranges == [(0, 4), (4, 8)]
    config = replace(config, trace=timed(deep().train(), slow))
    ((_, cut), _) = gemini.Pipeline(deep(), config, micro_batches=2, schedule="bfs", stages=2)._ranges
    assert cut < 4 if slow == 0 else cut > 4


def test_a_trace_of_another_model_balances_nothing(tmp_path: Any) -> None:
    config = replace(config_for("ram", str(tmp_path)), trace=timed(llama(num_hidden_layers=3).train(), 0))
    with pytest.raises(ValueError, match="with 3 blocks, and this LlamaForCausalLM has 8: trace the model"):
        gemini.Pipeline(deep(), config, micro_batches=2, schedule="bfs", stages=2)


def balanced_over_ranks(folder: str) -> list[tuple[int, int]]:
    config = replace(config_for("ram", folder), trace=timed(deep().train(), 7 * dist.get_rank()))
    pipe = gemini.Pipeline(deep(), config, mesh=mesh_of({"pp": 2}), micro_batches=2)
    pipe.step(input_ids=ids_of(0, 0), labels=ids_of(0, 0))
    return pipe._ranges


@pytest.mark.slow
def test_stages_over_ranks_are_balanced_by_the_first_ones_seconds(pool_of: Pools, tmp_path: Any) -> None:
    for (_, cut), _ in pool_of(2).run(balanced_over_ranks, str(tmp_path)):
        assert cut < 4
