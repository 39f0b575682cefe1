"""Checkpoints behind the training: pending ones are waited for, failures surface, and nothing of the call moves on.

That masters and states are those of one moment while steps go on is in ``tests/ranks/test_checkpoints.py``, for one
process and for several.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from benchmarks._progress import run
from tests.train.helpers import adam, assert_same_snapshot, snapshot, wrap
from tests.train.test_checkpoint import Run
from tests.world import world_of


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


def test_a_failure_that_nobody_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("ram", tmp_path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        pending = behind(run, tmp_path / "ckpt")
        run.train(1)
        while not pending.done():
            time.sleep(0.01)
    with pytest.raises(gemini.StorageError, match="No space left"):
        run.save(tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == []
    run.save(tmp_path / "good")  # once told, it is over
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
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
