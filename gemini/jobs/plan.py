"""``gemini plan``: from a config, sizes and perhaps a machine to one answer. Does it fit, how fast, what to change?

Of a model that ranks share as params alone; or over a mesh, where the step of each stage is planned with slices and
parts of sequences, and the best mesh may be looked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from rich.console import Console
from rich.status import Status

from gemini.errors import BudgetExceeded, GeminiError, MissingFigure, human_bytes
from gemini.jobs.errors import REFUSED, JobError
from gemini.jobs.fastest import Choice, choose, chosen
from gemini.jobs.plan_report import OverMesh, Report, describe, screen
from gemini.jobs.planner import Way
from gemini.jobs.screen import answer, check_files, progress
from gemini.jobs.settings import PlanSettings
from gemini.jobs.trace import params_of
from gemini.planning.break_even import played_break_even
from gemini.planning.hardware import Hardware
from gemini.planning.mesh import MeshSizes
from gemini.planning.parallel import MeshOutcome, least_seconds, play_mesh
from gemini.planning.plan import Plan
from gemini.planning.timeline import Timeline
from gemini.planning.trace import MemoryTrace
from gemini.tiers import Tier

LORA_RANK = 16
"""Of the LoRA among the alternatives."""
BEYOND = 3
"""The exit code for a plan that fits in what was given, which is not what the machine has."""


class Answer(NamedTuple):
    """What is said, and what it was found with, if it fits."""

    report: Report
    plan: Plan | None
    timeline: Timeline | None


def plan(settings: PlanSettings, console: Console) -> int:
    """Plan, write and say it; returns the exit code: 0 if it fits, 2 if it does not, 3 if it does in more memory than
    the machine has that was named.
    """
    check_files(settings.out, settings.picture)
    if settings.config is not None:
        from gemini.jobs.models import find_config

        find_config(settings.config, settings.layers)  # a name that is none is said before anything else
    way = Way(settings)
    if settings.picture and way.machine.hardware is None:
        raise JobError(
            f"--picture {settings.picture[0]} shows a step in time, which needs the speeds of a machine: --machine."
        )
    with progress("tracing the step") as status:
        found = _plan_over_mesh(way, status) if settings.mesh else _plan_whole(way, status)
    answer(
        settings,
        console,
        json=json.dumps(found.report, indent=1),
        lines=screen(found.report),
        value=None if found.plan is None else found.plan.to_json(),
        timeline=found.timeline,
    )
    return REFUSED if not found.report["fits"] else BEYOND if found.report["beyond"] else 0


def _plan_whole(way: Way, status: Status) -> Answer:
    """Of a model that ranks share as params alone."""
    if way.settings.states == "compact" and way.trace().precision != "bf16":
        raise JobError(
            f"--states compact keeps bf16 weights, and --trace {way.settings.trace} is of {way.trace().precision}."
        )
    choice: Choice | None = None
    if way.settings.micro_batch is not None or way.settings.fastest:
        way, choice = choose(way, status)
    trace = way.trace()
    status.update("choosing homes and moves ...")
    made: Plan | None = None
    refusal: BudgetExceeded | None = None
    try:
        made = way.plan()
    except BudgetExceeded as e:
        refusal = e
    planned = trace.forms[-1] if made is None else made.trace
    timeline: Timeline | None = None
    tokens_when_free: int | None = None
    if made is not None and way.machine.hardware is not None:
        status.update("simulating the step ...")
        timeline = way.play(made)
        tokens_when_free = played_break_even(made, way.play, timeline, serial=way.settings.schedule == "serial")
    status.update("looking for what to change ...")
    checkpointed = _checkpointed(way)
    report = describe(
        way.settings,
        way.machine,
        planned,
        made,
        timeline,
        refusal=refusal,
        tokens_when_free=tokens_when_free,
        checkpointed=checkpointed,
        whole_peak_bytes=None if planned.tile_tokens == trace.tile_tokens else trace.peak_bytes,
        changes=tuple(_changes(way, planned, checkpointed, fits=made is not None)),
    )
    if choice is not None and made is not None:
        report["fastest"] = chosen(choice, report)
    if way.settings.alternatives:
        rate = None if timeline is None else timeline.tokens_per_second
        for other in _alternatives(way, made is not None, rate):
            report["alternatives"].append(other)
            status.update(f"planning what else it could do, {len(report['alternatives'])} of about 8 ...")
    return Answer(report, made, timeline)


# ---- what to change, and what else the machine could do --------------------------------------------------------------


def _options(way: Way, *, fits: bool) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Options that were not taken, their values, and what they do to what is computed; those first that change
    nothing or little of it. Some are of use only where the step does not fit.
    """
    settings, on_gpu, precision = way.settings, way.machine.compute is Tier.GPU, way.trace().precision
    sequences, is_traced_here = settings.batch_size or 1, settings.trace is None
    if not fits and on_gpu:
        if is_traced_here and sequences > 1:
            micro = {"batch_size": 1, "accumulate": sequences * settings.accumulate}
            yield "--micro-batch auto", micro, "the same step in smaller micro-batches"
        if settings.offload_activations == "no" and way.trace().checkpoint_bytes:
            less = f"{human_bytes(way.trace().checkpoint_bytes)} less on the GPU"
            yield "--offload-activations cpu", {"offload_activations": "cpu"}, less
    if settings.gradients is None and settings.accumulate == 1 and precision != "fp16":
        yield "--gradients transient", {"gradients": "transient"}, "no clipping"
    if not fits and on_gpu and is_traced_here and settings.tile_tokens is None and settings.lora is None:
        yield "--tile-tokens auto", {"tile_tokens": "auto"}, "rounding"
    if settings.states == "exact" and precision == "bf16" and settings.has_compact_form:
        yield "--states compact", {"states": "compact"}, "8-bit moments"
    if is_traced_here and settings.lora is None:
        yield f"--lora {LORA_RANK}", {"lora": LORA_RANK}, "adapters only"
    if is_traced_here and not settings.load_in_4bit:
        lora = settings.lora or LORA_RANK
        option = "--load-in-4bit" if settings.lora else f"--lora {lora} --load-in-4bit"
        yield option, {"lora": lora, "load_in_4bit": True}, "4-bit base"
    yield f"--gpus {2 * settings.gpus}", {"gpus": 2 * settings.gpus}, "rounding"


