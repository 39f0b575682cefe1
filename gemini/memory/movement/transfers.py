"""What of one model moves beside its training: one list of what is in flight, and the threads on which it is made.

    begin      queue a transfer on its lane, the one that is needed first before others (``submit``, if it is made)
    wait       until it is over
    take_back  it is not wanted any more: what has not begun never does, what has is waited for
    end        who began it has noted how it ended; from here on it is no more in flight

A transfer has two ends. It is *under way* when its job is done: what can go wrong on the host has, and its copies were
given to the device. It is *over* with those as well. What stands in the list has memory, which is in the ledger, and
nobody else may have it before the transfer has ended: by being taken, taken back or waited for.

The list is changed by the training thread alone, a lane's thread moves bytes and knows no model. Adding to it and
queuing is one thing to Ctrl-C (:data:`gemini.interrupts.WHOLE`): nothing is in flight that is not in the list.

A *worker* runs the jobs it is given, the most urgent first. A :class:`Job` is an event of the device's kind: whoever
needs its end waits for it, and what it raised is raised there. A worker's thread starts with its first job and ends
with ``close()``; at the end of the interpreter all workers are closed before it is torn down, since no thread may be
inside native code then. Workers know no model: what they run must not keep one alive longer than the job.
"""

from __future__ import annotations

import heapq
import os
import queue
import threading
import weakref
from collections.abc import Callable, Collection, Hashable
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from gemini import kernels
from gemini.errors import GeminiError
from gemini.interrupts import WHOLE
from gemini.ledger import Ledger
from gemini.memory.devices.device import DONE, AllOf, Event
from gemini.memory.movement.mover import Mover
from gemini.patches import register
from gemini.tiers import Tier
from gemini.waiting import await_latch, begin_work, is_running

_END_SECONDS = 60.0
"""How long closing waits for a job that is under way."""

_live: weakref.WeakSet[JobThread] = weakref.WeakSet()


class Job(Event):
    """A piece of work for a worker. Made and waited for by any thread; run by one."""

    what = "a job"
    # Set when it is queued. Flushing denormals is a setting of each thread; results must not depend on who works.
    flush_mode = 0
    # Set then too: whoever waits looks whether that thread is alive.
    worker: JobThread | None = None

    def __init__(self, urgency: float):
        super().__init__()
        self.run: Callable[[], None] = _nothing
        """What it does. Set before it is queued."""
        self.urgency = urgency

    def finish(self, error: BaseException | None = None) -> None:
        # Who keeps the job, to ask how it ended, keeps none of the tensors that it worked on.
        self.run = _nothing
        super().finish(error)

    def wait(self) -> None:
        """Block until the job is over, and raise what it raised. GeminiError if its thread is gone, or all stands."""
        self.wait_until_over()
        if self.error is not None:
            # The error itself and not one around it: callers tell a full disk from a fault.
            raise self.error

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
    """A thread with a queue of jobs by urgency, which the subclass's ``_work`` takes. Any thread may queue them."""

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
        mode = kernels.flush_mode()
        with WHOLE, self._lock:
            if self._is_closed or os.getpid() != self._pid:
                raise GeminiError(f"{self.name} is closed: its model was deleted, or belongs to the parent process")
            if self._thread is None:
                # Before the thread begins: the end of the interpreter must find every one that runs.
                _live.add(self)
                thread = threading.Thread(target=self._run, name=self.name, daemon=self.is_daemon)
                thread.start()
                self._thread = thread  # one that the system refused is none: the next job asks for another
            for job in jobs:
                job.worker, job.flush_mode = self, mode
                heapq.heappush(self._waiting, (job.urgency, self._number, job))
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

    def _pop(self) -> Job | None:
        """Take the most urgent of the jobs that wait, or which one a worker of its own kind takes. Under the lock."""
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
        """Run ``run`` on the worker's thread, before what is less urgent. Who notes the job does so in ``WHOLE``."""
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
    """A worker whose jobs the end of the program waits for. Its thread ends with the last; the next begins one."""

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


