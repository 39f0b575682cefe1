"""A self-contained page of a step: the numbers, the picture, and what is held wherever the pointer stands.

It loads nothing: styles, script, data and picture are inside. Readable in light and dark, without a script, and on
paper.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from gemini.errors import human_bytes
from gemini.pictures import series
from gemini.pictures.board import FAINT, INK, WAITING, Board, board, colour_of, render
from gemini.planning.timeline import Timeline, Track
from gemini.tiers import Tier

_COLUMNS = 320
"""How finely the pointer reads."""


def page(timeline: Timeline, other: Timeline | None = None) -> str:
    """The HTML text.

    Raises:
        ImportError: without matplotlib.
    """
    timelines = [timeline] if other is None else [timeline, other]
    made = board(timelines)
    svg = render(made, "svg", transparent=True).decode()
    svg = svg[svg.index("<svg") :]
    for ours, theirs in ((INK, "currentColor"), (FAINT, "var(--faint)"), (WAITING, "var(--waiting)")):
        svg = svg.replace(ours, theirs)
    data = [_readings(shown, end) for shown, end in zip(timelines, made.ends, strict=True)]
    title = f"{timeline.title}: {' and '.join(t.source for t in timelines)}"
    return _PAGE.format(
        title=escape(title),
        heading=escape(timeline.title),
        summary=summary(timelines),
        picture=svg,
        width=round(made.width * 96),
        # </ would end the script.
        data=json.dumps({"boxes": _boxes(made), "timelines": data}, separators=(",", ":")).replace("</", "<\\/"),
        colours=json.dumps({name: colour_of(name) for name in series.holders(timelines)}),
    )


# ---- tables ----------------------------------------------------------------------------------------------------------


def summary(timelines: list[Timeline]) -> str:
    """The tables of the page: what came out, and what computing waited for."""
    return f"{_results(timelines)}\n{_stalls(timelines)}"


def _results(timelines: list[Timeline]) -> str:
    rows: list[tuple[str, list[str], str]] = []

    def compare(name: str, values: Sequence[float], texts: list[str]) -> None:
        rows.append((name, texts, _difference(values)))

    rows.append(("fits", [_fits(t) for t in timelines], ""))
    compare("step", [t.step_seconds for t in timelines], [series.human_seconds(t.step_seconds) for t in timelines])
    if any(t.tokens for t in timelines):
        speeds = [t.tokens_per_second for t in timelines]
        compare("tokens per second", speeds, [f"{s:,.0f}" if s >= 100 else f"{s:.3g}" for s in speeds])
    if any(t.flops for t in timelines):
        work = [t.flops / t.step_seconds / 1e12 if t.step_seconds else 0.0 for t in timelines]
        compare("TFLOP/s per rank", work, [f"{w:,.3g}" if w else "not counted" for w in work])
    rows.append(("busiest track", [_busiest(t) for t in timelines], ""))
    for way in sorted({way for t in timelines for way, n in t.moved.items() if n}):
        moved = [t.moved.get(way, 0) for t in timelines]
        compare(f"moved {way.replace('->', ' → ')}", moved, [human_bytes(n) for n in moved])
    for tier in Tier:
        peaks = [t.peaks.get(tier, 0) for t in timelines]
        if any(peaks):
            texts = [f"{human_bytes(p)} of {human_bytes(t.budgets.get(tier, 0))}"
                    for p, t in zip(peaks, timelines, strict=True)]  # fmt: skip
            compare(f"peak {tier.value}", peaks, texts)
    return _table(["", *(t.source for t in timelines)], rows, len(timelines) > 1)


def _stalls(timelines: list[Timeline]) -> str:
    causes = sorted({cause for t in timelines for cause, s in t.stalls.items() if s > 0},
                    key=lambda cause: -max(t.stalls.get(cause, 0.0) for t in timelines))  # fmt: skip
    if not causes:
        return "<p>Computing waited for nothing.</p>"
    rows = []
    for cause in causes:
        seconds = [t.stalls.get(cause, 0.0) for t in timelines]
        texts = [
            f"{series.human_seconds(s)} ({s / t.step_seconds:.0%})" if s else "–"
            for s, t in zip(seconds, timelines, strict=True)
        ]
        rows.append((cause, texts, _difference(seconds)))
    return _table(["computing waited for", *(t.source for t in timelines)], rows, len(timelines) > 1)


def _table(head: list[str], rows: list[tuple[str, list[str], str]], compares: bool) -> str:
    last = ["difference"] if compares else []
    cells = "".join(f"<th>{escape(name)}</th>" for name in [*head, *last])
    body = "".join(
        f"<tr><th>{escape(name)}</th>"
        + "".join(f"<td>{escape(value)}</td>" for value in [*values, *([difference] if compares else [])])
        + "</tr>\n"
        for name, values, difference in rows
    )
    return f"<table>\n<tr>{cells}</tr>\n{body}</table>"


def _difference(values: Sequence[float]) -> str:
    if len(values) < 2 or not values[0] or not values[1]:
        return ""
    return "same" if values[0] == values[1] else f"{values[1] / values[0] - 1:+.1%}"


def _fits(timeline: Timeline) -> str:
    over = [tier for tier, peak in timeline.peaks.items() if peak > timeline.budgets[tier]]
    if not over:
        return "yes"
    gaps = (f"{tier.value} by {human_bytes(timeline.peaks[tier] - timeline.budgets[tier])}" for tier in over)
    return f"no: over the budget on {', '.join(gaps)}"


def _busiest(timeline: Timeline) -> str:
    track: Track = timeline.bound_by
    if not timeline.step_seconds:
        return "none"
    return f"{track.value}, {timeline.busy.get(track, 0.0) / timeline.step_seconds:.0%} of the step"


# ---- what the pointer reads ------------------------------------------------------------------------------------------


def _boxes(made: Board) -> list[dict[str, float]]:
    """Where time runs, as shares of the picture's width and height."""
    return [
        {"left": b.left / made.width, "top": b.top / made.height, "width": b.width / made.width,
         "height": b.height / made.height, "end": end}
        for b, end in zip(made.boxes, made.ends, strict=True)
    ]  # fmt: skip


