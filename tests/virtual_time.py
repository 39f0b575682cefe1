"""A clock for machines without a GPU: what a step would take on one, in seconds that nobody waits for.

Copies take a latency and their bytes over the rate of their engine, kernels a given time, calls of the host a given
time. Every thread has a time of its own, which a wait moves on to the end of what it waits for; all threads that are no
worker's are one, the *launcher*. Threads meet in the order of their times and not in that in which the system runs them
(:meth:`VirtualClock.arrive`), so the same step takes the same time on any machine, however slow or loaded.

    clock = VirtualClock(Rates(h2d=25e9, d2h=25e9))
    with clock.running():
        model = GeminiDDP(..., device=TimedStandin(clock))
        ...
        clock.kernel(0.004)           # by whoever computes: the device computes for so long
    clock.rate("d2h"), clock.starved, clock.blocked(since, until)

The stand-in computes on the thread that calls: its kernels' results are there at once, and in time later.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from gemini import kernels
from gemini.interrupts import call_without_grad
from gemini.memory.devices import device
from gemini.memory.devices.device import DONE, Event
from gemini.memory.devices.pages import FramePool, PageWindow, Window
from gemini.memory.movement.transfers import Job, JobThread
from gemini.waiting import Latch
from tests.standin_device import StandinDevice

PATIENCE = 20.0
"""Real seconds that a thread waits for another one which is behind it in time and does nothing: then something holds it
that this clock does not see, and the times are worth nothing (:attr:`VirtualClock.num_lost`)."""


TURN = 0.004
"""Seconds after which a kernel of the host looks again how many others it shares the host's memory with."""


class Rates(NamedTuple):
    """Speeds, in bytes/s, and seconds.

    Attributes:
        h2d, d2h: of the two copy engines of the link.
        latency: that each copy takes besides.
        call: of the host for each copy and each kernel that it gives to the device.
        host: bytes/s that the host's kernels touch together: those of workers, the launcher's are part of its calls.
    """

    h2d: float
    d2h: float
    latency: float = 10e-6
    call: float = 10e-6
    host: float = float("inf")


class Span(NamedTuple):
    """An engine at work: when, on how many bytes, and when all that this had to wait for was over."""

    start: float
    stop: float
    num_bytes: float = 0
    ready: float = 0.0


