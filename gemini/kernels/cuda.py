"""The CUDA kernels behind gemini.kernels: the same functions for tensors of a CUDA device, the same bits.

Work is enqueued on torch's current stream of the tensors' device, and nothing waits: sums of squares are left there, in
`NormWorkspace`, for whoever can wait later or never (`clip_factor` turns them into the factor that clips without the
host; it learns once, by a copy, how many tiles the gradients of a model have). The host waits in `fetch` alone.
Arguments were checked by gemini.kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gemini.kernels.arrays import Addresses, Arrays, Segment, kernel_and_scalars
from gemini.kernels.reference import NORM_BLOCK, NORM_TILE
from gemini.kernels.sums import DeviceSums, Sums


class NormWorkspace:
    """Device scratch of one gradient kernel: sums per tile and the flag for inf and NaN; its own until it has run.

    Args:
        nonfinite: a flag that several calls may share; without one the call gets its own.
        arrived: int32, one element, 0 between kernels: those of one stream may share it.

    Attributes:
        tiles: fp64, a sum of squares per NORM_TILE elements.
        nonfinite: int32, one element: not 0 if one of the sums was not finite.
    """

    def __init__(self, n: int, device: torch.device, nonfinite: Tensor | None = None, arrived: Tensor | None = None):
        blocks, tiles = -(-n // NORM_BLOCK), -(-n // NORM_TILE)
        self._blocks = torch.empty(blocks, dtype=torch.float64, device=device)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device) if arrived is None else arrived
        self.tiles = torch.empty(tiles, dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros(1, dtype=torch.int32, device=device) if nonfinite is None else nonfinite

    def native(self, module: Any) -> Any:
        arrays = (self._blocks, self.tiles, self._arrived, self.nonfinite)
        return module.CudaNormPlaces(*(array.data_ptr() for array in arrays))


class CudaKernels:
    """The functions of gemini.kernels on CUDA tensors.

    Args:
        module: the native library.
        dtypes: its names of the formats.
    """

    def __init__(self, module: Any, dtypes: dict[torch.dtype, Any]):
        self._module, self._dtypes = module, dtypes
        self._shared: dict[tuple[int, int], Tensor] = {}
        self._scalars = lru_cache(maxsize=256)(module.Scalars)

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
        return NormWorkspace(tensor.numel(), tensor.device, shared[1:] if nonfinite is None else nonfinite, shared[:1])

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
        native = [
            self._module.CudaSegment(
                segment.begin,
                segment.end,
                self._scalars(*kernel_and_scalars(segment.scalars)),
                segment.dither if is_compact else 0,
            )
            for segment in segments
        ]
        update = self._module.cuda_update_compact if is_compact else self._module.cuda_update
        planes = (at.states, at.scales) if is_compact else (at.states,)
        update(
            *self._where(arrays.weights),
            at.weights,
            at.residual,
            *planes,
            at.grad,
            self._dtypes[arrays.grad.dtype],
            native,
            _address(grad_scale),
            _address(stop),
        )

    def split_master(self, master: Tensor, hi: Tensor, lo: Tensor) -> None:
        self._module.cuda_split_master(*self._where(master), *map(_address, (master, hi, lo)), master.numel())

    def join_master(self, hi: Tensor, lo: Tensor, out: Tensor) -> None:
        self._module.cuda_join_master(*self._where(out), *map(_address, (hi, lo, out)), out.numel())

    def copy_grad(self, dst: Tensor, src: Tensor) -> Sums:
        arrays = _address(dst), self._dtypes[dst.dtype], _address(src), self._dtypes[src.dtype]
        return self._summing(self._module.cuda_copy_grad, dst, *arrays, dst.numel())

    def accumulate_grad(self, acc: Tensor, src: Tensor) -> Sums:
        arrays = _address(acc), _address(src), self._dtypes[src.dtype]
        return self._summing(self._module.cuda_accumulate_grad, acc, *arrays, acc.numel())

    def sum_grad24(self, hi: Tensor, lo: Tensor, src: Tensor, adding: bool) -> Sums:
        arrays = *map(_address, (hi, lo, src)), self._dtypes[src.dtype]
        return self._summing(self._module.cuda_sum_grad24, hi, *arrays, hi.numel(), adding)

    def sum_squares(self, src: Tensor, nonfinite: Tensor | None) -> Sums:
        arrays = _address(src), self._dtypes[src.dtype]
        return self._summing(self._module.cuda_sum_squares, src, *arrays, src.numel(), nonfinite=nonfinite)

    def _summing(self, kernel: Any, tensor: Tensor, *arrays: Any, nonfinite: Tensor | None = None) -> Sums:
        """Enqueue a kernel that leaves the sums of squares of ``tensor`` on the device."""
        places = self.places(tensor, nonfinite)
        kernel(*self._where(tensor), *arrays, places.native(self._module))
        tiles = places.tiles
        return [DeviceSums(tiles, self.stream(tiles.device), self)] if tiles.numel() else []

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
        places = map(_address, (totals, norm, factor, nonfinite))
        self._module.cuda_clip_factor(
            *self._where(tiles), _address(tiles), _address(ends), len(many), max_norm, *places
        )
        return norm, factor, nonfinite


@lru_cache(maxsize=8)
def _ends_there(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied once for a model, whose gradients have the same tiles in every step."""
    return torch.tensor(ends, dtype=torch.int64, device=device)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
