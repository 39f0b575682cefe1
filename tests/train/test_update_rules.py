"""Update rules from outside: written in a test, they train wherever planes live, with the bits of their plain loop.

``Momentum`` is a rule as a user would write it. ``Coded`` keeps its momentum in bytes with a scale for each block of 64
elements, and dithers by the place of an element: planes of a byte and of less, and a rule that asks where it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import kernels_reference as reference
from gemini.errors import GeminiError, PlanMismatch
from gemini.planning.planes import PlaneKind, PlaneSpec, RuleSpec
from gemini.planning.working import staging_bytes, tile_numel
from gemini.rules import UpdateRule, Where
from gemini.tiers import Tier


@dataclass(frozen=True)
class Momentum(UpdateRule):
    """SGD with momentum and weight decay."""

    spec = RuleSpec("SGD", (PlaneSpec("velocity", "float32"),))
    defaults = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}  # noqa: RUF012

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> Any:
        return float(group["lr"]), float(group["momentum"]), float(group["weight_decay"]), grad_scale, step

    def update(self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: Any, where: Any) -> None:
        lr, momentum, decay, scale, _ = scalars
        velocity = states["velocity"]
        velocity.mul_(momentum).add_(grad.float() * scale + master * decay)
        master.sub_(velocity * lr)


@dataclass(frozen=True)
class Coded(UpdateRule):
    """Momentum in 8 bits: ``(code - 128) * scale``, rounded by a dither that depends on the place and the step."""

    spec = RuleSpec("coded", (PlaneSpec("code", "uint8"), PlaneSpec("scale", "float32", block=64)), needs="place")
    defaults = {"lr": 0.05}  # noqa: RUF012

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> Any:
        return float(group["lr"]), grad_scale, step

    def update(
        self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: Any, where: Where | None
    ) -> None:
        assert where is not None and where.offset % 64 == 0
        lr, grad_scale, step = scalars
        n, code, scale = master.numel(), states["code"], states["scale"]
        each = scale.repeat_interleave(64)[:n]
        velocity = (code.float() - 128 * (each != 0)) * each * 0.9 + grad.float() * grad_scale
        blocks = torch.nn.functional.pad(velocity, (0, -n % 64)).view(-1, 64)
        scale.copy_(blocks.abs().amax(1) / 126 + 1e-30)
        each = scale.repeat_interleave(64)[:n]
        place = torch.arange(where.offset, where.offset + n) + len(where.name)
        dither = ((place * 40503 + step * 30011) % 1024).float() / 1024
        code.copy_((velocity / each + 128 + dither).floor().clamp(0, 255))
        master.sub_(velocity * lr)


RULES: dict[str, UpdateRule] = {"momentum": Momentum(), "coded": Coded()}
PRECISIONS = ("bf16", "fp32")


def make_model() -> nn.Module:
    return models.make_model("llama")


def loss_of(model: Any, seed: int) -> Tensor:
    ids = torch.randint(2, models.VOCAB, (2, 7), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids).loss


def plain_loop(rule: UpdateRule, precision: str, seeds: range, clip: float | None) -> tuple[nn.Module, dict[str, Any]]:
    """The loop that defines the bits: whole params, one after the other, masters in fp32. Losses under ``"losses"``."""
    model, masters, states, found = make_model(), {}, {}, {"losses": []}
    for name, param in model.named_parameters():
        masters[name] = param.detach().float().reshape(-1).clone()
        states[name] = {
            str(s.kind): torch.zeros(s.num_items(param.numel()), dtype=getattr(torch, s.dtype)) for s in rule.spec.planes
        }
        param.data = models.rounded(masters[name], precision).view(param.shape)
    for step, seed in enumerate(seeds, 1):
        loss = loss_of(model, seed)
        loss.backward()
        found["losses"].append(loss.item())
        grads = {name: param.grad.reshape(-1) for name, param in model.named_parameters()}
        scale = 1.0
        if clip is not None:
            sums = [reference.total(reference.sum_squares(grad)) for grad in grads.values()]
            scale = min(1.0, clip / (math.sqrt(reference.total(sums)) + 1e-6))
        for name, param in model.named_parameters():
            where = Where(name, 0) if rule.spec.needs == "place" else None
            rule.update(masters[name], grads[name], states[name], rule.scalars(rule.defaults, step, scale), where)
            param.data = models.rounded(masters[name], precision).view(param.shape)
            param.grad = None
    return model, {**found, "masters": masters, "states": states}


def config_for(rule: UpdateRule, path: Path, precision: str, **how: Any) -> gemini.GeminiConfig:
    """Everything on NVMe but what stays in memory, and room for one module and staging."""
    gathered, staging, scales = tight_bytes(rule, precision, how.get("max_chunk", 6000))
    memory = gemini.MemoryBudget(cpu=gathered + staging + scales, nvme="64MiB", nvme_path=path)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    settings = {"max_chunk": 6000, "placement": placement, "memory": memory, "update_threads": 1, **how}
    return gemini.GeminiConfig(precision=precision, device="cpu", optimizer=rule, **settings)


def tight_bytes(rule: UpdateRule, precision: str, max_chunk: int) -> tuple[int, int, int]:
    from gemini.planning.planner import pose_problem
    from gemini.train.setup.structure import structural_trace

    trace = structural_trace(make_model(), precision)
    problem = pose_problem(
        trace, {Tier.CPU: 2**40}, precision=precision, max_chunk=max_chunk, rule=rule.spec, overlap=True
    )
    layout = problem.layout
    assert problem.staging == 2 * staging_bytes(tile_numel(max(c.numel for c in layout.chunks)), rule.spec)
    scales = sum(
        spec.page_bytes(chunk.numel) for spec in rule.spec.planes if spec.stays_in_memory for chunk in layout.chunks
    )
    return problem.working_set, problem.staging, scales


def train(model: Any, optimizer: Any, seeds: range, clip: float | None) -> list[float]:
    losses = []
    for seed in seeds:
        loss = loss_of(model, seed)
        loss.backward()
        if clip is not None:
            model.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def assert_same(model: Any, plain: dict[str, Any]) -> None:
    engine = model._gemini_engine
    engine.check_invariants()
    for name, master in plain["masters"].items():
        assert torch.equal(bits(model.full_param(name, torch.float32)), bits(master)), name
        for kind, state in plain["states"][name].items():
            kept = engine.by_names.read_plane(engine.by_names[name], PlaneKind(kind))
            assert kept.dtype is state.dtype and torch.equal(bits(kept), bits(state)), (name, kind)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("which", RULES)
def test_a_rule_from_outside_trains_on_nvme_with_the_bits_of_its_plain_loop(
    which: str, precision: str, overlap: bool, tmp_path: Path
) -> None:
    rule = RULES[which]
    _, plain = plain_loop(rule, precision, range(3), clip=0.1)
    model = gemini.GeminiDDP(make_model(), config_for(rule, tmp_path, precision, overlap=overlap))
    optimizer = gemini.HybridOptimizer(model.parameters(), rule)
    assert train(model, optimizer, range(3), 0.1) == plain["losses"]
    assert_same(model, plain)
    tiers = {kind: {chunk.planes[kind].tier for chunk in model._gemini_engine.chunks} for kind in rule.spec.kinds[2:]}
    assert tiers.pop(PlaneKind("scale"), {Tier.CPU}) == {Tier.CPU}
    assert all(found == {Tier.NVME} for found in tiers.values()), tiers
