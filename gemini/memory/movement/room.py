"""Room for windows in the computing tier: every byte is in the ledger before it is taken, and what they give way for.

    populate         a window gets memory, whoever has to give way (:class:`gemini.ledger.Turn`)
    populate_before  the same for what is read at a later moment: only what is read later still goes

Populated windows are in the ledger as "windows" (or as what their holder calls itself), memory that waits for the next
window as "pool". In host memory these are frames, which go back where something else needs them. On a GPU windows have
memory of their own (``Device.keeps_windows``): all of it is in the ledger from the beginning, and what is evicted makes
room for windows only. It is got in one piece, so there may be too little of it in many pieces; and something else gets
of it only where all of it is got anew, which waits for everything.
"""

from __future__ import annotations

import gc
import time

import torch

from gemini.errors import BudgetExceeded, human_bytes
from gemini.interrupts import WHOLE
from gemini.ledger import NEEDED, OF_BUDGET, WELCOME, Ledger, Turn, Want
from gemini.memory.chunks.chunk import Chunk, Use, UseChange
from gemini.memory.devices.device import Device, Window
from gemini.memory.devices.pages import in_pages
from gemini.memory.movement.foresight import Foresight
from gemini.planning.policy import Candidate, EvictionPolicy, NextUse, victims_of

_FROM_WINDOWS = frozenset({Turn.READERS, Turn.PREFETCHES, Turn.PINS})
"""These let go of windows that are not evicted otherwise."""


class _ForWindow(Want):
    """Memory for a window: free bytes, or a parked frame of its size; or a place in memory of its own. ``moment``: of a
    fetch ahead, when it is needed; it leaves what others want soon.
    """

    def __init__(
        self, room: Room, num_bytes: int, holder: str, asking: frozenset[Turn], what: str, moment: int | None = None
    ):
        # Bytes of the budget are no use to a window with memory of its own. LESS is for others: all windows would go.
        own = asking - OF_BUDGET if room.is_apart else asking
        super().__init__(room.ledger, room.tier, num_bytes, holder, own - {Turn.LESS}, what)
        self._room, self.after = room, moment
        self.leave = 0 if moment is None else room.ledger.claimed(room.tier)
        self.is_parked = False
        """Whether it was taken from what waits for a window."""

    def missing(self) -> int:
        room, num_bytes = self._room, self.num_bytes
        if room.is_apart:
            # In a pool of their own bytes are not enough: they must be in one piece.
            place = room.missing_place(num_bytes, self.leave)
            self.is_parked = place == 0
            # With MORE free bytes of the budget count as well: the smaller lack is the one to be met.
            return min(place, super().missing()) if place and Turn.MORE in self.given else place
        self.is_parked = room.frames is not None and room.frames.has(num_bytes)
        if self.is_parked:
            return 0
        # May be negative: then so much is free beyond the window.
        missing = num_bytes - self.ledger.free(self.tier)
        # Parked frames can be given to others, so they count for what is left to them.
        if self.leave and self.leave > room.pool - missing:
            return missing + self.leave
        return max(missing, 0)

    def take(self) -> int:
        if missing := self.missing():
            return missing
        if not self.is_parked:
            return super().take()
        # Bytes of a parked frame are in the ledger already: they change their holder, and the total stays.
        self.ledger.pass_on(self.tier, self.num_bytes, "pool", self.holder)
        return 0


