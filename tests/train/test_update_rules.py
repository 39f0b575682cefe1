"""Update rules from outside: written in a test, they train wherever planes live, with the bits of their plain loop.

``Momentum`` is a rule as a user would write it. ``Coded`` keeps its momentum in bytes with a scale for each block of 64
elements, and dithers by the place of an element: planes of a byte and of less, and a rule that asks where it is.
``Normed`` divides by the norm of a whole param, and looks at its rows.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import rules
from gemini.errors import GeminiError, PlanMismatch
from gemini.kernels import reference
from gemini.optim import (
    AdaLomoRule,
    AdoptedRule,
    LionRule,
    MuonRule,
    PlainSGDRule,
    SGDRule,
    adopt,
    muon_groups,
)
from gemini.planning.planes import WHOLE_TEMPORARIES, PlaneSpec, RuleSpec, shapes_of
from gemini.planning.planner import pose_problem
from gemini.planning.working import staging_bytes, tile_numel, whole_numel
from gemini.rules import UpdateRule, Where
from gemini.tiers import Tier
from gemini.train.setup.problem import structural_trace
from tests import models
from tests.train import helpers
from tests.world import world_of


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


class WithRate(UpdateRule):
    """Its scalars are the learning rate, the scale of gradients, and the number of the update."""

    defaults = {"lr": 0.05}  # noqa: RUF012

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> Any:
        return float(group["lr"]), grad_scale, step


@dataclass(frozen=True)
class Coded(WithRate):
    """Momentum in 8 bits: ``(code - 128) * scale``, rounded by a dither that depends on the place and the step."""

    spec = RuleSpec("coded", (PlaneSpec("code", "uint8"), PlaneSpec("scale", "float32", block=64)), needs="place")

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
        dither = ((place * 40503 + step * 30011) % 1021).float() / 1024  # 1021: no tile is a period
        code.copy_((velocity / each + 128 + dither).floor().clamp(0, 255))
        master.sub_(velocity * lr)


@dataclass(frozen=True)
class Normed(WithRate):
    """Momentum whose step is as long as the param, in each row apart: an element's update depends on all others."""

    spec = RuleSpec("normed", (PlaneSpec("velocity", "float32"),), needs="param")

    def update(
        self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: Any, where: Where | None
    ) -> None:
        assert where is not None and where.offset == 0 and math.prod(where.shape) == master.numel()
        lr, grad_scale, _ = scalars
        velocity = states["velocity"].mul_(0.9).add_(grad.float() * grad_scale)
        rows = velocity.view(where.shape if len(where.shape) > 1 else (1, -1))
        master.view(rows.shape).sub_(rows / (rows.norm(dim=-1, keepdim=True) + 1e-6) * master.norm() * lr)


