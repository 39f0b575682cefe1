"""A reward for tests: how many different letters an answer has."""

from __future__ import annotations

from typing import Any


def variety(completions: list[str], **_: Any) -> list[float]:
    return [float(len({*completion})) for completion in completions]
