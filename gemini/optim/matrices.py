"""Update rules that see a whole matrix at once: Muon, with AdamW for what is no hidden matrix, and AdaLomo.

Tiles of such a rule are whole params, so what passes through staging is as large as the largest of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gemini import kernels
from gemini.planning.planes import FactorSpec, PlaneSpec, RuleSpec
from gemini.rules import UpdateRule, Where

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration of Muon's authors: chosen for a steep slope at 0, they take singular values near 1."""
_ADJUSTMENTS = ("original", "match_rms_adamw")


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

    spec = RuleSpec("Muon", (PlaneSpec("exp_avg", "float32"), PlaneSpec("exp_avg_sq", "float32")), needs="param")
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "ns_eps": 1e-7,
        "adjust_lr": "original", "adamw": False, "betas": (0.9, 0.95), "eps": 1e-8,
    }  # fmt: skip

    def check_group(self, group: Mapping[str, Any], what: str) -> None:
        super().check_group(group, what)
        for name in ("lr", "weight_decay", "ns_eps", "eps"):
            if group[name] < 0:
                raise ValueError(f"{name} of {what} must be 0 or more, got {group[name]!r}")
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(0 <= float(b) < 1 for b in betas):
            raise ValueError(f"betas of {what} must be 2 numbers in [0, 1), got {betas!r}")
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"momentum of {what} must be in [0, 1), got {group['momentum']!r}")
        for name in ("nesterov", "adamw"):
            if not isinstance(group[name], bool):
                raise TypeError(f"{name} of {what} must be True or False, got {group[name]!r}")
        if type(group["ns_steps"]) is not int or not 1 <= group["ns_steps"] < 100:
            raise ValueError(f"ns_steps of {what} must be a whole number from 1 to 99, got {group['ns_steps']!r}")
        if group["adjust_lr"] not in _ADJUSTMENTS:
            raise ValueError(f"adjust_lr of {what} must be one of {_ADJUSTMENTS}, got {group['adjust_lr']!r}")
        params = group.get("params", ())
        for param in params if not group["adamw"] and isinstance(params, (list, tuple)) else ():
            if isinstance(param, Tensor) and param.dim() != 2:
                raise ValueError(
                    f"{what} has a param of shape {tuple(param.shape)}, and Muon is for matrices: give it a group of "
                    "its own with adamw=True (gemini.optim.muon_groups(model) makes both)"
                )

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> MuonScalars | kernels.AdamHyper:
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        if group["adamw"]:
            beta1, beta2 = map(float, group["betas"])
            return kernels.AdamHyper(
                lr, beta1, beta2, float(group["eps"]), weight_decay, step, decoupled=True, grad_scale=grad_scale
            )
        how = float(group["momentum"]), group["nesterov"], group["ns_steps"], float(group["ns_eps"]), group["adjust_lr"]
        return MuonScalars(lr, weight_decay, *how, grad_scale)

    def update(
        self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: Any, where: Where | None
    ) -> None:
        if isinstance(scalars, kernels.AdamHyper):
            kernels.adam_update(master, None, states["exp_avg"], states["exp_avg_sq"], grad, scalars)
            return
        assert where is not None
        s, shape = scalars, where.shape
        g, momentum = (grad.float() * s.grad_scale).view(shape), states["exp_avg"].view(shape)
        momentum.lerp_(g, 1 - s.momentum)
        along = g.lerp_(momentum, s.momentum) if s.nesterov else momentum
        step = orthogonalized(along, s.ns_steps, s.ns_eps)
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


# ---- AdaLomo ---------------------------------------------------------------------------------------------------------


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
    value for each row and column of a matrix.
    """

    spec = RuleSpec(
        "AdaLomo",
        needs="param",
        factors=(FactorSpec("row_var", "rows"), FactorSpec("col_var", "columns"), FactorSpec("variance", "vector")),
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3, "decay_rate": -0.8, "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "weight_decay": 0.0,
    }  # fmt: skip

    def check_group(self, group: Mapping[str, Any], what: str) -> None:
        super().check_group(group, what)
        for name in ("lr", "weight_decay"):
            if group[name] < 0:
                raise ValueError(f"{name} of {what} must be 0 or more, got {group[name]!r}")
        if not group["decay_rate"] <= 0:
            raise ValueError(f"decay_rate of {what} must be 0 or less, got {group['decay_rate']!r}")
        if not group["clip_threshold"] > 0:
            raise ValueError(f"clip_threshold of {what} must be positive, got {group['clip_threshold']!r}")
        eps = group["eps"]
        if not isinstance(eps, (tuple, list)) or len(eps) != 2 or not all(float(e) >= 0 for e in eps):
            raise ValueError(f"eps of {what} must be 2 numbers of 0 or more, got {eps!r}")

    def scalars(self, group: Mapping[str, Any], step: int, grad_scale: float) -> AdaLomoScalars:
        lr, (eps, least) = float(group["lr"]), map(float, group["eps"])
        beta, clip = 1.0 - step ** float(group["decay_rate"]), float(group["clip_threshold"])
        return AdaLomoScalars(lr, float(group["weight_decay"]), beta, eps, least, clip, grad_scale)

    def update(
        self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: Any, where: Where | None
    ) -> None:
        assert where is not None
        s, shape = scalars, where.shape
        g = (grad.float() * s.grad_scale).view(shape)
        squares = g.square().add_(s.eps)
        if len(shape) < 2:
            second = states["variance"].mul_(s.beta).add_(squares, alpha=1 - s.beta)
            step = g.div_(second.sqrt())
        else:
            rows = states["row_var"].mul_(s.beta).add_(squares.mean(-1, keepdim=True), alpha=1 - s.beta)
            columns = states["col_var"].mul_(s.beta).add_(squares.mean(-2, keepdim=True), alpha=1 - s.beta)
            step = g.div_((rows / rows.mean(-2, keepdim=True)).sqrt_()).div_(columns.sqrt())
        step.div_(max(1.0, _rms(step) / s.clip))
        lr = s.lr * max(s.least, _rms(master))
        master.mul_(1.0 - lr * s.weight_decay).view(shape).sub_(step, alpha=lr)


def _rms(x: Tensor) -> float:
    return math.sqrt(float(x.square().mean(dtype=torch.float64)))
