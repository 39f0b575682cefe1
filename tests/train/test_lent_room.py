"""Windows borrow the room that activations leave free, give it back before these come, and change no bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.memory.movement.room import ACTIVATIONS
from gemini.planning.costs import Speeds
from gemini.planning.hardware import machine
from gemini.planning.plan import Plan, borrowable
from gemini.planning.working import activations_at
from gemini.testing.standin import StandinDevice
from gemini.tiers import Tier
from gemini.train.setup import problem as setup
from tests import models
from tests.planning.policies import check_plan
from tests.train.helpers import batch, train
from tests.world import world_of

LENGTH = 384


def make(*, frozen: bool) -> Any:
    torch.manual_seed(0)
    model = models.llama(hidden_size=64, intermediate_size=128, vocab_size=96, num_hidden_layers=8)
    if frozen:
        for name, param in model.named_parameters():
            param.requires_grad_("input_layernorm" in name)
    return model


def step(model: Any, seed: int) -> torch.Tensor:
    return model(**batch(seed, rows=1, length=LENGTH)).loss  # type: ignore[no-any-return]


def managed(lends: bool, *, frozen: bool, monkeypatch: pytest.MonkeyPatch, overlap: bool = True) -> Any:
    monkeypatch.setattr(StandinDevice, "windows_give_back", lends)
    monkeypatch.setattr(StandinDevice, "keeps_windows", False)
    trace = gemini.trace(make(frozen=frozen), batch(0, rows=1, length=LENGTH))
    made = planned(trace, lends)
    memory = gemini.MemoryBudget(gpu=made.problem.budgets[Tier.GPU], cpu=made.problem.budgets[Tier.CPU])
    config = gemini.GeminiConfig(device="standin", placement=made, overlap=overlap, memory=memory)
    return gemini.GeminiDDP(make(frozen=frozen), config)


def planned(trace: gemini.MemoryTrace, lends: bool) -> Plan:
    """All weights in host memory, and room for some chunks beside activations."""
    chunk = 2 * max(c.numel for c in trace.layout().chunks)
    there = {Tier.GPU: max(activations_at(trace, offloaded=False)) + 5 * chunk, Tier.CPU: 2**28}
    problem = setup.pose_problem(trace, there, precision="bf16", lends=lends)
    return setup.Planner(trace, Speeds.typical()).best(problem, gemini.StaticPlacement(), None)


def optimizer(model: Any) -> Any:
    return gemini.HybridAdam([p for p in model.parameters() if p.requires_grad], lr=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_fewer_bytes_move_and_the_bits_are_the_same(
    frozen: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = managed(True, frozen=frozen, monkeypatch=monkeypatch, overlap=overlap)
    world = world_of(model)
    ledger, foresight = world.ledger, world.foresight
    trace, most = world.trace, world.problem.activations
    needed = activations_at(trace, offloaded=False)
    acquired, seen = foresight.acquired, []

    def checked(index: int) -> None:
        acquired(index)
        at = foresight.schedule._at
        world.give_back()  # as the manager does next
        held = ledger.held(Tier.GPU, ACTIVATIONS)
        assert held >= (most if at is None else needed[at]), "what activations take now is theirs"
        assert ledger.used(Tier.GPU) <= ledger.budget(Tier.GPU)
        seen.append(most - held)

    monkeypatch.setattr(foresight, "acquired", checked)
    losses = train(model, optimizer(model), range(3), step)
    moved = model.memory_report()["moved"]["cpu->gpu"]
    world_of(model).check()
    assert max(seen) > 0, "something was lent"
    with torch.no_grad():
        step(model.eval(), 5)  # no step: nothing is known of what it takes
        assert ledger.held(Tier.GPU, ACTIVATIONS) == most
    plain = managed(False, frozen=frozen, monkeypatch=monkeypatch, overlap=overlap)
    assert train(plain, optimizer(plain), range(3), step) == losses
    assert world_of(plain).held(Tier.GPU, ACTIVATIONS) == most
    fixed = plain.memory_report()["moved"]["cpu->gpu"]
    assert moved < 0.8 * fixed if frozen else moved <= fixed


def test_another_step_than_planned_borrows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the schedule loses its place the whole room for activations is theirs from the next read on."""
    model = managed(True, frozen=True, monkeypatch=monkeypatch)
    train(model, optimizer(model), range(2), step)
    ledger = world_of(model).ledger
    rotated = (torch.ones(1, 4, 16, dtype=torch.bfloat16),) * 2
    for layer in (7, 2):
        model.model.layers[layer](torch.zeros(1, 4, 64, dtype=torch.bfloat16), position_embeddings=rotated)
    assert ledger.held(Tier.GPU, ACTIVATIONS) == world_of(model).problem.activations
    world_of(model).check()


def test_plans_with_lent_room_keep_it_and_are_read_back(tmp_path: Path) -> None:
    trace = gemini.trace(make(frozen=True), batch(0, rows=1, length=LENGTH))
    made, fixed = planned(trace, True), planned(trace, False)
    problem = made.problem
    check_plan(made)
    lent = borrowable(problem, made.placement, made.accesses)
    assert Plan.from_json(made.to_json()) == made and max(lent) > 0
    for now, need in zip(lent, activations_at(trace, offloaded=False), strict=True):
        assert now <= problem.activations - need
    assert sum(made.traffic.values()) < sum(fixed.traffic.values())
    hardware = machine("rtx4090")
    for sample in gemini.simulate(made, hardware).samples:
        assert sum(sample.held[Tier.GPU].values()) <= problem.budgets[Tier.GPU]
