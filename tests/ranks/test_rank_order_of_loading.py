"""Ranks that share a model, or have slices of it, load its state and the optimizer's in any order: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gemini
from tests import models
from tests.ranks.pool import Pools
from tests.train.helpers import POSITIONS, TOKENS, adam, train
from tests.train.test_order_of_loading import ORDERS


def masters(order: str, mesh: str) -> list[bool]:
    """Whether each master is what it was where the states were saved, on this rank."""
    made = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(mesh,))

    def start() -> Any:
        config = gemini.GeminiConfig(precision="bf16", device="cpu", memory=gemini.MemoryBudget(cpu="64MiB"))
        torch.manual_seed(0)
        plain = models.llama(num_attention_heads=2, num_key_value_heads=2, **POSITIONS, **TOKENS)
        model = gemini.GeminiDDP(plain, config, mesh=made)
        return model, adam(model)

    (first, optimizer), (second, others) = start(), start()
    train(first, optimizer, range(2))
    train(second, others, [3])
    ORDERS[order](second, others, first.state_dict(), optimizer.state_dict())
    losses = [train(model, of, range(2, 4)) for model, of in ((first, optimizer), (second, others))]
    names = [name for name, _ in first.named_parameters()]
    same = [torch.equal(first.full_param(n, torch.float32), second.full_param(n, torch.float32)) for n in names]
    return [*same, losses[0] == losses[1]]


@pytest.mark.parametrize("mesh", ["dp", "tp"])
@pytest.mark.parametrize("order", ["optimizer_first", "as_torch_does", "in_parts", "twice", "model_first"])
def test_any_order_gives_the_same_bits(order: str, mesh: str, pool_of: Pools) -> None:
    for found in pool_of(2).run(masters, order, mesh):
        assert all(found)
