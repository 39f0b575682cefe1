"""The CUDA kernels behind gemini.kernels: the same functions for tensors of a CUDA device, the same bits.

Work is enqueued on torch's current stream of the tensors' device, and nothing waits: sums of squares are left there, in
`NormWorkspace`, for whoever can wait later or never (`clip_factor` turns them into the factor that clips without the
host; it learns once, by a copy, how many tiles the gradients of a model have). The host waits in `fetch` alone.
Arguments were checked by gemini.kernels. Kernels are named here as csrc/cuda has them; :mod:`gemini.kernels.nvrtc`
compiles and launches them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gemini.kernels.arrays import Addresses, Arrays, Segment, kernel_and_scalars
from gemini.kernels.nvrtc import THREADS, Driver
from gemini.kernels.reference import NORM_BLOCK, NORM_TILE
from gemini.kernels.sums import DeviceSums, Sums

_PER_THREAD, _PER_BLOCK, _MOST_SEGMENTS = 8, 2048, 44
"""kPerThread, kPerBlock and kMaxSegments of csrc/cuda/update_body.cuh."""

_DTYPES = {
    torch.float32: "gemini::Dtype::f32",
    torch.bfloat16: "gemini::Dtype::bf16",
    torch.float16: "gemini::Dtype::f16",
}

_RULES = {"adamw": "Adam<true>", "adam": "Adam<false>"}  # of csrc/rules.h, where the struct is not named as the rule is


class NormWorkspace:
    """Device scratch of one gradient kernel: sums per tile and the flag for inf and NaN; its own until it has run.

    Args:
        nonfinite: int32, one element: becomes 1 if one of the sums is not finite. Several calls may share it.
        arrived: int32, one element, 0 between kernels: those of one stream may share it.

    Attributes:
        tiles: fp64, a sum of squares per NORM_TILE elements.
    """

    def __init__(self, n: int, nonfinite: Tensor, arrived: Tensor):
        blocks, tiles = -(-n // NORM_BLOCK), -(-n // NORM_TILE)
        self._blocks = torch.empty(blocks, dtype=torch.float64, device=arrived.device)
        self._arrived, self._nonfinite = arrived, nonfinite
        self.tiles = torch.empty(tiles, dtype=torch.float64, device=arrived.device)

    def argument(self) -> Any:
        """NormPlaces of csrc/cuda/grad_body.cuh."""
        return _pointers(*map(_address, (self._blocks, self.tiles, self._arrived, self._nonfinite)))


class CudaKernels:
    """The functions of gemini.kernels on CUDA tensors, by kernels that ``driver`` starts."""

    def __init__(self, driver: Driver):
        self._driver = driver
        self._shared: dict[tuple[int, int], Tensor] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream on which work is enqueued now; None if the device has only one."""
        return torch.cuda.current_stream(device)

    def places(self, tensor: Tensor, nonfinite: Tensor | None = None) -> NormWorkspace:
        """For a kernel over ``tensor`` that is enqueued next; ``nonfinite`` is a flag of the caller's, if he wants one.

        What no caller looks at is shared by all kernels of a stream, which run one after the other: a launch costs no
        memset beside it.
        """
        where = self._where(tensor)
        shared = self._shared.get(where)
        if shared is None:
            shared = self._shared[where] = torch.zeros(2, dtype=torch.int32, device=tensor.device)
        return NormWorkspace(tensor.numel(), shared[1:] if nonfinite is None else nonfinite, shared[:1])

    def fetch(self, tensors: Sequence[Tensor]) -> list[float]:
        """The elements of fp64 tensors of one device, one after the other: the host waits for its current stream."""
        return (torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]).tolist()

    def new_flag(self, device: torch.device) -> Tensor:
        """An int32 that is 0."""
        return torch.zeros(1, dtype=torch.int32, device=device)

    def update(
        self,
        arrays: Arrays,
        at: Addresses,
        is_compact: bool,
        segments: Sequence[Segment],
        grad_scale: Tensor | None,
        stop: Tensor | None,
    ) -> None:
        """One update of all segments in one launch (of 44 each, and one for each rule in turn).

        ``grad_scale``: fp32, one element on the device, instead of the one of the scalars; ``stop``: int32, one element
        there: nothing is updated if it is not 0 by then.
        """
        is_aligned = not any(address % 16 for address in (at.weights, at.residual, at.grad, *at.states))
        split = "" if is_compact else f"{_cpp(at.residual != 0)}, "
        arguments = f"{_DTYPES[arrays.grad.dtype]}, {split}{_cpp(is_aligned)}"
        states = (*at.states, *(0,) * (4 - len(at.states)))
        scales = (*at.scales, *(0,) * (4 - len(at.scales)))
        given = at.weights, at.residual, at.grad, len(at.states), *states, *scales, _address(grad_scale), _address(stop)
        where, name = self._where(arrays.weights), "compact" if is_compact else "update"
        parts: list[bytes] = []
        dithers: list[int] = []
        blocks = [0]
        rule = ""

        def launch() -> None:
            launched = _launch(given, parts, dithers, blocks)
            kernel = f"{name}_kernel<gemini::{rule}, {arguments}>"
            self._driver.launch(*where, kernel, blocks[-1], launched)
            # For the next one, which begins with its first block.
            del parts[:], dithers[:], blocks[1:]

        for segment in segments:
            begin, end = segment.begin, segment.end
            if end <= begin:
                continue
            of, scalars = _packed(segment.scalars)
            if parts and (of != rule or len(dithers) == _MOST_SEGMENTS):
                launch()
            rule = of
            parts += _BOUNDS.pack(begin, end), scalars
            dithers.append(segment.dither if is_compact else 0)
            blocks.append(blocks[-1] - (begin // _PER_THREAD * _PER_THREAD - end) // _PER_BLOCK)
        if parts:
            launch()

    def split_master(self, master: Tensor, hi: Tensor, lo: Tensor) -> None:
        self._each("split_kernel", master, hi, lo)

    def join_master(self, hi: Tensor, lo: Tensor, out: Tensor) -> None:
        self._each("join_kernel", hi, lo, out)

    def _each(self, kernel: str, *tensors: Tensor) -> None:
        n = tensors[0].numel()
        if n:
            arguments = (*(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors), ctypes.c_int64(n))
            self._driver.launch(*self._where(tensors[0]), kernel, min(-(-n // THREADS), 65536), *arguments)

    def copy_grad(self, dst: Tensor, src: Tensor) -> Sums:
        return self._summing("copy" if dst.dtype == src.dtype else "widen", dst, None, src)

    def accumulate_grad(self, acc: Tensor, src: Tensor) -> Sums:
        return self._summing("accumulate", acc, None, src)

    def sum_grad24(self, hi: Tensor, lo: Tensor, src: Tensor, adding: bool) -> Sums:
        return self._summing("add24" if adding else "first24", hi, lo, src)

    def sum_squares(self, src: Tensor, nonfinite: Tensor | None) -> Sums:
        return self._summing("read", None, None, src, nonfinite=nonfinite)

    def _summing(
        self, doing: str, dst: Tensor | None, lo: Tensor | None, src: Tensor, *, nonfinite: Tensor | None = None
    ) -> Sums:
        """Enqueue a kernel that leaves the sums of squares of what it writes, or reads, on the device."""
        n, places = src.numel(), self.places(src, nonfinite)
        if n == 0:
            return []
        at = _address(dst), _address(lo), src.data_ptr()
        is_aligned = not (at[0] % 16 or at[1] % 8 or at[2] % 16)
        kernel = f"grad_kernel<gemini::cuda::Doing::{doing}, {_DTYPES[src.dtype]}, {_cpp(is_aligned)}>"
        # A warp of 32 threads takes a block of the norm.
        blocks = -(-n // (NORM_BLOCK * THREADS // 32))
        arguments = (*map(ctypes.c_void_p, at), ctypes.c_int64(n), places.argument())
        self._driver.launch(*self._where(src), kernel, blocks, *arguments)
        return [DeviceSums(places.tiles, self.stream(src.device), self.fetch)]

    def _where(self, tensor: Tensor) -> tuple[int, int]:
        """The number of the device, and the handle of the stream there."""
        stream = self.stream(tensor.device)
        return tensor.get_device(), 0 if stream is None else stream.cuda_stream

    def clip_factor(self, many: Sequence[Sequence[Tensor]], max_norm: float) -> tuple[Tensor, Tensor, Tensor]:
        """From the tiles of each gradient (fp64, one device), each one's added in order and then all: the norm (fp64),
        min(1, max_norm / (norm + 1e-6)) (fp32), and whether the norm is not finite (int32). One element each.
        """
        tiles = torch.cat([part for parts in many for part in parts])
        ends = _ends_there(tuple(accumulate(sum(part.numel() for part in parts) for parts in many)), tiles.device)
        totals = torch.empty(len(many) + 1, dtype=torch.float64, device=tiles.device)
        norm, factor = totals[-1:], torch.empty(1, dtype=torch.float32, device=tiles.device)
        nonfinite = torch.empty(1, dtype=torch.int32, device=tiles.device)
        arguments = (
            ctypes.c_void_p(_address(tiles)),
            ctypes.c_void_p(_address(ends)),
            ctypes.c_int64(len(many)),
            ctypes.c_double(max_norm),
            ctypes.c_void_p(_address(totals)),
            _pointers(*map(_address, (norm, factor, nonfinite))),  # ClipPlaces of csrc/cuda/grad_body.cuh
        )
        self._driver.launch(*self._where(tiles), "clip_kernel", 1, *arguments)
        return norm, factor, nonfinite


@lru_cache(maxsize=8)
def _ends_there(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied once for a model, whose gradients have the same tiles in every step."""
    return torch.tensor(ends, dtype=torch.int64, device=device)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _cpp(value: bool) -> str:
    return "true" if value else "false"


def _pointers(*addresses: int) -> Any:
    """A struct of nothing but pointers."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


_HEAD = struct.Struct("<3Qi4x8Q2Qi4x")
"""Of Launch in csrc/cuda/update_body.cuh what is before its segments: Arrays of csrc/rules.h, two pointers, a count."""

_BOUNDS = struct.Struct("<2q")  # how a segment begins; scalars follow


@lru_cache(maxsize=256)
def _packed(scalars: tuple[Any, ...]) -> tuple[str, bytes]:
    """The struct of csrc/rules.h that scalars are of, and its bytes, to the next multiple of 8."""
    rule, values = kernel_and_scalars(scalars)
    packed = struct.pack(f"<{len(values)}f", *values)
    return _RULES.get(rule) or "".join(map(str.capitalize, rule.split("_"))), packed + bytes(-len(packed) % 8)


def _launch(given: Sequence[int], parts: Sequence[bytes], dithers: Sequence[int], blocks: Sequence[int]) -> Any:
    """Launch of csrc/cuda/update_body.cuh."""
    count = len(dithers)
    missing = _MOST_SEGMENTS - count
    whole = b"".join(
        (
            _HEAD.pack(*given, count),
            *parts,
            bytes(missing * (_BOUNDS.size + len(parts[1]))),
            struct.pack(f"<{count}I{4 * missing}x{count + 1}q{8 * missing}x", *dithers, *blocks),
        )
    )
    return (ctypes.c_char * len(whole)).from_buffer_copy(whole)
