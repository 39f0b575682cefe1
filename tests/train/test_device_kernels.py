"""Training on a device with kernels of its own, emulated: the bits of the CPU kernels, and no wait in backward.

The stand-in device computes, everything of the model stands on it, and what a GPU would give to its CUDA kernels goes
to the bodies of those kernels on the host (tests/native/emulated_cuda.py). Sums and flags cannot be read on the host
before they were fetched, and each fetch, where a GPU would make the host wait, is counted.
"""

import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import gemini
from gemini import kernels
from gemini.errors import GeminiError, NonFiniteGradient
from gemini.tiers import Tier
from gemini.train.params.handle import handles_of
from tests import models
from tests.native.emulated_cuda import EmulatedGpu, EmulatedKernels, emulate
from tests.standin_device import StandinDevice
from tests.train import test_update_rules as update_rules
from tests.train.helpers import assert_same_snapshot, manage, snapshot
from tests.world import world_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")

STEPS = 3
RECIPE = models.Recipe(num_steps=STEPS)


@dataclass(frozen=True)
class How:
    """One way to train."""

    gradients: str = "retain"
    precision: str = "bf16"
    clips: bool = True
    num_micro: int = 1
    in_backward: bool = False
    on_gpu: float = 1.0
    streamed: float = 0.0

    def __str__(self) -> str:
        said = [self.gradients, self.precision, "clipped" if self.clips else "", f"{self.num_micro} micro-batches"]
        said += ["in backward"] * self.in_backward + [f"{1 - self.on_gpu:.0%} on the host"] * (self.on_gpu < 1)
        said += [f"{self.streamed:.0%} of that streamed"] * (self.streamed > 0)
        return ", ".join(filter(None, said))


def wrap(how: How, device: StandinDevice, folder: Path) -> tuple[Any, gemini.HybridAdam]:
    homes = {"weights_on_gpu": 1, "optimizer_on_gpu": how.on_gpu, "updates_on_gpu": how.streamed}
    settings = {"precision": how.precision, "gradients": how.gradients, "max_chunk": 8192}
    model = manage(models.make_model("llama"), folder, device, gpu="64MiB", homes=homes, **settings)
    groups = models.param_groups(model, RECIPE)
    return model, gemini.HybridAdam(groups, betas=RECIPE.betas, step_in_backward=how.in_backward)


@dataclass
class Seen:
    """Losses and norms, by step how often the host waited (in backward, in clipping, in the step), and bytes moved."""

    values: list[float] = field(default_factory=list)
    waits: list[tuple[int, int, int]] = field(default_factory=list)
    moved: int = 0


def train(model: Any, optimizer: Any, how: How, emulated: EmulatedKernels | None = None) -> Seen:
    seen, scaler = Seen(), gemini.GradScaler("cpu", enabled=how.precision == "fp16")
    for micro_batches in models.make_batches(STEPS, how.num_micro):
        counts = [num_waits(emulated)]
        for batch in micro_batches:
            loss = model(**batch).loss
            scaler.scale(loss / how.num_micro).backward()
            seen.values.append(float(loss.detach()))
        counts.append(num_waits(emulated))
        if how.clips:
            scaler.unscale_(optimizer)
            seen.values.append(float(model.clip_grad_norm_(1.0)))
        counts.append(num_waits(emulated))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        counts.append(num_waits(emulated))
        seen.waits.append((counts[1] - counts[0], counts[2] - counts[1], counts[3] - counts[2]))
        seen.moved += sum(world_of(model).moved_last_step().values())
    world_of(model).settle()  # the emulation counts what any model launches, and updates go on behind the last step
    return seen


def num_waits(emulated: EmulatedKernels | None) -> int:
    return 0 if emulated is None else len(emulated.num_fetched)


