"""Rules and scalars for the tests of kernels: every native one beside Adam's, with hyperparameters that matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemini import kernels
from gemini.optim import AdanRule, LionRule, PlainSGDRule, SGDRule, SophiaGRule, SophiaHRule
from gemini.rules import UpdateRule
from tests.native.native_cases import any_bits, to_dtype

Case = tuple[UpdateRule, dict[str, Any], int]
"""A rule, hyperparameters that are not its defaults, and the number of the update."""

CASES: dict[str, Case] = {
    "sgd": (SGDRule(), {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}, 3),
    "first sgd": (SGDRule(), {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}, 1),
    "nesterov": (SGDRule(), {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, 3),
    "plain sgd": (PlainSGDRule(), {"lr": 0.1, "weight_decay": 0.1}, 3),
    "lion": (LionRule(), {"lr": 1e-3, "weight_decay": 0.1}, 3),
    "adan": (AdanRule(), {"weight_decay": 0.1}, 3),
    "first adan": (AdanRule(), {"weight_decay": 0.1}, 1),
    "adan, no prox": (AdanRule(), {"weight_decay": 0.1, "no_prox": True}, 3),
    "sophia": (SophiaGRule(), {"lr": 1e-3, "bs": 3.0}, 3),
    "sophia's estimate": (SophiaGRule(), {"estimates_hessian": True}, 3),
    "sophia-h": (SophiaHRule(), {"lr": 1e-3}, 3),
    "sophia-h's estimate": (SophiaHRule(), {"estimates_hessian": True}, 3),
}


def scalars_of(case: Case, grad_scale: float = 0.37) -> Any:
    rule, hypers, step = case
    return rule.scalars({**rule.defaults, **hypers}, step, grad_scale)


def arrays(rule: UpdateRule, n: int, is_split: bool, dtype: torch.dtype) -> list[Any]:
    """weights, residual or None, states by name, grad; of any bits."""
    weights, residual = any_bits(n, 1).clone(), None
    states = {spec.kind: any_bits(n, 5 + number).clone() for number, spec in enumerate(rule.spec.planes)}
    for kind in ("exp_avg_sq", "hessian"):
        if kind in states and not isinstance(rule, SophiaHRule):  # whose estimates have signs
            states[kind] = states[kind].abs()
    if is_split:
        hi, residual = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
        kernels.split_master(weights, hi, residual)
        weights = hi
    return [weights, residual, states, to_dtype(any_bits(n, 4), dtype)]


def copied(given: list[Any]) -> list[Any]:
    weights, residual, states, grad = given
    own = {kind: state.clone() for kind, state in states.items()}
    return [weights.clone(), None if residual is None else residual.clone(), own, grad.clone()]


def flat(given: list[Any]) -> dict[str, Tensor]:
    """Every array by name."""
    weights, residual, states, grad = given
    found = {"weights": weights, **states, "grad": grad}
    return found if residual is None else {**found, "residual": residual}
