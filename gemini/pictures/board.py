"""The picture of a step: for each tier what it holds over time, below it what comes and goes, then the tracks.

One timeline is one column, two stand beside each other with the same scales. Layout is arithmetic in inches, so that
nothing overlaps at any size and a page knows where the panels are. matplotlib is optional and imported when it is used.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gemini.errors import human_bytes
from gemini.pictures import series
from gemini.planning.timeline import Timeline, Track, human_seconds
from gemini.tiers import Tier

INK, FAINT = "#101114", "#8a8d94"
"""Text, and thin lines."""

_SPARE = ("#332288", "#117733", "#DDCC77", "#AA4499", "#44AA99", "#661100")
_TIER_NAMES = {Tier.GPU: "GPU memory", Tier.CPU: "Host memory", Tier.NVME: "NVMe"}

_WIDTH, _LEFT, _RIGHT = 7.6, 0.95, 0.6  # inches; the width is a column's
_HEAD, _PANEL, _STRIP, _ROW, _GAP, _AXIS = 0.75, 1.55, 0.66, 0.36, 0.42, 0.5
_ENTRY = 1.45


class Box(NamedTuple):
    """Where a column of the board is, in inches from the top left."""

    left: float
    top: float
    width: float
    height: float


@dataclass
class Board:
    """A figure and its size in inches."""

    figure: Any
    width: float
    height: float


def memory_picture(timeline: Timeline, other: Timeline | None = None, *, path: str | Path) -> Path:
    """Memory per tier over a step as PNG or SVG: stacked by holder, with budgets, what comes and goes, and phases.

    Raises:
        ImportError: without matplotlib. ValueError: for a path that ends neither in .png nor in .svg.
    """
    path = Path(path)
    path.write_bytes(picture(timeline, other, suffix=path.suffix, tracks=False))
    return path


def tracks_picture(timeline: Timeline, other: Timeline | None = None, *, path: str | Path) -> Path:
    """What each track did over a step as PNG or SVG; the height of a column is the share of it that was busy.

    Raises:
        ImportError: without matplotlib. ValueError: for a path that ends neither in .png nor in .svg.
    """
    path = Path(path)
    path.write_bytes(picture(timeline, other, suffix=path.suffix, memory=False))
    return path


def picture(
    timeline: Timeline, other: Timeline | None = None, *, suffix: str, memory: bool = True, tracks: bool = True
) -> bytes:
    """The bytes of a PNG or SVG file."""
    suffix = suffix.lower().removeprefix(".")
    if suffix not in ("png", "svg"):
        raise ValueError(f"a picture is a .png or an .svg, not {suffix!r}")
    timelines = [timeline] if other is None else [timeline, other]
    return render(board(timelines, memory=memory, tracks=tracks), suffix)


def render(made: Board, suffix: str) -> bytes:
    """A board as a file; the same bytes for the same timelines."""
    matplotlib = _matplotlib()
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "gemini", "svg.fonttype": "none"}):
        metadata = {"Date": None, "Creator": None} if suffix == "svg" else {"Software": None}
        made.figure.savefig(out, format=suffix, dpi=110, metadata=metadata)
    if suffix == "png":
        return out.getvalue()
    # A hundredth of a point is enough, and half the bytes.
    return re.sub(rb' d="[^"]+"', lambda path: re.sub(rb"(\.\d\d)\d+", rb"\1", path[0]), out.getvalue())


def board(timelines: list[Timeline], *, memory: bool = True, tracks: bool = True) -> Board:
    """Lay out and draw."""
    _matplotlib()
    from matplotlib.figure import Figure

    ends = [timeline.step_seconds or 1.0 for timeline in timelines]
    if max(ends) <= 4 * min(ends):  # the same scale, unless one would be a splinter
        ends = [max(ends)] * len(ends)
    tiers = [tier for tier in Tier if series.holders(timelines, tier)] if memory else []
    shown = [track for track in Track if tracks and any(s.track is track for t in timelines for s in t.spans)]
    rows = len(tiers) * (_PANEL + _STRIP + _GAP) + len(shown) * _ROW + (0.1 if shown and tiers else 0)
    names = _legends(timelines, tiers, shown)
    width = len(timelines) * (_LEFT + _WIDTH + _RIGHT)
    legend = sum(0.3 + 0.2 * -(-len(entries) // _per_row(width)) for _, entries, _ in names)
    height = _HEAD + rows + _AXIS + legend + 0.1
    figure = Figure(figsize=(width, height), facecolor="white")
    made = Board(figure, width, height)
    for column, timeline in enumerate(timelines):
        box = Box(_LEFT + column * (_LEFT + _WIDTH + _RIGHT), _HEAD, _WIDTH, rows)
        _column(made, timelines, timeline, box, ends[column], tiers, shown)
    top = _HEAD + rows + _AXIS
    for title, entries, colours in names:
        lines = -(-len(entries) // _per_row(width))
        _legend(made, top, title, entries, colours, lines)
        top += 0.3 + 0.2 * lines
    return made


def colour_of(holder: str) -> str:
    """A holder's colour; those that nobody foresaw get spare ones."""
    return series.HOLDERS.get(holder) or _SPARE[sum(map(ord, holder)) % len(_SPARE)]


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as e:
        raise ImportError(
            "pictures need matplotlib, an optional part of Gemini: pip install '.[pictures]'. A trace for "
            "ui.perfetto.dev (.json) needs nothing"
        ) from e
    return matplotlib


