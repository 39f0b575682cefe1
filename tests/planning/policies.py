"""Policies to compare others with; what a policy comes to, played as a plan; and whether a plan would run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemini.errors import PlanMismatch, human_bytes
from gemini.planning.hardware import Hardware
from gemini.planning.placement import Placement, Problem
from gemini.planning.plan import Plan, standing, window_room
from gemini.planning.planes import WEIGHTS
from gemini.planning.policy import Candidate, EvictionPolicy, moves_by_policy, take_in_order
from gemini.planning.simulate import simulate
from gemini.planning.timeline import Timeline
from gemini.planning.trace import MemoryTrace, accesses


class DoneThenLeastRecent:
    """Evict chunks whose gradients are complete first, then those whose last use is longest ago: forward and backward
    visit chunks in opposite orders, so there it makes the choice that knowing the future would make.
    """

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        return take_in_order(candidates, missing, lambda c: (not c.done, c.last_use))


class FirstInFirstOut:
    """Evict first what was gathered first, whatever has been used since."""

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        return take_in_order(candidates, missing, lambda c: c.arrived)


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
        return take_in_order(candidates, missing, lambda c: (c.chunk in self.staying, not c.done, c.last_use))


def simulate_policy(
    trace: MemoryTrace,
    problem: Problem,
    placement: Placement,
    policy: EvictionPolicy,
    hardware: Hardware,
    *,
    schedule: str = "overlapped",
) -> Timeline:
    """The same where a policy decides as it goes what makes room for what, instead of a plan that was made before.

    Raises:
        BudgetExceeded: if what one moment needs does not fit the windows.
    """
    plan = plan_by_policy(trace, problem, placement, policy)
    return simulate(plan, hardware, schedule=schedule)


def plan_by_policy(trace: MemoryTrace, problem: Problem, placement: Placement, policy: EvictionPolicy) -> Plan:
    """The plan that a policy amounts to: chunks are gathered when a moment needs them, and it chooses who goes."""
    weights = [homes[WEIGHTS] for homes in placement.homes]
    sizes = {i: problem.window_bytes(i) for i, home in enumerate(weights) if problem.needs_window(i, home)}
    lasting = frozenset(i for i in sizes if not problem.layout.chunks[i].trainable)
    room = window_room(problem, placement)
    moves = moves_by_policy(accesses(trace, problem.layout), sizes=sizes, room=room, policy=policy, lasting=lasting)
    return Plan(trace, problem, placement, moves)


def check_plan(plan: Plan) -> None:
    """Walk through the moves: every moment finds its chunks gathered, and none holds more than the windows' room.

    Raises:
        PlanMismatch: if the plan would not run.
    """
    room = window_room(plan.problem, plan.placement)
    needs = [plan.problem.needs_window(i, homes[WEIGHTS]) for i, homes in enumerate(plan.placement.homes)]
    sizes = [plan.problem.window_bytes(i) for i in range(len(plan.layout.chunks))]
    gathered: set[int] = set(standing(plan))
    batches = [*plan.moves, *plan.again, *plan.again]
    for access, moves in zip([*plan.accesses] * (len(batches) // max(len(plan.moves), 1)), batches, strict=True):
        gathered -= set(moves.evict)
        gathered |= set(moves.fetch)
        missing = [i for i in access.chunks if needs[i] and i not in gathered]
        if missing:
            raise PlanMismatch(f"the plan does not gather chunks {missing} for moment {access.moment}")
        held = sum(sizes[i] for i in gathered)
        if held > room:
            raise PlanMismatch(
                f"the plan gathers {human_bytes(held)} of weights in moment {access.moment}, where there is room for "
                f"{human_bytes(room)}"
            )