NEVER, IN_CLIP, IN_STEP = (0, 0, 0), (0, 1, 0), (0, 0, 1)
PROMISED = [
    (How(), NEVER),  # the device clips, and stops what is not finite
    (How(clips=False), NEVER),
    (How(num_micro=2), NEVER),  # the second backward adds in fp32
    (How(gradients="accumulate", num_micro=2, precision="fp32"), NEVER),
    (How(precision="fp16"), IN_CLIP),
    (How(precision="fp16", clips=False), IN_STEP),
    (How(gradients="transient", clips=False, in_backward=True), IN_STEP),
    (How(gradients="transient", clips=False, in_backward=True, precision="fp32"), IN_STEP),
    (How(clips=False, in_backward=True), IN_STEP),
    (How(on_gpu=0.5), IN_STEP),  # the device clips, and what is updated on the host waits for its factor
    (How(gradients="transient", clips=False, in_backward=True, on_gpu=0.5), None),  # updates on the host look first
    (How(on_gpu=0.0, streamed=1.0), IN_STEP),  # gradients left for the host, summed up before
    (How(on_gpu=0.5, streamed=0.5, precision="fp32"), IN_STEP),
    (How(gradients="transient", clips=False, in_backward=True, on_gpu=0.0, streamed=1.0), None),
]


