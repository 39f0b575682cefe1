"""Every error Gemini raises on purpose, how it warns, and the two functions that turn bytes into words and back.

This is the ground floor: no torch, no other room. An error says what was asked, what is there and what to do; sizes in
it are human ("1.2 GiB"). Users who pass bad values get ``ValueError``/``TypeError``; the classes here are for states
of the world that a correct program can meet.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Code between the program and a warning: a warning names the program's line, however deep the one is that gives it.
_BETWEEN = tuple(f"{Path(__file__).resolve().parents[1] / name}/" for name in ("gemini", "integrations"))
_TORCH = "/site-packages/torch/"


def warn(message: str) -> None:
    """Warn of ``message`` at the line of the program that called Gemini, or here where a thread of ours warns."""
    level, frame = 2, sys._getframe().f_back
    while frame is not None and (frame.f_code.co_filename.startswith(_BETWEEN) or _TORCH in frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level if frame is not None else 1)


class GeminiError(RuntimeError):
    """The base class of all errors below. Catch it to catch everything that Gemini raises on purpose."""


class BudgetExceeded(GeminiError):
    """A tier would have to hold more bytes than its budget. Nothing was allocated."""


class IllegalTransition(GeminiError):
    """A chunk or a plane was asked for what the table in ``gemini.memory.chunks.chunk`` does not allow: a bug."""


class PlanMismatch(GeminiError):
    """A trace, plan, hardware file or checkpoint is of another model, kind or version."""


class MissingFigure(GeminiError):
    """A plan or a simulation needs a value that the description of the hardware does not have."""


class StorageError(GeminiError):
    """The spill file or a checkpoint could not be created, written or read."""


@contextlib.contextmanager
def of_storage(what: str) -> Iterator[None]:
    """Turn what the system says of a file inside into a StorageError that begins with ``what``."""
    try:
        yield
    except OSError as e:
        raise StorageError(f"{what}: {e.strerror or e}") from e


class ParamAccessError(GeminiError):
    """A managed param was used where its value cannot be read or written."""


class NonFiniteGradient(GeminiError):
    """A gradient contains inf or NaN. No weight was changed, unless the message says that backward has updated some."""


class RankLost(GeminiError):
    """Another rank died or does not answer. Start again from the last checkpoint."""


class RankMismatch(GeminiError):
    """The ranks of one model differ: in model, config or versions at the start, or in what they do later."""


_UNITS = {
    **{"": 1, "b": 1},
    **{f"{letter}{end}": 1000**power for power, letter in enumerate("kmgt", 1) for end in ("", "b")},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: str | int | float, *, what: str = "size") -> int:
    """Turn ``"20GiB"``, ``"400 GB"``, ``"0.5TiB"`` or a plain number of bytes into bytes.

    Units are those of the SI (kB, MB, GB, TB: powers of 1000) and of the IEC (KiB, MiB, GiB, TiB: powers of 1024).

    Raises:
        TypeError: if ``size`` is neither a string nor a number.
        ValueError: if the unit is unknown, the number is malformed, negative or not finite.
    """
    if isinstance(size, bool) or not isinstance(size, (str, int, float)):
        raise TypeError(f"{what} must be a string such as '20GiB' or a number of bytes, got {type(size).__name__}")
    if isinstance(size, (int, float)):
        if not 0 <= size < float("inf"):
            raise ValueError(f"{what} must be finite and not negative, got {size!r} bytes")
        return int(size)
    match = _SIZE.fullmatch(size)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(
            f"{what}: cannot read {size!r} as a size; write a number that is not negative and a unit, such as '20GiB': "
            "B, kB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def human_bytes(num_bytes: float) -> str:
    """Bytes in the unit a person would choose: ``human_bytes(1536) == '1.5 KiB'``."""
    sign = "-" if num_bytes < 0 else ""
    value = float(abs(num_bytes))
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{sign}{value:.0f} B" if unit == "B" else f"{sign}{value:.4g} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def listed(values: Mapping[Any, float], say: Callable[[float], str] = human_bytes) -> str:
    """How much there is of what, ``"weights 3 GiB, windows 1 GiB"``; ``"nothing"`` where there is none of anything."""
    return ", ".join(f"{what} {say(value)}" for what, value in values.items() if value) or "nothing"


def counted(count: int, word: str) -> str:
    """``"1 file"``, ``"1,200 files"``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
