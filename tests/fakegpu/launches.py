"""Gemini's own CUDA kernels on the devices of ``cudart.cpp``: their bodies, run on the host, in the order of streams.

Those of the host are watched too: a native kernel that works on page-locked memory comes after the copies of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from gemini import kernels
from gemini.kernels import COMPACT_BLOCK, NORM_BLOCK, NORM_TILE, Arrays
from gemini.kernels.cuda import CudaKernels
from gemini.train import engine
from tests.fakegpu.computing import Computing, alias, host_uses, launch
from tests.native.emulated_cuda import DTYPES, EmulatedModule

_BYTES = {0: 4, 1: 2, 2: 2}
"""Of an element, by the number of its dtype."""

_HOST = {
    "update": ("weights", "residual", "states"),
    "copy_grad": ("dst",), "accumulate_grad": ("acc",), "sum_grad24": ("hi", "lo"), "sum_squares": (),
    "split_master": ("hi", "lo"), "join_master": ("out",),
}  # fmt: skip
"""The kernels there are, and which of their tensors they write."""


class FakeModule(EmulatedModule):
    """The CUDA part of gemini._C, which is given addresses of a device and a stream."""

    def cuda_update(
        self, device: int, stream: int, weights: int, residual: int, states: Sequence[int], grad: int, dtype: int,
        segments: Sequence[tuple[Any, ...]], grad_scale: int, stop: int,
    ) -> None:  # fmt: skip
        begin, end = segments[0][0], segments[-1][1]

        def used(address: int, size: int) -> tuple[int, int]:
            return (address + begin * size, (end - begin) * size) if address else (0, 0)

        written = [used(weights, 2 if residual else 4), used(residual, 2), *(used(state, 4) for state in states)]
        launch(stream, "update", [used(grad, _BYTES[dtype]), (grad_scale, 4), (stop, 4)], written)
        arrays = _alias(weights), _alias(residual), [*map(_alias, states)], _alias(grad)
        super().cuda_update(device, stream, *arrays, dtype, segments, _alias(grad_scale), _alias(stop))

    def cuda_update_compact(
        self, device: int, stream: int, weights: int, residual: int, states: Sequence[int], scales: Sequence[int],
        grad: int, dtype: int, segments: Sequence[tuple[Any, ...]], grad_scale: int, stop: int,
    ) -> None:  # fmt: skip
        begin, end = segments[0][0], segments[-1][1]

        def used(address: int, size: int) -> tuple[int, int]:
            return address + begin * size, (end - begin) * size

        of_scales = [(scale + begin // COMPACT_BLOCK, -(-(end - begin) // COMPACT_BLOCK)) for scale in scales]
        written = [used(weights, 2), used(residual, 1), *(used(state, 1) for state in states), *of_scales]
        launch(stream, "update_compact", [used(grad, _BYTES[dtype]), (grad_scale, 4), (stop, 4)], written)
        arrays = _alias(weights), _alias(residual), [*map(_alias, states)], [*map(_alias, scales)], _alias(grad)
        super().cuda_update_compact(device, stream, *arrays, dtype, segments, _alias(grad_scale), _alias(stop))

    def cuda_clip_factor(
        self, device: int, stream: int, tiles: int, ends: int, count: int, max_norm: float, *places: int
    ) -> None:
        num_tiles = ctypes.c_int64.from_address(_alias(ends) + 8 * (count - 1)).value
        written = zip(places, (8 * count, 8, 4, 4), strict=True)  # totals, norm, factor, nonfinite
        launch(stream, "clip_factor", [(tiles, 8 * num_tiles), (ends, 8 * count)], [*written])
        super().cuda_clip_factor(device, stream, _alias(tiles), _alias(ends), count, max_norm, *map(_alias, places))

    def cuda_copy_grad(
        self, device: int, stream: int, dst: int, dst_dtype: int, src: int, src_dtype: int, n: int, places: Any
    ) -> None:
        self._launch(stream, "copy_grad", [(src, n * _BYTES[src_dtype])], [(dst, n * _BYTES[dst_dtype])], n, places)
        super().cuda_copy_grad(
            device, stream, _alias(dst), dst_dtype, _alias(src), src_dtype, n, tuple(map(_alias, places))
        )

    def cuda_accumulate_grad(
        self, device: int, stream: int, acc: int, src: int, src_dtype: int, n: int, places: Any
    ) -> None:
        self._launch(stream, "accumulate_grad", [(src, n * _BYTES[src_dtype])], [(acc, n * 4)], n, places)
        super().cuda_accumulate_grad(device, stream, _alias(acc), _alias(src), src_dtype, n, tuple(map(_alias, places)))

    def cuda_sum_grad24(
        self, device: int, stream: int, hi: int, lo: int, src: int, src_dtype: int, n: int, adding: bool, places: Any
    ) -> None:
        written = [(hi, 2 * n), (lo, n)]
        self._launch(
            stream, "sum_grad24", [(src, n * _BYTES[src_dtype]), *(written if adding else [])], written, n, places
        )
        addresses = map(_alias, (hi, lo, src))
        super().cuda_sum_grad24(device, stream, *addresses, src_dtype, n, adding, tuple(map(_alias, places)))

    def cuda_sum_squares(self, device: int, stream: int, src: int, dtype: int, n: int, places: Any) -> None:
        self._launch(stream, "sum_squares", [(src, n * _BYTES[dtype])], [], n, places)
        super().cuda_sum_squares(device, stream, _alias(src), dtype, n, tuple(map(_alias, places)))

    def cuda_split_master(self, device: int, stream: int, master: int, hi: int, lo: int, n: int) -> None:
        launch(stream, "split_master", [(master, 4 * n)], [(hi, 2 * n), (lo, 2 * n)])
        super().cuda_split_master(device, stream, _alias(master), _alias(hi), _alias(lo), n)

    def cuda_join_master(self, device: int, stream: int, hi: int, lo: int, out: int, n: int) -> None:
        launch(stream, "join_master", [(hi, 2 * n), (lo, 2 * n)], [(out, 4 * n)])
        super().cuda_join_master(device, stream, _alias(hi), _alias(lo), _alias(out), n)

    def _launch(self, stream: int, name: str, reads: Any, writes: Any, n: int, places: Sequence[int]) -> None:
        blocks, tiles, arrived, nonfinite = places
        left = [(blocks, 8 * -(-n // NORM_BLOCK)), (tiles, 8 * -(-n // NORM_TILE)), (arrived, 4), (nonfinite, 4)]
        launch(stream, name, reads, [*writes, *left])


def _alias(address: int) -> int:
    return alias(address) if address else 0


def _watched(name: str, kernel: Callable[..., Any], written: Sequence[str]) -> Callable[..., Any]:
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]

    @wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        arrays: Arrays | None = given.pop("arrays", None)
        for argument, value in {**given, **({} if arrays is None else arrays._asdict())}.items():
            for tensor in value.values() if isinstance(value, Mapping) else (value,):
                if hasattr(tensor, "is_cuda"):
                    host_uses(tensor, name, writes=argument in written)
        return kernel(*args, **kwargs)

    return run


def install() -> None:
    """From now on Gemini's kernels run on CUDA tensors, and the end of a model, which is without modes, keeps ours."""
    kernels._cuda = CudaKernels(FakeModule(), DTYPES)
    for name, written in _HOST.items():
        setattr(kernels, name, _watched(name, getattr(kernels, name), written))
    without_modes = engine._disable_current_modes

    @contextmanager
    def only_computing() -> Iterator[None]:
        with without_modes(), Computing():
            yield

    engine._disable_current_modes = only_computing  # type: ignore[assignment]
