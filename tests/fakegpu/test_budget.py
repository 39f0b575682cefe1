"""A GPU budget against the fake device's own account: the context, kernels, fragments and what the driver refuses.

``FAKEGPU_STEPS=2000`` makes the hunt for fragments as long as that.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.memory.devices import cuda_budget
from tests.gpu import gpu_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_cases.ON_FAKE, reason="told by the runtime in host memory"),
]
MIB = 2**20
NUM_STEPS = int(os.environ.get("FAKEGPU_STEPS", 40))


@pytest.fixture
def card() -> Iterator[torch.device]:
    """The GPU of this process with nothing on it."""
    gc.collect()
    gpu_cases.forget_cached()
    yield torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def segments(request: pytest.FixtureRequest) -> Iterator[str]:
    """How torch's allocator takes memory of the driver: in blocks of fixed sizes, or mapped page by page."""
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{request.param == 'expandable'}")
    yield request.param
    gc.collect()
    gpu_cases.forget_cached()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


class Wide(nn.Module):
    """Layers of a few MiB, whose activations have sizes as batches have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x.float().square().mean()


def wrap(gpu: int, path: Path, activations: int = 0, **more: Any) -> Any:
    memory = gemini.MemoryBudget(gpu=gpu, cpu="256MiB", nvme="256MiB", nvme_path=path)
    return gemini.GeminiDDP(Wide(), gemini.GeminiConfig(memory=memory, activations=activations, **more))


def test_the_context_is_in_the_ledger(card: torch.device, tmp_path: Path) -> None:
    model = wrap(gpu_cases.budget("64MiB"), tmp_path)
    report = model.memory_report()
    assert report["gpu"]["holders"]["context"] == 500 * MIB + cuda_budget.KERNELS + cuda_budget.WORKSPACES
    assert report["allocator"]["elsewhere"] == 500 * MIB


def test_the_advice_for_a_gpu_holds_the_context(card: torch.device, tmp_path: Path) -> None:
    with pytest.raises(gemini.BudgetExceeded, match="raise the gpu budget to at least 75[78] MiB"):
        wrap(64 * MIB, tmp_path)


def test_who_else_holds_memory_is_said(card: torch.device, tmp_path: Path) -> None:
    from tests.fakegpu import computing

    own = torch.empty(2000 * MIB, dtype=torch.uint8, device=card)
    before, budget = torch.cuda.get_device_properties(card).total_memory, 1500 * MIB
    try:
        computing.set_memory(3200 * MIB, card.index)
        with pytest.warns(UserWarning, match=r"tensors of this program that are not managed hold 1\.95\d* GiB"):
            model = wrap(budget, tmp_path)
        del model
        computing.set_memory(2520 * MIB, card.index)
        with pytest.raises(gemini.BudgetExceeded, match="are needed at once: free some, or lower the gpu budget"):
            wrap(budget, tmp_path, activations=700 * MIB)
    finally:
        computing.set_memory(before, card.index)
        del own


def test_the_allocator_is_limited_while_the_model_lives(card: torch.device, tmp_path: Path) -> None:
    model = wrap(gpu_cases.budget("64MiB"), tmp_path)
    with pytest.raises(torch.OutOfMemoryError, match="allowed"):
        torch.empty(400 * MIB, dtype=torch.uint8, device=card)
    del model
    gc.collect()
    assert torch.empty(400 * MIB, dtype=torch.uint8, device=card).is_cuda


@pytest.mark.parametrize("segments", ["fixed", "expandable"], indirect=True)
def test_random_steps_never_take_more_than_the_budget(
    card: torch.device, segments: str, tmp_path: Path, summary: Any
) -> None:
    """Batches of drawn sizes, among them the largest that was declared; tensors of the program that come and go."""
    from tests.fakegpu import computing

    rng, most = random.Random(7), 4096
    activations = most * 512 * 2 * 14 + 32 * MIB
    budget = gpu_cases.budget(16 * MIB + activations)
    model = wrap(budget, tmp_path, activations, placement=gemini.StaticPlacement(weights_on_gpu=0.5))
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
    computing.peak(card.index, restart=True)
    kept: list[torch.Tensor] = []
    for step in range(NUM_STEPS):
        rows = most if step % 20 == 10 else int(2 ** rng.uniform(3, 12))
        kept = kept[-3:] + [torch.empty(rng.randint(1, 8) * MIB // 2, dtype=torch.uint8, device=card)]
        model(torch.ones(rows, 512, dtype=torch.bfloat16, device=card)).backward()
        if rng.random() < 0.7:
            optimizer.step()
            optimizer.zero_grad()
    model.memory_report()
    assert any(one["is_expandable"] for one in torch.cuda.memory_snapshot()) == (segments == "expandable")
    taken = computing.peak(card.index)
    told = f"{taken / MIB:.0f} MiB of the GPU taken at most, the budget is {budget / MIB:.0f}"
    summary(f"{NUM_STEPS} steps, {segments} segments: {told}")
    assert 0.5 * budget < taken <= budget


@pytest.mark.parametrize("segments", ["fixed", "expandable"], indirect=True)
@pytest.mark.parametrize("weights_on_gpu", [0.0, 0.5])
def test_a_driver_that_gives_no_more_memory(
    weights_on_gpu: float, card: torch.device, segments: str, tmp_path: Path
) -> None:
    """From any call on: torch's error, and when there is memory again training goes on."""
    from tests.fakegpu import computing

    def make() -> Any:
        placement = gemini.StaticPlacement(weights_on_gpu=weights_on_gpu)
        return wrap(gpu_cases.budget("64MiB"), tmp_path, 48 * MIB, placement=placement)

    def steps(model: Any) -> None:
        optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
        for _ in range(2):
            model(torch.ones(2048, 512, dtype=torch.bfloat16, device=card)).backward()
            optimizer.step()
            optimizer.zero_grad()

    told = []
    for after in range(5):
        gc.collect()
        gpu_cases.forget_cached()
        model = None
        computing.refuse_after(after)
        try:
            model = make()
            steps(model)
        except torch.OutOfMemoryError as e:
            told.append(str(e))
        finally:
            computing.refuse_after(None)
        model = make() if model is None else model
        model.zero_grad()
        steps(model)
        model._gemini_engine.drain()
        model._gemini_engine.check_invariants()
    assert len(told) > 1
