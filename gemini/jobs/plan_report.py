"""What ``gemini plan`` answers, as plain values: ``--json`` writes them, and the screen says them in 80 columns.

What each field is, the reference of the command line says (docs/reference/cli.md).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from gemini.errors import BudgetExceeded, human_bytes
from gemini.jobs.errors import REFUSED
from gemini.jobs.planner import Machine
from gemini.jobs.screen import fact, human_count, human_rate, in_options, row, shown_bytes
from gemini.jobs.settings import PlanSettings
from gemini.planning.break_even import TOLERANCE, Grow, break_even
from gemini.planning.plan import Plan
from gemini.planning.planes import ADAM, GRADS, RuleSpec, plane_specs, precision_of
from gemini.planning.timeline import Timeline, Track, human_seconds
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
class Alternative:
    """Another way to run the step; ``fits`` is None where it cannot be, and ``result`` says why."""

    options: str
    beside: str
    fits: bool | None
    tokens_per_second: float | None
    result: str


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


class Answer(NamedTuple):
    """A report, and what can be written of it: the plan of one model, and its step in time."""

    report: PlanReport
    plan: Plan | None
    timeline: Timeline | None


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
    found: dict[str, Any] = {}
    if plan is not None:
        ranks, accumulate, gradients = plan.layout.ranks, plan.accumulate, plan.problem.gradients
        found = {
            "held": _by_name(plan.held),
            "update": _updates(plan),
            "streamed": sum(plan.layout.chunks[index].payload for index in plan.placement.streamed),
            "moved": by_name(plan.traffic),
        }
        if timeline is not None:
            found["step"] = _step(timeline, settings.schedule, tokens_when_free, plan, trace, machine)
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
            peak_bytes=trace.peak_bytes,
            peak_module=top.module if top else "",
            peak_phase=top.phase.value if top else "",
            checkpoint_bytes=trace.checkpoint_bytes,
            buffer_bytes=trace.buffer_bytes,
            checkpointed_peak_bytes=None if checkpointed is None else checkpointed.peak_bytes,
            offloaded_to=None if plan is None else plan.offload_activations,
            whole_peak_bytes=whole_peak_bytes,
        ),
        refusal=None if refusal is None else str(refusal),
        changes=changes,
        **found,
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


# ---- the screen ------------------------------------------------------------------------------------------------------

FEW_STEPS = 100_000
"""Fewer steps than this until drives are worn out are a warning; of ten times as many nothing is said."""

_TRACKS = {
    "compute": "computing",
    "update": "the update",
    "host to gpu": "the link from host to GPU",
    "gpu to host": "the link from GPU to host",
    "nvme read": "reading from NVMe",
    "nvme write": "writing to NVMe",
    "all-gather": "gathering between ranks",
    "reduce-scatter": "reducing between ranks",
    "exchange": "layers in slices and sequences in parts",
}
"""What keeps a step as long as it is, in words."""

_ORDERS = {"1f1b": "one forward, one backward", "bfs": "breadth first"}
_STAGES_SHOWN = 8


def screen(report: PlanReport) -> list[str]:
    """The lines, as ``say`` takes them: parts with an empty line between them."""
    parts = (_head, _verdict, _mesh, _homes, _facts, _runners_up, _changes, _alternatives)
    found: list[str] = []
    for part in parts:
        lines = [*part(report)]
        found += ["", *lines] if lines and found else lines
    return found


def _head(report: PlanReport) -> Iterator[str]:
    whole = report if report.mesh is None else report.mesh  # of which the rest is one rank
    frozen = report.num_params - report.num_trained if report.mesh is None else 0
    of_them = f", {human_count(frozen)} of them frozen" if frozen else ""
    yield f"{report.model}, {human_count(whole.num_params)} params{of_them}, {report.precision}"
    shapes = sorted({"x".join(map(str, shape)) for shape in report.batch.values()})
    micro_batches = report.accumulate if report.mesh is None else report.mesh.micro_batches
    parts = [f"{', '.join(shapes) or 'a batch'} tokens"]
    if micro_batches > 1:
        parts.append(f"{micro_batches} micro-batches")
    if report.checkpointing:
        parts.append("gradient checkpointing")
    if report.tile_tokens is not None:
        parts.append(f"tiles of {report.tile_tokens:,} tokens{_why_tiles(report)}")
    if whole.ranks > 1:
        parts.append(f"{whole.ranks} {'GPUs' if report.compute == 'gpu' else 'processes'}")
    if report.gradients != "retain":
        parts.append(f"gradients {report.gradients}")
    if micro_batches * whole.ranks > 1 and (report.fits or report.mesh is None):
        parts.append(f"{report.tokens:,} tokens a step")
    yield fact("step", "; ".join(parts))
    given = [f"{tier} {human_bytes(n)} {report.origins.get(tier, '')}".rstrip() for tier, n in report.budgets.items()]
    if report.machine:
        given.append(f"machine {report.machine}")
    yield fact("given, each" if report.ranks > 1 else "given", "; ".join(given))


def _why_tiles(report: PlanReport) -> str:
    without = report.activations.whole_peak_bytes
    return "" if without is None else f" (auto: without them {human_bytes(without)} beside params, which do not fit)"


def _verdict(report: PlanReport) -> Iterator[str]:
    if report.fits:
        gradients = report.needs.get("grad", 0) * report.ranks / max(1, report.num_trained)
        more = f", and {gradients:.2f} for gradients until the update" if gradients else ""
        rule = "" if report.optimizer == ADAM.name else f" with {report.optimizer}"
        if report.beyond:
            yield f"FITS, BUT {report.beyond}"
        verdict = "it takes" if report.beyond else "FITS"
        yield f"{verdict}: {report.bytes_per_param:.2f} bytes per trained param{rule}{more}"
        return
    refusal, _, change = (report.refusal or "").partition(" Cheapest change: ")
    yield "DOES NOT FIT: " + refusal.partition(" does not fit: ")[2] or refusal
    if change:
        yield fact("cheapest change", in_options(change, "--nvme"))
    needs = ", ".join(f"{kind} {human_bytes(n)}" for kind, n in report.needs.items())
    yield fact("it needs", f"{human_bytes(sum(report.needs.values()))} for states and gradients: {needs}")


def _mesh(report: PlanReport) -> Iterator[str]:
    """The ranks of a mesh: its stages, and what a rank sends."""
    mesh = report.mesh
    if mesh is None:
        return
    rank = "a GPU" if report.compute == "gpu" else "a rank"
    order = f"; {_ORDERS[mesh.order]}" if mesh.order else ""
    yield fact("best mesh" if mesh.chosen else "mesh", f"{mesh.mesh}{order}")
    if mesh.stages:
        tiers = mesh.stages[0].held
        widths = (-15, 10, 9, *(11 for _ in tiers), 9)
        yield row(widths, f"{rank} of stage", "blocks", "params", *tiers, "works")
        half, number = _STAGES_SHOWN // 2, len(mesh.stages)
        for at, stage in enumerate(mesh.stages, 1):
            if number <= _STAGES_SHOWN or at <= half or at > number - half:
                blocks, held = f"{stage.first_block}-{stage.stop_block - 1}", map(human_bytes, stage.held.values())
                params, works = human_count(stage.num_params), human_seconds(stage.seconds)
                yield row(widths, f"  {at}", blocks, params, *held, works)
            elif at == half + 1:
                yield f"  ... {number - _STAGES_SHOWN} more ..."
    if mesh.bubble and report.step is not None:
        share = _percent(mesh.bubble, report.step.seconds)
        yield fact("bubble", f"{human_seconds(mesh.bubble)} in which the slowest stage waits for others ({share})")
    if mesh.sent:
        widths = (-32, 16, 16)
        yield row(widths, f"{rank} sends for", "in its machine", "to others")
        for what, both in mesh.sent.items():
            yield row(widths, f"  {what}", *map(shown_bytes, both))


def _runners_up(report: PlanReport) -> Iterator[str]:
    """Other meshes that ``--parallel auto`` has tried."""
    if report.mesh is None or not report.mesh.runners_up:
        return
    widths = (-32, 14, 16, 14)
    yield row(widths, "other meshes", "micro-batches", report.compute, "tokens/s")
    for other in report.mesh.runners_up:
        name = f"  {other.mesh}{', ' + other.order if other.order else ''}"
        rate = human_rate(other.tokens_per_second)
        yield row(widths, name, other.micro_batches, human_bytes(other.compute_bytes), rate)


def _homes(report: PlanReport) -> Iterator[str]:
    """Who lives where: a row for each kind of content, a column for each tier."""
    if not report.held:
        return
    tiers = list(report.held)
    widths = (-20, *(16 for _ in tiers))
    found = dict.fromkeys(kind for held in report.held.values() for kind in held)
    kinds = [kind for kind in report.needs if kind in found] + [kind for kind in found if kind not in report.needs]
    yield row(widths, "who lives where", *tiers)
    for kind in kinds:
        yield row(widths, f"  {kind}", *(shown_bytes(report.held[tier].get(kind, 0)) for tier in tiers))
    used = {tier: sum(held.values()) for tier, held in report.held.items()}
    yield row(widths, "  in all", *map(human_bytes, used.values()))
    free = {tier: report.budgets[tier] - num_bytes for tier, num_bytes in used.items()}
    shares = (f"{human_bytes(n)} {_percent(n, report.budgets[tier]):>4}" for tier, n in free.items())
    yield row(widths, "  free", *shares)
    trained = sum(report.update.values())
    if trained:
        updates = (_percent(report.update[tier], trained) if tier in report.update else "." for tier in tiers)
        yield row(widths, "  updates run on", *updates)
    if report.streamed:
        streamed = (_percent(report.streamed, trained) if tier == report.compute else "." for tier in tiers)
        yield row(widths, "  of it streamed", *streamed)


def _facts(report: PlanReport) -> Iterator[str]:
    activations = report.activations
    words = f"{human_bytes(activations.peak_bytes)} at the peak"
    if activations.peak_phase:
        words += f" (in {activations.peak_phase} of {activations.peak_module or 'the model itself'})"
    if activations.checkpoint_bytes:
        words += f", {human_bytes(activations.checkpoint_bytes)} of it inputs of checkpointed blocks"
    if activations.offloaded_to:
        words += f", which wait on {activations.offloaded_to}"
    yield fact("beside params", words if report.compute == "gpu" else f"{words}; on top of the cpu budget")
    if report.fits:
        moved = ", ".join(f"{way} {human_bytes(n)}" for way, n in report.moved.items() if n)
        yield fact("moved in a step", moved or "nothing")
    if report.step is not None:
        yield from _time(report, report.step)
    elif report.fits and report.machine is None:
        yield fact(
            "step time",
            "not known without a machine: --machine NAME, or measure this one with "
            "`gemini doctor --measure --json FILE` and give --machine FILE",
        )


def _time(report: PlanReport, step: StepReport) -> Iterator[str]:
    """How long a step takes, and why."""
    rate = f"{human_rate(step.tokens_per_second)} tokens/s"
    if step.tokens_per_second:
        rate += f" (a million in {timedelta(seconds=round(1e6 / step.tokens_per_second))})"
    each = " each" if report.ranks > 1 else ""
    mfu = "" if step.mfu is None else f" (MFU {step.mfu:.0%})"
    work = f"{step.flops_per_second / 1e12:.3g} TFLOP/s{each}{mfu}"
    yield fact("step time", f"{human_seconds(step.seconds)} predicted ({step.schedule}), {rate}, {work}")
    bounds = [
        f"{_TRACKS.get(track, track)}, {human_seconds(seconds)} ({_percent(seconds, step.seconds)} of the step)"
        for track, seconds in list(step.busy.items())[:2]
    ]
    yield fact("bound by", "; then ".join(bounds) or "nothing")
    waited = sorted(step.waited.items(), key=lambda item: -item[1])[:3]
    if waited and waited[0][1] > 0.01 * step.seconds:
        yield fact("computing waits", ", ".join(f"{human_seconds(s)} for {cause}" for cause, s in waited))
    if step.steps_until_worn is not None and step.steps_until_worn < 10 * FEW_STEPS:
        alarm = "WARNING: " if step.steps_until_worn < FEW_STEPS else ""
        yield fact(
            "drives wear",
            f"{alarm}{human_bytes(step.nvme_written)} written a step: {step.steps_until_worn:,} steps until what the "
            "drives are rated for",
        )
    if report.mesh is None:
        yield fact("offload is free", _free(report, step))


def _free(report: PlanReport, step: StepReport) -> str:
    """From how many tokens per step on a step is as long as its computing alone."""
    within = f"within {TOLERANCE:.0%}"
    if Track.COMPUTE.value not in step.busy:
        return "not known: the trace has no work in it"
    if step.break_even is not None and step.break_even <= report.tokens:
        return f"now: a step takes as long as its computing, {within}; it does from {_about(step.break_even)} tokens on"
    ways = []
    if step.break_even is not None:
        ways.append(f"from {_about(step.break_even)} tokens a step on in larger micro-batches")
    if step.break_even_accumulating is not None:
        ways.append(f"from {_about(step.break_even_accumulating)} in more micro-batches of this size")
    return f"{' or '.join(ways) or 'at no number of tokens'} ({within}; now {report.tokens:,})"


def _changes(report: PlanReport) -> Iterator[str]:
    for number, change in enumerate(report.changes):
        yield fact("what to change" if number == 0 else "", in_options(change, "--nvme"))


def _alternatives(report: PlanReport) -> Iterator[str]:
    """A row each; those that need something beside them to fit stand under it."""
    if not report.alternatives:
        return
    names = [f"{'    ' if other.beside else '  '}{other.options}" for other in report.alternatives]
    widths = (-max(map(len, names)), 6, 10, 0)
    yield row(widths, "what else it could do", "fits", "tokens/s", "  result")
    beside = ""
    for name, other in zip(names, report.alternatives, strict=True):
        if other.beside != beside:
            beside = other.beside
            yield f"  with {beside} and"
        fits = {True: "yes", False: "no", None: "."}[other.fits]
        rate = "." if other.tokens_per_second is None else human_rate(other.tokens_per_second)
        yield row(widths, name, fits, rate, f"  {other.result}")


def _about(tokens: int) -> str:
    """Three digits, rounded up: more would promise what a prediction cannot hold."""
    unit = 10 ** max(0, len(str(tokens)) - 3)
    return f"{-(-tokens // unit) * unit:,}"


def _percent(part: float, whole: float) -> str:
    return "<1%" if 0 < part < 0.005 * whole else f"{part / whole:.0%}" if whole else "0%"
