"""JSON in and out for the values that people keep in files, as their fields are declared. Every file says what it is
and in which version, so that another kind or version is refused in words and not by a KeyError somewhere inside.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from gemini.errors import PlanMismatch

T = TypeVar("T")
D = TypeVar("D", bound="Document")

_WRITTEN_BY = {
    "plan": "`gemini plan --out FILE`",
    "trace": "`gemini trace --out FILE`",
    "hardware": "`gemini doctor --measure --json FILE`",
    "timeline": "`to_json` of what `gemini.simulate` returns",
}
"""By kind, what makes one."""


def read(data: Any, kind: type[T]) -> T:
    """The value of type ``kind`` (a dataclass, ``NamedTuple`` or ``msgspec.Struct``, declared once) that ``data`` (as
    JSON has it) stands for; parts of it may be values already. msgspec reads strictly, no int for a bool. Raises
    ValueError for what it cannot be. Whoever knows the file turns it into an error that names it.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as e:
        # What a value itself objects to when it is made needs no place.
        raise ValueError(str(e.__cause__ or e)) from e


class Document:
    """A value with a file form: its fields by name, unless ``_to_body`` and ``_from_body`` say otherwise."""

    _kind: ClassVar[str]
    _version: ClassVar[int]

    def __init_subclass__(cls, *, kind: str, version: int = 1) -> None:
        cls._kind, cls._version = kind, version

    def to_json(self) -> str:
        """One JSON object; :meth:`from_json` reads it back to an equal value."""
        return json.dumps({"gemini": self._kind, "version": self._version, **self._to_body()}, separators=(",", ":"))

    @classmethod
    def from_json(cls: type[D], text: str) -> D:
        """Read what :meth:`to_json` wrote, now or in an older release.

        Raises:
            PlanMismatch: if the text is no JSON, is of another kind or version, or does not say what it should.
        """
        kind = cls._kind
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as e:  # brackets in brackets, thousands deep
            raise PlanMismatch(f"this is not a {kind}: it is not JSON ({e})") from e
        if not isinstance(body, dict) or "gemini" not in body:
            raise PlanMismatch(f'this is JSON, but not a {kind} that Gemini wrote: it has no "gemini" field')
        if body["gemini"] != kind:
            raise PlanMismatch(f"a {kind} is needed, and this is a {body['gemini']}: {_WRITTEN_BY[kind]} writes one")
        if body.get("version") != cls._version:
            raise PlanMismatch(
                f"this {kind} was written in version {body.get('version')}, and version {cls._version} is read here: "
                "make it again with this version of Gemini"
            )
        try:
            return cls._from_body(body)
        except ValueError as e:
            raise PlanMismatch(f"this {kind} is damaged: {e}") from e
        except (KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as e:
            raise PlanMismatch(f"this {kind} is damaged: {type(e).__name__}: {e}") from e

    def _to_body(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return msgspec.to_builtins(self, str_keys=True)  # type: ignore[no-any-return]

    @classmethod
    def _from_body(cls: type[D], body: dict[str, Any]) -> D:
        """The value of such fields, or of those that an older release wrote; an error of these above for others."""
        return read(body, cls)


def load(path: str | Path, what: str, parse: Callable[[str], T]) -> T:
    """Parse a user's file; PlanMismatch names ``what`` it is and its path, if it cannot be read."""
    named = f"{what} {path}".lstrip()
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise PlanMismatch(f"{named} cannot be read: {reason}") from e
    except PlanMismatch as e:
        raise PlanMismatch(f"{named}: {e}") from e
