"""The CUDA face of gemini.kernels without a GPU: kernels that run on the host, and memory that the host may not read.

``EmulatedKernels`` is ``CudaKernels`` over a native module whose functions run the bodies of the CUDA kernels thread
after thread (emulated_device.cpp), so that everything of Python that a GPU would run runs here, with its bits. What a
kernel leaves in device memory for the host (sums of squares, flags) is of a class that refuses every read before
``fetch`` has brought it, and ``fetch`` counts: how often a step waits for the device is a number. ``EmulatedGpu`` is
the stand-in device that knows which memory is the host's: what is not is worked on by those kernels.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gemini import kernels
from gemini.kernels import NORM_BLOCK
from gemini.kernels.cuda import CudaKernels, NormWorkspace
from gemini.testing import StandinDevice

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROOT = Path(__file__).resolve().parents[2]
# To compile takes longer than to run, and the bits are those of every level.
_FLAGS = ["-std=c++17", "-Og", "-ffp-contract=off", "-Wno-unknown-pragmas", "-shared", "-fPIC"]


@cache
def library() -> ctypes.CDLL:
    """The bodies, compiled once in a process; needs g++."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "device.so"
        source = Path(__file__).parent / "emulated_device.cpp"
        subprocess.run(["g++", *_FLAGS, str(source), "-o", str(built)], check=True, cwd=_ROOT)
        return ctypes.CDLL(str(built))


