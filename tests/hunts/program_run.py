"""Run one program on both sides and say how it ended.

``right``: the managed side saw the plain loop's bits, and left them behind. ``refused``: a clear error, and what was
seen before it is right. ``torch refuses``: the plain program fails, and so does the managed one. ``warned``: it works
with ``p.grad`` after a backward, which is None, and was told so. ``torch varies``: the plain program gives other bits
when it is run again (threads that draw from one generator, or share an attribute). The rest are findings:
``SILENT`` (other bits without an error), ``RAW`` (an error that nobody meant for users, or that does not say what to
do), ``HANG``, and ``GOES ON`` (plain torch refuses, the managed program does not).
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import re
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import gemini
from gemini.errors import GeminiError, IllegalTransition
from tests.hunts.program_bits import first_difference
from tests.hunts.program_sides import PLACEMENTS, ManagedSide, PlainSide, Side, round_weights

RIGHT, REFUSED, BOTH, WARNED, VARIES = "right", "refused", "torch refuses", "warned", "torch varies"
SILENT, RAW, HANG, GOES_ON = "SILENT", "RAW", "HANG", "GOES ON"
OUTCOMES = (RIGHT, REFUSED, BOTH, WARNED, VARIES, SILENT, RAW, HANG, GOES_ON)
FAILURES = (SILENT, RAW, HANG)


@dataclass
class Result:
    """How one run of one program ended."""

    seed: int
    placement: str
    precision: str
    outcome: str
    detail: str = ""
    """What differs, or the message of the error."""
    kind: str = ""
    """The same without names and numbers, to count by."""
    trace: str = field(default="", repr=False)

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value != ""}


def load(text: str, name: str) -> types.ModuleType:
    """A module from source text; tracebacks show its lines."""
    module = types.ModuleType(name)
    filename = f"<{name}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    sys.modules[name] = module  # dataclasses look there
    exec(compile(text, filename, "exec"), module.__dict__)
    return module


@dataclass
class Ran:
    """What a side saw, and how it ended."""

    seen: list[tuple[str, Any]]
    error: BaseException | None = None
    trace: str = ""
    frames: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    text: str = ""


@contextlib.contextmanager
def _afresh() -> Iterator[list[warnings.WarningMessage]]:
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def run_side(text: str, name: str, make_side: Any, precision: str) -> Ran:
    """One side from the beginning. Nothing of it is left, but what it saw."""
    side: Side | None = None
    ran = Ran([], text=text)
    with _afresh() as caught:
        try:
            module = load(text, name)
            model = round_weights(module.make(), precision)
            ran.names = tuple({n for n, _ in model.named_parameters()} | {n for n, _ in model.named_modules() if n})
            torch.manual_seed(2)
            side = make_side(model)
            module.run(side.model, side)
            side.end()
        except Exception as e:
            ran.trace = traceback.format_exc()
            ran.frames = tuple(frame.filename for frame in traceback.extract_tb(e.__traceback__))
            ran.error = e.with_traceback(None)
            ran.error.__cause__ = ran.error.__context__ = None
    ran.warned = tuple(str(w.message) for w in caught if "gemini" in str(w.filename) or "managed" in str(w.message))
    if side is not None:
        ran.seen = side.seen
    del side
    model = module = None  # type: ignore[assignment]
    sys.modules.pop(name, None)
    return ran


def run_plain(text: str, seed: int, precision: str, num_ranks: int = 1) -> Ran:
    with tempfile.TemporaryDirectory(prefix="gemini-programs-") as folder:

        def make(model: Any) -> PlainSide:
            return PlainSide(model, precision, Path(folder), num_ranks)

        return run_side(text, f"program_{seed}", make, precision)


def run_managed(text: str, seed: int, precision: str, placement: str, folder: Path, plain: Ran) -> Result:
    """The managed side, judged by the plain one."""
    where = PLACEMENTS[placement]
    ran = run_side(text, f"program_{seed}", lambda model: ManagedSide(model, precision, where, folder), precision)
    result = judge(plain, ran)
    if result.outcome == SILENT and varies(text, seed, precision, plain):
        result.outcome = VARIES
    result.seed, result.placement, result.precision = seed, placement, precision
    gc.collect()  # an engine that an error kept alive would hold its threads and its spill file
    return result


def varies(text: str, seed: int, precision: str, plain: Ran, *, attempts: int = 20) -> bool:
    """Whether the plain side, run again, sees something else: then there is nothing to compare with."""
    if "thread" not in text:
        return False
    again = (run_plain(text, seed, precision) for _ in range(attempts))
    return any(first_difference(plain.seen, ran.seen) is not None for ran in again)


def judge(plain: Ran, ran: Ran) -> Result:
    """The outcome of a managed run."""
    different = first_difference(plain.seen, ran.seen)
    warned = f" (warned: {ran.warned[0]})" if ran.warned else ""
    if plain.error is not None:
        told = f"{type(plain.error).__name__}: {plain.error}"
        further = len(ran.seen) > len(plain.seen) and first_difference(plain.seen, ran.seen[: len(plain.seen)]) is None
        if (ran.error is None and different is None) or further:
            return Result(0, "", "", GOES_ON, f"plain torch: {told}{warned}", kind_of(told))
        if different is None:
            return Result(0, "", "", BOTH, told, kind_of(told))
    if different is not None:
        label = re.sub(r"\d+|\[\d+\]", "", different.split(":")[0])
        then = "" if ran.error is None else f"; then {type(ran.error).__name__}: {ran.error}"
        if any(warning.startswith("p.grad of managed param") for warning in ran.warned):
            return Result(0, "", "", WARNED, different + warned + then, "p.grad")
        return Result(
            0, "", "", SILENT, different + warned + then, re.sub(r"(?<=gradient|..weight|..buffer) .*", "", label)
        )
    if ran.error is None:
        if len(ran.seen) != len(plain.seen):
            return Result(0, "", "", SILENT, f"saw {len(ran.seen)} values of {len(plain.seen)}", "fewer values")
        return Result(0, "", "", RIGHT)
    told = f"{type(ran.error).__name__}: {ran.error}"
    unclear = why_unclear(ran)
    if unclear is None:
        return Result(0, "", "", REFUSED, told, kind_of(told))
    return Result(0, "", "", RAW, f"{told} [{unclear}]", kind_of(told), ran.trace)


REMEDY = re.compile(
    r"\b(use|call|read|write|make|leave|raise|pass|put|let|return|give|gather|wrap|clip|keep|build|copy|move|set|take|"
    r"register|detach|declare|compute|try|run|wait|save|say|load|do|add|choose|freeze|one|lower|evaluate|share|train)\b",
    re.IGNORECASE,
)  # fmt: skip


def why_unclear(ran: Ran) -> str | None:
    """What keeps an error from being a clear refusal: its class, no remedy, no name of what it speaks of."""
    error, told = ran.error, str(ran.error)
    if isinstance(error, IllegalTransition):
        return "IllegalTransition is a bug by its own page"
    if isinstance(error, RuntimeError) and "modified by an inplace operation" in told and "merge_adapter" in ran.text:
        # In the words of torch, for a graph from before a write to weights that stay where they are. It misses this
        # one, which PEFT makes through `.data`: the gradient is then of weights that no forward has seen.
        return None
    if not isinstance(error, GeminiError):
        by_us = ran.frames and f"{Path(gemini.__file__).parent}/" in ran.frames[-1]
        if not isinstance(error, (ValueError, TypeError)) or not by_us:
            return "not an error of Gemini"
    if re.search(r"please report|do not matter here|assert", told, re.IGNORECASE):
        return "asks for a report"
    if not REMEDY.search(told):
        return "no remedy"
    spoken_of = set(re.findall(r"'([\w.]+)'", told))
    if not spoken_of & {*ran.names} and not re.search(r"[\w.]+\(|[\w]+=|\bgpu\b|\bcpu\b|\bnvme\b|fp16", told):
        return "names nothing"
    return None


def kind_of(told: str) -> str:
    """A message without what is filled in."""
    told = re.sub(r"\([\w.]+ \.\.\.\)|\b[gc]pu\b", "…", told)
    told = re.sub(r"'[^']*'|\"[^\"]*\"|<[^>]*>", "…", told.split("\n")[0])
    told = re.sub(r"[\d.,]+ ?([KMG]i?B|B)\b|\b0x[0-9a-f]+|\[[\d, ]*\]|\b\d+\b", "…", told)
    return told[:150]
