"""The optimizers of one run of a managed Lightning model, each converted where it stands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.handle import handle_of

from .rules import to_hybrid


def hybrids_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[HybridOptimizer]:
    """The optimizers of one run of a managed model, converted.

    An optimizer that was not there in the last run of the model starts without states and step counts, as a new one of
    torch's would, though the model has those of the last run.

    Raises:
        ValueError: for other optimizers and options than Adam has here, and for a param in two of them.
    """
    owner: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if owner.setdefault(id(param), number) != number:
                name = getattr(handle_of(param), "name", "a param")
                raise ValueError(f"{name!r} is in two optimizers: its master and states belong to one of them")
    hybrids = [to_hybrid(optimizer) for optimizer in optimizers]
    last = model.__dict__.get("_gemini_last_optimizers")
    for hybrid in hybrids:
        if last is not None and not any(hybrid is other for other in last):
            hybrid.start_anew()
    model.__dict__["_gemini_last_optimizers"] = hybrids
    return hybrids
