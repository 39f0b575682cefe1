"""Who goes when memory is short: policies over integers, atomic, all or nothing. They move nothing.

A policy sees the candidates that may be evicted and how many bytes are missing, and names victims that free at least
that many, or None. The manager evicts them; a simulator can ask the same policy the same question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Candidate(NamedTuple):
    """An evictable chunk by index, the bytes it frees, its last use, and whether this step is done with it."""

    chunk: int
    num_bytes: int
    last_use: int
    done: bool


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
        victims: list[int] = []
        for candidate in sorted(candidates, key=lambda c: (not c.done, c.last_use)):
            if missing <= 0:
                break
            victims.append(candidate.chunk)
            missing -= candidate.num_bytes
        return tuple(victims) if missing <= 0 else None
