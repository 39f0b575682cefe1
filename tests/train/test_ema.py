"""Moving averages as a plane: the bits of a plain fp32 loop beside training, wherever chunks live."""

import copy
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini import optim
from gemini.errors import GeminiError, PlanMismatch, StorageError
from gemini.optim import AdamRule, AveragedRule
from gemini.planning.planes import ADAM
from gemini.planning.working import staging_bytes, staging_sets, tile_numel
from gemini.rules import Arrays, Segment, UpdateRule
from gemini.tiers import Tier
from tests import kernel_settings
from tests.plain import Plain
from tests.scaling import new_scaler
from tests.train import guesses, helpers
from tests.train.helpers import (
    Blocks,
    adam,
    assert_same_snapshot,
    assert_same_state,
    failing,
    make_config,
    noise,
    same_bits,
    snapshot,
    train,
    train_plain,
)
from tests.world import world_of

DECAY = 0.9
RULE = AveragedRule(decay=DECAY)


class PlainAverage(Plain):
    """The plain loop, and after each of its steps that of the average, over fp32 masters."""

    def __init__(self, model: nn.Module, *args: Any, decay: Callable[[int], float] = lambda step: DECAY, **how: Any):
        super().__init__(model, *args, **how)
        self.decay = decay
        self.averages = {name: self.master(name).clone() for name in self.states}

    @torch.no_grad()
    def step(self) -> None:
        before = {name: state["step"] for name, state in self.states.items()}
        super().step()
        for name, average in self.averages.items():
            if self.states[name]["step"] > before[name]:
                average.sub_((average - self.master(name)) * (1 - self.decay(self.states[name]["step"])))

    def averaged(self, name: str) -> torch.Tensor:
        return self.averages[name].view(self.model.get_parameter(name).shape)


ON_DEVICE = {
    "on the device": {"weights_on_gpu": 1.0, "optimizer_on_gpu": 1.0},
    "streamed": {"weights_on_gpu": 0.5, "updates_on_gpu": 1.0},
}
"""Updated by the stand-in for a GPU."""


def wrap(model: nn.Module, where: str, path: Path, rule: UpdateRule = RULE, **how: Any) -> Any:
    """Managed with averages, in budgets that have room for them in staging as well and for nothing else."""
    more = {key: how.pop(key) for key in ("update_threads", "durable") if key in how}
    room = 2**16 if where == "standin" and rule.spec.whole else 0  # of staging for a whole param, on the device
    config = make_config(model, where, path, slack=room, **how)
    memory = vars(config.memory)
    if where in ON_DEVICE:
        memory, more["placement"] = {**memory, "gpu": "64MiB"}, gemini.StaticPlacement(**ON_DEVICE[where])
    if where in ("disk", "serial", "small"):
        largest = max(param.numel() for param in model.parameters())
        tile, sets = tile_numel(2 * largest), staging_sets(Tier.CPU, config.precision, overlap=True)
        memory = {**memory, "cpu": memory["cpu"] + sets * (staging_bytes(tile, rule.spec) - staging_bytes(tile, ADAM))}
    if "durable" in more:
        memory = {**memory, "cpu": "64MiB", "durable": more.pop("durable")}
    return gemini.GeminiDDP(model, replace(config, memory=gemini.MemoryBudget(**memory), optimizer=rule, **more))


def assert_same_averages(model: Any, plain: PlainAverage) -> None:
    """Masters, states and averages; and averages in the place of masters, which come back with all their bits."""
    assert_same_state(model, plain)
    ema = gemini.EMA(model)
    before = snapshot(model)
    for name in plain.states:
        assert same_bits(ema.full_param(name), plain.averaged(name)), name
    with ema.swapped_in():
        for name, param in plain.model.named_parameters():
            assert same_bits(model.full_param(name, torch.float32), plain.averaged(name)), name
            assert same_bits(ema.full_param(name), plain.averaged(name)), name
            assert same_bits(model.full_param(name), plain.averaged(name).to(param.dtype)), name
    assert_same_snapshot(snapshot(model), before)
    assert_same_state(model, plain)


# ---- the bits --------------------------------------------------------------------------------------------------------


