"""``draw``: a timeline to a file, whose suffix says as what; and the page that is one of the kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from gemini.errors import human_bytes
from gemini.pictures.board import picture
from gemini.pictures.series import activity_of, holders
from gemini.planning.timeline import Span, Timeline, Track


def draw(path: str | Path, timeline: Timeline, other: Timeline | None = None) -> Path:
    """Draw a step, or two beside each other (predicted and measured, before and after).

    ``.png`` and ``.svg``: memory per tier and tracks; ``.html``: a page with the numbers and the same picture, which
    needs no network; ``.json`` (``.perfetto.json``): a trace for ui.perfetto.dev.

    Raises:
        ValueError: for another suffix.
        ImportError: without matplotlib, saying how to get it; a trace does not need it.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".png" | ".svg":
            path.write_bytes(picture(timeline, other, suffix=path.suffix))
        case ".html":
            path.write_text(page(timeline, other), encoding="utf-8")
        case ".json":
            path.write_text(perfetto(timeline, other), encoding="utf-8")
        case suffix:
            raise ValueError(
                f"a picture cannot be drawn as {suffix or 'a file without a suffix'!r} ({path.name}): use .png or .svg "
                "(a picture), .html (a page) or .json (a trace for ui.perfetto.dev)"
            )
    return path


def page(timeline: Timeline, other: Timeline | None = None) -> str:
    """The text of an HTML page with the numbers of a step, or of two, and their picture. It loads nothing.

    Raises:
        ImportError: without matplotlib.
    """
    svg = picture(timeline, other, suffix="svg").decode()
    shown = [timeline] if other is None else [timeline, other]
    return _PAGE.format(
        title=escape(f"{timeline.title}: {' and '.join(t.source for t in shown)}"),
        numbers="\n".join(f"<pre>{escape(str(t))}</pre>" for t in shown),
        picture=svg[svg.index("<svg") :],  # without what stands before it in a file of its own
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #101114; background: white; margin: 1.5rem; }}
pre {{ white-space: pre-wrap; }}
svg {{ display: block; width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
{numbers}
{picture}
</body>
</html>
"""


def perfetto(timeline: Timeline, other: Timeline | None = None) -> str:
    """The JSON text of one timeline, or of two as two processes."""
    shown = [timeline] if other is None else [timeline, other]
    events = [event for pid, each in enumerate(shown, 1) for event in _process(each, pid)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _process(timeline: Timeline, pid: int) -> Iterator[dict[str, Any]]:
    def called(kind: str, tid: int, name: str, index: int) -> Iterator[dict[str, Any]]:
        yield {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": index}}

    yield from called("process", 0, f"{timeline.source}: {timeline.title}", pid)
    tid = 0
    for track in Track:
        for number, spans in enumerate(_rows([span for span in timeline.spans if span.track is track])):
            tid += 1
            yield from called("thread", tid, track.value if number == 0 else f"{track.value} ({number + 1})", tid)
            yield from ({**_event(timeline, span), "pid": pid, "tid": tid} for span in spans)
    for tier in timeline.budgets:
        names = holders([timeline], tier)
        last: dict[str, int] | None = None
        for sample in timeline.samples:
            held = {holder: sample.held.get(tier, {}).get(holder, 0) for holder in names}
            if names and held != last:
                ts = round(sample.seconds * 1e9) / 1e3
                yield {"ph": "C", "name": f"{tier.value} bytes", "pid": pid, "tid": 0, "ts": ts, "args": held}
                last = held


def _rows(spans: list[Span]) -> list[list[Span]]:
    """Spans that overlap stand on tracks of their own: a viewer takes what overlaps on one for calls in calls."""
    tracks: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        free = (track for track in tracks if _nanoseconds(track[-1])[1] <= _nanoseconds(span)[0])
        if (track := next(free, None)) is None:
            tracks.append([span])
        else:
            track.append(span)
    return tracks


def _nanoseconds(span: Span) -> tuple[int, int]:
    return round(span.start * 1e9), round(span.stop * 1e9)


def _event(timeline: Timeline, span: Span) -> dict[str, Any]:
    start, stop = _nanoseconds(span)
    args: dict[str, Any] = {}
    if 0 <= span.moment < len(timeline.moments):
        args["moment"] = f"{span.moment}: {timeline.moments[span.moment]}"
    if span.chunk >= 0:
        args["chunk"] = span.chunk
    if span.num_bytes:
        args["bytes"] = human_bytes(span.num_bytes)
        if stop > start:
            args["speed"] = f"{span.num_bytes / (stop - start):.3g} GB/s"
    times = {"ts": start / 1e3, "dur": (stop - start) / 1e3}
    return {"ph": "X", "name": span.name, "cat": activity_of(span), **times, "args": args}
