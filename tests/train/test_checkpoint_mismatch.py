"""Checkpoints that are whole but not of this run: schedulers of another kind, buffers that cannot be written to, params
without a master. All of it is noticed before the first write.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import gemini
from tests.train.helpers import assert_same_snapshot, snapshot, wrap
from tests.train.test_checkpoint_hostile import Tiny, assert_refused, rewrite

# ---- schedulers ------------------------------------------------------------------------------------------------------

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
    for key, value, said in (
        ("last_epoch", 7, "not on a Sunday"), ("optimizer", 3, "has no 'optimizer'"), ("step", 3, "has no 'step'"),
        ("base_lrs", [0.1], "base_lrs has 1 entries where there are 2"), ("last_epoch", -9, "its last_epoch is -9"),
    ):  # fmt: skip
        other = copy.deepcopy(manifest)
        other["scheduler"][key] = value
        rewrite(tmp_path / "ckpt", other)
        assert_refused(run, tmp_path / "ckpt", said, gemini.PlanMismatch)


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
    assert_refused(run, tmp_path / "ckpt", r"buffer 'angles' cannot be written to", gemini.PlanMismatch)
    with torch.inference_mode():
        run.model.angles = torch.zeros(2, dtype=torch.complex64)
    assert_refused(run, tmp_path / "ckpt", r"'angles' cannot be written to .*inference mode", gemini.PlanMismatch)
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
