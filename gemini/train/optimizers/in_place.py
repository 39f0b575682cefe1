"""A torch optimizer becomes one of Gemini's where it stands, as a model does in ``GeminiDDP``: it is the same object.

Frameworks and programs make their optimizer themselves, before anybody can say HybridAdam, and hand it on: to
schedulers, callbacks, loggers. All of them go on holding the optimizer that updates the model. Its class becomes one
that is both its own, under its own name, and :class:`HybridOptimizer`; groups, defaults, hooks and all else stay.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import defaultdict
from functools import cache
from typing import Any

import torch

from gemini.planning.planes import EMA
from gemini.rules import ADAM, UpdateRule
from gemini.train.optimizers.optimizer import HybridAdam, HybridOptimizer
from gemini.train.params.by_name import owner_of
from gemini.train.params.guard import refuse_in
from gemini.train.params.handle import give_to, handle_of, optimizer_of, original_class, params_of, stepping_in_backward

_SERVED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
"""What the new class does in another way."""
_ADDED = {"rule", "step_in_backward", "speculate", "_is_made", "_backward_checked"}
"""What an optimizer of ours has on itself beside what every one of torch has."""

_OF_BEFORE = (
    "the step of an optimizer was called as it was before it was converted for a managed model, and would find no "
    "gradient of {name!r}: call optimizer.step(), and keep no step from before"
)


@cache
def class_in_place_of(original: Any, kind: Any) -> Any:
    """The class that is both ``original`` and ``kind``, under the name of the first: programs and loggers read it."""
    for base in original.__mro__[: original.__mro__.index(torch.optim.Optimizer)]:
        for function in filter(inspect.isfunction, map(vars(base).get, ("step", "_init_group"))):
            refuse_in(function, _OF_BEFORE)
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_gemini_original": original,
        # Pickles name the two classes, from which this one is made again.
        "__reduce_ex__": lambda self, protocol: (_new, (original, kind), self.__getstate__()),
    }
    return type(original.__name__, (kind, original), namespace)


def _new(original: type, kind: type) -> Any:
    """Make an empty one for copies and pickles, which would look for the class by its name."""
    made = class_in_place_of(original, kind)
    return made.__new__(made)


def convert(optimizer: torch.optim.Optimizer, rule: UpdateRule, *, step_in_backward: bool = False) -> HybridOptimizer:
    """Let a torch optimizer update its params by ``rule``; its states move to where those of managed params are. Raises
    as :class:`HybridOptimizer` for its groups and its states, and ValueError for methods that were replaced on the
    optimizer itself. Nothing was changed.
    """
    original: Any = type(optimizer)
    before = dict(vars(optimizer))
    params = params_of(optimizer)
    # So that a failure gives params back to whom they belonged.
    owners = [(param, optimizer_of(param)) for param in params]
    # Read while it is torch's optimizer still: its states are by param there.
    past = {index: state for index, param in enumerate(params) if (state := _past_of(optimizer, param, rule))}
    # A method on the object itself would hide that of the new class.
    step = before.get("step")
    # What an LR scheduler has put around the step of the class is known.
    is_of_scheduler = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is original.step
    for name in _SERVED:
        if name in before and not (name == "step" and is_of_scheduler):
            raise ValueError(
                f"{name} of the optimizer {original.__name__} was replaced by {before[name]!r}, which goes on calling "
                f"{original.__name__}'s own: replace it after the optimizer was converted for the managed model"
            )
    try:
        optimizer.__class__ = class_in_place_of(original, HybridAdam if rule == ADAM else HybridOptimizer)
        assert isinstance(optimizer, HybridOptimizer)
        optimizer._take_over(rule, past, f"the optimizer {original.__name__}", step_in_backward=step_in_backward)
        _renew_step(optimizer)
    except BaseException:
        _put_back(optimizer, original, before)
        for param, owner in owners:
            give_to(owner, [param])
        raise
    return optimizer


def _past_of(optimizer: torch.optim.Optimizer, param: Any, rule: UpdateRule) -> dict[str, Any]:
    """A state in the rule's dtypes (torch's are those of the param), with its count of steps: SGD keeps none, and its
    first step alone is unlike the others.
    """
    found = {name: value for name, value in optimizer.state.get(param, {}).items() if value is not None}
    for spec in rule.spec.planes:
        if isinstance(value := found.get(spec.kind), torch.Tensor) and value.is_floating_point():
            found[spec.kind] = value.to(getattr(torch, spec.dtype))
    handle = handle_of(param)
    if found and handle is not None and EMA in handle.chunk.planes:
        # Which torch's has not: it begins at the master that those steps have left.
        found[EMA] = owner_of(handle).by_names.read(handle, torch.float32)
    return {"step": torch.tensor(1.0, device="cpu"), **found} if found else found


def give_back(optimizer: Any) -> None:
    """Let a converted optimizer be what it was: its model is an ordinary one again. Its params start anew. One that was
    made as an optimizer of Gemini stays one.
    """
    original = original_class(optimizer)
    if original is None:
        return
    # Everything that others have put on it stays; what is ours goes.
    left = {name: value for name, value in vars(optimizer).items() if name not in _ADDED}
    give_to(None, params_of(optimizer))
    # States of plain params stay; managed ones begin anew, as their planes are gone.
    state = _first_state(original, optimizer.param_groups) | dict(dict.items(optimizer.state))
    _put_back(optimizer, original, {**left, "state": defaultdict(dict, state)})
    _renew_step(optimizer)


def _first_state(original: Any, groups: list[dict[str, Any]]) -> dict[Any, Any]:
    """The states that a class has before the first step: torch's Adagrad makes its sums when it is made."""
    try:
        return dict(original([dict(group) for group in groups]).state)
    except TypeError:  # it wants more than params
        return {}


def _put_back(optimizer: Any, original: type, attributes: dict[str, Any]) -> None:
    # Else models would go on waiting for its updates inside backward.
    stepping_in_backward.discard(optimizer)
    optimizer.__class__ = original
    vars(optimizer).clear()
    vars(optimizer).update(attributes)


def _renew_step(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step`` as LR schedulers leave it (they warn unless they see that it was called before theirs), around
    the step of the class that the optimizer has now.
    """
    optimizer._patch_step_function()  # torch's: hooks of the optimizer are called
    if "step" not in vars(optimizer):
        return
    # Weak: a function on the optimizer that held it would be a cycle, which only the collector ends.
    reference, function = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        alive: Any = reference()
        # What torch's schedulers look for before they warn.
        alive._opt_called = True
        return function(alive, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
