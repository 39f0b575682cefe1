"""A model that casts its own params inside forward (some routers do): refused in half precision, exact in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from tests.train.helpers import compare, squares, wrap


class CastsItself(nn.Module):
    """As the router of Switch Transformers: its layer computes in fp32 whatever the model is in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.router = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router = self.router.to(torch.float32)
        return self.router(self.first(x.to(self.first.weight.dtype)).float())


def loss_of(model: Any, seed: int) -> torch.Tensor:
    return squares(model, seed)


def test_refused_in_half_precision(where: str, tmp_path: Path) -> None:
    model = wrap(CastsItself(), where, tmp_path)
    with pytest.raises(gemini.GeminiError, match="router.*float32, its weights are torch.bfloat16: the model changed"):
        loss_of(model, 0).backward()


def test_exact_in_fp32(where: str, tmp_path: Path) -> None:
    compare(CastsItself, where, tmp_path, loss_of, precision="fp32")
