"""The manager: gathers chunks into windows within the budget, and takes the memory of those nobody reads.

    acquire = populate (who gives way: gemini.memory.movement.room) + gather + pin
    release = unpin; the window stays until someone needs the room
    evict   = somebody needs the room, or the copy is overtaken

Weights in windows are clean copies, so eviction drops them. What the schedule says is needed next is gathered ahead on
a worker of its own (:mod:`gemini.memory.movement.fetches`), as far as there is room without taking the place of what is
needed sooner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.chunks.states import Use, UseChange
from gemini.memory.devices.device import Device
from gemini.memory.movement.fetches import Fetches, Homes, WeightSource
from gemini.memory.movement.foresight import Foresight
from gemini.memory.movement.mover import Mover
from gemini.memory.movement.room import Room
from gemini.memory.movement.transfers import Transfers
from gemini.planning.plan import Moves
from gemini.planning.policy import EvictionPolicy
from gemini.tiers import Ledger, Turn, Want


class Manager:
    """Owns the windows of ``chunks``.

    Args:
        transfers: where fetches ahead begin; without any, every fetch begins when it is needed.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        *,
        ledger: Ledger,
        device: Device,
        mover: Mover,
        policy: EvictionPolicy | None = None,
        foresight: Foresight | None = None,
        transfers: Transfers | None = None,
    ):
        self.chunks = chunks
        self.foresight = foresight or Foresight(lambda steps: [Moves()] * len(steps))
        self.num_gathers = 0
        self.fetches = Fetches(mover, Homes(mover, self.foresight), transfers or Transfers(mover))
        self._device = device
        self._clock = 0
        self.room = Room(chunks, ledger=ledger, device=device, foresight=self.foresight, policy=policy)
        ledger.register(Turn.READERS, self._await_reader, device.tier)
        ledger.register(Turn.PREFETCHES, self._call_last_back, device.tier)
        self._overtaken: dict[int, Chunk] = {}
        """Lent chunks whose content an update has overtaken."""
        self._updating: dict[int, Chunk] = {}
        """Chunks whose window an update reads, in the order in which they were handed over."""

    @property
    def num_evictions(self) -> int:
        return self.room.num_evictions

    def gather_from(self, source: WeightSource) -> None:
        """Fill windows from another source than the chunks' homes, from the first one on."""
        self.fetches.source = source

    def acquire(self, chunk: Chunk) -> None:
        """Make the gathered weights of ``chunk`` readable and keep them until the matching :meth:`release`.

        Raises:
            BudgetExceeded: if what must stay leaves no room; nothing has changed.
            StorageError: if the weights could not be read; nothing has changed.
        """
        if chunk.use is Use.UPDATING:
            chunk.settle()
            self.end_update(chunk)
        if chunk.use is Use.FREE:
            self._fetch(chunk)
        elif chunk.use is Use.FETCHING:
            self._await_arrival(chunk)
        elif chunk.spec.index in self._overtaken:
            self.refresh_lent()
        self.fetches.let_compute_wait(chunk)
        if chunk.use is not Use.COMPUTE:
            chunk.step(UseChange.ACQUIRE)
            chunk.grads_complete = False
        chunk.pins += 1
        chunk.ahead = False
        if chunk.pins == 1 and not chunk.resident:
            self.foresight.acquired(chunk.spec.index)
            self.room.give_back()
            self.fetches.source.follow()
        self._clock += 1
        chunk.last_use = self._clock

    @contextmanager
    def reading(self, chunk: Chunk) -> Iterator[None]:
        """Keep the gathered weights of a chunk inside the block."""
        self.acquire(chunk)
        try:
            yield
        finally:
            self.release(chunk)

    def release(self, chunk: Chunk) -> None:
        """Undo one :meth:`acquire`. The weights stay gathered until someone needs the room."""
        assert chunk.pins > 0, chunk.name
        chunk.pins -= 1
        if chunk.pins == 0:
            self.foresight.released(chunk.spec.index)
            chunk.step(UseChange.RELEASE)
            if chunk.spec.index in self._updating and not chunk.is_lent:
                chunk.step(UseChange.UPDATE)
            elif chunk.stale:
                if chunk.spec.index in self._updating:
                    chunk.settle()
                    self.end_update(chunk)
                self.drop([chunk])
            elif chunk.grads_complete:
                chunk.step(UseChange.GRADS)

    def grads_complete(self, chunk: Chunk) -> None:
        """Every gradient of the chunk has arrived: once released, it is the first to go."""
        if chunk.use is Use.COMPUTE:
            chunk.grads_complete = True
        elif chunk.use is Use.HOLD:
            chunk.step(UseChange.GRADS)

    def drop(self, chunks: Iterable[Chunk]) -> None:
        """Forget gathered copies that an update of the weights has overtaken; at their release if they are in use.

        Those that are lent get their new content with :meth:`refresh_lent`.
        """
        for chunk in chunks:
            if chunk.resident or chunk.use in (Use.FREE, Use.UPDATING):
                continue
            if chunk.use is Use.FETCHING:
                self._call_back(chunk)
            elif chunk.use is Use.COMPUTE:
                chunk.stale = True
            elif chunk.is_lent:
                self._overtaken[chunk.spec.index] = chunk
            else:
                self.room.evict(chunk)

    # ---- updates that read windows ------------------------------------------------------------------------------

    def is_current(self, chunk: Chunk) -> bool:
        """Whether the window holds what the home does, for nobody but the program's own calls."""
        there = chunk.use in (Use.HOLD, Use.COMPUTE, Use.GRAD_READY)
        return chunk.window is not None and there and not (chunk.stale or chunk.is_lent)

    def begin_update(self, chunk: Chunk) -> None:
        """An update of a chunk that :meth:`is_current` reads the weights in its window: nobody reads them after who
        does not now, and the window stays until its update is over, or :meth:`end_update`.
        """
        self._updating[chunk.spec.index] = chunk
        if chunk.use is Use.COMPUTE:
            chunk.stale = True
        else:
            chunk.step(UseChange.UPDATE)

    def end_update(self, chunk: Chunk) -> None:
        """The update reads nothing any more."""
        with WHOLE:
            if self._updating.pop(chunk.spec.index, None) is not None and chunk.use is Use.UPDATING:
                self.room.evict(chunk)

    def _end_updates(self) -> None:
        """Take the windows of updates that are over."""
        for chunk in list(self._updating.values()):
            update = chunk.update
            if update is None or update.is_complete():
                self.end_update(chunk)

    def _await_reader(self, want: Want | None = None) -> bool:
        """Wait for an update that reads a window; False if there is none."""
        if not self._updating:
            return False
        chunk = next(iter(self._updating.values()))
        update = chunk.update
        try:
            if chunk.is_guessed and update is not None:
                update.wait_until_over()  # its memory is wanted, not its weights: it is not undone
            else:
                chunk.settle()
        finally:
            self.end_update(chunk)
        return True

    def refresh_lent(self) -> None:
        """Fetch anew what an update has overtaken and others still look at: they see the new weights, as in torch."""
        while self._overtaken:
            index, chunk = next(iter(self._overtaken.items()))
            if chunk.use in (Use.HOLD, Use.GRAD_READY) and chunk.is_lent:
                chunk.settle()
                self.fetches.begin_now(chunk)
                chunk.stale = False
            elif chunk.use in (Use.HOLD, Use.GRAD_READY):
                self.room.evict(chunk)
            self._overtaken.pop(index, None)

    def begin_forward(self, *, in_step: bool) -> None:
        """Nothing computes yet. ``in_step``: a backward may follow."""
        if in_step:
            self.foresight.begin()
        elif not self.foresight.in_step:
            self.foresight.others_compute()
        self.room.give_back()

    # ---- ahead of time ------------------------------------------------------------------------------------------

    def look_ahead(self) -> None:
        """Begin the fetches that come next, in their planned order, as far as there is room for them."""
        if not self.fetches.begins_ahead:
            return
        self._end_updates()
        source = self.fetches.source
        for moment, index in source.upcoming():
            chunk = self.chunks[index]
            if chunk.use is not Use.FREE or chunk.window is None:
                if source.in_order:
                    return
                continue
            # One that can only be gathered when it is read needs its room then: nothing that is read later may take it.
            if not self.fetches.can_begin(chunk) or not self.room.populate_before(moment, chunk.window):
                return
            self._begin_fetch(chunk, moment)

    def _begin_fetch(self, chunk: Chunk, moment: int) -> None:
        """Fill the populated window of a chunk ahead of its use."""
        assert chunk.window is not None
        try:
            with WHOLE:
                self.fetches.begin(chunk, moment, in_step=self.foresight.in_step)
                chunk.step(UseChange.FETCH)
                chunk.ahead = True
        except BaseException:
            if chunk.use is Use.FREE:  # and not begun, with an interrupt that waited for it
                self.room.depopulate(chunk.window, "windows")
            raise

    def _await_arrival(self, chunk: Chunk) -> None:
        """Take a fetch ahead as it is; one that failed is tried again here and now.

        Raises:
            StorageError: if that fails too; the chunk is as it was before.
        """
        if self.fetches.arrive(chunk):
            chunk.step(UseChange.ARRIVE)
            self._count_arrival(chunk)
        else:
            self._fail(chunk)
            self._fetch(chunk)

    def _call_back(self, chunk: Chunk) -> None:
        """A fetch under way is not wanted any more: its memory is free afterwards."""
        self.fetches.call_back(chunk)
        self._fail(chunk)

    def _call_last_back(self, want: Want) -> bool:
        """The last of what is fetched ahead is not wanted any more; False if there is nothing."""
        if not self.fetches.ahead:
            return False
        self._call_back(next(reversed(self.fetches.ahead.values())).of)
        return True

    def _fail(self, chunk: Chunk) -> None:
        assert chunk.window is not None
        with WHOLE:
            chunk.step(UseChange.FAIL)
            self.room.depopulate(chunk.window, "windows")

    def drain(self) -> None:
        """Wait until nothing is on its way; what failed is told when it is needed."""
        self.fetches.drain()

    def is_balanced(self) -> bool:
        """Whether the books say what there is, where nobody computes: nothing pinned, every window accounted for."""
        for chunk in self.chunks:
            arriving = (chunk.use is Use.FETCHING, chunk.arriving is not None, chunk.spec.index in self.fetches.ahead)
            if chunk.pins or chunk.use is Use.COMPUTE or len(set(arriving)) > 1:
                return False
        return self.room.is_balanced()

    def start_over(self) -> None:
        """Forget every gathered copy and what the books say of them: an interrupt came between two lines of them.

        Copies are clean, so nothing is lost but the time to gather them again. Those that are lent keep their memory.
        """
        kept = [c for c in self.chunks if c.window is not None and c.gathered and c.is_lent]
        while self._updating:
            with contextlib.suppress(Exception):  # told when the update is waited for
                self._await_reader()
        for chunk in self.chunks:
            self.fetches.start_over(chunk)
            chunk.pins, chunk.stale, chunk.ahead, chunk.grads_complete = 0, False, False, False
            chunk.use = Use.HOLD if chunk.window is None or chunk in kept else Use.FREE
            if chunk.window is not None and chunk not in kept:
                chunk.tell_gone()
                chunk.window.discard()
        self.room.start_over()
        self._overtaken.update((chunk.spec.index, chunk) for chunk in kept)

    def close(self) -> None:
        """The model ends."""
        self.fetches.close()

    # ---- inside -------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """What must be so between any two calls."""
        self.room.check_invariants()
        for chunk in self.chunks:
            assert (chunk.use is Use.COMPUTE) == (chunk.pins > 0), (chunk.name, chunk.use, chunk.pins)
            assert chunk.use is not Use.UPDATING or chunk.spec.index in self._updating, chunk.name
            assert chunk.gathered or not chunk.resident, chunk.name
            ahead = chunk.spec.index in self.fetches.ahead
            assert (chunk.use is Use.FETCHING) == (chunk.arriving is not None) == ahead

    def _fetch(self, chunk: Chunk) -> None:
        """Gather a chunk here and now: somebody waits for it."""
        assert chunk.window is not None
        chunk.settle()
        self.room.reader = chunk.spec.index
        try:
            self.room.populate(chunk.window, "windows", what=chunk.name)
        finally:
            self.room.reader = None
        try:
            if self.fetches.source.in_order:
                self.fetches.await_begun()
            self.fetches.begin_now(chunk)
        except BaseException:
            self.room.depopulate(chunk.window, "windows")
            raise
        with WHOLE:
            chunk.step(UseChange.FETCH)
            chunk.step(UseChange.ARRIVE)
            self._count_arrival(chunk)

    def _count_arrival(self, chunk: Chunk) -> None:
        self.num_gathers += 1
        self._overtaken.pop(chunk.spec.index, None)
        chunk.arrived = self._clock
        chunk.stale = False
