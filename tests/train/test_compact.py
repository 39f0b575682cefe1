"""Compact states from outside: the bits of their plain loop wherever chunks live, checkpoints that convert, refusals.

The plain loop keeps whole params one after the other: compact ones as bytes and scales beside a master of 24 bits,
small ones exact. What is small is lowered here, so that the matrices of a tiny model are compact and its norms are not.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gemini.integrations.torch_files import promised_optimizer_state, write_torch_file
from torch import Tensor, nn

import gemini
from gemini import kernels
from gemini.errors import PlanMismatch
from gemini.kernels import reference
from gemini.kernels.reference import decode, encode
from gemini.optim import AdamRule, LionRule, MuonRule, PlainSGDRule, SGDRule
from gemini.optim.around import CompactRule
from gemini.planning import rules as spec_rules
from gemini.planning.planes import RESIDUAL, PlaneSpec
from gemini.rules import UpdateRule, Where
from gemini.train.checkpoint import read as checkpoint_read
from tests import kernel_settings, models
from tests.train import test_update_rules as rules
from tests.train.helpers import assert_same_snapshot, snapshot
from tests.train.test_checkpoint_values import rewrite
from tests.train.test_update_rules import bits, loss_of, make_model, train
from tests.world import world_of

CLIP = 0.1
EXACT: dict[str, UpdateRule] = {
    "adam": AdamRule(), "lion": LionRule(), "sgd": SGDRule(), "plain sgd": PlainSGDRule(),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _matrices_are_compact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_rules, "SMALLEST", 600)


def make_optimizer(model: Any, which: str, **how: Any) -> gemini.HybridOptimizer:
    if which == "adam":
        return gemini.HybridAdam(model.parameters(), lr=2e-3, weight_decay=0.1, **how)
    return rules.make_optimizer(model, EXACT[which], **how)


def managed(config: gemini.GeminiConfig, which: str, **how: Any) -> tuple[Any, gemini.HybridOptimizer]:
    model = gemini.GeminiDDP(make_model(), config)
    return model, make_optimizer(model, which, **how)


def group_of(which: str) -> dict[str, Any]:
    rule = EXACT[which]
    own = {"lr": 2e-3, "weight_decay": 0.1} if which == "adam" else rules.HYPERS[type(rule)]
    return {**rule.defaults, **own}


def is_compact(param: Tensor) -> bool:
    return param.dim() > 1 and param.numel() >= 600


def rounded24(master: Tensor) -> Tensor:
    hi, lo = torch.empty(master.numel(), dtype=torch.bfloat16), torch.empty(master.numel(), dtype=torch.int8)
    with kernel_settings.use_isa("reference"):
        kernels.split_master(master, hi, lo)
        kernels.join_master(hi, lo, master)
    return master


def upper(total: Tensor) -> Tensor:
    hi, lo = torch.empty(total.numel(), dtype=torch.bfloat16), torch.empty(total.numel(), dtype=torch.int8)
    with kernel_settings.use_isa("reference"):
        kernels.split_master(total, hi, lo)
    return hi


def micro_batches(steps: range, micro: int) -> list[list[int]]:
    """Their seeds, step by step."""
    return [[step * micro + number for number in range(micro)] for step in steps]


def plain_loop(which: str, steps: range, clip: float | None = None, *, micro: int = 1) -> dict[str, Any]:
    """The loop that defines the bits. Several micro-batches are summed up in fp32 numbers that are rounded to 24 bits
    after every addition, of which updates read the upper 16.
    """
    model, losses, exact, group = make_model(), [], EXACT[which], group_of(which)
    coded, masters, states = CompactRule(exact), {}, {}
    for name, param in model.named_parameters():
        masters[name] = param.detach().float().reshape(-1).clone()
        rule: Any = exact
        if is_compact(param):
            rounded24(masters[name])
            rule = coded
        states[name] = {
            s.kind: torch.zeros(s.num_items(param.numel()), dtype=getattr(torch, s.dtype)) for s in rule.spec.planes
        }
        param.data = models.rounded(masters[name], "bf16").view(param.shape)
    for step, seeds in enumerate(micro_batches(steps, micro), 1):
        grads: dict[str, Tensor] = {}
        for seed in seeds:
            (loss := loss_of(model, seed)).backward()
            losses.append(loss.item())
            for name, param in model.named_parameters():
                assert param.grad is not None
                grad, param.grad = param.grad.reshape(-1), None
                if micro > 1:
                    grad = rounded24(grads[name] + grad.float() if name in grads else grad.float())
                grads[name] = grad
        if micro > 1:
            grads = {name: upper(total) for name, total in grads.items()}
        scale = 1.0
        if clip is not None:
            squares = [reference.total(reference.sum_squares(grad)) for grad in grads.values()]
            scale = min(1.0, clip / (math.sqrt(reference.total(squares)) + 1e-6))
        for name, param in model.named_parameters():
            rule = coded if is_compact(param) else exact
            with kernel_settings.use_isa("reference"):
                rule.update(masters[name], grads[name], states[name], rule.scalars(group, step, scale), Where(name, 0))
            if rule is coded:
                rounded24(masters[name])
            param.data = models.rounded(masters[name], "bf16").view(param.shape)
    return {"losses": losses, "masters": masters, "states": states}


def config_for(which: str, **how: Any) -> gemini.GeminiConfig:
    rule = None if which == "adam" else EXACT[which]
    settings = {"states": "compact", "device": "cpu", "max_chunk": 6000, "update_threads": 1, **how}
    return gemini.GeminiConfig(precision="bf16", optimizer=rule, **settings)


def assert_same(model: Any, plain: dict[str, Any]) -> None:
    world = world_of(model)
    world.check()
    num_compact = 0
    for name, master in plain["masters"].items():
        assert torch.equal(bits(model.full_param(name, torch.float32)), bits(master)), name
        for kind, state in plain["states"][name].items():
            kept = world.read_plane(world.by_names[name], kind)
            assert kept.dtype is state.dtype and torch.equal(bits(kept), bits(state)), (name, kind)
        num_compact += not world.by_names[name].chunk.spec.exact
    assert 0 < num_compact < len(plain["masters"]), "some params are compact, and some are small"


PLACED = (
    "in memory", "one chunk each", "on nvme", "in turn", "transient", "on the device", "streamed",
    "streamed, transient", "half", "summed up",
)  # fmt: skip


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("told", PLACED)
@pytest.mark.parametrize("which", EXACT)
def test_bits_do_not_depend_on_chunks_tiles_and_tiers(
    which: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = None if "transient" in told else CLIP
    plain = plain_loop(which, range(3), clip)
    config = config_for(which, **rules.settings_of(told, tmp_path))
    with models.tiles_of(monkeypatch, None if told == "in memory" else 4096):
        model, optimizer = managed(config, which, step_in_backward="transient" in told)
        assert train(model, optimizer, range(3), clip) == plain["losses"]
        assert_same(model, plain)
    if told == "on nvme":  # all but scales
        for chunk in world_of(model).chunks:
            tiers = {kind: plane.tier for kind, plane in chunk.planes.items()}
            assert all((tier is gemini.Tier.CPU) == kind.endswith("_scale") for kind, tier in tiers.items()), tiers


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("which", EXACT)
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(which: str, tmp_path: Path) -> None:
    plain = plain_loop(which, range(4))
    config = config_for(which, **rules.settings_of("on nvme", tmp_path))
    model, optimizer = managed(config, which)
    losses = train(model, optimizer, range(2), None)
    gemini.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    for again in (config, config_for(which, max_chunk=64)):
        other, resumed = managed(again, which)
        gemini.load_checkpoint(tmp_path / "checkpoint", other, resumed)
        assert losses + train(other, resumed, range(2, 4), None) == plain["losses"]
        assert_same(other, plain)


# ---- conversion ------------------------------------------------------------------------------------------------------


def saved(states: str, which: str, path: Path, **how: Any) -> tuple[Any, Any]:
    """A model after three steps that is saved to ``path``, and its optimizer."""
    model, optimizer = managed(config_for(which, states=states, **how), which)
    train(model, optimizer, range(3), None)
    gemini.save_checkpoint(path, model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("where", ["memory", "nvme"])
@pytest.mark.parametrize("which", EXACT)
def test_exact_states_become_compact_and_it_is_said_what_they_lost(
    which: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, before = saved("exact", which, tmp_path / "exact")
    how = rules.settings_of("on nvme", tmp_path) if where == "nvme" else {}
    with models.tiles_of(monkeypatch, 4096):
        model, optimizer = managed(config_for(which, **how), which)
        with pytest.warns(UserWarning, match=r"saved with exact states.* masters have 24 bits"):
            gemini.load_checkpoint(tmp_path / "exact", model, optimizer)
    for name, _ in model.named_parameters():
        master = exact.full_param(name, torch.float32)
        state, kept = before.full_state(name), optimizer.full_state(name)
        assert kept["step"] == state["step"] == 3
        coarse = is_compact(master)
        wanted = rounded24(master.reshape(-1).clone()).view(master.shape) if coarse else master
        assert torch.equal(model.full_param(name, torch.float32), wanted), name
        for spec in EXACT[which].spec.planes:
            assert kept[spec.kind].dtype is torch.float32
            if not coarse:
                assert torch.equal(kept[spec.kind], state[spec.kind]), (name, spec.kind)
                continue
            codes = torch.empty(master.numel(), dtype=torch.uint8 if spec.kind == "exp_avg_sq" else torch.int8)
            scales = torch.empty(-(-master.numel() // 64), dtype=torch.uint8)
            encode(state[spec.kind].reshape(-1), codes, scales)
            assert torch.equal(kept[spec.kind].reshape(-1), decode(codes, scales)), (name, spec.kind)
            error = (kept[spec.kind] - state[spec.kind]).norm() / state[spec.kind].norm()
            assert 0 < error < 0.02, (name, spec.kind, float(error))
    assert math.isfinite(train(model, optimizer, range(3, 5), None)[-1])


@pytest.mark.parametrize("which", EXACT)
def test_compact_states_become_exact_and_lose_nothing(
    which: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    coded, before = saved("compact", which, tmp_path / "compact")
    model, optimizer = managed(config_for(which, states="exact", **rules.settings_of("on nvme", tmp_path)), which)
    gemini.load_checkpoint(tmp_path / "compact", model, optimizer)
    assert not [w for w in recwarn if "states" in str(w.message)]
    for name, _ in model.named_parameters():
        assert torch.equal(model.full_param(name, torch.float32), coded.full_param(name, torch.float32)), name
        state, kept = before.full_state(name), optimizer.full_state(name)
        assert kept.keys() == state.keys()
        assert all(torch.equal(kept[kind], value) for kind, value in state.items()), name
    gemini.save_checkpoint(tmp_path / "there", model, optimizer)
    again = gemini.GeminiDDP(make_model(), config_for(which))
    with pytest.warns(UserWarning, match=" masters have 24 bits"):
        gemini.load_checkpoint(tmp_path / "there", again, make_optimizer(again, which))
    for name, _ in model.named_parameters():
        assert torch.equal(again.full_param(name, torch.float32), coded.full_param(name, torch.float32)), name


def test_compact_states_of_another_form_are_refused_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(spec_rules, "BLOCK", 128)
        rule = spec_rules.compact(AdamRule.spec)
    assert rule.planes[-1] == PlaneSpec("exp_avg_sq_scale", "uint8", 128)
    model, optimizer = saved("compact", "adam", tmp_path / "ours")
    before = snapshot(model)
    for states in ("compact", "exact"):
        here = gemini.GeminiDDP(make_model(), config_for("adam", states=states))
        with pytest.raises(PlanMismatch, match=r"compact states of another form .*for 128 elements.*for 64 elements"):
            checkpoint_read.check_rule(tmp_path, rule, world_of(here).rule)
    manifest = json.loads((tmp_path / "ours" / "manifest.json").read_text())
    assert manifest["exact"] and manifest["rule"][0] == "Adam, compact"
    manifest["rule"].pop()  # as codes of the first form were saved
    rewrite(tmp_path / "ours", manifest)
    with pytest.raises(PlanMismatch, match="codes of form 1.*codes of form 2"):
        gemini.load_checkpoint(tmp_path / "ours", model, optimizer)
    manifest["rule"][3] = "int4"
    rewrite(tmp_path / "ours", manifest)
    with pytest.raises(gemini.StorageError, match="this Gemini does not know"):
        gemini.load_checkpoint(tmp_path / "ours", model, optimizer)
    assert_same_snapshot(snapshot(model), before)


# ---- states from outside ---------------------------------------------------------------------------------------------


def test_a_state_dict_is_torchs_and_goes_both_ways(tmp_path: Path) -> None:
    model, optimizer = managed(config_for("adam"), "adam")
    train(model, optimizer, range(3), None)
    state = optimizer.state_dict()
    stock = torch.optim.AdamW([nn.Parameter(torch.zeros_like(p)) for p in make_model().parameters()])
    plain = {
        index: {kind: value for kind, value in own.items() if "residual" not in kind}
        for index, own in state["state"].items()
    }
    stock.load_state_dict({"state": plain, "param_groups": stock.state_dict()["param_groups"]})
    assert all(own["exp_avg_sq"].dtype is torch.float32 for own in stock.state_dict()["state"].values())
    masters = {name: model.full_param(name, torch.float32) for name, _ in model.named_parameters()}
    other = gemini.GeminiDDP(make_model(), config_for("adam", max_chunk=64))
    other.load_state_dict(model.state_dict(dtype=torch.float32))
    resumed = make_optimizer(other, "adam")
    resumed.load_state_dict(state)
    for name, master in masters.items():
        assert torch.equal(other.full_param(name, torch.float32), master), name
        kept, given = resumed.full_state(name), optimizer.full_state(name)
        for kind in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(kept[kind], given[kind], rtol=0.02, atol=1e-3 * float(given[kind].abs().max()))
    write_torch_file(promised_optimizer_state(optimizer), tmp_path / "states.pt")
    for index, own in torch.load(tmp_path / "states.pt")["state"].items():
        assert own.keys() == plain[index].keys()
        assert all(torch.equal(value, plain[index][kind]) for kind, value in own.items())


def test_weights_that_are_written_become_masters_of_24_bits() -> None:
    model = gemini.GeminiDDP(make_model(), config_for("adam"))
    value = torch.randn(144, 32, generator=torch.Generator().manual_seed(3))
    name = "model.layers.0.mlp.up_proj.weight"
    before = model.full_param(name, torch.float32)
    with torch.no_grad(), model.gathered(write=True):
        model.get_parameter(name).copy_(value)
    kept, written = model.full_param(name, torch.float32), value.bfloat16()
    same = models.rounded(before.reshape(-1), "bf16").view(144, 32) == written  # by chance: they keep what they had
    assert same.sum() < 50 and torch.equal(kept[same], before[same])
    assert torch.equal(kept[~same], written[~same].float()), "what is written into bf16 weights has no more bits"
    model.load_state_dict({**model.state_dict(), name: value})
    kept = model.full_param(name, torch.float32)
    assert torch.equal(kept.reshape(-1), rounded24(value.reshape(-1).clone()))
    world = world_of(model)
    assert world.by_names[name].chunk.planes[RESIDUAL].dtype is torch.int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_of_steps_before_wrapping_are_taken_over(dtype: torch.dtype) -> None:
    plain = make_model().to(dtype)
    optimizer = make_optimizer(plain, "adam")
    train(plain, optimizer, range(2), None)
    before = {
        name: {kind: value.clone() for kind, value in optimizer.state[param].items()}
        for name, param in plain.named_parameters()
    }
    masters = {}
    for name, param in plain.named_parameters():
        masters[name] = param.detach().float().reshape(-1).clone()
        if dtype is torch.bfloat16:
            kernels.join_master(param.detach().reshape(-1), before[name]["residual"].reshape(-1), masters[name])
    model = gemini.GeminiDDP(plain, config_for("adam"))
    for name, state in before.items():
        kept, master = optimizer.full_state(name), model.full_param(name, torch.float32).reshape(-1)
        assert kept["step"] == 2
        if not is_compact(model.full_param(name)):
            assert torch.equal(kept["exp_avg_sq"], state["exp_avg_sq"]) and torch.equal(master, masters[name])
            continue
        assert ((master - masters[name]).abs() <= masters[name].abs() * 2.0**-15).all(), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert 0 < (kept[kind] - state[kind]).norm() / state[kind].norm() < 0.02, (name, kind)
    assert math.isfinite(train(model, optimizer, range(2, 4), None)[-1])


def test_a_frozen_param_that_is_trained_later_has_exact_states() -> None:
    plain = make_model()
    plain.requires_grad_(False)
    plain.lm_head.requires_grad_(True)
    model = gemini.GeminiDDP(plain, config_for("adam"))
    optimizer = make_optimizer(model, "adam")
    train(model, optimizer, range(1), None)
    model.model.layers[0].mlp.up_proj.requires_grad_(True)
    train(model, optimizer, range(1, 3), None)
    chunk = world_of(model).by_names["model.layers.0.mlp.up_proj.weight"].chunk
    assert chunk.planes["exp_avg"].dtype is torch.float32 and chunk.planes[RESIDUAL].dtype is torch.int16
    assert world_of(model).by_names["lm_head.weight"].chunk.planes["exp_avg"].dtype is torch.int8
    assert optimizer.full_state("model.layers.0.mlp.up_proj.weight")["exp_avg"].abs().max() > 0


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "words"),
    [
        *(({"precision": name}, f"bf16 weight and 8 more bits .*precision='{name}' was") for name in ("fp16", "fp32")),
        *(
            ({"optimizer": rule}, "is for the rules Adam, Lion, SGD, SGD without momentum, not for")
            for rule in (MuonRule(), rules.Momentum(), rules.Coded())
        ),
        ({"states": "8bit"}, "states='8bit' is not known; use one of 'exact', 'compact'"),
    ],
)
def test_what_compact_states_do_not_go_with(how: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gemini.GeminiConfig(**{"states": "compact", **how})
    with pytest.raises(ValueError, match="precision='fp32' was asked for"):
        gemini.GeminiConfig(states="compact").resolved("fp32")


# ---- gradients summed up in bf16 -------------------------------------------------------------------------------------

# 24 bits of the sum wherever it lives, of which updates read 16.

SUMMED = ("in memory", "on nvme", "on the device", "streamed", "half", "in turn")


def train_summed(model: Any, optimizer: Any, steps: range, micro: int = 3) -> list[float]:
    losses = []
    for seeds in micro_batches(steps, micro):
        for seed in seeds:
            (loss := loss_of(model, seed)).backward()
            losses.append(loss.item())
        model.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def wrapped(which: str, told: str, folder: Path, gradients: str = "accumulate_bf16") -> tuple[Any, Any]:
    settings = {**rules.settings_of(told, folder), "gradients": gradients}
    model = gemini.GeminiDDP(make_model(), config_for(which, **settings))
    return model, make_optimizer(model, which)


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("told", SUMMED)
@pytest.mark.parametrize("which", EXACT)
def test_sums_have_the_bits_of_the_plain_loop(
    which: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_loop(which, range(3), CLIP, micro=3)
    with models.tiles_of(monkeypatch, None if told == "in memory" else 4096):
        model, optimizer = wrapped(which, told, tmp_path)
        assert train_summed(model, optimizer, range(3)) == plain["losses"]
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
