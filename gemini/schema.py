"""Values from plain data: what files and manifests say, compared with the declaration of the value that they stand for.

A value is declared once, as a dataclass, ``NamedTuple`` or ``msgspec.Struct`` with annotations; msgspec reads it
strictly (no int for a bool, no text for a number). What cannot be is refused in words that name the place, what stands
there and what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])")
"""One step of a path as msgspec writes it: a field, an index, or any key of a mapping, which it does not name."""


class Misfit(ValueError):
    """What was read is not what it should be. Whoever knows the file turns it into an error that names it."""


def read(data: Any, kind: type[T], what: str) -> T:
    """The value of type ``kind`` that ``data`` (as JSON has it) stands for; parts of it may be values already.

    Raises:
        Misfit: naming the place in ``what``, what stands there and what was expected.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as e:
        if e.__cause__ is not None:  # what a value itself objects to when it is made needs no explanation
            raise Misfit(str(e.__cause__)) from e
        raise Misfit(_explained(data, kind, what, str(e))) from e


def shown(value: Any) -> str:
    """A value for an error: short, whatever it is."""
    return f"a {type(value).__name__}" if isinstance(value, (dict, list, str)) and len(value) > 20 else repr(value)[:80]


def _explained(data: Any, kind: type[Any], what: str, message: str) -> str:
    problem, _, path = message.replace(" - at `key` in `$", " - at `$").partition(" - at `$")
    keys: list[str | int] = []
    value = data
    for name, index, any_key in _STEP.findall(path):
        key = int(index) if index else _failing_key(data, kind, keys, message) if any_key else name
        keys.append(key)
        value = value[key]
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".") or what
    if named := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", problem):
        return f"{where} {'lacks' if named[1].startswith('missing') else 'has no use for'} {named[2]!r}"
    return f"{where} is {shown(value)}: {problem[:1].lower()}{problem[1:]}"


def _failing_key(data: Any, kind: type[Any], keys: Sequence[str | int], message: str) -> str:
    """The key of the mapping at ``keys`` whose value is refused with ``message``: found by leaving out others."""
    mapping = data
    for key in keys:
        mapping = mapping[key]
    left = list(mapping)
    while len(left) > 1:
        first = left[: len(left) // 2]
        try:
            msgspec.convert(_with(data, keys, {key: mapping[key] for key in first}), kind)
            fails = False
        except msgspec.ValidationError as e:
            fails = str(e) == message
        left = first if fails else left[len(first) :]
    return left[0]


def _with(data: Any, keys: Sequence[str | int], value: Any) -> Any:
    """A copy of ``data`` with another value at ``keys``."""
    if not keys:
        return value
    copy: Any = list(data) if isinstance(data, list) else dict(data)
    copy[keys[0]] = _with(data[keys[0]], keys[1:], value)
    return copy
