"""Facts that must be alike on all ranks: compared by a checksum, and told to each other if that differs.

Floats are compared by their bits, and NaN is equal to itself.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from gemini.errors import RankMismatch
from gemini.ranks.agreement import Point
from gemini.ranks.group import checksum_of
from gemini.ranks.wire import Wire

_COLUMNS: dict[str, Callable[[str], str]] = {
    "the gradient": lambda value: "there" if value == "1" else "none",
    "what zero_grad(set_to_none=False) left": lambda value: "zeros" if value == "1" else "nothing",
    "the param group": lambda value: "none" if value == "-1" else value,
    "requires_grad": lambda value: str(value == "1"),
    "the number of updates": str,
    "the clipping": str,
}
"""What a column is called, and how its values read."""


class Facts:
    """Values by what they are called, and columns with a value for each param in the order of the model."""

    def __init__(self, values: dict[str, str], columns: dict[str, array[Any]]):
        self.values = values
        self.columns = columns

    @property
    def checksum(self) -> int:
        """Of 32 bits, never 0."""
        found = zlib.crc32(json.dumps(self.values).encode())
        for column in self.columns.values():
            found = zlib.crc32(column.tobytes(), found)
        return found or 1

    def to_json(self) -> str:
        """For the other ranks, who have the same params."""
        return json.dumps({"values": self.values, "columns": {n: list(map(repr, c)) for n, c in self.columns.items()}})


def tell_differing(
    wire: Wire, whose: str, doing: str, facts: Facts, names: Sequence[str], *, untouched: str = "No weight"
) -> NoReturn:
    """All ranks of ``wire`` come here when their checksums differ: they tell each other the facts.

    Args:
        whose: the ranks, as an error calls them.
        names: of the params that columns are about.

    Raises:
        RankMismatch: on every rank, naming the first fact that differs, both values and both ranks.
    """
    heard = [json.loads(text) for text in wire.exchange_texts(facts.to_json(), doing)]
    for rank, other in zip(wire.global_ranks, heard, strict=True):
        found = first_difference(heard[0], other, names)
        if found is not None:
            what, first, second = found
            raise RankMismatch(
                f"{doing}: {whose} disagree about {what}: {first} on rank {wire.global_ranks[0]}, {second} on rank "
                f"{rank}. {untouched} was changed. What is done on one rank must be done on all of them, with the same "
                "values"
            )
    raise RankMismatch(f"{doing}: {whose} disagree. {untouched} was changed")


class Agree(Protocol):
    """Every rank is about to write the same values, or none writes any."""

    def __call__(self, point: Point, doing: str, facts: Callable[[], Facts], refusal: Exception | None = None) -> None:
        """See :func:`gemini.train.sharding.alike.agree_on_values`."""


def alone(point: Point, doing: str, facts: Callable[[], Facts], refusal: Exception | None = None) -> None:
    """:class:`Agree` in one process."""
    if refusal is not None:
        raise refusal


def value_facts(values: Iterable[tuple[str, torch.Tensor]]) -> Facts:
    """Checksums of tensors, by what they are called. One after the other: nothing is kept of them."""
    return Facts({f"the values of {name!r}": checksum_text(value) for name, value in values}, {})


def checksum_text(value: torch.Tensor) -> str:
    """Of one tensor."""
    return f"checksum {checksum_of(value):08x} ({str(value.dtype).removeprefix('torch.')})"


def plain(value: Any) -> Any:
    """A hyperparameter as it is used: a float, whichever kind of number or tensor it was given as."""
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # refused, after the ranks have compared it
        return str(value)


def first_difference(
    first: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]
) -> tuple[str, str, str] | None:
    """What two ranks differ in, with the value of each, by what :meth:`Facts.to_json` says; ``names`` of the params."""
    for label in {**first["values"], **other["values"]}:
        a, b = first["values"].get(label, "none"), other["values"].get(label, "none")
        if a != b:
            return label, a, b
    for label, column in first["columns"].items():
        for name, a, b in zip(names, column, other["columns"][label], strict=True):
            if a != b:
                return f"{label} of {name!r}", _COLUMNS[label](a), _COLUMNS[label](b)
    return None
