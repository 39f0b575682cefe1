"""What ``gemini plan`` answers, as one value: ``--json`` writes it, and the screen says it in 80 columns.

What each field of the JSON is, the reference of the command line says (docs/reference/cli.md).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch

from gemini import kernels
from gemini.errors import BudgetExceeded, human_bytes
from gemini.jobs.errors import REFUSED
from gemini.jobs.planner import Machine
from gemini.jobs.screen import fact, human_count, human_rate, in_options, row, shown_bytes
from gemini.jobs.settings import PlanSettings
from gemini.planning.break_even import TOLERANCE, Grow, break_even
from gemini.planning.mesh import MeshSizes
from gemini.planning.parallel import MeshOutcome, StageOutcome
from gemini.planning.plan import Plan
from gemini.planning.planes import ADAM, GRADS, plane_specs, precision_of
from gemini.planning.timeline import Timeline, Track, human_seconds
from gemini.planning.trace import MemoryTrace, Phase
from gemini.planning.traffic import by_name
from gemini.tiers import Tier

VERSION = 1
BEYOND = 3
"""The exit code for a plan that fits in what was given, which is not what the machine has."""


class OverMesh(NamedTuple):
    """What was found of a step over meshes: the best one first, and ``sizes`` of it; where it fits on none, of the
    first that was tried. ``num_params`` and ``batch`` are those of the whole model and of a micro-batch, of which ranks
    have parts.
    """

    sizes: MeshSizes
    num_params: int
    batch: dict[str, tuple[int, ...]]
    found: tuple[MeshOutcome, ...] = ()

    @property
    def best(self) -> MeshOutcome | None:
        return next(iter(self.found), None)

    @property
    def stages(self) -> tuple[StageOutcome, ...]:
        """Of a pipeline."""
        return self.best.stages if self.best is not None and self.best.sizes.pp > 1 else ()


@dataclass(frozen=True)
class Alternative:
    """Another way to run the step; ``fits`` is None where it cannot be, and ``result`` says why."""

    options: str
    beside: str
    fits: bool | None
    tokens_per_second: float | None
    result: str


@dataclass(frozen=True)
class StepTime:
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
    mfu: float | None
    nvme_written: int
    steps_until_worn: int | None


@dataclass(frozen=True)
class PlanReport:
    """The answer to what was asked: a plan, with its time if the speeds of the machine are known, or a refusal.

    Attributes:
        trace: one micro-batch on one rank; over a mesh on one of the slowest stage, and so are plan and timeline.
        tokens_when_free: a break-even that was played.
        checkpointed: the same step with gradient checkpointing, to compare with.
        whole_peak_bytes: the peak without the tiles that were chosen.
    """

    settings: PlanSettings
    machine: Machine
    trace: MemoryTrace
    plan: Plan | None = None
    timeline: Timeline | None = None
    refusal: BudgetExceeded | None = None
    tokens_when_free: int | None = None
    checkpointed: MemoryTrace | None = None
    whole_peak_bytes: int | None = None
    changes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    mesh: OverMesh | None = None

    @property
    def fits(self) -> bool:
        return self.refusal is None

    @property
    def exit_code(self) -> int:
        """0 if it fits, 2 if it does not, 3 if it does in more memory than the machine has that was named."""
        return REFUSED if not self.fits else BEYOND if self.beyond else 0

    @property
    def ranks(self) -> int:
        """That divide the model."""
        return self.machine.ranks if self.plan is None else self.plan.layout.ranks

    @property
    def accumulate(self) -> int:
        return self.settings.accumulate if self.plan is None else self.plan.accumulate

    @property
    def micro_batches(self) -> int:
        """Of a step, on each rank."""
        best = None if self.mesh is None else self.mesh.best
        return self.accumulate if best is None else best.micro_batches

    @property
    def gradients(self) -> str:
        return self.settings.kept_gradients if self.plan is None else self.plan.problem.gradients

    @property
    def tokens(self) -> int:
        """Of a step, on all ranks."""
        best = None if self.mesh is None else self.mesh.best
        return self.trace.tokens * self.accumulate * self.ranks if best is None else best.tokens

    @property
    def batch(self) -> dict[str, tuple[int, ...]]:
        return dict(self.trace.batch) if self.mesh is None else self.mesh.batch

    @property
    def num_trained(self) -> int:
        return sum(param.numel for param in self.trace.params if param.trainable)

    @cached_property
    def needs(self) -> dict[str, int]:
        """Each kind of plane on one rank, all chunks together."""
        rule = self.settings.rule_in(self.trace.precision)
        layout = self.trace.layout(ranks=self.ranks, rule=rule)
        found: Counter[str] = Counter()
        for chunk in layout.chunks:
            precision, own = precision_of(chunk, self.trace.precision), rule.of(chunk.exact)
            specs = plane_specs(precision, self.gradients, own, trainable=chunk.trainable, coded=chunk.coded)
            found.update({kind: spec.page_bytes(chunk.numel // layout.ranks) for kind, spec in specs.items()})
        return dict(found)

    @property
    def bytes_per_param(self) -> float:
        """Of weights, residual and states."""
        if self.plan is not None:
            return self.plan.bytes_per_param
        states = sum(n for kind, n in self.needs.items() if kind not in GRADS) * self.ranks
        return states / max(1, self.trace.num_params)

    @property
    def budgets(self) -> dict[str, int]:
        return _by_name(self.machine.budgets_of_rank)

    @property
    def beyond(self) -> str:
        """What is given of more than the machine has, and how to say that it is there."""
        machine = self.machine
        if not machine.beyond or machine.hardware is None:
            return ""
        name, given = machine.hardware.name, {tier: getattr(self.settings, tier.value) for tier in machine.beyond}
        more = " and ".join(
            f"--{tier.value} {given[tier]} is more than {name} has ({human_bytes(capacity)})"
            for tier, capacity in machine.beyond.items()
        )
        sizes = ",".join(f"{tier.value}={size}" for tier, size in given.items())
        return f"{more}. If yours has that, say so: --machine {self.settings.machine},{sizes}"

    @property
    def held(self) -> dict[str, dict[str, int]]:
        """By tier, the most of each kind."""
        return {} if self.plan is None else _by_name(self.plan.held)

    @cached_property
    def update(self) -> dict[str, int]:
        """By tier, the params whose update runs there."""
        found: Counter[str] = Counter()
        if self.plan is not None:
            for index, chunk in enumerate(self.plan.layout.chunks):
                if chunk.trainable:
                    found[self.plan.update_tier(index).value] += chunk.payload
        return dict(found)

    @property
    def streamed(self) -> int:
        """Params whose states come to a GPU for their update, and go back."""
        plan = self.plan
        return 0 if plan is None else sum(plan.layout.chunks[index].payload for index in plan.placement.streamed)

    @property
    def moved(self) -> dict[str, int]:
        return {} if self.plan is None else by_name(self.plan.traffic)

    @property
    def peak(self) -> tuple[str, str]:
        """The module and the phase in which most is live beside params."""
        top = max(self.trace.moments, key=lambda moment: moment.peak_bytes, default=None)
        return ("", "") if top is None else (top.module, top.phase.value)

    @cached_property
    def step(self) -> StepTime | None:
        """None without the speeds of a machine. Over a mesh stages wait for each other, and the step is that long."""
        timeline, plan, hardware = self.timeline, self.plan, self.machine.hardware
        if timeline is None or plan is None or hardware is None:
            return None
        best = None if self.mesh is None else self.mesh.best
        seconds = timeline.step_seconds if best is None else best.step_seconds
        waited = {cause: waits for cause, waits in timeline.stalls.items() if waits > 0}
        if best is not None and best.bubble:
            waited["other stages"] = best.bubble
        serial = self.settings.schedule == "serial"
        written = self.moved.get("cpu->nvme", 0) * self.machine.sharing
        rated = hardware.figures.get("nvme_endurance")
        return StepTime(
            schedule=self.settings.schedule,
            seconds=seconds,
            tokens_per_second=timeline.tokens_per_second if best is None else best.tokens_per_second,
            flops_per_second=timeline.flops / seconds if seconds else 0.0,
            busy={track.value: s for track, s in sorted(timeline.busy.items(), key=lambda item: -item[1])},
            waited=waited,
            break_even=self.tokens_when_free,
            break_even_accumulating=break_even(timeline, serial=True, grow=Grow.ACCUMULATE) if serial else None,
            mfu=self._mfu(timeline.flops, seconds),
            nvme_written=written,
            steps_until_worn=None if rated is None or not written else int(rated.value / written),
        )

    def _mfu(self, flops: float, seconds: float) -> float | None:
        machine, moments = self.machine, self.trace.moments
        key = "gpu_flops_fp32" if self.trace.precision == "fp32" else "gpu_flops_bf16"
        peak = (
            None if machine.hardware is None or machine.compute is not Tier.GPU else machine.hardware.figures.get(key)
        )
        of_all = sum(moment.flops for moment in moments)
        if peak is None or peak.source.startswith("measured") or not of_all or not seconds:
            return None
        again = sum(moment.flops for moment in moments if moment.phase is Phase.RECOMPUTE)
        return flops * (1 - again / of_all) / seconds / peak.value

    def to_json(self) -> str:
        """One JSON object."""
        trace, plan, hardware = self.trace, self.plan, self.machine.hardware
        module, phase = self.peak
        body = {
            "gemini": "plan report",
            "version": VERSION,
            "fits": self.fits,
            "model": trace.model,
            "num_params": trace.num_params,
            "num_trained": self.num_trained,
            "precision": trace.precision,
            "gradients": self.gradients,
            "checkpointing": trace.checkpointing,
            "tile_tokens": trace.tile_tokens,
            "batch": self.batch,
            "tokens": self.tokens,
            "accumulate": self.accumulate,
            "ranks": self.ranks,
            "compute": self.machine.compute.value,
            "machine": None if hardware is None else hardware.name,
            "optimizer": self.settings.rule_in(trace.precision).name,
            "bytes_per_param": self.bytes_per_param,
            "needs": self.needs,
            "budgets": self.budgets,
            "origins": _by_name(self.machine.origins),
            "beyond": self.beyond,
            "activations": {
                "peak_bytes": trace.peak_bytes,
                "peak_module": module,
                "peak_phase": phase,
                "checkpoint_bytes": trace.checkpoint_bytes,
                "buffer_bytes": trace.buffer_bytes,
                "checkpointed_peak_bytes": None if self.checkpointed is None else self.checkpointed.peak_bytes,
                "offloaded_to": None if plan is None else plan.offload_activations,
                "whole_peak_bytes": self.whole_peak_bytes,
            },
            "refusal": None if self.refusal is None else str(self.refusal),
            "held": self.held,
            "update": self.update,
            "streamed": self.streamed,
            "moved": self.moved,
            "step": None if self.step is None else asdict(self.step),
            "changes": self.changes,
            "mesh": None if self.mesh is None else self._mesh_fields(self.mesh),
            "alternatives": [asdict(other) for other in self.alternatives],
        }
        return json.dumps(body, indent=1)

    def _mesh_fields(self, mesh: OverMesh) -> dict[str, Any]:
        best = mesh.best
        return {
            "mesh": str(mesh.sizes),
            "ranks": mesh.sizes.ranks,
            "num_params": mesh.num_params,
            "order": "" if best is None else best.order,
            "micro_batches": self.micro_batches,
            "stages": [
                {
                    "first_block": stage.blocks[0],
                    "stop_block": stage.blocks[1],
                    "num_params": stage.plan.trace.num_params,
                    "held": _by_name(stage.plan.bytes_per_tier),
                    "seconds": stage.timeline.step_seconds,
                }
                for stage in mesh.stages
            ],
            "bubble": 0.0 if best is None else best.bubble,
            "sent": {} if best is None else dict(best.sent),
            "runners_up": [
                {
                    "mesh": str(other.sizes),
                    "order": other.order,
                    "micro_batches": other.micro_batches,
                    "tokens_per_second": other.tokens_per_second,
                    "compute_bytes": self.most_of(other),
                }
                for other in mesh.found[1:]
            ],
            "chosen": best is not None and bool(self.settings.parallel),
        }

    def most_of(self, outcome: MeshOutcome) -> int:
        """Bytes of the computing tier, on the rank of a mesh that has most."""
        most = max(outcome.stages, key=lambda stage: stage.plan.bytes_per_tier.get(Tier.GPU, 0)).plan
        return most.bytes_per_tier.get(self.machine.compute, 0)


def _by_name(of: Mapping[Tier, Any]) -> dict[str, Any]:
    return {tier.value: value for tier, value in of.items()}


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
    trace, mesh, machine = report.trace, report.mesh, report.machine
    num_params, ranks, frozen = trace.num_params, report.ranks, trace.num_params - report.num_trained
    if mesh is not None:  # of which the rest is one rank
        num_params, ranks, frozen = mesh.num_params, mesh.sizes.ranks, 0
    of_them = f", {human_count(frozen)} of them frozen" if frozen else ""
    yield f"{trace.model}, {human_count(num_params)} params{of_them}, {trace.precision}"
    shapes = sorted({"x".join(map(str, shape)) for shape in report.batch.values()})
    parts = [f"{', '.join(shapes) or 'a batch'} tokens"]
    if report.micro_batches > 1:
        parts.append(f"{report.micro_batches} micro-batches")
    if trace.checkpointing:
        parts.append("gradient checkpointing")
    if trace.tile_tokens is not None:
        parts.append(f"tiles of {trace.tile_tokens:,} tokens{_why_tiles(report)}")
    if ranks > 1:
        parts.append(f"{ranks} {'GPUs' if machine.compute is Tier.GPU else 'processes'}")
    if report.gradients != "retain":
        parts.append(f"gradients {report.gradients}")
    if report.micro_batches * ranks > 1 and (report.fits or mesh is None):
        parts.append(f"{report.tokens:,} tokens a step")
    yield fact("step", "; ".join(parts))
    given = [
        f"{tier.value} {human_bytes(n)} {machine.origins.get(tier, '')}".rstrip()
        for tier, n in machine.budgets_of_rank.items()
    ]
    if machine.hardware is not None:
        given.append(f"machine {machine.hardware.name}")
    yield fact("given, each" if report.ranks > 1 else "given", "; ".join(given))
    if machine.compute is Tier.GPU and torch.cuda.is_available() and (why := kernels.capabilities().why_not_cuda):
        yield fact("slower here", f"updates and gradients on this machine's GPU go through torch: {why}")


def _why_tiles(report: PlanReport) -> str:
    without = report.whole_peak_bytes
    return "" if without is None else f" (auto: without them {human_bytes(without)} beside params, which do not fit)"


def _verdict(report: PlanReport) -> Iterator[str]:
    if report.fits:
        gradients = report.needs.get("grad", 0) * report.ranks / max(1, report.num_trained)
        more = f", and {gradients:.2f} for gradients until the update" if gradients else ""
        name = report.settings.rule_in(report.trace.precision).name
        rule = "" if name == ADAM.name else f" with {name}"
        if report.beyond:
            yield f"FITS, BUT {report.beyond}"
        verdict = "it takes" if report.beyond else "FITS"
        yield f"{verdict}: {report.bytes_per_param:.2f} bytes per trained param{rule}{more}"
        return
    refusal, _, change = str(report.refusal).partition(" Cheapest change: ")
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
    best = mesh.best
    if best is None:
        yield fact("mesh", str(mesh.sizes))
        return
    rank = "a GPU" if report.machine.compute is Tier.GPU else "a rank"
    order = f"; {_ORDERS[best.order]}" if best.order else ""
    yield fact("best mesh" if report.settings.parallel else "mesh", f"{mesh.sizes}{order}")
    if mesh.stages:
        yield from _stages(rank, mesh.stages)
    if best.bubble:
        share = _percent(best.bubble, best.step_seconds)
        yield fact("bubble", f"{human_seconds(best.bubble)} in which the slowest stage waits for others ({share})")
    if best.sent:
        widths = (-32, 16, 16)
        yield row(widths, f"{rank} sends for", "in its machine", "to others")
        for what, both in best.sent.items():
            yield row(widths, f"  {what}", *map(shown_bytes, both))


def _stages(rank: str, stages: Sequence[StageOutcome]) -> Iterator[str]:
    """A row for each stage of a pipeline; of a long one the first and the last of them. ``rank``: what it computes."""
    tiers = [tier.value for tier in stages[0].plan.bytes_per_tier]
    widths = (-15, 10, 9, *(11 for _ in tiers), 9)
    yield row(widths, f"{rank} of stage", "blocks", "params", *tiers, "works")
    rows = [_stage(widths, number, stage) for number, stage in enumerate(stages, 1)]
    if len(rows) <= _STAGES_SHOWN:
        yield from rows
        return
    half = _STAGES_SHOWN // 2
    yield from rows[:half]
    yield f"  ... {len(rows) - _STAGES_SHOWN} more ..."
    yield from rows[-half:]


def _stage(widths: tuple[int, ...], number: int, stage: StageOutcome) -> str:
    first, stop = stage.blocks
    held = map(human_bytes, stage.plan.bytes_per_tier.values())
    params = human_count(stage.plan.trace.num_params)
    works = human_seconds(stage.timeline.step_seconds)
    return row(widths, f"  {number}", f"{first}-{stop - 1}", params, *held, works)


def _runners_up(report: PlanReport) -> Iterator[str]:
    """Other meshes that ``--parallel auto`` has tried."""
    if report.mesh is None or not report.mesh.found[1:]:
        return
    widths = (-32, 14, 16, 14)
    yield row(widths, "other meshes", "micro-batches", report.machine.compute.value, "tokens/s")
    for other in report.mesh.found[1:]:
        name = f"  {other.sizes}{', ' + other.order if other.order else ''}"
        rate = human_rate(other.tokens_per_second)
        yield row(widths, name, other.micro_batches, human_bytes(report.most_of(other)), rate)


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
        streamed = (
            _percent(report.streamed, trained) if tier == report.machine.compute.value else "." for tier in tiers
        )
        yield row(widths, "  of it streamed", *streamed)


def _facts(report: PlanReport) -> Iterator[str]:
    trace, (module, phase) = report.trace, report.peak
    words = f"{human_bytes(trace.peak_bytes)} at the peak"
    if phase:
        words += f" (in {phase} of {module or 'the model itself'})"
    if trace.checkpoint_bytes:
        words += f", {human_bytes(trace.checkpoint_bytes)} of it inputs of checkpointed blocks"
    if report.plan is not None and report.plan.offload_activations:
        words += f", which wait on {report.plan.offload_activations}"
    on_gpu = report.machine.compute is Tier.GPU
    yield fact("beside params", words if on_gpu else f"{words}; on top of the cpu budget")
    if report.fits:
        moved = ", ".join(f"{way} {human_bytes(n)}" for way, n in report.moved.items() if n)
        yield fact("moved in a step", moved or "nothing")
    if report.step is not None:
        yield from _time(report, report.step)
    elif report.fits and report.machine.hardware is None:
        yield fact(
            "step time",
            "not known without a machine: --machine NAME, or measure this one with "
            "`gemini doctor --measure --json FILE` and give --machine FILE",
        )


def _time(report: PlanReport, step: StepTime) -> Iterator[str]:
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


def _free(report: PlanReport, step: StepTime) -> str:
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