def _axes(made: Board, left: float, top: float, width: float, height: float) -> Any:
    box = (left / made.width, 1 - (top + height) / made.height, width / made.width, height / made.height)
    axes = made.figure.add_axes(box)
    axes.patch.set_alpha(0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for spine in axes.spines.values():
        spine.set(color=FAINT, linewidth=0.7)
    axes.tick_params(colors=INK, labelsize=8.5, length=2.5, width=0.6, color=FAINT)
    return axes


def _column(
    made: Board,
    timelines: list[Timeline],
    timeline: Timeline,
    box: Box,
    end: float,
    tiers: list[Tier],
    tracks: list[Track],
) -> None:
    _heading(made, timeline, box)
    _phases(made, timeline, box, end)
    top, last = box.top, None
    for tier in tiers:
        panel = _axes(made, box.left, top + _GAP - 0.1, box.width, _PANEL)
        _memory(panel, timelines, timeline, tier, end)
        top += _GAP - 0.1 + _PANEL
        last = _axes(made, box.left, top, box.width, _STRIP)
        _strip(last, timeline, tier, end)
        top += _STRIP + 0.1
    top += 0.1 if tracks and tiers else 0
    for track in tracks:
        last = _axes(made, box.left, top, box.width, _ROW)
        _track(last, timeline, track, end, is_first=track is tracks[0])
        top += _ROW
    if last is not None:
        _time(last, end)


def _heading(made: Board, timeline: Timeline, box: Box) -> None:
    parts = [f"step {human_seconds(timeline.step_seconds)}"]
    if timeline.tokens and timeline.step_seconds:
        rate = timeline.tokens_per_second
        parts.append(f"{rate:,.4g} tokens/s" if rate < 1000 else f"{rate:,.0f} tokens/s")
    if timeline.flops and timeline.step_seconds:
        parts.append(f"{timeline.flops / timeline.step_seconds / 1e12:,.3g} TFLOP/s per rank")
    if timeline.spans:
        parts.append(f"busiest: {timeline.bound_by.value}")
    title = f"{timeline.source.capitalize()}: {timeline.title}"
    title = title if len(title) <= 82 else title[:80] + "…"
    x = box.left / made.width
    made.figure.text(x, 1 - 0.24 / made.height, title, fontsize=11.5, fontweight="bold", color=INK, va="baseline")
    made.figure.text(x, 1 - 0.44 / made.height, ", ".join(parts), fontsize=9.5, color=INK, va="baseline")


def _phases(made: Board, timeline: Timeline, box: Box, end: float) -> None:
    """Shading behind everything; a name where there is room for it."""
    axes = _axes(made, box.left, box.top, box.width, box.height)
    axes.set(xlim=(0, end), ylim=(0, 1), xticks=[], yticks=[], zorder=-1)
    for spine in axes.spines.values():
        spine.set_visible(False)
    shades = {"forward": 0.0, "backward": 0.09, "update": 0.2}
    found = series.phases(timeline)
    for phase in found if len(found) <= 200 else ():
        if shades[phase.name]:
            axes.axvspan(phase.start, phase.stop, color=FAINT, alpha=shades[phase.name], linewidth=0)
        inches = (phase.stop - phase.start) / end * box.width
        if inches > 0.085 * len(phase.name):
            middle = (phase.start + phase.stop) / 2
            axes.text(middle, 1, phase.name, ha="center", va="bottom", fontsize=9, color=INK, clip_on=False)


def _memory(axes: Any, timelines: list[Timeline], timeline: Timeline, tier: Tier, end: float) -> None:
    budget = timeline.budgets.get(tier, 0)
    peaks = [t.peaks.get(tier, 0) for t in timelines]
    most = max(*peaks, 1)
    budgets = [t.budgets.get(tier, 0) for t in timelines]
    top = max(most, *[b for b in budgets if b <= 2 * most], 1)
    unit, unit_name = series.byte_unit(top)
    shown = series.stack(timeline, tier)
    held = [sample.held.get(tier, {}) for sample in shown.samples]
    names = series.holders(timelines, tier)
    _pile(axes, shown.edges, [(colour_of(name), [sample.get(name, 0) / unit for sample in held]) for name in names])
    axes.set(xlim=(0, end), ylim=(0, top * 1.06 / unit), xticks=[])
    axes.locator_params(axis="y", nbins=4)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} {unit_name}" if value else "0")
    axes.grid(axis="y", color=FAINT, linewidth=0.4, alpha=0.4)
    axes.set_axisbelow(True)
    caption = f"{_TIER_NAMES[tier]}: peak {human_bytes(timeline.peaks.get(tier, 0))}"
    if budget:
        share = timeline.peaks[tier] / budget
        caption += f" of {human_bytes(budget)} ({f'{share:.1%}' if 0.99 < share < 1 else f'{share:.0%}'})"
        if budget <= top:
            axes.axhline(budget / unit, color=INK, linewidth=1.1, linestyle=(0, (4, 2)))
            _beside(axes, "budget", budget / unit, coords="data", points=3)
    axes.text(0, 1.03, caption, transform=axes.transAxes, fontsize=9.5, fontweight="bold", color=INK, va="bottom")


