"""Facts that must be alike on all ranks: compared by a checksum, and told to each other if that differs.

Floats are compared by their bits, and NaN is equal to itself.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

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
    """Values (as in JSON) by what they are called, in the order in which an error looks for one that differs.

    A value that is an array is a column: it has an item for each param. ``names``: of these, the same on all ranks.
    """

    def __init__(self, values: Mapping[str, Any], names: Sequence[str] = ()):
        self.values, self.names = values, names

    def __or__(self, other: Facts) -> Facts:
        """These and those of ``other``, about the same params."""
        return Facts({**self.values, **other.values}, self.names or other.names)

    @property
    def checksum(self) -> int:
        """Of 32 bits, never 0; in whichever order."""
        plain = {name: value for name, value in self.values.items() if not isinstance(value, array)}
        found = zlib.crc32(json.dumps(plain, sort_keys=True, default=str).encode())
        for column in self.values.values():
            found = zlib.crc32(column.tobytes(), found) if isinstance(column, array) else found
        return found or 1

    def told(self) -> dict[str, Any]:
        """As the other ranks hear it, who have the same params."""
        return {name: list(map(repr, v)) if isinstance(v, array) else v for name, v in self.values.items()}


class Difference(NamedTuple):
    """What two ranks differ in, with the value of each."""

    what: str
    first: Any
    other: Any

    @property
    def against(self) -> str:
        """Both values; of a table, how many of its entries differ, and the first of them."""
        a, b = self.first, self.other
        if isinstance(a, dict) and isinstance(b, dict):
            keys = [key for key in {**a, **b} if a.get(key) != b.get(key)]
            return f"{len(keys)} differ, the first is {keys[0]!r}: {b.get(keys[0])} against {a.get(keys[0])}"
        return f"{b!r} against {a!r}"


def value_facts(values: Iterable[tuple[str, torch.Tensor]]) -> Facts:
    """Checksums of tensors, by what they are called. One after the other: nothing is kept of them."""
    return Facts({f"the values of {name!r}": checksum_text(value) for name, value in values})


def checksum_of(tensor: torch.Tensor) -> int:
    """Of the bits of its values, in 32 bits; not of its dtype and shape."""
    data = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().view(-1)
    return zlib.crc32(data.view(torch.uint8).numpy().data) if data.numel() else 0


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


def first_difference(first: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> Difference | None:
    """What two ranks differ in, by what :meth:`Facts.told` says; ``names`` of the params."""
    for label in {**first, **other}:
        a, b = first.get(label, "none"), other.get(label, "none")
        if a == b:
            continue
        if label not in _COLUMNS:
            return Difference(label, a, b)
        name, a, b = next(of for of in zip(names, a, b, strict=True) if of[1] != of[2])
        return Difference(f"{label} of {name!r}", _COLUMNS[label](a), _COLUMNS[label](b))
    return None
