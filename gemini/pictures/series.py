"""What a picture shows, as plain numbers. A timeline of a 70B model has tens of thousands of spans and samples, a
picture some hundred columns: stacks keep the peak of every column, busy tracks become the share of each column in which
they worked; what is short enough to be seen as it is stays as it is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from gemini.planning.timeline import TRACKS, Sample, Span, Timeline, Track
from gemini.tiers import Tier

COLUMNS = 480
"""How finely time is divided."""

# Okabe and Ito's colours for what is held, Paul Tol's "bright" ones for what is done: people with any kind of colour
# vision tell them apart.
HOLDERS = {
    "weights": "#0072B2",
    "residual": "#009E73",
    "exp_avg": "#E69F00",
    "exp_avg_sq": "#F0E442",
    "grad": "#D55E00",
    "windows": "#56B4E9",
    "pool": "#B8DDF2",
    "gradients in flight": "#A0522D",
    "activations": "#CC79A7",
    "buffers": "#6A3D9A",
    "staging": "#8C8C8C",
    "exchange": "#5A5A5A",
}
"""From the bottom of a stack to its top, what stays and then what comes and goes; with their colours."""

ACTIVITIES = {
    "forward": "#4477AA",
    "recompute": "#99BBDD",
    "backward": "#AA3377",
    "other computing": "#8C8C8C",
    "waiting": "#d9d9d9",
    "fetch weights": "#228833",
    "gradients": "#EE6677",
    "update": "#CCBB44",
    "activations": "#66CCEE",
    "all-gather": "#44AA99",
    "reduce-scatter": "#997700",
    "other moves": "#5A5A5A",
}
"""What tracks do, in the order of legends, with their colours. "waiting" is what is left of computing."""

_INTO = {track: boundary.target for boundary, track in TRACKS.items()}
_FROM = {track: boundary.source for boundary, track in TRACKS.items()}


class Stretch(NamedTuple):
    """A stretch of the step: "forward", "backward" or "update"."""

    name: str
    start: float
    stop: float


class Stack(NamedTuple):
    """The bytes held between ``edges``, of which there is one more than ``samples``."""

    edges: list[float]
    samples: list[Sample]


_BY_NAME = {"activation": "activations", "fetch": "fetch weights", "gradient": "gradients", "update": "update"}
_BY_TRACK = {Track.UPDATE: "update", Track.GATHER: "all-gather", Track.REDUCE: "reduce-scatter"}


def activity_of(span: Span) -> str:
    """The activity of a span: one of :data:`ACTIVITIES`."""
    if span.track is Track.COMPUTE:
        word = span.name.split(" ")[0]
        return word if word in ("forward", "recompute", "backward") else "other computing"
    named = (activity for words, activity in _BY_NAME.items() if words in span.name)
    return next(named, _BY_TRACK.get(span.track, "other moves"))


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


def stack(timeline: Timeline, tier: Tier, columns: int = COLUMNS) -> Stack:
    """The bytes held in ``tier`` over the step; of more samples than columns the fullest of each column."""
    end = timeline.step_seconds
    samples = [sample for sample in timeline.samples if sample.seconds < end or sample is timeline.samples[0]]
    times = [sample.seconds for sample in samples]
    if len(samples) <= columns:
        return Stack([*times, end], samples)
    edges = [end * column / columns for column in range(columns + 1)]
    # Of each column those that begin in it, and the one that it begins with.
    own = (samples[max(bisect_right(times, a) - 1, 0) : bisect_left(times, b)] for a, b in pairwise(edges))
    return Stack(edges, [max(each, key=lambda sample: sample.total(tier), default=samples[0]) for each in own])


def holders(timelines: Iterable[Timeline], tier: Tier | None = None) -> list[str]:
    """The names of all who ever hold anything (in ``tier``), in the order of stacks."""
    seen = {
        holder
        for timeline in timelines
        for sample in timeline.samples
        for at, held in sample.held.items()
        if tier is None or at is tier
        for holder, num_bytes in held.items()
        if num_bytes
    }
    return [h for h in HOLDERS if h in seen] + sorted(seen - HOLDERS.keys())


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
    track does at once (reads of several threads) share the time that they cover; the rest of ``step`` is "waiting".
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
    """The activities of one track; of computing also when it waited."""
    spans = [span for span in timeline.spans if span.track is track]
    return busy(spans, end, step=timeline.step_seconds if track is Track.COMPUTE else 0.0)


def across(timeline: Timeline, tier: Tier, end: float) -> list[Busy]:
    """When bytes come into a tier, and when they leave it."""
    return [busy([s for s in timeline.spans if ends.get(s.track) is tier], end) for ends in (_INTO, _FROM)]


def evictions(timeline: Timeline, tier: Tier) -> list[float]:
    """When gathered weights of a tier were evicted: they are copies, so nothing moves."""
    held = [(sample.seconds, sample.held.get(tier, {}).get("windows", 0)) for sample in timeline.samples]
    return [seconds for (_, before), (seconds, now) in pairwise(held) if now < before]


_UNITS = {
    "seconds": ((60.0, "minutes"), (1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds")),
    "bytes": ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
}


def unit(of: str, most: float) -> tuple[float, str]:
    """The unit of an axis that goes so far, how many "seconds" or "bytes" it is and its name."""
    return next((each for each in _UNITS[of] if most >= 1.5 * each[0]), _UNITS[of][-1])
