"""Plain data compared with a declaration: what cannot be is refused with its place."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import pytest

from gemini.planning import document


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
        (3, "Expected `object`, got `int`"),
        ({}, "Object missing required field `parts`"),
        ({"parts": [1]}, "Expected `object`, got `array` - at `$.parts`"),
        (parts(step=-1), "Expected `int` >= 0 - at `$.parts[...].step`"),
        (parts(step=True), "Expected `int`, got `bool` - at `$.parts[...].step`"),
        (parts(step="x" * 30), "Expected `int`, got `str` - at `$.parts[...].step`"),
        (parts(stop=2), "Object contains unknown field `stop` - at `$.parts[...]`"),
        (parts(spans=[[1, 2], [3, 4.5]]), "Expected `int`, got `float` - at `$.parts[...].spans[1][1]`"),
        ({**parts(), "pair": ["seven", 7]}, "seven is odd"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(data: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        document.read(data, Whole)
    assert str(caught.value).startswith(words)


def test_parts_may_be_values_already() -> None:
    part = Part(3)
    assert document.read({"parts": {"a": part}, "pair": ["two", 2]}, Whole) == Whole({"a": part}, Pair("two", 2))
