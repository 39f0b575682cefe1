"""Who goes when memory is short: policies over integers, atomic, all or nothing. They move nothing.

A policy sees the candidates that may be evicted and how many bytes are missing, and names victims that free at least
that many, or None. The manager evicts them; the planner and the simulator ask the same policy the same question, all
of them through :func:`victims_of`, as it may be a user's own. A new one is a class with ``choose``, given to
``GeminiConfig(eviction=)`` as an object, or by a name in :data:`POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from gemini.errors import GeminiError, human_bytes


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
    """Chooses which chunks to evict. The same question must have the same answer: ranks that share a model ask it each
    for themselves, and their plans must be alike.
    """

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        """Indices that free at least ``missing`` bytes together, or None if all candidates are not enough."""


def victims_of(policy: EvictionPolicy, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
    """Ask a policy, and check its answer.

    Raises:
        GeminiError: for victims that are no candidates or free too little, or None where all would be enough.
    """
    victims = policy.choose(candidates, missing)
    sizes = {candidate.chunk: candidate.num_bytes for candidate in candidates}
    if fault := _fault_of(victims, sizes, missing):
        raise GeminiError(
            f"the eviction policy {type(policy).__name__} was asked for {human_bytes(missing)} of chunks "
            f"{sorted(sizes)}, and answered {victims!r}: {fault}"
        )
    return victims


def _fault_of(victims: Any, sizes: Mapping[int, int], missing: int) -> str:
    """What is wrong with the victims that a policy named among candidates of these sizes; empty if nothing is."""
    if victims is None:
        enough = missing <= sum(sizes.values())
        return f"all of them have {human_bytes(sum(sizes.values()))}, and None is for too little" if enough else ""
    are_some = isinstance(victims, tuple) and all(isinstance(index, int) and index in sizes for index in victims)
    if not are_some or len({*victims}) < len(victims):
        return "a policy returns a tuple of some of them, each once"
    freed = sum(sizes[index] for index in victims)
    return "" if freed >= missing else f"these free {human_bytes(freed)}, and a policy names enough of them or none"


class NextUse:
    """Evict first what the plan does not keep, then the chunk whose next use is furthest away.

    For chunks of one size no order of eviction moves fewer bytes (L. A. Belady, IBM Systems Journal 5(2), 1966). For
    mixed sizes another order may; a plan's ``kept`` takes care of that. If the schedule is not known, the chunk that
    was used longest ago goes first: backward visits chunks in the opposite order of forward, so what was used last is
    needed next.
    """

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        return take_in_order(candidates, missing, lambda c: (c.kept, not c.done, -(c.next_use or 0), c.last_use))


class LeastRecentlyUsed:
    """Evict chunks whose gradients are complete first, then those whose last use is longest ago.

    Forward and backward visit chunks in opposite orders, so what was used last is what is needed next: there LRU makes
    the choice that knowing the future would make.
    """

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        return take_in_order(candidates, missing, lambda c: (not c.done, c.last_use))


class FirstInFirstOut:
    """Evict first what was gathered first, whatever has been used since."""

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        return take_in_order(candidates, missing, lambda c: c.arrived)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "next_use": NextUse,
    "least_recently_used": LeastRecentlyUsed,
    "first_in_first_out": FirstInFirstOut,
}
"""By the name that ``GeminiConfig(eviction=)`` takes."""


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
