"""Where a slice of a param stands in the whole one: of tensor parallel, where each rank of ``tp`` has a part of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class TensorSlice(NamedTuple):
    """Slice ``rank`` of ``size`` equal ones of a whole param.

    Attributes:
        shape: of the whole param.
        dim: along which it is cut.
        groups: how many matrices lie side by side along ``dim``, each of which is cut (gate and up in one: 2).
    """

    shape: tuple[int, ...]
    dim: int
    groups: int
    rank: int
    size: int

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of this slice."""
        return tuple(n // self.size if dim == self.dim else n for dim, n in enumerate(self.shape))

    @property
    def run(self) -> int:
        """Elements of a slice that stand side by side in the whole param, before those of the next slice come."""
        return math.prod(self.shape[self.dim :]) // (self.groups * self.size)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Cut this slice out of a whole value: a copy, or of one value for all elements that value again."""
        # An expanded scalar (stride 0 everywhere) takes no memory, and neither does its slice.
        if whole.numel() and not any(whole.stride()):
            return whole[(0,) * whole.dim()].expand(self.own_shape)
        return torch.cat(self.views_of(whole), self.dim)

    def views_of(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Find what of each group of a whole value is this slice's: views."""
        return [part.chunk(self.size, self.dim)[self.rank] for part in whole.chunk(self.groups, self.dim)]

    def join(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join all slices, in their order and each in its own shape, to the whole value."""
        # Groups lie outermost: the first group of every slice, then the second of every slice.
        of_groups = [one.chunk(self.groups, self.dim) for one in slices]
        return torch.cat([part for group in zip(*of_groups, strict=True) for part in group], self.dim)

    def in_whole(self, start: int, stop: int) -> torch.Tensor:
        """Say which elements of the whole param ``[start, stop)`` of this slice are, flat: int64."""
        # Run number r of a slice is run r * size + rank of the whole; within a run nothing changes.
        own = torch.arange(start, stop, device="cpu")
        return own.div(self.run, rounding_mode="floor").mul_(self.size).add_(self.rank).mul_(self.run) + own % self.run

    def of_whole(self, elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Say which slices have these elements of the whole param, and which elements of the slices they are."""
        runs = elements.div(self.run, rounding_mode="floor")
        own = runs.div(self.size, rounding_mode="floor").mul_(self.run) + elements % self.run
        return runs % self.size, own
