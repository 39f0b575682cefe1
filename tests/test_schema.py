"""Plain data compared with a declaration: what cannot be is refused with its place, whatever the keys on the way."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import pytest

from gemini import schema


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: Annotated[int, msgspec.Meta(ge=0)]
    spans: tuple[tuple[int, int], ...] = ()


class Pair(NamedTuple):
    name: str
    even: int = 0


@dataclass(frozen=True)
class Whole:
    parts: dict[str, Part]
    pair: Pair = Pair("none")

    def __post_init__(self) -> None:
        if self.pair.even % 2:
            raise ValueError(f"{self.pair.name} is odd")


def parts(**bad: Any) -> dict[str, Any]:
    good = {f"a.{i}": {"step": i} for i in range(9)}
    return {"parts": {**good, "b.c": {"step": 1, **bad}, "d": {"step": 3}}}


@pytest.mark.parametrize(
    "data, words",
    [
        (3, "the thing is 3: expected `object`"),
        ({}, "the thing lacks 'parts'"),
        ({"parts": [1]}, "parts is [1]: expected `object`"),
        (parts(step=-1), "parts.b.c.step is -1: expected `int` >= 0"),
        (parts(step=True), "parts.b.c.step is True: expected `int`"),
        (parts(step="x" * 30), "parts.b.c.step is a str: expected `int`"),
        (parts(stop=2), "parts.b.c has no use for 'stop'"),
        (parts(spans=[[1, 2], [3, 4.5]]), "parts.b.c.spans[1][1] is 4.5: expected `int`"),
        ({**parts(), "pair": ["seven", 7]}, "seven is odd"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(data: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        schema.read(data, Whole, "the thing")
    assert str(caught.value).startswith(words)


def test_parts_may_be_values_already() -> None:
    part = Part(3)
    assert schema.read({"parts": {"a": part}, "pair": ["two", 2]}, Whole, "") == Whole({"a": part}, Pair("two", 2))