def _strip(axes: Any, timeline: Timeline, tier: Tier, end: float) -> None:
    """What comes into a tier (up), what leaves it (down), and when gathered weights were evicted (ticks)."""
    into, out = series.across(timeline, tier, end)
    _shares(axes, into)
    _shares(axes, out, downwards=True)
    let_go = series.evictions(timeline, tier)
    bottom = -1.1
    labels = [(0.55, "in"), (-0.55, "out")]
    if let_go:
        columns = {int(seconds / end * series.COLUMNS) for seconds in let_go}
        axes.vlines([(c + 0.5) * end / series.COLUMNS for c in sorted(columns)], -2.1, -1.5, color=INK, linewidth=0.5)
        bottom = -2.2
        labels.append((-1.8, "evicted"))
    axes.axhline(0, color=FAINT, linewidth=0.5)
    axes.set(xlim=(0, end), ylim=(bottom, 1.45), xticks=[])
    axes.set_yticks([at for at, _ in labels], [name for _, name in labels])
    axes.tick_params(axis="y", labelsize=7.5, length=0)


def _track(axes: Any, timeline: Timeline, track: Track, end: float, *, is_first: bool) -> None:
    _shares(axes, series.in_track(timeline, track, end))
    axes.set(xlim=(0, end), ylim=(0, 1.15), xticks=[])
    axes.set_yticks([0.5], [track.value])
    axes.tick_params(axis="y", length=0, labelsize=8.5)
    share = timeline.busy.get(track, 0.0) / timeline.step_seconds if timeline.step_seconds else 0.0
    if is_first:
        _beside(axes, "busy", 1, size=7.5, align="baseline")
    _beside(axes, f"{share:.0%}", 0.5)