class EmulatedModule:
    """The CUDA part of gemini._C: the same names and arguments, on host addresses."""

    def __init__(self) -> None:
        self._library = library()
        self.launches: Counter[str] = Counter()
        self.segments: list[int] = []
        """Of each Adam launch."""

    def Scalars(self, kernel: str, values: Sequence[float]) -> tuple[str, Sequence[float]]:  # noqa: N802 - a class
        return kernel, values

    def CudaSegment(self, begin: int, end: int, scalars: tuple[Any, ...], dither: int) -> tuple[Any, ...]:  # noqa: N802
        return begin, end, scalars, dither

    def CudaNormPlaces(self, *addresses: int) -> tuple[int, ...]:  # noqa: N802
        assert len(addresses) == 4 and all(addresses[2:]), "only sums of nothing have no place"
        return addresses

    def cuda_update(
        self, device: int, stream: int, weights: int, residual: int, states: Sequence[int], grad: int, dtype: int,
        segments: Sequence[tuple[Any, ...]], grad_scale: int, stop: int,
    ) -> None:  # fmt: skip
        self.launches["update"] += 1
        self.segments.append(len(segments))
        count = len(segments)
        bounds = (ctypes.c_int64 * (2 * count))(*(bound for begin, end, *_ in segments for bound in (begin, end)))
        rules = (ctypes.c_char_p * count)(*(kernel.encode() for _, _, (kernel, _), _ in segments))
        every = [value for _, _, (_, values), _ in segments for value in values]
        lengths = (ctypes.c_int * count)(*(len(values) for _, _, (_, values), _ in segments))
        self._library.update(
            _pointer(weights), _pointer(residual), (ctypes.c_size_t * len(states))(*states), len(states),
            _pointer(grad), dtype, bounds, rules, (ctypes.c_float * len(every))(*every), lengths, count,
            _pointer(grad_scale), _pointer(stop),
        )  # fmt: skip

    def cuda_update_compact(
        self, device: int, stream: int, weights: int, residual: int, states: Sequence[int], scales: Sequence[int],
        grad: int, dtype: int, segments: Sequence[tuple[Any, ...]], grad_scale: int, stop: int,
    ) -> None:  # fmt: skip
        self.launches["update_compact"] += 1
        count = len(segments)
        bounds = (ctypes.c_int64 * (2 * count))(*(bound for begin, end, *_ in segments for bound in (begin, end)))
        rules = (ctypes.c_char_p * count)(*(kernel.encode() for _, _, (kernel, _), _ in segments))
        every = [value for _, _, (_, values), _ in segments for value in values]
        lengths = (ctypes.c_int * count)(*(len(values) for _, _, (_, values), _ in segments))
        dithers = (ctypes.c_uint32 * count)(*(dither for *_, dither in segments))
        self._library.update_compact(
            _pointer(weights), _pointer(residual), (ctypes.c_size_t * len(states))(*states),
            (ctypes.c_size_t * len(scales))(*scales), len(states), _pointer(grad), dtype, bounds, rules,
            (ctypes.c_float * len(every))(*every), lengths, dithers, count, _pointer(grad_scale),
            _pointer(stop),
        )  # fmt: skip

    def cuda_copy_grad(
        self, device: int, stream: int, dst: int, dst_dtype: int, src: int, src_dtype: int, n: int, places: Any
    ) -> None:
        self._grad("copy_grad", 1 if dst_dtype == src_dtype else 2, dst, src, src_dtype, n, places)

    def cuda_accumulate_grad(
        self, device: int, stream: int, acc: int, src: int, src_dtype: int, n: int, places: Any
    ) -> None:
        self._grad("accumulate_grad", 3, acc, src, src_dtype, n, places)

    def cuda_sum_grad24(
        self, device: int, stream: int, hi: int, lo: int, src: int, src_dtype: int, n: int, adding: bool, places: Any
    ) -> None:
        self._grad("sum_grad24", 5 if adding else 4, hi, src, src_dtype, n, places, lo)

    def cuda_sum_squares(self, device: int, stream: int, src: int, dtype: int, n: int, places: Any) -> None:
        self._grad("sum_squares", 0, 0, src, dtype, n, places)

    def _grad(
        self, name: str, doing: int, dst: int, src: int, dtype: int, n: int, places: Sequence[int], lo: int = 0
    ) -> None:
        self.launches[name] += 1
        blocks, tiles, arrived, nonfinite = map(_pointer, places)
        assert ctypes.cast(arrived, ctypes.POINTER(ctypes.c_int))[0] == 0
        self._library.grad(doing, _pointer(dst), _pointer(lo), _pointer(src), dtype, ctypes.c_int64(n), blocks)
        self._library.add_tiles(blocks, ctypes.c_int64(-(-n // NORM_BLOCK)), tiles, nonfinite)

    def cuda_clip_factor(
        self, device: int, stream: int, tiles: int, ends: int, count: int, max_norm: float, *places: int
    ) -> None:
        self.launches["clip_factor"] += 1
        number = ctypes.c_int64(count), ctypes.c_double(max_norm)
        self._library.clip_factor(_pointer(tiles), _pointer(ends), *number, *map(_pointer, places))

    def cuda_split_master(self, device: int, stream: int, master: int, hi: int, lo: int, n: int) -> None:
        self._library.split_master(*map(_pointer, (master, hi, lo)), ctypes.c_int64(n))

    def cuda_join_master(self, device: int, stream: int, hi: int, lo: int, out: int, n: int) -> None:
        self._library.join_master(*map(_pointer, (hi, lo, out)), ctypes.c_int64(n))


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address or None)


_READS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__bool__,
    torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.__repr__, torch.equal,
    torch.Tensor.equal, torch.Tensor.nonzero, torch.nonzero, torch.Tensor.is_nonzero, torch.allclose,
}  # fmt: skip


class OnDevice(torch.Tensor):
    """Memory of the device: what torch computes from it stays there, and the host cannot look at it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise AssertionError(f"the host read device memory ({func.__name__}) without waiting for it")
        return super().__torch_function__(func, types, args, kwargs or {})


class EmulatedKernels(CudaKernels):
    """Also counts: ``num_fetched`` are the tensors that each wait of the host brought."""

    def __init__(self) -> None:
        self.module = EmulatedModule()
        super().__init__(self.module, DTYPES)
        self.num_fetched: list[int] = []

    @property
    def num_fetches(self) -> int:
        return len(self.num_fetched)

    def stream(self, device: torch.device) -> None:
        return None

    def places(self, tensor: Tensor, nonfinite: Tensor | None = None) -> NormWorkspace:
        places = super().places(tensor, nonfinite)
        places.tiles = places.tiles.as_subclass(OnDevice)
        return places

    def new_flag(self, device: torch.device) -> Tensor:
        return super().new_flag(device).as_subclass(OnDevice)

    def clip_factor(self, many: Sequence[Sequence[Tensor]], max_norm: float) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C.DisableTorchFunctionSubclass():  # the norm is the program's, who may wait for it
            norm, factor, nonfinite = super().clip_factor(many, max_norm)
        return norm.as_subclass(Tensor), factor.as_subclass(OnDevice), nonfinite.as_subclass(OnDevice)

    def fetch(self, tensors: Sequence[Tensor]) -> list[float]:
        self.num_fetched.append(len(tensors))
        with torch._C.DisableTorchFunctionSubclass():
            return super().fetch(tensors)


class EmulatedGpu(StandinDevice):
    """The stand-in, which knows the host's memory from its own."""

    def __init__(self, **how: Any):
        super().__init__(**how)
        self._of_host: list[tuple[int, int]] = []

    def make_host_buffer(self, num_bytes: int) -> Tensor:
        buffer = super().make_host_buffer(num_bytes)
        self._of_host.append((buffer.data_ptr(), buffer.data_ptr() + num_bytes))
        return buffer

    def holds(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return not any(begin <= address < end for begin, end in self._of_host)


def emulate(monkeypatch: pytest.MonkeyPatch, gpu: EmulatedGpu | None = None) -> EmulatedKernels:
    """From now on tensors of ``gpu`` (without one: all tensors) are worked on by the bodies of the CUDA kernels."""
    emulated = EmulatedKernels()
    monkeypatch.setattr(kernels, "_cuda_for", lambda tensor: emulated if gpu is None or gpu.holds(tensor) else None)
    return emulated
