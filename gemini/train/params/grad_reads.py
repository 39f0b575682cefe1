"""``p.grad`` of managed params: None to the outside, for gradients live in chunks, so a reader is told.

Torch's own functions that look at ``p.grad`` and would do nothing, silently, are refused by name. Who else reads it
after a backward (``if p.grad is not None: p.grad.clamp_()``, a logger of norms) is warned, once per model:
libraries look at ``p.grad`` of every param, step after step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gemini.errors import ParamAccessError, warn


def _code(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__


_BLIND = {
    _code(function): (
        f"torch.nn.utils.{name} would see no gradient of {{name!r}} and clip nothing: gradients of a managed model "
        "live in chunks. Use model.clip_grad_norm_(max_norm)"
    )
    for name, function in vars(nn.utils).items()
    if name.startswith("clip_") and name.endswith("_")
}
_CONVERTED: set[Any] = set()
_ZERO_GRAD = _code(nn.Module.zero_grad)
_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def refuse_in(function: Callable[..., Any], message: str) -> None:
    """Let ``p.grad`` of managed params raise ``message`` (with ``{name!r}``) where ``function`` looks at it."""
    _BLIND[_code(function)] = message


def note_converted(function: Callable[..., Any]) -> None:
    """``function`` steps optimizers of torch, of which one was converted: what is kept of it from before is refused."""
    _CONVERTED.add(_code(function))


def note_grad_read(param: Any) -> None:
    """Somebody reads ``p.grad`` of a managed param at rest; three frames up is who.

    ``zero_grad()`` of a part of the model would find nothing to forget: what is in the chunk is forgotten for it.

    Raises:
        ParamAccessError: in a function that would do nothing, silently.
    """
    frame = sys._getframe(2)
    for _ in range(3):  # the getter, perhaps a comprehension, torch's function
        if frame.f_code in _BLIND:
            raise ParamAccessError(_BLIND[frame.f_code].format(name=param._gemini.name))
        if frame.f_code in _CONVERTED:
            raise ParamAccessError(
                "the step of an optimizer was called as it was before it was converted for a managed model, and would "
                f"find no gradient of {param._gemini.name!r}: call optimizer.step(), and keep no step from before"
            )
        if frame.f_code is _ZERO_GRAD and (owner := param._gemini.owner()) is not None:
            owner.stepping.discard([param._gemini], to_zero=not frame.f_locals.get("set_to_none", True))
            return
        if frame.f_back is None:
            break
        frame = frame.f_back
    handle, owner = param._gemini, param._gemini.owner()
    if owner is None or owner in _warned or torch._C._current_graph_task_id() != -1:
        return  # inside a backward it is our own hook that looks
    if not (handle.has_grad or owner.state.num_unreduced or owner.state.updated_in_backward):
        return
    _warned.add(owner)
    warn(
        f"p.grad of managed param {param._gemini.name!r} was read after a backward: it is always None, since "
        "gradients of a managed model live in chunks, and what is done with it (clamping, noise, logging a norm) does "
        "nothing. Read them with model.full_grad(name), clip them with model.clip_grad_norm_(max_norm). This is said "
        "once per model"
    )
