"""Ctrl-C waits while an update is applied: half of one would cost the model, and the whole is soon there.

Inside ``with WHOLE:`` the first SIGINT is noted, and takes effect where the outermost block ends, through the handler
that was there before: Python's own raises KeyboardInterrupt, a program's own is called. :data:`WHOLE` may be entered
again inside itself. An update that is spread over a backward has no such block; it is held from :meth:`Whole.hold` to
:meth:`Whole.let_go`, for as long as ``still`` says that the backward goes on. Signals are the main thread's in Python:
in every other thread all this does nothing. It is never for long: a SIGINT that comes ``PATIENCE`` seconds after the
first one takes effect at once, as ever.

What may not be cut off by a signal stands in single C calls here: Python looks for signals after a call and where a
function begins, and nowhere between.

So does switching autograd off, or on, for one call. ``torch.no_grad()`` is written in Python: a KeyboardInterrupt that
comes when its ``__enter__`` has switched autograd off, and before the ``with`` block has begun, leaves it off for the
rest of the program; at the end of the block it is the same. Here one function switches, in calls that Python runs to
their end before it looks for signals.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # ``signal`` wraps it in Python: 9 us for a handler and back, not 0.4
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 5.0
"""Seconds after the first SIGINT from which on another one takes effect at once."""


class Whole:
    """The one of this process is :data:`WHOLE`: there is one handler of SIGINT."""

    def __init__(self) -> None:
        self._depth = 0
        self._still: Callable[[], bool] | None = None
        self._before: Any = None
        """The handler that was there; None while ours is not installed."""
        self._noted: float | None = None
        """When the first SIGINT came that has not taken effect."""
        self._handler = self._receive  # one object: getsignal() tells by it whether it is still ours
        self._main = threading.main_thread().ident  # a process that another thread has forked has none: nothing waits

    def __enter__(self) -> None:
        # Not `current_thread() is main_thread()`, which are two calls: this is around every landing of a gradient.
        if threading.get_ident() == self._main:
            # The handler first. A signal between the two lines takes effect at once and puts the old handler back: the
            # block has not begun.
            if self._before is None:
                before = _signal.getsignal(signal.SIGINT)
                if before is not None:  # else it was installed by C code, and nobody could put it back
                    # What an earlier block has noted took effect at its end. A time that is left over would count
                    # against `PATIENCE`.
                    self._noted = None
                    # One statement: what has come until now takes effect as ever, inside the call and before it changes
                    # anything.
                    self._before = _signal.signal(signal.SIGINT, self._handler)
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        # Depth is the main thread's. A worker inside `with WHOLE` must not end the block of the main thread.
        if self._depth and threading.get_ident() == self._main:
            self._depth -= 1
            if self._depth == 0 and self._still is None:
                self._restore()

    def hold(self, still: Callable[[], bool]) -> None:
        """Begin to wait, until :meth:`let_go` or, should that never be called, as long as ``still()`` is true."""
        if threading.get_ident() == self._main:
            self.__enter__()
            self._still = still
            self._depth -= 1

    def let_go(self) -> None:
        """The end of :meth:`hold`: a SIGINT that has come takes effect now. Nothing if nothing is held."""
        if self._still is not None and threading.get_ident() == self._main:
            # Before the handler goes: a signal in between is the program's.
            self._still = None
            if self._depth == 0:
                self._restore()

    def _restore(self, *, again: bool = False) -> None:
        """Put the handler of before back, and let what was noted (or ``again``: one more) take effect."""
        # `_before` is None from here on: a signal before the handler is put back is noted by `_receive`, raised below.
        before, self._before = self._before, None
        if before is None:
            return
        if _signal.getsignal(signal.SIGINT) is self._handler:  # else the program has installed another since
            _signal.signal(signal.SIGINT, before)
        # Behind the change of handlers: what our own has noted until then is not lost.
        noted, self._noted = self._noted, None
        if noted is not None or again:
            # Through the handler of before, which raises KeyboardInterrupt here, or is the program's own. Last: all
            # books of this object are in order.
            signal.raise_signal(signal.SIGINT)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """The handler while we wait."""
        if self._before is None:  # just installed, or just about to go
            self._noted = time.monotonic()
        elif self._depth == 0 and not (self._still is not None and self._still()):
            self._still = None  # a backward that ended in an error: nobody is in an update
            self._restore(again=True)
        elif self._noted is None:
            self._noted = time.monotonic()
        elif time.monotonic() - self._noted > PATIENCE:
            self._restore(again=True)


WHOLE = Whole()


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


def yield_without_grad() -> Iterator[None]:
    """Yield once, with autograd off meanwhile: for ``yield from`` in what becomes a context manager."""
    before = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)
        yield
    finally:
        torch._C._set_grad_enabled(before)


def _call(enabled: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    # Read before `try`: an interrupt in this line has switched nothing yet.
    before = torch.is_grad_enabled()
    try:
        # The C call and not the context manager, whose Python code an interrupt could end halfway.
        torch._C._set_grad_enabled(enabled)
        return function(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(before)
