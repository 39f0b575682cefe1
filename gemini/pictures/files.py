"""``draw``: a timeline to a file, whose suffix says as what."""

from __future__ import annotations

from pathlib import Path

from gemini.pictures.board import picture
from gemini.pictures.page import page
from gemini.pictures.perfetto import perfetto
from gemini.planning.timeline import Timeline


def draw(path: str | Path, timeline: Timeline, other: Timeline | None = None) -> Path:
    """Draw a step, or two beside each other (predicted and measured, before and after).

    ``.png`` and ``.svg``: memory per tier and tracks; ``.html``: a page with numbers, the same picture, and what is
    held wherever the pointer stands, which needs no network; ``.json`` (``.perfetto.json``): a trace for
    ui.perfetto.dev.

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
