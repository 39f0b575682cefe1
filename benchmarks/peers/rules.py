"""Compares the update rules of ``gemini.optim`` with other people's implementations, over 20 steps of a small model.

    pip install --target DIR --no-deps pytorch_optimizer lion-pytorch
    PYTHONPATH=DIR python benchmarks/peers/rules.py --out benchmarks/reports/independent_rules_2026-11-25.md

Both train the same two-layer net in fp32 on the same batches, each with its own weights, so a wrong update changes the
gradients of the next step. Told are the largest difference of a weight and of a gradient over all steps, each as a part
of the largest value there was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lion_pytorch
import pytorch_optimizer as others

from benchmarks._report import add_out, head, publish, table
from gemini import optim

STEPS = 20

Steps = Callable[[nn.Module, Tensor], None]
"""One step of a model on a batch: its backward, and the update."""


class Pair(NamedTuple):
    """A rule, and where it comes from a second time; each makes the steps of a model."""

    rule: str
    source: str
    ours: Callable[[nn.Module], Steps]
    theirs: Callable[[nn.Module], Steps]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.sin().cumsum(1)).square().mean()


def stepping(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[nn.Module], Steps]:
    """Of an ordinary optimizer."""

    def of(model: nn.Module) -> Steps:
        optimizer = make(list(model.parameters()))

        def step(model: nn.Module, batch: Tensor) -> None:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            note_gradients(model)
            optimizer.step()

        return step

    return of


def fused(make: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Steps]:
    """Of an optimizer of the LOMO family, which updates inside backward."""

    def of(model: nn.Module) -> Steps:
        optimizer = make(model)

        def step(model: nn.Module, batch: Tensor) -> None:
            model.noted = list(torch.autograd.grad(loss_of(model, batch), list(model.parameters())))
            optimizer.fused_backward(loss_of(model, batch), optimizer.param_groups[0]["lr"])

        return step

    return of


def note_gradients(model: nn.Module) -> None:
    model.noted = [p.grad.clone() for p in model.parameters() if p.grad is not None]


STOCK = {"foreach": False, "fused": False}
PAIRS = [
    Pair("AdamW", "torch.optim.AdamW",
         stepping(lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1)),
         stepping(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, **STOCK))),
    Pair("Adam with L2", "torch.optim.Adam",
         stepping(lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1, decoupled=False)),
         stepping(lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, **STOCK))),
    Pair("SGD, momentum, Nesterov", "torch.optim.SGD",
         stepping(lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)),
         stepping(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, **STOCK))),
    Pair("Lion", "lion_pytorch.Lion",
         stepping(lambda p: optim.Lion(p, lr=1e-3, weight_decay=0.1)),
         stepping(lambda p: lion_pytorch.Lion(p, lr=1e-3, weight_decay=0.1))),
    Pair("Lion", "pytorch_optimizer.Lion",
         stepping(lambda p: optim.Lion(p, lr=1e-3, weight_decay=0.1)),
         stepping(lambda p: others.Lion(p, lr=1e-3, weight_decay=0.1, foreach=False))),
    Pair("LOMO", "pytorch_optimizer.LOMO",
         stepping(lambda p: optim.LOMO(p, lr=1e-2)), fused(lambda model: others.LOMO(model, lr=1e-2))),
    Pair("AdaLomo", "pytorch_optimizer.AdaLOMO",
         stepping(lambda p: optim.AdaLomo(p, lr=1e-2, weight_decay=0.1)),
         fused(lambda model: others.AdaLOMO(model, lr=1e-2, weight_decay=0.1, loss_scale=1.0))),
    Pair("Muon, matrices", "torch.optim.Muon",
         stepping(lambda p: optim.Muon(optim_groups(p), lr=1e-2)),
         stepping(lambda p: Both(
             torch.optim.Muon(matrices(p), lr=1e-2, weight_decay=0.1),
             torch.optim.AdamW(vectors(p), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **STOCK)))),
]  # fmt: skip


class Both:
    """Two optimizers of one model."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self._parts = parts

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad()


def matrices(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in params if p.dim() == 2]


def vectors(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in params if p.dim() != 2]


def optim_groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": matrices(params)}, {"params": vectors(params), "adamw": True}]


def compared(pair: Pair) -> list[str]:
    """Its row: the largest differences over all steps."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 48)))
    steps = [make(model) for make, model in zip((pair.ours, pair.theirs), models, strict=True)]
    worst = {"weights": 0.0, "gradients": 0.0}
    for number in range(STEPS):
        batch = torch.randn(32, 48, generator=torch.Generator().manual_seed(number))
        for model, step in zip(models, steps, strict=True):
            step(model, batch)
        seen = {"weights": [list(m.parameters()) for m in models], "gradients": [m.noted for m in models]}
        for of, values in seen.items():
            for one, other in zip(*values, strict=True):
                apart = (one.detach() - other.detach()).abs().max() / other.detach().abs().max()
                worst[of] = max(worst[of], float(apart))
    return [pair.rule, pair.source, f"{worst['weights']:.1e}", f"{worst['gradients']:.1e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_out(parser)
    args = parser.parse_args()
    rows = [compared(pair) for pair in PAIRS]
    lines = head(
        "Update rules beside other people's", [f"{STEPS} steps of a net of 9,360 params in fp32.", ""], 1,
        "pytorch_optimizer", "lion-pytorch",
    )  # fmt: skip
    lines += ["", *table(["rule", "against", "weights", "gradients"], rows)]
    publish(lines, args.out)


if __name__ == "__main__":
    main()
