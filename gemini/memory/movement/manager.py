"""The manager: gathers chunks into windows within the budget, and takes the memory of those nobody reads.

    acquire = make room (policy) + populate + gather + pin
    release = unpin; the window stays until someone needs the room
    evict   = make_room (something is needed), _let_go (something is welcome) or drop (the copy is overtaken)

Weights in windows are clean copies, so eviction drops them. Every byte is reserved in the ledger before it is taken:
populated windows as "windows", frames that wait for reuse as "pool". What the schedule says is needed next is gathered
ahead on a worker of its own (:mod:`gemini.memory.movement.fetches`), as far as there is room without taking the place
of what is needed sooner.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from gemini.errors import BudgetExceeded, human_bytes
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.chunks.states import Use, UseChange
from gemini.memory.devices.device import Device, Event, Window
from gemini.memory.movement.fetches import Fetches
from gemini.memory.movement.foresight import Foresight
from gemini.memory.movement.lending import Lending
from gemini.memory.movement.mover import Mover
from gemini.memory.movement.staging import StagingSet
from gemini.memory.movement.worker import Worker
from gemini.planning.plan import Moves
from gemini.planning.policy import Candidate, EvictionPolicy, NextUse
from gemini.tiers import Ledger


class Manager:
    """Owns the windows of ``chunks``.

    Args:
        worker: where fetches ahead begin, with ``worker_staging`` of its own; without one every fetch begins when it is
            needed.
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
        worker: Worker | None = None,
        worker_staging: StagingSet | None = None,
    ):
        self.chunks = chunks
        self.foresight = foresight or Foresight(lambda steps: [Moves()] * len(steps))
        self.ledger = ledger
        self.num_gathers = 0
        self.num_evictions = 0
        self.fetches = Fetches(mover, worker, worker_staging)
        self._device = device
        self._policy = policy or NextUse()
        self._clock = 0
        self._reader: int | None = None  # the chunk that somebody waits for, while room is made for it
        self._lending = Lending(ledger, device.tier, self.foresight)
        self._overtaken: dict[int, Chunk] = {}
        """Lent chunks whose content an update has overtaken."""
        self.connect()

    def connect(
        self,
        *,
        on_evict: Callable[[Chunk], None] = lambda chunk: None,
        gather: Callable[[Chunk], Event] | None = None,
        is_lent: Callable[[Chunk], bool] = lambda chunk: False,
        update_of: Callable[[Chunk], Event | None] = lambda chunk: None,
        await_update: Callable[[Chunk], None] = lambda chunk: None,
        relieve: Callable[[], bool] = lambda: False,
        unpin: Callable[[], bool] = lambda: False,
        leave: Callable[[], int] = lambda: 0,
        explain: Callable[[BudgetExceeded], BudgetExceeded] = lambda error: error,
        upcoming: Callable[[], Iterator[tuple[int, int]]] | None = None,
        follow: Callable[[], None] = lambda: None,
    ) -> None:
        """Who is told and asked from now on, before the first chunk is acquired.

        Args:
            on_evict: told of every chunk whose gathered weights went away.
            gather: starts to fill a populated window, and gives the end of that; by default from the chunk's home.
            is_lent: whether somebody else has tensors over the window of a chunk, which then stays.
            update_of: what has to be over before the home of a chunk's weights may be read; ``await_update`` waits for
                it.
            relieve: waits for something else that gives back memory of the computing tier; False if there is nothing.
            unpin: releases what is pinned for the sake of speed only; False if there is nothing.
            leave: bytes of the computing tier that fetches ahead leave to others.
            explain: what an error for lack of room says besides.
            upcoming: (moment, chunk) that are fetched ahead in just this order, and fetched anew where they are there
                already; by default what the foresight says, as far as it is not there.
            follow: called when a chunk was acquired.
        """
        self.relieve, self._on_evict, self._explain_more = relieve, on_evict, explain
        self._await_update, self._leave, self._is_lent, self._unpin = await_update, leave, is_lent, unpin
        self._upcoming, self._follow = upcoming or self.foresight.upcoming, follow
        self._in_order = upcoming is not None
        self.fetches.connect(gather, update_of, await_update, in_order=self._in_order)

    def acquire(self, chunk: Chunk) -> None:
        """Make the gathered weights of ``chunk`` readable and keep them until the matching :meth:`release`.

        Raises:
            BudgetExceeded: if what must stay leaves no room; nothing has changed.
            StorageError: if the weights could not be read; nothing has changed.
        """
        try:
            if chunk.use is Use.FREE:
                self._fetch(chunk)
            elif chunk.use is Use.FETCHING:
                self._await_arrival(chunk)
            elif chunk.spec.index in self._overtaken:
                self.refresh_lent()
        except BudgetExceeded as e:
            explained = self._explain_more(e)
            if explained is e:
                raise
            raise explained from e
        self.fetches.let_compute_wait(chunk)
        if chunk.use is not Use.COMPUTE:
            chunk.step(UseChange.ACQUIRE)
            chunk.grads_complete = False
        chunk.pins += 1
        chunk.ahead = False
        if chunk.pins == 1 and not chunk.resident:
            self.foresight.acquired(chunk.spec.index)
            self.give_back()
            self._follow()
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
            if chunk.stale:
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
            if chunk.resident or chunk.use is Use.FREE:
                continue
            if chunk.use is Use.FETCHING:
                self._call_back(chunk)
            elif chunk.use is Use.COMPUTE:
                chunk.stale = True
            elif self._is_lent(chunk):
                self._overtaken[chunk.spec.index] = chunk
            else:
                self._evict(chunk)

    def refresh_lent(self) -> None:
        """Fetch anew what an update has overtaken and others still look at: they see the new weights, as in torch."""
        while self._overtaken:
            index, chunk = next(iter(self._overtaken.items()))
            if chunk.use in (Use.HOLD, Use.GRAD_READY) and self._is_lent(chunk):
                self._await_update(chunk)
                self.fetches.begin_now(chunk)
                chunk.stale = False
            elif chunk.use in (Use.HOLD, Use.GRAD_READY):
                self._evict(chunk)
            self._overtaken.pop(index, None)

    def make_room(self, num_bytes: int, *, what: str, for_window: bool = False) -> None:
        """Free at least ``num_bytes`` of the computing tier by evicting and giving back frames; ``for_window``: in one
        piece where windows need one, and a parked frame of just that size will do as well.

        Raises:
            BudgetExceeded: if all that may go is not enough; then nothing was evicted.
        """
        collected, window = False, num_bytes if for_window else 0
        num_bytes -= min(num_bytes, self._lending.room()) if for_window else 0
        if self.ledger.free(self._device.tier) >= num_bytes and self._has_place(window):
            return
        while missing := self._missing(num_bytes, window):
            evictable = self._evictable()
            victims = self._policy.choose([c for c in evictable if not c.kept], missing)
            if victims is None and self.relieve():
                continue
            if victims is None:  # what the plan keeps goes only where there is nothing else
                victims = self._policy.choose(evictable, missing)
            if victims is not None:
                for index in victims:
                    self._evict(self.chunks[index])
            elif self.fetches.ahead:  # what came ahead of its time gives way to what is needed now
                self._call_back(next(reversed(self.fetches.ahead.values())))
            elif self._unpin():
                continue
            elif not collected and any(self._is_lent(chunk) for chunk in self.chunks if chunk.window is not None):
                collected = True
                gc.collect()  # what was lent may only wait for it, or for a thread to end
                time.sleep(0.01)
            elif self._missing(num_bytes) == 0:  # only what is read now is left, and it is in the way
                there = [c.window for c in self.chunks if c.window is not None and c.gathered]
                self._device.move_windows_together(there)
                break
            elif missing <= self._missing(num_bytes, window):
                raise BudgetExceeded(self._explain(num_bytes, what))  # and nothing came free while it was asked
        self._trim_pool(num_bytes, for_window=for_window)

    def _missing(self, num_bytes: int, window: int = 0) -> int:
        """Bytes that have to go before so many are free or parked; 1 if a window of ``window`` bytes has no place."""
        tier = self._device.tier
        missing = max(0, num_bytes - self.ledger.free(tier) - self.ledger.held(tier, "pool"))
        return missing or int(not self._has_place(window))

    def _has_place(self, window: int) -> bool:
        return window == 0 or self._device.has_place(window)

    def begin_forward(self, *, in_step: bool) -> None:
        """Nothing computes yet. ``in_step``: a backward may follow."""
        if in_step:
            self.foresight.begin()
        elif not self.foresight.in_step:
            self.foresight.others_compute()
        self.give_back()

    def give_back(self) -> None:
        """Activations take more from here on: what windows have borrowed beyond what is left to them goes back.

        Raises:
            BudgetExceeded: if what must stay is in the way.
        """
        while excess := self._lending.excess:
            self._trim_pool(excess, for_window=False)
            if self._lending.return_free():
                continue
            evictable = self._evictable()
            victims = self._policy.choose([c for c in evictable if not c.kept], excess)
            victims = victims or self._policy.choose(evictable, excess)
            if victims:
                for index in victims:
                    self._evict(self.chunks[index])
            elif self.fetches.ahead:
                self._call_back(next(reversed(self.fetches.ahead.values())))
            elif not self.relieve() and not self._unpin():
                raise BudgetExceeded(self._explain(excess, "the room for activations, which windows had for a while,"))

    def _evictable(self) -> list[Candidate]:
        return [
            Candidate(
                c.spec.index,
                c.window.num_bytes,
                c.last_use,
                c.use is Use.GRAD_READY,
                c.arrived,
                *self._outlook(c),
            )
            for c in self.chunks
            if c.window is not None and c.use in (Use.HOLD, Use.GRAD_READY) and not self._is_lent(c)
        ]

    def _outlook(self, chunk: Chunk) -> tuple[int | None, bool]:
        """When it is needed next, and whether it should stay until then: so plans the plan, or it came for that use."""
        done = chunk.use is Use.GRAD_READY
        next_use, kept = self.foresight.outlook(chunk.spec.index, done=done, reader=self._reader)
        return next_use, kept or chunk.ahead

    def _trim_pool(self, num_bytes: int, *, for_window: bool) -> None:
        tier, frames = self._device.tier, self._device.frames
        if frames is None or (for_window and frames.has(num_bytes)):
            return
        if self.ledger.free(tier) < num_bytes:
            self.ledger.release(tier, frames.trim(), "pool")

    # ---- ahead of time ------------------------------------------------------------------------------------------

    def look_ahead(self) -> None:
        """Begin the fetches that come next, in their planned order, as far as there is room for them."""
        if self.fetches.worker is None:
            return
        for moment, index in self._upcoming():
            chunk = self.chunks[index]
            if chunk.use is not Use.FREE or chunk.window is None:
                if self._in_order:
                    return
                continue
            # One that can only be gathered when it is read needs its room then: nothing that is read later may take it.
            if not self.fetches.can_begin(chunk) or not self._make_room_before(moment, chunk.window.num_bytes):
                return
            self._begin_fetch(chunk, moment)

    def _make_room_before(self, moment: int, num_bytes: int) -> bool:
        """Free room for a window that is read at ``moment`` from what is needed later; False if that is not enough.

        The policy chooses among what the plan lets go before that moment, so that no more moves than planned.
        """
        frames, wanted = self._device.frames, max(0, num_bytes + self._leave() - self._lending.room(moment))
        if frames is not None and frames.has(num_bytes):
            return True
        if self.ledger.free(self._device.tier) >= wanted and self._has_place(num_bytes):
            return True
        has_room = self._let_go(wanted, lambda next_use: next_use > moment, window=num_bytes)
        if has_room:
            self._trim_pool(num_bytes, for_window=True)
        return has_room

    def spare_room(self, num_bytes: int) -> bool:
        """Free room for what is welcome and not needed, from what the plan fetches again anyway; False if it cannot."""
        has_room = self._let_go(num_bytes, lambda next_use: True)
        if has_room:
            self._trim_pool(num_bytes, for_window=False)
        return has_room

    def _let_go(self, num_bytes: int, may_go: Callable[[int], bool], window: int = 0) -> bool:
        """Evict what the plan lets go before its next use, until so much is free or parked, or a window of ``window``
        bytes has a place; nothing if there are too few bytes.
        """
        while missing := self._missing(num_bytes, window):
            evictable = self._evictable()
            candidates = [c for c in evictable if c.next_use is not None and may_go(c.next_use) and not c.kept]
            victims = self._policy.choose(candidates, missing)
            if victims is None:
                return False
            for index in victims:
                self._evict(self.chunks[index])
        return True

    def _begin_fetch(self, chunk: Chunk, moment: int) -> None:
        """Fill the window of a chunk ahead of its use."""
        assert chunk.window is not None
        self.populate(chunk.window, "windows", what=chunk.name)
        try:
            self.fetches.begin(chunk, moment, in_step=self.foresight.in_step)
        except BaseException:
            self.depopulate(chunk.window, "windows")
            raise
        chunk.step(UseChange.FETCH)
        chunk.ahead = True

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

    def _fail(self, chunk: Chunk) -> None:
        assert chunk.window is not None
        chunk.step(UseChange.FAIL)
        self.depopulate(chunk.window, "windows")

    def drain(self) -> None:
        """Wait until nothing is on its way; what failed is told when it is needed."""
        self.fetches.drain()

    def is_balanced(self) -> bool:
        """Whether the books say what there is, where nobody computes: nothing pinned, every window accounted for."""
        tier, frames = self._device.tier, self._device.frames
        gathered = 0
        for chunk in self.chunks:
            arriving = (chunk.use is Use.FETCHING, chunk.arriving is not None, chunk.spec.index in self.fetches.ahead)
            if chunk.pins or chunk.use is Use.COMPUTE or len(set(arriving)) > 1:
                return False
            if chunk.window is not None and chunk.use is not Use.FREE:
                gathered += chunk.window.num_bytes
        parked = 0 if frames is None else frames.parked_bytes
        return self.ledger.held(tier, "windows") == gathered and self.ledger.held(tier, "pool") == parked

    def start_over(self) -> None:
        """Forget every gathered copy and what the books say of them: an interrupt came between two lines of them.

        Copies are clean, so nothing is lost but the time to gather them again. Those that are lent keep their memory.
        """
        kept = [c for c in self.chunks if c.window is not None and c.gathered and self._is_lent(c)]
        for chunk in self.chunks:
            self.fetches.start_over(chunk)
            chunk.pins, chunk.stale, chunk.ahead, chunk.grads_complete = 0, False, False, False
            chunk.use = Use.HOLD if chunk.window is None or chunk in kept else Use.FREE
            if chunk.window is not None and chunk not in kept:
                self._on_evict(chunk)
                chunk.window.discard()
        if self._device.frames is not None:
            self._device.frames.trim()
        self._lending.start_over("windows")
        for holder in ("windows", "pool"):
            self.ledger.release(self._device.tier, self.ledger.held(self._device.tier, holder), holder)
        for chunk in kept:
            assert chunk.window is not None
            self.ledger.reserve(self._device.tier, chunk.window.num_bytes, "windows")
            self._overtaken[chunk.spec.index] = chunk

    def close(self) -> None:
        """The model ends."""
        self.fetches.close()

    # ---- inside -------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """The ledger's equations, and: windows + pool are exactly what is gathered or parked, for the allocator too."""
        self.ledger.check_invariants()
        tier = self._device.tier
        windows = [c.window for c in self.chunks if c.window is not None and c.use is not Use.FREE]
        gathered = sum(window.num_bytes for window in windows)
        assert self.ledger.held(tier, "windows") == gathered
        behind = self._device.bytes_behind(window.bytes for window in windows)
        assert behind in (None, gathered), f"{gathered} bytes of windows are {behind} bytes of the allocator's"
        parked = self._device.frames.parked_bytes if self._device.frames is not None else 0
        assert self.ledger.held(tier, "pool") == parked
        for chunk in self.chunks:
            assert (chunk.use is Use.COMPUTE) == (chunk.pins > 0), (chunk.name, chunk.use, chunk.pins)
            assert chunk.gathered or not chunk.resident, chunk.name
            ahead = chunk.spec.index in self.fetches.ahead
            assert (chunk.use is Use.FETCHING) == (chunk.arriving is not None) == ahead

    def populate(self, window: Window, holder: str, *, what: str) -> None:
        """Put memory behind a window, for ``holder``; others give way to it.

        Raises:
            BudgetExceeded: if what must stay leaves no room; nothing has changed.
        """
        tier, frames = self._device.tier, self._device.frames
        if frames is None or not frames.has(window.num_bytes):
            self.make_room(window.num_bytes, what=what, for_window=True)
        parked = frames is not None and frames.has(window.num_bytes)
        if parked:
            self.ledger.pass_on(tier, window.num_bytes, "pool", holder)
        else:
            self._lending.take(window.num_bytes, holder)
        try:
            window.populate()
        except BaseException:
            if parked:
                self.ledger.pass_on(tier, window.num_bytes, holder, "pool")
            else:
                self._lending.let_have(window.num_bytes, holder)
            raise

    def depopulate(self, window: Window, holder: str) -> None:
        """Take the memory of a window away again."""
        if window.depopulate():
            self.ledger.pass_on(self._device.tier, window.num_bytes, holder, "pool")
        else:
            self._lending.let_have(window.num_bytes, holder)

    def _fetch(self, chunk: Chunk) -> None:
        """Gather a chunk here and now: somebody waits for it."""
        assert chunk.window is not None
        self._await_update(chunk)
        self._reader = chunk.spec.index
        try:
            self.populate(chunk.window, "windows", what=chunk.name)
        finally:
            self._reader = None
        try:
            if self._in_order:
                self.fetches.await_begun()
            self.fetches.begin_now(chunk)
        except BaseException:
            self.depopulate(chunk.window, "windows")
            raise
        chunk.step(UseChange.FETCH)
        chunk.step(UseChange.ARRIVE)
        self._count_arrival(chunk)

    def _count_arrival(self, chunk: Chunk) -> None:
        self.num_gathers += 1
        chunk.arrived = self._clock
        chunk.stale = False

    def _evict(self, chunk: Chunk) -> None:
        chunk.step(UseChange.EVICT)
        self.num_evictions += 1
        chunk.stale = chunk.ahead = False
        self._overtaken.pop(chunk.spec.index, None)
        self._on_evict(chunk)
        assert chunk.window is not None
        self.depopulate(chunk.window, "windows")

    def _explain(self, num_bytes: int, what: str) -> str:
        tier = self._device.tier
        pinned = [c for c in self.chunks if c.window is not None and c.pins]
        held = sum(c.window.num_bytes for c in pinned if c.window is not None)
        lent = [c for c in self.chunks if c.window is not None and c.gathered and self._is_lent(c)]
        by_others = ""
        if lent:
            names = " or ".join(repr(slot.name) for slot in lent[0].spec.slots[:3])
            by_others = (
                f"; {human_bytes(sum(c.window.num_bytes for c in lent if c.window is not None))} are {len(lent)} "
                f"chunks whose weights the program still has a view of (of {names}): del it (an attribute, a list, "
                "something on ctx), or let autograd keep it (ctx.save_for_backward)"
            )
        return (
            f"{what} needs {human_bytes(num_bytes)} of {tier.value}: budget {human_bytes(self.ledger.budget(tier))}, "
            f"used {human_bytes(self.ledger.used(tier))}, of which {human_bytes(held)} are {len(pinned)} gathered "
            f"chunks in use{by_others}. Raise the {tier.value} budget by "
            f"{human_bytes(num_bytes - self.ledger.free(tier))}, or gather fewer params at once"
        )
