"""The optimizers of one run of a managed Lightning model, each converted where it stands."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.handle import handle_of, optimizer_of

from .rules import to_hybrid


def hybrids_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[HybridOptimizer]:
    """The optimizers of one run, converted. A new one starts without states and step counts, as one of torch's does,
    and so does one whose params another optimizer has taken over since.

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
    for hybrid in hybrids:
        if any(optimizer_of(param) is not hybrid for group in hybrid.param_groups for param in group["params"]):
            hybrid.start_anew()
    return hybrids
