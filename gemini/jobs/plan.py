"""``gemini plan``: from a config, sizes and perhaps a machine to one screen. Does it fit, how fast, what to change?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from rich.console import Console

import gemini
from gemini.errors import BudgetExceeded, GeminiError, PlanMismatch, human_bytes
from gemini.jobs.errors import JobError
from gemini.jobs.plan_alternatives import Alternative, alternatives
from gemini.jobs.plan_machine import Machine, machine_of
from gemini.jobs.plan_mesh import plan_over_mesh
from gemini.jobs.plan_report import PlanReport, report_of
from gemini.jobs.plan_screen import screen
from gemini.jobs.plan_settings import PlanSettings
from gemini.jobs.step_files import check_files, progress, say, stdout_closed_to_others, write_all
from gemini.jobs.trace import params_of, take_trace
from gemini.planning import document
from gemini.planning.break_even import played_break_even
from gemini.planning.placement import fill_fastest
from gemini.planning.planner import pose_problem
from gemini.planning.trace import MemoryTrace
from gemini.tiers import Tier


def plan(settings: PlanSettings, console: Console) -> int:
    """Plan, write and say it; returns the exit code, of :attr:`PlanReport.exit_code`."""
    check_files(settings.out, settings.picture)
    if settings.config is not None:
        from gemini.jobs.models import find_config

        find_config(settings.config, settings.layers)  # a name that is none is said before anything else
    machine = machine_of(settings)
    if settings.picture and machine.hardware is None:
        raise JobError(
            f"--picture {settings.picture[0]} shows a step in time, which needs the speeds of a machine: --machine."
        )
    if settings.is_over_mesh:
        return plan_over_mesh(settings, machine, console)
    with progress() as now:
        report, made, timeline = _answer(settings, machine, now)
    if settings.json:
        print(report.to_json())
    else:
        say(console, screen(report))
    if made is not None:
        write_all(settings, made.to_json(), timeline, console)
    return report.exit_code


def _answer(
    settings: PlanSettings, machine: Machine, now: Callable[[str], None]
) -> tuple[PlanReport, gemini.Plan | None, gemini.Timeline | None]:
    """What is said, with the plan and its step where there are. ``now`` is told what is being done."""
    now("tracing the step")
    trace = _trace_of(settings, machine)
    if settings.states == "compact" and trace.precision != "bf16":
        raise JobError(f"--states compact keeps bf16 weights, and --trace {settings.trace} is of {trace.precision}.")
    if settings.micro_batch is not None:
        settings, trace = _with_micro_batch(settings, machine, trace)
    now("choosing homes and moves")
    made, refusal = _plan_of(settings, machine, trace)
    planned = trace.tiled or trace if made is None else made.trace
    whole_peak_bytes = trace.peak_bytes if planned is trace.tiled else None
    timeline, tokens_when_free = None, None
    if made is not None and machine.hardware is not None:
        now("simulating the step")
        play = partial(gemini.simulate, hardware=machine.hardware, schedule=settings.schedule)
        timeline = play(made)
        tokens_when_free = played_break_even(made, play, timeline, serial=settings.schedule == "serial")
    now("looking for what to change")
    checkpointed = _checkpointed(settings, machine)
    report = report_of(
        settings,
        machine,
        planned,
        made,
        timeline,
        tokens_when_free=tokens_when_free,
        refusal=refusal,
        checkpointed=checkpointed,
        whole_peak_bytes=whole_peak_bytes,
        changes=_changes(settings, machine, planned, checkpointed, fits=made is not None),
    )
    if settings.alternatives:
        asked = made is not None, None if timeline is None else timeline.tokens_per_second
        found: list[Alternative] = []
        for other in _alternatives(settings, machine, trace, asked):
            found.append(other)
            now(f"planning what else it could do, {len(found)} of about 8")
        report = replace(report, alternatives=tuple(found))
    return report, made, timeline


# ---- the step --------------------------------------------------------------------------------------------------------


def _trace_of(settings: PlanSettings, machine: Machine) -> MemoryTrace:
    """The step that is planned for: traced now, or read and found to be of the model that was named.

    Raises:
        JobError, PlanMismatch: if the file is no trace of it.
    """
    if settings.trace is None:
        return take_trace(settings.traced(target=machine.target))
    trace = document.load(settings.trace, "--trace", MemoryTrace.from_json)
    if not trace.moments:
        raise PlanMismatch(f"--trace {settings.trace} has no moments: trace a whole forward and backward")
    if settings.config is not None:
        here = params_of(settings.config, settings.layers, trace.precision)
        here.check_same_model(trace, what=f"--trace {settings.trace}")
    return trace


def _checkpointed(settings: PlanSettings, machine: Machine) -> MemoryTrace | None:
    """The same step with gradient checkpointing, to compare with; None where it has it, or the model has none."""
    if settings.config is None or settings.trace is not None or settings.gradient_checkpointing:
        return None
    try:
        return take_trace(replace(settings.traced(target=machine.target), gradient_checkpointing=True))
    except JobError:
        return None


def _plan_of(
    settings: PlanSettings, machine: Machine, trace: MemoryTrace
) -> tuple[gemini.Plan, None] | tuple[None, BudgetExceeded]:
    """The plan, or why there is none."""
    try:
        with stdout_closed_to_others():
            made = gemini.plan(
                trace,
                machine.hardware,
                machine.budgets,
                gradients=settings.kept_gradients,
                optimizer=settings.rule_in(trace.precision),
                compute=machine.compute,
                offload_activations=None if settings.offload_activations == "no" else settings.offload_activations,
                accumulate=settings.accumulate,
                ranks=machine.ranks,
                local_ranks=machine.sharing,
                schedule=settings.schedule,
            )
        return made, None
    except BudgetExceeded as e:
        return None, e
    except ValueError as e:
        raise JobError(f"--optimizer {settings.optimizer} with --gpus {settings.gpus}: {e}.") from e


def _fits(settings: PlanSettings, machine: Machine, trace: MemoryTrace) -> bool:
    return _refusal(settings, machine, trace) is None


def _refusal(settings: PlanSettings, machine: Machine, trace: MemoryTrace) -> BudgetExceeded | None:
    """Why there is no placement at all, if so: quicker than looking for the best one."""
    offload, found = settings.offload_activations, None
    places = {"auto": (None, "cpu"), "no": (None,)}.get(offload, (offload,))
    for step, where in product(filter(None, (trace, trace.tiled)), places):
        try:
            fill_fastest(
                pose_problem(
                    step,
                    machine.budgets_of_rank,
                    precision=trace.precision,
                    gradients=settings.kept_gradients,
                    compute=machine.compute,
                    offload_activations=where,
                    ranks=machine.ranks,
                    rule=settings.rule_in(trace.precision),
                )
            )
            return None
        except BudgetExceeded as e:
            found = found or e
    return found


def _with_micro_batch(settings: PlanSettings, machine: Machine, trace: MemoryTrace) -> tuple[PlanSettings, MemoryTrace]:
    """The largest micro-batch that fits, of those that divide the sequences of a step; the smallest if none does.

    Fewer, larger micro-batches gather every weight fewer times, so the largest is the quickest. What does not fit at
    one size fits at no larger one, so the sizes are halved, each tried by tracing it.
    """
    asked = settings.batch_size or 1
    sequences = asked * settings.accumulate
    sizes = [size for size in range(1, sequences + 1) if sequences % size == 0]
    traces = {asked: trace}

    def tried(size: int) -> tuple[PlanSettings, MemoryTrace]:
        if size not in traces:
            traces[size] = take_trace(settings.traced(batch_size=size, target=machine.target))
        return replace(settings, batch_size=size, accumulate=sequences // size), traces[size]

    def fails(size: int) -> bool:
        now, found = tried(size)
        return not _fits(now, machine, found)

    return tried(sizes[bisect_left(sizes, True, lo=1, key=fails) - 1])  # the smallest is taken in any case


def _alternatives(
    settings: PlanSettings, machine: Machine, trace: MemoryTrace, asked: tuple[bool, float | None]
) -> Iterator[Alternative]:
    """``asked``: what is known of the step as it was asked for."""
    traces = {settings.traced(target=machine.target): trace}

    def tried(changed: PlanSettings) -> tuple[bool, float | None]:
        if changed == settings:
            return asked
        on = machine_of(changed)
        what = changed.traced(target=on.target)
        if changed.trace is None and what not in traces:
            traces[what] = take_trace(what)
        made, _ = _plan_of(changed, on, traces.get(what, trace))
        if made is None or on.hardware is None:
            return made is not None, None
        return True, gemini.simulate(made, hardware=on.hardware, schedule=changed.schedule).tokens_per_second

    yield from alternatives(settings, machine.compute, trace.precision, tried)


# ---- what to change --------------------------------------------------------------------------------------------------


def _changes(
    settings: PlanSettings, machine: Machine, trace: MemoryTrace, checkpointed: MemoryTrace | None, *, fits: bool
) -> tuple[str, ...]:
    """Changes of the step that make it fit, each found by placing again; or what would take off some memory."""
    found: list[str] = []
    if checkpointed is not None and checkpointed.peak_bytes < 0.9 * trace.peak_bytes:
        saved = f"{human_bytes(checkpointed.peak_bytes)} beside params instead of {human_bytes(trace.peak_bytes)}"
        more = checkpointed.flops / trace.flops - 1 if trace.flops else 0.0
        words = f"--gradient-checkpointing: {saved}, {more:.0%} more work"
        if fits:
            found.append(words)
        elif machine.compute is Tier.GPU:
            still = _refusal(settings, machine, checkpointed)
            then = "then it fits" if still is None else f"then {str(still).partition(' Cheapest change: ')[2]}"
            found.append(f"{words}; {then}")
    if fits:
        return tuple(found)
    if settings.config is not None and (settings.batch_size or 1) > 1 and machine.compute is Tier.GPU:
        one = take_trace(settings.traced(batch_size=1, target=machine.target))
        if _fits(replace(settings, accumulate=(settings.batch_size or 1) * settings.accumulate), machine, one):
            found.append("--micro-batch auto: the same step in smaller micro-batches; one sequence at a time fits")
    if settings.offload_activations == "no" and trace.checkpoint_bytes and machine.compute is Tier.GPU:
        if _fits(replace(settings, offload_activations="cpu"), machine, trace):
            found.append(f"--offload-activations cpu: {human_bytes(trace.checkpoint_bytes)} less; then it fits")
    can_be_transient = settings.accumulate == 1 and trace.precision != "fp16" and settings.gradients is None
    if can_be_transient and _fits(replace(settings, gradients="transient"), machine, trace):
        found.append("--gradients transient (updates inside backward, no clipping): then it fits")
    if settings.config is not None and settings.tile_tokens is None and machine.compute is Tier.GPU:
        found += _with_tiles(settings, machine, trace)
    can_be_compact = settings.states == "exact" and trace.precision == "bf16" and settings.has_compact_form
    if can_be_compact and _fits(replace(settings, states="compact"), machine, trace):
        found.append("--states compact (8-bit states, some 5 bytes per param with Adam instead of 12): then it fits")
    return tuple(found)


def _with_tiles(settings: PlanSettings, machine: Machine, trace: MemoryTrace) -> list[str]:
    """What tiles of tokens would make of a step that does not fit."""
    try:
        both = take_trace(replace(settings.traced(target=machine.target), tile_tokens="auto"))
    except (JobError, GeminiError):
        return []
    tiled = both.tiled
    if tiled is None or _refusal(settings, machine, tiled) is not None:
        return []
    saved = f"{human_bytes(tiled.peak_bytes)} beside params instead of {human_bytes(trace.peak_bytes)}"
    return [f"--tile-tokens auto: {saved}, {tiled.flops / max(1, trace.flops) - 1:.0%} more work; then it fits"]
