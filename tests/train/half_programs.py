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
        self.aux: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.layers[0](x.half()))
        self.aux = h.float().square().mean()
        h = torch.tanh(self.layers[1](h))
        out = self.layers[2](h)
        if self.gives == "loss":
            return out.float().square().mean()
        if self.gives == "half loss":
            return out.square().mean()
        if self.gives == "distribution":
            return torch.distributions.Normal(out.float(), 1.0)
        if self.gives == "pieces":
            return (piece for piece in out.split(1))
        if self.gives == "both":
            return {"loss": out.float().square().mean(), "hidden": h}
        return out


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))


# ---- programs: each returns its loss; ``extra`` holds tensors outside whose gradients are looked at too -------------

Extra = dict[str, torch.Tensor]


def outside(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).float(), torch.arange(4)) / 7


def hooked_feature(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    hook = model.layers[1].register_forward_hook(lambda module, args, out: seen.append(out))
    out = model(x)
    hook.remove()
    return (seen[0] - 1).float().square().mean() + 0.1 * out.float().mean()


def only_a_feature(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    hook = model.layers[1].register_forward_hook(lambda module, args, out: seen.append(out))
    model(x)
    hook.remove()
    return seen[0].float().square().mean()


def distribution(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return -model(x).log_prob(torch.ones(4, 32)).mean()


def kept_aux(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return model(x) + 0.5 * model.aux


def input_gradient(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return model(extra.setdefault("x", x.requires_grad_(True)))


def upstream(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    prompt = extra.setdefault("prompt", nn.Parameter(torch.full((4, 32), 0.25)))
    return model(x * prompt)


def fed_back(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return model(model(x)).float().square().mean()


def pieces(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([piece.float().square().mean() * i for i, piece in enumerate(model(x))]).sum()


def a_part(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return model.layers[1](x.half()).float().square().mean() + model(x).float().mean()


def two_scalars_in_a_row(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return model(x * model(x))


def kept_output(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    out["hidden"].retain_grad()
    extra["hidden"] = out["hidden"]
    return out["loss"]


def recomputed(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, extra.setdefault("x", x.requires_grad_(True)), use_reentrant=True)


def recomputed_twice(model: Any, extra: Extra, x: torch.Tensor) -> torch.Tensor:
    h = checkpoint(model, extra.setdefault("x", x.requires_grad_(True)), use_reentrant=False)
    return checkpoint(model, h, use_reentrant=False).float().square().mean()


PROGRAMS: dict[str, tuple[str, Callable[[Any, Extra, torch.Tensor], torch.Tensor]]] = {
    "loss outside": ("tensor", outside), "hooked feature": ("tensor", hooked_feature),
    "feature alone": ("tensor", only_a_feature), "distribution": ("distribution", distribution),
    "aux in an attribute": ("loss", kept_aux), "x.grad": ("loss", input_gradient),
    "params upstream": ("loss", upstream), "fed back": ("tensor", fed_back), "generator": ("pieces", pieces),
    "a part": ("tensor", a_part), "scalar fed back": ("loss", two_scalars_in_a_row), "kept": ("both", kept_output),
    "recomputed": ("loss", recomputed), "recomputed twice": ("tensor", recomputed_twice),
}  # fmt: skip

each_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


def stock(gives: str = "tensor") -> nn.Module:
    return Toy(gives).half()


def assert_same_grads(model: Any, plain: nn.Module, scale: float = SCALE) -> None:
    inverse = torch.tensor(scale).double().reciprocal().float()
    for name, param in plain.named_parameters():
        grad = model.full_grad(name)
        assert (grad is None) == (param.grad is None), name
        assert grad is None or same_bits(grad, param.grad.float() * inverse), name
