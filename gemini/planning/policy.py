"""When gathered weights come and go: policies that make room on demand, and the moves of a step that cost least.

A policy sees the candidates that may be evicted and how many bytes are missing, and names victims that free at least
that many, or None: all or nothing, and it moves nothing. The manager evicts them; the planner and the simulator ask the
same policy the same question, all of them through :func:`victims_of`, as it may be a user's own. A new one is a class
with ``choose``, given to ``GeminiConfig(eviction=)``.

With the whole step known the question is offline caching: each moment needs some chunks in a room of limited size, and
every gathering costs. A chunk that is needed again either stays in the interval between (and takes its bytes of all
moments in it) or is gathered again. Choosing the intervals to keep is an integer program with one row per moment; on
chunks of one size its matrix is totally unimodular, so that its linear relaxation is exact (S. Albers, S. Arora,
S. Khanna, SODA 1999).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple, Protocol

from gemini.errors import BudgetExceeded, GeminiError, human_bytes
from gemini.planning.plan import Moves, there_before
from gemini.planning.program import Row, solve
from gemini.planning.trace import Access


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
    """Ask a policy. Raises GeminiError for victims that are no candidates or too few, or None where all are enough."""
    victims: Any = policy.choose(candidates, missing)
    sizes, fault = {candidate.chunk: candidate.num_bytes for candidate in candidates}, ""
    if victims is None:
        if missing <= sum(sizes.values()):
            fault = f"all of them have {human_bytes(sum(sizes.values()))}, and None is for too little"
    elif not (
        isinstance(victims, tuple)
        and all(isinstance(index, int) and index in sizes for index in victims)
        and len({*victims}) == len(victims)
    ):
        fault = "a policy returns a tuple of some of them, each once"
    elif (freed := sum(sizes[index] for index in victims)) < missing:
        fault = f"these free {human_bytes(freed)}, and a policy names enough of them or none"
    if fault:
        raise GeminiError(
            f"the eviction policy {type(policy).__name__} was asked for {human_bytes(missing)} of chunks "
            f"{sorted(sizes)}, and answered {victims!r}: {fault}"
        )
    return victims  # type: ignore[no-any-return]


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
    """Evict first what was used longest ago: what :class:`NextUse` does where the schedule is not known."""

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        return take_in_order(candidates, missing, lambda c: c.last_use)


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


NEVER = 2**62
"""The next use of a chunk that is not needed again."""


def _uses(accesses: Sequence[Access], sizes: Mapping[int, int]) -> dict[int, list[int]]:
    """By chunk of ``sizes``, the moments that need it."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for moment, access in enumerate(accesses):
        for index in {*access.chunks} & sizes.keys():
            found[index].append(moment)
    return found


def moves_by_policy(
    accesses: Sequence[Access],
    *,
    sizes: Mapping[int, int],
    room: int,
    policy: EvictionPolicy,
    lasting: frozenset[int] = frozenset(),
) -> tuple[Moves, ...]:
    """Gather what a moment needs when it begins; the policy makes room for it among ``room`` bytes. BudgetExceeded if
    one moment needs more. ``sizes``: bytes of the chunks to gather; others are there anyway. ``lasting``: (frozen)
    chunks whose gathered weights outlive the step, played until it begins with what it leaves.
    """
    uses = _uses(accesses, sizes)
    standing: frozenset[int] = frozenset()
    for _ in range(8):
        moves, left = _play(accesses, sizes, room, policy, uses, lasting, standing)
        if left & lasting == standing:
            return moves
        standing = left & lasting
    return _play(accesses, sizes, room, policy, uses, frozenset(), frozenset())[0]


def _play(
    accesses: Sequence[Access],
    sizes: Mapping[int, int],
    room: int,
    policy: EvictionPolicy,
    uses: Mapping[int, list[int]],
    lasting: frozenset[int],
    standing: frozenset[int],
) -> tuple[tuple[Moves, ...], frozenset[int]]:
    """One step that begins with ``standing``: its moves, and what is gathered at its end."""
    gathered = dict.fromkeys(sorted(standing), -1)
    last_use = dict.fromkeys(gathered, -1)
    moves: list[Moves] = []

    def next_use(index: int, moment: int) -> int:
        at = bisect_right(uses[index], moment)
        if at < len(uses[index]):
            return uses[index][at]
        return len(accesses) + uses[index][0] if index in lasting else NEVER

    for moment, access in enumerate(accesses):
        needed = [index for index in access.chunks if index in sizes]
        fetch = [index for index in needed if index not in gathered]
        missing = sum(sizes[i] for i in gathered) + sum(sizes[i] for i in fetch) - room
        evict: tuple[int, ...] = ()
        if missing > 0:
            candidates = [
                Candidate(i, sizes[i], last_use[i], False, gathered[i], next_use(i, moment))
                for i in gathered
                if i not in needed
            ]
            victims = victims_of(policy, candidates, missing)
            if victims is None:
                least = sum(sizes[i] for i in needed)
                raise BudgetExceeded(
                    f"moment {access.moment} needs {human_bytes(least)} of gathered weights at once, and there is room "
                    f"for {human_bytes(room)}: raise the budget of the computing tier by {human_bytes(least - room)}"
                )
            evict = victims
            for index in evict:
                del gathered[index]
        for index in fetch:
            gathered[index] = moment
        last_use.update(dict.fromkeys(needed, moment))
        moves.append(Moves(evict, tuple(fetch)))
    return tuple(moves), frozenset(gathered)


