"""Plays a plan on a machine, one optimizer step from its first moment to the first moment of the next: a Timeline.

Nothing of a model is needed, no torch, no GPU: a plan, the figures of a machine, and a fluid model of what they share.
A stall is told by walking back from the task whose end let computing go on: while computing waits, there is always one
task that it waits for, or that this one waits for, and its cause gets the time. So

    step = computing alone + stalls, cause by cause
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from gemini.errors import PlanMismatch, human_bytes
from gemini.planning.costs import Costs, Efficiency, Grid, MeshSizes
from gemini.planning.fluid import TaskTimes
from gemini.planning.hardware import Hardware
from gemini.planning.plan import SCHEDULES, Plan
from gemini.planning.schedules import COMPUTING, LAUNCHING, STEPS, Change, Graph, Work, least_of, overlapped, serial
from gemini.planning.timeline import Sample, Span, Timeline, Track
from gemini.planning.traffic import Traffic, by_name
from gemini.tiers import Tier

SHARING = "sharing with moves and updates"
"""The cause of a stall in which computing went on, only slower: others used what it uses."""


def timeline_of(graph: Graph, *, title: str, is_serial: bool) -> Timeline:
    """Play ``graph`` and tell of its last whole step."""
    plan = graph.work.plan
    run = graph.fluid.run()
    step, (begin, end) = 0 if is_serial else STEPS - 1, _last_step(graph, run, is_serial=is_serial)
    moved: Traffic = Counter()
    for task in graph.tasks:
        if task.step == step and task.hop.boundary is not None:
            moved[task.hop.boundary] += task.hop.num_bytes
    return Timeline(
        source="predicted",
        title=title,
        step_seconds=end - begin,
        tokens=plan.trace.tokens * plan.accumulate * plan.layout.ranks,
        flops=plan.trace.flops * plan.accumulate,
        spans=_spans(graph, run, begin, end),
        stalls=dict(sorted(_stalls(graph, run, begin, end).items(), key=lambda item: (-item[1], item[0]))),
        moved=by_name(+moved),
        samples=_samples(graph, run, begin, end),
        budgets=dict(plan.problem.budgets),
        moments=tuple(hop.name for hop in graph.work.computing),
    )


def _last_step(graph: Graph, run: TaskTimes, *, is_serial: bool) -> tuple[float, float]:
    """When the last whole step begins, and when it ends."""
    return (0.0, max(run.stop)) if is_serial else (run.start[graph.begins[-2]], run.start[graph.begins[-1]])


def _spans(graph: Graph, run: TaskTimes, begin: float, end: float) -> tuple[Span, ...]:
    """Spans that ran between ``begin`` and ``end``. A task that crosses one of them counts there with its part."""
    found = []
    for task, start, stop in zip(graph.tasks, run.start, run.stop, strict=True):
        if start >= end or stop <= begin or stop <= start or task.hop.cause == LAUNCHING:
            continue
        first, last, hop = max(start, begin), min(stop, end), task.hop
        inside = last - first
        num_bytes = hop.num_bytes if inside == stop - start else round(hop.num_bytes * inside / (stop - start))
        found.append(Span(hop.track, first - begin, last - begin, hop.name, task.moment, hop.chunk, num_bytes))
    return tuple(sorted(found, key=lambda span: (span.start, span.stop, span.track.value, span.name)))


def _stalls(graph: Graph, run: TaskTimes, begin: float, end: float) -> dict[str, float]:
    """Seconds between ``begin`` and ``end`` that computing waits, by what for."""
    found: dict[str, float] = {}

    def blame(task: int, since: float, until: float) -> None:
        """Computing waited from ``since`` to ``until``, when ``task`` ended."""
        while task >= 0 and until > since:
            start = max(run.start[task], since)
            if until > start:
                cause = graph.tasks[task].hop.cause
                found[cause] = found.get(cause, 0.0) + until - start
            until = start
            task = run.released_by[task]

    before = begin
    for number, task in enumerate(graph.tasks):
        if task.hop.track is not Track.COMPUTE or task.moment < 0:
            continue
        start, stop = run.start[number], run.stop[number]
        if start < begin or start > end:
            continue
        if start > before:
            blame(run.released_by[number], before, start)
        if start >= end:
            return found
        lost = stop - start - task.hop.cost.seconds
        if lost > 1e-9 * (stop - start):
            found[SHARING] = found.get(SHARING, 0.0) + lost
        before = stop
    if end > before:
        blame(max(range(len(graph.tasks)), key=lambda number: (run.stop[number], number)), before, end)
    return found


def _samples(graph: Graph, run: TaskTimes, begin: float, end: float) -> tuple[Sample, ...]:
    """Samples of what every tier holds from ``begin`` on, one at every change."""
    plan, comes_and_goes = graph.work.plan, ("windows", "activations", "activations in flight", "saved activations")
    # What is there all the time: planes, staging, buffers, scratch between ranks.
    held = {
        tier: {holder: num_bytes for holder, num_bytes in holders.items() if holder not in comes_and_goes}
        for tier, holders in plan.held.items()
    }
    if plan.problem.compute is Tier.GPU:
        held[Tier.GPU]["buffers"] = plan.trace.buffer_bytes
    events: list[tuple[float, int, Change | int]] = []  # an int: that moment begins
    for order, change in enumerate(graph.changes):
        seconds = -1.0 if change.task < 0 else run.stop[change.task] if change.at_end else run.start[change.task]
        events.append((seconds, order, change))
    for number, task in enumerate(graph.tasks):
        if task.hop.cause == COMPUTING and task.moment >= 0:
            events.append((run.start[number], -1, task.moment))
    events.sort(key=lambda event: event[:2])
    samples: list[Sample] = []
    moment = 0
    for position, (seconds, _, event) in enumerate(events):
        if seconds >= end:
            break
        seconds = max(seconds, begin)
        if isinstance(event, int):
            moment = event
        else:
            holders = held.setdefault(event.tier, {})
            holders[event.holder] = holders.get(event.holder, 0) + event.num_bytes
        after = events[position + 1][0] if position + 1 < len(events) else end
        if after > seconds:  # all that changes at one time has
            shown = {tier: {holder: n for holder, n in holders.items() if n} for tier, holders in held.items()}
            if not samples or samples[-1].held != shown:
                samples.append(Sample(seconds - begin, moment, shown))
    return tuple(samples)


def simulate(
    plan: Plan,
    hardware: Hardware,
    *,
    schedule: str = "overlapped",
    clipping: bool | None = None,
    update_threads: int | None = None,
    efficiency: Efficiency | None = None,
    mesh: MeshSizes | None = None,
) -> Timeline:
    """Predict one optimizer step of ``plan`` on ``hardware``: its time, stalls by cause, moved bytes and memory.

    One rank is simulated, as all do the same. The ranks of one machine (at most its ``num_gpus``) share its host
    memory, drives and CPU threads equally. Communication among ranks uses rings.

    Args:
        plan: what to simulate. Its trace has the work of each module. If the trace was recorded on the kind of device
            that the plan computes on, the recorded seconds are used.
        hardware: the machine. Measured values (those whose source begins with "measured") are used as they are; all
            others are peaks and are multiplied by ``efficiency``.
        schedule: "overlapped": moves and updates run at the same time as computing, and the time is that of one step in
            a long run. "serial": every move is waited for, and updates run after backward.
        clipping: whether updates wait for the norm of all gradients (only "overlapped"). By default True, except with
            ``gradients="transient"``.
        update_threads: CPU threads for updates during computing, as in ``GeminiConfig(update_threads=...)``.
        efficiency: which share of the peak values is reached, between 0 and 1 each.
        mesh: the sizes of all mesh dimensions; ``dp`` times ``cp`` are the ranks of the plan. Communication of tensor
            and context parallel is taken from the trace. For pipeline stages use :mod:`gemini.planning.parallel`.

    Returns:
        A :class:`Timeline`. Its times (seconds), bytes and ``flops`` are of one rank, its ``tokens`` those of all.

    Raises:
        MissingFigure: if the hardware lacks a value; the message names it and what needs it.
        PlanMismatch: if the plan's trace has no work in it, the plan needs a tier or more memory than the machine has,
            or is for another number of ranks.
        ValueError: for an unknown schedule, fewer threads than one, or clipping with gradients that are not kept.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: choose one of {', '.join(map(repr, SCHEDULES))}")
    if update_threads is not None and update_threads < 1:
        raise ValueError(f"update_threads={update_threads}: it is at least 1, or None for as many as are quickest")
    if clipping and plan.problem.gradients == "transient":
        raise ValueError('clipping needs the gradients of the whole model, and gradients="transient" keeps none')
    clips, ranks = plan.problem.gradients != "transient" if clipping is None else clipping, plan.layout.ranks
    work = _work(plan, hardware, schedule, update_threads=update_threads, efficiency=efficiency, mesh=mesh)
    title = f"{plan.trace.model} on {f'{ranks} x ' if ranks > 1 else ''}{hardware.name}, {schedule}"
    graph = serial(work) if schedule == "serial" else overlapped(work, clipping=clips)
    return timeline_of(graph, title=title, is_serial=schedule == "serial")


