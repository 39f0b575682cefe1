"""What a checkpoint keeps besides masters and states: all of it comes back, or is refused before anything changes."""

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import lr_scheduler

import gemini
from gemini.train.checkpoint import format as checkpoint_format
from gemini.train.checkpoint.states import rng_states
from tests.scaling import backward, make_step
from tests.train.helpers import adam, assert_same_snapshot, same_bits, snapshot, trainable, wrap
from tests.world import world_of


class Squares(nn.Sequential):
    """Computes its loss itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().square().mean()


class Tiny:
    """All that a checkpoint can hold, in a model of a few numbers."""

    def __init__(self, path: Path, precision: str = "fp16"):
        torch.manual_seed(0)
        model = Squares(nn.Linear(3, 4), nn.Linear(4, 2))
        model.register_buffer("angles", torch.tensor([1 - 2j, 3j]).conj())
        model.register_buffer("count", torch.tensor(7))
        model[1].bias.requires_grad_(False)
        self.model: Any = wrap(model, "ram", path, precision=precision)
        self.plain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = gemini.HybridAdam(
            [{"params": trained[:1]}, {"params": [*trained[1:], self.plain], "weight_decay": 0.0}], lr=1e-2
        )
        self.scheduler = lr_scheduler.OneCycleLR(self.optimizer, max_lr=2e-2, total_steps=10**6)

    def train(self) -> None:
        dtype = next(self.model.parameters()).dtype
        backward(self.model, self.model(torch.ones(2, 3, dtype=dtype)))
        self.plain.grad = torch.ones_like(self.plain)
        make_step(self.model, self.optimizer)
        with contextlib.suppress(ValueError, ArithmeticError):  # a schedule of other numbers may be over, say
            self.scheduler.step()
        self.optimizer.zero_grad()

    def save(self, directory: Path, extra: Any = None) -> None:
        gemini.save_checkpoint(directory, self.model, self.optimizer, self.scheduler, extra)

    def load(self, directory: Path) -> Any:
        return gemini.load_checkpoint(directory, self.model, self.optimizer, self.scheduler)

    def everything(self) -> dict[str, Any]:
        world = world_of(self.model)
        return {
            "model": snapshot(self.model),
            "groups": repr(self.optimizer.state_dict()["param_groups"]),
            "plain": [self.plain.detach().clone(), *(v.clone() for v in self.optimizer.state[self.plain].values())],
            "buffers": [buffer.clone() for buffer in self.model.buffers()],
            "scheduler": repr(vars(self.scheduler)),
            "rng": (random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()),
            "lost": world.corrupted_by,
        }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert_same_snapshot(before.pop("model"), after.pop("model"))
    for key in ("plain", "buffers"):
        assert all(same_bits(a, b) for a, b in zip(before.pop(key), after.pop(key), strict=True)), key
    assert before == after


def rewrite(directory: Path, manifest: dict[str, Any]) -> None:
    """With the checksum that belongs to it."""
    manifest = {key: value for key, value in manifest.items() if key != "checksum"}
    manifest["checksum"] = checkpoint_format._checksum(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tiny, Path]]:
    folder = tmp_path_factory.mktemp("saved")
    run = Tiny(folder)
    run.train()
    run.save(folder / "good")
    run.train()
    yield run, folder / "good"


def assert_refused(run: Tiny, directory: Path, match: str, kind: Any = gemini.StorageError) -> None:
    before = run.everything()
    with pytest.raises(kind, match=match):
        run.load(directory)
    assert_same(before, run.everything())


OLD_SCALE = {"scale": 2.0**14, "growth_interval": 2000, "num_good_steps": 3, "largest": 2.0**24}
"""What fp16 checkpoints have of versions in which models kept a loss scale themselves."""


def test_a_loss_scale_of_before_is_no_matter(saved: tuple[Tiny, Path], tmp_path: Path) -> None:
    run, good = saved
    manifest = json.loads((good / "manifest.json").read_text())
    assert manifest["precision"] == "fp16" and "loss_scale" not in manifest
    shutil.copytree(good, tmp_path / "older")
    rewrite(tmp_path / "older", manifest | {"loss_scale": OLD_SCALE})
    found = []
    for folder in (good, tmp_path / "older"):
        run.train()
        run.load(folder)
        found.append(run.everything())
    assert_same(*found)


# ---- whole, but not of this run --------------------------------------------------------------------------------------

# Schedulers of another kind, buffers that cannot be written to, params without a master: all of it is noticed before
# the first write.

KINDS: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "times": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),  # its state looks like that of LambdaLR
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "plateau": lr_scheduler.ReduceLROnPlateau,  # takes any state
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "other sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.CosineAnnealingLR(o, 9)], [2]
    ),
    "a sequence with a larger state": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 9)], [2]
    ),
    "a longer sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o)], [2, 4]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_of_another_kind_is_noticed_before_anything_changes(kind: str, tmp_path: Path) -> None:
    run = Tiny(tmp_path)
    run.scheduler = KINDS[kind](run.optimizer)
    for _ in range(3):
        run.optimizer.step()
        run.scheduler.step(*([1.0] if kind == "plateau" else []))
    run.save(tmp_path / "ckpt")
    expected = run.scheduler.state_dict()
    run.scheduler = KINDS["cosine"](run.optimizer)
    run.train()
    for other, make in KINDS.items():
        run.scheduler = make(run.optimizer)
        if other != kind:
            assert_refused(run, tmp_path / "ckpt", "saved with another scheduler than this", gemini.PlanMismatch)
        else:
            run.load(tmp_path / "ckpt")
            assert run.scheduler.state_dict() == expected


class Own(lr_scheduler.LRScheduler):
    """A user's: it has another attribute after a while, and does not take every state."""

    def get_lr(self) -> list[float]:
        if self.last_epoch > 1:
            self.late = "came later"
        return [group["lr"] for group in self.optimizer.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.optimizer.param_groups[0]["lr"] = state_dict["last_epoch"] / 100
        if state_dict["last_epoch"] == 7:
            raise RuntimeError("not on a Sunday")


def test_schedulers_of_users(tmp_path: Path) -> None:
    run = Tiny(tmp_path)
    run.scheduler = Own(run.optimizer)
    for _ in range(3):
        run.optimizer.step()
        run.scheduler.step()
    run.save(tmp_path / "ckpt")
    run.scheduler = Own(run.optimizer)
    run.load(tmp_path / "ckpt")
    assert run.scheduler.late == "came later" and run.scheduler.last_epoch == 3
    run.scheduler = Own(run.optimizer)
    manifest = json.loads((tmp_path / "ckpt" / "manifest.json").read_text())
    manifest["scheduler"]["last_epoch"] = 7
    del manifest["scheduler"]["late"]  # what it has not now
    rewrite(tmp_path / "ckpt", manifest)
    assert_refused(run, tmp_path / "ckpt", "not on a Sunday", gemini.PlanMismatch)


def test_generators_of_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Noticed before the weights are written, as everything else."""
    run = Tiny(tmp_path)
    other = {**rng_states(), "torch": torch.zeros(9, dtype=torch.uint8)}
    monkeypatch.setattr("gemini.train.checkpoint.saving.rng_states", lambda: other)
    run.save(tmp_path / "ckpt")
    run.train()
    assert_refused(run, tmp_path / "ckpt", "states of random generators that do not fit", gemini.PlanMismatch)


# ---- what cannot be written to ---------------------------------------------------------------------------------------


def test_buffers_that_nothing_can_be_copied_into(tmp_path: Path) -> None:
    """Found before the weights are written, not when it is their turn."""
    run = Tiny(tmp_path)
    run.save(tmp_path / "ckpt")
    run.train()
    run.model.count = run.model.count.expand(2)
    assert_refused(run, tmp_path / "ckpt", r"other buffers.*'count'", gemini.PlanMismatch)
    run.model.count = torch.tensor(7.0)
    assert_refused(run, tmp_path / "ckpt", r"other buffers.*'count'", gemini.PlanMismatch)
    run.model.count = torch.tensor(7)
    run.model.angles = torch.zeros(1, dtype=torch.complex64).expand(2)
    assert_refused(run, tmp_path / "ckpt", r"\"angles\".*refers to a single memory location", gemini.PlanMismatch)
    with torch.inference_mode():
        run.model.angles = torch.zeros(2, dtype=torch.complex64)
    assert_refused(run, tmp_path / "ckpt", r"(?i)\"angles\".*inference", gemini.PlanMismatch)
    run.model.angles = torch.zeros(2, dtype=torch.complex64)
    run.load(tmp_path / "ckpt")
    assert run.model.angles.tolist() == [1 + 2j, -3j]


def test_params_that_fp16_has_no_master_of(tmp_path: Path) -> None:
    """Frozen when it was saved, trained here."""
    run, other = Tiny(tmp_path), wrap(nn.Sequential(nn.Linear(3, 4)), "ram", tmp_path, precision="fp16")
    frozen = wrap(nn.Sequential(nn.Linear(3, 4)).requires_grad_(False), "ram", tmp_path, precision="fp16")
    run.model, run.optimizer = other, gemini.HybridAdam(other.parameters())
    gemini.save_checkpoint(tmp_path / "ckpt", frozen, gemini.HybridAdam(frozen.parameters()))
    before = snapshot(other)
    with pytest.raises(gemini.PlanMismatch, match="was frozen when .* was saved, which has no fp32 master"):
        gemini.load_checkpoint(tmp_path / "ckpt", other, run.optimizer)
    assert_same_snapshot(before, snapshot(other))


def test_the_other_way_to_decay_weights(tmp_path: Path) -> None:
    """Without weight decay both are the same, and the optimizer stays what it was made as."""
    run = Tiny(tmp_path)
    run.save(tmp_path / "ckpt")
    run.train()
    first, second = run.optimizer.param_groups
    assert first["weight_decay"] and not second["weight_decay"]
    second["decoupled"] = False
    run.load(tmp_path / "ckpt")
    assert second["decoupled"] is False
    first["decoupled"] = False
    assert_refused(run, tmp_path / "ckpt", r"HybridAdam\(\.\.\., decoupled=True\)", gemini.PlanMismatch)


# ---- what is kept besides weights and states -------------------------------------------------------------------------

# Tensors of every dtype and form that is plain numbers come back as the same numbers, and everything else is refused
# before anything is written.

PLAIN = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


class Holder(nn.Module):
    """A model with one persistent buffer."""

    def __init__(self, buffer: torch.Tensor | None = None):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("held", buffer)


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    data = torch.arange(1, numel * dtype.itemsize + 1, dtype=torch.uint8)
    return ((data % 2).bool() if dtype is torch.bool else data.view(dtype)).view(shape)


@pytest.mark.parametrize("wait", [True, False])
def test_every_plain_dtype_comes_back_bit_by_bit(wait: bool, tmp_path: Path) -> None:
    extra = {
        str(dtype): [
            of_dtype(dtype, 2, 3),
            of_dtype(dtype, 1).view(()),
            of_dtype(dtype, 0, 3),
            of_dtype(dtype, 2, 2).t(),
        ]
        for dtype in PLAIN
    }
    raw = Holder()
    for number, dtype in enumerate(PLAIN):
        raw.register_buffer(f"held_{number}", of_dtype(dtype, 4))
    model, optimizer = trainable(raw, "ram", tmp_path)
    kept = [buffer.clone() for buffer in model.buffers()]
    gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, extra=extra, wait=wait).wait()
    for buffer in model.buffers():
        buffer.copy_(torch.zeros_like(buffer))
    found = gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
    assert all(map(same_bits, model.buffers(), kept))
    for name, values in extra.items():
        assert all(same_bits(a, b) for a, b in zip(values, found[name], strict=True)), name


def forms() -> dict[str, torch.Tensor]:
    number = torch.tensor([1 - 2j, 3 + 4j])
    negative = number.conj().imag
    assert number.conj().is_conj() and negative.is_neg()
    return {
        "conjugated": number.conj(), "negated": negative, "both": torch.view_as_complex(torch.ones(3, 2)).conj()[::2],
        "every other": torch.arange(9.0)[::2], "expanded": torch.tensor([2.0]).expand(3),
        "a part": torch.arange(9)[4:6],
        "a param": nn.Parameter(torch.ones(2)), "upside down": torch.arange(6).view(2, 3).t(),
    }  # fmt: skip


def test_views_come_back_as_the_numbers_they_show(tmp_path: Path) -> None:
    for name, value in forms().items():
        held = value.detach() if name != "expanded" else value.clone()
        model, optimizer = trainable(Holder(held), "ram", tmp_path)
        shown = value.tolist()
        gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, extra=value)
        with torch.no_grad():
            model.held.zero_()
        found = gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
        assert found.tolist() == model.held.tolist() == shown, name
        assert world_of(model).corrupted_by is None


def impossible() -> dict[str, Any]:
    found = {
        "sparse": torch.eye(2).to_sparse(), "csr": torch.eye(2).to_sparse_csr(), "meta": torch.ones(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "jagged": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    }  # fmt: skip
    with FakeTensorMode():
        found["fake"] = torch.ones(2)
    return found


@pytest.mark.parametrize("name", impossible())
def test_tensors_that_are_not_plain_numbers_are_refused(name: str, tmp_path: Path) -> None:
    value = impossible()[name]
    model = wrap(Holder(), "ram", tmp_path)
    with pytest.raises(TypeError, match=r"extra\.odd is a .*which a checkpoint cannot keep"):
        gemini.save_checkpoint(tmp_path / "ckpt", model, adam(model), extra={"odd": value})
    model = wrap(Holder(), "ram", tmp_path)
    model.held = value
    with pytest.raises(TypeError, match=r"state_dict\(\)\.held is a .*which a checkpoint cannot keep"):
        gemini.save_checkpoint(tmp_path / "ckpt", model, adam(model))
    assert list(tmp_path.iterdir()) == []


def test_values_that_cannot_be_read_back_are_refused(tmp_path: Path) -> None:
    model, optimizer = trainable(Holder(), "ram", tmp_path)
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(30):
        deep = {1: (deep,)} if isinstance(deep, list) else [deep]
    for extra in (endless, 10**5000, {torch.ones(1): 1}):
        with pytest.raises(TypeError, match="which a checkpoint cannot keep"):
            gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, extra=extra)
        assert list(tmp_path.iterdir()) == []
    for value in (deep, 10**3000, "\ud800", float("-inf"), [1, "a" * 10**5]):
        gemini.save_checkpoint(tmp_path / "ckpt", model, optimizer, extra=value)
        assert gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer) == value
