"""The manager: gathers chunks into windows within the budget, and takes the memory of those nobody reads.

    acquire = make room (policy) + populate + gather + pin
    release = unpin; the window stays until someone needs the room

Weights in windows are clean copies, so eviction drops them. Every byte is reserved in the ledger before it is taken:
populated windows as "windows", frames that wait for reuse as "pool". Moves are waited for here; overlap comes on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gemini.errors import BudgetExceeded, human_bytes
from gemini.memory.chunk import Chunk
from gemini.memory.device import Device, Window
from gemini.memory.foresight import Foresight
from gemini.memory.mover import Mover
from gemini.planning.plan import Moves
from gemini.planning.policy import Candidate, EvictionPolicy, NextUse
from gemini.states import Event, Use
from gemini.tiers import Ledger


class Manager:
    """Owns the windows of ``chunks``. ``on_evict`` is told of every chunk whose gathered weights went away; ``gather``
    fills a populated window, by default from the chunk's home.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        *,
        ledger: Ledger,
        device: Device,
        mover: Mover,
        on_evict: Callable[[Chunk], None],
        gather: Callable[[Chunk], None] | None = None,
        policy: EvictionPolicy | None = None,
        foresight: Foresight | None = None,
    ):
        self.chunks = chunks
        self.foresight = foresight or Foresight(lambda steps: [Moves()] * len(steps))
        self.ledger = ledger
        self.num_gathers = 0
        self.num_evictions = 0
        self._device = device
        self._gather = gather or mover.gather
        self._on_evict = on_evict
        self._policy = policy or NextUse()
        self._clock = 0

    def acquire(self, chunk: Chunk) -> None:
        """Make the gathered weights of ``chunk`` readable and keep them until the matching :meth:`release`.

        Raises:
            BudgetExceeded: if what must stay leaves no room; nothing has changed.
            StorageError: if the weights could not be read; nothing has changed.
        """
        if chunk.use is Use.FREE:
            self._fetch(chunk)
        if chunk.use is not Use.COMPUTE:
            chunk.step(Event.ACQUIRE)
            chunk.grads_complete = False
        chunk.pins += 1
        if chunk.pins == 1 and not chunk.resident:
            self.foresight.acquired(chunk.spec.index)
        self._clock += 1
        chunk.last_use = self._clock

    def release(self, chunk: Chunk) -> None:
        """Undo one :meth:`acquire`. The weights stay gathered until someone needs the room."""
        assert chunk.pins > 0, chunk.name
        chunk.pins -= 1
        if chunk.pins == 0:
            self.foresight.released(chunk.spec.index)
            chunk.step(Event.RELEASE)
            if chunk.stale:
                self.drop([chunk])
            elif chunk.grads_complete:
                chunk.step(Event.GRADS)

    def grads_complete(self, chunk: Chunk) -> None:
        """Every gradient of the chunk has arrived: once released, it is the first to go."""
        if chunk.use is Use.COMPUTE:
            chunk.grads_complete = True
        elif chunk.use is Use.HOLD:
            chunk.step(Event.GRADS)

    def drop(self, chunks: Iterable[Chunk]) -> None:
        """Forget gathered copies that an update of the weights has overtaken; at their release if they are in use."""
        for chunk in chunks:
            if chunk.resident or chunk.use is Use.FREE:
                continue
            if chunk.use is Use.COMPUTE:
                chunk.stale = True
            else:
                self._evict(chunk)

    def make_room(self, num_bytes: int, *, what: str, for_window: bool = False) -> None:
        """Free at least ``num_bytes`` of the computing tier by evicting and giving back frames; ``for_window``: a
        parked frame of just that size will do as well.

        Raises:
            BudgetExceeded: if all that may go is not enough; then nothing was evicted.
        """
        tier = self._device.tier
        if self.ledger.free(tier) >= num_bytes:
            return
        missing = num_bytes - self.ledger.free(tier) - self.ledger.held(tier, "pool")
        if missing > 0:
            evictable = [
                Candidate(
                    c.spec.index,
                    c.window.num_bytes,
                    c.last_use,
                    c.use is Use.GRAD_READY,
                    c.arrived,
                    *self.foresight.outlook(c.spec.index),
                )
                for c in self.chunks
                if c.window is not None and c.use in (Use.HOLD, Use.GRAD_READY)
            ]
            victims = self._policy.choose(evictable, missing)
            if victims is None:
                raise BudgetExceeded(self._explain(num_bytes, what))
            for index in victims:
                self._evict(self.chunks[index])
        frames = self._device.frames
        if frames is None or (for_window and frames.has(num_bytes)):
            return
        if self.ledger.free(tier) < num_bytes:
            self.ledger.release(tier, frames.trim(), "pool")

    def check_invariants(self) -> None:
        """The ledger's equations, and: windows + pool are exactly what is gathered or parked."""
        self.ledger.check_invariants()
        tier = self._device.tier
        gathered = sum(c.window.num_bytes for c in self.chunks if c.window is not None and c.gathered)
        assert self.ledger.held(tier, "windows") == gathered
        parked = self._device.frames.parked_bytes if self._device.frames is not None else 0
        assert self.ledger.held(tier, "pool") == parked
        for chunk in self.chunks:
            assert (chunk.use is Use.COMPUTE) == (chunk.pins > 0), (chunk.name, chunk.use, chunk.pins)
            assert chunk.gathered or not chunk.resident, chunk.name

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
            self.ledger.reserve(tier, window.num_bytes, holder)
        try:
            window.populate()
        except BaseException:
            if parked:
                self.ledger.pass_on(tier, window.num_bytes, holder, "pool")
            else:
                self.ledger.release(tier, window.num_bytes, holder)
            raise

    def depopulate(self, window: Window, holder: str) -> None:
        """Take the memory of a window away again."""
        if window.depopulate():
            self.ledger.pass_on(self._device.tier, window.num_bytes, holder, "pool")
        else:
            self.ledger.release(self._device.tier, window.num_bytes, holder)

    def _fetch(self, chunk: Chunk) -> None:
        assert chunk.window is not None
        self.populate(chunk.window, "windows", what=chunk.name)
        try:
            self._gather(chunk)
        except BaseException:
            self.depopulate(chunk.window, "windows")
            raise
        self.num_gathers += 1
        chunk.arrived = self._clock
        chunk.stale = False
        chunk.step(Event.FETCH)

    def _evict(self, chunk: Chunk) -> None:
        chunk.step(Event.EVICT)
        self.num_evictions += 1
        chunk.stale = False
        self._on_evict(chunk)
        assert chunk.window is not None
        self.depopulate(chunk.window, "windows")

    def _explain(self, num_bytes: int, what: str) -> str:
        tier = self._device.tier
        pinned = [c for c in self.chunks if c.window is not None and c.pins]
        held = sum(c.window.num_bytes for c in pinned if c.window is not None)
        return (
            f"{what} needs {human_bytes(num_bytes)} of {tier.value}: budget {human_bytes(self.ledger.budget(tier))}, "
            f"used {human_bytes(self.ledger.used(tier))}, of which {human_bytes(held)} are {len(pinned)} gathered "
            f"chunks in use. Raise the {tier.value} budget by {human_bytes(num_bytes - self.ledger.free(tier))}, or "
            "gather fewer params at once"
        )