def _checkpointed(way: Way) -> MemoryTrace | None:
    """The same step with gradient checkpointing, to compare with; None where it has it, or the model has none."""
    if way.settings.config is None or way.settings.trace is not None or way.settings.gradient_checkpointing:
        return None
    try:
        return way.trace(gradient_checkpointing=True)
    except JobError:
        return None


def _changes(way: Way, trace: MemoryTrace, checkpointed: MemoryTrace | None, *, fits: bool) -> Iterator[str]:
    """Changes of the step that make it fit, each found by placing again; or what would take off some memory."""
    if checkpointed is not None and checkpointed.peak_bytes < 0.9 * trace.peak_bytes:
        more = checkpointed.flops / trace.flops - 1 if trace.flops else 0.0
        sizes = f"{human_bytes(checkpointed.peak_bytes)} beside params instead of {human_bytes(trace.peak_bytes)}"
        words = f"--gradient-checkpointing: {sizes}, {more:.0%} more work"
        if fits:
            yield words
        elif way.machine.compute is Tier.GPU:
            still = way.refusal(checkpointed)
            yield f"{words}; then {'it fits' if still is None else str(still).partition(' Cheapest change: ')[2]}"
    for option, changes, result in () if fits else _options(way, fits=fits):
        with suppress(JobError, GeminiError):  # a model without tiles, a machine without more GPUs
            if way.changed(**changes).fits():
                yield f"{option} ({result}): then it fits"


def _alternatives(way: Way, fits: bool, rate: float | None) -> Iterator[Report]:
    """The step as asked; what leaves less beside params, until the step fits; then every other change beside that.

    ``fits``, ``rate``: what is known of it as it was asked for.
    """

    def found(options: str, beside: str, fits: bool | None, rate: float | None, result: str) -> Report:
        return {"options": options, "beside": beside, "fits": fits, "tokens_per_second": rate, "result": result}

    yield found("as asked", "", fits, rate, "")
    base, beside = way, ""
    for option, smaller, result in _smaller(way, fits=fits):
        outcome = smaller.outcome()
        yield found(option, "", *outcome, result)
        if outcome[0] and not fits:
            fits, base, beside = True, smaller, option
            break
    for option, changes, result in _options(base, fits=fits):
        try:
            yield found(option, beside, *base.changed(**changes).outcome(), result)
        except (JobError, MissingFigure) as e:
            yield found(option, beside, None, None, str(e).partition(" (")[0])


