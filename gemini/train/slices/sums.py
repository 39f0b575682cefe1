"""What slices of a layer have to say to each other, as autograd functions on plain tensors.

A layer cut by columns and the next one by rows meet twice: their results are added up over the slices in forward, and
the gradients of their input in backward. gloo and NCCL add up each element in one place: all ranks get the same bits.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from gemini.ranks.wire import guarded

_DOING = "a sum over the slices of a layer (tp)"


class Slices:
    """The ranks that have the slices of a model, as one of them sees them. Copies of a model share it."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._given: torch.Tensor | None = None
        self._taken: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Slices:
        return self

    def share(self, value: torch.Tensor) -> torch.Tensor:
        """A value that all slices have, and of whose gradient each will know a part. Modules that read the same one in
        turn share it, so that its gradient is added up once.
        """
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        if self._given is not value or self._taken is None:
            self._given, self._taken = value, SumInBackward.apply(value, self)
        return self._taken

    def forget(self) -> None:
        """The forward is over, or the backward of what it has shared last begins."""
        self._given = self._taken = None

    def add_up(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over slices, a new tensor.

        Raises:
            RankLost: if another rank does not answer.
        """
        value = value.contiguous().clone()
        self._sum(value)
        return value

    def join(self, value: torch.Tensor) -> torch.Tensor:
        """The slices' values side by side in the last dim; raises as :meth:`add_up`."""
        parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._gather(parts, value.contiguous())
        return torch.cat(parts, -1)

    def own(self, value: torch.Tensor) -> torch.Tensor:
        """This slice's part of the last dim."""
        return value.chunk(self.size, -1)[self.rank].contiguous()

    def _sum(self, value: torch.Tensor) -> None:
        guarded(_DOING, lambda: dist.all_reduce(value, group=self.group))

    def _gather(self, parts: list[torch.Tensor], own: torch.Tensor) -> None:
        guarded(_DOING, lambda: dist.all_gather(parts, own, group=self.group))


class ImaginedSlices(Slices):
    """The first of ``size`` slices, as it looks to who traces it: what others would send has shapes and no values.

    ``sent``: bytes that it would send in rings, under "tp".
    """

    def __init__(self, size: int, sent: Counter[str]):
        self.rank, self.size, self._sent = 0, size, sent
        self._given = self._taken = None

    def _sum(self, value: torch.Tensor) -> None:
        self._sent["tp"] += 2 * value.nbytes * (self.size - 1) // self.size

    def _gather(self, parts: list[torch.Tensor], own: torch.Tensor) -> None:
        self._sent["tp"] += own.nbytes * (self.size - 1)


class SumInBackward(Function):
    """The value as it is, which all slices have; each knows a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, slices: Slices) -> torch.Tensor:
        ctx.slices = slices
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.slices.forget()
        return ctx.slices.add_up(grads[0]), None


class SumInForward(Function):
    """The sum of the slices' values, whose gradient all slices know."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, slices: Slices) -> torch.Tensor:
        return slices.add_up(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class Join(Function):
    """The slices' values side by side in the last dim, whose gradient all slices know."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, slices: Slices) -> torch.Tensor:
        ctx.slices = slices
        return slices.join(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.slices.own(grads[0]), None


class Cut(Function):
    """This slice's part of the last dim of a value that all have; each knows its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, slices: Slices) -> torch.Tensor:
        ctx.slices = slices
        return slices.own(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.slices.join(grads[0]), None
