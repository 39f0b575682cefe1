"""What is told of the work on one model's bytes, by whoever does it: activities, and the bytes that cross boundaries.

An activity begins and ends (``with watch.about(...)``), on any thread. Two listen. The one that always does keeps how
long the training thread waited in a step, and for what: the figures under ``memory_report()["stalls"]``. Activities
nest (a fetch inside waiting for other ranks): the outermost one counts, once; threads that work beside the training
wait for nobody's step, and count nothing. The other one, if somebody records, is a :class:`Recorder`, which keeps all
of them as spans.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from threading import get_ident

from gemini.memory.devices.device import Event
from gemini.memory.watching.recorder import NOTHING, RecordedEvent, Recorder, graph_task
from gemini.planning.timeline import TRACKS, Track
from gemini.planning.traffic import path
from gemini.tiers import Boundary, Tier


@cache
def _boundaries(source: Tier, target: Tier) -> tuple[str, ...]:
    return tuple(str(boundary) for boundary in path(source, target))


class Moved:
    """Bytes over each boundary in one step; any thread may add.

    What is fetched between two steps, ahead of the second, is told apart from what else moves there (an evaluation).
    """

    def __init__(self) -> None:
        self._bytes: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._lock = threading.Lock()

    def add(self, source: Tier, target: Tier, num_bytes: int, *, ahead: bool = False) -> None:
        """Bytes between the GPU and NVMe cross host memory, and count on both boundaries."""
        with self._lock:
            for boundary in _boundaries(source, target):
                self._bytes[ahead][boundary] += num_bytes

    def counts(self, *, ahead: bool = True) -> Counter[str]:
        """All of them, or all but those ahead of the step."""
        with self._lock:
            return self._bytes[0] + self._bytes[1] if ahead else self._bytes[0].copy()


class _Waiting:
    """An activity of which nothing but its cause and its time is kept: one for each cause."""

    __slots__ = ("_cause", "_watch")

    def __init__(self, watch: Watch, cause: str):
        self._watch, self._cause = watch, cause

    # No calls of ours in here: it is around every landing of a gradient, however small.
    def __enter__(self) -> None:
        watch = self._watch
        if get_ident() == watch._trainer or graph_task() != -1:
            if not watch._depth:
                watch._since = watch._clock()
            watch._depth += 1

    def __exit__(self, *exc: object) -> None:
        watch = self._watch
        if watch._depth and (get_ident() == watch._trainer or graph_task() != -1):
            watch._depth -= 1
            if not watch._depth:
                found, cause = watch._stalls, self._cause
                found[cause] = found.get(cause, 0.0) + watch._clock() - watch._since


class Watch:
    """One per engine. The training thread is the one that made it, then whichever ends steps.

    Args:
        clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.recorder: Recorder | None = None
        self.moved = Moved()
        """Of the step under way; an optimizer step puts a new one in its place."""
        self.moved_last_step = Moved()
        self.stalls: dict[str, float] = {}
        """Seconds that the training thread waited in the step that ended last, by cause, the longest first."""
        self._clock = clock
        self._trainer = get_ident()
        self._depth = 0
        self._since = 0.0
        self._stalls: dict[str, float] = {}
        self._known: dict[str, _Waiting] = {}

    def record(self, recorder: Recorder | None) -> None:
        """Every activity goes to ``recorder`` as well; None takes it away."""
        self.recorder = recorder

    def about(
        self, cause: str, name: str, chunk: int = -1, *, track: Track | None = None
    ) -> AbstractContextManager[None]:
        """Time this block: a stall of the training thread by ``cause``, and, where somebody records, a span on
        ``track`` on any thread.
        """
        waiting = self._known.get(cause)
        if waiting is None:
            waiting = self._known[cause] = _Waiting(self, cause)
        if self.recorder is None:
            return waiting
        return self.recorder.about(cause, name, chunk, track=track, around=waiting)

    def crossing(self, source: Tier, target: Tier, num_bytes: int) -> AbstractContextManager[None]:
        """Around one copy, of which ``moved`` knows already."""
        return NOTHING if self.recorder is None else self.recorder.move(source, target, num_bytes)

    def under_way(
        self, source: Tier, target: Tier, num_bytes: int, begin: Callable[[], Event], name: str, chunk: int
    ) -> Event:
        """What ``begin`` begins; who records is told of it when its end is noticed."""
        recorder, track = self.recorder, TRACKS.get(Boundary(source, target))
        if recorder is None or track is None:
            return begin()
        start = recorder.clock()
        return RecordedEvent(begin(), lambda: recorder.add(track, start, recorder.clock(), name, chunk, num_bytes))

    def end_step(self) -> None:
        """A step is over, called by the thread that trains: what is told from now on belongs to the next one."""
        self.moved_last_step, moved = self.moved, Moved()
        self.stalls = dict(sorted(self._stalls.items(), key=lambda item: -item[1]))
        self._trainer = get_ident()
        self._begin(moved)

    def start_over(self) -> None:
        """What was moved and waited for until now belongs to no step."""
        self._begin(Moved())

    def _begin(self, moved: Moved) -> None:
        self.moved, self._stalls = moved, {}
        self._depth = 0  # an interrupt between two bytecodes may have lost the end of a wait
