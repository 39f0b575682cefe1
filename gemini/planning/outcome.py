"""What came of playing a schedule: spans per track, stalls with their causes, bytes moved, what each tier held.

A stall is told by walking back from the task whose end let computing go on: while computing waits, there is always one
task that it waits for, or that this one waits for, and its cause gets the time. So

    step = computing alone + stalls, cause by cause
"""

from __future__ import annotations

from collections import Counter

from gemini.planning.fluid import Run
from gemini.planning.schedules import STEPS, Change, Graph
from gemini.planning.timeline import Sample, Span, Timeline, Track
from gemini.planning.traffic import Traffic, by_name
from gemini.planning.work import COMPUTING
from gemini.tiers import Tier

SHARING = "sharing with moves and updates"
"""The cause of a stall in which computing went on, only slower: others used what it uses."""


def timeline_of(graph: Graph, *, title: str, is_serial: bool) -> Timeline:
    """Play ``graph`` and tell of its last whole step."""
    plan = graph.work.plan
    run = graph.fluid.run()
    if is_serial:
        step, begin, end = 0, 0.0, max(run.stop)
    else:
        step, begin, end = STEPS - 1, run.start[graph.begins[-2]], run.start[graph.begins[-1]]
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
        stalls=_stalls(graph, run, begin, end),
        moved=by_name(+moved),
        samples=_samples(graph, run, begin, end),
        budgets=dict(plan.problem.budgets),
        moments=tuple(hop.name for hop in graph.work.computing),
    )


def _spans(graph: Graph, run: Run, begin: float, end: float) -> tuple[Span, ...]:
    """What ran between ``begin`` and ``end``. A task that crosses one of them counts there with its part."""
    found = []
    for task, start, stop in zip(graph.tasks, run.start, run.stop, strict=True):
        if start >= end or stop <= begin or stop <= start:
            continue
        inside = min(stop, end) - max(start, begin)
        hop = task.hop
        num_bytes = hop.num_bytes if inside == stop - start else round(hop.num_bytes * inside / (stop - start))
        first, last = max(start, begin) - begin, min(stop, end) - begin
        found.append(Span(hop.track, first, last, hop.name, task.moment, hop.chunk, num_bytes))
    return tuple(sorted(found, key=lambda span: (span.start, span.stop, span.track.value, span.name)))


def _stalls(graph: Graph, run: Run, begin: float, end: float) -> dict[str, float]:
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
            return _in_order(found)
        lost = stop - start - task.hop.cost.seconds
        if lost > 1e-9 * (stop - start):
            found[SHARING] = found.get(SHARING, 0.0) + lost
        before = stop
    if end > before:
        blame(max(range(len(graph.tasks)), key=lambda number: (run.stop[number], number)), before, end)
    return _in_order(found)


def _in_order(stalls: dict[str, float]) -> dict[str, float]:
    """The longest first."""
    return dict(sorted(stalls.items(), key=lambda item: (-item[1], item[0])))


def _samples(graph: Graph, run: Run, begin: float, end: float) -> tuple[Sample, ...]:
    """What every tier holds from ``begin`` on, one sample at every change."""
    held = _standing(graph)
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

    def sample(seconds: float) -> None:
        shown = {tier: _nonzero(holders) for tier, holders in held.items()}
        if not samples or samples[-1].held != shown:
            samples.append(Sample(seconds, moment, shown))

    for position, (seconds, _, event) in enumerate(events):
        if seconds >= end:
            break
        if isinstance(event, int):
            moment = event
        else:
            holders = held.setdefault(event.tier, {})
            holders[event.holder] = holders.get(event.holder, 0) + event.num_bytes
        after = events[position + 1][0] if position + 1 < len(events) else end
        if after > max(seconds, begin):  # all that changes at one time has
            sample(max(seconds, begin) - begin)
    return tuple(samples)


def _nonzero(holders: dict[str, int]) -> dict[str, int]:
    return {holder: num_bytes for holder, num_bytes in holders.items() if num_bytes}


def _standing(graph: Graph) -> dict[Tier, dict[str, int]]:
    """What is there all the time: planes, staging, buffers, scratch between ranks."""
    plan = graph.work.plan
    problem, held = plan.problem, plan.planes_held
    if problem.compute is Tier.GPU:
        held[Tier.GPU]["buffers"] = plan.trace.buffer_bytes
    held[problem.compute]["gradients in flight"] = problem.in_flight
    held[problem.compute]["context"] = problem.beside
    host = held.setdefault(Tier.CPU, {})
    if problem.demands(plan.placement).get(Tier.CPU, 0) >= problem.staging > 0:
        host["staging"] = problem.staging
    host["exchange"] = problem.exchange
    host["factors"] = problem.factors
    if problem.durable:
        held[Tier.NVME]["spare slots"] = problem.spare_slots(plan.placement)
    for at in (held[problem.compute], host):
        at["temporaries"] = problem.temporaries
    if plan.placement.streamed:
        held[Tier.GPU]["staging"] = problem.device_staging
    return held
