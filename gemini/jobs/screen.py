"""What commands print and write: lines and tables, a value as JSON, pictures of a step, and what became of budgets."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, RenderableType
from rich.status import Status
from rich.table import Table
from rich.text import Text

from gemini.errors import human_bytes
from gemini.jobs import refusing
from gemini.replacing import atomic_write

WIDEST = 100  # columns that are used at most


def say(console: Console, parts: Iterable[RenderableType]) -> None:
    """Print lines, facts and tables; what is too long for a line is folded where it stands, but for a ``Text``: it is
    there to be copied.
    """
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text), width=min(console.width, WIDEST))


def fact(label: str, text: str) -> Table:
    """A line that begins with what it is about."""
    found = Table.grid("", "")
    found.columns[0].width = 17
    found.add_row(label, text)
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, least: Sequence[int] = ()) -> Table:
    """Rows under a ``head``. The first ``left`` columns begin where they do, the others end there; ``least``: how wide
    columns are at least.
    """
    found = Table(box=None, pad_edge=False, header_style="")
    for number, title in enumerate(head):
        found.add_column(title, justify="left" if number < left else "right", overflow="fold")
    for column, width in zip(found.columns, least, strict=False):
        column.min_width = width
    for row in rows:
        found.add_row(*row)
    return found


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


def write(path: Path, text: str, console: Console, hint: str = "") -> None:
    """Write what ``--out`` asks for, whole or not at all, and say so with a ``hint`` what it is for."""
    with refusing(f"--out {path} cannot be written"), atomic_write(path) as draft:
        draft.write_text(text, encoding="utf-8")
    console.print(f"written to {path}{hint}")  # never folded: a path is there to be copied


_DRIVE = re.compile(r"nvme_path= and nvme=(\d+) (\w+)")


def in_options(remedy: str, drive: str) -> str:
    """A remedy where a model does not fit, in the words of a command whose options ``drive`` bring a drive in."""
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
