"""On a GPU: a checkpoint made with states on the GPU goes on with states in host memory or on the drive, and back.

Also with dropout, whose random numbers are the GPU's own, and read by a model that computes on the CPU.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from tests.gpu import gpu_cases
from tests.train import helpers
from tests.train.helpers import assert_same_snapshot, gpt2, snapshot
from tests.world import world_of

HOMES = ["all on the gpu", "all on the host", "all on nvme", "mixed"]


class Run:
    """A model with dropout, its optimizer and a scheduler."""

    def __init__(self, where: str | None, path: Path, precision: str = "bf16"):
        model = gpt2(dropout=0.1)
        if where is None:
            self.model: Any = helpers.wrap(model, "ram", path, precision=precision)
        else:
            self.model = gpu_cases.wrap(model, where, path, precision=precision)
        self.optimizer = helpers.adam(self.model)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=2e-2, total_steps=12)

    def train(self, steps: range) -> list[float]:
        losses = []
        for seed in steps:
            losses += gpu_cases.train(self.model, self.optimizer, [seed])
            self.scheduler.step()
        return losses

    def save(self, directory: Path) -> None:
        gemini.save_checkpoint(directory, self.model, self.optimizer, self.scheduler, extra="here")

    def load(self, directory: Path) -> None:
        assert gemini.load_checkpoint(directory, self.model, self.optimizer, self.scheduler) == "here"


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("where", HOMES)
def test_resumed_is_uninterrupted(where: str, precision: str, tmp_path: Path) -> None:
    whole = Run("all on the gpu", tmp_path, precision)
    torch.manual_seed(1)
    expected = whole.train(range(6))
    first = Run(where, tmp_path, precision)
    torch.manual_seed(1)
    losses = first.train(range(3))
    first.save(tmp_path / "ckpt")
    assert losses + first.train(range(3, 6)) == expected  # saving disturbs nothing
    for other in HOMES:
        resumed = Run(other, tmp_path, precision)
        torch.manual_seed(99)
        resumed.load(tmp_path / "ckpt")
        assert resumed.train(range(3, 6)) == expected[3:], f"from {where} to {other}"
        assert_same_snapshot(snapshot(resumed.model), snapshot(whole.model))
        world_of(resumed.model).check()


def test_to_the_cpu_and_back(tmp_path: Path) -> None:
    """A model that computes on the CPU reads the very planes, and what it saves goes on where the first one was."""
    whole = Run("mixed", tmp_path)
    torch.manual_seed(1)
    whole.train(range(3))
    whole.save(tmp_path / "of the gpu")
    on_cpu = Run(None, tmp_path)
    on_cpu.load(tmp_path / "of the gpu")
    assert world_of(on_cpu.model).device.name == "cpu"
    assert_same_snapshot(snapshot(on_cpu.model), snapshot(whole.model))
    on_cpu.save(tmp_path / "of the cpu")
    back = Run("all on the gpu", tmp_path)
    back.load(tmp_path / "of the cpu")
    assert_same_snapshot(snapshot(back.model), snapshot(whole.model))
    torch.manual_seed(5)
    expected = whole.train(range(3, 6))
    torch.manual_seed(5)
    assert back.train(range(3, 6)) == expected
    assert_same_snapshot(snapshot(back.model), snapshot(whole.model))
