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
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from enum import Enum
from typing import Any, NamedTuple

from gemini.interrupts import WHOLE
from gemini.ledger import Ledger
from gemini.memory.devices.device import DONE, AllOf, Event
from gemini.memory.movement.mover import Mover
from gemini.memory.movement.worker import Errand, Job, JobThread, Worker
from gemini.tiers import Tier


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
    """Bytes on their way. Begun and ended by the training thread; its job runs on its lane's.

    Args:
        lane: where it is made.
        deadline: when it is needed, in whatever unit is that lane's: the smallest goes first.
        key: what it is known by in its lane; itself if that is left out.
        of: what it moves, for whoever submits it.
    """

    what = "a transfer"

    def __init__(self, lane: Lane, deadline: float = 0.0, *, key: Hashable = None, of: Any = None):
        super().__init__(deadline)
        self.lane, self.key, self.of = lane, self if key is None else key, of
        self.copies: Event = DONE
        """The end of what the device copies."""
        self.taken_back = False
        """Whether it never began."""
        self.held: Held | None = None
        """What its end gives back: with its job, or, where the device still copies then, when it is taken off the list
        (:meth:`Transfers.end`)."""
        self._given_back = False

    def finish(self, error: BaseException | None = None) -> None:
        if self.copies is DONE:
            self.give_back()
        super().finish(error)

    def give_back(self) -> None:
        """Give back what it holds, once."""
        held = self.held
        if held is not None and not self._given_back:
            # Given back before anybody who waits for that memory wakes up, and ``held`` is cleared only then: who looks
            # for memory in flight must find it here or in the ledger. A second end (closed while it runs) gives back
            # nothing.
            self._given_back = True
            held.ledger.release(held.tier, held.num_bytes, held.holder)
            self.held = None

    def is_over(self) -> bool:
        """Whether it is done, and its copies are. Never blocks."""
        return self.is_complete() and self.copies.is_complete()

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
            if error is None:
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
    """The transfers of one model, on the lanes that there are. The list is the training thread's; threads of lanes
    never look at it.
    """

    def __init__(self, mover: Mover, lanes: Collection[Lane] = ()):
        self.beside = bool(lanes)
        """Whether anything moves beside training."""
        # Staging is short where budgets are tight. So updates come first, which have nothing without it.
        self.slots = mover.staging.take_slots() if Lane.UPDATE in lanes else []
        """Staging of the tiles of updates."""
        # In this order: where sets are short the first ones get theirs.
        own = [lane for lane in (Lane.REDUCE, Lane.FETCH, Lane.LANDING) if lane in lanes]
        self.staging = {lane: mover.staging.take() for lane in own}
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
        transfer.finish()
        self.open[transfer.lane][transfer.key] = transfer

    def hurry(self, transfer: Transfer) -> None:
        """Have a transfer that somebody waits for taken next, unless it is under way."""
        self.thread(transfer.lane).hurry(transfer)

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
            transfer.give_back()
            return
        with WHOLE:  # what is off the list, and has not given back, would keep its bytes for good
            self.open[transfer.lane].pop(transfer.key, None)
            transfer.give_back()

    def end_of(self, lane: Lane, of: Any) -> Event:
        """The end of what a lane has in flight for ``of``. Asked by the training thread; anybody may wait for it."""
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
        """Drop what has not begun, wait for what is under way, and end the threads. From any thread, one of these too:
        a model may end where the garbage collector runs.
        """
        for lane in Lane:  # updates first: a fetch may wait for one
            if lane in self.threads:
                self.threads[lane].close()

    def check_invariants(self) -> None:
        """Check what holds between any two calls: after a :meth:`drain` of the engine."""
        for lane, transfers in self.open.items():
            for key, transfer in transfers.items():
                assert transfer.key == key and transfer.lane is lane, (lane, key)
                # A checkpoint goes on behind steps, and no drain of the model waits for it.
                assert lane is Lane.CHECKPOINT or transfer.is_over(), f"{transfer.what} of {lane.value} is on its way"