class Lane(Enum):
    """A direction, with a thread of its own. The value is that thread's name."""

    UPDATE = "update"  # tiles of a chunk's planes: from their homes, and back
    REDUCE = "reduce"  # gradients among ranks, whose own threads make that: here is its staging alone
    FETCH = "fetch"  # weights: from their home into a window, ahead of their use
    LANDING = "landing"  # gradients: from where autograd left them, home
    OFFLOAD = "offload"  # activations: from where they were saved, to where they wait
    RESTORE = "restore"  # and back, ahead of their use
    CHECKPOINT = "checkpoint"  # all that a checkpoint has, behind as many steps as that takes: one transfer

    __hash__ = object.__hash__


class Held(NamedTuple):
    """Memory in the ledger that a transfer holds until it is over."""

    ledger: Ledger
    tier: Tier
    num_bytes: int
    holder: str


class Transfer(Job):
    """Bytes on their way. Begun and ended by the training thread; its job runs on its lane's, the smallest deadline (in
    whatever unit is that lane's) first. ``key``: what it is known by there, by default itself; ``of``: what it moves.
    """

    what = "a transfer"
    copies: Event = DONE
    """The end of what the device copies."""
    taken_back = False
    """Whether it never began."""
    held: Held | None = None
    """What its end gives back: with its job, or, where the device still copies then, when it is taken off the list
    (:meth:`Transfers.end`)."""
    _given_back = False

    def __init__(self, lane: Lane, deadline: float = 0.0, *, key: Hashable = None, of: Any = None):
        super().__init__(deadline)
        self.lane, self.key, self.of = lane, self if key is None else key, of

    def finish(self, error: BaseException | None = None) -> None:
        if self.copies is DONE:
            self.give_back()
        super().finish(error)

    def give_back(self) -> None:
        """Give back what it holds, once."""
        held = self.held
        if held is not None and not self._given_back:
            # Given back before anybody who waits for that memory wakes up, and ``held`` is cleared only then: who looks
            # for memory in flight finds it here or in the ledger. A second end (closed while it runs) gives nothing.
            self._given_back = True
            held.ledger.release(held.tier, held.num_bytes, held.holder)
            self.held = None

    def is_over(self) -> bool:
        """Whether it is done, and its copies are. Never blocks."""
        return self.is_complete() and self.copies.is_complete()

    def went_well(self) -> bool:
        """Whether it is done, copies nothing any more, and nothing went wrong: at one look, no also where unknown."""
        return self._done.is_set and self.error is None and self.copies is DONE

    def is_done_in(self, timeout: float) -> bool:
        """Block until its job is done, for ``timeout`` seconds at most."""
        return self._done.wait(timeout)

    def outcome(self) -> Exception | None:
        """Block until it is over: what went wrong."""
        try:
            # The copies first, whatever the job says: until they are over the memory is being read or written.
            self.copies.wait_until_over()
            self.wait_until_over()
            error = self.error
            if error is None and self.copies is not DONE:
                # The job has said that they were begun, only they say how they ended.
                self.copies.wait()
        except Exception as e:
            error = e
            # What the caller was handling already, an interrupt say. It comes as the context of whatever is raised
            # meanwhile, which is why the job's own error is read and not raised.
            error.__context__ = None
        if error is not None and not isinstance(error, Exception):
            raise error
        # Without frames: they hold what is being moved, and the error is kept for a while.
        return None if error is None else error.with_traceback(None)