RULES: dict[str, UpdateRule] = {"momentum": Momentum(), "coded": Coded(), "normed": Normed()}
NAMED: dict[str, UpdateRule] = {
    "sgd": SGDRule(), "plain sgd": PlainSGDRule(), "lion": LionRule(),
    "muon": MuonRule(),
    "adalomo": AdaLomoRule(),
    "adopted": adopt(torch.optim.NAdam),
}  # fmt: skip
EVERY = {**RULES, **NAMED}
HYPERS: dict[type[UpdateRule], dict[str, Any]] = {
    SGDRule: {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    PlainSGDRule: {"lr": 0.05, "weight_decay": 0.01},
    LionRule: {"lr": 1e-3, "weight_decay": 0.1},
    AdoptedRule: {"lr": 1e-2, "weight_decay": 0.1},
    MuonRule: {"lr": 1e-2, "adjust_lr": "match_rms_adamw"},
}
PRECISIONS = ("bf16", "fp32")


PLACES: dict[str, tuple[str, dict[str, float], dict[str, Any]]] = {
    "in memory": ("cpu", {}, {}),
    "one chunk each": ("cpu", {}, {"max_chunk": 64}),
    "small tiles": ("cpu", {"optimizer_on_nvme": 1}, {}),
    "on nvme": ("cpu", {"weights_on_nvme": 1, "optimizer_on_nvme": 1}, {}),
    "in memory, transient": ("cpu", {}, {"gradients": "transient"}),
    "transient": ("cpu", {"optimizer_on_nvme": 1}, {"gradients": "transient"}),
    "on the device": ("standin", {"weights_on_gpu": 1, "optimizer_on_gpu": 1}, {}),
    "streamed": ("standin", {"updates_on_gpu": 1}, {}),
    "streamed, transient": ("standin", {"updates_on_gpu": 1}, {"gradients": "transient"}),
    "half": ("standin", {"weights_on_nvme": 0.5, "optimizer_on_nvme": 0.5}, {"max_chunk": 64}),
    "in turn": ("standin", {"weights_on_nvme": 0.5, "optimizer_on_nvme": 0.5}, {"overlap": False}),
    "summed up": ("cpu", {"optimizer_on_nvme": 1}, {"gradients": "accumulate"}),
}
"""Where planes live: a device, the fractions of a placement, and what else a config says."""


def settings_of(place: str, path: Path) -> dict[str, Any]:
    """Of a config, with memory for all of it."""
    device, fractions, how = PLACES[place]
    gpu = {"gpu": "1GiB"} if device == "standin" else {}
    memory = gemini.MemoryBudget(cpu="1GiB", nvme="64MiB", nvme_path=path, **gpu)
    return {"device": device, "memory": memory, "placement": gemini.StaticPlacement(**fractions), **how}


def make_model() -> nn.Module:
    return models.make_model("llama")


def make_optimizer(model: nn.Module, rule: UpdateRule, **how: Any) -> gemini.HybridOptimizer:
    return gemini.HybridOptimizer(groups_of(model, rule), rule, **HYPERS.get(type(rule), {}), **how)


def managed(config: gemini.GeminiConfig, rule: UpdateRule, **how: Any) -> tuple[Any, gemini.HybridOptimizer]:
    model = gemini.GeminiDDP(make_model(), config)
    return model, make_optimizer(model, rule, **how)


def groups_of(model: nn.Module, rule: UpdateRule) -> Any:
    return muon_groups(model, lr=1e-3) if isinstance(rule, MuonRule) else model.parameters()


def loss_of(model: Any, seed: int) -> Tensor:
    ids = torch.randint(2, models.VOCAB, (2, 7), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids).loss


def plain_loop(
    rule: UpdateRule,
    precision: str,
    seeds: range,
    clip: float | None,
    place_of: Callable[[int, str], str] | None = None,
) -> dict[str, Any]:
    """The loop that defines the bits: whole params, one after the other, masters in fp32.

    Args:
        place_of: what the rule is told that a param is called, if not its name.
    """
    model, losses, hypers = make_model(), [], {**rule.defaults, **HYPERS.get(type(rule), {})}
    own = [group for group in groups_of(model, rule) if isinstance(group, dict)]  # params, where there is one group
    groups = {id(param): {**hypers, **group} for group in own for param in group["params"]}
    order = {id(p): n for n, p in enumerate(p for g in own for p in g["params"])}
    masters: dict[str, Tensor] = {}
    states: dict[str, dict[str, Tensor]] = {}
    for name, param in model.named_parameters():
        masters[name] = param.detach().float().reshape(-1).clone()
        states[name] = {
            s.kind: torch.zeros(s.num_items(param.numel()), dtype=getattr(torch, s.dtype)) for s in rule.spec.planes
        } | {kind: torch.zeros(own) for kind, own in shapes_of(rule.spec.factors, param.shape).items()}
        param.data = models.rounded(masters[name], precision).view(param.shape)
    for step, seed in enumerate(seeds, 1):
        loss = loss_of(model, seed)
        loss.backward()
        losses.append(loss.item())
        grads = {name: param.grad.reshape(-1) for name, param in model.named_parameters()}
        scale = 1.0
        if clip is not None:
            sums = [reference.total(reference.sum_squares(grad)) for grad in grads.values()]
            scale = min(1.0, clip / (math.sqrt(reference.total(sums)) + 1e-6))
        for number, (name, param) in enumerate(model.named_parameters()):
            place = name if place_of is None else place_of(order.get(id(param), number), name)
            where = Where(place, 0, param.shape) if rule.spec.needs != "elements" else None
            scalars = rule.scalars(groups.get(id(param), hypers), step, scale)
            rule.update(masters[name], grads[name], states[name], scalars, where)
            param.data = models.rounded(masters[name], precision).view(param.shape)
            param.grad = None
    return {"losses": losses, "masters": masters, "states": states}


def config_for(rule: UpdateRule, path: Path, precision: str, **how: Any) -> gemini.GeminiConfig:
    """Everything on NVMe but what stays in memory, and room for one module and staging."""
    gathered, staging, scales = tight_bytes(rule, precision, how.get("max_chunk", 6000))
    memory = gemini.MemoryBudget(cpu=gathered + staging + scales, nvme="64MiB", nvme_path=path)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    settings = {"max_chunk": 6000, "placement": placement, "memory": memory, "update_threads": 1, **how}
    return gemini.GeminiConfig(precision=precision, device="cpu", optimizer=rule, **settings)


def tight_bytes(rule: UpdateRule, precision: str, max_chunk: int) -> tuple[int, int, int]:
    trace = structural_trace(make_model(), precision)
    problem = pose_problem(
        trace, {Tier.CPU: 2**40}, precision=precision, max_chunk=max_chunk, rule=rule.spec, overlap=True
    )
    layout = problem.layout
    tile = tile_numel(max(c.numel for c in layout.chunks), whole_numel(layout, rule.spec))
    assert problem.staging == 2 * staging_bytes(tile, rule.spec)
    scales = sum(
        spec.page_bytes(chunk.numel) for spec in rule.spec.planes if spec.stays_in_memory for chunk in layout.chunks
    )
    return problem.working_set, problem.staging, scales + problem.factors + problem.temporaries


def train(model: Any, optimizer: Any, seeds: range, clip: float | None) -> list[float]:
    return helpers.train(model, optimizer, seeds, loss_of, clip=clip)


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def assert_same(model: Any, plain: dict[str, Any]) -> None:
    world = world_of(model)
    world.check()
    for name, master in plain["masters"].items():
        assert torch.equal(bits(model.full_param(name, torch.float32)), bits(master)), name
        for kind, state in plain["states"][name].items():
            handle = world.by_names[name]
            kept = handle.factors[kind] if kind in handle.factors else world.read_plane(handle, kind)
            assert kept.dtype is state.dtype and torch.equal(bits(kept), bits(state)), (name, kind)


@pytest.mark.sweep(every=5)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("which", EVERY)
def test_a_rule_trains_on_nvme_with_the_bits_of_its_plain_loop(
    which: str, precision: str, overlap: bool, tmp_path: Path
) -> None:
    rule = EVERY[which]
    plain = plain_loop(rule, precision, range(3), clip=0.1)
    model, optimizer = managed(config_for(rule, tmp_path, precision, overlap=overlap), rule)
    assert train(model, optimizer, range(3), 0.1) == plain["losses"]
    assert_same(model, plain)
    tiers = {kind: {chunk.planes[kind].tier for chunk in world_of(model).chunks} for kind in rule.spec.kinds[2:]}
    assert all(tiers.pop(kind) == {Tier.CPU} for kind in rule.spec.in_memory)
    assert all(found == {Tier.NVME} for found in tiers.values()), tiers


@pytest.mark.sweep(every=4)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("which", EVERY)
def test_bits_do_not_depend_on_chunks_tiles_and_tiers(
    which: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, on a device, streamed through it, staged in small tiles, and used in backward as autograd left it."""
    rule = EVERY[which]
    plain = plain_loop(rule, precision, range(2), clip=None)
    every = ("in memory", "transient", "on the device", "streamed", "streamed, transient", "half", "summed up")
    for told in (*every, "in slabs"):
        settings = settings_of("in memory" if told == "in slabs" else told, tmp_path)
        config = gemini.GeminiConfig(precision=precision, optimizer=rule, **settings)
        tile = None if told in ("in memory", "in slabs") else rule.spec.align
        monkeypatch.setattr(rules, "_SLAB", 2048 if told == "in slabs" else 2**20)
        with models.tiles_of(monkeypatch, tile):
            model, optimizer = managed(config, rule, step_in_backward="transient" in told)
            assert train(model, optimizer, range(2), None) == plain["losses"], told
            assert_same(model, plain)


@pytest.mark.parametrize("which", EVERY)
def test_params_that_no_model_manages_are_updated_alike(which: str) -> None:
    rule = EVERY[which]
    plain = plain_loop(rule, "fp32", range(2), None, lambda number, _: f"plain param {number}")  # they have no names
    model = make_model()
    optimizer = make_optimizer(model, rule)
    losses = []
    for seed in range(2):
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == plain["losses"]
    for name, param in model.named_parameters():
        assert torch.equal(bits(param.detach()), bits(plain["masters"][name])), name


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("which", EVERY)
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(which: str, precision: str, tmp_path: Path) -> None:
    rule = EVERY[which]
    plain = plain_loop(rule, precision, range(4), clip=None)
    config = config_for(rule, tmp_path, precision)
    model, optimizer = managed(config, rule)
    losses = train(model, optimizer, range(2), None)
    gemini.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    in_memory = gemini.GeminiConfig(precision=precision, device="cpu", optimizer=rule, max_chunk=64)
    for again in (config, in_memory):  # other chunks, other homes
        other = gemini.GeminiDDP(make_model(), again)
        resumed = gemini.HybridOptimizer(groups_of(other, rule), rule, lr=1.0)
        gemini.load_checkpoint(tmp_path / "checkpoint", other, resumed)
        assert losses + train(other, resumed, range(2, 4), None) == plain["losses"]
        assert_same(other, plain)


@pytest.mark.parametrize("which", RULES)
def test_a_state_dict_goes_into_another_optimizer(which: str) -> None:
    rule = RULES[which]
    plain = plain_loop(rule, "fp32", range(3), clip=None)
    config = gemini.GeminiConfig(precision="fp32", device="cpu", optimizer=rule)
    first, second = (gemini.GeminiDDP(make_model(), config) for _ in range(2))
    optimizers = [gemini.HybridOptimizer(model.parameters(), rule) for model in (first, second)]
    train(first, optimizers[0], range(2), None)
    second.load_state_dict(first.state_dict())
    state = optimizers[0].state_dict()
    optimizers[1].load_state_dict(state)
    assert train(second, optimizers[1], range(2, 3), None) == plain["losses"][2:]
    assert_same(second, plain)
    state["state"][0].pop(rule.spec.planes[0].kind)
    with pytest.raises(ValueError, match=f"the rule '{rule.spec.name}' has"):
        optimizers[1].load_state_dict(state)


def test_an_optimizer_of_another_rule_is_refused(tmp_path: Path) -> None:
    config = gemini.GeminiConfig(precision="bf16", device="cpu", optimizer=Momentum())
    model = gemini.GeminiDDP(make_model(), config)
    with pytest.raises(GeminiError, match=r"rule is AdamRule\(\), and the model was wrapped for Momentum\(\)"):
        gemini.HybridAdam(model.parameters()).step()
    for rule, settings in ((Momentum(), {}), (None, {"optimizer": Momentum()})):
        early = make_model()
        optimizer = (
            gemini.HybridAdam(early.parameters()) if rule is None else gemini.HybridOptimizer(early.parameters(), rule)
        )
        with pytest.raises(GeminiError, match="GeminiConfig\\(optimizer=rule\\)"):
            gemini.GeminiDDP(early, gemini.GeminiConfig(precision="bf16", device="cpu", **settings))
        assert all(type(param) is nn.Parameter for param in early.parameters()), "it was left as it was"
        del optimizer
    with pytest.raises(TypeError, match="momentun= is not a hyperparameter of 'SGD'"):
        gemini.HybridOptimizer(make_model().parameters(), Momentum(), momentun=0.5)
    optimizer = gemini.HybridOptimizer(model.parameters(), Momentum())
    gemini.save_checkpoint(tmp_path / "sgd", model, optimizer)
    other = gemini.GeminiDDP(make_model(), gemini.GeminiConfig(precision="bf16", device="cpu"))
    with pytest.raises(PlanMismatch, match="update rule 'SGD', the model was wrapped for 'Adam'"):
        gemini.load_checkpoint(tmp_path / "sgd", other, gemini.HybridAdam(other.parameters()))


def test_staging_has_room_for_the_largest_param_that_is_trained(tmp_path: Path) -> None:
    """Of a rule of whole params, in one slot beside training, with what such an update takes beside planes."""
    rule, frozen = Normed(), make_model()
    frozen.model.embed_tokens.requires_grad_(False)  # type: ignore[union-attr, operator]
    world = world_of(gemini.GeminiDDP(frozen, config_for(rule, tmp_path, "bf16", max_chunk=64)))
    sizes = [param.numel() for param in frozen.parameters() if param.requires_grad]
    assert world.tile == max(sizes) + -max(sizes) % 2048 > 64
    problem, held = world.problem, world.holders(Tier.CPU)
    areas = [4, 2, 4, 4]  # weights, residual, velocity, gradient
    assert held["staging"] == problem.staging == 2 * sum(areas) * world.tile
    assert held["temporaries"] == problem.temporaries == 4 * WHOLE_TEMPORARIES * world.tile
    with pytest.raises(GeminiError, match="the rule 'normed' passes whole params through staging, which has no room"):
        train_later(rule)


def train_later(rule: UpdateRule) -> None:
    """A param that becomes trained later, and is larger than a tile and all that were."""
    model = models.llama(vocab_size=2**15 + 64)
    model.model.embed_tokens.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    managed = gemini.GeminiDDP(model, gemini.GeminiConfig(precision="bf16", device="cpu", optimizer=rule))
    managed.model.embed_tokens.requires_grad_(True)
    managed(input_ids=torch.zeros(1, 3, dtype=torch.long))


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(TypeError, match="optimizer= is an update rule"):
        gemini.GeminiConfig(optimizer=torch.optim.SGD)
    with pytest.raises(TypeError, match="optimizer= is an update rule .*Momentum"):
        gemini.GeminiConfig(optimizer=Momentum)
    with pytest.raises(TypeError, match="got only the spec of one"):
        gemini.GeminiConfig(optimizer=Momentum.spec)
    with pytest.raises(TypeError, match="rule= is a gemini.rules.UpdateRule"):
        gemini.HybridOptimizer(make_model().parameters(), Momentum)  # type: ignore[arg-type]
    for wrong, error, words in ((math.nan, ValueError, "must be finite"), ("a lot", TypeError, "must be a number")):
        with pytest.raises(error, match=f"lr of HybridOptimizer {words}"):
            gemini.HybridOptimizer(make_model().parameters(), Momentum(), lr=wrong)
    params = list(make_model().parameters())
    optimizer = gemini.HybridOptimizer(params[:1], Momentum())
    with pytest.raises(ValueError, match="momentum of param group 1 must be finite"):
        optimizer.add_param_group({"params": params[1:], "momentum": math.inf})


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("which", RULES)
def test_a_plan_is_of_its_rule(which: str, precision: str, tmp_path: Path) -> None:
    """Planned into little memory, through JSON, and the model runs by it; without the rule it is refused."""
    rule, seeds = RULES[which], range(2)
    trace = structural_trace(make_model(), precision)
    roomy = gemini.plan(trace, None, {Tier.CPU: 2**30}, precision=precision, optimizer=rule, max_chunk=6000)
    needed = roomy.bytes_per_tier[Tier.CPU]
    budgets = {Tier.CPU: needed // (4 if rule.spec.whole else 2) + roomy.problem.staging, Tier.NVME: 2**26}
    made = gemini.plan(trace, None, budgets, precision=precision, optimizer=rule, max_chunk=6000)
    homes = [tier for planes in made.placement.homes for tier in planes.values()]
    assert {Tier.CPU, Tier.NVME} == set(homes)
    assert made == gemini.Plan.from_json(made.to_json())
    memory = gemini.MemoryBudget(cpu=budgets[Tier.CPU], nvme=budgets[Tier.NVME], nvme_path=tmp_path)
    how: dict[str, Any] = {"precision": precision, "placement": made, "memory": memory, "max_chunk": 6000}
    with pytest.raises(PlanMismatch, match="rule="):
        gemini.GeminiDDP(make_model(), gemini.GeminiConfig(device="cpu", **how))
    model = gemini.GeminiDDP(make_model(), gemini.GeminiConfig(device="cpu", optimizer=rule, **how))
    report = model.memory_report()
    assert made.bytes_per_param == report["bytes_per_param"]
    assert all(report[tier.value]["used"] <= budget for tier, budget in budgets.items())
    plain = plain_loop(rule, precision, seeds, None)
    assert train(model, gemini.HybridOptimizer(model.parameters(), rule), seeds, None) == plain["losses"]
    assert_same(model, plain)


def test_a_copy_of_an_optimizer_keeps_the_rule() -> None:
    model = make_model()
    optimizer = copy.deepcopy(gemini.HybridOptimizer(model.parameters(), Momentum(), lr=0.5))
    param = optimizer.param_groups[0]["params"][0]
    before, param.grad = param.detach().clone(), torch.ones_like(param)
    optimizer.step()
    assert optimizer.rule == Momentum()
    assert torch.equal(param.detach(), before - (before * 0.01 + 1) * 0.5)
