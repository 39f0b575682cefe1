"""Who goes when memory is short: policies over integers, atomic, all or nothing. They move nothing.

A policy sees the candidates that may be evicted and how many bytes are missing, and names victims that free at least
that many, or None. The manager evicts them; the planner and the simulator ask the same policy the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Candidate(NamedTuple):
    """An evictable chunk by index, and what the policies go by.

    Attributes:
        num_bytes: what its eviction frees.
        last_use: when it was last used; larger is later.
        done: this step is done with it (all its gradients have arrived).
        arrived: when it was gathered; larger is later.
        next_use: when it is needed next, on the clock of a known schedule; None where the future is not known.
        kept: the plan keeps it gathered until then.
    """

    chunk: int
    num_bytes: int
    last_use: int
    done: bool
    arrived: int = 0
    next_use: int | None = None
    kept: bool = False


class EvictionPolicy(Protocol):
    """Chooses victims."""

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        """Indices that free at least ``missing`` bytes together, or None if all candidates are not enough."""


class NextUse:
    """What is needed again last goes first, after all that the plan does not keep.

    On chunks of one size no order of eviction moves less (L. A. Belady, IBM Systems Journal 5(2), 1966). On mixed sizes
    it may: that is what a plan's ``kept`` is for. Where the future is not known, what was used longest ago goes first:
    forward and backward visit chunks in opposite orders, so what was used last is what is needed next.
    """

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        return take_in_order(candidates, missing, _latest_next_use)


def _latest_next_use(candidate: Candidate) -> tuple[Any, ...]:
    if candidate.next_use is None:
        return (candidate.kept, not candidate.done, 0, candidate.last_use)
    return (candidate.kept, not candidate.done, -candidate.next_use, candidate.last_use)


def take_in_order(
    candidates: Sequence[Candidate], missing: int, order: Callable[[Candidate], Any]
) -> tuple[int, ...] | None:
    """The first candidates by ``order`` that free at least ``missing`` bytes, or None if all of them do not."""
    victims: list[int] = []
    for candidate in sorted(candidates, key=order):
        if missing <= 0:
            break
        victims.append(candidate.chunk)
        missing -= candidate.num_bytes
    return tuple(victims) if missing <= 0 else None