def _beside(
    axes: Any,
    words: str,
    y: float,
    *,
    coords: str = "axes fraction",
    points: float = 4,
    size: float = 8.5,
    align: str = "center",
) -> None:
    """Words at the right end of a panel, so many points away from it."""
    axes.annotate(
        words,
        (1, y),
        xycoords=("axes fraction", coords),
        xytext=(points, 0 if align == "center" else 1),
        textcoords="offset points",
        fontsize=size,
        color=INK,
        va=align,
    )


def _shares(axes: Any, busy: series.Busy, *, downwards: bool = False) -> None:
    """Shares of time by activity, upwards or downwards."""
    up = -1.0 if downwards else 1.0
    layers = [(series.ACTIVITIES[name], [up * share for share in shares]) for name, shares in busy.shares.items()]
    _pile(axes, busy.edges, layers)


def _pile(axes: Any, edges: list[float], layers: list[tuple[str, list[float]]]) -> None:
    """Step functions on top of each other, each in its colour."""
    below = [0.0] * (len(edges) - 1)
    for colour, values in layers:
        above = [round(b + v, 4) for b, v in zip(below, values, strict=True)]
        if above != below:
            low_x, low = series.steps(edges, below)
            high_x, high = series.steps(edges, above)
            axes.fill([*low_x, *reversed(high_x)], [*low, *reversed(high)], color=colour, linewidth=0)
        below = above


def _time(axes: Any, end: float) -> None:
    from matplotlib.ticker import MaxNLocator

    factor, unit = series.time_unit(end)
    ticks = [t * factor for t in MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]).tick_values(0, end / factor)]
    ticks = [t for t in ticks if 0 <= t <= end * 1.0001]
    axes.set_xticks(ticks, [f"{t / factor:g}" for t in ticks])
    axes.set_xlabel(f"{unit} since the step began", fontsize=9, color=INK)


_Legend = tuple[str, list[str], dict[str, str]]


def _legends(timelines: list[Timeline], tiers: list[Tier], tracks: list[Track]) -> list[_Legend]:
    found: list[_Legend] = []
    names = series.holders(timelines)
    if tiers:
        found.append(("held by", names, {name: colour_of(name) for name in names}))
    done = {series.activity_of(span) for t in timelines for span in t.spans if tracks or span.track not in _STILL}
    if tracks:
        done.add("waiting")
    if done:
        found.append(("what tracks do", [name for name in series.ACTIVITIES if name in done], series.ACTIVITIES))
    return found


_STILL = (Track.COMPUTE, Track.UPDATE, Track.GATHER, Track.REDUCE)
"""Tracks on which nothing crosses a boundary between tiers."""


def _per_row(width: float) -> int:
    return max(3, int((width - _LEFT) / _ENTRY))


def _legend(made: Board, top: float, title: str, entries: list[str], colours: dict[str, str], lines: int) -> None:
    """Entries row by row, in a band of their own below the panels."""
    axes = _axes(made, _LEFT, top, made.width - _LEFT - _RIGHT, 0.2 + 0.2 * lines)
    axes.axis("off")
    per_row = _per_row(made.width)
    axes.set(xlim=(0, made.width - _LEFT - _RIGHT), ylim=(0.2 + 0.2 * lines, 0))
    axes.text(0, 0.1, title, fontsize=8.5, fontweight="bold", color=INK, va="center")
    from matplotlib.patches import Rectangle

    for number, name in enumerate(entries):
        x, y = number % per_row * _ENTRY, 0.3 + 0.2 * (number // per_row)
        axes.add_patch(Rectangle((x, y - 0.06), 0.14, 0.12, color=colours[name], linewidth=0))
        axes.text(x + 0.2, y, name, fontsize=8.5, color=INK, va="center")
