"""What the parts of the GPU suite share: their arguments, and results that are kept while they are being measured.

A part is a script of its own. It writes ``NAME.json`` (raw numbers, and the lines of its report) into the folder
``--out`` after every measurement, so that one that is stopped by its time limit has lost only what it was doing then.
"""

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks._report import told_command
from benchmarks.gpu._card import Card
from gemini.errors import parse_bytes


def make_parser(doc: str | None, *, seconds: float) -> argparse.ArgumentParser:
    """``seconds``: how long the part is meant to take; nothing new is begun that does not fit in."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cuda", "standin"), default="cuda", help="standin: to try the script without a GPU")
    add("--tiny", action="store_true", help="small and short, to see that it works; its numbers mean nothing")
    add("--out", type=Path, default=None, help="folder of the raw numbers (default: none are written)")
    add("--spill", type=Path, default=Path("/tmp"), help="folder of the spill file (default: %(default)s)")
    add("--host", type=parse_bytes, default=None, help="host memory for budgets (default: 86 %% of all there is)")
    add("--seconds", type=float, default=seconds, help="begin nothing that would take longer (default: %(default)s)")
    return parser


class Results:
    """Raw numbers by name, and the report's lines; on disk after every change."""

    def __init__(self, name: str, args: argparse.Namespace, card: Card):
        self.name, self.args, self.card = name, args, card
        self.began = time.monotonic()
        self.raw: dict[str, Any] = {}
        self.lines: list[str] = []
        self._so_far: list[str] = []
        self._save("running")

    def add(self, name: str, value: Any) -> None:
        self.raw[name] = value
        self._save("running")

    def append(self, name: str, value: Any) -> None:
        self.raw.setdefault(name, []).append(value)
        self._save("running")

    def say(self, *lines: str) -> None:
        print("\n".join(lines), flush=True)
        self.lines, self._so_far = [*self.lines, *lines], []
        self._save("running")

    def say_so_far(self, *lines: str) -> None:
        """What is to be said of everything measured until now, in case the part is stopped; until more is said."""
        self._so_far = list(lines)
        self._save("running")

    def keep_so_far(self) -> None:
        """Nothing more comes to what was said so far."""
        self.lines += self._so_far
        self._so_far = []

    def left(self) -> float:
        """Seconds until the part should be over."""
        return self.args.seconds - (time.monotonic() - self.began)

    def finish(self, state: str = "done") -> None:
        self._save(state)

    def _save(self, state: str) -> None:
        if self.args.out is None:
            return
        self.args.out.mkdir(parents=True, exist_ok=True)
        body = {
            "part": self.name, "state": state, "seconds": time.monotonic() - self.began, "tiny": self.args.tiny,
            "command": told_command(sys.argv), "machine": machine(self.card), "raw": self.raw,
            "lines": [*self.lines, *self._so_far],
        }  # fmt: skip
        file = self.args.out / f"{self.name}.json"
        file.with_suffix(".new").write_text(json.dumps(body, indent=1, default=str))
        file.with_suffix(".new").replace(file)


def run(
    name: str, parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace, Card, Results], None],
    argv: Sequence[str] | None,
) -> Results:  # fmt: skip
    """Parse, measure, and keep what was found also where it ends in an error, which is part of the result."""
    args = parser.parse_args(argv)
    card = Card(args.device)
    results = Results(name, args, card)
    try:
        measure(args, card, results)
    except BaseException as e:
        results.add("error", traceback.format_exc())
        results.keep_so_far()
        results.say("", f"Ended early: {type(e).__name__}: {str(e)[:500]}")
        results.finish("failed")
        raise
    results.finish()
    return results


def machine(card: Card) -> dict[str, Any]:
    """Who measured."""
    import gemini
    from benchmarks._report import processor

    found: dict[str, Any] = {
        "card": card.name, "card_bytes": card.total_bytes, "processor": processor(),
        "host_bytes": psutil.virtual_memory().total, "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "gemini": gemini.__version__, "system": f"{platform.system()} {platform.release()}",
    }  # fmt: skip
    if card.real:
        major, minor = torch.cuda.get_device_capability()
        found["capability"] = f"{major}.{minor}"
    return found


def verdict(what: str, found: float, goal: float, *, unit: str = "") -> str:
    """A line that says whether a goal was met."""
    met = "met" if found >= goal else "MISSED"
    return f"- {what}: {found:.3f}{unit}; goal at least {goal:g}{unit}: {met}"


def verdict_between(what: str, found: float, least: float, most: float) -> str:
    """A line that says whether a figure lies where it should."""
    met = "met" if least <= found <= most else "MISSED"
    return f"- {what}: {found:.3f}; goal {least:g} to {most:g}: {met}"
