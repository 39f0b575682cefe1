"""What ``gemini plan`` answers, as plain values: the screen prints them and ``--json`` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from gemini.errors import BudgetExceeded
from gemini.jobs.plan_alternatives import Alternative
from gemini.planning.break_even import Grow, break_even
from gemini.planning.plan import Plan
from gemini.planning.planes import ADAM, GRADS, RuleSpec, plane_specs
from gemini.planning.timeline import Timeline, Track
from gemini.planning.trace import MemoryTrace
from gemini.planning.traffic import by_name
from gemini.tiers import Tier

VERSION = 1


@dataclass(frozen=True)
class Question:
    """What was asked: a step, on what.

    Attributes:
        trace: of one micro-batch on one rank.
        accumulate: micro-batches of an optimizer step.
        gradients: what is kept between backward and update.
        ranks: GPUs (or, without, processes) that share the model.
        compute: where forward and backward run.
        machine: its name; None where only sizes were given.
        budgets: bytes per tier of one rank.
        origins: where each budget comes from, in words.
        schedule: "overlapped" or "serial".
        rule: the planes of the update rule, as its states are kept.
    """

    trace: MemoryTrace
    accumulate: int
    gradients: str
    ranks: int
    compute: Tier
    machine: str | None
    budgets: Mapping[Tier, int]
    origins: Mapping[Tier, str]
    schedule: str = "overlapped"
    rule: RuleSpec = ADAM

    @property
    def tokens(self) -> int:
        """Positions that one optimizer step works on, on all ranks."""
        return self.trace.tokens * self.accumulate * self.ranks


@dataclass(frozen=True)
class Activations:
    """Bytes beside params and states, of one micro-batch on one rank.

    Attributes:
        peak_bytes: the most at once.
        peak_module: the module that computes then, "" for the model itself.
        peak_phase: what the model does then.
        checkpoint_bytes: inputs of checkpointed blocks that wait for backward, the most at once.
        buffer_bytes: the model's buffers.
        checkpointed_peak_bytes: what ``peak_bytes`` would be with gradient checkpointing; None if that was not asked.
        whole_peak_bytes: what ``peak_bytes`` would be without tiles of tokens, which the planner chose to have; None if
            it did not choose them.
        offloaded_to: where the inputs of checkpointed blocks wait for backward; None for where they are.
    """

    peak_bytes: int
    peak_module: str
    peak_phase: str
    checkpoint_bytes: int
    buffer_bytes: int
    checkpointed_peak_bytes: int | None = None
    offloaded_to: str | None = None
    whole_peak_bytes: int | None = None


@dataclass(frozen=True)
class StepReport:
    """How long a step takes, as predicted.

    Attributes:
        seconds: of a step.
        tokens_per_second: on all ranks.
        flops_per_second: of one rank.
        busy: seconds that each track works, the longest first: what bounds the step comes first.
        waited: seconds that computing waits, by cause.
        break_even: tokens per step from which on offload is free, with a larger micro-batch; None if there is none.
        break_even_accumulating: the same with more micro-batches of this size; None also where it was not asked.
    """

    schedule: str
    seconds: float
    tokens_per_second: float
    flops_per_second: float
    busy: dict[str, float]
    waited: dict[str, float]
    break_even: int | None
    break_even_accumulating: int | None


@dataclass(frozen=True)
class StageReport:
    """One rank of a stage of a pipeline.

    Attributes:
        first_block, stop_block: its blocks, and the one after the last.
        num_params: of this rank, in slices.
        held: bytes of each tier.
        seconds: of its step, without waiting for other stages.
    """

    first_block: int
    stop_block: int
    num_params: int
    held: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class RunnerUp:
    """A mesh that was not the best one; ``compute_bytes``: of the computing tier, on the rank that has most."""

    mesh: str
    order: str
    micro_batches: int
    tokens_per_second: float
    compute_bytes: int


@dataclass(frozen=True)
class MeshReport:
    """A step over a mesh.

    Attributes:
        mesh: the sizes of its dims, in words; of one that does not fit, the first that was tried.
        num_params: of the whole model.
        order: in which stages take micro-batches: "1f1b", "bfs" (breadth first), or "" without stages.
        stages: one rank of each; empty without stages.
        bubble: seconds in which the slowest stage has nothing to compute.
        sent: bytes that a rank sends in a step, by what for: inside its machine, and to others.
        runners_up: of ``--parallel auto``, the quickest first.
        chosen: whether the mesh was found by ``--parallel auto``.
    """

    mesh: str
    ranks: int
    num_params: int
    order: str
    micro_batches: int
    stages: tuple[StageReport, ...] = ()
    bubble: float = 0.0
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)
    runners_up: tuple[RunnerUp, ...] = ()
    chosen: bool = False


@dataclass(frozen=True)
class PlanReport:
    """The answer.

    Attributes:
        optimizer: the name of the update rule, and of how its states are kept.
        needs: bytes per kind of content, of one rank, wherever they live.
        refusal: why it does not fit; None if it does.
        held: bytes that each tier holds at most, by kind of plane and of working memory; empty where it does not fit.
        update: params whose update runs on a tier.
        streamed: those of them on the GPU whose states come from host memory and go back there.
        moved: bytes over each boundary in a step of one rank.
        changes: what to change, the cheapest first.
        alternatives: what else the machine could do with this step; empty where that was not asked.
        mesh: of a step over one: then all else but the batch, the tokens and the time of the step is of a rank of its
            slowest stage.
    """

    model: str
    num_params: int
    num_trained: int
    precision: str
    gradients: str
    checkpointing: bool
    tile_tokens: int | None
    batch: dict[str, tuple[int, ...]]
    tokens: int
    accumulate: int
    ranks: int
    compute: str
    machine: str | None
    optimizer: str
    bytes_per_param: float
    needs: dict[str, int]
    budgets: dict[str, int]
    origins: dict[str, str]
    activations: Activations
    refusal: str | None = None
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    update: dict[str, int] = field(default_factory=dict)
    streamed: int = 0
    moved: dict[str, int] = field(default_factory=dict)
    step: StepReport | None = None
    changes: tuple[str, ...] = ()
    mesh: MeshReport | None = None
    alternatives: tuple[Alternative, ...] = ()

    @property
    def fits(self) -> bool:
        return self.refusal is None

    def to_json(self) -> str:
        """One JSON object; its fields are described in the reference of the command line."""
        return json.dumps({"gemini": "plan report", "version": VERSION, "fits": self.fits, **asdict(self)}, indent=1)


def report_of(
    question: Question,
    plan: Plan | None,
    timeline: Timeline | None = None,
    *,
    tokens_when_free: int | None = None,
    refusal: BudgetExceeded | None = None,
    checkpointed: MemoryTrace | None = None,
    whole_peak_bytes: int | None = None,
    changes: tuple[str, ...] = (),
) -> PlanReport:
    """The answer to ``question``: a plan, with its time if the speeds of the machine are known, or a refusal.

    ``checkpointed`` is the same step with gradient checkpointing, ``tokens_when_free`` a break-even that was played.
    """
    trace = question.trace
    needs = _needs(question)
    trained = sum(p.numel for p in trace.params if p.trainable)
    states = sum(n for kind, n in needs.items() if kind not in GRADS) * question.ranks
    held, update = ({}, {}) if plan is None else (held_by(plan), _updates(plan))
    top = max(trace.moments, key=lambda moment: moment.peak_bytes, default=None)
    return PlanReport(
        model=trace.model,
        num_params=trace.num_params,
        num_trained=trained,
        precision=trace.precision,
        gradients=question.gradients,
        checkpointing=trace.checkpointing,
        tile_tokens=trace.tile_tokens,
        batch=dict(trace.batch),
        tokens=question.tokens,
        accumulate=question.accumulate,
        ranks=question.ranks,
        compute=question.compute.value,
        machine=question.machine,
        optimizer=question.rule.name,
        bytes_per_param=plan.bytes_per_param if plan is not None else states / max(1, trace.num_params),
        needs=needs,
        budgets={tier.value: n for tier, n in question.budgets.items()},
        origins={tier.value: words for tier, words in question.origins.items()},
        activations=Activations(
            trace.peak_bytes,
            top.module if top else "",
            top.phase.value if top else "",
            trace.checkpoint_bytes,
            trace.buffer_bytes,
            None if checkpointed is None else checkpointed.peak_bytes,
            None if plan is None else plan.offload_activations,
            whole_peak_bytes,
        ),
        refusal=None if refusal is None else str(refusal),
        held=held,
        update=update,
        streamed=0 if plan is None else sum(plan.layout.chunks[index].payload for index in plan.placement.streamed),
        moved={} if plan is None else by_name(plan.traffic),
        step=None if timeline is None else _step(timeline, question.schedule, tokens_when_free),
        changes=changes,
    )


def _step(timeline: Timeline, schedule: str, tokens_when_free: int | None) -> StepReport:
    serial = schedule == "serial"
    accumulating = break_even(timeline, serial=True, grow=Grow.ACCUMULATE) if serial else None
    busy = sorted(timeline.busy.items(), key=lambda item: -item[1])
    return StepReport(
        schedule=schedule,
        seconds=timeline.step_seconds,
        tokens_per_second=timeline.tokens_per_second,
        flops_per_second=timeline.flops / timeline.step_seconds if timeline.step_seconds else 0.0,
        busy={track.value: seconds for track, seconds in busy},
        waited={cause: seconds for cause, seconds in timeline.stalls.items() if seconds > 0},
        break_even=tokens_when_free,
        break_even_accumulating=accumulating,
    )


COMPUTE = Track.COMPUTE.value


def _needs(question: Question) -> dict[str, int]:
    """Bytes of each kind of plane on one rank, all chunks together."""
    trace, rule = question.trace, question.rule
    layout = trace.layout(ranks=question.ranks, rule=rule)
    found: dict[str, int] = {}
    for chunk in layout.chunks:
        specs = plane_specs(
            trace.precision, question.gradients, rule.of(chunk.exact), trainable=chunk.trainable, coded=chunk.coded
        )
        for kind, spec in specs.items():
            found[kind] = found.get(kind, 0) + spec.page_bytes(chunk.numel // layout.ranks)
    return found


def held_by(plan: Plan) -> dict[str, dict[str, int]]:
    """What each tier holds at most: planes, then what is spoken for besides."""
    problem = plan.problem
    held: dict[str, dict[str, int]] = {tier.value: {} for tier in Tier if tier in problem.budgets}
    for index, homes in enumerate(plan.placement.homes):
        for kind, num_bytes in problem.plane_bytes(index).items():
            at = held[homes[kind].value]
            at[kind] = at.get(kind, 0) + num_bytes
    spoken_for = problem.demands(plan.placement)
    compute, host = held[problem.compute.value], held[Tier.CPU.value]
    rest = dict(spoken_for)
    named: tuple[tuple[Tier, dict[str, int], str, int], ...] = (
        (problem.compute, compute, "context", problem.beside),
        (problem.compute, compute, "activations", problem.activations),
        (problem.compute, compute, "gathered weights", problem.working_set),
        (problem.compute, compute, "whole gradients", problem.in_flight),
        (problem.compute, compute, "staging", problem.device_staging if plan.placement.streamed else 0),
        (Tier.CPU, host, "staging", problem.staging),
        (Tier.CPU, host, "exchange", problem.exchange),
        (Tier.CPU, host, "factors", problem.factors),
        (Tier.CPU, host, "temporaries", problem.temporaries),
    )
    if problem.offload_to is not None:
        named += ((problem.offload_to, held[problem.offload_to.value], "saved activations", problem.offloaded),)
    for tier, at, what, num_bytes in named:
        if num_bytes and rest.get(tier, 0) >= num_bytes:
            at[what] = num_bytes
            rest[tier] -= num_bytes
    if problem.durable:
        held[Tier.NVME.value]["spare slots"] = problem.spare_slots(plan.placement)
    for tier, num_bytes in rest.items():
        if num_bytes:
            held[tier.value]["other"] = num_bytes
    return held


def _updates(plan: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    for index, chunk in enumerate(plan.layout.chunks):
        if chunk.trainable:
            tier = plan.update_tier(index).value
            found[tier] = found.get(tier, 0) + chunk.payload
    return found
