"""Worker threads: a *worker* runs the jobs it is given, the most urgent first, beside the thread that trains.

A :class:`Job` is an event of the device's kind: whoever needs its end waits for it, and what it raised is raised there.
A worker's thread starts with its first job and ends with ``close()``; at the end of the interpreter all workers are
closed before it is torn down, since no thread may be inside native code then. Workers know no model: what they run must
not keep one alive longer than the job.
"""

from __future__ import annotations

import heapq
import os
import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial

from gemini import kernels
from gemini.errors import GeminiError
from gemini.interrupts import WHOLE
from gemini.memory.devices.device import Event
from gemini.patches import register
from gemini.waiting import await_latch, begin_work, is_running

_END_SECONDS = 60.0
"""How long closing waits for a job that is under way."""

_live: weakref.WeakSet[JobThread] = weakref.WeakSet()


class Job(Event):
    """A piece of work for a worker. ``wait`` returns when it is done, and raises what it raised. Made and waited for by
    any thread; run by one.
    """

    what = "a job"

    def __init__(self, urgency: float):
        super().__init__()
        self.run: Callable[[], None] = _nothing
        """What it does. Set before it is queued."""
        self.urgency = urgency
        # Of the thread that computes. Flushing denormals is a setting of each thread, and results must not depend on
        # who works.
        self.flush_mode = kernels.flush_mode()
        # Set when it is queued: whoever waits looks whether that thread is alive.
        self.worker: JobThread | None = None

    @property
    def error(self) -> BaseException | None:
        return self._error

    def finish(self, error: BaseException | None = None) -> None:
        # Who keeps the job, to ask how it ended, keeps none of the tensors that it worked on.
        self.run = _nothing
        super().finish(error)

    def wait(self) -> None:
        """Block until the job is over: as long as it takes while anything goes on.

        Raises:
            GeminiError: if its thread is gone, or nothing goes on; else whatever the job raised.
        """
        self.wait_until_over()
        if self._error is not None:
            # The error itself and not one around it: callers tell a full disk from a fault.
            raise self._error

    def wait_until_over(self) -> None:
        """:meth:`wait` without what the job raised, which then keeps none of the caller's frames."""
        if not self._done.is_set:
            name = "a thread that never got it" if self.worker is None else self.worker.name
            await_latch(self._done, lambda: f"{self.what} of {name}", self._look)

    def _look(self) -> None:
        # The last look at `_done`: the thread may have finished the job and ended between two looks.
        if self.worker is not None and not self.worker.is_alive and not self._done.is_set:
            raise GeminiError(f"the thread {self.worker.name} ended before it finished its job")


def _nothing() -> None:
    """Do nothing: the job is over, or others do all of it."""


