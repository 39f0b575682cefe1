"""Records a real step: which track worked when and on what, what computing waited for, what every tier held.

*Activities* are told by whoever does them, on any thread. On the training thread exactly one is under way at any
instant, the innermost: one that begins inside another interrupts it, so a module that waits for its weights to be read
is two spans of computing with a span of reading between them. Computing has no waiting in it, and all time of
activities that are not computing is a stall by its cause. Other threads (an update beside backward, a fetch ahead, a
write behind) keep tracks busy and stall nobody; there too the inner activity interrupts the outer one of its own
thread. Transfers that run on no thread of ours are added when their end is noticed (:class:`RecordedEvent`). The ledger
tells every change of what is held.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from threading import get_ident
from typing import Any

import torch

from gemini.memory.devices.device import Device, Event
from gemini.planning.timeline import TRACKS, Sample, Span, Timeline, Track
from gemini.planning.traffic import path
from gemini.tiers import Boundary, Tier

graph_task = torch._C._current_graph_task_id  # which backward this thread is in; -1: none


def trains_here(trainer: int) -> bool:
    """Whether this thread is the training thread, or that of autograd for which its ``backward()`` waits."""
    return threading.get_ident() == trainer or graph_task() != -1


NOTHING: AbstractContextManager[None] = nullcontext()
"""What stands in for an activity where nobody records."""

# As in ``memory_report()["moved"]``.
_BOUNDARIES = {track: str(boundary) for boundary, track in TRACKS.items()}

Held = Mapping[Tier, Mapping[str, int]]


@dataclass
class RecordedStep:
    """One step as it was recorded. ``stop``: the end of its ``optimizer.step()``; ``next_start``: the beginning of the
    next. What other threads still do between the two belongs to this step.
    """

    start: float
    at_start: Held
    spans: list[Span] = field(default_factory=list)
    stalls: dict[str, float] = field(default_factory=dict)
    changes: list[Sample] = field(default_factory=list)
    """Of what some holders of one tier hold."""
    moments: list[str] = field(default_factory=list)
    stop: float = 0.0
    next_start: float | None = None

    def timeline(self, *, title: str, tokens: int, flops: int, budgets: Mapping[Tier, int]) -> Timeline:
        """The step as a value; without a next step it ends with the last thing that was done for it."""
        seconds = max(self.stop - self.start, *(span.stop for span in self.spans), 0.0)
        if self.next_start is not None:
            seconds = self.next_start - self.start
        moved: Counter[str] = Counter()
        for span in self.spans:
            if span.num_bytes and span.track in _BOUNDARIES:
                moved[_BOUNDARIES[span.track]] += span.num_bytes
        held: dict[Tier, Mapping[str, int]] = {tier: dict(holders) for tier, holders in self.at_start.items()}
        samples = [Sample(0.0, 0 if self.moments else -1, dict(held))]
        for change in self.changes:
            for tier, holders in change.held.items():
                # The others hold what they held.
                merged = {**held.get(tier, {}), **holders}
                held[tier] = {holder: num_bytes for holder, num_bytes in merged.items() if num_bytes}
            samples.append(Sample(min(change.seconds, seconds), change.moment, dict(held)))
        return Timeline(
            source="measured",
            title=title,
            step_seconds=seconds,
            tokens=tokens,
            flops=flops,
            spans=tuple(sorted(self.spans, key=lambda span: (span.start, span.stop))),
            stalls=dict(sorted(self.stalls.items(), key=lambda item: -item[1])),
            moved=dict(sorted(moved.items())),
            samples=tuple(samples),
            budgets=dict(budgets),
            moments=tuple(self.moments),
        )


@dataclass(slots=True, eq=False)
class Activity:
    """A thing that is done for ``name`` between entering and leaving, on one thread; ``track`` None: it keeps no track
    busy. On the training thread computing waits for it, by ``cause``. ``around``: who else hears of its begin and end.
    """

    recorder: Recorder
    track: Track | None
    name: str
    cause: str
    chunk: int
    num_bytes: int = 0
    around: AbstractContextManager[None] = NOTHING
    moment: int = -1
    thread: _Thread | None = None

    def __enter__(self) -> None:
        # The outer listener first, and last at the end: its time has all of this in it.
        self.around.__enter__()
        try:
            self.recorder._begin(self)
        except BaseException:  # an interrupt: nobody will end what may have begun
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *exc: Any) -> None:
        try:
            self.recorder._end(self)
        finally:
            self.around.__exit__(*exc)


@dataclass(slots=True, eq=False)
class _Thread:
    """The activities under way on one thread, the innermost last, and since when."""

    since: float = 0.0
    stack: list[Activity] = field(default_factory=list)


class Recorder:
    """Collects the spans and samples of one step after another. Activities may begin and end on any thread."""

    def __init__(self, device: Device | None = None):
        self.clock = time.perf_counter
        # On the training thread it finishes what it was given before the clock is read, which then tells the truth.
        self._device = device
        # Reentrant: a finalizer that runs in the middle of anything here may give back bytes, and the ledger tells.
        self._lock = threading.RLock()
        self._trainer = threading.get_ident()
        self._training = _Thread()
        self._workers: dict[int, _Thread] = {}
        self._computing: Activity | None = None
        self._step: RecordedStep | None = None
        self._flying: list[RecordedEvent] = []  # those that nobody has seen the end of
        # The step before: until the next one begins, other threads may still do something for it.
        self._last: RecordedStep | None = None
        self._held: dict[Tier, dict[str, int]] = {}

    # ---- activities ---------------------------------------------------------------------------------------------

    def computing(self, name: str | None) -> None:
        """From here on the training thread computes what has that name (None: nothing), unless told otherwise."""
        # Outside of the lock: it waits for the device, and workers tell of their activities meanwhile.
        self._finish_device()
        with self._lock:
            self._cut(self._training)
            self._computing = None if name is None else Activity(self, Track.COMPUTE, name, "", -1)

    def span(
        self, track: Track, name: str | None = None, chunk: int | None = None, num_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """``track`` is at work; name and chunk are by default those of what is under way on this thread."""
        thread = self._training if trains_here(self._trainer) else self._workers.get(threading.get_ident())
        stack = thread.stack if thread is not None else []
        around = stack[-1] if stack else Activity(self, None, track.value, "other", -1)
        chunk = around.chunk if chunk is None else chunk
        return Activity(self, track, name or around.name, around.cause, chunk, num_bytes)

    def move(self, source: Tier, target: Tier, num_bytes: int) -> AbstractContextManager[None]:
        """A copy between two neighbouring tiers; one within a tier keeps no track busy."""
        track = TRACKS.get(Boundary(source, target))
        return NOTHING if track is None else self.span(track, num_bytes=num_bytes)

    def fly(self, begin: Callable[[], Event], activity: Activity) -> RecordedEvent:
        """Begin a transfer that runs by itself. On the training thread that is now, and not when the device comes to
        it: what was computed is finished first.
        """
        if trains_here(self._trainer):
            self._finish_device()
        start = self.clock()
        event = RecordedEvent(begin(), activity, start)
        self._flying.append(event)
        return event

    def held(self, tier: Tier, holders: Mapping[str, int]) -> None:
        """Note what some holders hold from now on: a ledger's ``on_change``, under its lock and on any thread."""
        with self._lock:
            self._held.setdefault(tier, {}).update(holders)
            # What a worker gives back between two steps belongs to the step that it worked for.
            step = self._step if trains_here(self._trainer) else self._collecting
            if step is not None:
                step.changes.append(Sample(self.clock() - step.start, self._moment(), {tier: holders}))

    # ---- steps --------------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        return self._step is not None

    def begin_step(self, held: Held) -> None:
        """A step begins now, on the training thread; ``held`` is held, as far as :meth:`held` was not told since."""
        self._finish_device()
        with self._lock:
            self._trainer = threading.get_ident()
            self._cut(self._training)
            # The time of the cut just made: both steps and all threads meet in this one instant.
            now = self._training.since
            for thread in self._workers.values():
                self._cut(thread, now)
                for activity in thread.stack:
                    activity.moment = -1  # a moment of the step before
            if self._last is not None and self._last.next_start is None:
                self._last.next_start = now
            # What `held` was told is newer than what the caller has read.
            known = {tier: {**held.get(tier, {}), **self._held.get(tier, {})} for tier in {**held, **self._held}}
            at_start = {tier: {holder: n for holder, n in holders.items() if n} for tier, holders in known.items()}
            self._step = RecordedStep(now, at_start)

    def end_step(self) -> RecordedStep:
        """``optimizer.step()`` is over: the step, to which other threads add until the next one begins."""
        self._finish_device()
        with self._lock:
            self._cut(self._training)
            step, self._step, self._computing = self._step, None, None
            assert step is not None
            step.stop = self._training.since
            self._last = step
            return step

    def close(self) -> None:
        """Record nothing more until another step begins; what is under way may still end."""
        with self._lock:
            self._step = self._computing = self._last = None

    # ---- inside -------------------------------------------------------------------------------------------------

    def _finish_device(self) -> None:
        if self._device is not None:
            self._device.synchronize()
        # Its copies are over with that. Taken note of here: whoever waits for them may come much later, or never.
        for event in [event for event in self._flying if event.is_complete()]:
            self._flying.remove(event)  # of the same list: a worker may add to it meanwhile

    @property
    def _collecting(self) -> RecordedStep | None:
        """The step that other threads work for: the one under way, else the one before it."""
        if self._step is None and self._last is not None and self._last.next_start is None:
            return self._last
        return self._step

    def _begin(self, activity: Activity) -> None:
        trains = trains_here(self._trainer)
        if trains:
            # What was computed until here is over, so that its time is not counted as this activity's. Before the lock
            # is taken, as in `computing`.
            self._finish_device()
        with self._lock:
            thread = self._training if trains else self._workers.setdefault(threading.get_ident(), _Thread())
            self._cut(thread)
            if not trains:
                # Now: by the time it is written the training thread may be further on.
                activity.moment = self._moment()
            activity.thread = thread
            thread.stack.append(activity)

    def _end(self, activity: Activity) -> None:
        thread = activity.thread
        if thread is None:
            return  # an interrupt came before it began
        if thread is self._training:
            self._finish_device()
        with self._lock:
            self._cut(thread)
            del thread.stack[thread.stack.index(activity) :]  # with what an interrupt has kept from ending
            if not thread.stack and thread is not self._training:
                # Numbers of threads are given again: what is left here would be taken for another one's.
                del self._workers[threading.get_ident()]

    def _cut(self, thread: _Thread, now: float | None = None) -> None:
        """Write down what was under way on a thread since its last cut."""
        now, step, trains = self.clock() if now is None else now, self._step, thread is self._training
        current = thread.stack[-1] if thread.stack else self._computing if trains else None
        if current is not None and now > thread.since and (step is not None or not trains):
            if current.track is not None:
                if trains:
                    current.moment = self._moment()
                self.add(current, thread.since, now)
            if trains and step is not None and current.track is not Track.COMPUTE:
                step.stalls[current.cause] = step.stalls.get(current.cause, 0.0) + now - thread.since
        thread.since = now

    def add(self, activity: Activity, start: float, stop: float) -> None:
        """Its track worked from ``start`` to ``stop`` by :attr:`clock`; what crosses the beginning of a step is cut."""
        with self._lock:
            step, last = self._collecting, self._last
            if step is None:
                return
            assert activity.track is not None
            pieces = [(step, start, stop)]
            if last is not None and last.next_start == step.start:
                pieces.insert(0, (last, start, min(stop, step.start)))
            for of, begin, end in pieces:
                begin = max(begin, of.start)  # what was under way before a step is none of it
                if begin < end:
                    label = activity.name, activity.moment, activity.chunk, activity.num_bytes
                    of.spans.append(Span(activity.track, begin - of.start, end - of.start, *label))
                    activity.num_bytes = 0  # what is interrupted has moved its bytes once

    def _moment(self) -> int:
        """The number of the stretch of computing that is under way, or interrupted; -1 outside of them."""
        if self._step is None or self._computing is None:
            return -1
        if self._computing.moment < 0:
            self._computing.moment = len(self._step.moments)
            self._step.moments.append(self._computing.name)
        return self._computing.moment