@pytest.mark.slow
@pytest.mark.sweep(every=3)
@pytest.mark.parametrize(("how", "promised"), PROMISED, ids=[str(how) for how, _ in PROMISED])
def test_the_bits_of_the_cpu_kernels_and_the_promised_waits(
    how: How, promised: tuple[int, int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, optimizer = wrap(how, StandinDevice(), tmp_path)
    expected = train(plain, optimizer, how)
    gpu = EmulatedGpu()
    emulated = emulate(monkeypatch, gpu)
    model, optimizer = wrap(how, gpu, tmp_path)
    emulated.module.launches.clear()
    seen = train(model, optimizer, how, emulated)
    assert seen.values == expected.values
    assert_same_snapshot(snapshot(model), snapshot(plain))
    assert (how.on_gpu == 1) is (seen.moved == 0), "gradients that are added up on the device stay there"
    if promised is not None:
        assert seen.waits == [promised] * STEPS
    chunks = world_of(model).chunks
    chunks = [chunk for chunk in chunks if chunk.planes["exp_avg"].tier is Tier.GPU or chunk.streamed]
    num_params = sum(len(world_of(model).by_chunk[chunk.spec.index]) for chunk in chunks)
    per_step = num_params if how.gradients == "transient" else len(chunks)
    launches = emulated.module.launches["update"]
    if how.streamed:  # tile by tile
        assert launches >= STEPS * per_step
    else:
        assert launches == STEPS * per_step, "one for a chunk, or for a gradient left alone"
    together = how.gradients != "transient" and not how.streamed
    assert not together or max(emulated.module.segments) > 1, "no chunk held params of two groups"


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("gradients", ["retain", "transient"])
@pytest.mark.parametrize("which", [name for name, rule in update_rules.NAMED.items() if rule.has_kernel])
def test_every_rule_runs_by_the_device_s_kernels(
    which: str, gradients: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, gpu = update_rules.NAMED[which], EmulatedGpu()
    plain = update_rules.plain_loop(rule, "bf16", range(2), None)
    emulated = emulate(monkeypatch, gpu)
    config = gemini.GeminiConfig(
        precision="bf16",
        gradients=gradients,
        device=gpu,
        memory=gemini.MemoryBudget(gpu="64MiB", cpu="64MiB", nvme="64MiB", nvme_path=tmp_path),
        placement=gemini.StaticPlacement(weights_on_gpu=1, optimizer_on_gpu=1),
        optimizer=rule,
        max_chunk=8192,
    )
    model = gemini.GeminiDDP(update_rules.make_model(), config)
    optimizer = update_rules.make_optimizer(model, rule, step_in_backward=gradients == "transient")
    assert update_rules.train(model, optimizer, range(2), None) == plain["losses"]
    assert emulated.module.launches["update"] >= 2 * len(world_of(model).chunks)
    update_rules.assert_same(model, plain)


def spoil(model: Any, batch: dict[str, torch.Tensor], by: float) -> None:
    """A backward whose gradients are not finite in the first layer's MLP and in everything before it."""

    def spoil_output(module: Any, args: Any, output: Any) -> None:
        output.register_hook(lambda grad: grad * by)

    hook = model.model.layers[0].mlp.register_forward_hook(spoil_output)
    model(**batch).loss.backward()
    hook.remove()


@pytest.mark.parametrize("told", ["at once", "in the next backward", "when all is waited for"])
def test_a_bad_gradient_changes_nothing(told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, batch = EmulatedGpu(), models.make_batches(1, 1)[0][0]
    emulated = emulate(monkeypatch, gpu)
    model, optimizer = wrap(How(), gpu, tmp_path)
    before = snapshot(model)
    spoil(model, batch, float("inf"))
    refusal = pytest.raises(NonFiniteGradient, match=r"No weight was changed: call optimizer\.zero_grad")
    if told == "at once":
        with refusal:
            model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    else:
        assert not model.clip_grad_norm_(1.0).isfinite()
        optimizer.step()
        optimizer.zero_grad()
        assert not emulated.num_fetched, "the device has stopped the update, and nobody has looked"
        with refusal:
            model(**batch).loss.backward() if told == "in the next backward" else model.memory_report()
    assert len(emulated.num_fetched) == 1
    optimizer.zero_grad()
    assert_same_snapshot(snapshot(model), before)
    plain, other = wrap(How(), StandinDevice(), tmp_path)
    monkeypatch.undo()
    expected = train(plain, other, How())
    emulate(monkeypatch, gpu)
    assert train(model, optimizer, How()).values == expected.values


def test_a_bad_gradient_beside_zeros_that_nothing_landed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, batch = EmulatedGpu(), models.make_batches(1, 1)[0][0]
    emulate(monkeypatch, gpu)
    model, optimizer = wrap(How(), gpu, tmp_path)
    before = snapshot(model)
    model(**batch).loss.backward()
    optimizer.zero_grad(set_to_none=False)
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state  # without the head, whose zeros stay
    (hidden.float().sum() * float("nan")).backward()
    optimizer.step()
    with pytest.raises(NonFiniteGradient, match=r"the gradient of 'model\.[^']+' holds inf or NaN"):
        model.memory_report()
    optimizer.zero_grad()
    assert_same_snapshot(snapshot(model), before)


def test_a_look_that_is_interrupted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, batch = EmulatedGpu(), models.make_batches(1, 1)[0][0]
    emulate(monkeypatch, gpu)
    model, optimizer = wrap(How(), gpu, tmp_path)
    before = snapshot(model)
    spoil(model, batch, float("nan"))
    optimizer.step()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(kernels, "totals", Mock(side_effect=KeyboardInterrupt))
        model.memory_report()
    with pytest.raises(NonFiniteGradient, match="No weight was changed"):
        model.memory_report()
    optimizer.zero_grad()
    assert_same_snapshot(snapshot(model), before)


def test_a_look_that_has_told_nobody_yet_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, batch = EmulatedGpu(), models.make_batches(1, 1)[0][0]
    emulate(monkeypatch, gpu)
    model, optimizer = wrap(How(), gpu, tmp_path)
    world = world_of(model)
    spoil(model, batch, float("nan"))
    optimizer.step()
    forget = world.updates.unseen.forget
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, NonFiniteGradient)):
        patch.setattr(world.updates.unseen, "forget", lambda: (forget(), signal.raise_signal(signal.SIGINT)))
        model.memory_report()
    assert {handle.num_steps for handle in handles_of(model.parameters())} == {0}, "no step was made"


@pytest.mark.parametrize("gradients", ["transient", "retain"])
@pytest.mark.parametrize("noticed_by", ["step", "drain"])
def test_chunks_with_a_bad_gradient_are_not_updated_and_the_step_says_which(
    gradients: str, noticed_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, how = EmulatedGpu(), How(gradients, clips=False, in_backward=True)
    emulated = emulate(monkeypatch, gpu)
    model, optimizer = wrap(how, gpu, tmp_path)
    train(model, optimizer, how)
    gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer)
    before, num_waits = snapshot(model), len(emulated.num_fetched)
    spoil(model, models.make_batches(1, 1)[0][0], float("nan"))
    assert len(emulated.num_fetched) == num_waits, "backward does not look"
    with pytest.raises(NonFiniteGradient) as raised:
        optimizer.step() if noticed_by == "step" else world_of(model).settle()
    assert len(emulated.num_fetched) == num_waits + 1
    after = snapshot(model)
    changed = {name for name in before if not torch.equal(before[name]["exp_avg"], after[name]["exp_avg"])}
    by_chunk = world_of(model).by_chunk.values()
    stopped = [chunk for chunk in by_chunk if not {handle.name for handle in chunk} & changed]
    updated = [chunk for chunk in by_chunk if chunk not in stopped]
    assert any("layers.0.mlp.down" in handle.name for chunk in stopped for handle in chunk)
    assert any("layers.1" in handle.name for chunk in updated for handle in chunk)
    for chunk in stopped:
        for handle in chunk:
            assert_same_snapshot({handle.name: after[handle.name]}, {handle.name: before[handle.name]})
    said = str(raised.value)
    assert f"but {len(updated)} others of this rank were in this backward: resume from a checkpoint" in said
    named = said.split("'")[1]
    assert named in {handle.name for chunk in stopped for handle in chunk}
    with pytest.raises(GeminiError, match="Load the last checkpoint"):
        model(**models.make_batches(1, 1)[0][0])
    gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
    assert_same_snapshot(snapshot(model), before)
    train(model, optimizer, how)


def test_where_every_gradient_is_bad_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = How("transient", clips=False, in_backward=True)
    plain, other = wrap(how, StandinDevice(), tmp_path)
    expected = train(plain, other, how)
    gpu = EmulatedGpu()
    emulate(monkeypatch, gpu)
    model, optimizer = wrap(how, gpu, tmp_path)
    before = snapshot(model)
    (model(**models.make_batches(1, 1)[0][0]).loss * float("nan")).backward()
    with pytest.raises(NonFiniteGradient, match=r"'lm_head\.weight' holds inf or NaN.*No weight was changed"):
        optimizer.step()
    assert_same_snapshot(snapshot(model), before)
    optimizer.zero_grad()
    assert train(model, optimizer, how).values == expected.values
    assert_same_snapshot(snapshot(model), snapshot(plain))


def test_an_fp16_step_with_inf_is_skipped_after_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, how = EmulatedGpu(), How(precision="fp16", clips=False)
    emulated = emulate(monkeypatch, gpu)
    model, optimizer = wrap(how, gpu, tmp_path)
    before = snapshot(model)
    scaler, batch = gemini.GradScaler("cpu"), models.make_batches(1, 1)[0][0]
    for loss in (model(**batch).loss * float("inf"), model(**batch).loss):
        assert_same_snapshot(snapshot(model), before)
        num_waits = len(emulated.num_fetched)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert len(emulated.num_fetched) == num_waits + 1, "unscale_, clipping, step and update wait once together"


def test_kernels_of_the_host_are_asked_for_what_is_the_host_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulation tells one memory from the other: else a step would prove nothing of either."""
    gpu = EmulatedGpu()
    emulate(monkeypatch, gpu)
    model, _ = wrap(How(on_gpu=0.5), gpu, tmp_path)
    planes = [plane for chunk in world_of(model).chunks for plane in chunk.planes.values()]
    for tier in (Tier.GPU, Tier.CPU):
        there = [plane.tensor for plane in planes if plane.tier is tier]
        assert there and all((kernels._cuda_for(tensor) is not None) is (tier is Tier.GPU) for tensor in there)
