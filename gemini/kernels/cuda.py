"""The CUDA kernels behind gemini.kernels: the same functions for tensors of a CUDA device, the same bits.

Work is enqueued on torch's current stream of the tensors' device, and nothing waits: sums of squares are left there,
one :class:`DeviceSums` for all tiles of a kernel, and ``resolve`` brings those of any number of lists to the host in
one copy. Tiles are added up on the host, in their order, whoever summed them. Kernels are named here as csrc/cuda has
them; :mod:`gemini.kernels.nvrtc` compiles and launches them.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gemini.kernels.arrays import Addresses, Arrays, Segment, kernel_and_scalars
from gemini.kernels.nvrtc import THREADS, Driver
from gemini.kernels.reference import NORM_BLOCK, NORM_TILE, total

_PER_THREAD, _PER_BLOCK, _MOST_SEGMENTS = 8, 2048, 44
"""kPerThread, kPerBlock and kMaxSegments of csrc/cuda/update_body.cuh."""

_DTYPES = {
    torch.float32: "gemini::Dtype::f32",
    torch.bfloat16: "gemini::Dtype::bf16",
    torch.float16: "gemini::Dtype::f16",
}

_RULES = {"adamw": "Adam<true>", "adam": "Adam<false>"}  # of csrc/rules.h, where the struct is not named as the rule is


# ---- sums of squares -----------------------------------------------------------------------------------------------

Fetch = Callable[[Sequence[Tensor]], list[float]]


class DeviceSums:
    """The sums of some tiles, which stand on a device or will when it comes to that, until :func:`resolve` brings them.
    ``tiles``: fp64, a sum per tile; freed when the numbers are here. ``stream``: on which they are computed; None if
    the device has only one. ``fetch``: copies such tensors of the device, one after the other, to the host, behind
    everything on its stream.
    """

    __slots__ = ("_fetch", "_found", "_stream", "_tiles")

    def __init__(self, tiles: Tensor, stream: torch.cuda.Stream | None, fetch: Fetch):
        self._tiles: Tensor | None = tiles
        self._stream, self._fetch = stream, fetch
        self._found: list[float] = []

    @property
    def is_here(self) -> bool:
        """Whether the numbers are on the host."""
        return self._tiles is None

    @property
    def device(self) -> torch.device:
        """The device where they are, before they are here."""
        assert self._tiles is not None
        return self._tiles.device

    def on_device(self) -> Tensor:
        """The tiles, for what the current stream is given from now on."""
        assert self._tiles is not None, "brought to the host and freed"
        if self._stream is not None:
            current = torch.cuda.current_stream(self._tiles.device)
            if current != self._stream:
                current.wait_stream(self._stream)
        return self._tiles

    def note_over(self) -> None:
        """The kernel that makes them is over: who asks for them waits for nothing that its stream was given since."""
        self._stream = None


Sums = list["float | DeviceSums"]
"""Sums of squares of norm tiles, in order; what is on a device counts for all its tiles."""


def resolve(many: Sequence[Sums]) -> list[list[float]]:
    """The numbers of all of them. For sums on a device the host waits, once, until it has done what it was given."""
    if DeviceSums not in {type(part) for sums in many for part in sums}:  # as those of every kernel on the CPU
        return cast(list[list[float]], list(many))
    by_device: dict[torch.device, list[DeviceSums]] = {}
    for sums in _unresolved(many):
        by_device.setdefault(sums.device, []).append(sums)
    for several in by_device.values():
        tiles = [sums.on_device() for sums in several]
        values = iter(several[0]._fetch(tiles))
        for sums, own in zip(several, tiles, strict=True):
            sums._found = list(islice(values, own.numel()))
            sums._tiles = sums._stream = None
    return [
        [number for part in sums for number in (part._found if isinstance(part, DeviceSums) else (part,))]
        for sums in many
    ]


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor for gradients of this norm; 1 for one that is not finite."""
    return min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0


