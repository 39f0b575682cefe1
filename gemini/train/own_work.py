"""What is done for chunks beside the model's own work, and what sets it apart.

:func:`own_work` is for who looks at what is alive at every moment, and must not count what is ours (a tracer). The rest
is for the transforms of ``torch.func`` around a managed model, or inside of it. While one runs, torch hands every
operation through a stack of interpreters, allows no saved-tensor hooks, and keeps the params themselves for its own
backward, where nobody can count them. So the engine moves weights outside of that stack, and what a differentiating
transform has read stays gathered until it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

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


_Method = TypeVar("_Method", bound=Callable[..., Any])


def own_work(method: _Method) -> _Method:
    """A method, of an object with ``observers``, that does something for chunks beside the model's own work."""

    @wraps(method)
    def apart(self: Any, *args: Any) -> Any:
        around = self.observers.around_own_work
        if around is None:
            return method(self, *args)
        with around():
            return method(self, *args)

    return cast(_Method, apart)
