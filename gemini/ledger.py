"""Who holds how many bytes of each tier now: the ledger. It is asked *before* anything is allocated, refuses what does
not fit, and gives everything back. It knows no torch and moves no bytes.

    used = sum over holders of held bytes <= budget,   peak = the largest used so far            (checked, not hoped)

Where a request does not fit, those who hold what others may need more are asked for it, one at a time in the order of
:class:`Turn`, until it fits or nobody has anything to give. Parts register for their turn, once, when they are made.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from gemini.errors import BudgetExceeded, human_bytes
from gemini.tiers import Tier
from gemini.waiting import on_worker

if TYPE_CHECKING:
    from gemini.sharing import Pool


class Turn(IntEnum):
    """A place in the order in which others give way when memory is short, what costs least first."""

    BUFFERS = 0  # parked buffers of activations in flight: given to activations only, others get them with FLIGHTS
    UNKEPT = 1  # windows that the plan fetches again anyway, and memory that waits for the next window
    READERS = 2  # windows that an update reads: it is waited for
    FLIGHTS = 3  # activations on their way: ahead of their use called back, behind it waited for
    UPDATES = 4  # updates that hold gradients: waited for
    GUESSES = 5  # updates that may be undone: undone
    LANDINGS = 6  # gradients on their way home: waited for, by the device alone unless a thread lands them
    KEPT = 7  # windows that the plan keeps
    PREFETCHES = 8  # fetches ahead, the last one first: called back
    PINS = 9  # windows that only the rest of a backward keeps
    GARBAGE = 10  # windows that nothing but a cycle of references may look into: once
    TOGETHER = 11  # windows that are read now, in the way of one piece of memory: moved together, once
    MORE = 12  # a window may have what is free in the budget, for good, where windows have memory of their own: once
    LESS = 13  # all windows go, and come back with less memory of their own, for good
    SUMS = 14  # whole gradients that are added up with other ranks before they are complete: for their own kind only


NOBODY: frozenset[Turn] = frozenset()
NEEDED = frozenset(Turn) - {Turn.BUFFERS, Turn.SUMS}
"""Asked for what a step cannot do without."""
WELCOME = frozenset({Turn.UNKEPT, Turn.GUESSES})
"""Asked for what only saves time: what would have gone anyway, and what was begun to save time as well."""

OF_BUDGET = frozenset({Turn.FLIGHTS, Turn.UPDATES, Turn.GUESSES, Turn.LANDINGS})
"""These give back what anything may have; waiting for them is the only cost."""
OF_WINDOWS = NEEDED - OF_BUDGET - {Turn.LESS}
"""These give what windows have, which only windows can use where it is their own."""
_ONCE = frozenset({Turn.GARBAGE, Turn.TOGETHER, Turn.MORE})
_OWN = _ONCE | {Turn.BUFFERS, Turn.SUMS}
"""What is of use to the model alone whose part it is."""


class Want:
    """Bytes of a tier that are not free. ``asking``: whose turn it may be; ``what``: what for, to say in a refusal."""

    def __init__(
        self, ledger: Ledger, tier: Tier, num_bytes: int, holder: str, asking: frozenset[Turn], what: str = ""
    ):
        self.ledger, self.tier, self.num_bytes, self.holder = ledger, tier, num_bytes, holder
        self.asking, self.what = asking, what
        # What is only welcome takes no window of which nobody knows when it is read next.
        # A moment of the step: only windows that are read later than it may go. -1 are all whose next use is known.
        self.after: int | None = None if Turn.KEPT in asking else -1
        self.leave = 0  # bytes that stay free for others, who have claimed them
        self.given: set[Turn] = set()  # turns of `_ONCE` that gave, and are not asked again
        self.asks_others = True  # other models of the same budget too
        self.found_busy = False  # one of them, in which another thread is at work

    def missing(self) -> int:
        """Bytes that must come free before :meth:`take` can succeed."""
        return max(0, self.num_bytes - self.ledger.free(self.tier))

    def take(self) -> int:
        """Reserve it, if it fits now: 0 then, else the bytes that must come free before. Without a holder nobody takes
        it yet, and another thread may have the bytes before whoever asked.
        """
        if not self.holder:
            return self.missing()
        return 0 if self.ledger.take(self.tier, self.num_bytes, self.holder) else self.missing() or 1


Reclaimer = Callable[[Want], bool]
"""Gives some memory back for a want, as much as is missing if it can. False if it gave nothing."""


@dataclass
class _Account:
    """The books of one tier, in bytes. Changed under the lock of its ledger."""

    budget: int
    used: int = 0
    peak: int = 0
    held: dict[str, int] = field(default_factory=dict)
    """By holder."""


class Ledger:
    """The books of who holds how many bytes of each tier. Thread-safe; every method is all or nothing, to Ctrl-C too:
    the books change in one statement that calls nothing, and Python looks for signals after calls.

    Reclaimers wait for workers, so workers are given what is free and ask nobody. They change the books of others, so
    whoever else asks is the thread that trains, or must not run beside it. ``pool``: of the models with which this one
    shares its budget; their parts are asked too.
    """

    def __init__(self, budgets: dict[Tier, int], pool: Pool | None = None):
        self._accounts = {tier: _Account(budget) for tier, budget in budgets.items()}
        # An RLock: the garbage collector may end the model inside of `on_change` or `holders`, which gives memory back
        # in this thread. Between what `take` reads and what it writes nothing is allocated that the collector counts.
        self._lock = threading.RLock() if pool is None else pool.lock
        self.on_change: Callable[[Tier, Mapping[str, int]], None] | None = None
        """Told of every change, what the holders that changed hold now; it must not ask back."""
        # All weakly: workers hold the ledger, and must not keep alive what is registered.
        self._reclaimers: list[tuple[Turn, Tier, weakref.WeakMethod[Any]]] = []
        self._claims: list[tuple[Tier, weakref.WeakMethod[Any]]] = []
        self._explain: dict[Tier, weakref.WeakMethod[Any]] = {}
        self._remarks: dict[str, weakref.WeakMethod[Any]] = {}
        self._apart: set[Tier] = set()
        self.needs: dict[Tier, int] = {}
        """Bytes that the model needs beside what it keeps, while it computes."""
        self.gathers: dict[Tier, int] = {}
        """Bytes of all its windows, which it takes where it can."""
        self.if_alone: Callable[[Callable[[], None]], None] = lambda function: function()
        """Runs a function for a thread that trains another model, unless a thread is at work in this one."""
        self.last_asked = 0
        self.is_shared = pool is not None
        """Whether other models may have the same budget."""
        self._pool = pool
        if pool is not None:
            pool.join(self)

    # ---- who gives way ------------------------------------------------------------------------------------------

    def register(self, turn: Turn, reclaim: Reclaimer, *tiers: Tier) -> None:
        """From now on ask this method for bytes of these tiers when it is its turn."""
        # The list is put in place whole and never changed: `reclaim` may be walking the old one while a part that it
        # asks registers another.
        new = [(turn, tier, weakref.WeakMethod(reclaim)) for tier in tiers]
        alive = [entry for entry in self._reclaimers if entry[2]() is not None]
        self._reclaimers = sorted(alive + new, key=lambda entry: entry[0])

    def register_claim(self, tier: Tier, claim: Callable[[], int]) -> None:
        """This method knows bytes that are wanted soon, and are left free by what is only welcome."""
        self._claims.append((tier, weakref.WeakMethod(claim)))

    def register_windows(self, tier: Tier, explain: Callable[[Want], BudgetExceeded], *, apart: bool) -> None:
        """``explain``: says what a refusal is due to. ``apart``: windows in that tier have memory of their own."""
        self._explain[tier] = weakref.WeakMethod(explain)
        self._apart |= {tier} if apart else set()

    def register_remark(self, holder: str, remark: Callable[[BudgetExceeded], BudgetExceeded]) -> None:
        """This method adds to what a refusal says to ``holder``, or leaves it as it is."""
        self._remarks[holder] = weakref.WeakMethod(remark)

    def claimed(self, tier: Tier) -> int:
        """Bytes that are wanted soon. Called by the training thread alone: claims look at the transfers in flight."""
        # None where the part is gone.
        return sum(claim() for at, method in self._claims if at is tier and (claim := method()) is not None)

    def obtain(self, want: Want) -> bool:
        """Take what is wanted; others make room for it. False if they cannot."""
        # Measured before anybody is asked. Workers release bytes at any time, so a round in which nobody gave may still
        # have made progress; without this look a want is refused although the bytes came free in that moment.
        while missing := want.take():
            if not self.reclaim(want) and want.missing() >= missing:  # and nothing came free while they were asked
                return False
        return True

    def reclaim(self, want: Want) -> bool:
        """Have one give something back; False if nobody has anything. Without the lock: givers wait for threads."""
        if on_worker():
            return False
        # From the first turn again at each call: what was given may have made something cheaper possible.
        for ledger, turn, method in self._in_turn(want):
            reclaim = method()
            if reclaim is not None and (reclaim(want) if ledger is self else ledger._give_to_other(reclaim, want)):
                # Only turns that make a difference once; asked again they would say yes for ever.
                want.given |= {turn} & _ONCE
                return True
        return False

    def _in_turn(self, want: Want) -> list[tuple[Ledger, Turn, weakref.WeakMethod[Any]]]:
        """Those who may be asked, in turn; of one turn those of other models first, which do not compute just now."""
        asking = want.asking - want.given
        own = [(self, turn, method) for turn, tier, method in self._reclaimers if turn in asking and tier is want.tier]
        if self._pool is None or not want.asks_others:
            return own
        others = self._pool.others(self)
        self.last_asked = 1 + max(ledger.last_asked for ledger in [*others, self])
        found = [
            (ledger, turn, method)
            for ledger in others
            for turn, tier, method in ledger._reclaimers
            if tier is want.tier and ledger._may_be_asked_by_other(turn, want)
        ]
        return sorted(found + own, key=lambda entry: entry[1])

    def _may_be_asked_by_other(self, turn: Turn, want: Want) -> bool:
        # Memory that is the windows' own is of use to other models only where it is given back: as much as is missing.
        if want.tier in self._apart and (turn is Turn.LESS or turn in OF_WINDOWS):
            return turn is Turn.LESS and (turn in want.asking or Turn.MORE in want.given)
        return turn in want.asking - _OWN

    def _give_to_other(self, reclaim: Reclaimer, want: Want) -> bool:
        gave: list[bool] = []
        self.if_alone(lambda: gave.append(reclaim(want)))
        want.found_busy |= not gave
        return any(gave)

    def reclaim_all(self, tier: Tier, asking: frozenset[Turn]) -> None:
        """Have these give back all that they can."""
        # A want of 0 bytes: those that are asked here give one thing after another, without looking at what is missing.
        want = Want(self, tier, 0, "", asking)
        want.asks_others = False
        while self.reclaim(want):
            pass

    def make_room(self, tier: Tier, num_bytes: int, asking: frozenset[Turn] = NEEDED) -> bool:
        """Have room made for so many bytes, and take none. False if nobody can, or there is no such tier."""
        return tier in self._accounts and self.obtain(Want(self, tier, num_bytes, "", self._asked(tier, asking)))

    def _asked(self, tier: Tier, asking: frozenset[Turn]) -> frozenset[Turn]:
        # Windows with memory of their own cannot give any to others. `LESS` is not taken away here: it shrinks that
        # memory for good.
        return asking - OF_WINDOWS if tier in self._apart else asking

    # ---- the books ----------------------------------------------------------------------------------------------

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tuple(self._accounts)

    def budget(self, tier: Tier) -> int:
        return self._accounts[tier].budget

    def share(self, tier: Tier) -> int:
        """Bytes that may be used at most: of a shared budget, what the other models do not keep."""
        return self.budget(tier) - (0 if self._pool is None else self._pool.kept_by_others(self, tier))

    def used(self, tier: Tier) -> int:
        return self._accounts[tier].used if tier in self._accounts else 0

    def peak(self, tier: Tier) -> int:
        return self._accounts[tier].peak

    def free(self, tier: Tier) -> int:
        return self._left(tier) - self._accounts[tier].used

    def _left(self, tier: Tier) -> int:
        """Bytes that may be used just now."""
        return self._accounts[tier].budget if self._pool is None else self._pool.left_to(self, tier)

    def of_windows(self, tier: Tier) -> int:
        """Bytes that windows have, or that wait for one."""
        return self.held(tier, "windows") + self.held(tier, "pool")

    def kept(self, tier: Tier) -> int:
        """Bytes that are not given to other models, whoever computes."""
        return self.used(tier) - self.of_windows(tier)

    def left_beside_windows(self, tier: Tier, needed: int) -> int:
        """Bytes that something else can have for good, where windows need so many: of a shared budget they give way to
        windows of other models, which may need more of them.
        """
        left = self.free(tier) + self.of_windows(tier) - needed
        if self._pool is None:
            return left
        of_others = sum(other.of_windows(tier) for other in self._pool.others(self))
        return left + of_others - max(self._pool.needed_by_others(self, tier) - needed, 0)

    def wanted_by_others(self, tier: Tier) -> int:
        """Bytes that windows of other models take next, beside what they have; where they have memory of their own,
        what they need alone.
        """
        if self._pool is None:
            return 0
        wants = [(o.needs if tier in o._apart else o.gathers).get(tier, 0) for o in self._pool.others(self)]
        have = [other.of_windows(tier) for other in self._pool.others(self)]
        return sum(max(want - has, 0) for want, has in zip(wants, have, strict=True))

    def held(self, tier: Tier, holder: str) -> int:
        return self._accounts[tier].held.get(holder, 0) if tier in self._accounts else 0

    def holders(self, tier: Tier) -> dict[str, int]:
        """Bytes by holder ("weights", "exp_avg", "window", "staging", ...)."""
        with self._lock:
            account = self._accounts.get(tier)
            return {} if account is None else {holder: held for holder, held in account.held.items() if held}

    def reserve(
        self, tier: Tier, num_bytes: int, holder: str, asking: frozenset[Turn] = NEEDED, *, what: str = ""
    ) -> None:
        """Take bytes before they are allocated; others may make room. After BudgetExceeded nothing was taken."""
        if not self.take(tier, num_bytes, holder):
            want = Want(self, tier, num_bytes, holder, self._asked(tier, asking), what)
            if not self.obtain(want):
                raise self.refusal(want)

    def reserve_if_room(self, tier: Tier, num_bytes: int, holder: str, asking: frozenset[Turn]) -> bool:
        """Take bytes for what can be done without; False if they do not fit."""
        if tier not in self._accounts:
            return False
        return self.take(tier, num_bytes, holder) or self.obtain(
            Want(self, tier, num_bytes, holder, self._asked(tier, asking))
        )

    def take(self, tier: Tier, num_bytes: int, holder: str) -> bool:
        """Take what is free, and ask nobody; False if it does not fit. Called by any thread."""
        assert num_bytes >= 0, num_bytes
        account = self._accounts.get(tier)
        if account is None:
            raise BudgetExceeded(f"{holder} asked for {human_bytes(num_bytes)} of {tier.value}, which has no budget")
        # The check and the taking are one: two threads that see the same free bytes must not both get them.
        with self._lock:
            left = account.budget if self._pool is None else self._left(tier)
            if account.used + num_bytes > left:
                return False
            if self._pool is not None:
                self._pool.note_peak(tier, account.budget - left + account.used + num_bytes)
            used = account.used + num_bytes
            peak, held = max(account.peak, used), account.held.get(holder, 0) + num_bytes
            # One statement without a call. Cut in two by Ctrl-C, the sum of the holders would no longer be `used`, and
            # every later check of the books would fail.
            account.used, account.peak, account.held[holder] = used, peak, held
            # Under the lock, so that whoever listens hears of changes in their order.
            if self.on_change is not None:
                self.on_change(tier, {holder: held})
        return True

    def refusal(self, want: Want) -> BudgetExceeded:
        """Say to who wants it what nobody can give, and why."""
        explain, remark = self._explain.get(want.tier), self._remarks.get(want.holder)
        # Only with `what`: who explains it by pinned and lent windows begins the text with it.
        explained = explain() if explain is not None and want.what else None
        remarks = None if remark is None else remark()
        if explained is None:
            budget, free = self._accounts[want.tier].budget, self.free(want.tier)
            error = BudgetExceeded(
                f"{want.holder} asked for {human_bytes(want.num_bytes)} of {want.tier.value}: "
                f"{human_bytes(budget - free)} of {human_bytes(budget)} are taken, {human_bytes(free)} are free"
            )
        else:
            error = explained(want)
            others = self.budget(want.tier) - self._left(want.tier)
            if others:
                error = BudgetExceeded(f"{error}. Other models of the same budget have {human_bytes(others)} of it")
        if want.found_busy:
            error = BudgetExceeded(
                f"{error}. Another thread is at work in a model of the same budget, which gives nothing meanwhile: use "
                "them one after the other, or raise the budget"
            )
        return error if remarks is None else remarks(error)

    def release(self, tier: Tier, num_bytes: int, holder: str) -> None:
        """Give back what ``holder`` reserved. Called by any thread, and asks nobody."""
        with self._lock:
            account = self._accounts[tier]
            held = account.held.get(holder, 0)
            assert 0 <= num_bytes <= held, f"{holder} gives back {num_bytes} of {held} bytes of {tier.value}"
            # As in `take`: one statement without a call.
            account.used, account.held[holder] = account.used - num_bytes, held - num_bytes
            if self.on_change is not None:
                self.on_change(tier, {holder: held - num_bytes})

    def pass_on(self, tier: Tier, num_bytes: int, giver: str, taker: str) -> None:
        """Let ``taker`` hold what ``giver`` held; the tier's total stays, so this cannot fail for lack of room."""
        with self._lock:
            account = self._accounts[tier]
            held = account.held.get(giver, 0)
            assert 0 <= num_bytes <= held, f"{giver} passes on {num_bytes} of {held} bytes of {tier.value}"
            taken = account.held.get(taker, 0) + num_bytes
            # `used` stays, and so neither peak nor budget are looked at.
            account.held[giver], account.held[taker] = held - num_bytes, taken
            if self.on_change is not None:
                self.on_change(tier, {giver: held - num_bytes, taker: taken})

    @contextmanager
    def reserving(self, tier: Tier, num_bytes: int, holder: str, asking: frozenset[Turn] = NEEDED) -> Iterator[None]:
        """:meth:`reserve` what the block allocates. It is given back if the block fails."""
        # Outside of the block: a refusal has taken nothing, so nothing is given back for it.
        self.reserve(tier, num_bytes, holder, asking)
        try:
            yield
        except BaseException:
            self.release(tier, num_bytes, holder)
            raise

    def close(self) -> None:
        """The model ends: the others of a shared budget have what it had."""
        if self._pool is not None:
            self._pool.leave(self)
