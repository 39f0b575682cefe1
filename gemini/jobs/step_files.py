"""What the commands of planning print and write: lines, a value as JSON, pictures of a step."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from gemini.jobs.errors import JobError, as_job_error
from gemini.planning.timeline import Timeline

_SUFFIXES = (".png", ".svg", ".html", ".json")


def check_files(out: Path | None, pictures: tuple[Path, ...] = ()) -> None:
    """Before anything is computed for them.

    Raises:
        JobError: for a folder that is not there, or a kind of file that there is no picture for.
    """
    check_file("--out", out)
    for path in pictures:
        check_file("--picture", path)
        if path.suffix.lower() not in _SUFFIXES:
            raise JobError(f"--picture {path}: a picture is one of {', '.join(_SUFFIXES)}, by the suffix of its name.")


def check_file(option: str, path: Path | None) -> None:
    """Raises: JobError: for a folder, or a folder that is not there."""
    if path is not None and not path.parent.is_dir():
        raise JobError(f"{option} {path} cannot be written: there is no folder {path.parent}.")
    if path is not None and path.is_dir():
        raise JobError(f"{option} {path} is a folder: give the name of a file.")


def write_all(settings: Any, value: str, timeline: Timeline | None, console: Console) -> None:
    """Write ``value`` to ``--out``, a picture of ``timeline`` to each ``--picture``, and say what was written where,
    unless what is printed is ``--json``.

    Raises:
        JobError: for a file that cannot be written, or without the package that draws.
    """
    written: list[Path] = []
    if settings.out is not None:
        write_file(settings.out, value)
        written.append(settings.out)
    if settings.picture and timeline is not None:
        from gemini.pictures import draw

        for path in settings.picture:
            try:
                with as_job_error(asked=f"--picture {path}"):
                    draw(path, timeline)
            except ImportError as e:
                raise JobError(f"--picture {path}: {e}") from e
            written.append(path)
    if written and not settings.json:
        say(console, [""])
        for path in written:  # never folded: a path is there to be copied
            console.print(f"written to {path}")


_STYLES = {
    "FITS, BUT": "bold yellow",
    "FITS": "bold green",
    "DOES NOT FIT": "bold red",
    "who lives where": "bold",
    "phase": "bold",
    "most bytes": "bold",
}
"""How a line is shown on a terminal, by its beginning."""


WIDEST = 100
"""Columns that are used at most."""

LABEL = 17
"""Columns of what a line is about, where it begins with that."""


def say(console: Console, lines: list[str]) -> None:
    """Print lines; what is too long for one is folded and indented. Colours are a terminal's alone."""
    width = min(console.width, WIDEST)
    for line in (part for whole in lines for part in _folded(whole, width)):
        style = next((style for head, style in _STYLES.items() if line.startswith(head)), None)
        console.print(line, style=style)


def _folded(line: str, width: int) -> list[str]:
    """A line with a label is folded under its text."""
    if len(line) <= width:
        return [line]
    indent = LABEL if line[LABEL - 1 : LABEL] == " " and (line[0] == " " or "  " in line[:LABEL]) else 2
    return textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Around work of seconds: on a terminal a line on stderr says what is being done, as it was told."""
    with Console(stderr=True).status("") as status:
        yield lambda words: status.update(f"{words} ...")


def write_file(path: Path, text: str, option: str = "--out") -> None:
    """Raises: JobError: if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise JobError(f"{option} {path} cannot be written: {e.strerror or e}. Choose a file you may write.") from e


@contextmanager
def stdout_closed_to_others() -> Iterator[None]:
    """The solver inside scipy writes some lines straight to the process's standard output, whatever it is told."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is none
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
