"""The factors of params (:mod:`gemini.planning.planes`): zeros in host memory, which a rule updates in place."""

from __future__ import annotations

import torch

from gemini.planning.planes import RuleSpec, shapes_of


def make_factors(rule: RuleSpec, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Of a trained param of ``shape``; whoever calls has reserved them."""
    with torch.inference_mode(False):
        found = shapes_of(rule.factors, shape)
        return {name: torch.zeros(own, dtype=torch.float32, device="cpu") for name, own in found.items()}
