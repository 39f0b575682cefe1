"""What a picture shows, as plain numbers: phases, stacks of bytes and busy shares over time, as fine as can be seen.

A timeline of a 70B model has tens of thousands of spans and samples, a picture some hundred columns. Stacks keep the
peak of every column, busy tracks become the share of each column in which they worked; what is short enough to be seen
as it is stays as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gemini.planning.timeline import TRACKS, Sample, Span, Timeline, Track
from gemini.tiers import Tier

COLUMNS = 480
"""How finely time is divided."""

HOLDERS = (
    "weights", "residual", "exp_avg", "exp_avg_sq", "grad", "windows", "pool", "gradients in flight", "activations",
    "buffers", "staging", "exchange",
)  # fmt: skip
"""From the bottom of a stack to its top: what stays, then what comes and goes."""

ACTIVITIES = (
    "forward", "recompute", "backward", "other computing", "waiting", "fetch weights", "gradients", "update",
    "activations", "all-gather", "reduce-scatter", "other moves",
)  # fmt: skip
"""What tracks do, in the order of legends. "waiting" is what is left of computing."""

_INTO = {track: boundary.target for boundary, track in TRACKS.items()}
_FROM = {track: boundary.source for boundary, track in TRACKS.items()}


class Stretch(NamedTuple):
    """A stretch of the step: "forward", "backward" or "update"."""

    name: str
    start: float
    stop: float


class Stack(NamedTuple):
    """Bytes by holder between ``edges`` (one more than values); ``samples`` is what each column shows."""

    edges: list[float]
    samples: list[Sample]

    def values(self, tier: Tier, holder: str) -> list[int]:
        return [sample.held.get(tier, {}).get(holder, 0) for sample in self.samples]


def activity_of(span: Span) -> str:
    """What a span is about: one of :data:`ACTIVITIES`."""
    if span.track is Track.COMPUTE:
        word = span.name.split(" ")[0]
        return word if word in ("forward", "recompute", "backward") else "other computing"
    for words, activity in (
        ("activation", "activations"), ("fetch", "fetch weights"), ("gradient", "gradients"), ("update", "update"),
    ):  # fmt: skip
        if words in span.name:
            return activity
    fallback = {Track.UPDATE: "update", Track.GATHER: "all-gather", Track.REDUCE: "reduce-scatter"}
    return fallback.get(span.track, "other moves")


def phases(timeline: Timeline) -> list[Stretch]:
    """Forward, backward (with what it recomputes) and what comes after the last computing, in order."""
    found: list[Stretch] = []
    for span in timeline.spans:
        name = {"forward": "forward", "backward": "backward", "recompute": "backward"}.get(activity_of(span))
        if name is None or span.track is not Track.COMPUTE:
            continue
        if found and found[-1].name == name:
            found[-1] = found[-1]._replace(stop=max(found[-1].stop, span.stop))
        else:
            found.append(Stretch(name, span.start, span.stop))
    since = found[-1].stop if found else 0.0
    updates = [span for span in timeline.spans if span.stop > since and activity_of(span) == "update"]
    if updates:
        start = max(since, min(span.start for span in updates))
        found.append(Stretch("update", start, max(span.stop for span in updates)))
    return found


def stack(timeline: Timeline, tier: Tier | None = None, columns: int = COLUMNS) -> Stack:
    """What is held over the step; of more samples than columns the fullest (in ``tier``) of each column."""
    end = timeline.step_seconds
    samples = [sample for sample in timeline.samples if sample.seconds < end or sample is timeline.samples[0]]
    if len(samples) <= columns:
        return Stack([*(sample.seconds for sample in samples), end], samples)

    def fullness(sample: Sample) -> int:
        tiers = Tier if tier is None else (tier,)
        return sum(sample.total(t) for t in tiers)

    edges = [end * column / columns for column in range(columns + 1)]
    chosen: list[Sample] = []
    current, position = samples[0], 0
    for column in range(columns):
        fullest = current
        while position < len(samples) and samples[position].seconds < edges[column + 1]:
            current = samples[position]
            if fullness(current) > fullness(fullest) or current.seconds <= edges[column]:
                fullest = current
            position += 1
        chosen.append(fullest)
    return Stack(edges, chosen)


def holders(timelines: Iterable[Timeline], tier: Tier | None = None) -> list[str]:
    """Who ever holds anything (in ``tier``), in the order of stacks."""
    seen = {
        holder
        for timeline in timelines
        for sample in timeline.samples
        for at, held in sample.held.items()
        if tier is None or at is tier
        for holder, num_bytes in held.items()
        if num_bytes
    }
    return [h for h in HOLDERS if h in seen] + sorted(seen.difference(HOLDERS))


class Busy(NamedTuple):
    """Shares of time between ``edges`` (one more than shares), by activity."""

    edges: list[float]
    shares: dict[str, list[float]]


def coverage(intervals: Iterable[tuple[float, float]], edges: Sequence[float]) -> list[float]:
    """The share of each column between ``edges`` that the intervals cover; those that overlap count once."""
    inside, covered = [0.0] * (len(edges) - 1), edges[0]
    for start, stop in sorted(intervals):
        start, stop = max(start, covered), min(stop, edges[-1])
        covered = max(covered, stop)
        column = max(bisect_right(edges, start) - 1, 0)
        while start < stop:
            until = min(stop, edges[column + 1])
            inside[column] += until - start
            start, column = until, column + 1
    return [min(1.0, part / (b - a)) for part, a, b in zip(inside, edges, edges[1:], strict=False)]


def busy(spans: Sequence[Span], end: float, *, step: float = 0.0, columns: int = COLUMNS) -> Busy:
    """Shares of spans by activity. Few spans have columns of their own and are seen as they are. Activities that a
    track does at once (reads of several threads) share the time that they cover.

    ``step``: seconds of which the rest, in which no span is under way, is "waiting".
    """
    exact = sorted({0.0, end, *(t for s in spans for t in (s.start, s.stop) if 0 < t < end), min(step, end)})
    edges = exact if len(exact) <= columns else [end * column / columns for column in range(columns + 1)]
    by_activity: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        by_activity.setdefault(activity_of(span), []).append((span.start, span.stop))
    shares = {name: coverage(by_activity[name], edges) for name in ACTIVITIES if name in by_activity}
    worked = coverage([(span.start, span.stop) for span in spans], edges)
    for column, (covered, *parts) in enumerate(zip(worked, *shares.values(), strict=True)):
        if sum(parts) > covered > 0:
            for values in shares.values():
                values[column] *= covered / sum(parts)
    if step:
        whole = coverage([(0.0, step)], edges)
        shares["waiting"] = [max(0.0, all_ - part) for all_, part in zip(whole, worked, strict=True)]
    return Busy(edges, shares)


def in_track(timeline: Timeline, track: Track, end: float) -> Busy:
    """What one track did; of computing also when it waited."""
    spans = [span for span in timeline.spans if span.track is track]
    return busy(spans, end, step=timeline.step_seconds if track is Track.COMPUTE else 0.0)


def across(timeline: Timeline, tier: Tier, end: float) -> tuple[Busy, Busy]:
    """When bytes come into a tier, and when they leave it."""
    into, out = (
        busy([span for span in timeline.spans if ends.get(span.track) is tier], end) for ends in (_INTO, _FROM)
    )
    return into, out


def evictions(timeline: Timeline, tier: Tier) -> list[float]:
    """When gathered weights of a tier were evicted: they are copies, so nothing moves."""
    found, before = [], 0
    for sample in timeline.samples:
        now = sample.held.get(tier, {}).get("windows", 0)
        if now < before:
            found.append(sample.seconds)
        before = now
    return found


def steps(edges: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The corners of a step function, without those that change nothing."""
    xs: list[float] = []
    ys: list[float] = []
    for number, value in enumerate(values):
        if not ys or value != ys[-1] or number == len(values) - 1:
            if ys:
                xs.append(edges[number])
                ys.append(ys[-1])
            xs.append(edges[number])
            ys.append(value)
    xs.append(edges[-1])
    ys.append(values[-1] if values else 0.0)
    return xs, ys


def human_seconds(seconds: float) -> str:
    """Seconds as a person would say them: ``human_seconds(0.00152) == "1.52 ms"``."""
    if seconds >= 120:
        return f"{seconds / 60:,.3g} min"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor:
            value = seconds / factor
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


def time_unit(end: float) -> tuple[float, str]:
    """The unit of a time axis that ends there: its seconds, and its name."""
    for factor, unit in ((60.0, "minutes"), (1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds")):
        if end >= 2 * factor:
            return factor, unit
    return 1e-6, "microseconds"


def byte_unit(most: float) -> tuple[int, str]:
    """The unit of an axis of bytes that goes so far: its bytes, and its name."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if most >= 1.5 * 2**power:
            return 2**power, unit
    return 1, "B"
