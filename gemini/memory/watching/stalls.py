"""How long the training thread waited in a step, and for what: the figures under ``memory_report()["stalls"]``.

Waits nest (a fetch inside waiting for other ranks): the outermost one counts, once. Threads that work beside the
training wait for nobody's step, so what they do here counts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident

import torch

_graph_task = torch._C._current_graph_task_id
"""Which backward this thread is in; -1: none."""


def trains_here(trainer: int) -> bool:
    """Whether this thread is the training thread, ``trainer``, or runs its backward for it.

    autograd runs the backward of a GPU on a thread of its own, for which ``backward()`` waits.
    """
    return get_ident() == trainer or _graph_task() != -1


class _Waiting:
    """``with stalls.waiting(cause):``; one for each cause, whose times are kept in :class:`Stalls`."""

    __slots__ = ("_cause", "_stalls")

    def __init__(self, stalls: Stalls, cause: str):
        self._stalls, self._cause = stalls, cause

    # No calls of ours in here: it is around every landing of a gradient, however small.
    def __enter__(self) -> None:
        stalls = self._stalls
        if get_ident() == stalls._trainer or _graph_task() != -1:
            if not stalls._depth:
                stalls._since = stalls._clock()
            stalls._depth += 1

    def __exit__(self, *exc: object) -> None:
        stalls = self._stalls
        if stalls._depth and (get_ident() == stalls._trainer or _graph_task() != -1):
            stalls._depth -= 1
            if not stalls._depth:
                found, cause = stalls._seconds, self._cause
                found[cause] = found.get(cause, 0.0) + stalls._clock() - stalls._since


class Stalls:
    """One per engine. The training thread is the one that made it, then whichever ends steps.

    Args:
        clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.last_step: dict[str, float] = {}
        """Seconds of the step that ended last, by cause, the longest first."""
        self._clock = clock
        self._trainer = get_ident()
        self._depth = 0
        self._since = 0.0
        self._seconds: dict[str, float] = {}
        self._known: dict[str, _Waiting] = {}

    def waiting(self, cause: str) -> _Waiting:
        """Around one wait of the training thread."""
        found = self._known.get(cause)
        if found is None:
            found = self._known[cause] = _Waiting(self, cause)
        return found

    def end_step(self) -> None:
        """A step is over; called by the thread that trains."""
        self.last_step = dict(sorted(self._seconds.items(), key=lambda item: -item[1]))
        self.clear()
        self._trainer = get_ident()

    def clear(self) -> None:
        """Forget what was waited for since the last step."""
        self._seconds = {}
        self._depth = 0  # an interrupt between two bytecodes may have lost the end of a wait
