"""``step_scope``: the micro-batches of a step are one step of the schedule, in whatever order they come."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.planning.placement import bytes_per_tier
from gemini.tiers import Tier
from tests.ranks.schedules import Blocks, Injected
from tests.train.helpers import manage
from tests.world import world_of

ORDERS = {"two forwards": "ffbb", "interleaved": "fffbfbbb", "in turn": "fbfb", "the last one first": "ffBB"}
"""f: the next forward; b: the backward of the earliest that had none; B: of the latest."""


def tight(folder: Path) -> Any:
    """All planes on the drive, and room for two of five blocks."""
    cpu: Any = "64MiB"
    for _ in range(2):
        torch.manual_seed(0)
        homes = {"weights_on_nvme": 1.0, "optimizer_on_nvme": 1.0}
        settings = {"precision": "fp32", "max_chunk": 4000, "gradients": "accumulate"}
        model = manage(Blocks(), folder, cpu=cpu, homes=homes, **settings)
        decision = world_of(model).decision
        cpu = bytes_per_tier(decision.problem, decision.placement)[Tier.CPU] + 32 * 1024
    return model


def passes(model: Any, order: str, step: int) -> None:
    losses = []
    for number, what in enumerate(order):
        if what == "f":
            generator = torch.Generator().manual_seed(100 * step + number)
            losses.append(model(torch.randn(4, 32, generator=generator)))
        else:
            losses.pop(0 if what == "b" else -1).backward()


def train(folder: Path, order: str, *, scoped: bool) -> tuple[list[torch.Tensor], int, list[int]]:
    """Weights, the bytes read from the drive in the last step, and by step the accesses that were not foreseen."""
    model = tight(folder)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    foresight, strange = world_of(model).foresight, []
    for step in range(4):
        with model.step_scope() if scoped else contextlib.nullcontext():
            passes(model, order, step)
            strange.append(foresight.schedule.num_deviations if foresight.schedule is not None else -1)
        optimizer.step()
        optimizer.zero_grad()
    read = model.memory_report()["moved"]["nvme->cpu"]
    return list(model.state_dict().values()), read, strange


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_is_foreseen(order: str, tmp_path: Path) -> None:
    plain, bytes_without, _ = train(tmp_path, ORDERS[order], scoped=False)
    scoped, bytes_with, strange = train(tmp_path, ORDERS[order], scoped=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, scoped, strict=True))
    assert strange == [-1, 0, 0, 0], "the first one is recorded"
    assert order == "in turn" or bytes_with < bytes_without
    print(f"{order}: {bytes_without} bytes read in a step without a scope, {bytes_with} in one")


def test_a_scope_that_changes_is_recorded_again(tmp_path: Path) -> None:
    """And a step outside of it goes by its own schedule."""
    model = tight(tmp_path)
    foresight = world_of(model).foresight
    for step, order in enumerate(["ffbb", "ffbb", "ffffbbbb", "ffffbbbb", "ffffbbbb", "ffffbbbb"]):
        with model.step_scope():
            passes(model, order, step)
        passes(model, "fb", step)
        model.zero_grad()
    with model.step_scope():
        passes(model, "ffffbbbb", 9)
        assert foresight.schedule.num_deviations == 0


def test_a_scope_in_a_scope_is_refused_and_one_that_fails_ends(tmp_path: Path) -> None:
    model = tight(tmp_path)
    with pytest.raises(gemini.GeminiError, match="inside step_scope"), model.step_scope(), model.step_scope():
        pass
    with pytest.raises(Injected), model.step_scope():
        passes(model, "ff", 0)
        raise Injected
    passes(model, "fb", 0)
    with model.step_scope():
        passes(model, "ffbb", 1)
    world_of(model).check()


def test_a_step_goes_through_its_phases() -> None:
    """A recomputation is a forward inside a backward; what ends in order leaves nothing to look for."""
    seen: list[tuple[bool, bool]] = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((state.in_forward, state.in_backward))
            return super().forward(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Looks(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False).sum()

    config = gemini.GeminiConfig(precision="fp32", memory=gemini.MemoryBudget(cpu="64MiB"))
    model = gemini.GeminiDDP(Net(), config)
    state = world_of(model).state
    loss = model(torch.ones(2, 4))
    assert not state.computing and state.num_open == 1, "its backward is still to come"
    loss.backward()
    assert seen == [(True, False), (True, True)]
    assert not state.computing and state.num_open == 0 and state.backward_number == 1
    with pytest.raises(RuntimeError), torch.no_grad():
        model(torch.ones(2, 5))
    assert not state.computing
