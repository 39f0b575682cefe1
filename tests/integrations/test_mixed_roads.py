"""BatchNorm nets, spectral norms, an fp32 head and a class that declares its fp32 parts, in bf16: the losses of stock
mixed precision, within its own spread.

Stock mixed precision is autocast over fp32 weights. Gemini has the compute dtype's weights beside the parts in fp32. So
losses are compared within the spread of the stock runs: how far they are from each other when all that differs is a
rounding of the weights they begin with. By hand, and through Lightning, which casts what a step is given.
"""

from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from gemini.integrations.lightning import GeminiStrategy
from torch import nn

import gemini
from tests.integrations.lightning_cases import alone  # noqa: F401 - a fixture for this module
from tests.integrations.mixed_cases import BATCH, DATA, KINDS, ROWS, config, make

STEPS, LR = 8, 3e-3


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)


def loop(model: Any, kind: str, stock: bool) -> list[float]:
    if not stock:
        model = gemini.GeminiDDP(model, config(kind))
        optimizer: Any = gemini.HybridAdam(model.parameters(), lr=LR, weight_decay=0.0)
    else:
        optimizer = adamw(model)
    losses = []
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=stock):
            loss = model(**BATCH)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


class _Module(L.LightningModule):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net, self.losses = net, list[float]()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.net(**batch)["loss"]
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return adamw(self)


def lightning(model: Any, kind: str, folder: Path) -> list[float]:
    module = _Module(model)
    made = L.Trainer(
        accelerator="cpu", devices=1, precision="bf16-mixed", logger=False, default_root_dir=folder,
        strategy=GeminiStrategy(config(kind)),
        max_steps=STEPS, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    made.fit(module, torch.utils.data.DataLoader(DATA, batch_size=ROWS))
    return module.losses


@cache
def stock(kind: str) -> tuple[list[float], float]:
    """The losses of stock mixed precision, and how far apart its runs are that begin a rounding from each other."""
    runs = [loop(make(kind, nudge), kind, True) for nudge in range(6)]
    return runs[0], max(max(losses) - min(losses) for losses in zip(*runs, strict=True))


@pytest.mark.parametrize("road", ["loop", "lightning"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_stock_mixed_precision(kind: str, road: str, tmp_path: Path) -> None:
    wanted, spread = stock(kind)
    found = loop(make(kind), kind, False) if road == "loop" else lightning(make(kind), kind, tmp_path)
    assert len(found) == STEPS and found[-1] < found[0]
    for a, b in zip(found, wanted, strict=True):
        # A classifier in bf16 has a loss in bf16, which autocast would compute in fp32: that rounding is beside it.
        assert abs(a - b) <= spread + (2**-8 * b if kind == "resnet_half" else 0), (found, wanted, spread)
