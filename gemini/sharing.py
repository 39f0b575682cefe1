"""One budget for several models of a process: :class:`SharedBudget`, and the :class:`Pool` in which their ledgers meet.

Every model has a ledger of its own, by holder, as ever; what is free is what all of them leave of the budget. Whoever
needs room asks the parts of the other models as well, in the same order of turns: windows of a model that does not
compute are the first to go. So a budget has to hold what each model keeps, and the working set of one of them:

    sum over models of what is kept + the largest working set <= budget
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from gemini.errors import BudgetExceeded, parse_bytes
from gemini.ledger import OF_BUDGET, Ledger
from gemini.tiers import MemoryBudget, Tier


class Pool:
    """The ledgers of the models that share a budget. It keeps none of them: with a model its bytes are free again."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # of the books of all
        self._budgets: dict[Tier, int] = {}
        self._peaks: dict[Tier, int] = {}
        self._members: list[weakref.ref[Ledger]] = []
        self.at_once = False
        """Whether plans leave room for what two models gather at once: a graph that waits for its backward may look
        into weights (those of an output head that TRL reads itself) while another model computes."""

    def __deepcopy__(self, memo: Any) -> Pool:
        return self

    def __reduce__(self) -> Any:
        return Pool, ()  # models are of one process

    def members(self) -> list[Ledger]:
        """The ledgers of the models there are, in the order in which they were wrapped."""
        return [ledger for reference in self._members if (ledger := reference()) is not None]

    def others(self, ledger: Ledger) -> list[Ledger]:
        """Those of the other models, the one first that has asked for room last: it was computing just now, so in a
        cycle its turn comes last.
        """
        return sorted((other for other in self.members() if other is not ledger), key=lambda o: -o.last_asked)

    def join(self, ledger: Ledger) -> None:
        self._members = [*map(weakref.ref, self.members()), weakref.ref(ledger)]

    def leave(self, ledger: Ledger) -> None:
        """From now on what its model had is free."""
        self._members = [weakref.ref(other) for other in self.members() if other is not ledger]

    def budget(self, tier: Tier) -> int:
        return self._budgets[tier]

    def left_to(self, ledger: Ledger, tier: Tier) -> int:
        """Bytes that the others leave of the budget just now."""
        return self._budgets[tier] - sum(other.used(tier) for other in self.members() if other is not ledger)

    def kept_by_others(self, ledger: Ledger | None, tier: Tier) -> int:
        """Bytes that the others never give back, while they are there."""
        return sum(other.kept(tier) for other in self.members() if other is not ledger)

    def needed_by_others(self, ledger: Ledger | None, tier: Tier) -> int:
        """Bytes that one of the others needs besides, while it computes, at most."""
        return max((other.needs.get(tier, 0) for other in self.members() if other is not ledger), default=0)

    def note_peak(self, tier: Tier, used: int) -> None:
        self._peaks[tier] = max(self._peaks.get(tier, 0), used)

    def offer(self, budgets: Mapping[Tier, int], compute: Tier, later: int) -> dict[Tier, int]:
        """Bytes per tier that the next model may plan with. ``budgets`` are those of the whole, as measured now; they
        hold from the first model on, which leaves ``later`` bytes of host memory.
        """
        members = self.members()
        if not members:
            self._budgets, self._peaks = {}, {}
        for tier, num_bytes in budgets.items():
            self._budgets.setdefault(tier, num_bytes)
            for other in members:  # what is only on its way is not kept
                if tier in other.tiers:
                    other.if_alone(partial(other.reclaim_all, tier, OF_BUDGET))
        left = {tier: self._budgets[tier] - self.kept_by_others(None, tier) for tier in budgets}
        left[Tier.CPU] -= 0 if members else later
        return {t: max(n - (0 if t is compute else self.needed_by_others(None, t)), 0) for t, n in left.items()}

    def report(self) -> dict[str, dict[str, Any]]:
        with self.lock:
            held: dict[Tier, Counter[str]] = {tier: Counter() for tier in self._budgets}
            for ledger in self.members():
                for tier in held.keys() & {*ledger.tiers}:
                    held[tier].update(ledger.holders(tier))
            return {
                tier.value: {
                    "budget": budget,
                    "used": held[tier].total(),
                    "peak": self._peaks.get(tier, 0),
                    "holders": dict(held[tier]),
                }
                for tier, budget in self._budgets.items()
            }


@dataclass(frozen=True)
class SharedBudget(MemoryBudget):
    """One budget for several models of a process: give the same object as ``memory=`` to the ``GeminiConfig`` of each.
    It has to hold what every model keeps (its weights, states and gradients in their homes, staging), and beside that
    the weights that the largest of them gathers at once: the gathered weights of a model that does not compute give
    way to one that does. Results have the bits of separate budgets.

    A model plans, when it is wrapped, with what those before it leave. What is frozen then (``requires_grad_(False)``)
    has 2 bytes per param in bf16, in any tier. When a model ends, its bytes are free again.

    Args:
        gpu, cpu, nvme, nvme_path, durable: as in :class:`MemoryBudget`. What is left out is measured when the first
            model is wrapped. A durable store is of one model: the others take ``dataclasses.replace(memory,
            durable=False)``, which is the same budget. On a GPU a model gives its memory for gathered weights back as a
            whole, so changing from one to the other costs a few allocations, and torch's allocator is not limited to
            the budget.
        later: bytes of host memory that the first model leaves to those that come after it. A model plans with all that
            there is; what is small is best wrapped first, and needs none.
    """

    later: str | int = 0
    pool: Pool = field(default_factory=Pool, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_bytes(self.later, what="SharedBudget(later=)")

    @classmethod
    def of(cls, memory: MemoryBudget, later: int = 0) -> SharedBudget:
        """The same bytes, for several models; ``memory`` itself if it is shared already."""
        if isinstance(memory, SharedBudget):
            return memory
        return cls(**{each.name: getattr(memory, each.name) for each in fields(memory)}, later=later)

    def report(self) -> dict[str, dict[str, Any]]:
        """Bytes of all models together, by the name of a tier: "budget", "used" and "peak" in bytes, and "holders",
        bytes by what uses them. ``model.memory_report()`` has those of one model.
        """
        return self.pool.report()


def pool_of(memory: MemoryBudget) -> Pool | None:
    """The pool of a budget that is shared, else None."""
    return memory.pool if isinstance(memory, SharedBudget) else None


@contextmanager
def joining(memory: MemoryBudget) -> Iterator[None]:
    """Wrap a model inside: if that fails, nothing of the budget is its."""
    pool = pool_of(memory)
    before = [] if pool is None else pool.members()
    try:
        yield
    except BaseException as e:
        for ledger in [] if pool is None else pool.members():
            if not any(ledger is other for other in before):
                pool.leave(ledger)  # type: ignore[union-attr]
        if isinstance(e, BudgetExceeded) and before:
            raise BudgetExceeded(
                f"{e}. These budgets are what the other models leave of a SharedBudget: raise it by what is missing, "
                "or have the first model leave more with later="
            ) from e
        raise
