"""Whether a plan would run: its moves, walked through moment by moment."""

from __future__ import annotations

from gemini.errors import PlanMismatch, human_bytes
from gemini.planning.plan import Plan, standing, window_rooms
from gemini.planning.planes import WEIGHTS


def check_plan(plan: Plan) -> None:
    """Walk through the moves: every moment finds its chunks gathered, and none holds more than the windows' room.

    Raises:
        PlanMismatch: if the plan would not run.
    """
    rooms = window_rooms(plan.problem, plan.placement, plan.accesses)
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
        room = rooms[access.moment]
        if held > room:
            raise PlanMismatch(
                f"the plan gathers {human_bytes(held)} of weights in moment {access.moment}, where there is room for "
                f"{human_bytes(room)}"
            )
