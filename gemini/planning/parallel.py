"""A step of a model over a mesh: each stage planned and played by itself, put together by closed forms.

The ranks of a stage are alike, so one of each stage is planned and played (:func:`gemini.simulate`), with all its
micro-batches. What a pipeline adds to its slowest stage is the time in which that one has nothing to compute:

    bubble = (pp - 1) (c / (M v) + 2 h)        c: seconds that the slowest stage computes in a step of M micro-batches
                                               v: stages of a rank; h: seconds of handing on the hidden states of one
                                               micro-batch

for 1F1B (v = 1) and breadth first (D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", SC 2021, section 2.2; J. Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023). What else
a stage waits for (updates, gradients on their way) may partly be done in that time; nothing of it is taken off.

The step of a stage is cut out of the trace of the whole model: the moments of its blocks; the first stage has what
comes before the blocks as well, and the last one what comes after them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from gemini.errors import BudgetExceeded
from gemini.planning.costs import Costs, Efficiency, Grid, Group, MeshSizes, sent_in_ring
from gemini.planning.hardware import Hardware
from gemini.planning.plan import Plan
from gemini.planning.planes import compute_itemsize
from gemini.planning.simulate import simulate
from gemini.planning.timeline import Timeline, Track
from gemini.planning.trace import MemoryTrace, Moment, Phase, kept_among, times
from gemini.tiers import Tier


def balanced(weights: Sequence[float], num_stages: int) -> list[tuple[int, int]]:
    """Ranges of blocks, one for each stage and none empty, whose heaviest is as light as can be. ``weights``: of each
    block, and at last of what the last stage has besides.
    """
    blocks, rest = weights[:-1], weights[-1]
    sums, number = [*accumulate(blocks, initial=0.0)], len(blocks)
    # least[s][i]: the heaviest of s stages that have the first i blocks, at best, and where the last of them begins.
    least: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(1, num_stages + 1):
        row = {}
        for stop in range(stage, number + 1):
            extra = rest if stop == number else 0.0
            row[stop] = min(
                (max(least[-1][start][0], sums[stop] - sums[start] + extra), start)
                for start in range(stage - 1, stop)
                if start in least[-1]
            )
        least.append(row)
    cuts = [number]
    for stage in range(num_stages, 0, -1):
        cuts.append(least[stage][cuts[-1]][1])
    return list(pairwise(reversed(cuts)))


class Blocks:
    """The blocks of a traced model: the numbered modules with the most params. Raises ValueError if it has none."""

    def __init__(self, trace: MemoryTrace):
        sizes: Counter[str] = Counter()
        numbers: dict[str, set[int]] = {}
        for param in trace.params:
            parts = param.name.split(".")
            for at, part in enumerate(parts):
                if part.isdecimal():
                    path = ".".join(parts[:at])
                    sizes[path] += param.numel
                    numbers.setdefault(path, set()).add(int(part))
        if not sizes:
            raise ValueError(f"{trace.model} has no numbered blocks to make pipeline stages of")
        path = max(sizes, key=lambda path: (sizes[path], -len(path)))
        self.number = max(numbers[path]) + 1
        self._pattern = re.compile(re.escape(f"{path}." if path else "") + r"(\d+)(?:\.|$)")
        self._trace = trace

    def of(self, name: str) -> int | None:
        return int(found[1]) if (found := self._pattern.match(name)) else None

    def of_moments(self) -> list[int]:
        """For each moment the block that it belongs to: -1 for what comes before the first, ``number`` for what comes
        after the last. What runs between two blocks, and in backward after the first, belongs to the one that ran last.
        """
        found: list[int] = []
        now, phase = -1, Phase.FORWARD
        for moment in self._trace.moments:
            if phase is Phase.FORWARD and moment.phase is not Phase.FORWARD:
                now = self.number
            phase = Phase.FORWARD if moment.phase is Phase.FORWARD else Phase.BACKWARD
            block = self.of(moment.module)
            if block is not None:
                now = block
            elif phase is Phase.FORWARD and now == self.number - 1:
                now = self.number
            found.append(now)
        return found

    def flops(self) -> list[float]:
        """FLOP of each block, and at last of what comes after them."""
        found = [0.0] * (self.number + 1)
        for block, moment in zip(self.of_moments(), self._trace.moments, strict=True):
            found[max(block, 0)] += moment.flops
        return found


def stage_trace(trace: MemoryTrace, blocks: Blocks, start: int, stop: int, *, boundary_bytes: int) -> MemoryTrace:
    """A micro-batch of the stage of blocks ``[start, stop)``, which is given hidden states of ``boundary_bytes``."""
    first, last = start == 0, stop == blocks.number
    owners = blocks.of_moments()

    def is_here(block: int) -> bool:
        return start <= block < stop or (first and block < 0) or (last and block >= blocks.number)

    kept = [at for at, block in enumerate(owners) if is_here(block)]
    moments = [trace.moments[at] for at in kept]
    base = 0 if first or not kept or not kept[0] else trace.moments[kept[0] - 1].live_bytes - boundary_bytes
    read = {index for moment in moments for index in (*moment.params, *moment.gradients)}
    ran = {index for moment in trace.moments for index in moment.params}
    own = [i for i in range(len(trace.params)) if i in read or (first and i not in ran)]
    number = {index: position for position, index in enumerate(own)}
    elsewhere = {i for at, block in enumerate(owners) if not is_here(block) for i in trace.moments[at].params}

    def here(indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(number[i] for i in indices if i in number)

    def moved(moment: Moment) -> Moment:
        live = max(moment.live_bytes - base, 0)
        return replace(
            moment,
            params=here(moment.params),
            gradients=here(moment.gradients),
            live_bytes=live,
            peak_bytes=max(moment.peak_bytes - base, live),
        )

    return replace(
        trace,
        params=tuple(replace(trace.params[i], apart=trace.params[i].apart or i in elsewhere) for i in own),
        moments=tuple(map(moved, moments)),
        read_together=tuple(sorted({found for indices in trace.read_together if len(found := here(indices)) > 1})),
        kept_blocks=sum(start <= block < stop for block in kept_among(blocks.number, trace.kept_blocks)),
        tiled=None,
    )


def in_flight(trace: MemoryTrace, number: int) -> MemoryTrace:
    """The same step, with what so many micro-batches at once keep between forward and backward, this one of them."""
    forward = [moment.live_bytes for moment in trace.moments if moment.phase is Phase.FORWARD]
    more = (number - 1) * (forward[-1] if forward else 0)
    return replace(trace, moments=tuple(_of_all(moment, 1, more) for moment in trace.moments))


def breadth_first(trace: MemoryTrace, number: int) -> MemoryTrace:
    """One step of all micro-batches, moment by moment: what each of them keeps is there, and only one computes."""
    moments = tuple(_of_all(moment, number, (number - 1) * moment.live_bytes) for moment in trace.moments)
    return replace(trace, moments=moments, tokens=number * trace.tokens)


def _of_all(moment: Moment, number: int, beside: int) -> Moment:
    """The moment of so many micro-batches, of which the others have so many bytes ``beside``."""
    more = times(moment, number, "num_ops", "tp_bytes", "cp_bytes")
    return replace(more, live_bytes=moment.live_bytes + beside, peak_bytes=moment.peak_bytes + beside)


def block_by_block(trace: MemoryTrace, number: int) -> MemoryTrace:
    """The step of so many micro-batches as ``gemini.train_step`` makes it: a moment is that of all of them, with the
    bytes of the one that computes and of what the others wait with at an end of the stage, where gradients are
    complete. Raises ValueError for a step that is no walk through the blocks and back.
    """
    last, places = Blocks(trace).number - 1, Blocks(trace).of_moments()
    before_blocks = [m.live_bytes for at, m in zip(places, trace.moments, strict=True) if at < 0]
    owners = [min(max(at, 0), last) for at in places]
    runs = [[*run] for _, run in groupby(range(len(owners)), key=lambda at: owners[at])]
    if [owners[run[0]] for run in runs] != [*range(last), *range(last, -1, -1)]:
        raise ValueError(f"a step of {trace.model} is no walk through its blocks and back")
    reads = Counter(i for i, _ in {(i, at) for at, m in zip(owners, trace.moments, strict=True) for i in m.params})
    if max(reads.values()) > 1:
        name = trace.params[reads.most_common(1)[0][0]].name
        raise ValueError(f"{name} of {trace.model} is read in more than one of its stages")
    moments, read, before = list[Moment](), list[tuple[int, ...]](), 0
    saved = sum(trace.moments[at].saved_bytes for at in runs[min(1, last)])
    # What is made before the blocks for all of them (positions, a mask) every stage makes anew, for each micro-batch.
    anew = before_blocks[-1] - saved if before_blocks and last and not trace.kept_blocks else 0
    for place, run in enumerate(runs):
        own = [trace.moments[at] for at in run]
        others, before = max(before, own[-1].live_bytes), own[-1].live_bytes
        beside = (number - 1) * others + number * max(anew, 0) * min(place, len(runs) - 1 - place)
        moments += [replace(_of_all(moment, number, beside), gradients=()) for moment in own]
        complete = tuple(sorted({index for moment in own for index in moment.gradients}))
        moments[-1] = replace(moments[-1], gradients=complete)
        read.append(tuple(sorted({index for moment in own for index in moment.params})))
    return replace(
        trace,
        moments=tuple(moments),
        tokens=number * trace.tokens,
        read_together=tuple(sorted({*trace.read_together, *read})),
        micro_batches=number,
        stages=tuple(run[0] for run in runs),
        tiled=None if trace.tiled is None else block_by_block(trace.tiled, number),
    )


ORDERS = ("1f1b", "bfs")
"""In which order stages take micro-batches: one forward, one backward; or breadth first."""

LOOPS = 2
"""Stages of a rank that takes micro-batches breadth first, as ``gemini.Pipeline`` has them."""


class StageOutcome(NamedTuple):
    """One rank of a stage: the first of its blocks and the one after the last, the plan of all its micro-batches, and
    the step played, without the time in which it waits for other stages.
    """

    blocks: tuple[int, int]
    plan: Plan
    timeline: Timeline


@dataclass(frozen=True)
class MeshOutcome:
    """A step over a mesh: ``order`` is one of ``ORDERS``, or "" without stages; ``tokens`` are those of all ranks; in
    the ``bubble`` the slowest stage has nothing to compute; ``sent``: bytes that one rank sends at most, by what for,
    inside its machine and to others.
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
    each_kind: bool = False,
) -> MeshOutcome:
    """Plan and play a step over a mesh. BudgetExceeded names a stage that does not fit; ValueError for an unknown order
    and for a model that has fewer blocks than stages. ``trace``: of a micro-batch of the whole model on one rank, with
    its slices and parts of sequences. ``make``: plans a stage of it for so many micro-batches, in this order ("" for no
    stages). ``width``: of hidden states. ``order``: None for the quicker one that fits. ``each_kind``: of stages that
    have as many blocks, and are neither the first nor the last, play the first alone, where most micro-batches wait.
    """
    if order not in (None, *ORDERS):
        raise ValueError(f"order={order!r} is not known; use one of {', '.join(ORDERS)}")
    grid, boundary = Grid(sizes, per_machine), trace.tokens * width * compute_itemsize(trace.precision)
    parts = [*_stages(trace, sizes.pp, boundary, each_kind=each_kind)]
    found, refusals = list[MeshOutcome](), list[BudgetExceeded]()
    for each in ("",) if sizes.pp == 1 else ORDERS if order is None else (order,):
        stages = list[StageOutcome]()
        try:
            for number, blocks, own in parts:
                if each == "1f1b":
                    own = in_flight(own, min(micro_batches, sizes.pp - number))
                elif each == "bfs":
                    own = breadth_first(own, micro_batches)
                plan = make(own, 1 if each == "bfs" else micro_batches, each)
                stages.append(StageOutcome(blocks, plan, simulate(plan, hardware, schedule=schedule, mesh=sizes)))
        except BudgetExceeded as e:
            where = f"stage {number + 1} of {sizes.pp} (blocks {blocks[0]} to {blocks[1] - 1}): " if each else ""
            refusals.append(BudgetExceeded(f"{where}{e}"))
            continue
        turns = micro_batches * (LOOPS if each == "bfs" else 1)
        waits = _waits(stages, _costs(trace, hardware, grid), grid, turns, boundary)
        tokens = trace.tokens * micro_batches * sizes.shards
        found.append(MeshOutcome(sizes, micro_batches, each, tuple(stages), tokens, *waits))
    if not found:
        raise refusals[0]
    return min(found, key=lambda outcome: outcome.step_seconds)