class ClipFactor:
    """Clipping whose numbers are where the sums of squares are, one element each: ``norm`` of all gradients (fp64),
    ``factor``, the ``clip_coefficient`` of it (fp32), and ``nonfinite`` (int32, not 0 if the norm is not finite). The
    ``sums`` are kept, so that the host can find the same.
    """

    def __init__(self, sums: Sequence[Sums], max_norm: float, norm: Tensor, factor: Tensor, nonfinite: Tensor):
        self.norm, self.factor, self.nonfinite = norm, factor, nonfinite
        self._sums, self._max_norm = sums, max_norm

    def coefficient(self) -> float:
        """The factor before it was rounded, found by the host, which waits for sums that it has not seen yet."""
        return clip_coefficient(math.sqrt(total([total(sums) for sums in resolve(self._sums)])), self._max_norm)

    def is_of(self, many: Sequence[Sums]) -> bool:
        """Whether these are its gradients' sums, all of them."""
        return [id(sums) for sums in self._sums] == [id(sums) for sums in many]


def nonfinite_flag(many: Sequence[Sums]) -> Tensor | None:
    """A flag (int32, one element: not 0 if some sum is not finite) where the sums are, computed there without a wait.
    None if all of them are numbers already: then it is for the host to look.
    """
    unresolved = _unresolved(many)
    if not unresolved:
        return None
    known = [[part for part in sums if not isinstance(part, DeviceSums) or part.is_here] for sums in many]
    tiles = [sums.on_device() for sums in unresolved]
    # Squares of fp32 and less: their sum is finite if they are. Less itself it is 0 then, else NaN, which the upper
    # half of its bits tells: three launches at most, where `isfinite` alone takes four.
    whole = (torch.cat(tiles) if len(tiles) > 1 else tiles[0]).sum(0, keepdim=True)
    flag = (whole - whole).view(torch.int32)[1:]
    return flag if all(math.isfinite(total(numbers)) for numbers in resolve(known)) else flag.fill_(1)


def _unresolved(many: Iterable[Sums]) -> list[DeviceSums]:
    """Each once, in order."""
    found = {id(part): part for sums in many for part in sums if isinstance(part, DeviceSums) and not part.is_here}
    return list(found.values())


# ---- kernels -------------------------------------------------------------------------------------------------------


