"""Update rules that see a whole matrix at once: Muon, with AdamW for what is no hidden matrix, and AdaLomo. Their tiles
are whole params, so what passes through staging is as large as the largest of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gemini.planning.rules import RULES
from gemini.rules import ADAM, Arrays, Hyper, Segment, States, UpdateRule, Where

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration of Muon's authors: chosen for a steep slope at 0, they take singular values near 1."""


class MuonScalars(NamedTuple):
    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_steps: int
    ns_eps: float
    adjust_lr: str
    grad_scale: float


@dataclass(frozen=True)
class MuonRule(UpdateRule):
    """Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon; Liu et al., 2025, arXiv:2502.16982): momentum,
    orthogonalized by a Newton-Schulz iteration in bf16. A group with ``adamw=True`` is updated by AdamW: vectors,
    embeddings and heads belong into one (:func:`gemini.optim.muon_groups`).

    ``exp_avg`` is the momentum of either; ``exp_avg_sq`` is AdamW's, and stays 0 for Muon's matrices.
    """

    spec = RULES["muon"].spec
    hypers: ClassVar[Mapping[str, Hyper]] = {
        "lr": Hyper(1e-3, "learning rate, of AdamW's groups too where they say no other."),
        "weight_decay": Hyper(0.1, "decoupled decay, of both."),
        "momentum": Hyper(0.95, "factor of the momentum.", "in [0, 1)"),
        "nesterov": Hyper(True, "step along the gradient and the momentum together."),
        "ns_steps": Hyper(5, "Newton-Schulz iterations.", "a whole number from 1 to 99"),
        "ns_eps": Hyper(1e-7),
        "adjust_lr": Hyper(
            "original",
            'how the step of a matrix is scaled: "original" by the root of its height over its width if it is tall, '
            '"match_rms_adamw" so that it is as long as AdamW\'s, whose learning rates then serve.',
            ("original", "match_rms_adamw"),
        ),
        "adamw": Hyper(False),
        "betas": Hyper((0.9, 0.95), "AdamW's averages."),
        "eps": Hyper(1e-8, "added to AdamW's denominator."),
    }

    def check_group(self, group: Mapping[str, Any], what: str) -> None:
        super().check_group(group, what)
        params = group.get("params", ())
        for param in params if not group["adamw"] and isinstance(params, (list, tuple)) else ():
            if isinstance(param, Tensor) and param.dim() != 2:
                raise ValueError(
                    f"{what} has a param of shape {tuple(param.shape)}, and Muon is for matrices: give it a group of "
                    "its own with adamw=True (gemini.optim.muon_groups(model) makes both)"
                )

    def grouped(self, model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each group in two: hidden matrices, and for AdamW embeddings, the head and what is no matrix."""
        ends = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
        ends.add(id(getattr(find_head(), "weight", None)))
        hidden = {id(param) for group in groups for param in group["params"] if param.dim() == 2} - ends
        split = (
            {**group, "params": [p for p in group["params"] if (id(p) in hidden) is not adamw], "adamw": adamw}
            for adamw in (False, True)
            for group in groups
        )
        return [group for group in split if group["params"]]

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> Any:
        if group["adamw"]:
            return ADAM.scalars({**group, "decoupled": True}, step, grad_scale)
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        how = float(group["momentum"]), group["nesterov"], group["ns_steps"], float(group["ns_eps"]), group["adjust_lr"]
        return MuonScalars(lr, weight_decay, *how, grad_scale)

    def update(self, master: Tensor, grad: Tensor, states: States, scalars: Any, where: Where | None) -> None:
        if not isinstance(scalars, MuonScalars):
            ADAM.run(Arrays(master, None, states, grad), [Segment(0, master.numel(), scalars)])
            return
        assert where is not None
        s, shape = scalars, where.shape
        g, momentum = (grad.float() * s.grad_scale).view(shape), states["exp_avg"].view(shape)
        momentum.lerp_(g, 1 - s.momentum)
        step = orthogonalized(g.lerp_(momentum, s.momentum) if s.nesterov else momentum, s.ns_steps, s.ns_eps)
        rows, columns = shape
        longer = math.sqrt(max(1, rows / columns)) if s.adjust_lr == "original" else 0.2 * math.sqrt(max(rows, columns))
        master.mul_(1 - s.lr * s.weight_decay).view(shape).add_(step, alpha=-s.lr * longer)


def orthogonalized(matrix: Tensor, steps: int, eps: float) -> Tensor:
    """A matrix of the same singular vectors with singular values near 1, in bf16: ``steps`` times
    ``a x + b (x x^T) x + c (x x^T)^2 x`` from the matrix over its norm.
    """
    a, b, c = COEFFICIENTS
    x, is_tall = matrix.bfloat16(), matrix.size(0) > matrix.size(1)
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class AdaLomoScalars(NamedTuple):
    lr: float
    weight_decay: float
    beta: float
    eps: float
    least: float
    clip: float
    grad_scale: float


@dataclass(frozen=True)
class AdaLomoRule(UpdateRule):
    """AdaLomo (Lv et al., 2023, arXiv:2310.10195). The second moment is stored as factors, as in Adafactor (Shazeer and
    Stern, 2018, arXiv:1804.04235), and there is no momentum. The length of a step is at most lr times that of the
    param, and weight decay is scaled in the same way, as in the authors' code. It takes 4 bytes per param, and one
    value for each row and column of a matrix. With ``step_in_backward=True`` and
    ``GeminiConfig(gradients="transient")`` no gradients are kept.
    """

    spec = RULES["adalomo"].spec
    hypers: ClassVar[Mapping[str, Hyper]] = {
        "lr": Hyper(1e-3, "learning rate, relative to the root mean square of the param."),
        "decay_rate": Hyper(
            -0.8, "at step t, the average of squared gradients decays by 1 - t**decay_rate.", "0 or less"
        ),
        "eps": Hyper(
            (1e-30, 1e-3),
            "the first is added to squared gradients; the second is the smallest root mean square of a param.",
            "0 or more",
        ),
        "clip_threshold": Hyper(
            1.0, "the largest root mean square of a step, before it is multiplied by ``lr``.", "positive"
        ),
        "weight_decay": Hyper(0.0, "decoupled weight decay, relative to the root mean square of the param as well."),
    }

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> AdaLomoScalars:
        lr, (eps, least) = float(group["lr"]), map(float, group["eps"])
        beta, clip = 1.0 - step ** float(group["decay_rate"]), float(group["clip_threshold"])
        return AdaLomoScalars(lr, float(group["weight_decay"]), beta, eps, least, clip, grad_scale)

    def update(self, master: Tensor, grad: Tensor, states: States, scalars: Any, where: Where | None) -> None:
        assert where is not None
        s, shape = scalars, where.shape
        g = (grad.float() * s.grad_scale).view(shape)
        squares = g.square().add_(s.eps)
        if len(shape) < 2:
            step = g.div_(states["variance"].mul_(s.beta).add_(squares, alpha=1 - s.beta).sqrt())
        else:
            rows = states["row_var"].mul_(s.beta).add_(squares.mean(-1, keepdim=True), alpha=1 - s.beta)
            columns = states["col_var"].mul_(s.beta).add_(squares.mean(-2, keepdim=True), alpha=1 - s.beta)
            step = g.div_((rows / rows.mean(-2, keepdim=True)).sqrt_()).div_(columns.sqrt())
        step.div_(max(1.0, _rms(step) / s.clip))
        lr = s.lr * max(s.least, _rms(master))
        master.mul_(1.0 - lr * s.weight_decay).view(shape).sub_(step, alpha=lr)


def _rms(x: Tensor) -> float:
    return math.sqrt(float(x.square().mean(dtype=torch.float64)))
