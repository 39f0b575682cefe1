"""How an operation runs when a step is traced ahead of time: what is computed is fake, what decides is real.

Models decide by values of a few small integer tensors what they do: a mask of ones is dropped, positions that count up
mean one sequence, a drawn number skips a layer. With fake ones transformers takes other branches than a real step (it
materializes masks of S x S, which keeps attention from its fused kernel). So what follows from integers, constants and
single numbers alone is computed, and branches are those of the batch at hand. Weights and inputs of floating point are
fake, and so is everything that depends on them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)

MOST_REAL = 2**22
"""Elements of the largest tensor that is computed with its values. A mask of S x S may be more, and none decides."""

_aten = torch.ops.aten
_grouped_mm = getattr(_aten, "_grouped_mm", None)
_FACTORIES = {
    _aten.arange, _aten.zeros, _aten.ones, _aten.full, _aten.empty, _aten.scalar_tensor, _aten.rand, _aten.randint,
    _aten.eye, _aten.linspace, _aten.randperm, _aten.tril_indices, _aten.triu_indices,
}  # fmt: skip
_CPU = torch.device("cpu")
_PLAIN = {
    _aten.view.default, _aten._unsafe_view.default, _aten.t.default, _aten.transpose.int, _aten.expand.default,
    _aten.detach.default, _aten.unsqueeze.default, _aten.slice.Tensor, _aten.mm.default, _aten.mul.Tensor,
    _aten.add.Tensor, _aten.neg.default, _aten.rsqrt.default, _aten.silu.default, _aten.pow.Tensor_Scalar,
}  # fmt: skip
"""Most of what runs: one result, whose shape torch's own shape functions give. Asking them without the way through
``FakeTensorMode``, which looks for many special cases first, saves a third of the time of a trace."""


class FakeRunner:
    """Runs operations for a meter, inside of a fake tensor mode."""

    def __init__(self, mode: FakeTensorMode):
        self._mode = mode
        self._kinds: dict[int, tuple[Any, bool]] = {}  # by id: hashing an operation takes longer

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind = self._kinds.get(id(func))
        if kind is None:
            kind = self._kinds[id(func)] = (getattr(func, "_overloadpacket", func), func in _PLAIN)
        packet, plain = kind
        if packet is _grouped_mm and args[0].dtype is not torch.bfloat16:
            return _grouped_mm_of_any_dtype(func, args, kwargs)
        if plain and not kwargs and all(type(a) is FakeTensor for a in args if isinstance(a, torch.Tensor)):
            with in_kernel_invocation_manager(self._mode):
                out = func(*args)
            return FakeTensor(self._mode, out, _CPU)
        if self._known(packet, args, kwargs):
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
            return _map(out, self._faked)
        return func(*args, **kwargs)

    def _known(self, packet: Any, args: Any, kwargs: Any) -> bool:
        """Whether all that goes in has values, and what comes out may be worth having them."""
        inputs = [value for value in _flat(args) if isinstance(value, torch.Tensor)]
        if kwargs:
            inputs += [value for value in kwargs.values() if isinstance(value, torch.Tensor)]
        if not inputs:
            return packet in _FACTORIES and _is_small_factory(packet, args, kwargs)
        shape: list[int] = []
        for tensor in inputs:
            if isinstance(tensor, FakeTensor) or tensor.is_meta:
                return False
            shape = _broadcast(shape, list(tensor.shape))
        return _numel(shape) <= MOST_REAL

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Masks of two dimensions are made of floats sometimes; what has more is for computing, not for deciding."""
        if isinstance(tensor, FakeTensor) or tensor.dim() <= 2 or not tensor.is_floating_point():
            return tensor
        with self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _is_small_factory(packet: Any, args: Any, kwargs: Any) -> bool:
    if torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return False
    dtype = kwargs.get("dtype")
    if packet is _aten.arange:
        numbers = [a for a in args if isinstance(a, (int, float))]
        whole = all(isinstance(a, int) for a in numbers) if dtype is None else not dtype.is_floating_point
        return whole and max(map(abs, numbers), default=0) <= MOST_REAL
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else []
    if packet is _aten.randint:
        sizes = next((a for a in args if isinstance(a, (list, tuple))), [])
        return _numel(sizes) <= MOST_REAL
    if packet in (_aten.eye, _aten.linspace, _aten.randperm, _aten.tril_indices, _aten.triu_indices):
        return dtype is not None and not dtype.is_floating_point and args[0] <= MOST_REAL**0.5
    if _numel(sizes) <= 1:
        return True
    if packet in (_aten.ones, _aten.zeros, _aten.full) and len(sizes) <= 2:
        return _numel(sizes) <= MOST_REAL
    return dtype is not None and not dtype.is_floating_point and _numel(sizes) <= MOST_REAL


def _grouped_mm_of_any_dtype(func: Any, args: Any, kwargs: Any) -> Any:
    """The shape check in torch knows bf16 only; CPUs, and CUDA since torch 2.10, take fp32 and fp16 as well."""
    first, second, *rest = args
    dtype = kwargs.pop("out_dtype", None) or first.dtype
    out = func(first.to(torch.bfloat16), second.to(torch.bfloat16), *rest, **kwargs)
    return out.to(dtype)


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _map(tree: Any, fn: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(value, fn) for value in tree)
    return tree


def _broadcast(one: list[int], other: list[int]) -> list[int]:
    size = max(len(one), len(other))
    one, other = [1] * (size - len(one)) + one, [1] * (size - len(other)) + other
    return [max(a, b) for a, b in zip(one, other, strict=True)]


def _numel(shape: Any) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
