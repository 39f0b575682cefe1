"""From ``torch.optim.AdamW`` or ``Adam`` to ``HybridAdam``: the same groups, hyperparameters and states.

Frameworks make their optimizer themselves, before anybody can say HybridAdam. The groups are the very dicts of the old
optimizer, so whoever holds them (an LR scheduler, a callback) goes on setting the learning rate of the new one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from gemini.train.optimizers.optimizer import HybridAdam, HybridOptimizer
from gemini.train.params.handle import handle_of

POSSIBLE = "torch.optim.AdamW, torch.optim.Adam or gemini.HybridAdam"
_TORCH_ONLY = (
    "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay",
)  # fmt: skip


def owns_managed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any of its params is managed."""
    return any(handle_of(param) is not None for group in optimizer.param_groups for param in group["params"])


def check_convertible(kind: type, groups: Iterable[dict[str, Any]], *, who: str = "") -> None:
    """Refuse an optimizer that HybridAdam cannot stand for.

    Raises:
        ValueError: saying what is possible.
    """
    if issubclass(kind, HybridAdam):
        return
    what = who or f"the optimizer {kind.__name__}"
    if kind not in (torch.optim.AdamW, torch.optim.Adam):
        raise ValueError(
            f"{what} cannot update a managed model, whose masters and states live in chunks: use {POSSIBLE}, or manage "
            f"the model for it with GeminiConfig(optimizer=gemini.optim.adopt({kind.__name__}))"
        )
    for group in groups:
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option):
                raise ValueError(f"{what} has {option}=True, which HybridAdam does not have: leave it out")


def to_hybrid_adam(optimizer: torch.optim.Optimizer, *, step_in_backward: bool = False) -> HybridAdam:
    """The HybridAdam that takes the place of ``optimizer``, with its groups (the same dicts) and its states.

    Raises:
        ValueError: for optimizers other than AdamW and Adam, and for options HybridAdam does not have.
    """
    if isinstance(optimizer, HybridAdam):
        return optimizer
    groups = optimizer.param_groups
    check_convertible(type(optimizer), groups)
    states = optimizer.state_dict() if optimizer.state else None
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    for group in groups:
        decoupled = bool(group.get("decoupled_weight_decay", decoupled))
        for option in _TORCH_ONLY:
            group.pop(option, None)
    hybrid = HybridAdam(groups, decoupled=decoupled, step_in_backward=step_in_backward)
    if states is not None:
        bare = [{"params": group["params"]} for group in states["param_groups"]]
        hybrid.load_state_dict({"state": states["state"], "param_groups": bare})
    return hybrid


def follow(scheduler: Any, old: torch.optim.Optimizer, new: HybridOptimizer) -> None:
    """Let an LR scheduler, and those inside it, that was made for ``old`` belong to ``new``."""
    for inner in [getattr(scheduler, "scheduler", None), *getattr(scheduler, "_schedulers", ())]:
        if inner is not None:
            follow(inner, old, new)
    if getattr(scheduler, "optimizer", None) is not old:
        return
    scheduler.optimizer = new
    if not hasattr(new.step, "_wrapped_by_lr_sched"):
        new.step = _noticed(new)  # type: ignore[method-assign]


def _noticed(optimizer: HybridOptimizer) -> Any:
    """``optimizer.step`` as schedulers leave it: they warn unless they see that it was called before theirs."""
    reference, function = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        assert alive is not None
        alive._opt_called = True  # type: ignore[attr-defined]
        return function(alive, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step