def _waits(
    stages: list[StageOutcome], costs: Costs, grid: Grid, turns: int, boundary: int
) -> tuple[float, float, dict[str, tuple[int, int]]]:
    """The bubble, the seconds of the step, and what a rank sends. A step is its slowest stage with the bubble, or its
    messages, if these take longer. ``turns``: how often a rank computes; ``boundary``: bytes of hidden states.
    """
    sent, bubble, others = _sent(grid, stages), 0.0, grid.sizes.pp - 1
    if others:
        # To one rank, which is on this machine or on another.
        inside, between = (0, boundary) if grid.stages.local == 1 else (boundary, 0)
        sent["hidden states"] = (2 * turns * inside, 2 * turns * between)
        busy = [stage.timeline.busy for stage in stages]
        computing = max(own.get(Track.COMPUTE, 0.0) + own.get(Track.EXCHANGE, 0.0) for own in busy)
        bubble = others * (computing / turns + 2 * costs.wires(inside, between).seconds)
    slowest = max(stage.timeline.step_seconds for stage in stages)
    sending = costs.wires(*map(sum, zip(*sent.values(), strict=True))).seconds
    return bubble, max(slowest + bubble, sending), {name: both for name, both in sent.items() if any(both)}


def _costs(trace: MemoryTrace, hardware: Hardware, grid: Grid) -> Costs:
    return Costs(
        hardware,
        Efficiency(),
        compute=Tier.GPU if trace.target == "cuda" else Tier.CPU,
        precision=trace.arithmetic(trace.precision),
        local_ranks=min(grid.per_machine, grid.sizes.ranks),
    )


