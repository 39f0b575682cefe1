"""What of a checkpoint's tensors a slice of a param is made of (``tp``, ``ep``), so that no more of them is read.

transformers has the step for it, which it takes for params that are DTensors: what it would read of each tensor of a
file is asked of us instead. Tensors in files are mapped memory, so what of them is not copied is not read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from gemini.train.loading.skeleton import replaced
from gemini.train.params.tensor_slice import TensorSlice


class Made(NamedTuple):
    """How a param comes from tensors of a checkpoint.

    Attributes:
        keys: of all tensors that take part.
        operations: transformers', in their order; none for a tensor that is the param. None for one among several of
            one conversion, or of tensors of several shapes.
        shape: of each tensor, all of which have it.
        numbers: how many tensors each of the patterns that the operations begin with has found.
    """

    keys: tuple[str, ...]
    operations: tuple[Any, ...] | None
    shape: tuple[int, ...]
    numbers: tuple[int, ...]


class SliceReading(NamedTuple):
    """What of the tensors behind one param is read.

    Attributes:
        own_shape: of the slice that the param is.
        of_each: the slice of each tensor, or None if those that are read are read whole.
        some: of the tensors that each pattern has found, the first and the one behind the last that are read.
    """

    own_shape: tuple[int, ...]
    of_each: TensorSlice | None
    some: tuple[int, int] | None

    def read(self, tensor: Any, number: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """What is here of the tensor with this number, or None if nothing is."""
        if self.some is not None and number is not None and not self.some[0] <= number < self.some[1]:
            return None
        mapped: torch.Tensor = tensor[...]
        if self.of_each is None:
            return mapped.to(dtype)
        parts = [part.to(dtype) for part in self.of_each.views_of(mapped)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.of_each.dim)


def reading_of(cut: TensorSlice, made: Made) -> SliceReading | None:
    """How a slice is read, or None if an operation does not leave slices what they are: the whole must be read then."""
    if made.operations is None:
        return None
    dim, groups, shape, some = cut.dim, cut.groups, cut.shape, None
    for operation in reversed(made.operations):
        kind = type(operation).__name__
        if kind == "MergeModulelist" and operation.dim == 0 and some is None:
            if dim == 0:
                each = shape[0] // cut.size
                some = (cut.rank * each, (cut.rank + 1) * each)
                if groups != 1 or set(made.numbers) != {shape[0]}:
                    return None
            dim, shape = dim - 1, shape[1:]
        elif kind == "Concatenate" and some is None:
            parts = len(made.numbers)
            if operation.dim == dim:
                if groups % parts:
                    return None
                groups //= parts
            shape = tuple(n // parts if at == operation.dim else n for at, n in enumerate(shape))
        elif kind != "Interleave" or operation.dim == dim:
            return None
    if shape != made.shape:
        return None
    of_each = None if some is not None else TensorSlice(shape, dim, groups, cut.rank, cut.size)
    return SliceReading(cut.own_shape, of_each, some)


@contextlib.contextmanager
def noting_how(made: dict[str, Made], shapes: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Within transformers loads tensors of ``shapes``; ``made`` is told how params come from them."""
    from transformers import core_model_loading

    def noting(convert: Any) -> Any:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            numbers = tuple(map(len, self.collected_tensors.values()))
            keys = tuple({key: None for found in self.layer_targets.values() for key in found})
            sources = {tuple(shapes[key].shape) for key in keys}
            converted = convert(self, *args, **kwargs)
            operations = tuple(getattr(self, "operations", ())) if len(converted) == len(sources) == 1 else None
            made.update(dict.fromkeys(converted, Made(keys, operations, next(iter(sources), ()), numbers)))
            return converted

        return noted

    with contextlib.ExitStack() as stack:
        for name in ("WeightRenaming", "WeightConverter"):
            class_: Any = getattr(core_model_loading, name)
            stack.enter_context(replaced(class_, "convert", noting(class_.convert)))
        yield


@contextlib.contextmanager
def reading_slices(metas: Mapping[str, torch.Tensor], readings: Mapping[str, SliceReading]) -> Iterator[None]:
    """Within transformers reads for these params, of which ``metas`` has those it asks about, only what is here.

    A version of transformers without that step reads all of them.
    """
    from transformers import core_model_loading

    by_meta = {id(metas[name]): reading for name, reading in readings.items()}

    class Step:
        def __init__(self, param: torch.Tensor):
            self._reading = by_meta[id(param)]

        def shard_tensor(self, tensor: Any, tensor_idx: Any = None, device: Any = None, dtype: Any = None) -> Any:
            return self._reading.read(tensor, tensor_idx, dtype)

    if not hasattr(core_model_loading, "DtensorShardOperation"):
        yield
        return
    with (
        replaced(core_model_loading, "is_dtensor", lambda param: id(param) in by_meta),
        replaced(core_model_loading, "DtensorShardOperation", Step),
    ):
        yield
