"""Room for activations that windows borrow while activations leave it free, as the schedule of a step says.

What is borrowed is held by the windows in the ledger and goes back to "activations" first of all when a window is let
go; so whatever else takes memory (gradients that are promoted, staging) never finds it free. It may be borrowed only
where a step follows its schedule, and on a device whose windows give memory back to whatever asks next.
"""

from __future__ import annotations

from gemini.memory.movement.foresight import Foresight
from gemini.tiers import Ledger, Tier

ACTIVATIONS = "activations"
"""Who lends."""


class Lending:
    """The books of one model's windows."""

    def __init__(self, ledger: Ledger, tier: Tier, foresight: Foresight):
        self._ledger, self._tier, self._foresight = ledger, tier, foresight
        self.borrowed = 0

    def room(self, until: int | None = None) -> int:
        """Bytes that windows may borrow besides, if they are to keep them to moment ``until``."""
        return max(0, self._foresight.borrowable(until) - self.borrowed)

    @property
    def excess(self) -> int:
        """Bytes that have to go back now."""
        return max(0, self.borrowed - self._foresight.borrowable())

    def take(self, num_bytes: int, holder: str) -> None:
        """Reserve what is free for a window, and borrow the rest.

        Raises:
            BudgetExceeded: if that is not enough; nothing was taken.
        """
        lent = min(max(0, num_bytes - self._ledger.free(self._tier)), self.room())
        self._ledger.reserve(self._tier, num_bytes - lent, holder)
        self._ledger.pass_on(self._tier, lent, ACTIVATIONS, holder)
        self.borrowed += lent

    def let_have(self, num_bytes: int, holder: str) -> None:
        """A window lets go of its memory."""
        lent = min(self.borrowed, num_bytes)
        self._ledger.pass_on(self._tier, lent, holder, ACTIVATIONS)
        self.borrowed -= lent
        self._ledger.release(self._tier, num_bytes - lent, holder)

    def return_free(self) -> bool:
        """Give back what is due of what is free; False if nothing is."""
        num_bytes = min(self.excess, self._ledger.free(self._tier))
        self._ledger.reserve(self._tier, num_bytes, ACTIVATIONS)
        self.borrowed -= num_bytes
        return num_bytes > 0

    def start_over(self, holder: str) -> None:
        """All windows are let go."""
        self._ledger.pass_on(self._tier, self.borrowed, holder, ACTIVATIONS)
        self.borrowed = 0
