"""Factors: states of a param that are a few vectors in the place of a matrix (a value for each row, and one for each
column), as Adafactor keeps its second moment. They are fp32, stand in host memory beside the planes, and pass through
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

FORMS = ("rows", "columns", "vector")


@dataclass(frozen=True)
class FactorSpec:
    """One of them: of params of two dimensions or more a value for each of the "rows" (the last dimension is 1) or of
    the "columns" (the last but one is); of the others, which have neither, one for each element ("vector").

    Raises:
        ValueError: for a form that is not known.
    """

    name: str
    form: str

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"factor {self.name!r} is {self.form!r}; use one of {', '.join(map(repr, FORMS))}")

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Of a param of ``shape``; None if it has no such factor."""
        if (len(shape) < 2) != (self.form == "vector"):
            return None
        if self.form == "vector":
            return tuple(shape)
        return (*shape[:-1], 1) if self.form == "rows" else (*shape[:-2], 1, shape[-1])


def shapes_of(factors: Iterable[FactorSpec], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The factors of a param, and their shapes."""
    return {factor.name: found for factor in factors if (found := factor.shape_of(shape)) is not None}


def factor_bytes(factors: Iterable[FactorSpec], shape: tuple[int, ...]) -> int:
    """Bytes of the factors of a param."""
    return sum(4 * math.prod(found) for found in shapes_of(factors, shape).values())
