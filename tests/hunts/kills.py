"""What the hunts that kill training runs share: waiting in bounded time, options, comparing files, the report."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 240
"""How long anything may take before it counts as hanging."""
Files = dict[str, bytes]


def wait_for(
    what: str, there: Callable[[], bool], process: subprocess.Popen[Any], last_words: Callable[[], str],
    pause_s: float = 0.0005,
) -> None:  # fmt: skip
    """Look again and again, in bounded time."""
    deadline = time.perf_counter() + PATIENCE_S
    while not there():
        if time.perf_counter() > deadline or process.poll() is not None:
            raise RuntimeError(f"{what}: it did not come. The last words:\n{last_words()}")
        time.sleep(pause_s)


def differing(there: Files, wanted: Files) -> tuple[str, ...]:
    """The names of files that are not the same bytes."""
    return tuple(sorted(name for name in there.keys() | wanted.keys() if there.get(name) != wanted.get(name)))


def make_parser(description: str | None, *, steps: int, save_every: int) -> argparse.ArgumentParser:
    """The options that both have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--save-every", type=int, default=save_every)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0, help="draws the steps and moments of the kills")
    parser.add_argument("--out", type=Path, help="write the report here")
    return parser


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def hunt(
    about: list[str], columns: list[str], out: Path | None, kills: Iterable[Any],
    undisturbed: Callable[[Path], tuple[Files, list[str]]],
    disturbed: Callable[[Path, Any, Files], tuple[Any, list[str]]],
) -> int:  # fmt: skip
    """Run once undisturbed and then with each of the kills; print and write the report; the exit code.

    Args:
        about: the title, what is run, and how it is compared.
        undisturbed: what every run has to come to, and the row of the run that nobody disturbed.
        disturbed: the outcome (``differing``, ``was_saving``) of a run, and its row but for the last column.
    """
    machine = f"{platform.system()} {platform.release()}, {processor()}, {len(os.sched_getaffinity(0))} CPUs"
    lines = [
        f"# {about[0]}, {time.strftime('%Y-%m-%d')}",
        "",
        about[1],
        f"{machine}, Python {platform.python_version()}, torch {torch.__version__}, one thread per process.",
        f"Command: `python {' '.join(sys.argv)}`",
        "",
        about[2],
        "",
    ]
    rows = [f"| {' | '.join([*columns, 'bits'])} |", f"|{'---|' * (len(columns) + 1)}"]
    print(*lines, sep="\n")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="gemini-kill-") as scratch:
        wanted, row = undisturbed(Path(scratch, "undisturbed"))
        rows.append(f"| {' | '.join([*row, f'the measure, {len(wanted)} names'])} |")
        print(*rows, sep="\n", flush=True)
        for number, kill in enumerate(kills):
            outcome, row = disturbed(Path(scratch, str(number)), kill, wanted)
            outcomes.append(outcome)
            bits = "DIFFERENT: " + ", ".join(outcome.differing) if outcome.differing else "the same"
            rows.append(f"| {' | '.join([*row, bits])} |")
            print(rows[-1], flush=True)
    num_same = sum(not outcome.differing for outcome in outcomes)
    verdict = f"**{num_same} of {len(outcomes)}** came to the same bits; {sum(o.was_saving for o in outcomes)} kills "
    verdict += "fell into a save."
    print("", verdict, sep="\n")
    if out:
        out.write_text("\n".join([*lines, *rows, "", verdict]) + "\n")
    return 0 if num_same == len(outcomes) else 1