FEW, MANY = 2, 4
"""Micro-batches of a step that is played in the place of one with more than ``MANY``: each further one takes as long as
the mean of those between the two.
"""


def step_seconds(plan: Plan, hardware: Hardware, schedule: str) -> float:
    """How long a step takes as :func:`simulate` has it; with more than ``MANY`` micro-batches as that goes on."""
    if plan.accumulate > MANY:
        few, many = (step_seconds(replace(plan, accumulate=n), hardware, schedule) for n in (FEW, MANY))
        return many + (plan.accumulate - MANY) * (many - few) / (MANY - FEW)
    work, is_serial = _work(plan, hardware, schedule), schedule == "serial"
    graph = serial(work) if is_serial else overlapped(work, clipping=plan.problem.gradients != "transient")
    begin, end = _last_step(graph, graph.fluid.run(), is_serial=is_serial)
    return end - begin


def bound_of(plan: Plan, hardware: Hardware, schedule: str) -> float:
    """Seconds that no step of the plan is below, mostly within a tenth, and told without playing it."""
    return least_of(_work(plan, hardware, schedule), is_serial=schedule == "serial")


def _work(
    plan: Plan,
    hardware: Hardware,
    schedule: str,
    *,
    update_threads: int | None = None,
    efficiency: Efficiency | None = None,
    mesh: MeshSizes | None = None,
) -> Work:
    """Arguments and errors as of :func:`simulate`."""
    grid = _grid(plan, hardware, mesh or MeshSizes(dp=plan.layout.ranks))
    _check(plan, hardware, grid.per_machine)
    costs = Costs(
        hardware,
        efficiency or Efficiency(),
        compute=plan.problem.compute,
        precision=plan.trace.arithmetic(plan.problem.precision),
        local_ranks=grid.per_machine,
        beside=schedule == "overlapped",
        update_threads=update_threads,
    )
    recorded_here = (plan.trace.target == "cpu") == (plan.problem.compute is Tier.CPU)
    return Work(plan, costs, grid, measured=recorded_here and plan.trace.seconds is not None)


