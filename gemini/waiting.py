"""Waiting for another thread, such that an interrupt leaves nothing behind and no wait is for ever.

``threading.Event`` and ``Condition`` are written in Python around a lock. A KeyboardInterrupt that comes in them when
the lock is taken and the ``with`` block has not begun leaves it taken for good, and the thread that was about to tell
that it is done stands there, and all who wait for it. So whoever shares something with the training thread uses

- a :class:`Latch` to wait for an end: there is no lock that two threads take;
- ``queue.SimpleQueue``, which is written in C, to wait for work;
- a ``threading.Lock`` or ``RLock`` taken by ``with``: both are written in C, and Python looks for signals after a call
  and where a function begins, not between ``with`` and its block. What may not be cut in two inside, is in
  :data:`gemini.interrupts.WHOLE` besides. A thread is started in there too: ``Thread.start`` waits for an Event.

How long anything takes nobody can know; whether it goes on, somebody can. Who moves bytes or ends a job says so
(:data:`PROGRESS`), and a wait gives up only when nobody has for a long time (:func:`patience`).
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gemini.errors import GeminiError, warn

LOOK_SECONDS = 1.0
"""How often whoever waits looks whether there is progress, and whether the thread that he waits for still lives."""

TELL_LOOKS, GIVE_UP_LOOKS = 60, 300
"""After how many looks in a row without any progress a wait says so, and ends in an error. (Looks and not a clock: a
process that was stopped, or a machine that was suspended, has not looked.)
"""

GIVE_UP_DEVICE_LOOKS = 3600
"""The same for a GPU that reports no error: what it computes may be one kernel that takes minutes (a causal attention
over 800,000 tokens: 132 s on an RTX 4090, by arithmetic)."""

_of_thread = threading.local()


def begin_work() -> None:
    """Make the calling thread a worker's, for good: it does nothing else."""
    _of_thread.works = True


def on_worker() -> bool:
    """Say whether the calling thread is a worker's, which asks nobody for memory: whoever is asked may wait for it."""
    return getattr(_of_thread, "works", False)


def is_running(thread: threading.Thread) -> bool:
    """Say whether a thread has begun and not ended. Not by ``Thread.is_alive``: a KeyboardInterrupt inside of it marks
    a thread as ended for good that goes on (its clean-up takes any lock that is held for one that it has taken).
    """
    return thread is threading.current_thread() or thread in threading.enumerate()


class Latch:
    """Something that happens once: a ``threading.Event`` without ``clear`` and its lock. Any thread may set or wait."""

    __slots__ = ("_waiters", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        """Whether it has happened: a field, for it is looked at for every tile that moves."""
        self._waiters: deque[threading.Lock] = deque()  # of each its own, locked, which ``set`` unlocks

    def set(self) -> None:
        # Before anybody is woken: a waiter that registers from here on finds it set, and does not sleep.
        self.is_set = True
        while self._waiters:
            try:
                # `popleft` is one C call, so each waiter is woken by one thread: releasing a lock twice is an error.
                self._waiters.popleft().release()
            except IndexError:  # another thread that sets it, or who waited no longer
                return

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is set, or for ``timeout`` seconds: whether it is set."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.is_set:
            # In slices: an interrupt in ``set`` may leave a waiter that nobody wakes.
            left = LOOK_SECONDS if until is None else min(LOOK_SECONDS, until - time.monotonic())
            if left <= 0:
                break
            # A lock of its own for each wait. Nobody else takes it, so an interrupt anywhere here leaves nothing held
            # that others need.
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            # Looked at again behind the `append`: without this look a `set` that came between the two would wake
            # nobody, and the wait would last a whole slice.
            if not self.is_set:
                waiter.acquire(timeout=left)
            try:
                self._waiters.remove(waiter)
            except ValueError:  # woken
                pass
        return self.is_set


class Progress:
    """Whether anything goes on in this process. The one is :data:`PROGRESS`."""

    def __init__(self) -> None:
        self.count = 0  # of moves and ends; threads that note one at once may lose a count, never the last one
        self._elsewhere: set[int] = set()  # threads

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Around a wait for other processes or a GPU, which has its own limit: what waits for it does not give up."""
        own = threading.get_ident()
        try:
            # Inside `try`: an interrupt right behind it must not leave this thread in the set, or no wait of the
            # process would ever give up.
            self._elsewhere.add(own)
            yield
        finally:
            self._elsewhere.discard(own)

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread than this one is in such a wait."""
        return bool(self._elsewhere - {threading.get_ident()})


PROGRESS = Progress()


def patience(what: Callable[[], str], *, is_elsewhere: bool = False) -> Iterator[None]:
    """Go on for however long a wait for ``what`` takes while anything goes on in this process, else a GeminiError that
    says what every thread of ours is doing. Whoever waits calls ``next`` after each ``LOOK_SECONDS``. ``is_elsewhere``:
    it has a longer limit of its own; others go on meanwhile, while the caller is in :meth:`Progress.elsewhere`.
    """
    limit = GIVE_UP_DEVICE_LOOKS if is_elsewhere else GIVE_UP_LOOKS
    seen, idle = PROGRESS.count, 0
    while True:
        # Any change starts the count anew, also of other models: a slow drive is no fault while it moves something.
        has_moved = PROGRESS.count != seen or (PROGRESS.is_elsewhere and not is_elsewhere)
        seen, idle = PROGRESS.count, 0 if has_moved else idle + 1
        seconds = idle * LOOK_SECONDS
        if idle >= limit:
            raise GeminiError(
                f"nothing has moved for {seconds:.0f} s while waiting for {what()}. A drive or a device that does not "
                f"answer, or a fault of Gemini: {_threads()}. Start again from the last checkpoint"
            )
        if idle == TELL_LOOKS:
            warn(f"nothing has moved for {seconds:.0f} s while waiting for {what()}: {_threads()}")
        yield


def await_latch(latch: Latch, what: Callable[[], str], look: Callable[[], None] = lambda: None) -> None:
    """Block until it is set. ``what``: what is waited for, in words; ``look``: called each ``LOOK_SECONDS``, may raise.
    GeminiError when nothing has gone on for too long (:func:`patience`).
    """
    looks = patience(what)
    while not latch.wait(LOOK_SECONDS):
        look()
        next(looks)


def _threads() -> str:
    """A description of what each thread of ours is doing, for an error that somebody reads."""
    # Frames of running threads: by the time they are read they have gone on. Good enough for a text.
    frames, found = sys._current_frames(), []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread.name.startswith("gemini-"):
            stack = [inner for inner, _ in traceback.walk_stack(frame)]
            ours = next((f for f in stack if f.f_globals.get("__name__", "").startswith("gemini.")), frame)
            where = f"{ours.f_globals.get('__name__')}.{ours.f_code.co_name}, line {ours.f_lineno}"
            found.append(f"{thread.name} is in {where}")
    return "; ".join(found) or "no worker thread is alive"
