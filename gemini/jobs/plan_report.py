"""What ``gemini plan`` answers, as plain values: the screen prints them and ``--json`` writes them.

What each field is, the reference of the command line says (docs/reference/cli.md).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gemini.errors import BudgetExceeded, human_bytes
from gemini.jobs.errors import REFUSED
from gemini.jobs.plan_alternatives import Alternative
from gemini.jobs.plan_machine import Machine
from gemini.jobs.plan_settings import PlanSettings
from gemini.planning.break_even import Grow, break_even
from gemini.planning.plan import Plan
from gemini.planning.planes import GRADS, RuleSpec, plane_specs, precision_of
from gemini.planning.timeline import Timeline, Track
from gemini.planning.trace import MemoryTrace, Phase
from gemini.planning.traffic import by_name
from gemini.tiers import Tier

VERSION = 1
BEYOND = 3
"""The exit code for a plan that fits in what was given, which is not what the machine has."""


@dataclass(frozen=True)
class Activations:
    """Bytes beside params and states, of one micro-batch on one rank."""

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
        mfu: model FLOPs utilization: the FLOP/s without what checkpointing computes again, as a share of the GPU's peak
            (Chowdhery et al., PaLM, appendix B, https://arxiv.org/abs/2204.02311). None where no peak is known.
        nvme_written: bytes of a step that all ranks of a machine write to its drives.
        steps_until_worn: steps until those are as many as the drives are rated for; None where that is not known.
    """

    schedule: str
    seconds: float
    tokens_per_second: float
    flops_per_second: float
    busy: dict[str, float]
    waited: dict[str, float]
    break_even: int | None
    break_even_accumulating: int | None
    mfu: float | None = None
    nvme_written: int = 0
    steps_until_worn: int | None = None


@dataclass(frozen=True)
class StageReport:
    """One rank of a stage of a pipeline: its blocks up to ``stop_block``, which is none of them."""

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
    """A step over a mesh; of one that does not fit, ``mesh`` is the first that was tried."""

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
    """The answer. Over a mesh, all but the batch, the tokens and the time is of a rank of the slowest stage."""

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
    beyond: str
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

    @property
    def exit_code(self) -> int:
        """0 if it fits, 2 if it does not, 3 if it does in more memory than the machine has that was named."""
        return REFUSED if not self.fits else BEYOND if self.beyond else 0

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps({"gemini": "plan report", "version": VERSION, "fits": self.fits, **asdict(self)}, indent=1)


def report_of(
    settings: PlanSettings,
    machine: Machine,
    trace: MemoryTrace,
    plan: Plan | None,
    timeline: Timeline | None = None,
    *,
    tokens_when_free: int | None = None,
    refusal: BudgetExceeded | None = None,
    checkpointed: MemoryTrace | None = None,
    whole_peak_bytes: int | None = None,
    changes: tuple[str, ...] = (),
) -> PlanReport:
    """The answer to what was asked: a plan, with its time if the speeds of the machine are known, or a refusal.

    ``trace`` is one micro-batch on one rank, ``checkpointed`` the same step with gradient checkpointing,
    ``tokens_when_free`` a break-even that was played.
    """
    rule = settings.rule_in(trace.precision)
    ranks, accumulate, gradients = machine.ranks, settings.accumulate, settings.kept_gradients
    if plan is not None:
        ranks, accumulate, gradients = plan.layout.ranks, plan.accumulate, plan.problem.gradients
    needs = _needs(trace, rule, gradients, ranks)
    states = sum(n for kind, n in needs.items() if kind not in GRADS) * ranks
    top = max(trace.moments, key=lambda moment: moment.peak_bytes, default=None)
    return PlanReport(
        model=trace.model,
        num_params=trace.num_params,
        num_trained=sum(p.numel for p in trace.params if p.trainable),
        precision=trace.precision,
        gradients=gradients,
        checkpointing=trace.checkpointing,
        tile_tokens=trace.tile_tokens,
        batch=dict(trace.batch),
        tokens=trace.tokens * accumulate * ranks,
        accumulate=accumulate,
        ranks=ranks,
        compute=machine.compute.value,
        machine=None if machine.hardware is None else machine.hardware.name,
        optimizer=rule.name,
        bytes_per_param=plan.bytes_per_param if plan is not None else states / max(1, trace.num_params),
        needs=needs,
        budgets=_by_name(machine.budgets_of_rank),
        origins=_by_name(machine.origins),
        beyond=_beyond(settings, machine),
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
        held={} if plan is None else _by_name(plan.held),
        update={} if plan is None else _updates(plan),
        streamed=0 if plan is None else sum(plan.layout.chunks[index].payload for index in plan.placement.streamed),
        moved={} if plan is None else by_name(plan.traffic),
        step=None
        if timeline is None or plan is None
        else _step(timeline, settings.schedule, tokens_when_free, plan, trace, machine),
        changes=changes,
    )


