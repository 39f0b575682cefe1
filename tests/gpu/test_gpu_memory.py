"""On a GPU: the GPU budget is kept, by the ledger's own count and by what torch's allocator says it handed out.

The budget is the whole of what the process may take there: planes, windows, activations and workspaces. The last two
are measured here on the same model without Gemini, by the same allocator, and declared (``activations=``); so the sum
is arithmetic, and nothing may exceed it.
"""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.train.gradients.store import GradientStore
from tests.gpu import gpu_cases
from tests.gpu.gpu_cases import DEVICE, PLACEMENTS
from tests.train import helpers
from tests.train.test_memory import Stack
from tests.world import world_of

MIB = 2**20
SEGMENT = 20 * MIB
"""Torch's allocator has memory mapped in such pieces, where segments grow as Gemini asks for."""


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("where", PLACEMENTS)
def test_no_tier_goes_over_its_budget(where: str, precision: str, tmp_path: Path) -> None:
    model = gpu_cases.wrap(helpers.llama(), where, tmp_path, precision=precision)
    world = world_of(model)
    optimizer = helpers.adam(model)
    for step in range(4):
        gpu_cases.train(model, optimizer, [step])
        world.check()
    report = model.memory_report()
    for tier in ("gpu", "cpu", "nvme"):
        assert report[tier]["used"] <= report[tier]["peak"] <= report[tier]["budget"]
    if not PLACEMENTS[where].roomy:
        assert report["gpu"]["peak"] > 0.8 * report["gpu"]["budget"] - 2**24, "a budget that nobody comes near"


# ---- by torch's allocator --------------------------------------------------------------------------------------------

WIDTH, LAYERS, VOCAB = 1024, 8, 8192
MANY, FEW = (8, 256), (1, 16)
"""Shapes of a batch."""


def stack() -> Stack:
    """84M params: 1.0 GB of planes, layers of 17 MB in bf16."""
    torch.manual_seed(0)
    return Stack(WIDTH, LAYERS, VOCAB)


def tokens(card: torch.device, step: int, shape: tuple[int, int] = MANY) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(step)).to(card)


def activations_of(card: torch.device, shape: tuple[int, int] = MANY) -> int:
    """Bytes that forward and backward take beside the weights, each gradient let go as it comes."""
    gc.collect()  # a managed model that is not gone yet has its budget for a limit
    model = stack().to(card, torch.bfloat16)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    model(tokens(card, 0, shape)).backward()  # workspaces of libraries stay from here on, and are in every later count
    gpu_cases.forget_cached()
    before = torch.cuda.memory_allocated(card)
    model(tokens(card, 0, shape)).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(card) - before


def config_for(model: Any, on_gpu: float, gradients: str, activations: int) -> gemini.GeminiConfig:
    """A budget for the planes that live there (to one chunk), two modules' weights at a time, and the activations."""
    sizes = gpu_cases.chunk_sizes(model)
    gathered, _ = helpers.tight_bytes(model, "bf16")
    planes = int(14 * sum(sizes) * on_gpu) + (16 * max(sizes) if on_gpu else 0)
    placement = gemini.StaticPlacement(weights_on_gpu=on_gpu, optimizer_on_gpu=on_gpu)
    return gemini.GeminiConfig(
        memory=gemini.MemoryBudget(gpu=gpu_cases.budget(planes + 2 * gathered + activations + 8 * MIB), cpu="3GiB"),
        placement=placement, activations=activations, gradients=gradients, device=DEVICE,
    )  # fmt: skip


def train(model: Any, card: torch.device, *, in_backward: bool, shape: tuple[int, int] = MANY) -> None:
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3, step_in_backward=in_backward)
    for step in range(4):
        model(tokens(card, step, shape)).backward()
        if not in_backward:
            model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.memory_report()  # of a finished world
    torch.cuda.synchronize()