class Room:
    """The share that the windows of ``chunks`` have of the computing tier. The training thread's, like who asks it."""

    def __init__(
        self,
        chunks: list[Chunk],
        *,
        ledger: Ledger,
        device: Device,
        foresight: Foresight,
        policy: EvictionPolicy | None = None,
    ):
        self.chunks, self.ledger = chunks, ledger
        self.num_evictions = 0
        self.reader: int | None = None
        """The chunk that somebody waits for, while room is made for it."""
        self.tier, self.is_apart, self.frames = device.tier, device.keeps_windows, device.frames
        self._device, self._foresight, self._policy = device, foresight, policy or NextUse()
        self._growth: Want | None = None
        ledger.register_windows(self.tier, self._explain, apart=self.is_apart)
        for turn, reclaim in (
            (Turn.UNKEPT, self._evict_unkept),
            (Turn.KEPT, self._evict_kept),
            (Turn.GARBAGE, self._collect_lent),
            (Turn.TOGETHER, self._move_together),
            (Turn.MORE, self._let_have_more),
            (Turn.LESS, self._shrink),
        ):
            ledger.register(turn, reclaim, self.tier)

    # ---- what windows want --------------------------------------------------------------------------------------

    def populate(self, window: Window, holder: str, *, what: str, asking: frozenset[Turn] = NEEDED) -> None:
        """Put memory behind a window; others give way. BudgetExceeded, and no change, if what must stay is too much."""
        want = _ForWindow(self, window.num_bytes, holder, asking, what)
        if not self.ledger.obtain(want):
            raise self.ledger.refusal(want)
        # The books first, then the memory: between the two the process holds less than they say, never more.
        self._put_behind(window, want)

    def populate_before(self, moment: int, window: Window, *, leave: int = 0) -> bool:
        """Put memory behind a window ahead of its use at ``moment``, from what is needed later; False if that is not
        enough beside bytes to ``leave``. The policy chooses among what the plan lets go before, so that no more moves
        than planned.
        """
        if leave and self.ledger.free(self.tier) + self.pool < window.num_bytes + leave:
            return False
        want = _ForWindow(self, window.num_bytes, "windows", WELCOME - OF_BUDGET, "", moment)
        if not self.ledger.obtain(want):
            return False
        try:
            self._put_behind(window, want)
        except torch.OutOfMemoryError:  # less than the books say; `step()` looks ahead too, and is over by then
            return False
        return True

    def _put_behind(self, window: Window, want: _ForWindow) -> None:
        try:
            window.populate()
        except BaseException:
            # Back to where the bytes were taken from: the pool has the frame still, the budget has the rest.
            if want.is_parked:
                self.ledger.pass_on(self.tier, window.num_bytes, want.holder, "pool")
            else:
                self.ledger.release(self.tier, window.num_bytes, want.holder)
            raise

    def depopulate(self, window: Window, holder: str) -> None:
        """Take the memory of a window away again."""
        num_bytes = window.num_bytes
        # True: the frame waits for the next window. Memory of their own waits in any case.
        if window.depopulate() or self.is_apart:
            self.ledger.pass_on(self.tier, num_bytes, holder, "pool")
        else:
            self.ledger.release(self.tier, num_bytes, holder)

    def evict(self, chunk: Chunk) -> None:
        """Take the memory of gathered weights that nobody reads. They are clean copies, so nothing is written."""
        assert chunk.window is not None
        # Also between steps, where nobody looks for what an interrupt has left.
        with WHOLE:
            chunk.step(UseChange.EVICT)
            self.num_evictions += 1
            chunk.stale = chunk.ahead = False
            chunk.tell_gone()
            self.depopulate(chunk.window, "windows")

    # ---- what they give -----------------------------------------------------------------------------------------

    def _evict_unkept(self, want: Want) -> bool:
        """Evict windows that the plan fetches again anyway; with ``want.after`` only those that are read later than
        that. For another model, which computes while this one does not, any.
        """
        is_own = want.ledger is self.ledger
        return self._give(want, self._evictable(only_unkept=is_own, after=want.after if is_own else None))

    def _evict_kept(self, want: Want) -> bool:
        """Evict any window that nobody reads, those that the plan keeps too."""
        return self._give(want, self._evictable())

    def _give(self, want: Want, candidates: list[Candidate]) -> bool:
        """Memory that waits for a window, and that of enough of these windows; nothing if all are too little."""
        missing = self._missing(want)
        if want.ledger is not self.ledger:  # whose own windows are the rest
            missing = min(missing, sum(candidate.num_bytes for candidate in candidates))
        # Enough of them or none: windows that go without making the room are fetched again for nothing.
        victims = victims_of(self._policy, candidates, missing) if missing and candidates else ()
        if victims is None or (missing and not candidates):
            return False
        for index in victims:
            self.evict(self.chunks[index])
        # Victims leave frames in the pool. Those are room for a window of their size; for anything else they go back.
        trimmed = self.frames.trim() if self.frames is not None and want.missing() else 0
        # Behind the memory itself: the books may say more than there is, never less.
        self.ledger.release(self.tier, trimmed, "pool")
        return bool(trimmed or victims)

    def _collect_lent(self, want: Want) -> bool:
        """Run the garbage collector, if anything is lent: only a cycle may hold it, or a thread that ends."""
        is_any = any(chunk.is_lent for chunk in self.chunks if chunk.window is not None)
        if is_any:
            gc.collect()
            # A finalizer, or a thread that holds the view, gets the time to end.
            time.sleep(0.01)
        return is_any

    def _move_together(self, want: Want) -> bool:
        """Move the windows together: only what is read now is left, and it is in the way."""
        # Too little in all: moving makes one piece of it and not one byte more.
        if not self.is_apart or self.pool < want.num_bytes:
            return False
        self._device.move_windows_together(self._windows())
        return True

    def _let_have_more(self, want: Want) -> bool:
        """A window that finds no place gets free memory of the budget, for good; others may make that free."""
        if self.is_apart:
            # From here on bytes of the budget help, so those who hold them are asked too.
            want.asking |= OF_BUDGET
            self.grow_again()
        return self.is_apart

    def grow_again(self) -> None:
        """Have the whole working set again, if models of the same budget had a part. Nothing while some are read."""
        tier, needed = self.tier, self.ledger.needs.get(self.tier, 0)
        missing = in_pages(needed - self.ledger.of_windows(tier))
        if not (self.is_apart and self.ledger.is_shared and missing > 0 and self.evict_all()):
            return
        self._growth = Want(self.ledger, tier, missing, "pool", frozenset({Turn.LESS}))
        if self.ledger.obtain(self._growth):
            self._device.reserve_windows(self.pool)

    def _shrink(self, want: Want) -> bool:
        """Windows have what is missing less from now on."""
        # Before others are asked: what they give goes to the pool, which does not change what is missing of the budget.
        if want.ledger is self.ledger:
            return want is not self._growth and self.shrink(want.missing())
        # Another model's window may lack a place in one piece only: of the budget it lacks its size. Whole pages.
        missing = want.num_bytes - self.ledger.free(self.tier)
        # What this model has, where it is less: several may have to give a part.
        return self.shrink(min(in_pages(missing), self.ledger.of_windows(self.tier)))

    def shrink(self, num_bytes: int) -> bool:
        """Windows have that much less for good, which is free; False if some are read. All go: they are one piece."""
        could = self.is_apart and 0 < num_bytes <= self.ledger.of_windows(self.tier) and self.evict_all()
        if not could or self.pool < num_bytes:  # a window may have its bytes, and no chunk that knows it yet
            return False
        # Behind the eviction of all: this gives the old piece back to the driver.
        self._device.reserve_windows(self.pool - num_bytes)
        # Behind the driver: until then the bytes are not to be had.
        self.ledger.release(self.tier, num_bytes, "pool")
        return True

    def evict_all(self) -> bool:
        """Evict every window; False, and none goes, if one is read or lent."""
        self.ledger.reclaim_all(self.tier, _FROM_WINDOWS)
        evictable = self._evictable()
        # One window that stays would hold the old piece, and the new one would come on top of it.
        if len(evictable) < len(self._windows()):
            return False
        for candidate in evictable:
            self.evict(self.chunks[candidate.chunk])
        return True

    def give_up(self) -> None:
        """Give what is behind windows, which have all gone, back to the device; ``reserve_windows`` gets it again."""
        if self._device.frames is not None:
            self._device.frames.trim()
        self._device.reserve_windows(0)

    @property
    def pool(self) -> int:
        """Bytes that wait for a window."""
        return self.ledger.held(self.tier, "pool")

    def _missing(self, want: Want) -> int:
        """Bytes of windows that have to go for it."""
        return self.missing_place(want.num_bytes, want.leave) if self.is_apart else max(0, want.missing() - self.pool)

    def missing_place(self, num_bytes: int, leave: int = 0) -> int:
        """Bytes that have to go of the windows' own memory; 1 if there are enough, and not in one piece."""
        missing = num_bytes + leave - self.ledger.held(self.tier, "pool")
        return missing if missing > 0 else int(not self._device.has_place(num_bytes))

    def _evictable(self, *, only_unkept: bool = False, after: int | None = None) -> list[Candidate]:
        """The windows that may go, with all that the policy asks of them. ``only_unkept``: none that should stay until
        it is needed (so plans the plan, or it came for that), and with ``after`` none that is read sooner.
        """
        # COMPUTE and UPDATING are read. FETCHING is given back by its own turn, lent ones by nobody.
        there = [c for c in self.chunks if c.window is not None and c.use in (Use.HOLD, Use.GRAD_READY)]
        outlooks = self._foresight.outlooks([(c.spec.index, c.use is Use.GRAD_READY) for c in there], self.reader)
        found = []
        # Asked whenever a fetch ahead finds no room, of every window: what is cheap to ask comes first.
        for c, (next_use, is_kept) in zip(there, outlooks, strict=True):
            kept = is_kept or c.ahead
            if only_unkept and (kept or (after is not None and (next_use is None or next_use <= after))):
                continue
            if not c.is_lent and c.window is not None:
                done = c.use is Use.GRAD_READY
                found.append(Candidate(c.spec.index, c.window.num_bytes, c.last_use, done, c.arrived, next_use, kept))
        return found

    def spare(self, working_set: int) -> int:
        """Bytes of the windows' own memory beyond what they need; none where it is not their own."""
        return max(self.ledger.of_windows(self.tier) - working_set, 0) if self.is_apart else 0

    # ---- the books ----------------------------------------------------------------------------------------------

    def is_balanced(self) -> bool:
        """Whether windows and pool are exactly what is gathered or parked."""
        gathered = sum(window.num_bytes for window in self._windows())
        if self.ledger.held(self.tier, "windows") != gathered:
            return False
        return self.is_apart or self.pool == (0 if self.frames is None else self.frames.parked_bytes)

    def start_over(self) -> None:
        """Windows have what the chunks say that is gathered, and nothing else."""
        if self.frames is not None:
            # No frame is parked afterwards, so the pool is what windows on a GPU have free, or empty.
            self.frames.trim()
        tier, gathered = self.tier, sum(window.num_bytes for window in self._windows())
        # All of it to the pool, and from there what the chunks say: whatever the books had wrong is right then.
        self.ledger.pass_on(tier, self.ledger.held(tier, "windows"), "windows", "pool")
        if not self.is_apart:
            self.ledger.release(tier, self.pool, "pool")
            self.ledger.reserve(tier, gathered, "pool")
        self.ledger.pass_on(tier, gathered, "pool", "windows")

    def _windows(self) -> list[Window]:
        """The windows that have memory."""
        return [chunk.window for chunk in self.chunks if chunk.window is not None and chunk.use is not Use.FREE]

    def _explain(self, want: Want) -> BudgetExceeded:
        """The refusal of a window: what is read now, and what the program holds itself."""
        tier = self.tier
        missing = want.num_bytes - self.ledger.free(tier) if self.is_apart else want.missing()
        pinned = [c.window.num_bytes for c in self.chunks if c.window is not None and c.pins]
        lent = [c for c in self.chunks if c.window is not None and c.gathered and c.is_lent]
        of_windows = human_bytes(self.ledger.of_windows(tier))
        by_others = f"; {of_windows} are for gathered weights only" if self.is_apart else ""
        if lent:
            names = " or ".join(repr(slot.name) for slot in lent[0].spec.slots[:3])
            by_others += (
                f"; {human_bytes(sum(c.window.num_bytes for c in lent if c.window is not None))} are {len(lent)} "
                f"chunks whose weights the program still has a view of (of {names}): del it (an attribute, a list, "
                "something on ctx), or let autograd keep it (ctx.save_for_backward)"
            )
        return BudgetExceeded(
            f"{want.what} needs {human_bytes(want.num_bytes)} of {tier.value}: "
            f"budget {human_bytes(self.ledger.budget(tier))}, used {human_bytes(self.ledger.used(tier))}, of which "
            f"{human_bytes(sum(pinned))} are {len(pinned)} gathered chunks in use{by_others}. Raise the {tier.value} "
            f"budget by {human_bytes(missing)}, or gather fewer params at once"
        )
