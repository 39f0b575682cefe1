"""Where bytes may live (tiers), how many (budgets), and who holds them now (the ledger).

The ledger is the budget promise of the whole project in one place: it is asked *before* anything is allocated, refuses
what does not fit, and gives everything back. It knows no torch and moves no bytes.

    used = sum over holders of held bytes <= budget,   peak = the largest used so far            (checked, not hoped)

Where a request does not fit, those who hold what others may need more are asked for it, one at a time in the order of
:class:`Turn`, until it fits or nobody has anything to give. Parts register for their turn, once, when they are made.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gemini.errors import BudgetExceeded, human_bytes, parse_bytes
from gemini.waiting import on_worker

if TYPE_CHECKING:
    from gemini.sharing import Pool


class Direction(NamedTuple):
    """One direction between a tier and the one through which it is reached.

    Attributes:
        track: of a timeline, by its name.
        figure: the speed, as machines have it.
        usual: that speed where no machine is given, in bytes/s.
    """

    track: str
    figure: str
    usual: float


class TierSpec(NamedTuple):
    """A description of a tier for plans, simulations and reports: whoever adds one says it here, and in no other table.
    Its budget is a field of :class:`MemoryBudget` (``nvme``; where it keeps files their folder too, ``nvme_path``), its
    fractions are fields of ``StaticPlacement``, each by the tier's name.

    Attributes:
        title: its name for people.
        through: the tier through which all others reach it; None for host memory itself.
        in_files: whether its bytes are pages of files: they pass through staging, and nothing computes on them in
            place.
        ways: from that tier into this one, and back.
        figures: a machine that has any of these has such a tier.
    """

    title: str
    through: Tier | None = None
    in_files: bool = False
    ways: tuple[Direction, ...] = ()
    figures: tuple[str, ...] = ()


class Tier(Enum):
    """A kind of memory, fastest first. The value is its name in budgets and reports."""

    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"

    @property
    def spec(self) -> TierSpec:
        """The description of this tier."""
        return _SPECS[self]

    @property
    def in_files(self) -> bool:
        """Whether its bytes are pages of files."""
        return _SPECS[self].in_files

    @property
    def through(self) -> Tier | None:
        """The tier through which all others reach it; None for host memory."""
        return _SPECS[self].through

    __hash__ = object.__hash__  # Enum's own is Python, and tiers are keys for every tile that moves


_SPECS = {
    Tier.GPU: TierSpec(
        "GPU memory",
        through=Tier.CPU,
        # A PCIe 4.0 x16 link at four fifths of its 31.5 GB/s.
        ways=(Direction("host to gpu", "h2d", usual=25e9), Direction("gpu to host", "d2h", usual=25e9)),
        figures=("gpu_bytes", "gpu_flops_bf16", "gpu_flops_fp32", "gpu_bandwidth"),
    ),
    Tier.CPU: TierSpec("Host memory"),
    Tier.NVME: TierSpec(
        "NVMe",
        through=Tier.CPU,
        in_files=True,
        ways=(
            Direction("nvme write", "nvme_write", usual=2e9),
            Direction("nvme read", "nvme_read", usual=3e9),
        ),  # a fast drive
        figures=("nvme_bytes", "nvme_read", "nvme_write"),
    ),
}
"""Every tier has an entry: one without is an error as soon as this module is read (``_OUTER``)."""

DRIVE = Tier.NVME
"""The tier whose files may outlive the process."""

FILED = tuple(tier for tier in Tier if tier.in_files)
"""The tiers that a budget adds by naming a folder, fastest first."""

OFFLOAD_TO = tuple(tier.value for tier in Tier if tier is not Tier.GPU)
"""Where activations may wait for backward, by name."""


class Boundary(NamedTuple):
    """A way that bytes take, named as in ``memory_report()["moved"]``."""

    source: Tier
    target: Tier

    @property
    def outer(self) -> Tier:
        """The tier that is reached through the other one."""
        return _OUTER[self]

    @property
    def way(self) -> Direction:
        """How it shows in timelines, and which figure is its speed."""
        return self.outer.spec.ways[0 if self.outer is self.target else 1]

    def __str__(self) -> str:
        return f"{self.source.value}->{self.target.value}"


_OUTER = {
    boundary: tier
    for tier in Tier
    if (through := tier.through) is not None
    for boundary in (Boundary(through, tier), Boundary(tier, through))
}
BOUNDARIES = tuple(_OUTER)
"""All there are."""


@dataclass(frozen=True)
class MemoryBudget:
    """How many bytes each tier may hold. A size is a string such as "20GiB" or a number of bytes. Tiers that are left
    out are measured when the model is wrapped: 80 % of what is free.

    Args:
        gpu: all GPU memory that the process may use, the CUDA context and kernels included. If memory is reserved for
            activations (by a trace or ``GeminiConfig(activations=)``), torch's allocator is limited to the rest of the
            budget while the model exists, also for tensors that Gemini does not manage. Tensors that existed before are
            not counted.
        cpu: chunks, staging buffers and pools in host memory. The Python process itself and activations that are
            computed on the CPU are not counted.
        nvme: the size of the spill file. Needs ``nvme_path``.
        nvme_path: an existing, writable directory ("~" is your home). Without it there is no NVMe tier. The spill file
            in it has no name, and its space is free again when the process ends. A list of directories, one on each
            drive: they are read and written together, in equal shares, and ``nvme`` is the size of all.
        durable: keep weights and optimizer states in a store in ``nvme_path`` that remains when the process ends, in
            whatever way. ``save_checkpoint(nvme_path, ...)`` then only adds what is in memory and a record of a few
            KiB, because training has written the rest already. The store takes twice the space of all weights and
            states.

    Raises:
        ValueError, TypeError: for an invalid size (:func:`gemini.errors.parse_bytes`), or for ``nvme`` or ``durable``
            without ``nvme_path``.
    """

    gpu: str | int | None = None
    cpu: str | int | None = None
    nvme: str | int | None = None
    nvme_path: str | Path | Sequence[str | Path] | None = None
    durable: bool = False

    def __post_init__(self) -> None:
        for tier in Tier:
            # Read here so that a wrong size is refused where it was written, and not when a model is wrapped.
            size = getattr(self, tier.value)
            if size is not None:
                parse_bytes(size, what=f"MemoryBudget({tier.value}=)")
        for tier in FILED:
            given = getattr(self, f"{tier.value}_path")
            several = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
            if not all(map(str, several)) or (given is not None and not several):
                raise ValueError(
                    f"MemoryBudget({tier.value}_path={given!r}) names no directory; leave it out for no "
                    f"{tier.spec.title} tier"
                )
            # The dataclass is frozen, and everybody after this reads paths that exist as they stand.
            paths = [Path(path).expanduser() if str(path).startswith("~") else path for path in several]
            twice = [path for number, path in enumerate(paths) if Path(path) in map(Path, paths[:number])]
            if twice:
                raise ValueError(f"MemoryBudget({tier.value}_path=) names {twice[0]} twice; name each directory once")
            if isinstance(given, (list, tuple)):
                object.__setattr__(self, f"{tier.value}_path", tuple(paths))
            elif paths:
                object.__setattr__(self, f"{tier.value}_path", paths[0])
        if not isinstance(self.durable, bool):
            raise TypeError(f"MemoryBudget(durable=) is True or False, got {self.durable!r}")
        if self.durable and self.nvme_path is None:
            raise ValueError("MemoryBudget(durable=True) needs nvme_path=, the directory for the store")
        for tier in FILED:
            if self.path_of(tier) is None and (self.bytes_of(tier) or 0) > 0:
                raise ValueError(
                    f"MemoryBudget({tier.value}={getattr(self, tier.value)!r}) needs {tier.value}_path=, the directory "
                    "for the spill file"
                )

    def bytes_of(self, tier: Tier) -> int | None:
        """The declared bytes of ``tier``; None where they were left out."""
        size = getattr(self, tier.value)
        return None if size is None else parse_bytes(size)

    def path_of(self, tier: Tier) -> str | Path | None:
        """The directory for the file of ``tier``, the first one of several; None where there is no such tier."""
        paths = self.paths_of(tier)
        return paths[0] if paths else None

    def paths_of(self, tier: Tier) -> tuple[str | Path, ...]:
        """The directories over which the file of ``tier`` is striped; none where there is no such tier."""
        given: Any = getattr(self, f"{tier.value}_path")
        return () if given is None else given if isinstance(given, tuple) else (given,)


class Turn(IntEnum):
    """A place in the order in which others give way when memory is short, what costs least first."""

    BUFFERS = 0  # parked buffers of activations in flight: given to activations only, others get them with FLIGHTS
    UNKEPT = 1  # windows that the plan fetches again anyway, and memory that waits for the next window
    READERS = 2  # windows that an update reads: it is waited for
    FLIGHTS = 3  # activations on their way: ahead of their use called back, behind it waited for
    UPDATES = 4  # updates that hold gradients: waited for
    GUESSES = 5  # updates that may be undone: undone
    LANDINGS = 6  # gradients on their way home: waited for
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
    """Bytes of a tier that are not free.

    Args:
        asking: whose turn it may be.
        what: what it is for, to say so in a refusal.
    """

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
        """Reserve it, if it fits now: 0 then, else the bytes that must come free before."""
        return 0 if self.ledger.take(self.tier, self.num_bytes, self.holder) else self.missing() or 1


class _Space(Want):
    """Free bytes, which nobody takes yet: another thread may have them before whoever asked."""

    def take(self) -> int:
        return self.missing()


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
    whoever else asks is the thread that trains, or must not run beside it.

    Args:
        pool: of the models with which this one shares its budget, if it does. Their parts are asked too.
    """

    def __init__(self, budgets: dict[Tier, int], pool: Pool | None = None):
        self._accounts = {tier: _Account(budget) for tier, budget in budgets.items()}
        # An RLock: the garbage collector may end the model inside of `on_change` or `holders`, which gives memory back
        # in the same thread. Between what `take` reads and what it writes nothing is allocated that the collector
        # counts.
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
        self.if_alone: Callable[[Callable[[], None]], None] = lambda function: function()
        """Runs a function for a thread that trains another model, unless a thread is at work in this one."""
        self.last_asked = 0
        self._pool = pool
        if pool is not None:
            pool.join(self)

    # ---- who gives way ------------------------------------------------------------------------------------------

    def register(self, turn: Turn, reclaim: Reclaimer, *tiers: Tier) -> None:
        """From now on ask this method for bytes of these tiers when it is its turn. Called by the training thread,
        where parts are made.
        """
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
        num_bytes = 0
        for at, method in self._claims:
            if at is tier and (claim := method()) is not None:  # None where the part is gone
                num_bytes += claim()
        return num_bytes

    def obtain(self, want: Want) -> bool:
        """Take what is wanted; others make room for it. False if they cannot."""
        # Measured before anybody is asked. Workers release bytes at any time, so a round in which nobody gave may still
        # have made progress; without this look a want is refused although the bytes came free in that moment.
        while missing := want.take():
            if not self.reclaim(want) and want.missing() >= missing:  # and nothing came free while they were asked
                return False
        return True

    def reclaim(self, want: Want) -> bool:
        """Have one give something back; False if nobody has anything. Called without the lock of the books: whoever is
        asked waits for threads that release bytes under it.
        """
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
        """Who may be asked, in turn; of one turn those of other models first, which do not compute just now."""
        ledgers = [self]
        if self._pool is not None and want.asks_others:
            ledgers = [*self._pool.others(self), self]
            self.last_asked = 1 + max(ledger.last_asked for ledger in ledgers)
        found = [
            (ledger, turn, method)
            for ledger in ledgers
            for turn, tier, method in ledger._reclaimers
            if tier is want.tier and ledger._may_be_asked(turn, want)
        ]
        return found if len(ledgers) == 1 else sorted(found, key=lambda entry: entry[1])

    def _may_be_asked(self, turn: Turn, want: Want) -> bool:
        if want.ledger is self:
            return turn in want.asking and turn not in want.given
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
        return tier in self._accounts and self.obtain(_Space(self, tier, num_bytes, "", self._asked(tier, asking)))

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
        """What may be used at most: of a shared budget, what the other models do not keep."""
        return self.budget(tier) - (0 if self._pool is None else self._pool.kept_by_others(self, tier))

    def used(self, tier: Tier) -> int:
        account = self._accounts.get(tier)
        return 0 if account is None else account.used

    def peak(self, tier: Tier) -> int:
        return self._accounts[tier].peak

    def free(self, tier: Tier) -> int:
        return self._left(tier) - self._accounts[tier].used

    def _left(self, tier: Tier) -> int:
        """What may be used just now."""
        return self._accounts[tier].budget if self._pool is None else self._pool.left_to(self, tier)

    @property
    def is_shared(self) -> bool:
        """Whether other models may have the same budget."""
        return self._pool is not None

    def of_windows(self, tier: Tier) -> int:
        """Bytes that windows have, or that wait for one."""
        return self.held(tier, "windows") + self.held(tier, "pool")

    def kept(self, tier: Tier) -> int:
        """Bytes that are not given to other models, whoever computes."""
        return self.used(tier) - self.of_windows(tier)

    def gatherable(self, tier: Tier) -> int:
        """Bytes that windows may have, all together: windows give way to windows, those of other models too."""
        idle = 0 if self._pool is None else self._pool.idle(self, tier)
        return self.free(tier) + self.of_windows(tier) + idle

    def working_set(self, tier: Tier, own: int) -> int:
        """Bytes that have to be left to windows: ``own``, or what another model of the same budget needs."""
        return own if self._pool is None else max(own, self._pool.needed_by_others(self, tier))

    def held(self, tier: Tier, holder: str) -> int:
        account = self._accounts.get(tier)
        return 0 if account is None else account.held.get(holder, 0)

    def holders(self, tier: Tier) -> dict[str, int]:
        """Bytes by holder ("weights", "exp_avg", "window", "staging", ...)."""
        with self._lock:
            account = self._accounts.get(tier)
            return {} if account is None else {holder: held for holder, held in account.held.items() if held}

    def reserve(
        self, tier: Tier, num_bytes: int, holder: str, asking: frozenset[Turn] = NEEDED, *, what: str = ""
    ) -> None:
        """Take ``num_bytes`` of ``tier`` for ``holder``, before they are allocated; those whose turn it may be make
        room.

        Raises:
            BudgetExceeded: if they do not fit; nothing was taken.
        """
        if not self.take(tier, num_bytes, holder):
            want = Want(self, tier, num_bytes, holder, self._asked(tier, asking), what)
            if not self.obtain(want):
                raise self.refusal(want)

    def reserve_if_room(self, tier: Tier, num_bytes: int, holder: str, asking: frozenset[Turn]) -> bool:
        """Take bytes for what can be done without: False if they do not fit, also when those that may be asked have
        given.
        """
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
            left = self._left(tier)
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
        # Only with `what`: who explains it by pinned and lent windows begins the text with it.
        explain = _alive(self._explain.get(want.tier)) if want.what else None
        remark = _alive(self._remarks.get(want.holder))
        if explain is None:
            budget, free = self._accounts[want.tier].budget, self.free(want.tier)
            error = BudgetExceeded(
                f"{want.holder} asked for {human_bytes(want.num_bytes)} of {want.tier.value}: "
                f"{human_bytes(budget - free)} of {human_bytes(budget)} are taken, {human_bytes(free)} are free"
            )
        else:
            error = explain(want)
        if want.found_busy:
            error = BudgetExceeded(
                f"{error}. Another thread is at work in a model of the same budget, which gives nothing meanwhile: use "
                "them one after the other, or raise the budget"
            )
        return error if remark is None else remark(error)

    def release(self, tier: Tier, num_bytes: int, holder: str) -> None:
        """Give back what ``holder`` reserved. Called by any thread, and asks nobody."""
        with self._lock:
            account, held = self._accounts[tier], self.held(tier, holder)
            assert 0 <= num_bytes <= held, f"{holder} gives back {num_bytes} of {held} bytes of {tier.value}"
            # As in `take`: one statement without a call.
            account.used, account.held[holder] = account.used - num_bytes, held - num_bytes
            if self.on_change is not None:
                self.on_change(tier, {holder: held - num_bytes})

    def pass_on(self, tier: Tier, num_bytes: int, giver: str, taker: str) -> None:
        """Let ``taker`` hold what ``giver`` held; the tier's total stays, so this cannot fail for lack of room."""
        with self._lock:
            account, held = self._accounts[tier], self.held(tier, giver)
            assert 0 <= num_bytes <= held, f"{giver} passes on {num_bytes} of {held} bytes of {tier.value}"
            taken = account.held.get(taker, 0) + num_bytes
            # `used` stays, and so neither peak nor budget are looked at.
            account.held[giver], account.held[taker] = held - num_bytes, taken
            if self.on_change is not None:
                self.on_change(tier, {giver: held - num_bytes, taker: taken})

    @contextmanager
    def reserving(self, tier: Tier, num_bytes: int, holder: str, asking: frozenset[Turn] = NEEDED) -> Iterator[None]:
        """:meth:`reserve` what the block allocates. It is given back if the block fails; else whoever ends what was
        allocated releases it.
        """
        # Outside of the block: a refusal has taken nothing, so nothing is given back for it.
        self.reserve(tier, num_bytes, holder, asking)
        try:
            yield
        except BaseException:
            self.release(tier, num_bytes, holder)
            raise

    def reset_peak(self) -> None:
        with self._lock:
            for account in self._accounts.values():
                account.peak = account.used

    def check_invariants(self) -> None:
        """used = sum of holders, 0 <= used <= peak <= budget. Called by tests after every step."""
        with self._lock:
            for tier, account in self._accounts.items():
                held = sum(account.held.values())
                assert held == account.used, f"{tier.value}: holders hold {held}, used says {account.used}"
                assert 0 <= account.used <= account.peak <= account.budget, (tier.value, account)
        if self._pool is not None:
            self._pool.check_invariants()

    def close(self) -> None:
        """The model ends: the others of a shared budget have what it had."""
        if self._pool is not None:
            self._pool.leave(self)


def _alive(method: weakref.WeakMethod[Any] | None) -> Any:
    """The method, if what it belongs to is still there."""
    return None if method is None else method()