class JobThread:
    """A thread with a queue of jobs by urgency; what it does with them is the subclass's ``_work``. Any thread may
    queue, hurry and cancel.

    A job is waiting, or a thread has it, or it is over: the training thread changes that inside ``WHOLE``.
    """

    is_daemon = True
    """Whether the program may end while jobs wait. The one under way is given a minute then."""

    def __init__(self, name: str):
        self.name = f"gemini-{name}"
        self._lock = threading.RLock()  # the garbage collector may close the worker of a model inside another call
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Rung when there is something to look at."""
        self._waiting: list[tuple[float, int, Job]] = []
        self._number = 0  # of jobs: among equally urgent ones the first is taken first
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()  # a forked child has these books and not the thread

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and is_running(self._thread)

    @property
    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def put(self, *jobs: Job) -> None:
        """Queue jobs, all or none. Called by any thread."""
        with WHOLE, self._lock:
            if self._is_closed or os.getpid() != self._pid:
                raise GeminiError(f"{self.name} is closed: its model was deleted, or belongs to the parent process")
            if self._thread is None:
                # Before the thread begins: the end of the interpreter must find every one that runs.
                _live.add(self)
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=self.is_daemon)
                self._thread.start()
            for job in jobs:
                heapq.heappush(self._waiting, (job.urgency, self._number, job))
                job.worker = self
                self._number += 1
            # Once for all of them: `_sleep` looks at the queue and not at the number of rings.
            self._bell.put(None)

    def hurry(self, job: Job) -> None:
        """Somebody waits for a job: it is taken next, unless it is under way."""
        with WHOLE, self._lock:
            for position, (_, number, other) in enumerate(self._waiting):
                if other is job:
                    # It keeps its number: of several that are hurried the one that was queued first goes first.
                    self._waiting[position] = (float("-inf"), number, job)
                    heapq.heapify(self._waiting)
                    return

    def cancel(self, job: Job) -> bool:
        """Take back a job that has not begun; it ends with an error that nobody needs to see."""
        with WHOLE:
            with self._lock:
                kept = [entry for entry in self._waiting if entry[2] is not job]
                if len(kept) == len(self._waiting):
                    return False
                self._waiting = kept
                heapq.heapify(self._waiting)
            # Outside of the lock: finishing gives memory back and wakes others.
            job.finish(GeminiError("taken back"))
        return True

    def cancel_all(self, error: BaseException) -> None:
        """End all jobs that have not begun with ``error``."""
        with WHOLE:
            with self._lock:
                dropped, self._waiting = self._waiting, []
            # Outside of the lock, as in `cancel`.
            for _, _, job in dropped:
                job.finish(error)

    def close(self) -> None:
        """Drop what has not begun, let what is under way end, and end the thread. Idempotent; from any thread."""
        if os.getpid() != self._pid:
            return  # a forked child has no such thread, and perhaps a lock that nobody gives back
        with WHOLE:
            with self._lock:
                # Before the queue is emptied: nothing is put into it after that.
                self._is_closed = True
            # The thread may be asleep with an empty queue.
            self._bell.put(None)
        self.cancel_all(GeminiError(f"{self.name} was closed: its model was deleted"))
        thread = self._thread  # taken once: a thread that ends by itself takes it away
        # A thread cannot wait for its own end.
        if self.is_own_thread:
            self._end_here()
        elif thread is not None:
            # Not for ever: a drive that does not answer must not keep a program from ending.
            thread.join(_END_SECONDS)

    def _end_here(self) -> None:
        """Closed by a job under way, or by the garbage collector inside one: what follows must not wait for it."""

    def _take(self) -> Job | None:
        """The next job, if one is waiting. Called on its own thread alone."""
        with self._lock:
            return self._pop() if self._waiting else None

    def _pop(self) -> Job:
        """Take the most urgent of the jobs that wait. Under the lock."""
        return heapq.heappop(self._waiting)[2]

    def _sleep(self) -> bool:
        """Wait until a job is waiting; False when the worker is closed, and none is."""
        # Without the lock: one look at a list. A job that comes after it has rung the bell.
        while not self._waiting:
            if self._is_closed:
                return False
            self._bell.get()
        return True

    def _run(self) -> None:
        """The thread itself, from its beginning to its end."""
        begin_work()
        try:
            self._work()
        except BaseException as e:  # an error of ours; nobody must wait for what will not come
            with self._lock:
                self._is_closed = True
            self.cancel_all(e)
            raise

    def _work(self) -> None:
        """Take and run jobs until it is closed. On its own thread."""
        raise NotImplementedError


class Worker(JobThread):
    """A thread that runs one job after another."""

    _running: Job | None = None

    def _end_here(self) -> None:
        # The end of the model drains what is in flight, this job too, and would wait for its own thread.
        if self._running is not None:
            self._running.finish(GeminiError(f"{self.name} was closed: its model was deleted"))

    def submit(self, run: Callable[[], None], urgency: float = 0.0) -> Job:
        """Run ``run`` on the worker's thread, before what is less urgent (a larger number). Where somebody has to know
        the job, that belongs into one ``WHOLE`` with this: an interrupt comes when it is on its way.
        """
        job = Job(urgency)
        job.run = run
        self.put(job)
        return job

    def _work(self) -> None:
        while self._sleep():
            job = self._take()
            if job is None:  # taken back just now
                continue
            # Per thread, and jobs of one worker may come from different threads.
            kernels.set_flush_mode(job.flush_mode)
            self._running = job
            try:
                job.run()
            # Surfaces where somebody waits; a worker does not die of it.
            except BaseException as e:
                job.finish(e)
            else:
                job.finish()
            self._running = None
            # What it holds is not kept by a worker that waits.
            del job


class Errand(Worker):
    """A worker whose jobs the end of the program waits for, however long they are. Its thread ends when none is left,
    and another one begins with the next.
    """

    is_daemon = False

    def _sleep(self) -> bool:
        # Under the lock: what is queued from here on finds no thread, and begins one.
        with self._lock:
            if not self._waiting:
                self._thread = None
            return bool(self._waiting)


@partial(register, "atexit.register")
def _close_all() -> None:
    """Close all workers at the end of the interpreter, before it is torn down."""
    # A copy: workers may be collected while others are closed.
    for worker in list(_live):
        worker.close()