def loss_of(model: Any, seed: int) -> torch.Tensor:
    dtype = model.get_parameter("layers.0.weight").dtype
    loss = model(noise(2, 5, 32, seed=seed, dtype=dtype)).float().square().mean()
    return loss * 2.0**40 if dtype is torch.float16 and seed == 4 else loss


def accumulate(model: Any, optimizer: Any, plain: Plain, seed: int) -> None:
    for micro in range(2):
        helpers.backward(model, loss_of(model, 2 * seed + micro))
        plain.backward(loss_of(plain.model, 2 * seed + micro))
    helpers.make_step(model, optimizer)
    optimizer.zero_grad()
    plain.step()


def clipped(model: Any, optimizer: Any, plain: Plain, seed: int) -> None:
    train(model, optimizer, [seed], loss_of)
    train_plain(plain, [seed], loss_of)


def not_clipped(model: Any, optimizer: Any, plain: Plain, seed: int) -> None:
    train(model, optimizer, [seed], loss_of, clip=None)
    train_plain(plain, [seed], loss_of, clip=None)


STEPS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "clipped": (clipped, {}, {}),
    "accumulated": (accumulate, {"gradients": "accumulate"}, {}),
    "in backward": (not_clipped, {}, {"step_in_backward": True}),
    "transient": (not_clipped, {"gradients": "transient"}, {"step_in_backward": True}),
}


@pytest.mark.parametrize("where", [*helpers.PLACEMENTS, *ON_DEVICE])
@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_the_bits_of_a_plain_loop(precision: str, how: str, where: str, tmp_path: Path) -> None:
    """In fp16 a step overflows: it is skipped, and averages stay with the weights."""
    step, config, of_optimizer = STEPS[how]
    if precision == "fp16" and of_optimizer:
        return
    scale = 2.0**10 if precision == "fp16" else None
    plain = PlainAverage(Blocks().to(torch.float32), precision, scale=scale)
    model = wrap(Blocks(), where, tmp_path, precision=precision, **config)
    new_scaler(model, scale or 1.0)
    optimizer = adam(model, **of_optimizer)
    for seed in range(6):
        step(model, optimizer, plain, seed)
        if seed in (0, 5):
            assert_same_averages(model, plain)
    assert world_of(model).handles[0].num_steps == (5 if precision == "fp16" else 6)


class LoopAverage:
    """What a program does that keeps an average itself, by the calls of ``EMAModel`` of diffusers: a copy of each
    param, moved behind each step with a decay that warms up, written into the params to evaluate, and back.
    """

    def __init__(self, params: Any):
        self.copies, self.kept, self.step_number = [p.detach().clone() for p in params], list[torch.Tensor](), 0

    def decay(self) -> float:
        step = self.step_number - 1
        return min(0.9999, (1 + step) / (10 + step)) if step > 0 else 0.0

    @torch.no_grad()
    def step(self, params: Any) -> None:
        self.step_number += 1
        weight = 1 - self.decay()
        for mine, param in zip(self.copies, params, strict=True):
            mine.sub_(weight * (mine - param))

    def store(self, params: Any) -> None:
        self.kept = [param.detach().cpu().clone() for param in params]

    def copy_to(self, params: Any) -> None:
        self._write(self.copies, params)

    def restore(self, params: Any) -> None:
        self._write(self.kept, params)

    def _write(self, values: list[torch.Tensor], params: Any) -> None:
        for value, param in zip(values, params, strict=True):
            param.data.copy_(value.to(param.device).data)


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_loop_that_averages_itself_goes_on_as_it_is_and_has_the_same_in_the_rule(where: str, tmp_path: Path) -> None:
    """The rows of the page for those who come from diffusers: the same bits, with nothing in the loop."""
    rule = AveragedRule(decay=lambda step: min(0.9999, step / (9 + step)) if step > 1 else 0.0)
    model = wrap(Blocks(), where, tmp_path, rule, precision="fp32")
    optimizer, ema, loop = adam(model), gemini.EMA(model), LoopAverage(model.parameters())
    for seed in range(4):
        train(model, optimizer, [seed], loss_of)
        loop.step(model.parameters())
    before = snapshot(model)
    loop.store(model.parameters())
    loop.copy_to(model.parameters())
    with torch.no_grad():
        by_loop = loss_of(model, 9)
    loop.restore(model.parameters())
    assert_same_snapshot(snapshot(model), before)
    with ema.swapped_in(), torch.no_grad():
        assert same_bits(loss_of(model, 9), by_loop)
    for (name, _), mine in zip(model.named_parameters(), loop.copies, strict=True):
        assert same_bits(ema.full_param(name), mine), name


