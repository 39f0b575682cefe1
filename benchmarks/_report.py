"""What every report has in common: its head (date, machine, versions, command), tables, and where it goes."""

import argparse
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

MB = 10**6
PATHS = (
    "out", "report", "spill", "directory", "folder", "where", "nvme-path", "deepspeed", "deepspeed-python",
    "extensions",
)  # fmt: skip
"""Options whose values say something of one machine only; a file that a report is written to is left out."""


def mb(num_bytes: float, digits: int = 1) -> str:
    return f"{num_bytes / MB:,.{digits}f}"


def processor() -> str:
    """``epyc-2-cores``"""
    model = platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":")[1] for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    names = model.lower().replace("(r)", "").split()
    words = [word for word in names if word.isalpha() and word not in ("amd", "intel", "processor")]
    return f"{words[0] if words else platform.machine()}-{len(os.sched_getaffinity(0))}-cores"


def told_command(argv: Sequence[str]) -> str:
    """``python benchmarks/gpu/size.py --spill DIR``, of ``sys.argv``; also where an argument holds further ones."""
    folder, _, script = argv[0].replace("\\", "/").rpartition("/")
    parent = re.search(r"(?:^|/)((?:benchmarks|tests)(?:/\w+)*)$", folder)
    words = ["python", f"{parent[1] if parent else 'benchmarks'}/{script}", *argv[1:]]
    options = "|".join(PATHS)
    for number, word in enumerate(words):
        is_path = words[number - 1].removeprefix("--") in PATHS or (number > 1 and word.startswith("/"))
        if is_path and not word.startswith("{"):
            words[number] = "OUT" if word.endswith(".md") else "DIR"
        else:
            words[number] = re.sub(rf"(--(?:{options})[ =])(?!\{{)\S+", r"\1DIR", word)
    told = shlex.join(words)
    return re.sub(r" --(?:out|report)[ =]OUT\b", "", told)


def versions(*packages: str) -> str:
    """``torch 2.13.0, transformers 5.23.0``: of what is installed."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            pass
    return ", ".join(found)


def head(title: str, lines: Sequence[str], threads: int | None = None, *packages: str) -> list[str]:
    """Date, machine, versions and command. ``threads``: of torch and of our kernels from here on, if it is said."""
    import gemini
    from gemini import kernels

    if threads is not None:
        set_threads(threads)
    return [
        f"# {title}, {time.strftime('%Y-%m-%d')}",
        "",
        *lines,
        f"{platform.system()} {platform.release()}, {processor()}, Python {platform.python_version()}, "
        f"{versions('torch', 'transformers', *packages)}, gemini {gemini.__version__}; {kernels.capabilities()} per "
        f"process; load at the end {os.getloadavg()[0]:.1f}.",
        f"Command: `{told_command(sys.argv)}`",
        "",
    ]


def set_threads(number: int) -> None:
    """Of torch and of our kernels."""
    import torch

    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests import kernel_settings

    torch.set_num_threads(number)
    kernel_settings.set_num_threads(number)


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Markdown: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (names, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    lines = [
        "| " + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        + " |" for row in cells
    ]  # fmt: skip
    rule = "|" + "|".join("-" * (w + 2) if not i else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return [lines[0], rule, *lines[1:], ""]


def add_out(parser: argparse.ArgumentParser) -> None:
    """``--out``, and ``--report`` as it was called in some scripts."""
    parser.add_argument("--out", "--report", dest="out", type=Path, default=None, help="write the report here")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Of scripts whose report is kept unless ``--quick`` is given."""
    parser.add_argument("--quick", action="store_true", help="small and short, to see that it works; writes no report")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one order (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=None, help="the report (default: under benchmarks/reports, dated)")


def publish(report: Sequence[str], out: Path | None, *, theme: str | None = None) -> None:
    """Print the report and write it to ``out``, or with a ``theme`` under the dated name of this machine."""
    text = "\n".join(report).rstrip("\n") + "\n"
    print(text, end="", flush=True)
    if out is None and theme is not None:
        folder = Path(__file__).resolve().parent / "reports"
        out = folder / f"{theme}_{processor()}_{time.strftime('%Y-%m-%d')}.md"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