def cheapest_moves(
    accesses: Sequence[Access],
    *,
    sizes: Mapping[int, int],
    room: int,
    costs: Mapping[int, float] | None = None,
    lasting: frozenset[int] = frozenset(),
    renewed: frozenset[int] = frozenset(),
    times: int = 1,
) -> tuple[Moves, ...]:
    """The moves that cost least, the same on every rank. Arguments and errors as of :func:`moves_by_policy`. ``costs``:
    of gathering a chunk once, in any unit (default: its bytes). ``renewed``: of ``lasting``, those whose gathered
    weights are overtaken every so many ``times``: then :func:`first_of` says what is gathered.
    """
    price = {index: float(size) for index, size in sizes.items()} if costs is None else dict(costs)
    greedy = moves_by_policy(accesses, sizes=sizes, room=room, policy=NextUse(), lasting=lasting)
    if not any(moves.evict for moves in greedy):
        return greedy  # everything stays from its first use on: nothing can be saved
    uses = _uses(accesses, sizes)
    gaps = [Gap(index, a + 1, b) for index, own in uses.items() for a, b in pairwise(own) if b > a + 1]
    gaps += [Gap(index, own[-1] + 1, own[0]) for index, own in uses.items() if index in lasting]
    saved = {
        gap: price[gap.chunk] * (1 - 1 / times if gap.stop <= gap.start and gap.chunk in renewed else 1) for gap in gaps
    }
    kept = _choose(gaps, accesses, sizes, room, saved)
    chosen = _moves_of(uses, [gap for gap in gaps if gap not in kept], len(accesses), lasting)

    def total(again: Sequence[Moves]) -> float:
        begun = there_before(accesses, again, renewed)
        return times * sum(price[i] for moves in again for i in moves.fetch) + sum(price[i] for i in begun)

    return min((chosen, greedy), key=total)


def first_of(again: Sequence[Moves], accesses: Sequence[Access], renewed: frozenset[int]) -> tuple[Moves, ...]:
    """The moves of the first of several steps that ``again`` is for: ``renewed`` chunks are not there when it begins,
    and are gathered when they are read first; in no moment does it hold more.
    """
    there: set[int] = set()
    found: list[Moves] = []
    for access, moves in zip(accesses, again, strict=True):
        evict = tuple(i for i in moves.evict if i not in renewed or i in there)
        there = there - {*evict} | {*moves.fetch}
        missing = tuple(i for i in access.chunks if i in renewed and i not in there)
        there |= set(missing)
        found.append(Moves(evict, (*moves.fetch, *missing)))
    return tuple(found)


class Gap(NamedTuple):
    """Moments ``start`` to ``stop`` - 1 do not need the chunk; ``stop`` <= ``start`` leads into the next step."""

    chunk: int
    start: int
    stop: int


def _choose(
    gaps: Sequence[Gap], accesses: Sequence[Access], sizes: Mapping[int, int], room: int, saved: Mapping[Gap, float]
) -> set[Gap]:
    """The gaps to keep chunks gathered in: maximise what they save, within the room that each moment leaves."""
    if not gaps:
        return set()
    # In whole units: a tighter relaxation.
    unit, changes = gcd(*(sizes[gap.chunk] for gap in gaps)), defaultdict[int, Counter[int]](Counter)
    for column, gap in enumerate(gaps):
        own = sizes[gap.chunk] // unit
        changes[gap.start][column] += own
        changes[gap.stop][column] -= own
        if gap.stop <= gap.start:
            changes[0][column] += own  # it leads into this step as well
    # A number for each moment, what is kept in it: that of the moment before and what changes, so that rows are short.
    rows = list[Row]()
    for number, access in enumerate(accesses, len(gaps)):
        before = {number - 1: 1.0} if number > len(gaps) else {}
        rows.append(({**changes[number - len(gaps)], **before, number: -1.0}, 0.0))
        rows.append(({number: 1.0}, (room - sum(sizes[i] for i in access.chunks if i in sizes)) // unit))
    most = max(saved.values()) or 1.0
    costs = [-saved[gap] / most for gap in gaps] + [0.0] * len(accesses)
    chosen = solve(costs, rows, [1] * len(gaps), gap=1e-3 if len(gaps) > 100 else 0.0, nodes=200)
    return {gaps[column] for column in chosen or ()}


def _moves_of(
    uses: Mapping[int, Sequence[int]], left: Sequence[Gap], num_moments: int, lasting: frozenset[int]
) -> tuple[Moves, ...]:
    """The moves of chunks that are there from their first use to their last, but for the gaps that are ``left``."""
    evict, fetch = (defaultdict[int, list[int]](list) for _ in range(2))
    for index, own in uses.items():
        if index not in lasting:
            fetch[own[0]].append(index)
            evict[own[-1] + 1].append(index)  # of the last moment the step's end does it
    for gap in left:
        evict[gap.start % num_moments].append(gap.chunk)
        fetch[gap.stop].append(gap.chunk)
    return tuple(Moves(tuple(sorted(evict[at])), tuple(sorted(fetch[at]))) for at in range(num_moments))
