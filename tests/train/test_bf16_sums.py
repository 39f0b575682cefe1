"""Gradients of compact states summed up in bf16: 24 bits of the sum wherever it lives, of which updates read 16."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gemini
from gemini import kernels
from gemini.kernels import reference
from gemini.optim.compact import CompactRule
from gemini.planning import compact
from gemini.rules import Where
from tests import models
from tests.train.test_compact import (
    EXACT,
    assert_same,
    config_for,
    group_of,
    is_compact,
    make_optimizer,
    rounded24,
)
from tests.train.test_update_rules import bits, loss_of, make_model
from tests.world import world_of

CLIP = 0.1
PLACED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "in memory": ("cpu", {}, {}),
    "on nvme": ("cpu", {"weights_on_nvme": 1, "optimizer_on_nvme": 1}, {}),
    "on the device": ("standin", {"weights_on_gpu": 1, "optimizer_on_gpu": 1}, {}),
    "streamed": ("standin", {"updates_on_gpu": 1}, {}),
    "half": ("standin", {"weights_on_nvme": 0.5, "optimizer_on_nvme": 0.5}, {"max_chunk": 64}),
    "in turn": ("standin", {"weights_on_nvme": 0.5, "optimizer_on_nvme": 0.5}, {"overlap": False}),
}


@pytest.fixture(autouse=True)
def _matrices_are_compact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "SMALLEST", 600)


def batches(steps: range, micro: int) -> list[list[int]]:
    return [[step * micro + number for number in range(micro)] for step in steps]


def train(model: Any, optimizer: Any, steps: range, micro: int = 3) -> list[float]:
    losses = []
    for seeds in batches(steps, micro):
        for seed in seeds:
            (loss := loss_of(model, seed)).backward()
            losses.append(loss.item())
        model.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def upper(total: Tensor) -> Tensor:
    hi, lo = torch.empty(total.numel(), dtype=torch.bfloat16), torch.empty(total.numel(), dtype=torch.int8)
    with kernels.use_isa("reference"):
        kernels.split_master(total, hi, lo)
    return hi


def plain_loop(which: str, steps: range, micro: int = 3) -> dict[str, Any]:
    """The loop that defines the bits: sums are fp32 numbers that are rounded to 24 bits after every addition."""
    model, losses, exact, group = make_model(), [], EXACT[which], group_of(which)
    coded, masters, states = CompactRule(exact), {}, {}
    for name, param in model.named_parameters():
        masters[name] = param.detach().float().reshape(-1).clone()
        rule: Any = coded if is_compact(param) else exact
        if is_compact(param):
            rounded24(masters[name])
        states[name] = {
            s.kind: torch.zeros(s.num_items(param.numel()), dtype=getattr(torch, s.dtype)) for s in rule.spec.planes
        }
        param.data = models.rounded(masters[name], "bf16").view(param.shape)
    for step, seeds in enumerate(batches(steps, micro), 1):
        sums: dict[str, Tensor] = {}
        for seed in seeds:
            (loss := loss_of(model, seed)).backward()
            losses.append(loss.item())
            for name, param in model.named_parameters():
                assert param.grad is not None
                grad = param.grad.reshape(-1).float()
                sums[name] = rounded24(sums[name] + grad if name in sums else grad.clone())
                param.grad = None
        grads = {name: upper(total) for name, total in sums.items()}
        squares = [reference.total(reference.sum_squares(grad)) for grad in grads.values()]
        scale = min(1.0, CLIP / (math.sqrt(reference.total(squares)) + 1e-6))
        for name, param in model.named_parameters():
            rule = coded if is_compact(param) else exact
            with kernels.use_isa("reference"):
                rule.update(masters[name], grads[name], states[name], rule.scalars(group, step, scale), Where(name, 0))
            if rule is coded:
                rounded24(masters[name])
            param.data = models.rounded(masters[name], "bf16").view(param.shape)
    return {"losses": losses, "masters": masters, "states": states}


def wrapped(which: str, told: str, folder: Path, gradients: str = "accumulate_bf16") -> tuple[Any, Any]:
    device, fractions, how = PLACED[told]
    gpu = {"gpu": "1GiB"} if device == "standin" else {}
    memory = gemini.MemoryBudget(cpu="1GiB", nvme="64MiB", nvme_path=folder, **gpu)
    settings = {"gradients": gradients, "memory": memory, "placement": gemini.StaticPlacement(**fractions)}
    model = gemini.GeminiDDP(make_model(), config_for(which, **settings, device=device, **how))
    return model, make_optimizer(model, which)


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("told", PLACED)
@pytest.mark.parametrize("which", EXACT)
def test_sums_have_the_bits_of_the_plain_loop(
    which: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_loop(which, range(3))
    with models.tiles_of(monkeypatch, None if told == "in memory" else 4096):
        model, optimizer = wrapped(which, told, tmp_path)
        assert train(model, optimizer, range(3)) == plain["losses"]
        assert_same(model, plain)
    numel = world_of(model).layout
    kept = sum(p.num_bytes for c in world_of(model).chunks for k, p in c.planes.items() if "grad" in k)
    assert kept == 3 * numel.numel, "two bytes, and one for what rounding loses"


def test_a_clipped_sum_is_added_to_as_it_was_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch, what is there by then has been scaled; sums of sums are not far off those in fp32."""

    def steps(told: str, gradients: str) -> dict[str, Tensor]:
        with models.tiles_of(monkeypatch, None if told == "in memory" else 4096):
            model, optimizer = wrapped("adam", told, tmp_path, gradients)
            for seed in range(3):
                loss_of(model, seed).backward()
                model.clip_grad_norm_(CLIP)
            grads = {name: model.full_grad(name) for name, _ in model.named_parameters()}
            optimizer.step()
            return grads

    found, there = (steps(told, "accumulate_bf16") for told in ("in memory", "on nvme"))
    exact = steps("in memory", "accumulate")
    for name, grad in found.items():
        assert torch.equal(bits(there[name]), bits(grad)), name
        assert (grad.float() - exact[name].float()).norm() < 2**-8 * grad.float().norm(), name


def test_gradients_begin_anew(tmp_path: Path) -> None:
    """What a step before has lost in rounding is not added to the next one."""
    model, optimizer = wrapped("adam", "in memory", tmp_path)
    found = []
    for _ in range(2):
        for seed in range(3):
            loss_of(model, seed).backward()
        found.append({name: model.full_grad(name).clone() for name, _ in model.named_parameters()})
        optimizer.zero_grad()
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


def test_sums_in_bf16_go_with_compact_states() -> None:
    with pytest.raises(ValueError, match='goes with states="compact"; beside exact states'):
        gemini.GeminiConfig(gradients="accumulate_bf16")
    ids = torch.zeros(1, 4, dtype=torch.long)
    trace = gemini.trace(make_model(), {"input_ids": ids, "labels": ids})
    budget = gemini.MemoryBudget(cpu="1GiB")
    with pytest.raises(ValueError, match='goes with states="compact"'):
        gemini.plan(trace, None, budget, gradients="accumulate_bf16")
    plan = gemini.plan(trace, None, budget, gradients="accumulate_bf16", states="compact", accumulate=4)
    assert plan.problem.gradients == "accumulate_bf16"