def _readings(timeline: Timeline, end: float) -> dict[str, Any]:
    shown = series.stack(timeline, columns=_COLUMNS)
    tiers = [tier for tier in Tier if series.holders([timeline], tier)]
    busy: list[list[Any]] = []
    for span in timeline.spans:
        column = int(span.start / end * _COLUMNS) if end else 0
        if span.track is Track.COMPUTE and (not busy or busy[-1][2] != column):
            busy.append([round(span.start, 6), span.name, column])
    return {
        "source": timeline.source,
        "step": timeline.step_seconds,
        "edges": [round(edge, 6) for edge in shown.edges],
        "held": {
            tier.value: {holder: shown.values(tier, holder) for holder in series.holders([timeline], tier)}
            for tier in tiers
        },
        "computing": [entry[:2] for entry in busy],
    }


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #16181d; --paper: #ffffff; --faint: #8a8d94; --line: #dcdee3;
  --waiting: #d9d9d9; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e8e9ec; --paper: #15171b; --faint: #8a8d94; --line: #34373e;
    --waiting: #4b4f58; }}
}}
body {{ font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 1.5rem auto;
  padding: 0 1.2rem; max-width: {width}px; }}
h1 {{ font-size: 1.35rem; margin: 0 0 1rem; }}
.tables {{ display: flex; flex-wrap: wrap; gap: 1rem 3rem; align-items: flex-start; margin-bottom: 1.2rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .22rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:first-child {{ text-align: left; font-weight: 600; padding-left: 0; }}
#picture {{ position: relative; }}
#picture svg {{ display: block; width: 100%; height: auto; color: var(--ink); }}
#line {{ position: absolute; width: 1px; background: var(--ink); opacity: .6; pointer-events: none; }}
#tooltip {{ position: absolute; z-index: 2; pointer-events: none; background: var(--paper); color: var(--ink);
  border: 1px solid var(--faint); border-radius: 4px; padding: .4rem .6rem; font-size: 12.5px; max-width: 24rem; }}