@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
@pytest.mark.parametrize("clips", [False, True])
def test_a_guess_that_is_undone_undoes_its_average(
    clips: bool, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = PlainAverage(Blocks())
    model = wrap(Blocks(), where, tmp_path, durable=where != "ram", update_threads=1)
    optimizer = adam(model, **guesses.GUESSES)
    guesses.guess_always(model, monkeypatch)
    for seed in range(4):
        clip = guesses.ALWAYS if clips and seed % 2 else guesses.NEVER
        train(model, optimizer, [seed], loss_of, clip=clip, after=lambda _: guesses.let_guesses_end(model))
        train_plain(plain, [seed], loss_of, clip=clip)
    assert_same_averages(model, plain)
    kept, undone = guesses.counts(model)
    assert kept > 0 and (undone > 0) == clips
    world_of(model).close()


RULES: dict[str, UpdateRule] = {
    "sgd": optim.SGDRule(), "muon": optim.MuonRule(), "adalomo": optim.AdaLomoRule(),
    "adopted": optim.adopt(torch.optim.NAdam), "adopted whole": optim.adopt(torch.optim.Adafactor),
}  # fmt: skip


@pytest.mark.parametrize("which", RULES)
def test_every_rule_has_averages_beside_its_own_states(which: str, where: str, tmp_path: Path) -> None:
    """Weights are those of the rule alone, and averages of the masters that it leaves. Every second update counts."""
    rule, averaged = RULES[which], AveragedRule(RULES[which], every_second)
    alone = wrap(Blocks(), "ram", tmp_path, rule)
    model = wrap(Blocks(), where, tmp_path, averaged)
    optimizers = [make_optimizer(one, rule) for one in (alone, model)]
    wanted: dict[str, torch.Tensor] = {
        name: alone.full_param(name, torch.float32) for name, _ in alone.named_parameters()
    }
    for seed in range(4):
        for one, optimizer in zip((alone, model), optimizers, strict=True):
            train(one, optimizer, [seed], loss_of)
        for name, average in wanted.items():
            average.sub_((average - alone.full_param(name, torch.float32)) * (1 - every_second(seed + 1)))
    ema = gemini.EMA(model)
    for name, average in wanted.items():
        assert same_bits(model.full_param(name, torch.float32), alone.full_param(name, torch.float32)), name
        assert same_bits(ema.full_param(name), average), name
    world_of(model).check()


def every_second(step: int) -> float:
    return 0.75 if step % 2 else 1.0


def make_optimizer(model: Any, rule: UpdateRule) -> Any:
    groups = rule.grouped(model, [{"params": list(model.parameters())}])
    return rule.make(groups) if isinstance(rule, optim.AdoptedRule) else gemini.HybridOptimizer(groups, rule)


class Sometimes(Blocks):
    """Its second layer has no gradient in every other step, its third is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.path = (0, 1, 2) if float(x.sum()) > 0 else (0, 2)
        return super().forward(x)


def test_what_is_not_updated_has_its_average_stand_still(where: str, tmp_path: Path) -> None:
    plain, model = PlainAverage(Sometimes()), wrap(Sometimes(), where, tmp_path)
    optimizer = adam(model)
    assert_same_averages(model, plain)  # before any step: the weights
    for seed in range(4):
        clipped(model, optimizer, plain, seed)
    steps = {handle.name: handle.num_steps for handle in world_of(model).handles}
    assert steps["layers.0.bias"] == 4 and 0 < steps["layers.1.bias"] < 4 and steps["layers.2.bias"] == 0
    assert_same_averages(model, plain)


def test_only_adapters_have_averages(where: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def make() -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(Blocks(), peft.LoraConfig(r=2, target_modules=["layers.0", "layers.2"]))

    plain, model = PlainAverage(make()), wrap(make(), where, tmp_path)
    optimizer = adam(model)

    def on_noise(model: Any, seed: int) -> torch.Tensor:
        return model(noise(2, 5, 32, seed=seed)).float().square().mean()

    train(model, optimizer, range(3), on_noise)
    train_plain(plain, range(3), on_noise)
    assert_same_averages(model, plain)
    assert len([h for h in world_of(model).handles if "ema" in h.chunk.planes]) == 4
    with gemini.EMA(model).swapped_in():
        for change in (model.merge_adapter, model.unmerge_adapter):
            with pytest.raises(GeminiError, match=r"swapped_in\(\)`, where averages"):
                change()
    assert_same_averages(model, plain)


# ---- saved and resumed -----------------------------------------------------------------------------------------------


def saved_by_checkpoint(model: Any, optimizer: Any, path: Path) -> Callable[[Any, Any], None]:
    gemini.save_checkpoint(path / "saved", model, optimizer)
    return lambda model, optimizer: gemini.load_checkpoint(path / "saved", model, optimizer)


def saved_as_states(model: Any, optimizer: Any, path: Path) -> Callable[[Any, Any], None]:
    torch.save([model.state_dict(), optimizer.state_dict()], path / "states")
    of_model, of_optimizer = torch.load(path / "states")
    assert {"exp_avg", "ema"} <= of_optimizer["state"][0].keys()

    def load(model: Any, optimizer: Any) -> None:
        optimizer.load_state_dict(of_optimizer)
        model.load_state_dict(of_model)

    return load


@pytest.mark.parametrize("save", [saved_by_checkpoint, saved_as_states])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_resumed_run_has_the_same_averages(precision: str, save: Any, where: str, tmp_path: Path) -> None:
    plain, first = PlainAverage(Blocks(), precision), wrap(Blocks(), "half", tmp_path, precision=precision)
    optimizer = adam(first)
    for seed in range(2):
        clipped(first, optimizer, plain, seed)
    load = save(first, optimizer, tmp_path)
    second = wrap(Blocks(), where, tmp_path, precision=precision)
    optimizer = adam(second)
    load(second, optimizer)
    assert_same_averages(second, plain)
    for seed in range(2, 4):
        clipped(second, optimizer, plain, seed)
    assert_same_averages(second, plain)


def test_a_durable_store_keeps_them(tmp_path: Path) -> None:
    """What is swapped in between commits is what was there in the next one; a run that ends inside has the last."""
    folder, image = tmp_path / "store", tmp_path / "image"
    folder.mkdir()
    plain, model = PlainAverage(Blocks()), wrap(Blocks(), "disk", folder, durable=True)
    optimizer = adam(model)
    for seed in range(3):
        clipped(model, optimizer, plain, seed)
        gemini.save_checkpoint(folder, model, optimizer, wait=False)
        assert_same_averages(model, plain)
    with gemini.EMA(model).swapped_in():
        shutil.copytree(folder, image)
    clipped(model, optimizer, copy.deepcopy(plain), 7)
    world_of(model).close()
    model = wrap(Blocks(), "disk", image, durable=True)
    optimizer = adam(model)
    gemini.load_checkpoint(image, model, optimizer)
    assert_same_averages(model, plain)
    clipped(model, optimizer, plain, 3)
    assert_same_averages(model, plain)
    world_of(model).close()


def test_steps_of_before_the_wrap_are_gone_on_with(where: str, tmp_path: Path) -> None:
    """The average begins at the masters that they have left, in bf16 with the bits that weights do not show."""
    raw, plain = Blocks().bfloat16(), PlainAverage(Blocks().bfloat16())
    optimizer = adam(raw)
    train(raw, optimizer, range(2), loss_of, clip=None)
    train_plain(plain, range(2), loss_of, clip=None)
    model = wrap(raw, where, tmp_path)
    plain.averages = {name: plain.master(name).clone() for name in plain.states}
    for seed in range(2, 4):
        clipped(model, optimizer, plain, seed)
    assert_same_averages(model, plain)


def test_states_without_averages_are_refused_in_words(tmp_path: Path) -> None:
    averaged, alone = wrap(Blocks(), "ram", tmp_path), wrap(Blocks(), "ram", tmp_path, AdamRule())
    models = {"averaged": (averaged, adam(averaged)), "alone": (alone, adam(alone))}
    for name, (model, optimizer) in models.items():
        train(model, optimizer, range(2), loss_of)
        gemini.save_checkpoint(tmp_path / name, model, optimizer)
    before = [snapshot(model) for model, _ in models.values()]
    with pytest.raises(PlanMismatch, match=r"rule 'Adam', the model was wrapped for 'Adam with EMA'"):
        gemini.load_checkpoint(tmp_path / "alone", *models["averaged"])
    with pytest.raises(PlanMismatch, match="rule 'Adam with EMA', the model was wrapped for 'Adam'"):
        gemini.load_checkpoint(tmp_path / "averaged", *models["alone"])
    states = models["alone"][1].state_dict()
    with pytest.raises(ValueError, match=r"has no 'ema', and the rule 'Adam with EMA' has"):
        models["averaged"][1].load_state_dict(states)
    with pytest.raises(ValueError, match="has 'ema', and the rule 'Adam' has"):
        models["alone"][1].load_state_dict(models["averaged"][1].state_dict())
    for model, old in zip((averaged, alone), before, strict=True):
        assert_same_snapshot(snapshot(model), old)
    # As docs/guide/ema.md says: averages begin where the other run was.
    for number, (name, _) in enumerate(alone.named_parameters()):
        states["state"][number]["ema"] = alone.full_param(name, torch.float32)
    models["averaged"][1].load_state_dict(states)
    averaged.load_state_dict(alone.state_dict(dtype=torch.float32))
    assert all(
        same_bits(gemini.EMA(averaged).full_param(name), averaged.full_param(name, torch.float32))
        for name, _ in averaged.named_parameters()
    )


# ---- in the place of the weights -------------------------------------------------------------------------------------


def trained(where: str, path: Path, **how: Any) -> tuple[Any, Any, PlainAverage]:
    plain, model = PlainAverage(Blocks()), wrap(Blocks(), where, path, **how)
    optimizer = adam(model)
    for seed in range(2):
        clipped(model, optimizer, plain, seed)
    return model, optimizer, plain


def test_a_model_evaluates_with_them_and_trains_on(where: str, tmp_path: Path) -> None:
    """Also between micro-batches, whose gradients are kept, and with a checkpoint being written behind the training."""
    model, optimizer, plain = trained(where, tmp_path, gradients="accumulate")
    averaged = Blocks().bfloat16()
    averaged.load_state_dict({name: plain.averaged(name) for name in plain.averages})
    loss_of(model, 8).backward()
    plain.backward(loss_of(plain.model, 8))
    with gemini.EMA(model).swapped_in(), torch.no_grad():
        assert same_bits(loss_of(model, 7), loss_of(averaged, 7))
        with gemini.EMA(model).swapped_in(), model.parked():
            weights = dict(gemini.weights_for(model))
        assert all(same_bits(value, averaged.state_dict()[name]) for name, value in weights.items())
    loss_of(model, 9).backward()
    plain.backward(loss_of(plain.model, 9))
    optimizer.step()
    optimizer.zero_grad()
    plain.step()
    saving = gemini.save_checkpoint(tmp_path / "saved", model, optimizer, wait=False)
    assert_same_averages(model, plain)
    saving.wait()
    clipped(model, optimizer, plain, 3)
    gemini.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert gemini.EMA(model).full_param("layers.0.weight").isfinite().all()


def test_training_and_saving_are_refused_inside(where: str, tmp_path: Path) -> None:
    model, optimizer, plain = trained(where, tmp_path)
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
    helpers.backward(model, loss_of(model, 5))
    states = optimizer.state_dict()
    refused: list[Callable[[], Any]] = [
        lambda: loss_of(model, 6).backward(),
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(states),
        lambda: adam(model),
        lambda: gemini.save_checkpoint(tmp_path / "other", model, optimizer),
        lambda: gemini.load_checkpoint(tmp_path / "saved", model, optimizer),
        lambda: gemini.release(model),
    ]
    with gemini.EMA(model).swapped_in():
        for call in refused:
            with pytest.raises(GeminiError, match=r"swapped_in\(\)`, where averages are in the place of the weights"):
                call()
    assert not (tmp_path / "other").exists()
    optimizer.zero_grad()
    assert_same_averages(model, plain)
    with (
        model.gathered(model.layers[0].bias),
        pytest.raises(GeminiError, match=r"swapped_in\(\) inside"),
        gemini.EMA(model).swapped_in(),
    ):
        pass
    with pytest.raises(ZeroDivisionError), gemini.EMA(model).swapped_in():
        1 / 0  # noqa: B018
    assert_same_averages(model, plain)
    clipped(model, optimizer, plain, 2)
    assert_same_averages(model, plain)


@pytest.mark.parametrize("asked", ["loss", "input"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
def test_a_graph_from_the_other_side_of_the_block_is_refused(
    where: str, inside: bool, asked: str, tmp_path: Path
) -> None:
    """In memory too, where torch would count the writes itself and say no more than that."""
    model, optimizer, plain = trained(where, tmp_path)
    ema, x = gemini.EMA(model), noise(2, 5, 32, seed=1).requires_grad_()
    early = model(x).float().sum()
    with ema.swapped_in():
        late = model(x).float().sum()
    loss = late if inside else early
    with pytest.raises(GeminiError, match=r"`ema.swapped_in\(\)` has put averages .* run the forward again"):
        loss.backward() if asked == "loss" else torch.autograd.grad(loss, x)
    optimizer.zero_grad()
    clipped(model, optimizer, plain, 2)
    assert_same_averages(model, plain)


@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
def test_a_backward_that_broke_off_is_over(where: str, tmp_path: Path) -> None:
    model, _, plain = trained(where, tmp_path)
    output = loss_of(model, 5)
    output.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.backward()
    with gemini.EMA(model).swapped_in():
        assert same_bits(model.full_param("layers.0.weight", torch.float32), plain.averaged("layers.0.weight"))
    assert_same_averages(model, plain)


def test_a_second_thread_is_refused_inside(tmp_path: Path) -> None:
    model, _, plain = trained("ram", tmp_path)
    ema = gemini.EMA(model)

    def enter() -> None:
        with ema.swapped_in():
            pass

    with ThreadPoolExecutor(1) as pool, ema.swapped_in():
        with pytest.raises(GeminiError, match="while another thread is inside"):
            pool.submit(enter).result()
        assert same_bits(model.full_param("layers.0.weight", torch.float32), plain.averaged("layers.0.weight"))
    assert_same_averages(model, plain)


def test_what_breaks_off_in_the_middle_leaves_no_model_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, plain = trained("disk", tmp_path)
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
    world, real, calls = world_of(model), world_of(model).by_names.exchange, []

    def interrupted(handle: Any, kind: str) -> None:
        calls.append(handle)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        real(handle, kind)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(world.by_names, "exchange", interrupted)
        with gemini.EMA(model).swapped_in():
            raise AssertionError("never inside")
    assert len(calls) == 2 * len(world.handles)
    assert_same_averages(model, plain)
    full = failing(world.by_names, "exchange", 3, StorageError("no space left"), once=True)
    with full, pytest.raises(StorageError, match="no space left"), gemini.EMA(model).swapped_in():
        raise AssertionError("never inside")
    with pytest.raises(GeminiError, match="broke off"):
        loss_of(model, 2)
    gemini.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert_same_averages(model, plain)


# ---- what it takes, and what is refused ------------------------------------------------------------------------------


def test_averages_take_four_bytes_per_param_in_memory_and_plans(tmp_path: Path) -> None:
    """And each update goes over the masters (8 bytes) and the averages (8) once more, in a pass of its own."""
    model, numel = wrap(Blocks(), "ram", tmp_path), sum(param.numel() for param in Blocks().parameters())
    assert 4 * numel <= world_of(model).held(Tier.CPU, "ema") <= 4 * numel + 6 * 8192  # whole pages
    trace = gemini.trace(Blocks(), {"x": noise(2, 5, 32)}, precision="bf16", loss=lambda out: out.float().mean())
    memory = gemini.MemoryBudget(cpu="1GiB")
    averaged, alone = (gemini.plan(trace, None, memory, optimizer=rule) for rule in (RULE, AdamRule()))
    assert averaged.bytes_per_param == pytest.approx(alone.bytes_per_param * 16 / 12, rel=0.01)
    held = [sum(tier.get("ema", 0) for tier in plan.held.values()) for plan in (averaged, alone)]
    assert held == [world_of(model).held(Tier.CPU, "ema"), 0]
    assert RULE.spec.touched == ADAM.touched + 16


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: AveragedRule(decay=1.5), ValueError, r"decay=\) must be in \[0, 1\], got 1.5"),
        (lambda: AveragedRule(decay="0.9"), TypeError, "must be a number"),  # type: ignore[arg-type]
        (lambda: AveragedRule(dtype=torch.bfloat16), ValueError, "averages are kept in torch.float32"),
        (lambda: AveragedRule(RULE), TypeError, "a rule without an average"),
        (lambda: AveragedRule(AdamRule), TypeError, "rule=\\) is a rule without"),  # type: ignore[arg-type]
        (lambda: gemini.GeminiConfig(optimizer=RULE, states="compact"), ValueError, "not for 'Adam with EMA'"),
        (lambda: gemini.EMA(Blocks()), ValueError, "takes a managed model"),
        (
            lambda: gemini.EMA(wrap(Blocks(), "ram", tmp_path, AdamRule())),
            GeminiError,
            "keeps no average.*AveragedRule",
        ),
    ]
    for call, kind, words in refused:
        with pytest.raises(kind, match=words):
            call()
    model = wrap(Blocks(), "ram", tmp_path, AveragedRule(decay=lambda step: 2.0 if step > 1 else 0.5))
    optimizer = adam(model)
    train(model, optimizer, [0], loss_of)
    before = snapshot(model)
    loss_of(model, 1).backward()
    with pytest.raises(ValueError, match=r"decay\(2\) of AveragedRule\(.*lambda.* must be in \[0, 1\], got 2.0"):
        optimizer.step()
    assert_same_snapshot(snapshot(model), before)
    with pytest.raises(GeminiError, match="wrapped for"):
        gemini.HybridOptimizer(model.parameters(), AveragedRule(decay=0.5))
    gemini.HybridOptimizer(model.parameters(), world_of(model).config.optimizer)


@pytest.mark.parametrize("isa", ["native", "reference"])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_device_stops_leaves_the_average_too(is_first: bool, isa: str) -> None:
    """And what it clips there goes into it: kernels by turns, with the bits of the torch lines in one."""
    number = 1000
    states = {kind: noise(number, seed=seed, dtype=torch.float32) for seed, kind in enumerate(("exp_avg", "ema"))}
    states["exp_avg_sq"] = states["ema"].square()
    weights, grad = noise(number, seed=3, dtype=torch.float32), noise(number, seed=4)
    wanted, old = copy.deepcopy((weights, states)), copy.deepcopy((weights, states))
    step = 1 if is_first else 2
    RULE.update(wanted[0], grad, wanted[1], RULE.scalars(RULE.defaults, step, 0.25), None)
    arrays, segments = Arrays(weights, None, states, grad), [Segment(0, number, RULE.scalars(RULE.defaults, step, 1.0))]
    with kernel_settings.use_isa(isa if isa == "reference" else None):
        stop = torch.zeros(1, dtype=torch.int32)
        RULE.run(arrays, segments, stop.fill_(1), torch.tensor([0.25]))
        assert all(same_bits(states[kind], old[1][kind]) for kind in states) and same_bits(weights, old[0])
        RULE.run(arrays, segments, stop.fill_(0), torch.tensor([0.25]))
    assert all(same_bits(states[kind], wanted[1][kind]) for kind in states) and same_bits(weights, wanted[0])


def test_ctrl_c_before_the_masters_come_back_does_not_keep_them_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block is over then: nobody else would bring them back, and each step would be refused."""
    rule = gemini.optim.AveragedRule(decay=0.5)
    model: Any = gemini.GeminiDDP(nn.Linear(4, 4), gemini.GeminiConfig(optimizer=rule, device="cpu", precision="fp32"))
    optimizer, x, leave, calls = gemini.HybridAdam(model.parameters(), lr=0.1), torch.ones(2, 4), gemini.EMA._leave, []

    def interrupted(self: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        leave(self, *args)

    for step in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            master = model.full_param("weight")
            monkeypatch.setattr(gemini.EMA, "_leave", interrupted)
            with pytest.raises(KeyboardInterrupt), gemini.EMA(model).swapped_in():
                pass
            assert torch.equal(model.full_param("weight"), master) and len(calls) == 2