def _grid(plan: Plan, hardware: Hardware, mesh: MeshSizes) -> Grid:
    """Which ranks of the mesh are on one machine; PlanMismatch for a mesh that is not the plan's."""
    ranks, local_ranks = plan.layout.ranks, mesh.ranks
    if mesh.shards != ranks:
        raise PlanMismatch(f"the plan is for {ranks} ranks that share params, and a mesh of {mesh} has {mesh.shards}")
    if local_ranks > 1 and plan.problem.compute is Tier.GPU:
        num_gpus = hardware.get("num_gpus", needed_for=f"dividing a machine among {local_ranks} ranks")
        local_ranks = min(local_ranks, int(num_gpus))
    return Grid(mesh, local_ranks)


def _check(plan: Plan, hardware: Hardware, local_ranks: int) -> None:
    if not any(moment.seconds or moment.flops or moment.touched_bytes for moment in plan.trace.moments):
        raise PlanMismatch(
            f"the trace of {plan.trace.model} says what is read in each moment, but not how much work it is: make one "
            "with gemini.trace, or record one with gemini.MemoryTracer"
        )
    for tier, num_bytes in ((tier, n) for tier, n in plan.bytes_per_tier.items() if n):
        figures = tier.spec.figures
        if figures and not any(hardware.has(figure) for figure in figures):
            raise PlanMismatch(
                f"the plan uses {human_bytes(num_bytes)} of {tier.value}, and hardware {hardware.name!r} has none: "
                f"make a plan for this machine, or give it {', '.join(figures)}"
            )
        whole = hardware.capacity(tier)
        needed = num_bytes * (1 if tier is Tier.GPU else local_ranks)
        if whole is not None and needed > 1.01 * whole:  # a GPU of "24 GiB" has 23.99
            raise PlanMismatch(
                f"the plan needs {human_bytes(needed)} of {tier.value} on one machine, and hardware "
                f"{hardware.name!r} has {human_bytes(whole)}: make a plan for this machine"
            )
