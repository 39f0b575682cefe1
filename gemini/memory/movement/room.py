"""Room for windows in the computing tier: every byte is in the ledger before it is taken, and who gives way to whom.

    populate     a window gets memory: what nobody reads now goes, frames of other sizes go back
    make         the same for what is no window
    spare        room for what is welcome and not needed: only what is fetched again anyway goes
    make_before  for what is read at a later moment: only what is read later still goes

Populated windows are in the ledger as "windows" (or as what their holder calls itself), frames that wait for reuse as
"pool". Windows may need memory in one piece, so there may be too little of it in many pieces, too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from gemini.errors import BudgetExceeded, human_bytes
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.chunks.states import Use
from gemini.memory.devices.device import Device, Window
from gemini.memory.movement.foresight import Foresight
from gemini.memory.movement.lending import Lending
from gemini.planning.policy import Candidate, EvictionPolicy, NextUse
from gemini.tiers import Ledger


class Room:
    """What the windows of ``chunks`` have of the computing tier.

    Args:
        evict: takes the memory of a gathered chunk that nobody reads.
        call_back: ends the last of the fetches ahead, and takes its memory; False if there is none.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        *,
        ledger: Ledger,
        device: Device,
        foresight: Foresight,
        evict: Callable[[Chunk], None],
        call_back: Callable[[], bool],
        policy: EvictionPolicy | None = None,
    ):
        self.chunks, self.ledger = chunks, ledger
        self.reader: int | None = None
        """The chunk that somebody waits for, while room is made for it."""
        self._device, self._foresight, self._policy = device, foresight, policy or NextUse()
        self._evict, self._call_back = evict, call_back
        self._lending = Lending(ledger, device.tier, foresight)
        self.connect()

    def connect(
        self,
        *,
        is_lent: Callable[[Chunk], bool] = lambda chunk: False,
        relieve: Callable[[], bool] = lambda: False,
        unpin: Callable[[], bool] = lambda: False,
        leave: Callable[[], int] = lambda: 0,
    ) -> None:
        """Who is asked: see :meth:`gemini.memory.movement.manager.Manager.connect`."""
        self.is_lent, self.relieve, self._unpin, self._leave = is_lent, relieve, unpin, leave

    def populate(self, window: Window, holder: str, *, what: str) -> None:
        """Put memory behind a window, for ``holder``; others give way to it.

        Raises:
            BudgetExceeded: if what must stay leaves no room; nothing has changed.
        """
        tier, frames = self._device.tier, self._device.frames
        if frames is None or not frames.has(window.num_bytes):
            self.make(window.num_bytes, what=what, for_window=True)
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

    def make(self, num_bytes: int, *, what: str, for_window: bool = False) -> None:
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
            elif self._call_back():  # what came ahead of its time gives way to what is needed now
                continue
            elif self._unpin():
                continue
            elif not collected and any(self.is_lent(chunk) for chunk in self.chunks if chunk.window is not None):
                collected = True
                gc.collect()  # what was lent may only wait for it, or for a thread to end
                time.sleep(0.01)
            elif self._missing(num_bytes) == 0:  # only what is read now is left, and it is in the way
                self._device.move_windows_together(self._windows())
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
            elif not (self._call_back() or self.relieve() or self._unpin()):
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
            if c.window is not None and c.use in (Use.HOLD, Use.GRAD_READY) and not self.is_lent(c)
        ]

    def _outlook(self, chunk: Chunk) -> tuple[int | None, bool]:
        """When it is needed next, and whether it should stay until then: so plans the plan, or it came for that use."""
        done = chunk.use is Use.GRAD_READY
        next_use, kept = self._foresight.outlook(chunk.spec.index, done=done, reader=self.reader)
        return next_use, kept or chunk.ahead

    def _trim_pool(self, num_bytes: int, *, for_window: bool) -> None:
        tier, frames = self._device.tier, self._device.frames
        if frames is None or (for_window and frames.has(num_bytes)):
            return
        if self.ledger.free(tier) < num_bytes:
            self.ledger.release(tier, frames.trim(), "pool")

    def make_before(self, moment: int, num_bytes: int) -> bool:
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

    def spare(self, num_bytes: int) -> bool:
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

    # ---- the books ----------------------------------------------------------------------------------------------

    def is_balanced(self) -> bool:
        """Whether windows and pool are exactly what is gathered or parked."""
        tier, frames = self._device.tier, self._device.frames
        gathered = sum(window.num_bytes for window in self._windows())
        parked = 0 if frames is None else frames.parked_bytes
        return self.ledger.held(tier, "windows") == gathered and self.ledger.held(tier, "pool") == parked

    def check_invariants(self) -> None:
        """The ledger's equations, and those of :meth:`is_balanced`, for the allocator too."""
        self.ledger.check_invariants()
        assert self.is_balanced()
        windows = self._windows()
        gathered = sum(window.num_bytes for window in windows)
        behind = self._device.bytes_behind(window.bytes for window in windows)
        assert behind in (None, gathered), f"{gathered} bytes of windows are {behind} bytes of the allocator's"

    def start_over(self) -> None:
        """Windows have what the chunks say that is gathered, and nothing else; no frame is parked."""
        if self._device.frames is not None:
            self._device.frames.trim()
        self._lending.start_over("windows")
        for holder in ("windows", "pool"):
            self.ledger.release(self._device.tier, self.ledger.held(self._device.tier, holder), holder)
        self.ledger.reserve(self._device.tier, sum(window.num_bytes for window in self._windows()), "windows")

    def _windows(self) -> list[Window]:
        """Those that have memory."""
        return [chunk.window for chunk in self.chunks if chunk.window is not None and chunk.use is not Use.FREE]

    def _explain(self, num_bytes: int, what: str) -> str:
        tier = self._device.tier
        pinned = [c for c in self.chunks if c.window is not None and c.pins]
        held = sum(c.window.num_bytes for c in pinned if c.window is not None)
        lent = [c for c in self.chunks if c.window is not None and c.gathered and self.is_lent(c)]
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