class CudaKernels:
    """The functions of gemini.kernels on CUDA tensors, by kernels that ``driver`` starts."""

    def __init__(self, driver: Driver):
        self._driver = driver
        # Two numbers of each stream, whose kernels run one after the other: a launch costs no memset beside it.
        self._flags: dict[tuple[int, int], Tensor] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream on which work is enqueued now; None if the device has only one."""
        return torch.cuda.current_stream(device)

    def make_tiles(self, tensor: Tensor) -> Tensor:
        """Room for the sums of squares of ``tensor``: fp64, one per NORM_TILE elements."""
        return torch.empty(-(-tensor.numel() // NORM_TILE), dtype=torch.float64, device=tensor.device)

    def fetch(self, tensors: Sequence[Tensor]) -> list[float]:
        """The elements of fp64 tensors of one device, one after the other: the host waits for its current stream."""
        return (torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]).tolist()

    def update(
        self,
        arrays: Arrays,
        at: Addresses,
        is_compact: bool,
        segments: Sequence[Segment],
        grad_scale: Tensor | None,
        stop: Tensor | None,
    ) -> None:
        """One update of all segments, in one launch (of 44 each, and one for each rule in turn)."""
        is_aligned = not any(address % 16 for address in (at.weights, at.residual, at.grad, *at.states))
        split = "" if is_compact else f"{_cpp(at.residual != 0)}, "
        of_arrays = f"{_DTYPES[arrays.grad.dtype]}, {split}{_cpp(is_aligned)}"
        states, scales = ((*given, *(0,) * (4 - len(given))) for given in (at.states, at.scales))
        head = at.weights, at.residual, at.grad, len(at.states), *states, *scales, _address(grad_scale), _address(stop)
        where, name = self._where(arrays.weights), "compact" if is_compact else "update"
        for batch in _batches(segments, is_compact):
            kernel = f"{name}_kernel<gemini::{batch.rule}, {of_arrays}>"
            self._driver.launch(*where, kernel, batch.first_blocks[-1], batch.packed(head))

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

    def sum_squares(self, src: Tensor) -> Sums:
        return self._summing("read", None, None, src)

    def _summing(self, doing: str, dst: Tensor | None, lo: Tensor | None, src: Tensor) -> Sums:
        """Enqueue a kernel that leaves the sums of squares of what it writes, or reads, on the device."""
        n, where = src.numel(), self._where(src)
        if n == 0:
            return []
        if where not in self._flags:
            self._flags[where] = torch.zeros(2, dtype=torch.int32, device=src.device)
        # How many blocks have arrived, 0 between kernels, and a flag at which nobody looks.
        arrived, nonfinite = self._flags[where].split(1)
        sums, tiles = torch.empty(-(-n // NORM_BLOCK), dtype=torch.float64, device=src.device), self.make_tiles(src)
        places = _pointers(*map(_address, (sums, tiles, arrived, nonfinite)))  # NormPlaces of csrc/cuda/grad_body.cuh
        at = _address(dst), _address(lo), src.data_ptr()
        is_aligned = not (at[0] % 16 or at[1] % 8 or at[2] % 16)
        kernel = f"grad_kernel<gemini::cuda::Doing::{doing}, {_DTYPES[src.dtype]}, {_cpp(is_aligned)}>"
        # A warp of 32 threads takes a block of the norm.
        blocks = -(-n // (NORM_BLOCK * THREADS // 32))
        self._driver.launch(*where, kernel, blocks, *map(ctypes.c_void_p, at), ctypes.c_int64(n), places)
        return [DeviceSums(tiles, self.stream(src.device), self.fetch)]

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


class _Batch(NamedTuple):
    """Segments of one launch: of ``rule``, a struct of csrc/rules.h, with bounds and scalars of each in ``parts``."""

    rule: str
    parts: list[bytes]
    dithers: list[int]
    first_blocks: list[int]
    """Of each segment, and behind the last one the number of all blocks."""

    def packed(self, head: Sequence[int]) -> Any:
        """Launch of csrc/cuda/update_body.cuh, which begins with ``head`` and a count."""
        count = len(self.dithers)
        missing = _MOST_SEGMENTS - count
        whole = b"".join(
            (
                _HEAD.pack(*head, count),
                *self.parts,
                bytes(missing * (_BOUNDS.size + len(self.parts[1]))),
                struct.pack(f"<{count}I{4 * missing}x{count + 1}q{8 * missing}x", *self.dithers, *self.first_blocks),
            )
        )
        return (ctypes.c_char * len(whole)).from_buffer_copy(whole)


def _batches(segments: Sequence[Segment], is_compact: bool) -> Iterator[_Batch]:
    """Cut an update into launches: a kernel is compiled for one rule, and has room for so many segments."""
    batch = _Batch("", [], [], [0])
    for segment in segments:
        if segment.end == segment.begin:
            continue
        rule, scalars = _packed(segment.scalars)
        if rule != batch.rule or len(batch.dithers) == _MOST_SEGMENTS:
            if batch.parts:
                yield batch
            batch = _Batch(rule, [], [], [0])
        batch.parts.extend((_BOUNDS.pack(segment.begin, segment.end), scalars))
        batch.dithers.append(segment.dither if is_compact else 0)
        # A block's threads take whole vectors of elements, so the first one begins at a multiple of these.
        covered = segment.end - segment.begin // _PER_THREAD * _PER_THREAD
        batch.first_blocks.append(batch.first_blocks[-1] + -(-covered // _PER_BLOCK))
    if batch.parts:
        yield batch