class Engine:
    """One thing that does one piece of work after another: the first that is ready and fits in."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """In the order of time."""

    def place(self, ready: float, seconds: float, num_bytes: int = 0) -> Span:
        """Do some work as soon as it is ready, in the first gap that is long enough."""
        start = ready
        for span in self.spans:
            if span.stop > start:
                if start + seconds <= span.start:
                    break
                start = span.stop
        made = Span(start, start + seconds, num_bytes, ready)
        insort(self.spans, made)
        return made


class TimedThread:
    """A thread in time. Changed under the lock of its clock."""

    def __init__(self, name: str, number: int, now: float):
        self.name, self.number, self.now = name, number, now
        self.asleep: object = None
        """What it waits for: it stands still until another thread wakes it up, whose time it then has."""
        self.blocked: list[tuple[float, float, str]] = []
        """When it waited, and for what."""


class VirtualClock:
    """Times of one device and of the threads that use it. Any thread may call it while it is running."""

    thread_kind = TimedThread

    def __init__(self, rates: Rates):
        self.rates = rates
        self.engines = {name: Engine() for name in ("h2d", "d2h", "compute", "sum")}
        self.starved = 0.0
        """Seconds in which the device was done with all that it had been given to compute."""
        self.num_lost = 0
        """How often a thread was not waited for any more: 0, or the times are worth nothing."""
        self._change = threading.Condition(threading.RLock())
        self._of_thread = threading.local()
        self._launcher = self.thread_kind("launcher", 0, 0.0)
        self._threads: dict[JobThread | None, TimedThread] = {None: self._launcher}
        self._number, self._is_over = 0, False
        self._ended: list[TimedThread] = []
        self._streams: dict[str, float] = {}
        self._left: deque[tuple[int, float]] = deque()  # bytes of windows that went, and when they are free
        self._in_use = self._most_in_use = 0
        self._on_host: dict[TimedThread, float] = {}  # until when each thread's kernel of the host is at work
        self._computed = 0.0  # when all kernels that were given are over, and what they were told to wait for is

    # ---- threads ------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The time of the calling thread."""
        return self._me().now

    def spend(self, seconds: float) -> None:
        """Let the calling thread work for so long."""
        me = self._me()
        with self._change:
            me.now += seconds
            self._change.notify_all()
        self.arrive()

    def until(self, at: float, what: str) -> None:
        """Block the calling thread until a time, if that is still to come."""
        me = self._me()
        with self._change:
            if at > me.now:
                me.blocked.append((me.now, at, what))
                me.now = at
                self._change.notify_all()
        self.arrive()

    def arrive(self) -> None:
        """Let every thread whose time is earlier go on first, until it has come as far as this one or sleeps. Before
        anything is looked at that others may have changed by now.
        """
        me = self._me()
        if getattr(self._of_thread, "goes_on", False):
            return
        with self._change:
            # This thread may have come further since it was here last, in a runtime that keeps its time.
            self._change.notify_all()
            while not self._is_over and any(
                (t.now, t.number) < (me.now, me.number) and t.asleep is None for t in self._threads.values()
            ):
                if not self._change.wait(PATIENCE):
                    self.num_lost += 1
                    return

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Inside, the calling thread lets nobody go first: it holds what others may need."""
        before = getattr(self._of_thread, "goes_on", False)
        self._of_thread.goes_on = True
        try:
            yield
        finally:
            self._of_thread.goes_on = before

    def sleeps(self, what: object) -> None:
        """Note that the calling thread waits for another one. Under the lock, with the last look whether it has to."""
        self._me().asleep = what
        self._change.notify_all()

    def wake(self, what: object, at: float) -> None:
        """Wake up, in time, who waits for this: it is there since ``at``."""
        with self._change:
            for thread in self._threads.values():
                if thread.asleep is what:
                    thread.asleep = None
                    self._move(thread, at, type(what).__name__)
            self._change.notify_all()

    def _move(self, thread: TimedThread, at: float, what: str) -> None:
        if at > thread.now:
            thread.blocked.append((thread.now, at, what))
            thread.now = at

    def begin_thread(self, thread: TimedThread) -> None:
        """From now on the calling thread is this one."""
        self._of_thread.thread = thread

    def _me(self) -> TimedThread:
        return getattr(self._of_thread, "thread", self._launcher)

    # ---- the device ---------------------------------------------------------------------------------------------

    def kernel(self, seconds: float) -> None:
        """Give the device something to compute, behind what it was given before."""
        self.spend(self.rates.call)
        with self._change:
            self._note_starved()
            self._computed = self.engines["compute"].place(max(self.now, self._computed), seconds).stop

    def copy(self, way: str, stream: str, num_bytes: int, behind: Sequence[Event | None], free_at: float) -> Event:
        """Give an engine a copy, behind these events and what its stream was given, and not before a time. Its end."""
        self.spend(self.rates.call)
        with self._change:
            ready = max(self.now, self._streams.get(stream, 0.0), free_at)
            ready = max([ready, *(event.at for event in behind if isinstance(event, TimedEvent))])
            seconds = self.rates.latency + num_bytes / getattr(self.rates, way)
            self._streams[stream] = self.engines[way].place(ready, seconds, num_bytes).stop
            return TimedEvent(self, self._streams[stream])

    def add_on_host(self, stream: str, num_bytes: int, behind: Event) -> Event:
        """Let the device call the host behind an event and what a stream was given, for a kernel that touches so many
        bytes. Known before it comes to that: what threads do then takes longer, and not this.
        """
        with self._change:
            ready = max(behind.at if isinstance(behind, TimedEvent) else 0.0, self._streams.get(stream, 0.0))
            self._streams[stream] = self.engines["sum"].place(ready, num_bytes / self.rates.host).stop
            return TimedEvent(self, self._streams[stream])

    def beside_sums(self, seconds: float) -> float:
        """How long a thread's kernel takes that has the host's memory for itself in so many seconds: it stands while
        the device has the host add something.
        """
        spans, end = self.spans("sum"), self.now + seconds
        at = bisect_left(spans, self.now, key=lambda span: span.stop)
        while at < len(spans) and spans[at].start < end:
            end += spans[at].stop - max(spans[at].start, self.now)
            at += 1
        return end - self.now

    def mark(self) -> Event:
        """The end of all that was given to compute."""
        return TimedEvent(self, self._computed)

    def compute_after(self, at: float) -> None:
        """Let what is given to compute from now on begin no earlier."""
        with self._change:
            if at > self.now:  # what is past already keeps nobody waiting: nothing is queued by it
                self._note_starved()
                self._computed = max(self._computed, at)

    def _note_starved(self) -> None:
        """Something is given to the computing stream now: until then it may have had nothing."""
        if self.engines["compute"].spans:
            self.starved += max(0.0, self.now - self._computed)

    def take_memory(self, num_bytes: int) -> float:
        """Take memory that nobody had before, else what was left first: when it is free."""
        with self._change:
            self._in_use += num_bytes
            free_at, missing = 0.0, num_bytes if self._in_use <= self._most_in_use else 0
            while missing > 0 and self._left:
                there, at = self._left.popleft()
                free_at, missing = max(free_at, at), missing - there
            self._most_in_use = max(self._most_in_use, self._in_use)
            if missing < 0:
                self._left.appendleft((-missing, free_at))
            return free_at

    def leave_memory(self, num_bytes: int) -> None:
        """Leave memory to others, behind all that was given to compute."""
        with self._change:
            self._in_use -= num_bytes
            self._left.append((num_bytes, self._computed))

    # ---- what came of it ----------------------------------------------------------------------------------------

    def spans(self, engine: str) -> list[Span]:
        """What an engine has done, in the order of time."""
        return self.engines[engine].spans

    def rate(self, way: str, since: float = 0.0, least: int = 0) -> float:
        """Bytes/s of an engine in the seconds in which there was something that it could have copied.

        Args:
            since: only copies that were ready later.
            least: and have so many bytes.
        """
        spans = [span for span in self.spans(way) if span.ready >= since and span.num_bytes >= least]
        waiting, over = 0.0, since
        for span in spans:
            waiting += span.stop - max(over, span.ready)
            over = span.stop
        return sum(span.num_bytes for span in spans) / waiting if waiting else 0.0

    def blocked(self, since: float, until: float, name: str = "launcher") -> list[tuple[float, float, str]]:
        """When a thread was blocked between two times, and by what."""
        threads = [*self._threads.values(), *self._ended]
        found = [span for thread in threads if thread.name == name for span in thread.blocked]
        cut = [(max(start, since), min(stop, until), what) for start, stop, what in found]
        return [(start, stop, what) for start, stop, what in cut if stop > start]

    @contextmanager
    def running(self) -> Iterator[VirtualClock]:
        """Let threads, waits between them and the host's kernels have times inside, of models that are made here."""
        clock = self
        self._is_over = False

        class TimedLatch(Latch):
            __slots__ = ("at", "happened")

            def set(self) -> None:
                with clock._change:
                    if not self.happened:
                        self.at = clock.now
                    super().set()
                clock.wake(self, self.at)

            @property
            def is_set(self) -> bool:
                if clock._me().asleep is self:  # inside of `wait`, which sleeps in real time
                    return self.happened
                clock.arrive()
                return self.happened and self.at <= clock.now

            @is_set.setter
            def is_set(self, value: bool) -> None:
                self.happened = value

            def wait(self, timeout: float | None = None) -> bool:
                with clock._change:
                    if not self.happened:
                        clock.sleeps(self)
                there = self.happened or super().wait(timeout)
                with clock._change:
                    clock._me().asleep = None
                    if there:
                        clock._move(clock._me(), self.at, "a latch")
                clock.arrive()
                return there

        put, take, sleep, run = JobThread.put, JobThread._take, JobThread._sleep, JobThread._run

        def timed_put(thread: JobThread, *jobs: Job) -> None:
            with clock._change:
                for job in jobs:
                    job.given = clock.now  # type: ignore[attr-defined]
                if thread not in clock._threads:
                    clock._number += 1
                    clock._threads[thread] = clock.thread_kind(thread.name, clock._number, clock.now)
                put(thread, *jobs)
            clock.wake(thread, clock.now)

        def timed_take(thread: JobThread) -> Job | None:
            # Before: which job is the next one, those decide too who are earlier.
            clock.arrive()
            job = take(thread)
            if job is not None:
                clock.until(getattr(job, "given", 0.0), "a job")
            return job

        def timed_sleep(thread: JobThread) -> bool:
            with clock._change:
                if not thread._waiting and not thread._is_closed:
                    clock.sleeps(thread)
            goes_on = sleep(thread)
            with clock._change:
                clock._me().asleep = None
            if goes_on:  # else the thread ends, and somebody may be waiting for that
                clock.arrive()
            return goes_on

        def timed_run(thread: JobThread) -> None:
            clock.begin_thread(clock._threads.get(thread, clock._launcher))
            try:
                run(thread)
            finally:
                with clock._change:
                    if (ended := clock._threads.pop(thread, None)) is not None:
                        clock._ended.append(ended)
                    clock._change.notify_all()

        def timed(kernel: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = kernel(*args, **kwargs)
                if clock._me() is not clock._launcher and clock.rates.host < float("inf"):
                    added_to = _bytes_of(args[0]) if kernel.__name__ == "accumulate_grad" else 0
                    seconds = (sum(map(_bytes_of, args)) + added_to) / clock.rates.host
                    turns = 1 + int(seconds / TURN)
                    for _ in range(turns):
                        with clock._change:
                            me, now = clock._me(), clock.now
                            sharing = 1 + sum(at > now for who, at in clock._on_host.items() if who is not me)
                            takes = clock.beside_sums(seconds / turns * sharing)
                            clock._on_host[me] = now + takes
                        clock.spend(takes)
                return result

            return call

        patched: list[tuple[Any, str, Any]] = [
            (device, "Latch", TimedLatch),
            (JobThread, "put", timed_put), (JobThread, "_take", timed_take),
            (JobThread, "_sleep", timed_sleep), (JobThread, "_run", timed_run),
            *((kernels, name, timed(getattr(kernels, name))) for name in _OF_HOST),
        ]  # fmt: skip
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
        for owner, name, value in patched:
            setattr(owner, name, value)
        try:
            yield self
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
            with self._change:  # a model that goes later joins its threads, which is no wait that has a time
                self._is_over = True
                self._change.notify_all()


_OF_HOST = ("update", "copy_grad", "accumulate_grad", "sum_grad24", "sum_squares")


def _bytes_of(value: Any) -> int:
    """The bytes of the CPU tensors in an argument of a kernel; an update reads and writes all but the gradient."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.is_cpu else 0
    if isinstance(value, kernels.Arrays):
        planes = {**value.states, "weights": value.weights, "residual": value.residual, "grad": value.grad}
        return 2 * sum(map(_bytes_of, planes.values())) - _bytes_of(value.grad)
    return 0


class TimedEvent(Event):
    """The end of something of which one knows when it comes."""

    def __init__(self, clock: VirtualClock, at: float):
        super().__init__()
        self._clock, self.at = clock, at

    def is_complete(self) -> bool:
        self._clock.arrive()
        return self.at <= self._clock.now

    def wait(self) -> None:
        self._clock.until(self.at, self.what)

    def wait_on_device(self) -> None:
        self._clock.compute_after(self.at)


def _kept(source: torch.Tensor, into: torch.Tensor, lost: torch.Tensor | None, is_added: bool) -> Any:
    if lost is not None:
        return kernels.sum_grad24(into, lost, source, adding=is_added)
    return kernels.accumulate_grad(into, source) if is_added else kernels.copy_grad(into, source)


# ---- the stand-in ----------------------------------------------------------------------------------------------------

_INBOUND = ("fetch", "store", "restore", "update in")
"""The copy streams that fill memory of the device: this one has no memory of another kind by which to tell."""


class TimedWindow(PageWindow):
    """Host pages that the device may fill when what was computed with them before is over."""

    def __init__(self, num_bytes: int, frames: FramePool, clock: VirtualClock):
        super().__init__(num_bytes, frames)
        self._clock, self._has_memory = clock, False
        self.free_at = 0.0
        """When its memory is free for the first copy into it."""

    def populate(self) -> None:
        super().populate()
        self.free_at, self._has_memory = self._clock.take_memory(self.num_bytes), True

    def depopulate(self) -> bool:
        self._leave()
        return super().depopulate()

    def discard(self) -> None:
        self._leave()
        super().discard()

    def _leave(self) -> None:
        if self._has_memory:
            self._clock.leave_memory(self.num_bytes)
        self._has_memory = False

    def has(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self.bytes.data_ptr() < self.num_bytes


class TimedStandin(StandinDevice):
    """The stand-in, whose copies are made at once, and over when a clock says so."""

    def __init__(self, clock: VirtualClock):
        super().__init__()
        self.clock, self._timed = clock, weakref.WeakSet[TimedWindow]()

    def copy(
        self,
        into: torch.Tensor,
        source: torch.Tensor,
        stream: str,
        after: Event | None = None,
        *,
        behind_computing: bool = True,
        kept: bool = False,
    ) -> Event:
        with torch.inference_mode(into.is_inference()):
            call_without_grad(into.copy_, source)
        free_at = max((window.free_at for window in self._timed if window.has(into)), default=0.0)
        behind = [after, *([self.clock.mark()] if behind_computing else [])]
        return self.clock.copy("h2d" if stream in _INBOUND else "d2h", stream, source.nbytes, behind, free_at)

    def mark(self) -> Event:
        return self.clock.mark()

    def host_sums(self, areas: Sequence[torch.Tensor]) -> Callable[..., tuple[Event, Event, Any]] | None:
        """Adds at once, and is over when copies through so many areas and the host behind them would be."""
        free: deque[Event] = deque([DONE] * len(areas), len(areas))

        def land(
            source: torch.Tensor, into: torch.Tensor, lost: torch.Tensor | None, piece: int, is_added: bool
        ) -> tuple[Event, Event, Any]:
            sums = _kept(source, into, lost, is_added)
            of_plane = into.element_size() + (0 if lost is None else lost.element_size())
            left = landed = self.clock.mark()
            for start in range(0, source.numel(), piece):
                part = source[start : start + piece]
                left = self.clock.copy("d2h", "evict", part.nbytes, [self.clock.mark(), free[0]], 0.0)
                touched = part.nbytes + part.numel() * of_plane * (1 + is_added)
                landed = self.clock.add_on_host("sum", touched, left)
                free.append(landed)
            return left, landed, SimpleNamespace(sums=lambda: sums)

        return land

    def make_window(self, num_bytes: int) -> Window:
        if self.frames is None:
            return super().make_window(num_bytes)
        window = TimedWindow(num_bytes, self.frames, self.clock)
        self._timed.add(window)
        return window