def _smaller(way: Way, *, fits: bool) -> Iterator[tuple[str, Way, str]]:
    """Steps that leave less beside params, each less than the one before."""
    if way.settings.trace is not None or way.machine.compute is not Tier.GPU:
        return
    options = ""
    if not way.settings.gradient_checkpointing:
        way, options = way.changed(gradient_checkpointing=True), "--gradient-checkpointing"
        yield options, way, "same bits"
    if way.settings.tile_tokens is None and way.settings.lora is None and not fits:
        yield f"{options} --tile-tokens auto".lstrip(), way.changed(tile_tokens="auto"), "rounding"


# ---- over a mesh -----------------------------------------------------------------------------------------------------

RUNNERS_UP = 4
"""Meshes that ``--parallel auto`` shows beside the best one."""
MOST_PLAYED = 8
"""Meshes that it plays at most: those whose steps take least by their computing and bubble alone."""


class MeshCandidate(NamedTuple):
    """A mesh, the micro-batches of a step on it, and no more seconds than a step can take."""

    sizes: MeshSizes
    micro_batches: int
    least: float


def _plan_over_mesh(way: Way, status: Status) -> Answer:
    """The step over the mesh that was asked for, or over the best one: of those on which it fits, the one whose step is
    the shortest. They are played in the order of what their steps take at least, until no other one can be among the
    best, or ``MOST_PLAYED`` are.
    """
    settings, hardware = way.settings, way.machine.hardware
    if hardware is None:
        raise JobError("A plan over a mesh needs the speeds of a machine and of its wires: --machine NAME or FILE.")
    status.update("playing steps over meshes ...")
    over, is_auto = _OverMesh(way, hardware), bool(settings.parallel)
    candidates = sorted(over.candidates(), key=lambda candidate: candidate.least) if is_auto else [over.asked()]
    if not candidates:
        raise JobError(f"--parallel auto: no mesh of {settings.gpus} GPUs goes with this model.")
    found: list[MeshOutcome] = []
    refused: dict[MeshSizes, BudgetExceeded] = {}
    unsuited: ValueError | None = None
    for sizes, micro_batches, least in candidates:
        is_decided = len(found) > RUNNERS_UP and least > found[RUNNERS_UP].step_seconds
        if is_decided or len(found) == MOST_PLAYED:
            break
        try:
            found.append(over.play(sizes, micro_batches, ends=is_auto))
            found.sort(key=lambda outcome: outcome.step_seconds)
        except BudgetExceeded as e:
            refused[sizes] = e
        except ValueError as e:
            unsuited = e
    # What does not fit is told before what does not suit: it can be changed.
    if unsuited is not None and not found and not refused:
        raise JobError(f"{over.words}: {unsuited}.") from unsuited
    if is_auto and found and found[0].sizes.pp > 2:  # to compare meshes it was played with two of its stages
        found[0] = over.play(found[0].sizes, found[0].micro_batches)
    # Where it fits on none, the first one is told.
    sizes = found[0].sizes if found else next(iter(refused))
    trace = way.trace(tp=sizes.tp, cp=sizes.cp)
    samples, length = next(shape for shape in trace.batch.values() if len(shape) > 1)
    num_params = params_of(settings.config or "", settings.layers, settings.precision or "bf16").num_params
    batch: dict[str, tuple[int, ...]] = {"input_ids": (samples, length * trace.context_parallel)}
    mesh = OverMesh(sizes, num_params, batch, tuple(found[: RUNNERS_UP + 1]))
    if not found:
        return Answer(describe(settings, way.machine, trace, refusal=refused[sizes], mesh=mesh), None, None)
    made, timeline = found[0].slowest.plan, found[0].slowest.timeline
    return Answer(describe(settings, way.machine, made.trace, made, timeline, mesh=mesh), made, timeline)


