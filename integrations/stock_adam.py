"""From torch's Adam and AdamW to HybridAdam: what a framework's user has written goes on as it is.

Groups keep their hyperparameters (they are the very same dicts), schedulers go on with the new optimizer, and an
optimizer that is given again is found again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.train.guard import handle_of
from gemini.train.optimizer import HybridAdam


def hybrids_of(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any]
) -> list[HybridAdam]:
    """A HybridAdam for each of the optimizers of one run of a managed model; ``schedulers`` are made to follow.

    An optimizer that was not there in the last run of the model starts without moments and step counts, as a new one of
    torch's would, though the model has those of the last run.

    Raises:
        GeminiError: for other optimizers and options than Adam has here, and for a param in two of them.
    """
    transient = model._gemini_engine.config.gradients == "transient"  # type: ignore[union-attr]
    hybrids = [hybrid_of(optimizer, step_in_backward=transient) for optimizer in optimizers]
    owner: dict[int, int] = {}
    for number, hybrid in enumerate(hybrids):
        for param in _params(hybrid):
            if owner.setdefault(id(param), number) != number:
                name = getattr(handle_of(param), "name", "a param")
                raise GeminiError(f"{name!r} is in two optimizers: its master and moments belong to one of them")
    last = model.__dict__.get("_gemini_last_optimizers")
    for hybrid in hybrids:
        if last is not None and not any(hybrid is other for other in last):
            _forget(hybrid)
    model.__dict__["_gemini_last_optimizers"] = hybrids
    for scheduler in schedulers:
        for old, new in zip(optimizers, hybrids, strict=True):
            _relink(scheduler, old, new)
    return hybrids


def hybrid_of(optimizer: torch.optim.Optimizer, *, step_in_backward: bool = False) -> HybridAdam:
    """The HybridAdam in the place of ``torch.optim.AdamW`` or ``Adam``; the same one when asked again.

    Raises:
        GeminiError: for other optimizers, and for ``amsgrad`` and ``maximize``.
    """
    if isinstance(optimizer, HybridAdam):
        return optimizer
    name = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        raise GeminiError(
            f"{name} cannot update a managed model, whose states live in chunks: use gemini.HybridAdam, "
            "torch.optim.AdamW or torch.optim.Adam"
        )
    known = optimizer.__dict__.get("_gemini_hybrid")
    if isinstance(known, HybridAdam):
        return known
    is_adamw = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise GeminiError(f"{name}({option}=True) has no equal in gemini.HybridAdam: leave {option} out")
        group["decoupled"] = is_adamw or bool(group.get("decoupled_weight_decay", False))
    hyper = {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
    hybrid = HybridAdam(
        optimizer.param_groups,
        **hyper,
        decoupled=optimizer.param_groups[0]["decoupled"],
        step_in_backward=step_in_backward,
    )
    if optimizer.state:
        hybrid.load_state_dict(optimizer.state_dict())
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        _count_steps(hybrid)
    optimizer.__dict__["_gemini_hybrid"] = hybrid
    return hybrid


def _params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _forget(hybrid: HybridAdam) -> None:
    if any(getattr(handle_of(param), "num_steps", 0) for param in _params(hybrid)):
        groups = torch.optim.Optimizer.state_dict(hybrid)["param_groups"]
        hybrid.load_state_dict({"state": {}, "param_groups": groups})


def _relink(scheduler: Any, old: torch.optim.Optimizer, new: HybridAdam) -> None:
    """Schedulers inside others too."""
    if getattr(scheduler, "optimizer", None) is old:
        scheduler.optimizer = new
    for inner in getattr(scheduler, "_schedulers", ()):
        _relink(inner, old, new)


def _count_steps(optimizer: HybridAdam) -> None:
    """What torch's schedulers do to the optimizer they are made for: they warn if they are asked to step before it."""
    reference, step = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        owner: Any = reference()
        owner._opt_called = True
        return step(owner, *args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = counted  # type: ignore[method-assign]
