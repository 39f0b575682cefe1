"""Python values to JSON and back, tensors apart: what checkpoints keep of schedulers, RNGs and a user's ``extra``.

Numbers, strings, booleans, None, lists, tuples, dicts with any plain keys, and tensors. Nothing that needs pickle.
"""

from __future__ import annotations

from typing import Any

import torch

_TUPLE, _ITEMS, _TENSOR = "__tuple__", "__items__", "__tensor__"


def encode(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    """``value`` as JSON data; tensors are appended to ``tensors`` and referred to by number.

    Raises:
        TypeError: naming the place of a value that is none of the above.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().to("cpu").contiguous())
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, tuple):
        return {_TUPLE: [encode(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [encode(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not {_TUPLE, _ITEMS, _TENSOR} & set(value):
            return {key: encode(v, tensors, f"{where}.{key}") for key, v in value.items()}
        return {_ITEMS: [[encode(k, tensors, where), encode(v, tensors, f"{where}.{k}")] for k, v in value.items()]}
    if isinstance(value, int):  # an enum or a subclass: its number
        return int(value)
    if isinstance(value, float):  # numpy's float64 is one
        return float(value)
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot keep: use numbers, strings, lists, tuples, "
        "dicts and tensors (checkpoints hold no pickles)"
    )


def decode(data: Any, tensors: list[torch.Tensor]) -> Any:
    """The value that :func:`encode` was given."""
    if isinstance(data, list):
        return [decode(v, tensors) for v in data]
    if isinstance(data, dict):
        if set(data) == {_TENSOR}:
            return tensors[data[_TENSOR]]
        if set(data) == {_TUPLE}:
            return tuple(decode(v, tensors) for v in data[_TUPLE])
        if set(data) == {_ITEMS}:
            return {decode(k, tensors): decode(v, tensors) for k, v in data[_ITEMS]}
        return {key: decode(v, tensors) for key, v in data.items()}
    return data
