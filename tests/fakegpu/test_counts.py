"""What a step asks of CUDA, counted: bytes by direction are the plan's, all from page-locked memory, one launch for the
update of a chunk and one for each gradient. The host waits for nothing but the gradients' norm where updates are its
own work: once in a step, however many gradients and tiles there are.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from tests import models
from tests.gpu import gpu_cases
from tests.world import world_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_cases.ON_FAKE, reason="counted by the runtime in host memory"),
]


class Blocks(nn.Module):
    """Blocks of four params; transformers would ask its mask a question in each step."""

    def __init__(self, num_layers: int):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(96, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64, bias=False), nn.SiLU(), nn.Linear(64, 32, bias=False))
            for _ in range(num_layers)
        )
        self.head = nn.Linear(32, 96, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def loss_of_blocks(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids)


def loss_of_llama(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def counted(
    made: nn.Module, where: str, path: Path, loss_of: Callable[..., torch.Tensor] = loss_of_blocks
) -> tuple[Any, Counter[str]]:
    """The model, and what its third step asked for."""
    from tests.fakegpu import computing

    gc.collect()  # a model that ends waits for the GPU
    model = gpu_cases.wrap(made, where, path)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    ids = torch.arange(32, device=model.device).view(2, 16)
    before: dict[str, int] = {}
    for _ in range(3):
        model.memory_report()  # of a finished world
        before = computing.counts()
        loss_of(model, ids).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        world_of(model).settle()
    return model, Counter(computing.counts()) - Counter(before)


@pytest.mark.parametrize("num_layers", [2, 32])
def test_a_step_of_weights_and_states_on_the_host(num_layers: int, tmp_path: Path, summary: Any) -> None:
    model, counts = counted(Blocks(num_layers), "all on the host", tmp_path)
    moved = model.memory_report()["moved"]
    assert counts["host to device bytes"] == moved["cpu->gpu"] and counts["device to host bytes"] == moved["gpu->cpu"]
    assert counts["device to host copies"] == len(list(model.parameters())), "a gradient is one copy"
    chunks = len(world_of(model).chunks)
    assert counts["host to device copies"] <= 2 * chunks, "of a chunk in forward, and in backward"
    assert counts["launch sum_squares"] == counts["device to host copies"] and not counts["cudaMalloc"]
    assert_waits_for_norm(counts)
    summary(f"{num_layers} layers, all on the host: {_told(counts)}")


def assert_waits_for_norm(counts: Counter[str], others: int = 0) -> None:
    """Demand that sums of squares come to the host in one copy that it waits for, and nothing else is waited for."""
    assert counts["waits of the host"] == 1 + others
    assert counts["device to host pageable copies"] == 1 and not counts["host to device pageable copies"]


@pytest.mark.parametrize("num_layers", [2, 32])
def test_a_step_of_a_model_on_the_card(num_layers: int, tmp_path: Path, summary: Any) -> None:
    model, counts = counted(Blocks(num_layers), "all on the gpu", tmp_path)
    assert counts["launch update"] == len(world_of(model).chunks)
    assert counts["launch copy_grad"] == len(list(model.parameters()))
    assert not model.memory_report()["moved"] and not counts["host to device copies"]
    assert not [name for name in counts if "pageable" in name] and not counts["waits of the host"]
    assert counts["device to host copies"] == 1 and counts["device to host bytes"] == OF_FLAG
    assert counts["launch clip_factor"] == 1, "which tells of inf and NaN too"
    summary(f"{num_layers} layers, all on the GPU: {_told(counts)}")


OF_FLAG = 4
"""Bytes that tell the host, behind everything else, whether the gradients of a step were finite."""

OF_MASKS = 1
"""Bytes, copies and waits of a step in transformers itself, which asks its causal mask a question."""


@pytest.mark.parametrize("num_layers", [2, 32])
@pytest.mark.parametrize("where", ["all on the host", "all on the gpu"])
def test_a_step_of_a_llama(where: str, num_layers: int, tmp_path: Path, summary: Any) -> None:
    model, counts = counted(models.llama(num_hidden_layers=num_layers), where, tmp_path, loss_of_llama)
    moved, num_params = model.memory_report()["moved"], len(list(model.parameters()))
    assert counts["host to device bytes"] == moved.get("cpu->gpu", 0) and not counts["host to device pageable copies"]
    on_gpu = where == "all on the gpu"
    assert counts["device to host bytes"] == moved.get("gpu->cpu", 0) + OF_MASKS + OF_FLAG * on_gpu
    if on_gpu:
        assert counts["waits of the host"] == OF_MASKS and not counts["device to host pageable copies"]
        chunks = len(world_of(model).chunks)
        assert counts["launch update"] == chunks and counts["launch copy_grad"] == num_params
    else:
        assert counts["device to host copies"] == num_params + OF_MASKS, "a gradient is one copy"
        assert_waits_for_norm(counts, OF_MASKS)
    summary(f"Llama of {num_layers} layers, {where}: {_told(counts)}")


def _told(counts: Counter[str]) -> str:
    names = ["launches", "waits of the host", "waits of streams", "events"]
    names += [f"{way} {what}" for way in ("host to device", "device to host") for what in ("copies", "bytes")]
    return ", ".join(f"{name} {counts[name]:,}" for name in names)
