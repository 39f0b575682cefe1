"""What the tests of fp16 share: a toy, programs that a loss scale at outputs cannot serve, the stock loop's gradients.

Gradients go around the outputs, leave the model, or come through it twice.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.train.helpers import same_bits

SCALE = 2.0**12
REMEDY = r"gemini\.GradScaler"


class Toy(nn.Module):
    """Three layers, with every way out of a module that a loss may take."""

    def __init__(self, gives: str = "tensor"):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.gives = gives

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.layers[0](x.half()))
        h = torch.tanh(self.layers[1](h))
        out = self.layers[2](h)
        if self.gives == "loss":
            return out.float().square().mean()
        if self.gives == "pieces":
            return (piece for piece in out.split(1))
        return out


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))


# ---- programs: each returns its loss; ``extra`` holds tensors outside whose gradients are looked at too -------------

Extra = dict[str, torch.Tensor]


def outside(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).float(), torch.arange(4)) / 7


def upstream(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    prompt = extra.setdefault("prompt", nn.Parameter(torch.full((4, 32), 0.25)))
    return model(x * prompt)


def fed_back(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return model(model(x)).float().square().mean()


def pieces(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([piece.float().square().mean() * i for i, piece in enumerate(model(x))]).sum()


def recomputed(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, extra.setdefault("x", x.requires_grad_(True)), use_reentrant=True)


PROGRAMS: dict[str, tuple[str, Callable[[Any, Extra, torch.Tensor], torch.Tensor]]] = {
    "loss outside": ("tensor", outside),
    "params upstream": ("loss", upstream),
    "fed back": ("tensor", fed_back),
    "generator": ("pieces", pieces),
    "recomputed": ("loss", recomputed),
}
"""Others are parts of drawn programs, in fp16 too: ``test_programs.py``."""

each_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


def stock(gives: str = "tensor") -> nn.Module:
    return Toy(gives).half()


def assert_same_grads(model: Any, plain: nn.Module, scale: float = SCALE) -> None:
    inverse = torch.tensor(scale).double().reciprocal().float()
    for name, param in plain.named_parameters():
        grad = model.full_grad(name)
        assert (grad is None) == (param.grad is None), name
        assert grad is None or same_bits(grad, param.grad.float() * inverse), name
