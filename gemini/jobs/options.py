"""Options of a command as fields of a record: each says its help, its group and what it may be.

The command line and ``check`` read the same fields, so that an option is written down once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Any, get_type_hints

from gemini.errors import parse_bytes
from gemini.jobs.errors import JobError, as_job_error

TILES = int | str | None
"""The kind of an option that is a number of tokens or "auto"."""

ELSEWHERE = {f"--{tier}-memory": f"--{tier}" for tier in ("gpu", "cpu", "nvme")}
"""What options of training are called in planning."""


def opt(
    default: Any,
    words: str,
    group: str | None,
    *,
    least: float | None = None,
    choices: tuple[str, ...] = (),
    size: bool = False,
) -> Any:
    """A field of a record of options.

    Args:
        default: its value if it is left out.
        words: the help.
        group: the heading it stands under; None: that of all commands.
        least: the smallest number it may be.
        choices: all it may be, if these are few.
        size: whether it is a number of bytes.
    """
    return field(
        default=default, metadata={"words": words, "group": group, "least": least, "choices": choices, "size": size}
    )


def one_of(default: str | None, words: str, group: str, choices: tuple[str, ...], more: str = ".") -> Any:
    """A field of a few words, which are in its help."""
    return opt(default, f"{words}: {', '.join(choices)}{more}", group, choices=choices)


def argument(default: Any, words: str, *, required: bool = False) -> Any:
    """A field that is given by its place and not by its name."""
    return field(default=default, metadata={"words": words, "required": required, "argument": True})


def options(record: type) -> dict[str, tuple[Field[Any], Any]]:
    """The options of a record by name: the field and its type."""
    kinds = get_type_hints(record)
    return {f.name: (f, kinds[f.name]) for f in fields(record) if "words" in f.metadata}


def spelled(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


def check(record: Any) -> None:
    """Refuse values that no files or hardware could make right.

    Raises:
        JobError: naming the option, what was given and what is possible.
    """
    for name, (declared, _) in options(type(record)).items():
        value, about = getattr(record, name), declared.metadata
        if value is None or "argument" in about:
            continue
        if about["least"] is not None and isinstance(value, int) and value < about["least"]:
            raise JobError(f"{spelled(name)} must be at least {about['least']}, got {value}.")
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise JobError(f"{spelled(name)} must be a finite number and not negative, got {value}.")
        if about["choices"] and value not in about["choices"]:
            raise JobError(f"{spelled(name)} must be one of {', '.join(about['choices'])}, got {value!r}.")
        if about["size"]:
            check_size(spelled(name), value)


def check_size(asked: str, value: str) -> None:
    """Refuse what is no size, and a number alone, which is hardly meant as bytes.

    Raises:
        JobError: with the question.
    """
    with as_job_error(asked=f"{asked} {value}"):
        size = parse_bytes(value)
    if str(value).strip().isdigit() and 0 < size < 1 << 20:
        raise JobError(f"{asked} {value}: {value} bytes? Say the unit: {asked} {value}GiB, or {value}B if it is meant.")


def record_of(record: type, given: Mapping[str, Any]) -> Any:
    """The record of the options that were given, None and an empty list standing for one that was not.

    Raises:
        JobError: for a number of tokens that is none.
    """
    kinds = {name: kind for name, (_, kind) in options(record).items()}
    said = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return record(
        **{
            name: tiles_of(spelled(name), value) if kinds.get(name) == TILES else value
            for name, value in said.items()
            if value is not None and value != ()
        }
    )


def tiles_of(asked: str, given: Any) -> int | str | None:
    """A number of tokens, "auto" or None.

    Raises:
        JobError: for what is none of them.
    """
    if given is None:
        return None
    if given != "auto" and not (str(given).isdecimal() and int(given) >= 2):
        raise JobError(f"{asked} must be auto or a number of tokens, 2 or more, got {str(given)!r}.")
    return given if given == "auto" else int(given)
