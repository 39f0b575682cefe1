"""Where bytes may live (tiers), how many (budgets), and who holds them now (the ledger).

The ledger is the budget promise of the whole project in one place: it is asked *before* anything is allocated, refuses
what does not fit, and gives everything back. It knows no torch and moves no bytes.

    used = sum over holders of held bytes <= budget,   peak = the largest used so far            (checked, not hoped)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from gemini.errors import BudgetExceeded, human_bytes, parse_bytes


class Tier(Enum):
    """A kind of memory, fastest first. The value is its name in budgets and reports."""

    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"

    __hash__ = object.__hash__  # Enum's own is Python, and tiers are keys for every tile that moves


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
            in it has no name, and its space is free again when the process ends.
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
    nvme_path: str | Path | None = None
    durable: bool = False

    def __post_init__(self) -> None:
        for name in ("gpu", "cpu", "nvme"):
            size = getattr(self, name)
            if size is not None:
                parse_bytes(size, what=f"MemoryBudget({name}=)")
        if self.nvme_path is not None and not str(self.nvme_path):
            raise ValueError("MemoryBudget(nvme_path='') names no directory; leave it out for no NVMe tier")
        if str(self.nvme_path or "").startswith("~"):
            object.__setattr__(self, "nvme_path", Path(str(self.nvme_path)).expanduser())
        if not isinstance(self.durable, bool):
            raise TypeError(f"MemoryBudget(durable=) is True or False, got {self.durable!r}")
        if self.durable and self.nvme_path is None:
            raise ValueError("MemoryBudget(durable=True) needs nvme_path=, the directory for the store")
        if self.nvme is not None and self.nvme_path is None and parse_bytes(self.nvme) > 0:
            raise ValueError(f"MemoryBudget(nvme={self.nvme!r}) needs nvme_path=, the directory for the spill file")

    def bytes_of(self, tier: Tier) -> int | None:
        """The declared bytes of ``tier``; None where they were left out."""
        size = getattr(self, tier.value)
        return None if size is None else parse_bytes(size)


@dataclass
class _Account:
    budget: int
    used: int = 0
    peak: int = 0
    held: dict[str, int] = field(default_factory=dict)
    """By holder."""


class Ledger:
    """Who holds how many bytes of each tier. Thread-safe; every method is all or nothing, to Ctrl-C too: the books
    change in one statement that calls nothing, and Python looks for signals after calls.
    """

    def __init__(self, budgets: dict[Tier, int]):
        self._accounts = {tier: _Account(budget) for tier, budget in budgets.items()}
        self._lock = threading.Lock()
        self.on_change: Callable[[Tier, Mapping[str, int]], None] | None = None
        """Told of every change, what the holders that changed hold now; it must not ask back."""
        self.on_short: Callable[[Tier], bool] = lambda tier: False
        """Asked before a request is refused: whether somebody has given back what is only welcome, so that it is worth
        another try. On the thread that asks.
        """

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tuple(self._accounts)

    def budget(self, tier: Tier) -> int:
        return self._accounts[tier].budget

    def used(self, tier: Tier) -> int:
        return self._accounts[tier].used

    def peak(self, tier: Tier) -> int:
        return self._accounts[tier].peak

    def free(self, tier: Tier) -> int:
        account = self._accounts[tier]
        return account.budget - account.used

    def held(self, tier: Tier, holder: str) -> int:
        account = self._accounts.get(tier)
        return 0 if account is None else account.held.get(holder, 0)

    def holders(self, tier: Tier) -> dict[str, int]:
        """Bytes by holder ("weights", "exp_avg", "window", "staging", ...)."""
        with self._lock:
            account = self._accounts.get(tier)
            return {} if account is None else {holder: held for holder, held in account.held.items() if held}

    def reserve(self, tier: Tier, num_bytes: int, holder: str) -> None:
        """Take ``num_bytes`` of ``tier`` for ``holder``, before they are allocated.

        Raises:
            BudgetExceeded: if they do not fit; nothing was taken.
        """
        assert num_bytes >= 0, num_bytes
        account = self._accounts.get(tier)
        if account is None:
            raise BudgetExceeded(f"{holder} asked for {human_bytes(num_bytes)} of {tier.value}, which has no budget")
        while not self._take(tier, account, num_bytes, holder):
            if not self.on_short(tier):
                raise BudgetExceeded(
                    f"{holder} asked for {human_bytes(num_bytes)} of {tier.value}: {human_bytes(account.used)} of "
                    f"{human_bytes(account.budget)} are taken, {human_bytes(account.budget - account.used)} are free"
                )

    def _take(self, tier: Tier, account: _Account, num_bytes: int, holder: str) -> bool:
        with self._lock:
            used = account.used + num_bytes
            if used > account.budget:
                return False
            peak, held = max(account.peak, used), account.held.get(holder, 0) + num_bytes
            account.used, account.peak, account.held[holder] = used, peak, held
            if self.on_change is not None:
                self.on_change(tier, {holder: held})
        return True

    def release(self, tier: Tier, num_bytes: int, holder: str) -> None:
        """Give back what ``holder`` reserved."""
        with self._lock:
            account, held = self._accounts[tier], self.held(tier, holder)
            assert 0 <= num_bytes <= held, f"{holder} gives back {num_bytes} of {held} bytes of {tier.value}"
            account.used, account.held[holder] = account.used - num_bytes, held - num_bytes
            if self.on_change is not None:
                self.on_change(tier, {holder: held - num_bytes})

    def pass_on(self, tier: Tier, num_bytes: int, giver: str, taker: str) -> None:
        """Let ``taker`` hold what ``giver`` held; the tier's total stays, so this cannot fail for lack of room."""
        with self._lock:
            account, held = self._accounts[tier], self.held(tier, giver)
            assert 0 <= num_bytes <= held, f"{giver} passes on {num_bytes} of {held} bytes of {tier.value}"
            taken = account.held.get(taker, 0) + num_bytes
            account.held[giver], account.held[taker] = held - num_bytes, taken
            if self.on_change is not None:
                self.on_change(tier, {giver: held - num_bytes, taker: taken})

    @contextmanager
    def reserving(self, tier: Tier, num_bytes: int, holder: str) -> Iterator[None]:
        """:meth:`reserve` what the block allocates. It is given back if the block fails; else whoever ends what was
        allocated releases it.
        """
        self.reserve(tier, num_bytes, holder)
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
