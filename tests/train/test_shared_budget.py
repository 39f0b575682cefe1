"""Several models in one budget, which has to hold what all keep and the largest working set: the bits of separate ones."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.errors import BudgetExceeded, GeminiError
from gemini.testing.standin import StandinDevice
from gemini.tiers import Tier
from tests.train.helpers import make_config, noise, same_bits, tight_bytes
from tests.world import world_of

WIDTH = 64


def layers(count: int, seed: int, out: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count - 1)), nn.Linear(WIDTH, out))


def generator() -> nn.Module:
    return layers(4, 0)


def discriminator() -> nn.Module:
    return layers(3, 1, out=1)


def judge() -> nn.Module:
    return layers(2, 2).requires_grad_(False).eval()


def separate(where: str, path: Path, *makes: Any) -> list[Any]:
    return [gemini.GeminiDDP(make(), make_config(make(), where, path, slack=2**14)) for make in makes]


def together(where: str, path: Path, *makes: Any, slack: int = 2**14) -> tuple[gemini.SharedBudget, list[Any]]:
    """All homes away from where modules compute; room there for one working set, and the staging of each."""
    sizes = [tight_bytes(make(), "bf16") for make in makes]
    gathered, staging = max(size for size, _ in sizes) + slack, sum(size for _, size in sizes)
    if where == "disk":
        memory = gemini.SharedBudget(cpu=gathered + staging, nvme="64MiB", nvme_path=path)
    else:
        memory = gemini.SharedBudget(gpu=gathered, cpu="64MiB", nvme="64MiB", nvme_path=path)
    device = {"disk": lambda: "cpu", "pieces": lambda: StandinDevice(in_pieces=True)}.get(where, lambda: "standin")
    found = []
    for make in makes:
        config = make_config(make(), "disk" if where == "disk" else "standin", path)
        found.append(
            gemini.GeminiDDP(
                make(),
                gemini.GeminiConfig(
                    precision="bf16", memory=memory, device=device(), placement=config.placement,
                ),
            )
        )  # fmt: skip
    return memory, found


def adversarial(g: Any, d: Any, judge: Any, steps: int = 3) -> list[float]:
    """Both models in one graph, one after the other, and a frozen one whose gradients flow through."""
    of_g, of_d = (gemini.HybridAdam(model.parameters(), lr=1e-2) for model in (g, d))
    losses = []
    for seed in range(steps):
        for _ in range(2):  # summed up
            fake = g(noise(4, WIDTH, seed=seed))
            loss = nn.functional.softplus(d(fake.detach()).float()) + nn.functional.softplus(
                -d(noise(4, WIDTH, seed=seed + 99)).float()
            )
            (loss.mean() / 2).backward()
        of_d.step()
        of_d.zero_grad()
        fake = g(noise(4, WIDTH, seed=seed))
        of_both = nn.functional.softplus(-d(fake).float()).mean() + judge(fake).float().square().mean()
        of_both.backward()
        g.clip_grad_norm_(1.0)
        of_g.step()
        of_g.zero_grad()
        of_d.zero_grad()
        losses += [loss.mean().item(), of_both.item()]
    return losses


def check(memory: gemini.SharedBudget, models: list[Any]) -> None:
    for model in models:
        world_of(model).check()
    together = memory.report()
    for tier in world_of(models[0]).tiers:
        rows = [model.memory_report()[tier.value] for model in models]
        assert together[tier.value]["used"] == sum(row["used"] for row in rows)
        assert together[tier.value]["peak"] <= together[tier.value]["budget"]


@pytest.mark.parametrize("where", ["disk", "standin", "pieces"])
def test_three_models_in_room_for_one_have_the_bits_of_separate_budgets(where: str, tmp_path: Path) -> None:
    makes = (generator, discriminator, judge)
    apart = separate("disk" if where == "disk" else "standin", tmp_path, *makes)
    wanted = adversarial(*apart)
    memory, models = together(where, tmp_path, *makes)
    assert adversarial(*models) == wanted
    check(memory, models)
    for model, other in zip(models, apart, strict=True):
        for name in model.state_dict():
            assert same_bits(model.full_param(name, torch.float32), other.full_param(name, torch.float32)), name
    # It was tight: each had to take from the others.
    computing = Tier.CPU if where == "disk" else Tier.GPU
    whole = sum(world_of(model).problem.working_set for model in models)
    assert memory.report()[computing.value]["budget"] < whole + sum(world_of(m).problem.staging for m in models)
