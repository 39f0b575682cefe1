"""Who goes when memory is short: policies over integers, atomic, all or nothing. They move nothing.

A policy sees the candidates that may be evicted and how many bytes are missing, and names victims that free at least
that many, or None. The manager evicts them; the planner and the simulator ask the same policy the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Candidate(NamedTuple):
    """A chunk that may be evicted, and what policies need to know of it.

    Attributes:
        chunk: its index.
        num_bytes: the bytes that its eviction frees.
        last_use: when it was last used; larger is later.
        done: whether this step does not need it any more (all its gradients have arrived).
        arrived: when it was gathered; larger is later.
        next_use: when it is needed next, in a known schedule. None if the schedule is not known.
        kept: whether the plan keeps it gathered until then.
    """

    chunk: int
    num_bytes: int
    last_use: int
    done: bool
    arrived: int = 0
    next_use: int | None = None
    kept: bool = False


class EvictionPolicy(Protocol):
    """Chooses which chunks to evict."""

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        """Indices that free at least ``missing`` bytes together, or None if all candidates are not enough."""


class NextUse:
    """Evict first what the plan does not keep, then the chunk whose next use is furthest away.

    For chunks of one size no order of eviction moves fewer bytes (L. A. Belady, IBM Systems Journal 5(2), 1966). For
    mixed sizes another order may; a plan's ``kept`` takes care of that. If the schedule is not known, the chunk that
    was used longest ago goes first: backward visits chunks in the opposite order of forward, so what was used last is
    needed next.
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
