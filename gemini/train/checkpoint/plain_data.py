"""Python values to JSON and back, tensors apart: what checkpoints keep of schedulers, RNGs and a user's ``extra``.

Numbers, strings, bytes, booleans, None, lists, tuples, dicts with any plain keys, and tensors of every dtype that is so
many bytes per element. Nothing that needs pickle. What is read back may have been written by anybody: :func:`decode`
takes what :func:`encode` makes, and nothing else.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gemini.errors import GeminiError
from gemini.train.checkpoint.tensor_file import STORED_DTYPES, Malformed

_TUPLE, _ITEMS, _TENSOR, _BYTES = "__tuple__", "__items__", "__tensor__", "__bytes__"
_DTYPE, _SHAPE = "dtype", "shape"
_MAX_DEPTH = 64
"""Values within values; in JSON up to three times as many. It is read by recursion, of which there is not much."""
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


def plain_form(value: Any) -> Any:
    """``value`` as it would come back, to be compared with what did; itself, if it cannot be kept."""
    tensors: list[torch.Tensor] = []
    try:
        data = encode(value, tensors, "it")
    except TypeError:
        return value
    return Decoder(tensors).decode(data, "it")


class Decoder:
    """Gives back what :func:`encode` was given, for all values that were encoded into one list of tensors.

    Raises:
        Malformed: from its methods, naming the place, for data that no :func:`encode` has made.
    """

    def __init__(self, tensors: list[torch.Tensor]):
        self._tensors: list[torch.Tensor | None] = list(tensors)

    def decode(self, data: Any, where: str, depth: int = 0) -> Any:
        """The value of ``data``."""
        # Made by somebody: Python's own limit of recursion is not far.
        if depth > 3 * _MAX_DEPTH:
            raise Malformed(f"{where[:80]}... is nested too deep")
        if data is None or isinstance(data, (bool, str, float)):
            return data
        if isinstance(data, int):
            if data.bit_length() > _MAX_BITS:
                raise Malformed(f"{where} is too large a number")
            return data
        if isinstance(data, list):
            return [self.decode(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(data)]
        if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
            raise Malformed(f"{where} is of no kind that a checkpoint holds")
        if _TENSOR in data:
            return self._tensor(data, where)
        if _BYTES in data:
            return _bytes(data, where)
        if _TUPLE in data:
            return tuple(self._list(data, _TUPLE, where, depth))
        if _ITEMS in data:
            pairs = self._list(data, _ITEMS, where, depth)
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
                raise Malformed(f"{where} is not a list of keys and values")
            try:
                found = dict(pairs)
            except TypeError as e:
                raise Malformed(f"{where} has a key that cannot be one: {e}") from e
            if len(found) != len(pairs):
                raise Malformed(f"{where} has a key twice")
            return found
        return {key: self.decode(v, f"{where}.{key}", depth + 1) for key, v in data.items()}

    def end(self) -> None:
        """Refuse tensors that nothing has referred to, when all was decoded."""
        left = [i for i, tensor in enumerate(self._tensors) if tensor is not None]
        if left:
            raise Malformed(f"nothing refers to tensor {left[0]}")

    def _list(self, data: dict[str, Any], tag: str, where: str, depth: int) -> list[Any]:
        if len(data) != 1 or not isinstance(data[tag], list):
            raise Malformed(f"{where} is not a {tag} alone")
        return [self.decode(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(data[tag])]

    def _tensor(self, data: dict[str, Any], where: str) -> torch.Tensor:
        number = data[_TENSOR]
        if type(number) is not int or not 0 <= number < len(self._tensors):
            raise Malformed(f"{where} refers to tensor {number!r}, which is not there")
        # Each is given out once: `encode` never refers to a tensor twice.
        found, self._tensors[number] = self._tensors[number], None
        if found is None:
            raise Malformed(f"{where} refers to tensor {number}, as something else does")
        if set(data) == {_TENSOR}:
            return found
        dtype, shape = getattr(torch, str(data.get(_DTYPE)), None), data.get(_SHAPE)
        if set(data) != {_TENSOR, _DTYPE, _SHAPE} or not isinstance(dtype, torch.dtype) or dtype in STORED_DTYPES:
            raise Malformed(f"{where} is a tensor of no known dtype")
        if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**62 for size in shape):
            raise Malformed(f"{where} is a tensor of no possible shape")
        if found.dtype is not torch.uint8 or found.dim() != 1 or math.prod(shape) * dtype.itemsize != found.numel():
            raise Malformed(f"{where} has another size than its dtype and shape say")
        try:
            return found.view(dtype).view(shape)
        except RuntimeError as e:
            raise Malformed(f"{where} is a tensor of no possible dtype: {e}") from e


def _bytes(data: dict[str, Any], where: str) -> bytes:
    try:
        if len(data) != 1:
            raise ValueError("it has more in it")
        return base64.b64decode(data[_BYTES], validate=True)
    except (TypeError, ValueError) as e:
        raise Malformed(f"{where} is not bytes in base64: {e}") from e
