"""From a trace, a machine and budgets to a plan, for ``gemini plan`` and ``GeminiDDP(placement="auto")``: candidates
are played with moves made on demand, and the one that costs a step least is the plan, with the moves that cost least.
Whether a model fits is decided by the same arithmetic that the runtime reserves by.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeVar

from gemini.errors import BudgetExceeded, PlanMismatch, parse_bytes
from gemini.planning import working
from gemini.planning.costs import Speeds
from gemini.planning.hardware import Hardware
from gemini.planning.homes import cheapest_homes
from gemini.planning.layout import DEFAULT_MAX_CHUNK, Layout, part_of
from gemini.planning.placement import Placement, Problem, StaticPlacement, by_fractions, check_fits, fill_fastest
from gemini.planning.plan import SCHEDULES, Moves, Plan, window_room
from gemini.planning.planes import (
    ADAM,
    GRADIENTS,
    PRECISIONS,
    RuleSpec,
    check_gradients,
    compute_itemsize,
    factor_bytes,
    spec_of,
)
from gemini.planning.policy import EvictionPolicy, NextUse, cheapest_moves, first_of, moves_by_policy
from gemini.planning.rules import spec_for
from gemini.planning.trace import Access, MemoryTrace, accesses
from gemini.planning.traffic import fetch_traffic, path
from gemini.tiers import OFFLOAD_TO, MemoryBudget, Tier


class Others(NamedTuple):
    """Models with the same budget that compute while this one does not: bytes of the computing tier that one of them
    gathers at once, and takes beside that, at most; and whether room is left for both of them at once.
    """

    gathered: int = 0
    activations: int = 0
    at_once: bool = False


def plan(
    trace: MemoryTrace,
    hardware: Hardware | None,
    budget: MemoryBudget | Mapping[Tier, int],
    *,
    precision: str | None = None,
    gradients: str | None = None,
    compute: Tier | None = None,
    placement: Placement | StaticPlacement | None = None,
    offload_activations: str | None = None,
    activations: str | int | None = None,
    accumulate: int = 1,
    ranks: int = 1,
    local_ranks: int | None = None,
    max_chunk: int = DEFAULT_MAX_CHUNK,
    schedule: str = "overlapped",
    optimizer: Any = None,
    states: str = "exact",
    others: Others | None = None,
) -> Plan:
    """Choose where the planes of every chunk are stored and what moves when, so that a step is fast and no tier exceeds
    its budget. (A plane is one kind of data of a chunk: its weights, gradients, or one optimizer state.)

    Args:
        trace: one micro-batch of the step to plan for. If it has a tiled form of the step as well, that is used where
            the ordinary one does not fit; ``plan.trace`` is the one that was used.
        hardware: the machine. None for typical speeds.
        budget: bytes per tier of one machine. If a tier is missing in a :class:`~gemini.tiers.MemoryBudget`, most of
            the machine's capacity is used (``gemini.planning.working.MARGIN`` of it). A mapping has exactly the tiers
            it names.
        precision: as in ``GeminiConfig``. By default that of the trace.
        gradients: as in ``GeminiConfig``. By default "retain", and "accumulate" with several micro-batches.
        compute: the tier that computes. By default the GPU if it has a budget, else the CPU.
        placement: fixed homes, for which only moves are planned. By default homes are chosen too.
        offload_activations: as in ``GeminiConfig``. "auto": to host memory if the step is faster with it, or does not
            fit without.
        activations: GPU memory for activations and workspaces, as in ``GeminiConfig``. By default what the trace needs.
        accumulate: micro-batches per optimizer step.
        ranks: the number of processes that divide the model among them.
        local_ranks: how many of them are on this machine. By default all.
        max_chunk: as in ``GeminiConfig``.
        schedule: which time of a step is made small. "overlapped": that of the busiest of all units that work at the
            same time. "serial": the sum of everything, for ``GeminiConfig(overlap=False)``.
        optimizer: as in ``GeminiConfig``: the update rule, or its spec. By default Adam.
        states: as in ``GeminiConfig``: "exact" or "compact".
        others: of a budget that is shared, of which ``budget`` is what others leave; see :func:`gemini.plan_together`.

    Returns:
        A :class:`Plan`: for ``GeminiConfig(placement=)``, :func:`gemini.simulate`, or a file.

    Raises:
        BudgetExceeded: if the model does not fit. The message has the numbers and the cheapest change.
        MissingFigure: if the hardware lacks a speed that the plan needs.
        PlanMismatch: if the trace is not of a whole forward and backward.
        ValueError: for an unknown setting, and for a placement of other chunks or planes.
    """
    gradients = gradients or ("accumulate" if accumulate > 1 else "retain")
    if not isinstance(placement, (Placement, StaticPlacement, type(None))):
        raise TypeError(f"placement= is a gemini.StaticPlacement, or homes (plan.placement), got {placement!r:.80}")
    names = {"precision": precision or trace.precision, "gradients": gradients, "schedule": schedule}
    sharing = ranks if local_ranks is None else local_ranks
    counts = {"accumulate": accumulate, "ranks": ranks, "local_ranks": sharing, "max_chunk": max_chunk}
    check_settings(names | {"offload_activations": offload_activations} | counts)
    if not trace.moments:
        raise PlanMismatch(f"the trace of {trace.model} has no moments: trace a whole forward and backward")
    if precision == "fp32":
        trace = trace.with_fp32(())  # all are
    rule = spec_for(spec_of(optimizer), states, precision or trace.precision)
    check_gradients(gradients, rule)
    if gradients == "transient" and accumulate > 1:
        raise ValueError(
            f'gradients="transient" has one backward per update, accumulate={accumulate} several: leave one'
        )
    budgets = budgets_of(budget, hardware, sharing)
    speeds = Speeds.typical() if hardware is None else Speeds.of(hardware, budgets, sharing=sharing)

    pose = partial(
        pose_problem,
        budgets=budgets,
        precision=precision or trace.precision,
        gradients=gradients,
        compute=compute,
        activations=None if activations is None else parse_bytes(activations, what="activations="),
        ranks=ranks,
        sharing=sharing,
        max_chunk=max_chunk,
        rule=rule,
        durable=isinstance(budget, MemoryBudget) and budget.durable,
        others=others,
    )

    def choose(trace: MemoryTrace, overlap: bool) -> Plan:
        planner = Planner(trace, speeds, accumulate=accumulate, schedule=schedule, hardware=hardware)
        posed = partial(pose, trace, overlap=overlap)
        return planner.best_of(lambda where: posed(offload_activations=where), placement, offload_activations)

    return first_that_fits(choose, trace, overlap=schedule == "overlapped")


def check_settings(given: Mapping[str, Any]) -> None:
    """Raise ValueError for those of these arguments of :func:`plan` that are unknown words, or numbers below 1."""
    for name, known in _KNOWN.items():
        if name in given and given[name] not in known:
            raise ValueError(f"{name}={given[name]!r} is not known; use one of {', '.join(map(repr, known))}")
    for name in _COUNTS:
        if not (isinstance(number := given.get(name, 1), int) and number >= 1):
            raise ValueError(f"{name}={number!r}: it is at least 1, and a whole number")


_KNOWN: dict[str, tuple[str | None, ...]] = {
    "precision": PRECISIONS,
    "gradients": GRADIENTS,
    "schedule": SCHEDULES,
    "offload_activations": (None, "auto", *OFFLOAD_TO),
}
_COUNTS = ("accumulate", "ranks", "local_ranks", "max_chunk")

Chosen = TypeVar("Chosen")


def first_that_fits(choose: Callable[[MemoryTrace, bool], Chosen], trace: MemoryTrace, *, overlap: bool) -> Chosen:
    """Let ``choose`` plan the step as it is, or else of the first one in tiles that fits; of each with staging for
    every worker, or, where only that does not fit, with one tile of it: what has to be staged is updated in turn then.
    Raises BudgetExceeded if none fits; of the last one, which is nearest to it.
    """
    *first, last = product(trace.forms, (True, False) if overlap else (False,))
    for form, with_workers in first:
        with suppress(BudgetExceeded):
            return choose(form, with_workers)
    return choose(*last)


def budgets_of(
    budget: MemoryBudget | Mapping[Tier, int], hardware: Hardware | None, sharing: int = 1
) -> dict[Tier, int]:
    """Bytes per tier for one of ``sharing`` ranks of a machine. Raises ValueError for a budget that holds nothing, or
    bytes of what is no tier.
    """
    found: dict[Tier, int] = {}
    if not isinstance(budget, MemoryBudget) and (unknown := [key for key in budget if not isinstance(key, Tier)]):
        raise ValueError(f"a budget of {unknown[0]!r}, which is no gemini.Tier: give gemini.MemoryBudget(cpu=...)")
    for tier in Tier:
        if isinstance(budget, MemoryBudget):
            declared = budget.bytes_of(tier)
            if declared is None and hardware is not None and hardware.capacity(tier) is not None:
                declared = int((hardware.capacity(tier) or 0) * working.MARGIN)
        else:
            declared = budget.get(tier)
            declared = None if declared is None else parse_bytes(declared, what=f"the {tier.value} budget")
        if declared is not None and (declared > 0 or tier is Tier.CPU):
            found[tier] = declared if tier is Tier.GPU else declared // sharing
    if Tier.CPU not in found:
        raise ValueError(
            "a plan needs a budget of host memory, for staging buffers: give cpu=, or hardware with a capacity of it"
        )
    return found


def computing_tier(budgets: Mapping[Tier, int], compute: Tier | None) -> Tier:
    """The tier that computes: by default the GPU if it has a budget. Raises ValueError if it has none."""
    compute = Tier(compute or (Tier.GPU if Tier.GPU in budgets else Tier.CPU))
    if compute not in budgets:
        raise ValueError(f"compute={compute.value!r} has no budget; there are {', '.join(t.value for t in budgets)}")
    return compute


def pose_problem(
    trace: MemoryTrace,
    budgets: Mapping[Tier, int],
    *,
    precision: str,
    gradients: str = "retain",
    compute: Tier | None = None,
    activations: int | None = None,
    offload_activations: str | None = None,
    ranks: int = 1,
    sharing: int = 1,
    replicas: int = 1,
    reduce_itemsize: int | None = None,
    max_chunk: int = DEFAULT_MAX_CHUNK,
    overlap: bool = True,
    rule: RuleSpec = ADAM,
    durable: bool = False,
    others: Others | None = None,
) -> Problem:
    """The problem: what is placed, and the bytes that no plane may take; beside ``others``, to whom the context of a
    GPU belongs as well, so that it is no part of the budget.
    """
    compute = computing_tier(budgets, compute)
    on_gpu, many = compute is Tier.GPU, ranks > 1 or replicas > 1
    layout = trace.layout(ranks=ranks, max_chunk=max_chunk, rule=rule)
    _refuse_divided(layout, rule)
    largest = max(chunk.numel for chunk in layout.chunks)
    whole = working.whole_numel(layout, rule)
    tile = working.tile_numel(largest, whole)
    sets = working.staging_sets(compute, precision, overlap=overlap, many=ranks > 1)
    offload_to = None if offload_activations is None else Tier(offload_activations)
    if offload_to is compute or not trace.checkpoint_bytes:
        offload_to = None  # nothing has to move
    if not on_gpu:
        activations = 0  # they are computed in host memory, beside its budget
    elif activations is None:
        activations = working.activation_bytes(trace, offloaded=offload_to is not None)
    working_set = working.gathered_at_once(trace, layout, precision)
    gathered = 0 if others is None else others.gathered
    if others is not None:
        activations = max(activations, others.activations)
        gathered += working_set if others.at_once and gathered else 0
    leaves = overlap and on_gpu and not many and gradients != "transient"
    itemsize = reduce_itemsize or (4 if precision == "fp32" else 2)
    behind = overlap and gradients == "transient"
    return Problem(
        layout=layout,
        precision=precision,
        gradients=gradients,
        budgets={tier: n for tier, n in budgets.items() if on_gpu or tier is not Tier.GPU},
        sharing=sharing,
        durable=durable,
        compute=compute,
        working_set=working_set,
        staging=sets * working.staging_bytes(tile, rule),
        activations=activations,
        in_flight=_in_flight(layout, itemsize, divided=many, behind=behind) + working.sums_at_hand(trace, layout),
        flights=working.flight_bytes(trace) if overlap and on_gpu and offload_to else 0,
        waiting=working.waiting_gradients(layout, compute_itemsize(precision)) if leaves else 0,
        exchange=working.scratch_bytes(ranks, min(tile, working.PIECE), replicas) if many else 0,
        max_chunk=max_chunk,
        offloaded=trace.checkpoint_bytes if offload_to else 0,
        offload_to=offload_to,
        device_staging=working.device_staging_bytes(largest, rule, whole, overlap=overlap) if on_gpu else 0,
        rule=rule,
        beside=working.beside_bytes(trace.target, compute, rule) if others is None else 0,
        others=gathered,
        factors=sum(
            factor_bytes(rule.factors, param.shape) for param in trace.params if param.trainable and rule.factors
        ),
    )


def _in_flight(layout: Layout, itemsize: int, *, divided: bool, behind: bool) -> int:
    """Bytes of gradients on their way: whole ones that are to be ``divided``, or those that are updated ``behind``."""
    if divided:
        return working.gradients_in_flight(layout, itemsize)
    sizes = [chunk.numel * chunk.grad_itemsize(itemsize) for chunk in layout.chunks if chunk.trainable]
    return working.WAITING_GRADIENTS * max(sizes, default=0) if behind else 0


def _refuse_divided(layout: Layout, rule: RuleSpec) -> None:
    """Raise ValueError for a rule of whole params where a trained one, which it names, would be divided among ranks."""
    if not rule.whole or layout.ranks == 1:
        return
    for chunk in layout.chunks:
        for slot in chunk.slots if chunk.trainable else ():
            first = part_of(slot, chunk.numel, layout.ranks, slot.start * layout.ranks // chunk.numel)
            if first.numel != slot.numel or rule.factors:
                raise ValueError(
                    f"the rule {rule.name!r} updates whole params, and {slot.name!r} would be divided among "
                    f"{layout.ranks} ranks: use a rule that takes one element after the other (gemini.optim), or ranks "
                    "that are replicas of the model (a 2-D mesh)"
                )


@dataclass(frozen=True)
class Planner:
    """Makes and compares the plans of one trace. ``policy``: who makes moves, on demand; None: the cheapest ones."""

    trace: MemoryTrace
    speeds: Speeds
    accumulate: int = 1
    schedule: str = "serial"
    hardware: Hardware | None = None
    policy: EvictionPolicy | None = None

    def best_of(
        self,
        pose: Callable[[str | None], Problem],
        placement: Placement | StaticPlacement | None,
        offload_activations: str | None,
    ) -> Plan:
        """The plan that costs least; with "auto" of leaving checkpointed activations and keeping them on the host.
        ``pose`` makes the problem with them there; None is where they were computed.
        """
        plans, refusals = list[Plan](), list[BudgetExceeded]()
        places: tuple[str | None, ...] = (offload_activations,)
        if offload_activations == "auto":
            there_is_a_choice = pose(None).compute is Tier.GPU and self.trace.checkpoint_bytes > 0
            places = (None, "cpu") if there_is_a_choice else (None,)
        for where in places:
            try:
                plans.append(self.choose(pose(where), placement, where))
            except BudgetExceeded as e:
                refusals.append(e)
        if not plans:
            raise refusals[0]  # where activations stay as the user has them
        return self.refined(min(plans, key=self.cost))  # of equals the first: nothing is moved without a gain

    def choose(
        self, problem: Problem, placement: Placement | StaticPlacement | None, offload_activations: str | None
    ) -> Plan:
        """The best homes, with moves made on demand: as good a measure for the choice, and quick."""
        if placement is not None:
            if isinstance(placement, StaticPlacement):
                placement = by_fractions(problem, placement)
            check_fits(problem, placement)
            return self.with_moves(problem, placement, offload_activations)
        may_stream = problem.compute is Tier.GPU and self.speeds.measured_update_gpu
        ways: list[Callable[[], Placement | None]] = [partial(fill_fastest, problem)]
        ways += [partial(self._homes, problem, streaming=how) for how in ((False, True) if may_stream else (False,))]
        plans, refusals = list[Plan](), list[BudgetExceeded]()
        for way in ways:
            try:
                if (homes := way()) is not None:
                    check_fits(problem, homes)
                    plans.append(self.with_moves(problem, homes, offload_activations))
            except BudgetExceeded as e:
                refusals.append(e)
            if plans and all(tier is problem.compute for own in plans[0].placement.homes for tier in own.values()):
                return plans[0]  # there is nothing to decide
        if not plans:
            raise refusals[0]
        # The plain filling unless there is something to be gained: what people expect, and easy to read.
        best, *others = [(self.cost(plan), plan) for plan in plans]
        for other in others:
            best = other if other[0] < 0.999 * best[0] else best
        return best[1]

    def _homes(self, problem: Problem, *, streaming: bool) -> Placement | None:
        sizes = {i: problem.window_bytes(i) for i in range(len(problem.layout.chunks))}
        steps = accesses(self.trace, problem.layout)
        poorest = moves_by_policy(steps, sizes=sizes, room=problem.working_set, policy=NextUse())
        counts, n = Counter(i for moves in poorest for i in moves.fetch), self.accumulate
        return cheapest_homes(
            problem,
            [n * counts[i] for i in sizes],
            self.speeds,
            accumulate=n,
            overlapped=self.schedule == "overlapped",
            compute_seconds=n * self._compute_seconds(problem),
            streaming=streaming,
        )

    def _compute_seconds(self, problem: Problem) -> float:
        if self.trace.seconds is not None:
            return self.trace.seconds
        figure = f"{problem.compute.value}_flops_{'fp32' if problem.precision == 'fp32' else 'bf16'}"
        if self.hardware is None or not self.hardware.has(figure):
            return 0.0
        return self.trace.flops / self.hardware.get(figure, needed_for="the time of forward and backward")

    def with_moves(self, problem: Problem, placement: Placement, offload_activations: str | None) -> Plan:
        """A placement with the moves that the policy makes on demand."""
        n, policy = self.accumulate, self.policy or NextUse()
        steps = accesses(self.trace, problem.layout)
        moves, again = moves_for(steps, problem, placement, self.speeds, policy=policy, accumulate=n)
        return Plan(self.trace, problem, placement, moves, offload_activations, n, again)

    def refined(self, plan: Plan) -> Plan:
        """The same homes with the moves that cost least, unless a policy is to make them."""
        if self.policy is not None:
            return plan
        moves, again = moves_for(plan.accesses, plan.problem, plan.placement, self.speeds, accumulate=plan.accumulate)
        return replace(plan, moves=moves, again=again)

    def cost(self, plan: Plan) -> float:
        """Seconds of a step beside its computing: of all moves and updates, or of the busiest track."""
        tracks: defaultdict[str, float] = defaultdict(float)
        traffic, away = plan.traffic, plan.problem.offload_to
        for way in () if away is None else (*path(plan.problem.compute, away), *path(away, plan.problem.compute)):
            traffic = traffic + Counter({way: self.accumulate * plan.problem.offloaded})
        for boundary, num_bytes in traffic.items():
            track = boundary.outer.value if boundary.outer.in_files else str(boundary)
            tracks[track] += self.speeds.seconds(boundary, num_bytes)
        for index, chunk in enumerate(plan.layout.chunks):
            if chunk.trainable:
                tier = plan.update_tier(index)
                each = self.speeds.update(tier, plan.problem.rule.of(chunk.exact))
                tracks["update gpu" if tier is Tier.GPU else "update"] += each * chunk.numel / plan.layout.ranks
        if self.schedule != "overlapped":
            return sum(tracks.values())
        compute = self.accumulate * self._compute_seconds(plan.problem)
        return max([compute, *tracks.values()]) + 0.01 * sum(tracks.values())


def moves_for(
    steps: tuple[Access, ...],
    problem: Problem,
    placement: Placement,
    speeds: Speeds | None = None,
    *,
    policy: EvictionPolicy | None = None,
    accumulate: int = 1,
    room: int | None = None,
    lasting: frozenset[int] | None = None,
) -> tuple[tuple[Moves, ...], tuple[Moves, ...]]:
    """The moves of a placement, for these accesses: those that cost least, or those that ``policy`` makes on demand; of
    the first micro-batch, and of every further one (empty if there is none). ``room``: bytes for windows, if not what
    the budget leaves them; ``lasting``: chunks whose gathered weights outlive a step, if not all frozen ones. Raises
    BudgetExceeded if one moment needs more gathered weights than there is room for.
    """
    speeds = speeds or Speeds.typical()
    room = window_room(problem, placement) if room is None else room
    moving = problem.moving(placement)
    sizes = {i: problem.window_bytes(i) for i in sorted(moving)}
    if lasting is None:
        lasting = frozenset(i for i in moving if not problem.layout.chunks[i].trainable)
    renewed = moving - lasting if accumulate > 1 else frozenset()
    lasting |= renewed  # until the update, which comes after the last micro-batch
    if policy is not None:
        moves = moves_by_policy(steps, sizes=sizes, room=room, policy=policy, lasting=lasting)
    else:
        # A copy within the computing tier (a shard gathered from ranks, a cast) is not free either: at memory speed.
        costs = {i: speeds.cost(fetch_traffic(problem, placement.homes[i], i)) + n * 1e-12 for i, n in sizes.items()}
        how = {"lasting": lasting, "renewed": renewed}
        moves = cheapest_moves(steps, sizes=sizes, room=room, costs=costs, **how, times=accumulate)
    return (first_of(moves, steps, renewed), moves) if renewed else (moves, ())