class RecordedEvent(Event):
    """``event``, the end of what began at ``start``: recorded as ``activity`` when somebody first sees it complete."""

    def __init__(self, event: Event, activity: Activity, start: float):
        super().__init__()
        self._event, self._start = event, start
        self._unseen: Activity | None = activity

    def is_complete(self) -> bool:
        if not self._event.is_complete():
            return False
        # Taken out first: two who see the end at once report it once.
        seen, self._unseen = self._unseen, None
        if seen is not None:
            seen.recorder.add(seen, self._start, seen.recorder.clock())
        return True

    def wait(self) -> None:
        try:
            self._event.wait()
        finally:
            self.is_complete()

    def wait_on_device(self) -> None:
        self._event.wait_on_device()
        self.is_complete()  # a device that computes on the calling thread has waited


# ---- stalls, and who listens -----------------------------------------------------------------------------------------


@cache
def _boundaries(source: Tier, target: Tier) -> tuple[str, ...]:
    return tuple(str(boundary) for boundary in path(source, target))


class Moved:
    """Bytes over each boundary in one step; any thread may add."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, source: Tier, target: Tier, num_bytes: int) -> None:
        """Bytes between the GPU and NVMe cross host memory, and count on both boundaries."""
        # Adding is a read and a write: two workers would lose bytes.
        with self._lock:
            for boundary in _boundaries(source, target):
                self._bytes[boundary] += num_bytes

    def counts(self) -> Counter[str]:
        with self._lock:
            return self._bytes.copy()


class _Waiting:
    """An activity of which nothing but its cause and its time is kept: one for each cause."""

    __slots__ = ("_cause", "_watch")

    def __init__(self, watch: Watch, cause: str):
        self._watch, self._cause = watch, cause

    # No calls of ours in here: it is around every landing of a gradient, however small.
    def __enter__(self) -> None:
        watch = self._watch
        # As in `trains_here`. Other threads wait for nobody's step and leave these fields alone, which have no lock.
        if get_ident() == watch._trainer or graph_task() != -1:
            # Only the outermost activity has a time: what is inside of it would count twice.
            if not watch._depth:
                watch._since = watch.clock()
            watch._depth += 1

    def __exit__(self, *exc: object) -> None:
        watch = self._watch
        # Depth is 0 where an interrupt, or the end of the step, came between: nothing is counted then.
        if watch._depth and (get_ident() == watch._trainer or graph_task() != -1):
            watch._depth -= 1
            if not watch._depth:
                found, cause = watch._stalls, self._cause
                found[cause] = found.get(cause, 0.0) + watch.clock() - watch._since


class Watch:
    """Hears of the work on one model's bytes, and keeps how long the training thread (the one that made it, then
    whichever ends steps) waited in a step, and for what. Activities nest: the outermost one counts, once.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        """Whom every activity is sent to as well."""
        self.moved = Moved()
        """Of the step under way; an optimizer step puts a new one in its place."""
        self.moved_last_step = Moved()
        self.stalls: dict[str, float] = {}
        """Seconds that the training thread waited in the step that ended last, by cause, the longest first."""
        self.clock = time.perf_counter
        self._trainer = get_ident()
        self._depth = 0
        self._since = 0.0
        self._stalls: dict[str, float] = {}
        self._known: dict[str, _Waiting] = {}

    def about(
        self, cause: str, name: str, chunk: int = -1, *, track: Track | None = None
    ) -> AbstractContextManager[None]:
        """Time this block: a stall of the training thread by ``cause``, and a span on ``track`` for who records."""
        waiting = self._known.get(cause)
        if waiting is None:
            waiting = self._known[cause] = _Waiting(self, cause)
        recorder = self.recorder
        return waiting if recorder is None else Activity(recorder, track, name, cause, chunk, around=waiting)

    def end_step(self) -> None:
        """A step is over, called by the thread that trains: what is told from now on belongs to the next one."""
        self.moved_last_step = self.moved
        self.stalls = dict(sorted(self._stalls.items(), key=lambda item: -item[1]))
        # A program may train on another thread than the one that wrapped the model.
        self._trainer = get_ident()
        self.start_over()

    def start_over(self) -> None:
        """Forget what was moved and waited for until now: it belongs to no step."""
        # A new object and not zeros: workers that began in the step before go on counting for it.
        self.moved, self._stalls = Moved(), {}
        self._depth = 0  # an interrupt between two bytecodes may have lost the end of a wait