def least_seconds(
    trace: MemoryTrace, hardware: Hardware, sizes: MeshSizes, micro_batches: int, *, per_machine: int
) -> float:
    """The least that a step takes: computing and the exchanges inside of it, stages alike, and the smaller bubble."""
    grid, one = Grid(sizes, per_machine), 0.0
    costs = _costs(trace, hardware, grid)
    for moment in trace.moments:
        one += costs.compute(moment, measured=False).seconds
        one += costs.ring(grid.slices, moment.tp_bytes).seconds + costs.ring(grid.parts, moment.cp_bytes).seconds
    stage = one / sizes.pp * micro_batches
    return stage + (sizes.pp - 1) * stage / (micro_batches * LOOPS)


def _sent(grid: Grid, stages: Sequence[StageOutcome]) -> dict[str, tuple[int, int]]:
    """Bytes of the rank that sends most, by what for: inside its machine, and to others."""

    def most_sent(group: Group, by_stage: Iterable[int]) -> tuple[int, int]:
        inside, between = sent_in_ring(group, max(by_stage))
        return round(inside), round(between)

    steps = [(stage.plan.accumulate, stage.plan.trace.moments) for stage in stages]
    shared = (
        [s.num_bytes for s in stage.timeline.spans if s.track in (Track.GATHER, Track.REDUCE)] for stage in stages
    )
    return {
        "slices of layers": most_sent(grid.slices, (n * sum(m.tp_bytes for m in moments) for n, moments in steps)),
        "parts of sequences": most_sent(grid.parts, (n * sum(m.cp_bytes for m in moments) for n, moments in steps)),
        "weights and gradients": most_sent(grid.shards, map(sum, shared)),
    }


def _stages(
    trace: MemoryTrace, pp: int, boundary: int, *, each_kind: bool
) -> Iterator[tuple[int, tuple[int, int], MemoryTrace]]:
    """Each stage: its number, the first of its blocks and the one after the last, and its step."""
    if pp == 1:
        yield 0, (0, 0), trace
        return
    blocks, seen = Blocks(trace), set[int]()
    if pp > blocks.number:
        raise ValueError(f"{pp} stages of {trace.model}, which has only {blocks.number} blocks: use fewer stages")
    for number, (start, stop) in enumerate(balanced(blocks.flops(), pp)):
        is_between = 0 < number < pp - 1
        if not (each_kind and is_between and stop - start in seen):
            yield number, (start, stop), stage_trace(trace, blocks, start, stop, boundary_bytes=boundary)
        seen |= {stop - start} if is_between else set()