class Transfers:
    """The transfers of one model, on the lanes that there are. Threads of lanes never look at the list."""

    def __init__(self, mover: Mover, lanes: Collection[Lane] = ()):
        self.beside = bool(lanes)
        """Whether anything moves beside training."""
        # Staging is short where budgets are tight. So updates come first, which have nothing without it.
        self.slots = mover.staging.take_slots() if Lane.UPDATE in lanes else []
        """Staging of the tiles of updates."""
        # In this order: where sets are short the first ones get theirs.
        own = [lane for lane in (Lane.REDUCE, Lane.FETCH, Lane.LANDING) if lane in lanes]
        self.staging = {lane: next(iter(mover.staging.take_slots(1)), None) for lane in own}
        """Of the other lanes that need it; None where none was left."""
        self.open: dict[Lane, dict[Any, Transfer]] = {lane: {} for lane in Lane}
        """What is in flight, by lane and key, in the order in which it was submitted."""
        self.about = mover.about
        self.threads: dict[Lane, JobThread] = {}
        """Those that have begun, or are of another kind than :meth:`thread` makes."""

    def thread(self, lane: Lane) -> JobThread:
        """The lane's thread, which begins with its first job."""
        thread = self.threads.get(lane)
        if thread is None:
            # A program that ends waits for its checkpoint, and for nothing else that moves.
            thread = self.threads[lane] = (Errand if lane is Lane.CHECKPOINT else Worker)(lane.value)
        return thread

    def begin(
        self, lane: Lane, run: Callable[[], None], deadline: float = 0.0, *, held: Held | None = None, **known: Any
    ) -> Transfer:
        """Make a transfer that does ``run`` on its lane's thread, and :meth:`submit` it."""
        transfer = Transfer(lane, deadline, **known)
        transfer.run, transfer.held = run, held
        self.submit(transfer)
        return transfer

    def submit(self, *transfers: Transfer) -> None:
        """Queue transfers of one lane, all or none (of a model that was closed): from here on they are in flight."""
        lane = transfers[0].lane
        thread = self.thread(lane)
        with WHOLE:
            for transfer in transfers:
                # In the list before it is queued: a lane's thread may be done before this returns.
                self.open[lane][transfer.key] = transfer
            try:
                thread.put(*transfers)
            except BaseException:
                for transfer in transfers:
                    if transfer.worker is None or thread.cancel(transfer):  # else it is under way, and stays known
                        self.end(transfer)
                        if transfer.worker is None:
                            transfer.finish()  # nobody else gives back what it holds
                raise

    def add(self, transfer: Transfer) -> None:
        """Note a transfer that has ``copies`` and no job. Inside ``WHOLE``, with the copying."""
        # It has no job to wait for; what is left of it is `copies`.
        if not transfer.is_complete():
            transfer.finish()
        elif transfer.copies is DONE:
            transfer.give_back()
        self.open[transfer.lane][transfer.key] = transfer

    def wait(self, transfer: Transfer, cause: str, name: str, index: int = -1) -> Exception | None:
        """Block until it is over, which counts as a stall of the step by ``cause``: what went wrong."""
        # Only a wait that blocks is a stall of the step.
        if not transfer.is_over():
            with self.about(cause, name, index):
                return transfer.outcome()
        return transfer.outcome()

    def take_back(self, transfer: Transfer, cause: str, name: str, index: int = -1) -> None:
        """Give up a transfer that nobody wants: cancel it, or wait until it is over, however that went."""
        # Set and never cleared: a second call finds it over.
        if self.thread(transfer.lane).cancel(transfer):
            transfer.taken_back = True
        self.wait(transfer, cause, name, index)

    def end(self, transfer: Transfer) -> None:
        """Take it off the list: it is over and its memory may go, or it never began. By the training thread alone."""
        if transfer.held is None or not transfer.held.num_bytes:
            self.open[transfer.lane].pop(transfer.key, None)
            return
        with WHOLE:  # what is off the list, and has not given back, would keep its bytes for good
            self.open[transfer.lane].pop(transfer.key, None)
            transfer.give_back()

    def end_of(self, lane: Lane, of: Any) -> Event:
        """The end of what a lane has in flight for ``of``. Asked by the training thread; anybody may wait for it."""
        if not self.open[lane]:
            return DONE
        # Of one without a job its copies alone: who waits does not keep what it holds.
        flights = [transfer for transfer in self.open[lane].values() if transfer.of is of]
        return AllOf([transfer if transfer.copies is DONE else transfer.copies for transfer in flights])

    def drain(self, lane: Lane, cause: str, name: str) -> None:
        """Wait until nothing of a lane is in flight. The first error is raised; the rest waits for the next call."""
        for transfer in list(self.open[lane].values()):
            error = self.wait(transfer, cause, name)
            # Ended whatever became of it: an error that stayed in the list would be raised by every later drain.
            self.end(transfer)
            if error is not None:
                for other in list(self.open[lane].values()):
                    if other.is_over():
                        self.end(other)  # told once
                raise error

    def close(self) -> None:
        """Drop what has not begun, wait for what is under way, end the threads. From any thread, one of these too."""
        for lane in Lane:  # updates first: a fetch may wait for one
            if lane in self.threads:
                self.threads[lane].close()
