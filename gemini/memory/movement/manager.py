"""The manager: gathers chunks into windows within the budget, and takes the memory of those nobody reads.

    acquire = populate (who gives way: gemini.memory.movement.room) + gather + pin
    release = unpin; the window stays until someone needs the room
    evict   = somebody needs the room, or the copy is overtaken

Weights in windows are clean copies, so eviction drops them. What the schedule says is needed next is gathered ahead on
a worker of its own, as far as there is room without taking the place of what is needed sooner.

A fetch has two ends. It is *under way* once its copies have been given to the device: what had to come before it is
over (an update, the reading of a file), and what can go wrong with it on the host has. A fetch ahead is a job of the
worker until then. It is *over* with ``chunk.fetched``, the end of those copies, and for that the host does not wait
where the device can: whoever reads the window there is put behind it (:meth:`Manager.let_compute_wait`), so that a GPU
is given the work of many layers ahead. Who gives the memory back, or writes the weights' home on the host, waits too.

A copy that fails says so in ``chunk.fetched``, if the computing thread can wait for it; then the fetch is tried again.
On CUDA nobody knows until later: an error of the GPU comes up in whichever call is next, and ends the program's use of
it (see :mod:`gemini.memory.devices.cuda_windows`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Protocol

from gemini.interrupts import WHOLE
from gemini.ledger import Ledger, Turn, Want
from gemini.memory.chunks.chunk import Chunk, Use, UseChange
from gemini.memory.devices.device import DONE, Device, Event
from gemini.memory.movement.foresight import Foresight
from gemini.memory.movement.mover import Mover, Working
from gemini.memory.movement.room import Room
from gemini.memory.movement.transfers import Lane, Transfers
from gemini.planning.policy import EvictionPolicy
from gemini.planning.timeline import Track


class WeightSource(Protocol):
    """A source of the weights that windows are filled with."""

    in_order: bool
    """Whether ranks fetch together: in the order in which it was asked for, whoever waits."""

    def gather(self, chunk: Chunk) -> Event:
        """Start to fill the populated window of a chunk: the end of that."""

    def upcoming(self) -> Iterable[tuple[int, int]]:
        """The fetches ahead from here on, (moment, chunk)."""

    def follow(self) -> None:
        """Do what comes behind the chunk that was just acquired."""


class Homes:
    """The chunks' own homes as the source, in the order that the foresight plans."""

    in_order = False

    def __init__(self, mover: Mover, foresight: Foresight):
        self.gather, self.upcoming = mover.gather, foresight.upcoming

    def follow(self) -> None:
        """Is never called: only ranks, which fetch in order, have something behind a gather."""


