"""Python values to JSON and back, tensors apart: what checkpoints keep of schedulers, RNGs and a user's ``extra``.

Numbers, strings, bytes, booleans, None, lists, tuples, dicts with any plain keys, and tensors of every dtype that is so
many bytes per element. Nothing that needs pickle. :func:`decode` takes what :func:`encode` has made: the checksums of a
checkpoint say that nothing else stands there.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gemini.errors import GeminiError
from gemini.train.checkpoint.tensor_file import STORED_DTYPES

_TUPLE, _ITEMS, _TENSOR, _BYTES = "__tuple__", "__items__", "__tensor__", "__bytes__"
_DTYPE, _SHAPE = "dtype", "shape"
_MAX_DEPTH = 64
"""Values within values; in JSON up to three times as many. They are read by recursion, of which there is not much."""
_MAX_BITS = 10_000
"""Of an int: Python reads no number of more than 4,300 digits."""


def encode(value: Any, tensors: list[torch.Tensor], where: str, depth: int = 0) -> Any:
    """``value`` as JSON data; tensors are appended to ``tensors`` and referred to by number.

    Raises:
        TypeError: naming the place of a value that is none of the above.
    """
    if depth > _MAX_DEPTH:
        raise TypeError(
            f"{where[:80]}... is nested {_MAX_DEPTH} deep or holds itself, which a checkpoint cannot keep: make it flat"
        )
    # bool before int, which it is a subclass of.
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):  # an enum or a subclass: its number
        if value.bit_length() > _MAX_BITS:
            raise TypeError(f"{where} is an int of {value.bit_length()} bits, which a checkpoint cannot keep")
        return int(value)
    if isinstance(value, float):  # numpy's float64 is one
        return float(value)
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, tensors, where)
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if isinstance(value, tuple):
        return {_TUPLE: [encode(v, tensors, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [encode(v, tensors, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, dict):
        # A user's dict with one of our tags as a key would come back as something else: it goes as items.
        if all(isinstance(key, str) for key in value) and not {_TUPLE, _ITEMS, _TENSOR, _BYTES} & set(value):
            return {key: encode(v, tensors, f"{where}.{key}", depth + 1) for key, v in value.items()}
        items = []
        for key, v in value.items():
            name = f"{where}.{key}" if isinstance(key, (str, int)) else f"{where}[...]"
            if isinstance(key, torch.Tensor):
                raise TypeError(f"{where} has a tensor as a key, which a checkpoint cannot keep")
            items.append([encode(key, tensors, where, depth + 1), encode(v, tensors, name, depth + 1)])
        return {_ITEMS: items}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot keep: use numbers, strings, bytes, lists, "
        "tuples, dicts and tensors (checkpoints hold no pickles)"
    )


def _encode_tensor(value: torch.Tensor, tensors: list[torch.Tensor], where: str) -> dict[str, Any]:
    """The numbers that a reader of ``value`` sees, as a plain tensor; a dtype that files cannot name as bytes."""
    try:
        empty_shell = isinstance(value, FakeTensor) or hasattr(value, "__tensor_flatten__")  # a DTensor, say
        if value.layout is not torch.strided or value.is_quantized or value.is_nested or empty_shell:
            raise TypeError
        # The bits that a reader sees: lazily conjugated or negated views have others in memory.
        plain = value.detach().as_subclass(torch.Tensor).to("cpu").resolve_conj().resolve_neg().contiguous()
        if plain.numel() and not plain.untyped_storage().data_ptr():  # it only looks like a tensor
            raise TypeError
        number = len(tensors)
        if plain.dtype in STORED_DTYPES:
            tensors.append(plain)
            return {_TENSOR: number}
        # As bytes, with dtype and shape beside them.
        tensors.append(plain.view(-1).view(torch.uint8))
    except GeminiError:  # a managed param: it says how it can be read
        raise
    except (TypeError, RuntimeError) as e:
        what = str(value.layout) if value.layout is not torch.strided else f"{value.dtype} on {value.device}"
        kind = type(value).__name__ + (" that is nested" if value.is_nested else "")
        raise TypeError(
            f"{where} is a {kind} ({what.removeprefix('torch.')}), which a checkpoint cannot keep: use an ordinary "
            "dense tensor, .to_dense() or .dequantize() for example"
        ) from e
    return {_TENSOR: number, _DTYPE: str(plain.dtype).removeprefix("torch."), _SHAPE: list(plain.shape)}


def decode(data: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """What :func:`encode` was given, which has put these ``tensors`` aside."""
    if isinstance(data, list):
        return [decode(value, tensors) for value in data]
    if not isinstance(data, dict):
        return data
    if _TENSOR in data:
        found = tensors[data[_TENSOR]]
        return found if _DTYPE not in data else found.view(getattr(torch, data[_DTYPE])).view(data[_SHAPE])
    if _BYTES in data:
        return base64.b64decode(data[_BYTES])
    if _TUPLE in data:
        return tuple(decode(data[_TUPLE], tensors))
    if _ITEMS in data:
        return dict(decode(data[_ITEMS], tensors))
    return {key: decode(value, tensors) for key, value in data.items()}
