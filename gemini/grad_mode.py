"""Autograd switched off, or on, for one call, so that no interrupt can leave it so.

``torch.no_grad()`` is written in Python. A KeyboardInterrupt that comes when its ``__enter__`` has switched autograd
off, and before the ``with`` block has begun, leaves it off for the rest of the program; at the end of the block it is
the same. Here one function switches, in calls that Python runs to their end before it looks for signals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def call_without_grad(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``function(*args, **kwargs)`` with autograd off."""
    return _call(False, function, *args, **kwargs)


def call_with_grad(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``function(*args, **kwargs)`` with autograd on."""
    return _call(True, function, *args, **kwargs)


def without_grad(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` with autograd off whenever it is called; as ``torch.no_grad()`` decorates one."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return _call(False, function, *args, **kwargs)

    return call


def _call(enabled: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    before = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(enabled)
        return function(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(before)
