"""Options of a command as fields of a record: each says its help, its group and what it may be.

The parser of a command and ``check`` read the same fields, so that an option is written down once.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from gemini.errors import parse_bytes
from gemini.jobs.errors import JobError, refusing
from gemini.planning.token_tiles import as_tiles, tile_sizes

TILES = int | str | None
"""The kind of an option that is a number of tokens or "auto"."""


def opt(
    default: Any,
    words: str,
    group: str | None,
    *,
    least: float | None = None,
    choices: tuple[str, ...] = (),
    size: bool = False,
    several: bool = False,
) -> Any:
    """A field of a record of options.

    Args:
        default: its value if it is left out.
        words: the help.
        group: the heading it stands under; None: that of all commands.
        least: the smallest number it may be.
        choices: all it may be, if these are few.
        size: whether it is a number of bytes.
        several: whether several values may stand behind its name, and not only behind the same name again.
    """
    about = {"words": words, "group": group, "least": least, "choices": choices, "size": size, "several": several}
    return field(default=default, metadata=about)


def one_of(default: str | None, words: str, group: str, choices: tuple[str, ...], more: str = ".") -> Any:
    """A field of a few words, which are in its help."""
    return opt(default, f"{words}: {', '.join(choices)}{more}", group, choices=choices)


def argument(default: Any, words: str, *, required: bool = False) -> Any:
    """A field that is given by its place and not by its name."""
    return field(default=default, metadata={"words": words, "group": None, "required": required, "argument": True})


def options(record: type) -> dict[str, tuple[Field[Any], Any]]:
    """The options of a record by name: the field and its type."""
    kinds = get_type_hints(record)
    return {f.name: (f, kinds[f.name]) for f in fields(record) if "words" in f.metadata}


def spelled(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


# ---- how a command line is read --------------------------------------------------------------------------------------


class Refusing(ArgumentParser):
    """Says what is wrong in one paragraph."""

    def error(self, message: str) -> NoReturn:
        raise JobError(f"{message}. `{self.prog} --help` lists all options.")


class RecordParser(Refusing):
    """The command line of a command whose options are the fields of a record."""

    def __init__(self, name: str, about: str, record: type) -> None:
        super().__init__(prog=f"gemini {name}", description=about, allow_abbrev=False, argument_default=SUPPRESS)
        self._record = record
        groups: dict[str | None, Any] = {None: self}
        for option, (declared, kind) in options(record).items():
            group = declared.metadata["group"]
            if group not in groups:
                groups[group] = self.add_argument_group(group)
            _add(groups[group], option, declared.metadata, str(kind))
        behind = [f"[{a.metavar}]" if a.nargs else a.metavar for a in self._actions if not a.option_strings]
        self.usage = " ".join((self.prog, "[OPTIONS]", *map(str, behind)))

    def read(self, words: Sequence[str]) -> Any:
        """The record, checked for itself; what was left out has its default.

        Raises:
            JobError: for options that there are not, or that are no values of their kind.
        """
        settings = record_of(self._record, vars(self.parse_args(words)))
        settings.check()
        return settings


def _add(group: Any, name: str, about: Mapping[str, Any], kind: str) -> None:
    """An option as argparse knows it; what it may be is looked at by ``check``."""
    how: dict[str, Any] = {"help": about["words"].replace("%", "%%")}
    if kind == "<class 'bool'>":
        how["action"] = "store_true"
    else:
        how["type"] = Path if "Path" in kind else int if "int" in kind and "str" not in kind else str
        how["metavar"] = {Path: "PATH", int: "N", str: "SIZE" if about.get("size") else "WORD"}[how["type"]]
    if "argument" in about:
        how |= {} if about["required"] else {"nargs": "?", "default": None}
        group.add_argument(name, **{**how, "metavar": name.upper()})
        return
    if "tuple" in kind:  # several behind one name would take the argument too that stands behind them
        how |= {"nargs": "+", "action": "extend"} if about["several"] else {"action": "append"}
    group.add_argument(spelled(name), **how)


def record_of(record: type, given: Mapping[str, Any]) -> Any:
    """The record of the options that were given.

    Raises:
        JobError: for a number of tokens that is none.
    """
    kinds = {name: kind for name, (_, kind) in options(record).items()}
    said = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return record(
        **{name: tiles_of(spelled(name), value) if kinds[name] == TILES else value for name, value in said.items()}
    )


# ---- what their values may be ----------------------------------------------------------------------------------------


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
        if about["choices"] and value not in about["choices"]:
            raise JobError(f"{spelled(name)} must be one of {', '.join(about['choices'])}, got {value!r}.")
        if about["size"]:
            check_size(spelled(name), value)


def check_size(asked: str, value: str) -> None:
    """Raises: JobError: for what is no number of bytes."""
    with refusing(f"{asked} {value}"):
        parse_bytes(value)


def tiles_of(asked: str, given: Any) -> int | str | None:
    """As ``GeminiConfig(tile_tokens=)`` takes it.

    Raises:
        JobError: for what is none of them.
    """
    if given is None:
        return None
    if given == "auto":
        return "auto"
    try:
        return as_tiles(tile_sizes(int(given) if str(given).isdecimal() else str(given)))
    except ValueError:
        words = "auto or a number of tokens, 2 or more, or one by part (head=1024,mlp=4096)"
        raise JobError(f"{asked} must be {words}, got {str(given)!r}.") from None
