"""A step as a picture, PNG or SVG as the suffix says. Two timelines stand beside each other with the same scales.
Layout is arithmetic in inches, so that nothing overlaps at any size. matplotlib is optional, imported when it is used.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from gemini.errors import human_bytes
from gemini.pictures import series
from gemini.planning.timeline import Timeline, Track
from gemini.tiers import Tier

INK, FAINT = "#101114", "#8a8d94"
"""Text, and thin lines."""

_SPARE = ("#332288", "#117733", "#DDCC77", "#AA4499", "#44AA99", "#661100")

_WIDTH, _LEFT, _RIGHT = 7.6, 0.95, 0.6  # inches; the width is a column's
_HEAD, _PANEL, _STRIP, _ROW, _GAP, _AXIS = 0.75, 1.55, 0.66, 0.36, 0.42, 0.5
_ENTRY = 1.45


def draw(path: str | Path, timeline: Timeline, other: Timeline | None = None) -> Path:
    """Draw a step, or two beside each other (predicted and measured, before and after).

    Raises:
        ValueError: for a suffix other than ``.png`` and ``.svg``.
        ImportError: without matplotlib, saying how to get it.
    """
    path = Path(path)
    path.write_bytes(picture(timeline, other, suffix=path.suffix))
    return path


def picture(timeline: Timeline, other: Timeline | None = None, *, suffix: str) -> bytes:
    """The bytes of a PNG or SVG file; the same ones for the same timelines."""
    suffix = suffix.lower().removeprefix(".")
    if suffix not in ("png", "svg"):
        raise ValueError(f"a picture is a .png or an .svg, not {suffix!r}; docs/examples/perfetto.py writes a trace")
    figure, out = board([timeline] if other is None else [timeline, other]), io.BytesIO()
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "gemini", "svg.fonttype": "none"}):
        metadata = {"Date": None, "Creator": None} if suffix == "svg" else {"Software": None}
        figure.savefig(out, format=suffix, dpi=110, metadata=metadata)
    if suffix == "png":
        return out.getvalue()
    # A hundredth of a point is enough, and half the bytes.
    return re.sub(rb' d="[^"]+"', lambda path: re.sub(rb"(\.\d\d)\d+", rb"\1", path[0]), out.getvalue())


def board(timelines: list[Timeline]) -> Any:
    """Lay out and draw: a figure, of memory and of tracks."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("pictures need matplotlib, an optional part of Gemini: pip install '.[pictures]'") from e
    ends = [timeline.step_seconds or 1.0 for timeline in timelines]
    if max(ends) <= 4 * min(ends):  # the same scale, unless one would be a splinter
        ends = [max(ends)] * len(ends)
    tiers = [tier for tier in Tier if series.holders(timelines, tier)]
    shown = [track for track in Track if any(s.track is track for t in timelines for s in t.spans)]
    rows = len(tiers) * (_PANEL + _STRIP + _GAP) + len(shown) * _ROW + (0.1 if shown and tiers else 0)
    legends = _legends(timelines)
    width = len(timelines) * (_LEFT + _WIDTH + _RIGHT)
    per_row = max(3, int((width - _LEFT) / _ENTRY))
    legend_heights = [0.2 + 0.2 * -(-len(colours) // per_row) for colours in legends.values()]
    height = _HEAD + rows + _AXIS + sum(height + 0.1 for height in legend_heights) + 0.1
    figure = Figure(figsize=(width, height), facecolor="white")
    for column, (timeline, end) in enumerate(zip(timelines, ends, strict=True)):
        left = _LEFT + column * (_LEFT + _WIDTH + _RIGHT)
        _heading(figure, timeline, left)
        _phases(_axes(figure, left, _HEAD, _WIDTH, rows), timeline, end)
        _column(figure, left, timelines, timeline, end, tiers, shown)
    top = _HEAD + rows + _AXIS
    for (title, colours), tall in zip(legends.items(), legend_heights, strict=True):
        axes = _axes(figure, _LEFT, top, width - _LEFT - _RIGHT, tall)
        axes.set(xlim=(0, width - _LEFT - _RIGHT), ylim=(tall, 0))
        _legend(axes, title, colours, per_row)
        top += tall + 0.1
    return figure


def _column(
    figure: Any,
    left: float,
    timelines: list[Timeline],
    timeline: Timeline,
    end: float,
    tiers: list[Tier],
    shown: list[Track],
) -> None:
    """Draw one of the timelines from the head down: the memory of each tier, then the tracks; the last has the time."""
    top, last = _HEAD, None
    for tier in tiers:
        top += _GAP - 0.1
        _memory(_axes(figure, left, top, _WIDTH, _PANEL), timelines, timeline, tier, end=end)
        top += _PANEL
        last = _axes(figure, left, top, _WIDTH, _STRIP)
        _strip(last, timeline, tier, end)
        top += _STRIP + 0.1
    top += 0.1 if shown and tiers else 0
    for track in shown:
        last = _axes(figure, left, top, _WIDTH, _ROW)
        _track(last, timeline, track, end, is_first=track is shown[0])
        top += _ROW
    if last is not None:
        _time(last, end)


def colour_of(holder: str) -> str:
    """A holder's colour; those that nobody foresaw get spare ones."""
    return series.HOLDERS.get(holder) or _SPARE[sum(map(ord, holder)) % len(_SPARE)]


def _axes(figure: Any, left: float, top: float, width: float, height: float) -> Any:
    """A panel, in inches from the top left."""
    whole_width, whole_height = figure.get_size_inches()
    box = (left / whole_width, 1 - (top + height) / whole_height, width / whole_width, height / whole_height)
    axes = figure.add_axes(box)
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set(color=FAINT, linewidth=0.7)
    axes.tick_params(colors=INK, labelsize=8.5, length=2.5, width=0.6, color=FAINT)
    return axes


def _heading(figure: Any, timeline: Timeline, left: float) -> None:
    title = timeline.title if len(timeline.title) <= 82 else timeline.title[:80] + "…"
    words = f"{timeline.summary}; busiest: {timeline.bound_by.value}"
    width, height = figure.get_size_inches()
    figure.text(left / width, 1 - 0.24 / height, title, fontsize=11.5, fontweight="bold", color=INK)
    figure.text(left / width, 1 - 0.44 / height, words, fontsize=9.5, color=INK)


def _phases(axes: Any, timeline: Timeline, end: float) -> None:
    """Shading behind everything; a name where there is room for it."""
    axes.set(xlim=(0, end), ylim=(0, 1), xticks=[], yticks=[], zorder=-1)
    axes.spines[:].set_visible(False)
    shades = {"forward": 0.0, "backward": 0.09, "update": 0.2}
    found = series.phases(timeline)
    for phase in found if len(found) <= 200 else ():
        if shades[phase.name]:
            axes.axvspan(phase.start, phase.stop, color=FAINT, alpha=shades[phase.name], linewidth=0)
        if (phase.stop - phase.start) / end * _WIDTH > 0.085 * len(phase.name):
            middle = (phase.start + phase.stop) / 2
            axes.text(middle, 1, phase.name, ha="center", va="bottom", fontsize=9, color=INK, clip_on=False)


def _memory(axes: Any, timelines: list[Timeline], timeline: Timeline, tier: Tier, *, end: float) -> None:
    budget = timeline.budgets.get(tier, 0)
    most = max(*(t.peaks.get(tier, 0) for t in timelines), 1)
    budgets = [t.budgets.get(tier, 0) for t in timelines]
    top = max(most, *[b for b in budgets if b <= 2 * most], 1)
    unit, unit_name = series.unit("bytes", top)
    shown = series.stack(timeline, tier)
    held = [sample.held.get(tier, {}) for sample in shown.samples]
    names = series.holders(timelines, tier)
    _pile(axes, shown.edges, [(colour_of(name), [sample.get(name, 0) / unit for sample in held]) for name in names])
    axes.set(xlim=(0, end), ylim=(0, top * 1.06 / unit), xticks=[])
    axes.locator_params(axis="y", nbins=4)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} {unit_name}" if value else "0")
    axes.grid(axis="y", color=FAINT, linewidth=0.4, alpha=0.4)
    axes.set_axisbelow(True)
    caption = f"{tier.spec.title}: peak {human_bytes(timeline.peaks.get(tier, 0))}"
    if budget:
        share = timeline.peaks[tier] / budget
        caption += f" of {human_bytes(budget)} ({f'{share:.1%}' if 0.99 < share < 1 else f'{share:.0%}'})"
        if budget <= top:
            axes.axhline(budget / unit, color=INK, linewidth=1.1, linestyle=(0, (4, 2)))
            _beside(axes, "budget", budget / unit, coords="data")
    axes.text(0, 1.03, caption, transform=axes.transAxes, fontsize=9.5, fontweight="bold", color=INK, va="bottom")


def _strip(axes: Any, timeline: Timeline, tier: Tier, end: float) -> None:
    """Draw what comes into a tier (up), leaves it (down), and when gathered weights were evicted (ticks)."""
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
        _beside(axes, "busy", 1, align="baseline")
    _beside(axes, f"{share:.0%}", 0.5)


def _beside(axes: Any, words: str, y: float, *, coords: str = "axes fraction", align: str = "center") -> None:
    """Words at the right end of a panel, or above it."""
    axes.annotate(
        words,
        (1, y),
        xycoords=("axes fraction", coords),
        xytext=(3, 0 if align == "center" else 1),
        textcoords="offset points",
        fontsize=8 if align == "center" else 7.5,
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
            axes.stairs(above, edges, baseline=below, fill=True, color=colour, linewidth=0)
        below = above


def _time(axes: Any, end: float) -> None:
    from matplotlib.ticker import MaxNLocator

    factor, unit = series.unit("seconds", end)
    ticks = [t * factor for t in MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]).tick_values(0, end / factor)]
    ticks = [t for t in ticks if 0 <= t <= end * 1.0001]
    axes.set_xticks(ticks, [f"{t / factor:g}" for t in ticks])
    axes.set_xlabel(f"{unit} since the step began", fontsize=9, color=INK)


def _legends(timelines: list[Timeline]) -> dict[str, dict[str, str]]:
    """Colours by what they stand for, by title."""
    held = {name: colour_of(name) for name in series.holders(timelines)}
    shown = [span for each in timelines for span in each.spans]
    done = {*map(series.activity_of, shown), *(["waiting"] if shown else [])}
    activities = {name: colour for name, colour in series.ACTIVITIES.items() if name in done}
    return {title: colours for title, colours in (("held by", held), ("what tracks do", activities)) if colours}


def _legend(axes: Any, title: str, colours: dict[str, str], per_row: int) -> None:
    """Entries row by row, in a band of their own below the panels."""
    from matplotlib.patches import Rectangle

    axes.axis("off")
    axes.text(0, 0.1, title, fontsize=8.5, fontweight="bold", color=INK, va="center")
    for number, (name, colour) in enumerate(colours.items()):
        x, y = number % per_row * _ENTRY, 0.3 + 0.2 * (number // per_row)
        axes.add_patch(Rectangle((x, y - 0.06), 0.14, 0.12, color=colour, linewidth=0))
        axes.text(x + 0.2, y, name, fontsize=8.5, color=INK, va="center")