class _OverMesh:
    """Steps of a model over meshes: which there are, and how long one takes."""

    def __init__(self, way: Way, hardware: Hardware):
        from gemini.jobs.models import find_config

        settings = way.settings
        assert settings.config is not None
        self._way, self._settings, self._hardware = way, settings, hardware
        config = find_config(settings.config, settings.layers).config
        self._config = config.get_text_config()
        self._in_two = bool(getattr(config, "is_encoder_decoder", False))
        self._whole_rule = settings.rule_in(settings.precision or "bf16").whole
        asked = " ".join(f"--{name} {size}" for name, size in settings.dims.items())
        self.words = "--parallel auto" if settings.parallel else asked

    def asked(self) -> MeshCandidate:
        """The mesh that was asked for.

        Raises:
            JobError: if it does not go with the model.
        """
        settings = self._settings
        own = settings.pp * settings.cp * settings.tp
        if settings.gpus % own:
            raise JobError(
                f"--gpus {settings.gpus} with {self.words}, which are {own} GPUs together: a multiple of {own}."
            )
        sizes = MeshSizes(settings.pp, settings.gpus // own, settings.cp, settings.tp)
        if settings.accumulate < sizes.pp:
            raise JobError(
                f"--pp {sizes.pp} with --accumulate {settings.accumulate}: a pipeline takes a micro-batch for each of "
                f"its stages at least, --accumulate {sizes.pp}."
            )
        if sizes.pp > 1 and self._in_two:
            raise JobError(
                f"--pp {sizes.pp}: this model is an encoder-decoder, whose decoder reads in every block what the "
                "encoder gives, which a pipeline does not hand on. Use --tp, or data parallel alone."
            )
        if sizes.tp > 1 and self._whole_rule:
            raise JobError(
                f"--tp {sizes.tp} with --optimizer {settings.optimizer}, which looks at whole params, and slices leave "
                "a part of each on a rank."
            )
        return MeshCandidate(sizes, settings.accumulate, 0.0)

    def candidates(self) -> Iterator[MeshCandidate]:
        """Every mesh of the powers of two (and what is left) that the model goes with; a step has the sequences that
        all GPUs would take without slices, parts and stages.
        """
        gpus, sharing = self._settings.gpus, self._way.machine.sharing
        for tp in _powers(1 if self._whole_rule else min(gpus, sharing)):
            for cp in _powers(gpus // tp):
                try:
                    trace = self._way.trace(tp=tp, cp=cp)
                except (JobError, GeminiError, ValueError):
                    continue  # heads or lengths that do not divide, attention that has no parts
                most = 1 if self._in_two else getattr(self._config, "num_hidden_layers", 1)
                for pp in _powers(min(gpus // (tp * cp), most)):
                    if gpus % (tp * cp * pp):
                        continue
                    sizes = MeshSizes(pp, gpus // (tp * cp * pp), cp, tp)
                    micro_batches = self._settings.accumulate * pp * cp * tp
                    least = least_seconds(trace, self._hardware, sizes, micro_batches, per_machine=sharing)
                    yield MeshCandidate(sizes, micro_batches, least)

    def play(self, sizes: MeshSizes, micro_batches: int, *, ends: bool = False) -> MeshOutcome:
        """``ends``: of stages, only the first and the last."""
        settings = self._settings

        def make(trace: MemoryTrace, accumulate: int, order: str) -> Plan:
            in_parts = sizes.pp > 1 or accumulate > 1
            more = {
                "gradients": settings.gradients or ("accumulate" if in_parts else "retain"),
                "accumulate": accumulate,
                "ranks": sizes.shards,
            }
            if order == "1f1b":  # some micro-batches wait at once, whose inputs no plan of one knows
                more["offload_activations"] = None
            return self._way.plan_for(trace, **more)

        return play_mesh(
            self._way.trace(tp=sizes.tp, cp=sizes.cp),
            self._hardware,
            sizes,
            make,
            micro_batches=micro_batches,
            width=self._config.hidden_size,
            per_machine=self._way.machine.sharing,
            schedule=settings.schedule,
            ends=ends,
        )


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