@pytest.mark.parametrize("gradients", ["retain", "transient"])
@pytest.mark.parametrize("on_gpu", [0.0, 0.5, 1.0])
def test_what_torch_handed_out_is_within_the_budget(
    on_gpu: float, gradients: str, card: torch.device, summary: Any
) -> None:
    activations = activations_of(card)
    gc.collect()
    model: Any = stack()
    params = sum(param.numel() for param in model.parameters())
    config = config_for(model, on_gpu, gradients, activations)
    budget = config.memory.bytes_of(gemini.Tier.GPU)
    gpu_cases.forget_cached()
    before, kept = torch.cuda.memory_allocated(card), torch.cuda.memory_reserved(card)
    model = gemini.GeminiDDP(model, config)
    train(model, card, in_backward=gradients == "transient")
    peak, reserved = torch.cuda.max_memory_allocated(card) - before, torch.cuda.max_memory_reserved(card) - kept
    report = model.memory_report()
    summary(
        f"card: {params / 1e6:.0f}M params, {on_gpu:.0%} on the GPU, {gradients}: budget {budget / MIB:.0f} MiB "
        f"({activations / MIB:.0f} of them activations), ledger's peak {report['gpu']['peak'] / MIB:.0f}, allocated "
        f"{peak / MIB:.0f}, reserved {reserved / MIB:.0f}"
    )
    assert report["gpu"]["peak"] <= budget
    managed = report["gpu"]["peak"] - report["gpu"]["holders"]["context"]
    assert peak <= managed + MIB, "torch handed out more than the ledger knows of"
    assert report["allocator"]["elsewhere"] + reserved <= budget, "fragments: more of the GPU is taken than the budget"


@pytest.mark.parametrize("gradients", ["retain", "accumulate"])
def test_gradients_that_land_as_late_as_they_can_are_within_the_budget(
    gradients: str, card: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits on the card until somebody waits for it: what they take there is in the budget, beside the memory that
    windows have for themselves. A short batch, so that activations leave no room that would hide it.
    """
    activations = activations_of(card, FEW)
    gc.collect()
    model: Any = stack()
    config = config_for(model, 0.0, gradients, activations)
    gpu_cases.forget_cached()
    before = torch.cuda.memory_allocated(card)
    may_land, land_piece = threading.Event(), GradientStore.land_piece
    reap, relieve = GradientStore._reap, GradientStore.relieve
    taken, waiting = [0], [0]

    def land_late(store: GradientStore, *args: Any) -> Any:
        if store._mover.in_worker:
            assert may_land.wait(60)
        return land_piece(store, *args)

    def let_land(store: GradientStore, want: Any) -> bool:
        waiting.append(len(store.landing))
        segments = [s["total_size"] for s in torch.cuda.memory_snapshot() if s["stream"] == of_windows]
        others = torch.cuda.memory_allocated(card) - before - ledger.held(gemini.Tier.GPU, "windows")
        taken.append(sum(segments) + others)
        may_land.set()
        try:
            return relieve(store, want)
        finally:
            if gradients == "retain":
                may_land.clear()

    monkeypatch.setattr(GradientStore, "land_piece", land_late)
    monkeypatch.setattr(GradientStore, "_reap", lambda store: may_land.is_set() and reap(store))
    monkeypatch.setattr(GradientStore, "relieve", let_land)
    model = gemini.GeminiDDP(model, config)
    world = world_of(model)
    ledger, of_windows = world.ledger, world.device._memory._stream.cuda_stream
    train(model, card, in_backward=False, shape=FEW)
    left = config.memory.bytes_of(gemini.Tier.GPU) - ledger.held(gemini.Tier.GPU, "context")
    # What the allocator rounds the segment of windows up by has its room beside (CUDA_SEGMENTS), in "context".
    left += SEGMENT - 1
    assert max(taken) <= left, f"{max(taken) / MIB:.1f} MiB were taken, {left / MIB:.1f} are left to the model"
    assert max(waiting) > 1, "some waited together"


def test_deleting_the_model_gives_the_card_back(card: torch.device) -> None:
    def once() -> None:
        placement = gemini.StaticPlacement(weights_on_gpu=0.5, optimizer_on_gpu=0.5)
        memory = gemini.MemoryBudget(gpu=gpu_cases.budget("2GiB"), cpu="3GiB")
        model: Any = gemini.GeminiDDP(stack(), gemini.GeminiConfig(memory=memory, placement=placement, device=DEVICE))
        train(model, card, in_backward=False)

    once()
    gc.collect()
    gpu_cases.forget_cached()
    before = torch.cuda.memory_allocated(card), torch.cuda.memory_reserved(card)
    once()
    gc.collect()
    gpu_cases.forget_cached()
    assert (torch.cuda.memory_allocated(card), torch.cuda.memory_reserved(card)) == before
