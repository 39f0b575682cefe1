"""JSON in and out for the values that people keep in files: traces, hardware, plans, timelines.

Every file says what it is and in which version it was written, so that a file of another kind or version is refused in
words and not by a KeyError somewhere inside.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gemini.errors import PlanMismatch

T = TypeVar("T")

_WRITTEN_BY = {
    "plan": "`gemini plan --out FILE`",
    "trace": "`gemini trace --out FILE`",
    "hardware": "`gemini doctor --measure --json FILE`",
    "timeline": "`gemini simulate --out FILE`",
}
"""By kind, what makes one."""


def to_json(kind: str, version: int, body: dict[str, Any]) -> str:
    """The file of a value: one line that says what it is, then its fields."""
    return json.dumps({"gemini": kind, "version": version, **body}, separators=(",", ":"))


def from_json(text: str, kind: str, version: int, make: Callable[[dict[str, Any]], T]) -> T:
    """Read what :func:`to_json` wrote and let ``make`` build the value.

    Raises:
        PlanMismatch: if the text is no JSON, is of another kind or version, or lacks a field.
    """
    try:
        body = json.loads(text)
    except ValueError as e:
        raise PlanMismatch(f"this is not a {kind}: it is not JSON ({e})") from e
    if not isinstance(body, dict) or "gemini" not in body:
        raise PlanMismatch(f'this is JSON, but not a {kind} that Gemini wrote: it has no "gemini" field')
    if body["gemini"] != kind:
        raise PlanMismatch(f"a {kind} is needed, and this is a {body['gemini']}: {_WRITTEN_BY[kind]} writes one")
    if body.get("version") != version:
        raise PlanMismatch(
            f"this {kind} was written in version {body.get('version')}, and version {version} is read here: "
            "make it again with this version of Gemini"
        )
    try:
        return make(body)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise PlanMismatch(f"this {kind} is damaged: {type(e).__name__}: {e}") from e


def load(path: str | Path, what: str, parse: Callable[[str], T]) -> T:
    """What ``parse`` makes of a file that a user names, ``what`` being a word before its path ("--plan", or none).

    Raises:
        PlanMismatch: naming the file, if it cannot be read or is not what it should be.
    """
    named = f"{what} {path}".lstrip()
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise PlanMismatch(f"{named} cannot be read: {reason}") from e
    except PlanMismatch as e:
        raise PlanMismatch(f"{named}: {e}") from e
