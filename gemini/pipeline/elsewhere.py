"""Stand-ins for what other stages compute: whatever is computed from one is one, and nothing that counts may be.

How a forward runs through a model was seen once, on one micro-batch without values (:mod:`gemini.pipeline.flow`).
Another micro-batch, a switch in a closure or a value may lead another way. So a stage looks at what it gives: a result
that one of these went into is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_leaves

from gemini.errors import GeminiError


class Strayed(GeminiError):
    """A forward took another way than the one that was seen. ``has_begun``: some gradients of its step are there."""

    has_begun = False


_SHAPE_ALONE = set(
    "new_empty new_full new_ones new_zeros empty_like full_like ones_like zeros_like "
    "expand_as reshape_as type_as view_as".split()
)
"""Functions that look at the shape, the dtype or the device of one (with "_as" of the second argument), by name."""
_VALUES = {"__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "__contains__"}


class Elsewhere(torch.Tensor):
    """A tensor of the right shape, whose values are another stage's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))  # x += y, x.add_(y)
        writes = in_place or name == "__setitem__" or "out" in kwargs
        if name in _VALUES or (writes and not isinstance(kwargs.get("out", args[0] if args else None), Elsewhere)):
            stray("its forward reads values that another of its parts makes")
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        is_second = name.endswith("_as") and not isinstance(args[0], Elsewhere)
        if func in get_default_nowrap_functions() or name in _SHAPE_ALONE and (is_second or not name.endswith("_as")):
            return out
        return torch.utils._pytree.tree_map(standing_in, out)


def standing_in(value: Any) -> Any:
    """The same as a stand-in, if it is a tensor."""
    return value.as_subclass(Elsewhere) if isinstance(value, torch.Tensor) else value


class _Unread:
    """In the place of an entry of a model's output that all stages together would have made."""

    def __init__(self, name: str):
        self.__dict__["_name"] = name

    def _stray(self, *_: Any) -> NoReturn:
        stray(f"output.{self.__dict__['_name']} is read, which no part of it has whole")

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __call__ = _stray


def only(output: Any, readable: frozenset[str] | None) -> Any:
    """What a forward returns, with the entries alone that are ``readable``, if it has any by name."""
    if readable is None or not isinstance(output, dict):
        return output
    if type(output) is dict:
        output = dict(output)
    for name, value in output.items():
        if name not in readable and value is not None:
            output[name] = _Unread(name)
    return output


def check(value: Any) -> None:
    """Raises :class:`Strayed` if a tensor in it depends on what another stage computes."""
    if any(isinstance(leaf, Elsewhere) for leaf in tree_leaves(value)):
        stray("what one of its parts computes depends on more than the hidden states of the part before it")


def stray(why: str) -> NoReturn:
    raise Strayed(f"the model goes another way through its blocks than in the micro-batch that was looked at: {why}")


def readable_in(output: Any, is_own: Any) -> frozenset[str] | None:
    """Names in what a forward returned whose values are all in tensors that ``is_own``; None if it has no names."""
    if not isinstance(output, dict):  # a ModelOutput is one
        return None
    plain = (int, float, str, type(None))
    return frozenset(
        name
        for name, value in output.items()
        if all(
            is_own(leaf) if isinstance(leaf, torch.Tensor) else isinstance(leaf, plain) for leaf in tree_leaves(value)
        )
    )
