"""Parts that stay in fp32 beside bf16 or fp16: the bits of the plain program of the same dtypes, wherever chunks live.

The plain program is the model with its params in those dtypes, and nothing else: where torch takes bf16 beside fp32 by
itself (batch norms) it is left to, and where a program casts (a head that is given ``x.float()``) it does so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

import gemini
from tests.plain import DTYPES, Plain
from tests.train.helpers import (
    PLACEMENTS,
    adam,
    assert_same_state,
    same_bits,
    wrap,
)

HALF = ("bf16", "fp16")


class Normed(nn.Module):
    """Convolutions and batch norms, as a ResNet has them; and an instance norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2)
        )
        self.last = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.last(x).mean((2, 3)))


class Spectral(nn.Module):
    """Both of torch's spectral norms, and an orthogonal layer, which cannot be computed in half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.new = parametrizations.spectral_norm(nn.Conv2d(3, 8, 3))
        self.old = spectral_norm(nn.Linear(8, 8))
        self.square = parametrizations.orthogonal(nn.Linear(8, 8, bias=False))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.square(self.old(self.new(x).mean((2, 3))).relu()))


class Reward(nn.Module):
    """A body in half precision, and a norm and a head in fp32, which are given fp32."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16)).to(dtype)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x.flatten(1)[:, :12].to(self.body[0].weight.dtype))
        return self.head(self.norm(hidden.float()))


def images(seed: int) -> torch.Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, seed: int) -> torch.Tensor:
    """Managed models are given fp32, and plain ones what FSDP2's policy would give them."""
    x, param = images(seed), next(p for name, p in model.named_parameters() if "norm" not in name and p.dim() > 1)
    plain = x if isinstance(model, gemini.GeminiDDP) else x.to(getattr(model, "takes", param.dtype))
    return model(plain).float().square().mean()


def fp32_of(model: nn.Module, *words: str) -> list[str]:
    return [name for name, _ in model.named_parameters() if any(word in name for word in words)]


def plain_of(make: Callable[[], nn.Module], precision: str, *words: str) -> Plain:
    """The program in plain torch; where a parametrization computes in fp32, its result is what autocast makes of it."""
    model, dtype = make(), DTYPES[precision]
    plain = Plain(model, precision, scale=2.0**10 if precision == "fp16" else None, fp32=fp32_of(model, *words))
    for made in (m for m in model.modules() if type(m).__name__ == "ParametrizationList"):
        made.register_forward_hook(lambda _, args, out: out.to(dtype))
    if isinstance(model, Spectral):
        model.old.register_forward_pre_hook(lambda m, args: setattr(m, "weight", m.weight.to(dtype)))
    model.takes = dtype
    return plain


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "norms": (Normed, ("norm.", "blocks.0.1.", "blocks.1.1.", "last")),
    "spectral": (Spectral, ("original", "_orig")),
    "head": (Reward, ("norm", "head")),
}


@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("case", CASES)
def test_what_stays_in_fp32_has_the_bits_of_the_plain_program(
    case: str, precision: str, where: str, tmp_path: Path
) -> None:
    make, words = CASES[case]
    plain = plain_of(make, precision, *words)
    model = wrap(make(), where, tmp_path, precision=precision)
    optimizer = adam(model)
    scaler = gemini.GradScaler(init_scale=2.0**10) if precision == "fp16" else None
    for seed in range(3):
        loss, wanted = loss_of(model, seed), loss_of(plain.model, seed)
        assert loss.item() == wanted.item()
        (loss if scaler is None else scaler.scale(loss)).backward()
        plain.backward(wanted)
        if scaler is not None:
            scaler.unscale_(optimizer)
        assert float(model.clip_grad_norm_(0.1)) == float(torch.tensor(plain.clip(0.1)))
        optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
        plain.step()
        optimizer.zero_grad()
    assert_same_state(model, plain)
    fp32 = {name for name, value in model.state_dict().items() if value.dtype is torch.float32}
    assert fp32 >= plain.fp32 and all(same_bits(*pair) for pair in zip(model.buffers(), plain.model.buffers()))
