"""``gemini plan``: from a config, sizes and perhaps a machine to one answer. Does it fit, how fast, what to change?

Of a model that ranks share as params alone; or over a mesh, where the step of each stage is planned with slices and
parts of sequences, and the best mesh may be looked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.status import Status

from gemini.errors import BudgetExceeded, GeminiError, MissingFigure, human_bytes
from gemini.jobs.errors import JobError
from gemini.jobs.plan_report import Alternative, OverMesh, PlanReport, screen
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


def plan(settings: PlanSettings, console: Console) -> int:
    """Plan, write and say it; returns the exit code, of :attr:`PlanReport.exit_code`."""
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
        report = _plan_over_mesh(way, status) if settings.mesh else _plan_whole(way, status)
    answer(
        settings,
        console,
        json=report.to_json(),
        lines=screen(report),
        value=None if report.plan is None else report.plan.to_json(),
        timeline=report.timeline,
    )
    return report.exit_code


def _plan_whole(way: Way, status: Status) -> PlanReport:
    """Of a model that ranks share as params alone."""
    if way.settings.states == "compact" and way.trace().precision != "bf16":
        raise JobError(
            f"--states compact keeps bf16 weights, and --trace {way.settings.trace} is of {way.trace().precision}."
        )
    if way.settings.micro_batch is not None:
        way = _with_micro_batch(way)
    trace = way.trace()
    status.update("choosing homes and moves ...")
    made: Plan | None = None
    refusal: BudgetExceeded | None = None
    try:
        made = way.plan()
    except BudgetExceeded as e:
        refusal = e
    planned = trace.tiled or trace if made is None else made.trace
    timeline: Timeline | None = None
    tokens_when_free: int | None = None
    if made is not None and way.machine.hardware is not None:
        status.update("simulating the step ...")
        timeline = way.play(made)
        tokens_when_free = played_break_even(made, way.play, timeline, serial=way.settings.schedule == "serial")
    status.update("looking for what to change ...")
    checkpointed = _checkpointed(way)
    report = PlanReport(
        way.settings,
        way.machine,
        planned,
        made,
        timeline,
        refusal,
        tokens_when_free,
        checkpointed=checkpointed,
        whole_peak_bytes=trace.peak_bytes if planned is trace.tiled else None,
        changes=tuple(_changes(way, planned, checkpointed, fits=made is not None)),
    )
    if way.settings.alternatives:
        others: list[Alternative] = []
        for other in _alternatives(way, made is not None, None if timeline is None else timeline.tokens_per_second):
            others.append(other)
            status.update(f"planning what else it could do, {len(others)} of about 8 ...")
        report = replace(report, alternatives=tuple(others))
    return report


def _with_micro_batch(way: Way) -> Way:
    """The largest micro-batch that fits, of those that divide the sequences of a step; the smallest if none does.

    Fewer, larger micro-batches gather every weight fewer times, so the largest is the quickest. What does not fit at
    one size fits at no larger one, so the sizes are halved, each tried by tracing it.
    """
    sequences = (way.settings.batch_size or 1) * way.settings.accumulate
    sizes = [size for size in range(1, sequences + 1) if sequences % size == 0]
    ways = [way.changed(batch_size=size, accumulate=sequences // size) for size in sizes]
    # The smallest is taken in any case.
    return ways[bisect_left(ways, True, lo=1, key=lambda other: not other.fits()) - 1]


# ---- what to change --------------------------------------------------------------------------------------------------


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
    settings, on_gpu = way.settings, way.machine.compute is Tier.GPU
    if checkpointed is not None and checkpointed.peak_bytes < 0.9 * trace.peak_bytes:
        words = f"--gradient-checkpointing: {_instead(checkpointed, trace)}"
        if fits:
            yield words
        elif on_gpu:
            still = way.refusal(checkpointed)
            yield f"{words}; then {'it fits' if still is None else str(still).partition(' Cheapest change: ')[2]}"
    if fits:
        return
    sequences = settings.batch_size or 1
    if settings.config is not None and sequences > 1 and on_gpu:
        if way.changed(batch_size=1, accumulate=sequences * settings.accumulate).fits():
            yield "--micro-batch auto: the same step in smaller micro-batches; one sequence at a time fits"
    if settings.offload_activations == "no" and trace.checkpoint_bytes and on_gpu:
        if way.changed(offload_activations="cpu").refusal(trace) is None:
            yield f"--offload-activations cpu: {human_bytes(trace.checkpoint_bytes)} less; then it fits"
    if _can_be_transient(way) and way.changed(gradients="transient").refusal(trace) is None:
        yield "--gradients transient (updates inside backward, no clipping): then it fits"
    if settings.config is not None and settings.tile_tokens is None and on_gpu:
        tiled = _tiled(way)
        if tiled is not None and way.refusal(tiled) is None:
            yield f"--tile-tokens auto: {_instead(tiled, trace)}; then it fits"
    if _can_be_compact(way) and way.changed(states="compact").refusal(trace) is None:
        yield "--states compact (8-bit states, some 5 bytes per param with Adam instead of 12): then it fits"


def _instead(changed: MemoryTrace, trace: MemoryTrace) -> str:
    """What another step leaves beside params, and what that costs."""
    more = changed.flops / trace.flops - 1 if trace.flops else 0.0
    sizes = f"{human_bytes(changed.peak_bytes)} beside params instead of {human_bytes(trace.peak_bytes)}"
    return f"{sizes}, {more:.0%} more work"


def _tiled(way: Way) -> MemoryTrace | None:
    """The same step in tiles of tokens; None where the model has none."""
    try:
        return way.trace(tile_tokens="auto").tiled
    except (JobError, GeminiError):
        return None


def _can_be_transient(way: Way) -> bool:
    settings = way.settings
    return settings.gradients is None and settings.accumulate == 1 and way.trace().precision != "fp16"


def _can_be_compact(way: Way) -> bool:
    settings = way.settings
    return settings.states == "exact" and way.trace().precision == "bf16" and settings.has_compact_form


# ---- what else the machine could do ----------------------------------------------------------------------------------


def _alternatives(way: Way, fits: bool, rate: float | None) -> Iterator[Alternative]:
    """The step as asked; what leaves less beside params, until the step fits; then every other change beside that.

    ``fits``, ``rate``: what is known of it as it was asked for.
    """
    yield Alternative("as asked", "", fits, rate, "")
    base, beside = way, ""
    for option, smaller, result in _smaller(way, fits=fits):
        found = smaller.outcome()
        yield Alternative(option, "", *found, result)
        if found[0] and not fits:
            fits, base, beside = True, smaller, option
            break
    for option, changes, result in _others(base):
        try:
            yield Alternative(option, beside, *base.changed(**changes).outcome(), result)
        except (JobError, MissingFigure) as e:
            yield Alternative(option, beside, None, None, str(e).partition(" (")[0])


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


def _others(way: Way) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Other options, their values, and what they do to what is computed."""
    settings = way.settings
    if _can_be_transient(way):
        yield "--gradients transient", {"gradients": "transient"}, "no clipping"
    if _can_be_compact(way):
        yield "--states compact", {"states": "compact"}, "8-bit moments"
    if settings.trace is None and settings.lora is None:
        yield f"--lora {LORA_RANK}", {"lora": LORA_RANK}, "adapters only"
    if settings.trace is None and not settings.load_in_4bit:
        lora = settings.lora or LORA_RANK
        option = "--load-in-4bit" if settings.lora else f"--lora {lora} --load-in-4bit"
        yield option, {"lora": lora, "load_in_4bit": True}, "4-bit base"
    yield f"--gpus {2 * settings.gpus}", {"gpus": 2 * settings.gpus}, "rounding"


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


