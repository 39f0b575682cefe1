"""A step of a model over a mesh: each stage planned and played by itself, put together by closed forms.

The ranks of a stage are alike, so one of each stage is planned and played (:func:`gemini.simulate`), with all its
micro-batches. What a pipeline adds to its slowest stage is the time in which that one has nothing to compute:

    bubble = (pp - 1) (c / (M v) + 2 h)        c: seconds that the slowest stage computes in a step of M micro-batches
                                               v: stages of a rank; h: seconds of handing on the hidden states of one
                                               micro-batch

for 1F1B (v = 1) and breadth first (D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", SC 2021, section 2.2; J. Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023). What else
a stage waits for (updates, gradients on their way) may partly be done in that time; nothing of it is taken off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gemini.errors import BudgetExceeded
from gemini.planning.costs import Costs, Efficiency
from gemini.planning.hardware import Hardware
from gemini.planning.mesh import Grid, Group, MeshSizes, sent_in_ring
from gemini.planning.plan import Plan
from gemini.planning.planes import compute_itemsize
from gemini.planning.simulate import simulate
from gemini.planning.stages import Blocks, balanced, breadth_first, in_flight, stage_trace
from gemini.planning.timeline import Timeline, Track
from gemini.planning.trace import MemoryTrace
from gemini.tiers import Tier

ORDERS = ("1f1b", "bfs")
"""In which order stages take micro-batches: one forward, one backward; or breadth first."""

LOOPS = 2
"""Stages of a rank that takes micro-batches breadth first, as ``gemini.Pipeline`` has them."""


@dataclass(frozen=True)
class StageOutcome:
    """One rank of a stage.

    Attributes:
        blocks: the first of the model's blocks, and the one after the last.
        plan: of all its micro-batches.
        timeline: the step played, without the time in which it waits for other stages.
    """

    blocks: tuple[int, int]
    plan: Plan
    timeline: Timeline


@dataclass(frozen=True)
class MeshOutcome:
    """A step over a mesh.

    Attributes:
        micro_batches: of a step, on each rank.
        order: of the micro-batches, one of ``ORDERS``; "" without stages.
        stages: one of each.
        tokens: of a step, on all ranks.
        bubble: seconds in which the slowest stage has nothing to compute.
        step_seconds: of a step; as long as what its slowest rank sends, if that is longer.
        sent: bytes that one rank sends in a step, at most, by what it sends them for, inside its machine and to others.
    """

    sizes: MeshSizes
    micro_batches: int
    order: str
    stages: tuple[StageOutcome, ...]
    tokens: int
    bubble: float
    step_seconds: float
    sent: Mapping[str, tuple[int, int]]

    @property
    def slowest(self) -> StageOutcome:
        return max(self.stages, key=lambda stage: stage.timeline.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds if self.step_seconds else 0.0


def play_mesh(
    trace: MemoryTrace,
    hardware: Hardware,
    sizes: MeshSizes,
    make: Callable[[MemoryTrace, int, str], Plan],
    *,
    micro_batches: int,
    width: int,
    per_machine: int,
    order: str | None = None,
    schedule: str = "overlapped",
    efficiency: Efficiency | None = None,
    ends: bool = False,
) -> MeshOutcome:
    """Plan and play a step over a mesh.

    Args:
        trace: of a micro-batch of the whole model on one rank of the mesh: with its slices and its parts of sequences.
        make: plans a stage of that trace for so many micro-batches in a step, in this order ("" without stages).
        micro_batches: of a step.
        width: of hidden states.
        per_machine: ranks on one machine.
        order: of the micro-batches; None for the quicker one of those that fit.
        ends: play only the first and the last stage, which have what comes before and after the blocks.

    Raises:
        BudgetExceeded: if a stage does not fit, naming it.
        ValueError: for a model that has fewer blocks than stages.
    """
    orders = ("",) if sizes.pp == 1 else ORDERS if order is None else (order,)
    found: list[MeshOutcome] = []
    refusal: BudgetExceeded | None = None
    for each in orders:
        try:
            found.append(
                _play(
                    trace,
                    hardware,
                    Grid(sizes, per_machine),
                    make,
                    micro_batches,
                    width,
                    each,
                    schedule,
                    efficiency,
                    ends=ends,
                )  # fmt: skip
            )
        except BudgetExceeded as e:
            refusal = refusal or e
    if not found:
        assert refusal is not None
        raise refusal
    return min(found, key=lambda outcome: outcome.step_seconds)


def least_seconds(
    trace: MemoryTrace, hardware: Hardware, sizes: MeshSizes, micro_batches: int, *, per_machine: int,
    efficiency: Efficiency | None = None,
) -> float:  # fmt: skip
    """What a step on a GPU takes at least: what computing and the exchanges inside of it take, stages alike, and the
    bubble of the order with the smaller one.
    """
    costs = Costs(
        hardware, efficiency or Efficiency(), compute=Tier.GPU if trace.target == "cuda" else Tier.CPU,
        precision=trace.precision, local_ranks=min(per_machine, sizes.ranks),
    )  # fmt: skip
    grid, one = Grid(sizes, per_machine), 0.0
    for moment in trace.moments:
        one += costs.compute(moment, measured=False).seconds
        one += costs.ring(grid.slices, moment.tp_bytes).seconds + costs.ring(grid.parts, moment.cp_bytes).seconds
    stage = one / sizes.pp * micro_batches
    return stage + (sizes.pp - 1) * stage / (micro_batches * LOOPS)


def _play(
    trace: MemoryTrace, hardware: Hardware, grid: Grid, make: Callable[[MemoryTrace, int, str], Plan],
    micro_batches: int, width: int, order: str, schedule: str, efficiency: Efficiency | None, *,
    ends: bool,
) -> MeshOutcome:  # fmt: skip
    sizes = grid.sizes
    boundary = trace.tokens * width * compute_itemsize(trace.precision)
    stages: list[StageOutcome] = []
    for number, (start, stop, own) in enumerate(_stages(trace, sizes.pp, boundary)):
        if ends and 0 < number < sizes.pp - 1:
            continue
        if order == "1f1b":
            own = in_flight(own, min(micro_batches, sizes.pp - number))
        elif order == "bfs":
            own = breadth_first(own, micro_batches)
        accumulate = 1 if order == "bfs" else micro_batches
        try:
            plan = make(own, accumulate, order)
        except BudgetExceeded as e:
            if sizes.pp == 1:
                raise
            where = f"stage {number + 1} of {sizes.pp} (blocks {start} to {stop - 1})"
            raise BudgetExceeded(f"{where}: {e}") from e
        timeline = simulate(plan, hardware, schedule=schedule, efficiency=efficiency, mesh=sizes)
        stages.append(StageOutcome((start, stop), plan, timeline))
    slowest = max(stage.timeline.step_seconds for stage in stages)
    loops = LOOPS if order == "bfs" else 1
    handed = 0 if sizes.pp == 1 else 2 * micro_batches * loops * boundary
    sent = {name: _sent(group, tracks, stages) for name, group, tracks in _groups(grid)}
    if handed:  # to one rank, which is on this machine or on another
        sent["hidden states"] = (0, handed) if grid.stages.local == 1 else (handed, 0)
    links = _seconds(hardware, efficiency or Efficiency(), sent)
    bubble = 0.0
    if sizes.pp > 1:
        computing = max(stage.timeline.busy.get(Track.COMPUTE, 0.0) + stage.timeline.busy.get(Track.EXCHANGE, 0.0)
                        for stage in stages)  # fmt: skip
        one = _seconds(hardware, efficiency or Efficiency(), {"": _to_neighbour(grid.stages, boundary)})
        bubble = (sizes.pp - 1) * (computing / (micro_batches * loops) + 2 * one)
    return MeshOutcome(
        sizes, micro_batches, order, tuple(stages), trace.tokens * micro_batches * sizes.shards, bubble,
        max(slowest + bubble, links), {name: both for name, both in sent.items() if any(both)},
    )  # fmt: skip


def _stages(trace: MemoryTrace, number: int, boundary: int) -> Iterator[tuple[int, int, MemoryTrace]]:
    """The first block, the one after the last, and the step of each stage."""
    if number == 1:
        yield 0, 0, trace
        return
    blocks = Blocks(trace)
    if number > blocks.number:
        raise ValueError(f"{number} stages of {trace.model}, which has only {blocks.number} blocks: use fewer stages")
    for start, stop in balanced(blocks.weights([float(moment.flops) for moment in trace.moments]), number):
        yield start, stop, stage_trace(trace, blocks, start, stop, boundary_bytes=boundary)


def _to_neighbour(group: Group, num_bytes: int) -> tuple[int, int]:
    return (0, num_bytes) if group.local == 1 else (num_bytes, 0)


def _groups(grid: Grid) -> tuple[tuple[str, Group, tuple[str, ...]], ...]:
    return (
        ("slices of layers", grid.slices, ("tp",)),
        ("parts of sequences", grid.parts, ("cp",)),
        ("weights and gradients", grid.shards, ()),
    )


def _sent(group: Group, dims: tuple[str, ...], stages: list[StageOutcome]) -> tuple[int, int]:
    """Of the rank that sends most: inside its machine, and to others."""
    most = 0
    for stage in stages:
        if dims:
            of_batch = sum(getattr(moment, f"{dim}_bytes") for moment in stage.plan.trace.moments for dim in dims)
            most = max(most, of_batch * stage.plan.accumulate)
        else:
            spans = (span for span in stage.timeline.spans if span.track in (Track.GATHER, Track.REDUCE))
            most = max(most, sum(span.num_bytes for span in spans))
    if group.size == 1:
        return 0, 0
    inside, between = sent_in_ring(group, most)
    return round(inside), round(between)


def _seconds(hardware: Hardware, efficiency: Efficiency, sent: Mapping[str, tuple[int, int]]) -> float:
    """Of sending all that: the slower one of the two wires."""
    found = 0.0
    for at, key in enumerate(("interconnect", "network" if hardware.has("network") else "interconnect")):
        num_bytes = sum(both[at] for both in sent.values())
        if num_bytes:
            speed = hardware.get(key, needed_for="sharing a model among ranks") * efficiency.of(hardware, key)
            found = max(found, num_bytes / speed)
    return found
