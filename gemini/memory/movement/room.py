"""Room for windows in the computing tier: every byte is in the ledger before it is taken, and who gives way to whom.

    populate     a window gets memory: what nobody reads now goes, frames of other sizes go back
    make         the same for what is no window
    spare        room for what is welcome and not needed: only what is fetched again anyway goes
    make_before  for what is read at a later moment: only what is read later still goes

Populated windows are in the ledger as "windows" (or as what their holder calls itself), memory that waits for the next
window as "pool". In host memory these are frames, which go back where something else needs them. On a GPU windows have
memory of their own (``Device.keeps_windows``): all of it is in the ledger from the beginning, and what is evicted makes
room for windows only. It is got in one piece, so there may be too little of it in many pieces; and something else gets
of it only where all of it is got anew, which waits for everything.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial

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
        await_reader: Callable[[], bool] = lambda: False,
    ) -> None:
        """Who is asked: see :meth:`gemini.memory.movement.manager.Manager.connect`. ``await_reader``: waits for an
        update that reads a window, which goes then; False if there is none.
        """
        self.is_lent, self.relieve, self._unpin, self._leave = is_lent, relieve, unpin, leave
        self._await_reader = await_reader

    def populate(self, window: Window, holder: str, *, what: str) -> None:
        """Put memory behind a window, for ``holder``; others give way to it.

        Raises:
            BudgetExceeded: if what must stay leaves no room; nothing has changed.
        """
        tier = self._device.tier
        if not self._is_parked(window.num_bytes):
            self.make(window.num_bytes, what=what, for_window=True)
        parked = self._is_parked(window.num_bytes)
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
        if window.depopulate() or self._device.keeps_windows:
            self.ledger.pass_on(self._device.tier, window.num_bytes, holder, "pool")
        else:
            self._lending.let_have(window.num_bytes, holder)

    def make(self, num_bytes: int, *, what: str, for_window: bool = False) -> None:
        """Free at least ``num_bytes`` of the computing tier by evicting and giving back frames; ``for_window``: where a
        window can have it, and a parked frame of just that size will do as well.

        Raises:
            BudgetExceeded: if all that may go is not enough; then nothing was evicted.
        """
        if self._device.keeps_windows and for_window:
            self._make_place(num_bytes, what)
        elif self._device.keeps_windows:
            self._await_free(num_bytes, what, may_shrink=True)
        else:
            self._make_free(num_bytes, what, for_window=for_window)

    def _make_free(self, num_bytes: int, what: str, *, for_window: bool) -> None:
        """Where windows take what is free, and give it back."""
        collected = False
        num_bytes -= min(num_bytes, self._lending.room()) if for_window else 0
        if self.ledger.free(self._device.tier) >= num_bytes:
            return
        while missing := self._missing(num_bytes):
            if self._gives_way(missing, self.relieve):
                continue
            if not collected and self._collect_lent():
                collected = True
            elif missing <= self._missing(num_bytes):  # and nothing came free while it was asked
                raise BudgetExceeded(self._explain(num_bytes, what, num_bytes - self.ledger.free(self._device.tier)))
        self._trim_pool(num_bytes, for_window=for_window)

    def _make_place(self, num_bytes: int, what: str) -> None:
        """In the memory that windows have for themselves; at last they get some more, for good."""
        collected = moved = False
        while missing := self._missing_place(num_bytes):
            if self._gives_way(missing):
                continue
            if not collected and self._collect_lent():
                collected = True
            elif not moved and self._pool >= num_bytes:  # only what is read now is left, and it is in the way
                self._device.move_windows_together(self._windows())
                moved = True
            elif missing <= self._missing_place(num_bytes):
                self._await_free(num_bytes, what)
                return

    def _await_free(self, num_bytes: int, what: str, *, may_shrink: bool = False) -> None:
        """Wait until so much is free of what windows do not have. ``may_shrink``: at last they get less, for good."""
        while (missing := num_bytes - self.ledger.free(self._device.tier)) > 0:
            if self.relieve() or num_bytes - self.ledger.free(self._device.tier) < missing:
                continue
            if not (may_shrink and self._shrink(missing)):
                raise BudgetExceeded(self._explain(num_bytes, what, missing))

    def _shrink(self, num_bytes: int) -> bool:
        """Take so many bytes from windows for good; False if some are read. All of them go: their memory is one piece,
        and a shorter one is got in its place.
        """
        while self._await_reader() or self._call_back() or self._unpin():
            pass
        evictable = self._evictable()
        has = self._pool + sum(candidate.num_bytes for candidate in evictable)
        if len(evictable) < len(self._windows()) or has < num_bytes:
            return False
        for candidate in evictable:
            self._evict(self.chunks[candidate.chunk])
        self._device.reserve_windows(self._pool - num_bytes)
        self.ledger.release(self._device.tier, num_bytes, "pool")
        return True

    def _gives_way(self, missing: int, relieve: Callable[[], bool] = lambda: False) -> bool:
        """Evict for so many bytes, or have something else give way; False if nothing can. ``relieve`` is tried before
        what the plan keeps, which goes only where there is nothing else.
        """
        evictable = self._evictable()
        victims = self._policy.choose([c for c in evictable if not c.kept], missing)
        if victims is None and (self._await_reader() or relieve()):
            return True
        victims = victims or self._policy.choose(evictable, missing)
        for index in victims or ():
            self._evict(self.chunks[index])
        return bool(victims) or self._call_back() or self._unpin()  # at last what came ahead of its time, or for speed

    def _collect_lent(self) -> bool:
        """What was lent may only wait for the garbage collector, or for a thread to end. False if nothing is."""
        is_any = any(self.is_lent(chunk) for chunk in self.chunks if chunk.window is not None)
        if is_any:
            gc.collect()
            time.sleep(0.01)
        return is_any

    @property
    def _pool(self) -> int:
        return self.ledger.held(self._device.tier, "pool")

    def _missing(self, num_bytes: int) -> int:
        """Bytes that have to go before so many are free or parked."""
        return max(0, num_bytes - self.ledger.free(self._device.tier) - self._pool)

    def _missing_place(self, num_bytes: int, leave: int = 0) -> int:
        """Of the windows' own memory, bytes that have to go before so many are there, and ``leave``; 1 if they are, and
        not in one piece.
        """
        return max(0, num_bytes + leave - self._pool) or int(not self._device.has_place(num_bytes))

    def _is_parked(self, num_bytes: int) -> bool:
        """Whether memory for a window of that size waits for it."""
        if self._device.keeps_windows:
            return self._missing_place(num_bytes) == 0
        return self._device.frames is not None and self._device.frames.has(num_bytes)

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
            elif not (self._await_reader() or self._call_back() or self.relieve() or self._unpin()):
                what = "the room for activations, which windows had for a while,"
                raise BudgetExceeded(self._explain(excess, what, excess))

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
        frames, leave = self._device.frames, self._leave()
        if self._device.keeps_windows:
            return self._let_go(partial(self._missing_place, num_bytes, leave), lambda next_use: next_use > moment)
        wanted = max(0, num_bytes + leave - self._lending.room(moment))
        if (frames is not None and frames.has(num_bytes)) or self.ledger.free(self._device.tier) >= wanted:
            return True
        has_room = self._let_go(partial(self._missing, wanted), lambda next_use: next_use > moment)
        if has_room:
            self._trim_pool(num_bytes, for_window=True)
        return has_room

    def spare(self, num_bytes: int) -> bool:
        """Free room for what is welcome and not needed, from what the plan fetches again anyway; False if it cannot."""
        if self._device.keeps_windows:
            return self.ledger.free(self._device.tier) >= num_bytes
        has_room = self._let_go(partial(self._missing, num_bytes), lambda next_use: True)
        if has_room:
            self._trim_pool(num_bytes, for_window=False)
        return has_room

    def _let_go(self, missing: Callable[[], int], may_go: Callable[[int], bool]) -> bool:
        """Evict what the plan lets go before its next use, until nothing is missing; nothing if that is too little."""
        while now := missing():
            evictable = self._evictable()
            candidates = [c for c in evictable if c.next_use is not None and may_go(c.next_use) and not c.kept]
            victims = self._policy.choose(candidates, now)
            if victims is None:
                return False
            for index in victims:
                self._evict(self.chunks[index])
        return True

    def left_beside(self, working_set: int) -> int:
        """Bytes that something else can have for good, where windows need ``working_set``."""
        tier = self._device.tier
        return self.ledger.free(tier) + self.ledger.held(tier, "windows") + self._pool - working_set

    # ---- the books ----------------------------------------------------------------------------------------------

    def is_balanced(self) -> bool:
        """Whether windows and pool are exactly what is gathered or parked."""
        gathered = sum(window.num_bytes for window in self._windows())
        if self.ledger.held(self._device.tier, "windows") != gathered:
            return False
        frames = self._device.frames
        return self._device.keeps_windows or self._pool == (0 if frames is None else frames.parked_bytes)

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
        tier, gathered = self._device.tier, sum(window.num_bytes for window in self._windows())
        self.ledger.pass_on(tier, self.ledger.held(tier, "windows"), "windows", "pool")
        if not self._device.keeps_windows:
            self.ledger.release(tier, self._pool, "pool")
            self.ledger.reserve(tier, gathered, "pool")
        self.ledger.pass_on(tier, gathered, "pool", "windows")

    def _windows(self) -> list[Window]:
        """Those that have memory."""
        return [chunk.window for chunk in self.chunks if chunk.window is not None and chunk.use is not Use.FREE]

    def _explain(self, num_bytes: int, what: str, missing: int) -> str:
        tier = self._device.tier
        pinned = [c for c in self.chunks if c.window is not None and c.pins]
        held = sum(c.window.num_bytes for c in pinned if c.window is not None)
        lent = [c for c in self.chunks if c.window is not None and c.gathered and self.is_lent(c)]
        by_others = ""
        if self._device.keeps_windows:
            of_windows = self._pool + self.ledger.held(tier, "windows")
            by_others = f"; {human_bytes(of_windows)} are for gathered weights only"
        if lent:
            names = " or ".join(repr(slot.name) for slot in lent[0].spec.slots[:3])
            by_others += (
                f"; {human_bytes(sum(c.window.num_bytes for c in lent if c.window is not None))} are {len(lent)} "
                f"chunks whose weights the program still has a view of (of {names}): del it (an attribute, a list, "
                "something on ctx), or let autograd keep it (ctx.save_for_backward)"
            )
        return (
            f"{what} needs {human_bytes(num_bytes)} of {tier.value}: budget {human_bytes(self.ledger.budget(tier))}, "
            f"used {human_bytes(self.ledger.used(tier))}, of which {human_bytes(held)} are {len(pinned)} gathered "
            f"chunks in use{by_others}. Raise the {tier.value} budget by "
            f"{human_bytes(missing)}, or gather fewer params at once"
        )
