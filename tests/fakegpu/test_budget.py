"""A GPU budget against the fake device's own account: the context, kernels, fragments and what the driver refuses.

``FAKEGPU_STEPS=2000`` makes the hunts for fragments as long as that, ``FAKEGPU_SEEDS=100`` as many.
"""

from __future__ import annotations

import gc
import math
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.memory.devices import cuda
from gemini.planning.planes import ADAM
from gemini.planning.working import allocator_bytes
from tests.gpu import gpu_cases
from tests.world import world_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_cases.ON_FAKE, reason="told by the runtime in host memory"),
]
MIB = 2**20
NUM_STEPS, NUM_SEEDS = (int(os.environ.get(f"FAKEGPU_{name}", few)) for name, few in (("STEPS", 40), ("SEEDS", 4)))


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
    torch._C._accelerator_setAllocatorSettings("")  # as if nobody had said anything


class Wide(nn.Module):
    """Layers of a few MiB, whose activations have sizes as batches have."""

    def __init__(self, width: int = 512, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x.float().square().mean()


def wrap(gpu: int, path: Path, activations: int = 0, model: nn.Module | None = None, **more: Any) -> Any:
    memory = gemini.MemoryBudget(gpu=gpu, cpu="256MiB", nvme="256MiB", nvme_path=path)
    return gemini.GeminiDDP(model or Wide(), gemini.GeminiConfig(memory=memory, activations=activations, **more))


def test_the_context_is_in_the_ledger(card: torch.device, tmp_path: Path) -> None:
    model = wrap(gpu_cases.budget("64MiB"), tmp_path)
    report = model.memory_report()
    of_allocator = allocator_bytes(ADAM, torch.cuda.get_device_capability(card))
    assert report["gpu"]["holders"]["context"] == 500 * MIB + cuda.CUDA_KERNELS + of_allocator
    assert report["allocator"]["elsewhere"] == 500 * MIB


def test_the_advice_for_a_gpu_holds_the_context(card: torch.device, tmp_path: Path) -> None:
    with pytest.raises(gemini.BudgetExceeded, match="raise the gpu budget to at least 88[78] MiB"):
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
            wrap(budget, tmp_path, activations=600 * MIB)
    finally:
        computing.set_memory(before, card.index)
        del own


def test_the_allocator_is_limited_while_the_model_lives(card: torch.device, tmp_path: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()  # what earlier tests had is handed out again without asking
    model = wrap(gpu_cases.budget("64MiB"), tmp_path)
    with pytest.raises(torch.OutOfMemoryError, match="allowed"):
        torch.empty(400 * MIB, dtype=torch.uint8, device=card)
    del model
    gc.collect()
    assert torch.empty(400 * MIB, dtype=torch.uint8, device=card).is_cuda


OF_THE_PROGRAM = 16 * MIB
"""Its own tensors in :func:`random_steps`, at most."""


def random_steps(model: Any, rng: random.Random, steps: int, width: int, most: int) -> None:
    """Batches of drawn sizes, now and then the largest, and tensors of the program that come and go."""
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
    kept: list[torch.Tensor] = []
    for step in range(steps):
        rows = most if step % 20 == 10 else int(2 ** rng.uniform(3, math.log2(most)))
        kept = kept[-3:] + [torch.empty(rng.randint(1, 8) * MIB // 2, dtype=torch.uint8, device=model.device)]
        model(torch.ones(rows, width, dtype=torch.bfloat16, device=model.device)).backward()
        if rng.random() < 0.7:
            optimizer.step()
            optimizer.zero_grad()
    model.memory_report()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_what_was_said_to_fit_never_runs_out(seed: int, card: torch.device, tmp_path: Path, summary: Any) -> None:
    """Drawn widths, depths, chunks, placements and batches, in a budget of the MiB that a refusal says it needs."""
    from tests.fakegpu import computing

    rng = random.Random(seed)
    width, layers = rng.choice([250, 384, 512, 1000]), rng.randint(2, 8)
    most = int(2 ** rng.uniform(7, 12))
    activations = int(most * width * (7 * layers + 16)) + OF_THE_PROGRAM
    how: dict[str, Any] = {
        "placement": gemini.StaticPlacement(weights_on_gpu=rng.choice([0.0, 0.3, 1.0])),
        "max_chunk": rng.choice([10**5, 10**6, 10**7]), "offload_activations": rng.choice([None, "cpu"]),
    }  # fmt: skip
    budget = gpu_cases.budget(activations)
    for _ in range(2):
        try:
            model = wrap(budget, tmp_path, activations, Wide(width, layers), **how)
            break
        except gemini.BudgetExceeded as e:
            told = re.search(r"raise the gpu budget to at least (\d+) MiB", str(e))
            assert told is not None, str(e)
            budget = int(told[1]) * MIB
    computing.peak(card.index, restart=True)
    random_steps(model, rng, NUM_STEPS, width, most)
    taken = computing.peak(card.index)
    summary(
        f"seed {seed}: {layers} layers of {width}, at most {most} rows: {taken / MIB:.0f} of {budget / MIB:.0f} MiB"
    )
    assert taken <= budget


@pytest.mark.parametrize("segments", ["fixed", "expandable"], indirect=True)
def test_random_steps_never_take_more_than_the_budget(
    card: torch.device, segments: str, tmp_path: Path, summary: Any
) -> None:
    """Batches of drawn sizes, among them the largest that was declared; tensors of the program that come and go."""
    from tests.fakegpu import computing

    most = 4096
    activations = most * 512 * 2 * 14 + 32 * MIB
    budget = gpu_cases.budget(OF_THE_PROGRAM + activations)
    before = {one["address"] for one in torch.cuda.memory_snapshot()}  # of tests before this one
    model = wrap(budget, tmp_path, activations, placement=gemini.StaticPlacement(weights_on_gpu=0.5))
    computing.peak(card.index, restart=True)
    random_steps(model, random.Random(7), NUM_STEPS, 512, most)
    grow = [one["is_expandable"] for one in torch.cuda.memory_snapshot() if one["address"] not in before]
    assert any(grow) == (segments == "expandable")
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
        world_of(model).settle()
        world_of(model).check()
    assert len(told) > 1
