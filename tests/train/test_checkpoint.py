"""Checkpoints: an interrupted and resumed run is the uninterrupted one, bit for bit, under any budgets.

Saving replaces the old checkpoint only when the new one is whole: a full disk, or a kill (``test_replacing.py``),
leaves one that loads. Damage is found, and loading changes nothing until everything has been checked. No pickle.
Those of several ranks are in ``tests/ranks``.
"""

import builtins
import errno
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import safe_open

import gemini
from benchmarks._progress import run
from gemini.memory.movement.transfers import Lane
from gemini.memory.nvme import SpillFile
from gemini.tiers import Tier
from tests.train.helpers import (
    PLACEMENTS,
    adam,
    assert_same_snapshot,
    failing,
    gpt2,
    on_batch,
    same_bits,
    snapshot,
    train,
    wrap,
)
from tests.world import world_of

REFUSED = (gemini.StorageError, gemini.PlanMismatch)


class Run:
    """A model with dropout, its optimizer in two groups, a scheduler, and a data position."""

    def __init__(self, where: str, path: Path, precision: str = "bf16"):
        self.model = wrap(gpt2(dropout=0.1), where, path, precision=precision)
        named = list(self.model.named_parameters())
        self.optimizer = gemini.HybridAdam(
            [
                {"params": [p for n, p in named if p.ndim > 1]},
                {"params": [p for n, p in named if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=1e-2, weight_decay=0.1,
        )  # fmt: skip
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=2e-2, total_steps=12)
        self.position = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses += train(self.model, self.optimizer, [self.position + random.randrange(3) + numpy.random.randint(3)])
            self.scheduler.step()
            self.position += 1
        return losses

    def save(self, directory: Path, **extra: Any) -> None:
        extra = {"position": self.position, **extra}
        gemini.save_checkpoint(directory, self.model, self.optimizer, self.scheduler, extra)

    def load(self, directory: Path) -> dict[str, Any]:
        extra = gemini.load_checkpoint(directory, self.model, self.optimizer, self.scheduler)
        self.position = extra["position"]
        return extra


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_resumed_is_uninterrupted(precision: str, where: str, tmp_path: Path) -> None:
    whole = Run("ram", tmp_path, precision)
    seed(1)
    expected = whole.train(6)
    first = Run(where, tmp_path, precision)
    seed(1)
    losses = first.train(3)
    first.save(tmp_path / "ckpt")
    assert losses + first.train(3) == expected  # saving disturbs nothing
    for other in PLACEMENTS:  # under other budgets and devices
        resumed = Run(other, tmp_path, precision)
        seed(99)
        resumed.load(tmp_path / "ckpt")
        assert resumed.train(3) == expected[3:]
        assert_same_snapshot(snapshot(resumed.model), snapshot(whole.model))
        assert resumed.scheduler.state_dict() == whole.scheduler.state_dict()
        world_of(resumed.model).check()


def test_extra_is_given_back(tmp_path: Path) -> None:
    run = Run("ram", tmp_path)
    extra = {
        "tuple": (1, (2.5, "three"), None), "list": [True, False, []], "flag": True, "big": 2**70, "small": 1e-300,
        "nested": {"a": {1: "int key", (2, 3): "tuple"}}, "inf": float("inf"), "text": "ü\n\"", "__tuple__": "ours",
        "tensor": torch.arange(6).view(2, 3), "half": torch.ones(3).bfloat16() / 3, "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2), "bools": torch.tensor([True, False]), "int8": torch.arange(3).to(torch.int8),
        "bytes": b"\x00\xff",
    }  # fmt: skip
    run.save(tmp_path / "ckpt", **extra)
    found = run.load(tmp_path / "ckpt")
    assert found.keys() == {"position", *extra}
    for key, value in extra.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(found[key], value), key
        else:
            assert found[key] == value and type(found[key]) is type(value), key
    for wrong in (object(), {1, 2}, lambda: None, bytearray(b"bytes")):
        with pytest.raises(TypeError, match=r"extra\.odd"):
            run.save(tmp_path / "ckpt", odd=wrong)
    assert run.load(tmp_path / "ckpt").keys() == {"position", *extra}  # the old one is still there


def test_files_are_safetensors_and_json_without_pickle(where: str, tmp_path: Path) -> None:
    run = Run(where, tmp_path)
    run.train(1)
    run.save(tmp_path / "ckpt")
    names = sorted(p.name for p in (tmp_path / "ckpt").iterdir())
    assert names[0] == "manifest.json" and all(n.endswith((".json", ".safetensors")) for n in names)
    for name in names[1:]:
        with safe_open(tmp_path / "ckpt" / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                file.get_tensor(key)
    json.loads((tmp_path / "ckpt" / "manifest.json").read_text())
    for path in (tmp_path / "ckpt").iterdir():
        assert not path.read_bytes().startswith((b"PK\x03\x04", b"\x80"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt"]


def test_small_params_side_by_side_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, reads = Run("disk", tmp_path), []
    run.train(1)
    begin = SpillFile.begin_read
    monkeypatch.setattr(SpillFile, "begin_read", lambda *args, **how: reads.append(1) or begin(*args, **how))
    run.save(tmp_path / "ckpt")
    files = [safe_open(path, "pt") for path in (tmp_path / "ckpt").glob("params-*")]
    num_tensors = sum(len(list(file.keys())) for file in files)
    assert 0 < len(reads) < num_tensors, (len(reads), num_tensors)


def test_params_that_were_frozen_when_it_was_saved_begin_anew(tmp_path: Path) -> None:
    """Their weights are the saved ones exactly: no residual or state of what was there before is left."""
    frozen = wrap(torch.nn.Linear(8, 8).requires_grad_(False), "ram", tmp_path)
    optimizer = gemini.HybridAdam(frozen.parameters())
    gemini.save_checkpoint(tmp_path / "ckpt", frozen, optimizer)
    model = wrap(torch.nn.Linear(8, 8), "disk", tmp_path)
    other = gemini.HybridAdam(model.parameters(), lr=1e-3)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
    other.step()
    gemini.load_checkpoint(tmp_path / "ckpt", model, other)
    for name, planes in snapshot(model).items():
        assert same_bits(model.full_param(name, torch.float32), frozen.full_param(name, torch.float32))
        assert not planes["exp_avg"].any() and not planes["exp_avg_sq"].any() and int(planes["step"]) == 0


# ---- damage ----------------------------------------------------------------------------------------------------------


def assert_refused(run: Run, directory: Path, kind: Any = REFUSED, match: str | None = None) -> None:
    before = snapshot(run.model)
    others = repr([run.optimizer.state_dict()["param_groups"], run.scheduler.state_dict(), random.getstate()])
    rng = torch.get_rng_state()
    with pytest.raises(kind, match=match):
        run.load(directory)
    assert_same_snapshot(before, snapshot(run.model))
    assert torch.equal(rng, torch.get_rng_state())
    now = repr([run.optimizer.state_dict()["param_groups"], run.scheduler.state_dict(), random.getstate()])
    assert now == others
    world_of(run.model).check()


@pytest.mark.slow
def test_a_flipped_byte_anywhere_is_found(tmp_path: Path) -> None:
    run = Run("disk", tmp_path)
    run.train(1)
    run.save(tmp_path / "ckpt")
    run.train(1)
    rng = random.Random(0)
    for path in sorted((tmp_path / "ckpt").iterdir()):
        good = path.read_bytes()
        length = 8 + int.from_bytes(good[:8], "little") if path.suffix == ".safetensors" else len(good)
        places = [0, 7, length // 2, length - 1, len(good) - 1, *(rng.randrange(len(good)) for _ in range(8))]
        for place in places:
            damaged = bytearray(good)
            damaged[place] ^= 0x10
            path.write_bytes(damaged)
            try:
                assert_refused(run, tmp_path / "ckpt")
            except BaseException:
                print(path.name, place, good[max(0, place - 30) : place + 30])
                raise
        path.write_bytes(good)
    run.load(tmp_path / "ckpt")


def test_a_header_that_still_reads_well_is_found(tmp_path: Path) -> None:
    run = Run("ram", tmp_path)
    run.save(tmp_path / "ckpt")
    path = tmp_path / "ckpt" / "params-00000-00000.safetensors"
    good = path.read_bytes()
    for old, new in ((b"weights/", b"weightz/"), (b'"F32"', b'"I32"'), (b'"format":"pt"', b'"format":"tp"')):
        assert old in good
        path.write_bytes(good.replace(old, new, 1))
        assert_refused(run, tmp_path / "ckpt", gemini.StorageError, "damaged")


def test_a_damaged_manifest_changes_nothing(tmp_path: Path) -> None:
    """Whatever stands in the manifest: refused as damaged, and before anything is loaded."""
    run = Run("ram", tmp_path)
    run.train(1)
    run.save(tmp_path / "ckpt")
    run.train(1)
    path = tmp_path / "ckpt" / "manifest.json"
    good = json.loads(path.read_text())
    for key in good:
        for value in (None, {}, 7):
            path.write_text(json.dumps({**good, key: value}))
            if value != good[key]:
                assert_refused(run, tmp_path / "ckpt")
        path.write_text(json.dumps({k: v for k, v in good.items() if k != key}))
        assert_refused(run, tmp_path / "ckpt")


def test_truncated_missing_and_foreign(tmp_path: Path) -> None:
    run = Run("standin", tmp_path)
    run.train(1)
    run.save(tmp_path / "ckpt")
    for path in sorted((tmp_path / "ckpt").iterdir()):
        good = path.read_bytes()
        for length in (0, 4, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:length])
            assert_refused(run, tmp_path / "ckpt", gemini.StorageError, path.name)
        path.write_bytes(good + b"\0")
        if path.suffix == ".safetensors":
            assert_refused(run, tmp_path / "ckpt", gemini.StorageError, path.name)
        path.unlink()
        assert_refused(run, tmp_path / "ckpt", gemini.StorageError, path.name)
        path.mkdir()
        assert_refused(run, tmp_path / "ckpt", gemini.StorageError, path.name)
        path.rmdir()
        path.write_bytes(good)
    run.load(tmp_path / "ckpt")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "nowhere", tmp_path / "other", tmp_path / "file"):
        assert_refused(run, place, gemini.StorageError, place.name)
    for place in (tmp_path / "other", tmp_path / "file", tmp_path / "nowhere" / "below", tmp_path / "file" / "below"):
        with pytest.raises(gemini.StorageError):
            run.save(place)
    assert (tmp_path / "other" / "config.json").exists() and (tmp_path / "file").read_text() == "x"


def test_other_models_precisions_versions_and_groups(tmp_path: Path) -> None:
    run = Run("ram", tmp_path)
    run.train(1)
    run.save(tmp_path / "ckpt")
    assert_refused(Run("ram", tmp_path, "fp32"), tmp_path / "ckpt", gemini.PlanMismatch, "bf16.*precision=")
    other = Run("ram", tmp_path)
    other.model = wrap(gpt2(layers=3), "ram", tmp_path)
    other.optimizer = adam(other.model)
    assert_refused(other, tmp_path / "ckpt", gemini.PlanMismatch, r"another model.*transformer\.h\.2")
    one_group = Run("ram", tmp_path)
    one_group.optimizer = adam(one_group.model)
    assert_refused(one_group, tmp_path / "ckpt", gemini.PlanMismatch, "groups")
    frozen = gpt2()
    frozen.transformer.wte.weight.requires_grad_(False)
    one_group.model = wrap(frozen, "ram", tmp_path)
    with pytest.raises(ValueError, match="does not own params of this model"):
        gemini.load_checkpoint(tmp_path / "ckpt", one_group.model, run.optimizer)
    one_group.optimizer = adam(one_group.model)
    assert_refused(one_group, tmp_path / "ckpt", gemini.PlanMismatch)
    with pytest.raises(gemini.PlanMismatch, match="scheduler"):
        gemini.load_checkpoint(tmp_path / "ckpt", run.model, run.optimizer)
    manifest = json.loads((tmp_path / "ckpt" / "manifest.json").read_text())
    for change, match in (
        ({"version": 1}, "version 1, this Gemini reads 2 to 4"), ({"version": 99}, "version 99"),
        ({"format": "other"}, "not that of a Gemini"),
    ):  # fmt: skip
        (tmp_path / "ckpt" / "manifest.json").write_text(json.dumps({**manifest, **change}))
        assert_refused(run, tmp_path / "ckpt", gemini.StorageError, match)


def test_wrong_arguments(tmp_path: Path) -> None:
    run, raw = Run("ram", tmp_path), gpt2()
    with pytest.raises(TypeError, match="wrap the model first"):
        gemini.save_checkpoint(tmp_path / "ckpt", raw, gemini.HybridAdam(raw.parameters()))
    with pytest.raises(TypeError, match="HybridAdam"):
        gemini.save_checkpoint(tmp_path / "ckpt", run.model, torch.optim.AdamW(raw.parameters()))
    with pytest.raises((ValueError, TypeError, gemini.GeminiError), match="(?i)optimizer|params"):
        gemini.save_checkpoint(tmp_path / "ckpt", run.model, Run("ram", tmp_path).optimizer)  # of another model
    assert not (tmp_path / "ckpt").exists()


def test_between_backward_and_step(where: str, tmp_path: Path) -> None:
    run = Run(where, tmp_path)
    run.save(tmp_path / "ckpt")
    on_batch(run.model, 0).backward()
    with pytest.raises(gemini.GeminiError, match="between backward and step"):
        run.save(tmp_path / "ckpt")
    run.load(tmp_path / "ckpt")  # starts over: those gradients are forgotten
    assert run.model.full_grad("transformer.h.0.attn.c_attn.weight") is None
    run.train(1)


# ---- a disk that fails, a process that dies --------------------------------------------------------------------------


@pytest.mark.parametrize("failing_call", ["open", "mkdir"])  # renames and fsync: test_replacing.py
def test_a_full_disk_leaves_the_old_checkpoint(failing_call: str, where: str, tmp_path: Path) -> None:
    run = Run(where, tmp_path)
    run.train(1)
    run.save(tmp_path / "ckpt")
    before = snapshot(run.model)
    run.train(1)
    owner, full = builtins if failing_call == "open" else os, OSError(errno.ENOSPC, "No space left on device")
    for number in range(1, 4):
        with failing(owner, failing_call, number, full) as calls:
            try:
                run.save(tmp_path / "ckpt")
            except gemini.StorageError as error:
                assert "No space left" in str(error)
            else:
                assert len(calls) < number
                break
        loaded = Run("ram", tmp_path)
        loaded.load(tmp_path / "ckpt")
        assert_same_snapshot(snapshot(loaded.model), before)
        assert [p.name for p in tmp_path.iterdir() if "new" in p.name] == []
    run.save(tmp_path / "ckpt")  # and goes on when there is room again
    loaded.load(tmp_path / "ckpt")
    assert_same_snapshot(snapshot(loaded.model), snapshot(run.model))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt"]


# ---- behind the training ---------------------------------------------------------------------------------------------

# Pending ones are waited for, failures surface, and nothing of the call moves on. That masters and states are those of
# one moment while steps go on is in ``tests/ranks/test_checkpoints.py``, for one process and for several.


def behind(run: Run, directory: Path, **extra: Any) -> Any:
    extra = {"position": run.position, **extra}
    return gemini.save_checkpoint(directory, run.model, run.optimizer, run.scheduler, extra, wait=False)


def slow_disk(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.005) -> None:
    real = os.pwrite

    def slow(*args: Any) -> int:
        time.sleep(seconds)
        return real(*args)

    monkeypatch.setattr(os, "pwrite", slow)


def test_a_second_save_and_a_load_wait_for_a_pending_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("ram", tmp_path)
    run.train(1)
    slow_disk(monkeypatch)
    first = behind(run, tmp_path / "one")
    with pytest.raises(TimeoutError, match="still being written"):
        first.wait(timeout=0.01)
    assert not first.done() and not (tmp_path / "one").exists()
    second = behind(run, tmp_path / "two")
    assert first.done() and (tmp_path / "one").exists() and not second.done()
    run.load(tmp_path / "one")
    assert second.done() and sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]
    world_of(run.model).check()


def test_a_checkpoint_behind_the_training_is_in_flight_as_all_that_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("serial", tmp_path)
    run.train(1)
    world = world_of(run.model)
    slow_disk(monkeypatch)
    pending = behind(run, tmp_path / "ckpt")
    (transfer,) = world.transfers.open[Lane.CHECKPOINT].values()
    assert not pending.done() and transfer.held is not None
    assert transfer.held.num_bytes == world.ledger.held(Tier.CPU, "checkpoint") > 0
    run.train(1)
    assert run.model.memory_report()["stalls"]["checkpoint"] > 0, "an update has waited for the disk"
    pending.wait()
    assert world.ledger.held(Tier.CPU, "checkpoint") == 0
    run.save(tmp_path / "other")
    assert not world.transfers.open[Lane.CHECKPOINT]
    world.check()


def test_what_is_captured_at_the_call_does_not_follow_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers, plain params, ``extra``, step counts, scheduler and RNG states too."""
    run, position = Run("ram", tmp_path), torch.tensor([3])
    run.model.register_buffer("seen", torch.zeros(2))
    plain = torch.nn.Parameter(torch.ones(3))
    run.optimizer.add_param_group({"params": [plain]})
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.9**step)
    plain.grad = torch.ones(3)
    run.train(1)
    expected = (plain.detach().clone(), run.optimizer.state[plain]["exp_avg"].clone(), run.scheduler.state_dict())
    rng, steps = torch.get_rng_state(), {n: int(s["step"]) for n, s in snapshot(run.model).items()}
    slow_disk(monkeypatch)
    pending = behind(run, tmp_path / "ckpt", position=position)
    run.model.seen.add_(1)
    position.add_(1)
    plain.grad = torch.ones(3)
    run.train(2)
    assert not torch.equal(plain.detach(), expected[0])
    pending.wait()
    extra = gemini.load_checkpoint(tmp_path / "ckpt", run.model, run.optimizer, run.scheduler)
    assert extra["position"].tolist() == [3] and run.model.seen.tolist() == [0, 0]
    assert torch.equal(plain.detach(), expected[0])
    assert torch.equal(run.optimizer.state[plain]["exp_avg"], expected[1])
    assert run.scheduler.state_dict() == expected[2]
    assert torch.equal(torch.get_rng_state(), rng)
    assert {n: int(s["step"]) for n, s in snapshot(run.model).items()} == steps


def test_without_room_to_write_behind_it_is_written_at_once(tmp_path: Path) -> None:
    """The budget holds just what steps need: nothing of it may be lent, or the next step would not fit."""
    run = Run("disk", tmp_path, "fp32")
    losses = run.train(1)
    with pytest.warns(UserWarning, match="while the training waits.*of cpu"):
        pending = behind(run, tmp_path / "ckpt")
    assert pending.done() and (tmp_path / "ckpt").exists()
    pending.wait()
    run.train(1)
    world_of(run.model).check()
    assert losses


def test_a_failure_that_nobody_waited_for(tmp_path: Path) -> None:
    run, full = Run("ram", tmp_path), OSError(errno.ENOSPC, "No space left on device")
    with failing(os, "pwrite", 1, full):
        pending = behind(run, tmp_path / "ckpt")
        run.train(1)
        while not pending.done():
            time.sleep(0.01)
    with pytest.raises(gemini.StorageError, match="No space left"):
        run.save(tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == []
    run.save(tmp_path / "good")  # once told, it is over
    with failing(os, "pwrite", 1, full):
        behind(run, tmp_path / "ckpt")
        with pytest.warns(UserWarning, match="nobody waited for failed.*No space left"):
            world_of(run.model).close()
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_the_model_ends_after_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("standin", tmp_path)
    run.train(1)
    slow_disk(monkeypatch)
    before = snapshot(run.model)
    behind(run, tmp_path / "ckpt")
    world_of(run.model).close()
    fresh = Run("ram", tmp_path)
    fresh.load(tmp_path / "ckpt")
    assert_same_snapshot(snapshot(fresh.model), before)


LEAVING = """
import sys, torch, gemini
model = gemini.GeminiDDP(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(16))),
                         gemini.GeminiConfig(device="cpu", memory=gemini.MemoryBudget(cpu="1GiB")))
optimizer = gemini.HybridAdam(model.parameters())
gemini.save_checkpoint(sys.argv[1], model, optimizer, extra="whole", wait=False)
raise SystemExit("on purpose")
"""


@pytest.mark.slow
def test_the_program_ends_after_its_checkpoint(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    run([sys.executable, "-c", LEAVING, str(tmp_path / "ckpt")], cwd=root)
    model = wrap(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(16))), "ram", tmp_path)
    assert gemini.load_checkpoint(tmp_path / "ckpt", model, adam(model)) == "whole"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt"]
