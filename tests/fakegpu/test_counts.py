"""What a step asks of CUDA, counted: bytes by direction are the plan's, all from page-locked memory, one launch for the
update of a chunk and one for each gradient. The host waits for nothing but the gradients' norm where updates are its
own work: once in a step, however many gradients and tiles there are.
"""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
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


def counted(num_layers: int, where: str, path: Path) -> tuple[Any, Counter[str]]:
    """The model, and what its third step asked for."""
    from tests.fakegpu import computing

    gc.collect()  # a model that ends waits for the GPU
    model = gpu_cases.wrap(Blocks(num_layers), where, path)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    ids = torch.arange(32, device=model.device).view(2, 16)
    before: dict[str, int] = {}
    for _ in range(3):
        model.memory_report()  # of a finished world
        before = computing.counts()
        model(ids).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        world_of(model).settle()
    return model, Counter(computing.counts()) - Counter(before)


@pytest.mark.parametrize("num_layers", [2, 32])
def test_a_step_of_weights_and_states_on_the_host(num_layers: int, tmp_path: Path, summary: Any) -> None:
    model, counts = counted(num_layers, "all on the host", tmp_path)
    moved = model.memory_report()["moved"]
    assert counts["host to device bytes"] == moved["cpu->gpu"] and counts["device to host bytes"] == moved["gpu->cpu"]
    assert counts["device to host copies"] == len(list(model.parameters())), "a gradient is one copy"
    chunks = len(world_of(model).chunks)
    assert counts["host to device copies"] <= 2 * chunks, "of a chunk in forward, and in backward"
    assert counts["launch sum_squares"] == counts["device to host copies"] and not counts["cudaMalloc"]
    assert counts["waits of the host"] == counts["device to host pageable copies"] == 1, "sums of squares, in one copy"
    assert not counts["host to device pageable copies"]
    summary(f"{num_layers} layers, all on the host: {_told(counts)}")


@pytest.mark.parametrize("num_layers", [2, 32])
def test_a_step_of_a_model_on_the_card(num_layers: int, tmp_path: Path, summary: Any) -> None:
    model, counts = counted(num_layers, "all on the gpu", tmp_path)
    assert counts["launch update"] == len(world_of(model).chunks)
    assert counts["launch copy_grad"] == len(list(model.parameters()))
    assert not model.memory_report()["moved"] and not counts["host to device copies"]
    assert not [name for name in counts if "pageable" in name] and not counts["waits of the host"]
    assert counts["device to host copies"] == 1 and counts["device to host bytes"] == OF_FLAG
    assert counts["launch clip_factor"] == 1, "which tells of inf and NaN too"
    summary(f"{num_layers} layers, all on the GPU: {_told(counts)}")


OF_FLAG = 4
"""Bytes that tell the host, behind everything else, whether the gradients of a step were finite."""


def _told(counts: Counter[str]) -> str:
    names = ["launches", "waits of the host", "waits of streams", "events"]
    names += [f"{way} {what}" for way in ("host to device", "device to host") for what in ("copies", "bytes")]
    return ", ".join(f"{name} {counts[name]:,}" for name in names)