#tooltip b {{ display: block; }}
#tooltip i {{ display: inline-block; width: .7em; height: .7em; margin-right: .4em; }}
#tooltip span {{ display: block; font-variant-numeric: tabular-nums; }}
[hidden] {{ display: none; }}
footer {{ color: var(--faint); font-size: 12.5px; margin-top: 1rem; }}
</style>
</head>
<body>
<h1>{heading}</h1>
<div class="tables">
{summary}
</div>
<div id="picture">
{picture}
<div id="line" hidden></div>
<div id="tooltip" hidden></div>
</div>
<footer>Point at the picture to read what was held and what was computed. Bytes are those in Gemini's ledger. A track's
height is the share of time in which it worked; grey in it is computing that waited.</footer>
<script>
"use strict";
const data = {data};
const colours = {colours};
const picture = document.getElementById("picture"), line = document.getElementById("line");
const tooltip = document.getElementById("tooltip"), svg = picture.querySelector("svg");
const units = ["B", "KiB", "MiB", "GiB", "TiB"];
function bytes(n) {{
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {{ n /= 1024; unit += 1; }}
  return (unit ? Number(n.toPrecision(4)) : n) + " " + units[unit];
}}
function seconds(s) {{
  if (s >= 120) return (s / 60).toFixed(2) + " min";
  if (s >= 1) return s.toFixed(2) + " s";
  return s >= 1e-3 ? (s * 1e3).toFixed(2) + " ms" : (s * 1e6).toFixed(0) + " \\u00b5s";
}}
function last(list, at, of) {{  // the last entry that does not begin after `at`
  let low = 0, high = list.length;
  while (low < high) {{
    const middle = (low + high) >> 1;
    if (of(list[middle]) <= at) low = middle + 1; else high = middle;
  }}
  return low - 1;
}}
function add(tag, text, colour) {{
  const row = document.createElement(tag);
  if (colour) {{
    const mark = document.createElement("i");
    mark.style.background = colour;
    row.append(mark);
  }}
  row.append(text);
  tooltip.append(row);
}}
function hide() {{ line.hidden = tooltip.hidden = true; }}
function read(event) {{
  const frame = svg.getBoundingClientRect();
  const x = (event.clientX - frame.left) / frame.width, y = (event.clientY - frame.top) / frame.height;
  const column = data.boxes.findIndex(b => x >= b.left && x <= b.left + b.width && y >= b.top && y <= b.top + b.height);
  if (column < 0) return hide();
  const box = data.boxes[column], shown = data.timelines[column], at = (x - box.left) / box.width * box.end;
  if (at > shown.step) return hide();
  const index = Math.min(Math.max(last(shown.edges, at, edge => edge), 0), shown.edges.length - 2);
  const computing = shown.computing[last(shown.computing, at, entry => entry[0])];
  tooltip.replaceChildren();
  add("b", shown.source + ", " + seconds(at) + (computing ? ": " + computing[1] : ""));
  for (const [tier, holders] of Object.entries(shown.held)) {{
    const held = Object.entries(holders).map(([name, values]) => [name, values[index]]).filter(e => e[1] > 0);
    add("b", tier + " " + bytes(held.reduce((sum, e) => sum + e[1], 0)));
    for (const [name, n] of held.sort((a, b) => b[1] - a[1])) add("span", name + " " + bytes(n), colours[name]);
  }}
  line.hidden = tooltip.hidden = false;
  line.style.left = x * frame.width + "px";
  line.style.top = box.top * frame.height + "px";
  line.style.height = box.height * frame.height + "px";
  const right = x * frame.width + 14, room = frame.width - tooltip.offsetWidth;
  tooltip.style.left = (right > room ? x * frame.width - tooltip.offsetWidth - 14 : right) + "px";
  tooltip.style.top = Math.max(0, Math.min(y * frame.height, frame.height - tooltip.offsetHeight)) + "px";
}}
svg.addEventListener("pointermove", read);
svg.addEventListener("pointerdown", read);
svg.addEventListener("pointerleave", hide);
</script>
</body>
</html>
"""
