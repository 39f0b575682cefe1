"""What comes before what in a step, by the vector clocks of the runtime: copies wait for nothing that they need not.

Two works overlap where neither comes after the other: no stream orders them, no event, and no wait of the thread that
gave them. So this is what a GPU may do at once, whatever the times; how much of it a GPU does is a matter of its speed.
"""

from __future__ import annotations

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
    pytest.mark.skipif(not gpu_cases.ON_FAKE, reason="told by the runtime in host memory"),
]
NUM_LAYERS, WIDTH = 8, 64
OF_LAYER = 2 * 2 * WIDTH * WIDTH
"""Bytes of a layer's weights, a chunk."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))) for _ in range(NUM_LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def step(room: int, folder: Path) -> list[Any]:
    """A step of a model whose weights and states are on the host, with room on the GPU for so many layers."""
    from tests.fakegpu import computing

    memory = gemini.MemoryBudget(gpu=gpu_cases.budget(room * OF_LAYER), cpu="64MiB", nvme="64MiB", nvme_path=folder)
    config = gemini.GeminiConfig(memory=memory, placement=gemini.StaticPlacement(), max_chunk=2 * WIDTH * WIDTH)
    model = gemini.GeminiDDP(Layers(), config)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    assert len(world_of(model).chunks) == NUM_LAYERS
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16, device=model.device)
    steps: list[list[Any]] = []
    for _ in range(3):
        with computing.history(folder / "history") as told:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            world_of(model).settle()
        steps.append(told)
    return steps[-1]


def overlapping(work: Any, others: list[Any]) -> list[Any]:
    return [other for other in others if not work.comes_after(other) and not other.comes_after(work)]


def copies(step: list[Any], direction: str) -> list[Any]:
    return [work for work in step if work.what == direction]


def products(step: list[Any]) -> list[Any]:
    return [work for work in step if work.what == "aten.mm.default"]


def test_weights_of_the_next_layers_come_while_this_one_computes(tmp_path: Path, summary: Any) -> None:
    told = step(3, tmp_path)
    fetches, computed = copies(told, "host to device"), products(told)
    assert len(computed) == 2 * NUM_LAYERS + 4 * NUM_LAYERS - 1  # forward; two in backward, the first input needs none
    read = [fetch for fetch in fetches if any(product.comes_after(fetch) for product in computed)]
    beside = [len(overlapping(fetch, computed)) for fetch in read]
    summary(f"{len(read)} copies of weights, each beside so many of {len(computed)} products: {beside}")
    assert len(read) >= NUM_LAYERS and {fetch.num_bytes for fetch in read} == {OF_LAYER}
    assert all(number >= 2 for number in beside), "none waits for the layer before its own"


@pytest.mark.parametrize("room", [6, 12])
def test_gradients_leave_while_the_next_ones_are_computed(room: int, tmp_path: Path, summary: Any) -> None:
    """Where windows leave them room. With that of six layers of eight, backward needs all of them still when it begins:
    at first each gradient has to land before it goes on. Else those of a layer leave together, and of the last one as
    they come: one behind all that is computed.
    """
    told = step(room, tmp_path)
    leaving = [copy for copy in copies(told, "device to host") if copy.num_bytes == OF_LAYER // 2]  # and no sums
    computed = products(told)
    assert len(leaving) == 2 * NUM_LAYERS
    beside = [len(overlapping(gradient, computed)) for gradient in leaving]
    summary(f"room for {room} layers: copies of gradients, each beside so many of {len(computed)} products: {beside}")
    assert sum(number > 0 for number in beside) >= (2 * NUM_LAYERS - 1 if room > NUM_LAYERS else NUM_LAYERS)