def _beyond(settings: PlanSettings, machine: Machine) -> str:
    """What is given of more than the machine has, and how to say that it is there."""
    if not machine.beyond or machine.hardware is None:
        return ""
    name, given = machine.hardware.name, {tier.value: getattr(settings, tier.value) for tier in machine.beyond}
    more = " and ".join(
        f"--{tier.value} {given[tier.value]} is more than {name} has ({human_bytes(capacity)})"
        for tier, capacity in machine.beyond.items()
    )
    sizes = ",".join(f"{tier}={size}" for tier, size in given.items())
    return f"{more}. If yours has that, say so: --machine {settings.machine},{sizes}"


def _by_name(of: Mapping[Tier, Any]) -> dict[str, Any]:
    return {tier.value: value for tier, value in of.items()}


def _step(
    timeline: Timeline, schedule: str, tokens_when_free: int | None, plan: Plan, trace: MemoryTrace, machine: Machine
) -> StepReport:
    serial = schedule == "serial"
    accumulating = break_even(timeline, serial=True, grow=Grow.ACCUMULATE) if serial else None
    busy = sorted(timeline.busy.items(), key=lambda item: -item[1])
    written = by_name(plan.traffic).get("cpu->nvme", 0) * machine.sharing
    rated = None if machine.hardware is None else machine.hardware.figures.get("nvme_endurance")
    return StepReport(
        schedule=schedule,
        seconds=timeline.step_seconds,
        tokens_per_second=timeline.tokens_per_second,
        flops_per_second=timeline.flops / timeline.step_seconds if timeline.step_seconds else 0.0,
        busy={track.value: seconds for track, seconds in busy},
        waited={cause: seconds for cause, seconds in timeline.stalls.items() if seconds > 0},
        break_even=tokens_when_free,
        break_even_accumulating=accumulating,
        mfu=_mfu(timeline, trace, machine),
        nvme_written=written,
        steps_until_worn=None if rated is None or not written else int(rated.value / written),
    )


def _mfu(timeline: Timeline, trace: MemoryTrace, machine: Machine) -> float | None:
    key = "gpu_flops_fp32" if trace.precision == "fp32" else "gpu_flops_bf16"
    peak = None if machine.hardware is None or machine.compute is not Tier.GPU else machine.hardware.figures.get(key)
    of_all = sum(moment.flops for moment in trace.moments)
    if peak is None or peak.source.startswith("measured") or not of_all or not timeline.step_seconds:
        return None
    again = sum(moment.flops for moment in trace.moments if moment.phase is Phase.RECOMPUTE)
    return timeline.flops * (1 - again / of_all) / timeline.step_seconds / peak.value


COMPUTE = Track.COMPUTE.value


def _needs(trace: MemoryTrace, rule: RuleSpec, gradients: str, ranks: int) -> dict[str, int]:
    """Bytes of each kind of plane on one rank, all chunks together."""
    layout = trace.layout(ranks=ranks, rule=rule)
    found: Counter[str] = Counter()
    for chunk in layout.chunks:
        precision, own = precision_of(chunk, trace.precision), rule.of(chunk.exact)
        specs = plane_specs(precision, gradients, own, trainable=chunk.trainable, coded=chunk.coded)
        found.update({kind: spec.page_bytes(chunk.numel // layout.ranks) for kind, spec in specs.items()})
    return dict(found)


def _updates(plan: Plan) -> dict[str, int]:
    found: Counter[str] = Counter()
    for index, chunk in enumerate(plan.layout.chunks):
        if chunk.trainable:
            found[plan.update_tier(index).value] += chunk.payload
    return dict(found)