class Manager:
    """Owns the windows of ``chunks``. The training thread's, or autograd's, for which it waits: there is no lock."""

    def __init__(
        self,
        chunks: list[Chunk],
        *,
        ledger: Ledger,
        device: Device,
        mover: Mover,
        policy: EvictionPolicy | None = None,
        foresight: Foresight,
        transfers: Transfers,
    ):
        self.chunks, self.device, self.foresight = chunks, device, foresight
        self.num_gathers = 0
        self.more_to_come = False
        """Whether further micro-batches read what the one that computes does: its gradients are not the last."""
        self.source: WeightSource = Homes(mover, self.foresight)
        """Where weights come from. Another one is set before the first fetch."""
        self._mover, self._transfers = mover, transfers  # without lanes every fetch is made where it is needed
        self.ahead = self._transfers.open[Lane.FETCH]
        """Fetches that nobody has asked for yet, by index of the chunk; over when all copies are under way."""
        self._clock = 0
        self.room = Room(chunks, ledger=ledger, device=device, foresight=self.foresight, policy=policy)
        self._overtaken: dict[int, Chunk] = {}
        """Lent chunks whose content an update has overtaken."""
        self._updating: dict[int, Chunk] = {}
        """Chunks whose window an update reads, in the order in which they were handed over."""
        # Last: from here on another model of the same budget may ask. The ledger keeps these weakly, since a worker
        # that holds it must not keep the windows alive.
        ledger.register(Turn.READERS, self._await_reader, device.tier)
        ledger.register(Turn.PREFETCHES, self._call_last_back, device.tier)

    def acquire(self, chunk: Chunk) -> None:
        """Make the gathered weights of ``chunk`` readable and keep them until the matching :meth:`release`.
        BudgetExceeded if what must stay leaves no room, StorageError if they could not be read; nothing has changed.
        """
        # Its window has the weights of before the update: it goes, and the new ones are fetched below.
        if chunk.use is Use.UPDATING:
            chunk.settle()
            self.end_update(chunk)
        if chunk.use is Use.FREE:
            self._fetch(chunk)
        elif chunk.use is Use.FETCHING:
            self._await_arrival(chunk)
        elif chunk.spec.index in self._overtaken:
            self.refresh_lent()
        # At every acquire, not at the first one alone: this thread may compute on another stream than the one before.
        if chunk.fetched is not DONE or self.device.stream_number() not in self.device.computing:
            self.let_compute_wait(chunk)
        if chunk.use is not Use.COMPUTE:
            chunk.step(UseChange.ACQUIRE)
            # It is read again in this step, so its gradients are not all that is left of it.
            chunk.grads_complete = False
        chunk.pins += 1
        chunk.ahead = False
        if chunk.pins == 1 and chunk.window is not None:
            # At the first pin alone: nested calls of one chunk are one use of the schedule.
            self.foresight.acquired(chunk.spec.index)
            if self.source.in_order:
                try:
                    self.source.follow()
                except Exception:
                    self.release(chunk)  # refused: the caller has no pin that it could give back
                    raise
        self._clock += 1  # counts acquires: the order of last uses, for the policy
        chunk.last_use = self._clock

    def release(self, chunk: Chunk) -> None:
        """Undo one :meth:`acquire`. The weights stay gathered until someone needs the room."""
        assert chunk.pins > 0, chunk.name
        chunk.pins -= 1
        if chunk.pins == 0:
            # At the last pin alone, as in `acquire`.
            self.foresight.released(chunk.spec.index)
            chunk.step(UseChange.RELEASE)
            # It was handed over while a module read the window. From here on only the update does; its end takes it.
            if chunk.spec.index in self._updating and not chunk.is_lent:
                chunk.step(UseChange.UPDATE)
            elif chunk.stale:
                if chunk.spec.index in self._updating:
                    # Lent since, so not UPDATING: the update must have read the old weights before new ones come.
                    chunk.settle()
                    self.end_update(chunk)
                # Overtaken: nobody may read these weights again, and whoever comes next fetches the new ones.
                self.drop([chunk])
            elif chunk.grads_complete:
                chunk.step(UseChange.GRADS)

    def grads_complete(self, chunk: Chunk) -> None:
        """Every gradient of the chunk has arrived: once released, it is the first to go."""
        if self.more_to_come:
            return
        if chunk.use is Use.COMPUTE:
            chunk.grads_complete = True
        elif chunk.use is Use.HOLD:
            chunk.step(UseChange.GRADS)

    def drop(self, chunks: Iterable[Chunk]) -> None:
        """Forget gathered copies that an update of the weights has overtaken; at their release if they are in use."""
        for chunk in chunks:
            # Resident weights are the home itself. UPDATING goes with the end of its update.
            if chunk.resident or chunk.use in (Use.FREE, Use.UPDATING):
                continue
            if chunk.use is Use.FETCHING:
                # It may have read the old weights, or half of each.
                self._call_back(chunk)
            elif chunk.use is Use.COMPUTE:
                # Modules that compute still need the old weights, as in torch; `release` drops them.
                chunk.stale = True
            elif chunk.is_lent:
                # Its memory cannot go, so `refresh_lent` fills it anew in its place.
                self._overtaken[chunk.spec.index] = chunk
            else:
                self.room.evict(chunk)

    # ---- updates that read windows ------------------------------------------------------------------------------

    def begin_update(self, chunk: Chunk) -> None:
        """Let an update read the window, which nobody reads after those who do now, until :meth:`end_update`."""
        self._updating[chunk.spec.index] = chunk
        if chunk.use is Use.COMPUTE:
            chunk.stale = True
        else:
            chunk.step(UseChange.UPDATE)

    def end_update(self, chunk: Chunk) -> None:
        """Take the window of an update that reads nothing any more. Nothing is done if none was registered."""
        if chunk.spec.index not in self._updating:
            return
        # Off the list and evicted together: a window off the list would stay UPDATING, which nothing evicts.
        with WHOLE:
            del self._updating[chunk.spec.index]
            if chunk.use is Use.UPDATING:
                self.room.evict(chunk)

    def _await_reader(self, want: Want | None = None) -> bool:
        """Wait for an update that reads a window; False if there is none."""
        if not self._updating:
            return False
        # The one that was handed over first: it has waited longest, and is over soonest.
        chunk = next(iter(self._updating.values()))
        update = chunk.update
        try:
            if chunk.is_guessed and update is not None:
                # Its memory is wanted and not its weights: it is not undone.
                update.wait_until_over()
            else:
                chunk.settle()
        finally:
            # Also where it failed: the window is of no use, and whoever asked for memory would wait for it again.
            self.end_update(chunk)
        return True

    def refresh_lent(self) -> None:
        """Fetch anew what an update has overtaken and others still look at: they see the new weights, as in torch."""
        while self._overtaken:
            # One by one, each off the list when it is done: after an error the rest is still there to be refreshed.
            index, chunk = next(iter(self._overtaken.items()))
            if chunk.use in (Use.HOLD, Use.GRAD_READY) and chunk.is_lent:
                # The new weights are at home when the update is over, not before.
                chunk.settle()
                # Into the same memory, which views of the program look at. No state changes: it stays gathered.
                self._fill(chunk)
                chunk.stale = False
            elif chunk.use in (Use.HOLD, Use.GRAD_READY):
                self.room.evict(chunk)
            self._overtaken.pop(index, None)

    def begin_forward(self, *, in_step: bool) -> None:
        """Begin a forward: nothing computes yet. ``in_step``: a backward may follow."""
        self.more_to_come = False
        if in_step:
            self.foresight.begin()
        self.room.grow_again()

    # ---- ahead of time ------------------------------------------------------------------------------------------

    def look_ahead(self, *, between: bool = False) -> None:
        """Begin the fetches that come next, up to the first one without room: a smaller one would take its place.
        ``between``: of two steps, where other models of the same budget may compute, and take what they find.
        """
        # In a forward without a step nothing is known of what comes next.
        if self._transfers.beside and (between or self.foresight.in_step):
            leave = self.room.ledger.wanted_by_others(self.room.tier) if between else 0
            self._begin_fetches(self.source.upcoming(), leave=leave)

    def enter_stage(self, chunks: Sequence[Chunk]) -> None:
        """Begin a stage, whose chunks several micro-batches read: they come before anything that is read later."""
        missing = [chunk.spec.index for chunk in chunks if chunk.use is Use.FREE]
        if (schedule := self.foresight.schedule) is not None:
            for chunk in chunks:
                schedule.advance(chunk.spec.index)
        if self._transfers.beside and (place := self.foresight.place) is not None:
            self._begin_fetches((place, index) for index in missing)

    def _begin_fetches(self, upcoming: Iterable[tuple[int, int]], *, leave: int = 0) -> None:
        # Windows of updates that are over are room for the first fetches. A copy: `end_update` takes from the list.
        for chunk in list(self._updating.values()):
            if chunk.update is None or chunk.update.is_complete():
                self.end_update(chunk)
        for moment, index in upcoming:
            chunk = self.chunks[index]
            if chunk.use is not Use.FREE or chunk.window is None:
                # All ranks post gathers in one order. One that is skipped here would be another order than theirs.
                if self.source.in_order:
                    return
                continue
            # One that can only be gathered when it is read needs its room then: nothing that is read later may take it.
            if not self._can_be_ahead(chunk) or not self.room.populate_before(moment, chunk.window, leave=leave):
                return
            self._begin_ahead(chunk, moment)

    def _can_be_ahead(self, chunk: Chunk) -> bool:
        # A guess may be undone, and then what was fetched is not what the step left. Without staging of its own the
        # lane would share the training thread's areas.
        if chunk.is_guessed or (self._transfers.staging.get(Lane.FETCH) is None and self._mover.needs_staging(chunk)):
            return False
        # Work of the computing stream would stand there behind layers that it was given before, far ahead of its use.
        return not self._mover.computes(chunk)

    def _begin_ahead(self, chunk: Chunk, moment: int) -> None:
        """Fill the populated window of a chunk ahead of its use beside training, behind the update of its weights."""
        assert chunk.window is not None
        # Read here, on the training thread: by the time the job runs these may be others.
        update, source, mover = chunk.update, self.source, self._mover
        working = Working(mover.watch.moved, self._transfers.staging.get(Lane.FETCH))

        def fetch() -> None:
            # The one wait of a lane for another: the update lane takes no memory and waits for no fetch of a new
            # weight, so there is no circle.
            if update is not None:
                update.wait()
            with mover.working(working):
                # Set before the job is over, and read by nobody until then.
                chunk.fetched = source.gather(chunk)

        try:
            # A fetch that was begun for a chunk whose state says FREE would write into a window that others get.
            with WHOLE:
                self._transfers.begin(Lane.FETCH, fetch, moment, key=chunk.spec.index, of=chunk)
                chunk.step(UseChange.FETCH)
                chunk.ahead = True
        except BaseException:
            # FREE: it was not begun. Else an interrupt waited for the end of the block, and the fetch is under way.
            if chunk.use is Use.FREE:
                self.room.depopulate(chunk.window, "windows")
            raise

    def _await_arrival(self, chunk: Chunk) -> None:
        """Take a fetch ahead as it is, and let computing wait for it; one that failed is tried again here and now."""
        arriving = self.ahead[chunk.spec.index]
        arrived = arriving.went_well()
        if not arrived and not arriving.is_complete():
            # The lane waits for the update of this chunk. Waiting here moves that update to the front, and tells its
            # error where it belongs.
            chunk.settle()
            # Ranks take gathers in the order in which all of them post them.
            if not self.source.in_order:
                self._transfers.thread(arriving.lane).hurry(arriving)
        if not arrived:
            arrived = self._transfers.wait(arriving, *self._what(chunk)) is None
        try:
            if arrived and chunk.fetched is not DONE:
                self._wait_on_device(chunk)
        except Exception:  # it is tried again, and then told
            arrived = False
        self._end_ahead(chunk)
        if arrived:
            chunk.step(UseChange.ARRIVE)
            self._count_arrival(chunk)
        else:
            self._fail(chunk)
            self._fetch(chunk)

    def _call_back(self, chunk: Chunk) -> None:
        """Give up a fetch under way: its memory is free afterwards. Waits for it if it has begun."""
        arriving = self.ahead[chunk.spec.index]
        self._transfers.take_back(arriving, *self._what(chunk))
        if not arriving.taken_back:
            # A GPU's window goes behind the copies into it by itself; elsewhere they must be over first.
            with contextlib.suppress(Exception):
                chunk.fetched.wait_on_device()
        self._end_ahead(chunk)
        self._fail(chunk)

    def _call_last_back(self, want: Want) -> bool:
        """Give up the last of what is fetched ahead, which is needed latest; False if there is nothing."""
        last = next(reversed(self.ahead.values()), None)
        if last is not None:
            self._call_back(last.of)
        return last is not None

    def _fail(self, chunk: Chunk) -> None:
        assert chunk.window is not None
        # State and memory together: a FETCHING chunk without memory would be waited for by whoever reads it.
        with WHOLE:
            chunk.step(UseChange.FAIL)
            self.room.depopulate(chunk.window, "windows")

    def let_compute_wait(self, chunk: Chunk) -> None:
        """Let whatever is computed from now on, on whichever stream, read the window."""
        # Also without anything to wait for: when the window goes, its memory is not written before this stream is done.
        self.device.computes_here()
        if chunk.fetched is not DONE:
            if not chunk.fetched.is_complete():
                self._wait_on_device(chunk)
            _forget_if_over(chunk)

    def await_begun(self) -> None:
        """Wait until all fetches ahead are under way, or have failed."""
        for arriving in self.ahead.values():
            # On the lane, a wait for the update that it is behind; no error is raised, whoever needs the chunk is told.
            arriving.wait_until_over()

    def drain(self) -> None:
        """Wait until nothing is on its way; what failed is told when it is needed."""
        self.await_begun()
        for arriving in self.ahead.values():
            arriving.of.fetched.wait_until_over()

    def close(self) -> None:
        """End with the model: a chunk that somebody keeps must keep nothing else."""
        for arriving in list(self.ahead.values()):
            self._end_ahead(arriving.of)

    # ---- the books ----------------------------------------------------------------------------------------------

    def is_balanced(self) -> bool:
        """Whether the books say what there is, where nobody computes: nothing pinned, every window accounted for."""
        for chunk in self.chunks:
            # Two books of one fact. An interrupt between two of their lines leaves them different.
            is_under_way = chunk.spec.index in self.ahead
            if chunk.pins or chunk.use is Use.COMPUTE or (chunk.use is Use.FETCHING) != is_under_way:
                return False
        return self.room.is_balanced()

    def start_over(self) -> None:
        """Forget every gathered copy, but lent ones: an interrupt came between two lines of what the books say."""
        kept = [c for c in self.chunks if c.window is not None and c.gathered and c.is_lent]
        # Updates first: they read windows that are discarded below.
        while self._updating:
            with contextlib.suppress(Exception):  # told when the update is waited for
                self._await_reader()
        for chunk in self.chunks:
            # Before its window goes, whatever the books say: a copy under way would write where no memory is.
            if arriving := self.ahead.get(chunk.spec.index):
                self._transfers.take_back(arriving, *self._what(chunk))
            chunk.fetched.wait_until_over()
            self._end_ahead(chunk)
            chunk.pins, chunk.stale, chunk.ahead, chunk.grads_complete = 0, False, False, False
            chunk.use = Use.HOLD if chunk.window is None or chunk in kept else Use.FREE
            if chunk.window is not None and chunk not in kept:
                chunk.tell_gone()
                chunk.window.discard()
        # Behind all windows: it counts those that have memory now.
        self.room.start_over()
        # An update may have overtaken them, and what the books said of that is lost: they are fetched anew.
        self._overtaken.update((chunk.spec.index, chunk) for chunk in kept)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _fetch(self, chunk: Chunk) -> None:
        """Gather a chunk here and now: somebody waits for it."""
        assert chunk.window is not None
        # Before room is made: the end of its update may give back what is missing, and brings the new weights home.
        chunk.settle()
        # Victims are chosen as of the moment at which this chunk is read, where the schedule has not come to yet.
        self.room.reader = chunk.spec.index
        try:
            self.room.populate(chunk.window, "windows", what=chunk.name)
        finally:
            # Also after a refusal: else later evictions would be chosen for a chunk that nobody waits for.
            self.room.reader = None
        try:
            if self.source.in_order:
                # Gathers ahead are on the wire before this one on every rank. One that overtook them here would meet
                # another one of theirs.
                self.await_begun()
            self._fill(chunk)
        except BaseException:
            self.room.depopulate(chunk.window, "windows")
            raise
        # Two steps of the state and the count: cut in two, it would be FETCHING without a fetch.
        with WHOLE:
            chunk.step(UseChange.FETCH)
            chunk.step(UseChange.ARRIVE)
            self._count_arrival(chunk)

    def _fill(self, chunk: Chunk) -> None:
        """Fill the populated window of a chunk, and let computing wait for it. An error is raised when it is over."""
        chunk.fetched = self.source.gather(chunk)
        if chunk.fetched is DONE:
            return
        try:
            self._wait_on_device(chunk)
        except BaseException:
            # The error is told by raising it; the chunk would keep it, with all frames of its traceback.
            _forget_if_over(chunk)
            raise

    def _wait_on_device(self, chunk: Chunk) -> None:
        with self._mover.about(*self._what(chunk)):
            chunk.fetched.wait_on_device()

    def _what(self, chunk: Chunk) -> tuple[str, str, int]:
        """Cause, name and index of a wait."""
        index = chunk.spec.index
        cause = Track.GATHER.value if self.source.in_order else f"fetch from {chunk.weights.tier.value}"
        return cause, f"wait for chunk {index}", index

    def _end_ahead(self, chunk: Chunk) -> None:
        if chunk.fetched is not DONE:
            _forget_if_over(chunk)
        self.ahead.pop(chunk.spec.index, None)

    def _count_arrival(self, chunk: Chunk) -> None:
        self.num_gathers += 1
        # It came from home just now, behind whatever update there was.
        self._overtaken.pop(chunk.spec.index, None)
        chunk.arrived = self._clock
        chunk.stale = False


def _forget_if_over(chunk: Chunk) -> None:
    """Drop an event that is over: one that failed has its error, whose traceback would keep the model alive."""
    if chunk.fetched.is_complete():
        chunk.fetched = DONE
