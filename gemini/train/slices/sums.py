"""What slices of a layer have to say to each other, as autograd functions on plain tensors.

A layer cut by columns and the next one by rows meet twice: their results are added up over the slices in forward, and
the gradients of their input in backward. gloo and NCCL add up each element in one place: all ranks get the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function


def _added_up(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    value = value.contiguous().clone()
    dist.all_reduce(value, group=group)
    return value


class SumInBackward(Function):
    """The value as it is, which all slices have; each knows a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _added_up(grads[0], ctx.group), None


class SumInForward(Function):
    """The sum of the slices' values, whose gradient all slices know."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _added_up(value, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class Join(Function):
    """The slices' values side by side in the last dim, whose gradient all slices know."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.rank, ctx.size = dist.get_rank(group), dist.get_world_size(group)
        parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(ctx.size)]
        dist.all_gather(parts, value.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].chunk(ctx.size, -1)[ctx.rank], None


class Cut(Function):
    """This slice's part of the last dim of a value that all have; each knows its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parts = [torch.empty_like(grads[0], memory_format=torch.contiguous_format) for _ in range(_size(ctx.group))]
        dist.all_gather(parts, grads[0].contiguous(), group=ctx.group)
        return torch.cat(parts, -1), None


def _size(group: dist.ProcessGroup) -> int:
    return dist.get_world_size(group)
