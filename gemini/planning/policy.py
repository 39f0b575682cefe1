"""Who goes when memory is short: policies over integers, atomic, all or nothing. They move nothing.

A policy sees the candidates that may be evicted and how many bytes are missing, and names victims that free at least
that many, or None. The manager evicts them; the planner and the simulator ask the same policy the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


class LeastRecentlyUsed:
    """Chunks whose gradients are complete first, then those whose last use is longest ago.

    Forward and backward visit chunks in opposite orders, so what was used last is what is needed next: there LRU makes
    the choice that knowing the future would make.
    """

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        return _take(candidates, missing, lambda c: (not c.done, c.last_use))


class FirstInFirstOut:
    """What was gathered first goes first, whatever has been used since."""

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        return _take(candidates, missing, lambda c: c.arrived)


class NextUse:
    """What is needed again last goes first, after all that the plan does not keep.

    On chunks of one size no order of eviction moves less (L. A. Belady, IBM Systems Journal 5(2), 1966). On mixed sizes
    it may: that is what a plan's ``kept`` is for. Where the future is not known, as :class:`LeastRecentlyUsed`.
    """

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        return _take(candidates, missing, _latest_next_use)


class StaticFraction:
    """A fixed set of chunks stays gathered as long as any other will do; the others go least recently used first.

    The field's usual knobs in terms of memory: a fraction of the weights that stays on the GPU (ZeRO-Offload's and
    Colossal-AI's static placement), whatever the order of use.
    """

    def __init__(self, staying: Iterable[int]):
        self.staying = frozenset(staying)

    @classmethod
    def of(cls, sizes: Sequence[int], fraction: float) -> StaticFraction:
        """The first chunks with ``fraction`` of all bytes, to within one chunk.

        Raises:
            ValueError: for a fraction that is none.
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"a fraction is between 0 and 1, got {fraction!r}")
        total, before, staying = sum(sizes), 0, []
        for index, size in enumerate(sizes):
            if before + size / 2 < fraction * total:
                staying.append(index)
            before += size
        return cls(staying)

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        return _take(candidates, missing, lambda c: (c.chunk in self.staying, not c.done, c.last_use))


def _latest_next_use(candidate: Candidate) -> tuple[Any, ...]:
    if candidate.next_use is None:
        return (candidate.kept, not candidate.done, 0, candidate.last_use)
    return (candidate.kept, not candidate.done, -candidate.next_use, candidate.last_use)


def _take(candidates: Sequence[Candidate], missing: int, order: Callable[[Candidate], Any]) -> tuple[int, ...] | None:
    victims: list[int] = []
    for candidate in sorted(candidates, key=order):
        if missing <= 0:
            break
        victims.append(candidate.chunk)
        missing -= candidate.num_bytes
    return tuple(victims) if missing <= 0 else None
