"""The transforms of ``torch.func`` around a managed model, or inside of it.

While one runs, torch hands every operation through a stack of interpreters, allows no saved-tensor hooks, and keeps the
params themselves for its own backward, where nobody can count them. So the engine moves weights outside of that stack,
and what a differentiating transform has read stays gathered until it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_functorch: Any = torch._C._functorch


innermost_transform: Callable[[], Any] = _functorch.peek_interpreter_stack
"""The transform that runs in this thread, or None. torch's own function: it is asked in every hook."""


_NOTHING = nullcontext()


def is_differentiating() -> bool:
    """Whether one of them takes derivatives."""
    if innermost_transform() is None:
        return False
    kinds = _functorch.TransformType
    return any(interpreter.key() in (kinds.Grad, kinds.Jvp) for interpreter in _functorch.get_interpreter_stack())


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, of what a transform has wrapped."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def without_transforms() -> AbstractContextManager[None]:
    """What is done inside is of no transform: moving weights."""
    return _NOTHING if innermost_transform() is None else _without_stack()


@contextmanager
def _without_stack() -> Iterator[None]:
    stack = []
    try:
        while innermost_transform() is not None:
            stack.append(_functorch.pop_dynamic_layer_stack())
        yield
    finally:
        while stack:
            _functorch.push_dynamic_layer_stack(stack.pop())
