"""Plans of several models with one budget, which compute in turn: a reference and rewards, then the policy. Each plans
with what those before it leave, as they are wrapped at run time (:mod:`gemini.sharing`):

    sum over models of what is kept + the largest working set <= budget

What is gathered stays for the next step where the windows of all models fit at once. Where they do not, a model finds
nothing of its own when its turn comes; but on a GPU, where windows have memory of their own, the model that is wrapped
last keeps as much as leaves the others their working sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from gemini.errors import BudgetExceeded, human_bytes, listed
from gemini.planning import working
from gemini.planning.costs import Speeds
from gemini.planning.hardware import Hardware
from gemini.planning.placement import StaticPlacement
from gemini.planning.plan import Plan, window_room
from gemini.planning.planes import RuleSpec, compute_itemsize, plane_specs, spec_of
from gemini.planning.planner import Others, budgets_of, check_settings, computing_tier, moves_for, plan
from gemini.planning.policy import LeastRecentlyUsed
from gemini.planning.rules import spec_for
from gemini.planning.trace import MemoryTrace, Phase
from gemini.planning.traffic import Traffic
from gemini.tiers import DRIVE, MemoryBudget, Tier

LEFT = ", with what the other models leave of the budget"
"""Whose refusal it is."""

_NOT_KEPT = ("windows", "gradients in flight", "activations in flight", "saved activations")


def evaluated(trace: MemoryTrace) -> MemoryTrace:
    """The forward of a step without gradients, of a model all of whose params are frozen: nothing is saved."""
    moments, saved = [], 0
    for moment in trace.moments:
        if moment.phase is Phase.FORWARD:
            live, peak = (max(n - saved, 0) for n in (moment.live_bytes, moment.peak_bytes))
            nothing: dict[str, Any] = {"saved_bytes": 0, "restored_bytes": 0, "gradients": ()}
            moments.append(replace(moment, live_bytes=live, peak_bytes=peak, **nothing))
            saved += moment.saved_bytes
    params = tuple(replace(param, trainable=False) for param in trace.params)
    how: dict[str, Any] = {"checkpointing": False, "kept_blocks": 0, "tile_tokens": None, "tiled": None}
    return replace(trace, params=params, moments=tuple(moments), **how)


def bytes_per_param(precision: str, gradients: str, rule: RuleSpec) -> tuple[float, float]:
    """Bytes of a param that is trained, and of one that is not."""
    planes = plane_specs(precision, gradients, rule, trainable=True)
    return sum(spec.page_bytes(2**20) for spec in planes.values()) / 2**20, compute_itemsize(precision)


def home_of_frozen(all_bytes: float, host_bytes: int, *, has_drive: bool) -> StaticPlacement:
    """Host memory if all models fit there with all that they need, else the drive: reading what is frozen costs less
    than what training would have to read and write in its place.
    """
    return StaticPlacement(weights_on_nvme=1.0 if has_drive and all_bytes > working.MARGIN * host_bytes else 0.0)


def kept_bytes(plan: Plan) -> dict[Tier, int]:
    """Bytes that a model holds while another one computes."""
    return {tier: sum(n for what, n in held.items() if what not in _NOT_KEPT) for tier, held in plan.held.items()}


def needed_bytes(plan: Plan) -> int:
    """Bytes that it needs besides of the computing tier, while it computes itself."""
    return plan.problem.in_flight + (plan.problem.working_set if plan.problem.moving(plan.placement) else 0)


@dataclass(frozen=True)
class Together:
    """Plans of models with one budget. Made by :func:`gemini.plan_together`.

    Attributes:
        plans: by the names of the models, in the order in which they are to be wrapped, each with its plan as
            ``GeminiConfig(placement=)``, and compute. ``traffic`` of a plan is that of all micro-batches of a step.
        budgets: bytes per tier of one rank.
    """

    plans: Mapping[str, Plan]
    budgets: Mapping[Tier, int]

    @property
    def working_set(self) -> int:
        """Bytes of gathered weights, and of gradients on their way, of the model that needs most at once."""
        return max(map(needed_bytes, self.plans.values()))

    @property
    def bytes_per_tier(self) -> dict[Tier, int]:
        """Bytes that all models keep, and the largest working set."""
        total = _kept(self.plans)
        total[next(iter(self.plans.values())).problem.compute] += self.working_set
        return {tier: total[tier] for tier in self.budgets}

    @property
    def traffic(self) -> Traffic:
        """Bytes over each boundary in one optimizer step, of all models; those of a model that is only evaluated at
        most: where its windows do not all stay between its turns, it counts as if none did.
        """
        return sum((each.traffic for each in self.plans.values()), Counter())

    def __str__(self) -> str:
        """Bytes that each tier holds of each model, against the budgets."""
        lines = []
        for name, each in self.plans.items():
            kept = listed({tier.value: num_bytes for tier, num_bytes in kept_bytes(each).items()})
            lines.append(f"{name}: keeps {kept}; gathers {human_bytes(needed_bytes(each))} at once")
        for tier, used in self.bytes_per_tier.items():
            lines.append(f"{tier.value:<5}{human_bytes(used):>11} of {human_bytes(self.budgets[tier]):>10}")
        return "\n".join([*lines, f"moved in a step: {listed(self.traffic)}"])


def plan_together(
    traces: Mapping[str, MemoryTrace],
    hardware: Hardware | None,
    budget: MemoryBudget | Mapping[Tier, int],
    *,
    accumulate: int = 1,
    ranks: int = 1,
    local_ranks: int | None = None,
    at_once: bool = False,
    **options: Any,
) -> Together:
    """Plan several models that compute in turn with one budget, a :class:`gemini.SharedBudget` at run time.

    Args:
        traces: a trace of each model by its name, in the order in which they are wrapped and compute. One without a
            trained param is only evaluated, once in each micro-batch: it has 2 bytes per param in half precision, in
            host memory if all models fit there with all that they need, else on the drive.
            :func:`gemini.planning.together.evaluated` makes such a trace of a step.
        hardware, budget, accumulate, ranks, local_ranks: as in :func:`gemini.plan`.
        at_once: leave room for what two models gather at once, as TRL's trainers need it.
        options: further arguments of :func:`gemini.plan`, for the models that are trained.

    Raises:
        BudgetExceeded: if they do not fit. The message names the model that does not.
        Others: as :func:`gemini.plan`.
    """
    if not traces:
        raise ValueError("plan_together takes a trace of one model or more, and was given none")
    if isinstance(budget, MemoryBudget) and budget.durable:
        raise ValueError("a durable store is of one model: plan with dataclasses.replace(budget, durable=False)")
    signature(plan).bind_partial(**options)  # TypeError for what it has not
    sharing = ranks if local_ranks is None else local_ranks
    given = {name: value for name, value in options.items() if value is not None}
    check_settings(given | {"accumulate": accumulate, "ranks": ranks, "local_ranks": sharing})
    budgets = budgets_of(budget, hardware, sharing)
    compute = computing_tier(budgets, options.pop("compute", None))
    rule = spec_of(options.get("optimizer"))
    beside = max((working.beside_bytes(trace.target, compute, rule) for trace in traces.values()), default=0)
    budgets[compute] = max(budgets[compute] - beside, 0)
    shared: dict[str, Any] = {"compute": compute, "accumulate": accumulate, "ranks": ranks, "local_ranks": local_ranks}
    frozen = {n: trace for n, trace in traces.items() if not any(param.trainable for param in trace.params)}
    needed = _all_bytes(traces, accumulate, options)
    home = home_of_frozen(needed, sharing * budgets[Tier.CPU], has_drive=DRIVE in budgets)
    peak = max((working.activation_bytes(trace, offloaded=False) for trace in frozen.values()), default=0)
    plans: dict[str, Plan] = {}
    for name, trace in traces.items():
        kept, needs = _kept(plans), max(map(needed_bytes, plans.values()), default=0)
        left = {t: (n - kept[t]) * (1 if t is Tier.GPU else sharing) for t, n in budgets.items()}
        others = Others(needs, peak if compute is Tier.GPU else 0, at_once)
        own: dict[str, Any] = options
        if name in frozen:  # what its forward takes is beside the others', which have the larger of both
            others = others._replace(activations=0)
            own = {key: options[key] for key in ("precision", "max_chunk", "schedule") if key in options}
            own |= {"placement": home, "activations": 0}
        try:
            plans[name] = plan(trace, hardware, left, others=others, **shared, **own)
        except BudgetExceeded as e:
            raise BudgetExceeded(f"{name}{LEFT}: {e}, beside what the others keep") from e
    speeds = Speeds.typical() if hardware is None else Speeds.of(hardware, budgets, sharing=sharing)
    return Together(_in_turn(plans, budgets[compute] - _kept(plans)[compute], speeds), budgets)


def _kept(plans: Mapping[str, Plan]) -> Counter[Tier]:
    return sum((Counter(kept_bytes(each)) for each in plans.values()), Counter[Tier]())


def _all_bytes(traces: Mapping[str, MemoryTrace], accumulate: int, options: Mapping[str, Any]) -> float:
    """Bytes of all models with all that they need, on all ranks together."""
    total = 0.0
    for trace in traces.values():
        precision = options.get("precision") or trace.precision
        rule = spec_for(spec_of(options.get("optimizer")), options.get("states", "exact"), precision)
        gradients = options.get("gradients") or ("accumulate" if accumulate > 1 else "retain")
        trained, frozen = bytes_per_param(precision, gradients, rule)
        total += sum((trained if param.trainable else frozen) * param.numel for param in trace.params)
    return total


def _in_turn(plans: Mapping[str, Plan], room: int, speeds: Speeds) -> dict[str, Plan]:
    """The plans with the moves that are left where others compute in between, with ``room`` for windows of all."""
    windows = {
        name: sum(each.problem.window_bytes(i) for i in each.problem.moving(each.placement))
        for name, each in plans.items()
    }
    all_stay = sum(windows.values()) <= room
    stays, has = dict.fromkeys(plans, all_stay), dict.fromkeys(plans, room)
    if not all_stay and any(each.problem.compute is Tier.GPU for each in plans.values()):
        memory = WindowMemory(plans, room)
        for name, each in plans.items():  # as they are wrapped
            memory.take(name, min(windows[name], window_room(each.problem, each.placement)))
        stays, has = memory.in_each_step({name: needed_bytes(each) for name, each in plans.items()})
    found = {}
    for name, each in plans.items():
        is_frozen = not any(chunk.trainable for chunk in each.layout.chunks)
        stands, lasting = stays[name], None
        if not stands or (is_frozen and has[name] < windows[name]):
            # What is read last and first, a tied weight, is there as long as its memory is.
            read = [frozenset(access.chunks) for access in each.accesses if access.chunks]
            lasting = read[0] & read[-1] if stands else frozenset()
        moves, again = moves_for(
            each.accesses,
            each.problem,
            each.placement,
            speeds,
            policy=LeastRecentlyUsed() if is_frozen else None,
            accumulate=each.accumulate if stands and not is_frozen else 1,
            room=has[name],
            lasting=lasting,
        )
        found[name] = replace(each, moves=moves, again=again)
    return found


class WindowMemory:
    """The memory of several models on a GPU for their windows, as their turns go round: ``own``, bytes by name."""

    def __init__(self, names: Iterable[str], room: int):
        self.own = dict.fromkeys(names, 0)
        self._turns, self._room = [*self.own], room

    def take(self, name: str, wanted: int) -> set[str]:
        """Let a model have as much. What it lacks it takes of the others, of the one first that has computed last.
        Returns those whose memory is another now: nothing that was in it is left.
        """
        had, turn = self.own[name], self._turns.index(name)
        missing = wanted - had - max(self._room - sum(self.own.values()), 0)
        changed = {name} if had < wanted else set()
        for other in reversed(self._turns[turn + 1 :] + self._turns[:turn]):
            if given := max(min(self.own[other], missing), 0):
                self.own[other] -= given
                missing -= given
                changed.add(other)
        self.own[name] = max(had, wanted - max(missing, 0))
        return changed

    def in_each_step(self, needs: Mapping[str, int]) -> tuple[dict[str, bool], dict[str, int]]:
        """Tell of each model whether its memory stays as it is while the others compute, and how much of it there is at
        least when it computes itself, in all steps but the first ones: those that come again and again.
        """
        steps: dict[tuple[int, ...], tuple[set[str], dict[str, int]]] = {}  # by what each had at its start
        # They repeat after a few; if they did not, no memory that has changed in a hundred would be relied on.
        while (start := tuple(self.own.values())) not in steps and len(steps) < 100:
            changed, has = set[str](), dict[str, int]()
            for name in self._turns:
                changed |= self.take(name, needs[name])
                has[name] = self.own[name]
            steps[start] = changed, has
        again = [*steps.values()][[*steps].index(start) if start in steps else 0 :]
        stays = {name: all(name not in changed for changed, _ in again) for name in self._turns}
        return stays, {name: min(has[name] for _, has in again) for name in self._turns}
