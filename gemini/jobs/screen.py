"""What commands print and write: lines and tables, a value as JSON, pictures of a step, and what became of budgets."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from gemini.errors import human_bytes
from gemini.jobs.errors import JobError, refusing
from gemini.planning.timeline import Timeline

WIDEST = 100
"""Columns that are used at most."""
LABEL = 17
"""Columns of what a line is about, where it begins with that."""

_SUFFIXES = (".png", ".svg", ".html", ".json")


# ---- lines -----------------------------------------------------------------------------------------------------------


def say(console: Console, lines: Sequence[str]) -> None:
    """Print lines; what is too long for one is folded and indented."""
    for line in lines:
        console.print(*_folded(line, min(console.width, WIDEST)), sep="\n")


def _folded(line: str, width: int) -> list[str]:
    """A line with a label is folded under its text."""
    if len(line) <= width:
        return [line]
    indent = LABEL if line[LABEL - 1 : LABEL] == " " and (line[0] == " " or "  " in line[:LABEL]) else 2
    return textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def fact(label: str, text: str) -> str:
    """A line that begins with what it is about."""
    return f"{label:<{LABEL}}{text}"


def row(widths: Sequence[int], *cells: Any) -> str:
    """A line of a table: cells end where their columns do, or where a width is negative begin there."""
    sides = zip(widths, cells, strict=True)
    return "".join(f"{cell:>{width}}" if width >= 0 else f"{cell:<{-width}}" for width, cell in sides).rstrip()


def shown_bytes(num_bytes: int) -> str:
    """Bytes in a table, where nothing is a point."""
    return human_bytes(num_bytes) if num_bytes else "."


def human_rate(rate: float) -> str:
    """So many a second: "25,600", "12.67"."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def human_count(number: int) -> str:
    """Params as people say them: "69.0 G", "124.4 M"."""
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number}"


def progress(words: str) -> Status:
    """Around work of seconds: on a terminal a line on stderr says what is being done; ``update`` says what now is."""
    return Console(stderr=True).status(f"{words} ...")


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


# ---- an answer, and its files ----------------------------------------------------------------------------------------


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


def write_file(path: Path, text: str, option: str = "--out") -> None:
    """Raises: JobError: if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise JobError(f"{option} {path} cannot be written: {e.strerror or e}. Choose a file you may write.") from e


def answer(
    settings: Any,
    console: Console,
    *,
    json: str,
    lines: Sequence[str],
    value: str | None = None,
    timeline: Timeline | None = None,
    hint: str = "",
) -> None:
    """End a command of planning: print its answer as lines or as ``json``, write ``value`` to ``--out`` and a picture
    of ``timeline`` to each ``--picture``, and say what was written, with a ``hint`` at what to do with it.

    Raises:
        JobError: for a file that cannot be written, or without the package that draws.
    """
    if settings.json:
        print(json)
    else:
        say(console, lines)
    written: list[str] = []
    if settings.out is not None and value is not None:
        write_file(settings.out, value)
        written.append(f"{settings.out}{hint}")
    if timeline is not None:
        for path in settings.picture:
            with refusing(f"--picture {path}"):
                from gemini.pictures import draw

                draw(path, timeline)
            written.append(str(path))
    if written and not settings.json:
        say(console, [""])
        for words in written:  # never folded: a path is there to be copied
            console.print(f"written to {words}")


# ---- budgets ---------------------------------------------------------------------------------------------------------

_DRIVE = re.compile(r"nvme_path= and nvme=(\d+) (\w+)")


def in_options(remedy: str, drive: str) -> str:
    """What would make a model fit, in the words of a command whose options ``drive`` bring a drive in."""
    return _DRIVE.sub(rf"{drive} \1\2", remedy)


def budget_lines(*ranks: dict[str, tuple[int, int]]) -> tuple[list[str], bool]:
    """For each tier whether its peak stayed within its budget on all ranks, and whether all did.

    Args:
        *ranks: of each, by tier, the peak and the budget in bytes.
    """
    lines, all_within = [], True
    for tier in ranks[0]:
        # Where all kept to it, the one that came closest; else the one that went furthest over.
        rank, (peak, budget) = max(enumerate(r[tier] for r in ranks), key=lambda item: item[1][0] - item[1][1])
        within = peak <= budget
        all_within = all_within and within
        who = f" on {len(ranks)} ranks, rank {rank}" if len(ranks) > 1 else ","
        verdict = "stayed within" if within else "WENT OVER"
        lines.append(f"{tier}: {verdict} its budget{who} peak {human_bytes(peak)} of {human_bytes(budget)}")
    return lines, all_within
