"""The CUDA kernels behind gemini.kernels: the same functions for tensors of a CUDA device, the same bits.

Work is enqueued on torch's current stream of the tensors' device, and nothing waits: sums of squares are left there, in
`Places`, for whoever can wait later or never (`clip_factor` turns them into the factor that clips without the host).
Arguments were checked by gemini.kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemini.kernels_reference import NORM_BLOCK, NORM_TILE, AdamHyper, fp32_scalars


class Segment(NamedTuple):
    """Elements ``[begin, end)`` of the arrays of a chunk, and how they are updated."""

    begin: int
    end: int
    hyper: AdamHyper


class Places:
    """Device memory in which one gradient kernel leaves what it finds; the kernel's own until it has run.

    Attributes:
        tiles: fp64, a sum of squares per NORM_TILE elements.
        nonfinite: int32, one element: not 0 if one of the sums was not finite.
    """

    def __init__(self, n: int, device: torch.device, nonfinite: Tensor | None = None):
        blocks, tiles = -(-n // NORM_BLOCK), -(-n // NORM_TILE)
        self._blocks = torch.empty(blocks, dtype=torch.float64, device=device)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
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

    def adam_update(
        self, weights: Tensor, residual: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor,
        segments: Sequence[Segment], grad_scale: Tensor | None = None, stop: Tensor | None = None,
    ) -> None:  # fmt: skip
        """One update of all segments in one launch (of 48 each).

        ``grad_scale``: fp32, one element on the device, instead of the one of the hyperparameters; ``stop``: int32, one
        element there: nothing is updated if it is not 0 by then.
        """
        native = [
            self._module.CudaSegment(begin, end, self._module.AdamScalars(*fp32_scalars(hyper)))
            for begin, end, hyper in segments
        ]
        arrays = map(_address, (weights, residual, exp_avg, exp_avg_sq, grad))
        dtype = self._dtypes[grad.dtype]
        self._module.cuda_adam_update(*_where(weights), *arrays, dtype, native, _address(grad_scale), _address(stop))

    def split_master(self, master: Tensor, hi: Tensor, lo: Tensor) -> None:
        self._module.cuda_split_master(*_where(master), *map(_address, (master, hi, lo)), master.numel())

    def join_master(self, hi: Tensor, lo: Tensor, out: Tensor) -> None:
        self._module.cuda_join_master(*_where(out), *map(_address, (hi, lo, out)), out.numel())

    def copy_grad(self, dst: Tensor, src: Tensor, places: Places) -> None:
        formats = self._dtypes[dst.dtype], self._dtypes[src.dtype]
        self._module.cuda_copy_grad(
            *_where(dst), _address(dst), formats[0], _address(src), formats[1], dst.numel(), places.native(self._module)
        )

    def accumulate_grad(self, acc: Tensor, src: Tensor, places: Places) -> None:
        addresses, native = map(_address, (acc, src)), places.native(self._module)
        self._module.cuda_accumulate_grad(*_where(acc), *addresses, self._dtypes[src.dtype], acc.numel(), native)

    def sum_squares(self, src: Tensor, places: Places) -> None:
        self._module.cuda_sum_squares(
            *_where(src), _address(src), self._dtypes[src.dtype], src.numel(), places.native(self._module)
        )

    def clip_factor(
        self, sums: Tensor, scale: float, max_norm: float, norm: Tensor, factor: Tensor, nonfinite: Tensor
    ) -> None:
        """From fp64 ``sums``: ``norm`` = sqrt(their sum in order) * scale (fp64), ``factor`` = scale * min(1,
        max_norm / (norm + 1e-6)) (fp32), and 1 in ``nonfinite`` (int32) if the norm is not finite. One element each.
        """
        places = map(_address, (norm, factor, nonfinite))
        self._module.cuda_clip_factor(*_where(sums), _address(sums), sums.numel(), scale, max_norm, *places)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _where(tensor: Tensor) -> tuple[int, int]:
    """The number of the device, and the handle of torch's current stream there."""
    return tensor.get_device(), torch.cuda.current_stream(tensor.device).cuda_stream
