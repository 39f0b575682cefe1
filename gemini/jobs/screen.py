"""What commands print and write: lines and tables, a value as JSON, pictures of a step, and what became of budgets."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.status import Status

from gemini.errors import human_bytes
from gemini.jobs import refusing
from gemini.planning.timeline import Timeline

WIDEST = 100  # columns that are used at most
LABEL = 17  # columns of what a line is about, where it begins with that


def say(console: Console, lines: Iterable[str]) -> None:
    """Print lines; what is too long for one is folded and indented, under its text where it has a label."""
    width = min(console.width, WIDEST)
    for line in lines:
        has_label = line[LABEL - 1 : LABEL] == " " and (line[0] == " " or "  " in line[:LABEL])
        indent = " " * (LABEL if has_label else 2)
        how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": indent}
        console.print(*(textwrap.wrap(line, width, **how) if len(line) > width else [line]), sep="\n")


def fact(label: str, text: str) -> str:
    """A line that begins with what it is about."""
    return f"{label:<{LABEL}}{text}"


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], *, left: int = 1) -> list[str]:
    """The lines of a table, whose first ``left`` columns begin where they do, and whose others end there."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [f"<{width}" if column < left else f">{width}" for column, width in enumerate(widths)]
    return ["  ".join(f"{cell:{side}}" for cell, side in zip(row, sides, strict=True)).rstrip() for row in cells]


def shown_bytes(num_bytes: int) -> str:
    """Bytes in a table, where nothing is a point."""
    return human_bytes(num_bytes) if num_bytes else "."


def human_rate(rate: float | None) -> str:
    """So many a second: "25,600", "12.67"; a point where it is not known."""
    return "." if rate is None else f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


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
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def answer(
    settings: Any,
    console: Console,
    lines: Iterable[str],
    *,
    json: str,
    value: str | None = None,
    timeline: Timeline | None = None,
    hint: str = "",
) -> None:
    """End a command of planning: print its answer, write ``--out`` and each ``--picture``, and say what was written."""
    if settings.json:
        print(json)
    else:
        say(console, lines)
    written: list[str] = []
    if settings.out is not None and value is not None:
        with refusing(f"--out {settings.out} cannot be written"):
            settings.out.write_text(value, encoding="utf-8")
        written.append(f"{settings.out}{hint}")
    if timeline is not None:
        for path in settings.picture:
            with refusing(f"--picture {path}"):
                from gemini.pictures import draw

                draw(path, timeline)
            written.append(str(path))
    for words in () if settings.json else written:  # never folded: a path is there to be copied
        console.print(f"written to {words}")


_DRIVE = re.compile(r"nvme_path= and nvme=(\d+) (\w+)")


def in_options(remedy: str, drive: str) -> str:
    """What would make a model fit, in the words of a command whose options ``drive`` bring a drive in."""
    return _DRIVE.sub(rf"{drive} \1\2", remedy)


def budget_lines(*ranks: dict[str, tuple[int, int]]) -> tuple[list[str], bool]:
    """For each tier whether its peak stayed within its budget (both in bytes) on all ``ranks``; and whether all did."""
    lines, all_within = [], True
    for tier in ranks[0]:
        # Where all kept to it, the one that came closest; else the one that went furthest over.
        rank, (peak, budget) = max(enumerate(r[tier] for r in ranks), key=lambda item: item[1][0] - item[1][1])
        all_within = all_within and peak <= budget
        who = f" on {len(ranks)} ranks, rank {rank}" if len(ranks) > 1 else ","
        verdict = "stayed within" if peak <= budget else "WENT OVER"
        lines.append(f"{tier}: {verdict} its budget{who} peak {human_bytes(peak)} of {human_bytes(budget)}")
    return lines, all_within