def _plan_over_mesh(way: Way, status: Status) -> PlanReport:
    """The step over the mesh that was asked for, or over the best one."""
    if way.machine.hardware is None:
        raise JobError("A plan over a mesh needs the speeds of a machine and of its wires: --machine NAME or FILE.")
    status.update("playing steps over meshes ...")
    over = _OverMesh(way, way.machine.hardware)
    return over.answer(over.best() if way.settings.parallel else over.as_asked())


class _Refused(NamedTuple):
    """A mesh on which the step does not fit, and why."""

    sizes: MeshSizes
    error: BudgetExceeded


class _OverMesh:
    """Play steps of a model over meshes: the one that was asked for, or those that may be the best."""

    def __init__(self, way: Way, hardware: Hardware):
        from gemini.jobs.models import find_config

        settings = way.settings
        assert settings.config is not None
        self._way = way
        self._settings = settings
        self._hardware = hardware
        config = find_config(settings.config, settings.layers).config
        self._config = config.get_text_config()
        self._in_two = bool(getattr(config, "is_encoder_decoder", False))
        self._whole_rule = settings.rule_in(settings.precision or "bf16").whole
        self._refused: _Refused | None = None

    def as_asked(self) -> list[MeshOutcome]:
        """The step over the mesh that was asked for; none if it does not fit.

        Raises:
            JobError: if the mesh does not go with the model.
        """
        settings = self._settings
        asked = " ".join(f"--{name} {size}" for name, size in settings.dims.items())
        own = settings.pp * settings.cp * settings.tp
        if settings.gpus % own:
            raise JobError(f"--gpus {settings.gpus} with {asked}, which are {own} GPUs together: a multiple of {own}.")
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
        try:
            return [self._play(sizes, settings.accumulate)]
        except BudgetExceeded as e:
            self._note_refused(sizes, e)
            return []
        except ValueError as e:
            raise JobError(f"{asked}: {e}.") from e

    def best(self) -> list[MeshOutcome]:
        """The meshes whose steps are the shortest, of those on which it fits; none if it fits on none of them.

        Raises:
            JobError: if no mesh goes with the model.
        """
        found = self._shortest()
        # Again with all stages: to compare meshes it was played with the first and the last one.
        if found and found[0].sizes.pp > 2:
            found[0] = self._play(found[0].sizes, found[0].micro_batches)
        return found

    def _shortest(self) -> list[MeshOutcome]:
        """Play meshes in the order of what their steps take at least, until no other one can be among the best, or
        ``MOST_PLAYED`` are.
        """
        candidates = sorted(self._candidates(), key=lambda candidate: candidate.least)
        if not candidates:
            raise JobError(f"--parallel auto: no mesh of {self._settings.gpus} GPUs goes with this model.")
        found: list[MeshOutcome] = []
        unsuited: ValueError | None = None
        for candidate in candidates:
            is_decided = len(found) > RUNNERS_UP and candidate.least > found[RUNNERS_UP].step_seconds
            if is_decided or len(found) == MOST_PLAYED:
                break
            try:
                found.append(self._play(candidate.sizes, candidate.micro_batches, ends=True))
                found.sort(key=lambda outcome: outcome.step_seconds)
            except BudgetExceeded as e:
                self._note_refused(candidate.sizes, e)
            except ValueError as e:
                unsuited = e
        # What does not fit is told before what does not suit: it can be changed.
        if unsuited is not None and not found and self._refused is None:
            raise JobError(f"--parallel auto: {unsuited}.") from unsuited
        return found

    def _note_refused(self, sizes: MeshSizes, error: BudgetExceeded) -> None:
        """Keep the first mesh on which the step does not fit: it is the one that is told."""
        if self._refused is None:
            self._refused = _Refused(sizes, error)

    def _candidates(self) -> Iterator[MeshCandidate]:
        """Every mesh of the powers of two (and what is left) that the model goes with; a step has the sequences that
        all GPUs would take without slices, parts and stages.
        """
        gpus, sharing = self._settings.gpus, self._way.machine.sharing
        for tp in _powers(1 if self._whole_rule else min(gpus, sharing)):
            for cp in _powers(gpus // tp):
                try:
                    trace = self._trace(tp, cp)
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

    def _trace(self, tp: int, cp: int) -> MemoryTrace:
        return self._way.trace(tp=tp, cp=cp)

    def _play(self, sizes: MeshSizes, micro_batches: int, *, ends: bool = False) -> MeshOutcome:
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
            self._trace(sizes.tp, sizes.cp),
            self._hardware,
            sizes,
            make,
            micro_batches=micro_batches,
            width=self._config.hidden_size,
            per_machine=self._way.machine.sharing,
            schedule=settings.schedule,
            ends=ends,
        )

    def answer(self, found: list[MeshOutcome]) -> PlanReport:
        """Report what was found, the best mesh first; without one, why the step does not fit."""
        if found:
            sizes = found[0].sizes
            slowest = found[0].slowest
            mesh = self._describe(sizes, self._trace(sizes.tp, sizes.cp), found)
            return PlanReport(
                self._settings, self._way.machine, slowest.plan.trace, slowest.plan, slowest.timeline, mesh=mesh
            )
        assert self._refused is not None
        sizes, refusal = self._refused
        trace = self._trace(sizes.tp, sizes.cp)
        mesh = self._describe(sizes, trace, found)
        return PlanReport(self._settings, self._way.machine, trace, refusal=refusal, mesh=mesh)

    def _describe(self, sizes: MeshSizes, trace: MemoryTrace, found: list[MeshOutcome]) -> OverMesh:
        """Describe what was found over a mesh, one rank of which has ``trace``."""
        settings = self._settings
        samples, length = next(shape for shape in trace.batch.values() if len(shape) > 1)
        return OverMesh(
            sizes,
            params_of(settings.config or "", settings.layers, settings.precision or "bf16").num_params,
            {"input_ids": (samples, length * trace.context_parallel)},
            tuple(found[: RUNNERS_UP + 1]),
        )


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
