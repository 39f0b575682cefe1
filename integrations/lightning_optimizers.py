"""The optimizers of one run of a managed Lightning model: a HybridAdam for each, found again when given again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.handle import handle_of

from .adam import follow
from .rules import to_hybrid


def hybrids_of(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]
) -> list[HybridOptimizer]:
    """A HybridAdam for each of the optimizers of one run of a managed model; ``schedulers`` are made to follow.

    An optimizer that was not there in the last run of the model starts without states and step counts, as a new one of
    torch's would, though the model has those of the last run.

    Raises:
        ValueError: for other optimizers and options than Adam has here, and for a param in two of them.
    """
    transient = model._gemini_engine.config.gradients == "transient"  # type: ignore[union-attr]
    hybrids = [_hybrid_of(optimizer, step_in_backward=transient) for optimizer in optimizers]
    owner: dict[int, int] = {}
    for number, hybrid in enumerate(hybrids):
        for param in _params(hybrid):
            if owner.setdefault(id(param), number) != number:
                name = getattr(handle_of(param), "name", "a param")
                raise ValueError(f"{name!r} is in two optimizers: its master and states belong to one of them")
    last = model.__dict__.get("_gemini_last_optimizers")
    for hybrid in hybrids:
        if last is not None and not any(hybrid is other for other in last):
            hybrid.start_anew()
    model.__dict__["_gemini_last_optimizers"] = hybrids
    for scheduler in schedulers:
        for old, new in zip(optimizers, hybrids, strict=True):
            follow(scheduler, old, new)
    return hybrids


def _hybrid_of(optimizer: torch.optim.Optimizer, *, step_in_backward: bool) -> HybridOptimizer:
    known = optimizer.__dict__.get("_gemini_hybrid")
    if isinstance(known, HybridOptimizer):
        return known
    hybrid = to_hybrid(optimizer, step_in_backward=step_in_backward)
    if hybrid is not optimizer:
        optimizer.__dict__["_gemini_hybrid"] = hybrid
    return hybrid


def _params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]
