"""Which optimizer a param was given to: managed now, later, or no longer."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Stepper(Protocol):
    """What a model asks of the optimizer that updates its params (``HybridOptimizer``)."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    step_in_backward: bool
    speculate: bool
    """Whether what it does in backward is a guess, which its step confirms."""
    may_guess: bool
    """Whether it may begin to by itself."""
    rule: Any
    """Its :class:`gemini.rules.UpdateRule`."""
    state: Any
    """Of its plain params, as in torch."""

    def scalars_in_backward(self, handle: Any, backward_number: int, scale: float) -> Hashable:
        """What to update a param with whose gradient has just become complete, times ``scale``."""

    def adopt_plain_states(self) -> None:
        """Params became managed: their states move into chunks."""


stepping_in_backward: weakref.WeakSet[Stepper] = weakref.WeakSet()
"""The optimizers that do; where there is none, nobody looks for them in backward."""


def begin_guessing(optimizer: Stepper) -> None:
    """Recent steps say that it pays."""
    if not optimizer.speculate:
        optimizer.step_in_backward = optimizer.speculate = True
        stepping_in_backward.add(optimizer)


_owners = WeakTensorKeyDictionary()
"""Params to weak references. Not an attribute of the param: with a weak reference in it, it could not be pickled."""


def optimizer_of(param: Any) -> Stepper | None:
    """The HybridAdam that was given ``param``, if it still lives."""
    handle = getattr(param, "_gemini", None)
    reference = reference_to_optimizer_of(param) if handle is None else handle.optimizer
    return None if reference is None else reference()


def reference_to_optimizer_of(param: Any) -> weakref.ref[Stepper] | None:
    """Of a param that may be managed later, or was."""
    return _owners.get(param)


def give_to(optimizer: Stepper | None, params: Iterable[torch.Tensor]) -> None:
    """From now on :func:`optimizer_of` these params is this one, or none."""
    reference = None if optimizer is None else weakref.ref(optimizer)
    for param in params:
        _owners[param] = reference
        handle = getattr(param, "_gemini", None)
        if handle is not None:
            handle.optimizer = reference
