"""What ranks with parts of the same sequences send each other inside forward and backward, as functions of autograd.

    exchange_dims   a tensor divided along one dim becomes one divided along another: all-to-all; so does its gradient
    gather          the parts of all, one after the other: all-gather; of its gradient a rank gets the sum for its part

Sums are made here, in the order of ranks, so that they are the same bits in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gemini.ranks import collectives
from gemini.ranks.wire import Tag, Wire, add_up

_WHAT = "an exchange of attention (context parallel)"


class Exchange:
    """Among the ranks of one context group.

    Args:
        collective: the library's group for CUDA tensors; None on the CPU.
        meet: waits until every rank of the model stands at such an exchange, serving those that still need weights. So
            ranks may take different paths in between.
    """

    def __init__(self, wire: Wire, collective: dist.ProcessGroup | None, meet: Callable[[], object]):
        self._wire, self._collective, self._meet = wire, collective, meet
        self.rank, self.size = wire.rank, wire.size

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """``parts[i]`` goes to rank i; ``[i]`` of the result is what rank i has sent."""
        self._meet()
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        if self._collective is not None and parts.is_cuda:
            collectives.all_to_all(received, parts, self._collective, _WHAT)
            return received
        peers = self._wire.peers
        pending = self._wire.start(Tag.CONTEXT, {p: parts[p] for p in peers}, {p: received[p] for p in peers}, _WHAT)
        received[self.rank].copy_(parts[self.rank])
        pending.wait()
        return received

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """``own`` of every rank, stacked."""
        self._meet()
        if self._collective is not None and own.is_cuda:
            stacked = own.new_empty((self.size, *own.shape))
            collectives.all_gather(stacked.flatten(0, 1), own.contiguous(), self._collective, _WHAT)
            return stacked
        return self._wire.swap(Tag.CONTEXT, own, _WHAT)

    def tell(self, numbers: torch.Tensor) -> list[list[int]]:
        """Some integers of every rank."""
        self._meet()
        return self._wire.swap(Tag.CONTEXT, numbers.cpu(), _WHAT).tolist()


class ImaginedExchange(Exchange):
    """The last rank of ``size``, as it looks to who traces it: what others would send has shapes and no values.

    ``sent``: bytes that it would send, under "cp".
    """

    def __init__(self, size: int, sent: Counter[str]):
        self.rank, self.size, self._sent = size - 1, size, sent

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """Of the shape of ``parts``."""
        self._sent["cp"] += parts.nbytes * (self.size - 1) // self.size
        return torch.empty_like(parts.contiguous())

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """As many of the shape of ``own`` as there are ranks."""
        self._sent["cp"] += own.nbytes * (self.size - 1)
        return own.new_empty((self.size, *own.shape))

    def tell(self, numbers: torch.Tensor) -> list[list[int]]:
        """The others say the same, each of its own part."""
        return [[number, *numbers.tolist()[1:]] for number in range(self.size)]


def exchange_dims(exchange: Exchange, split: int, join: int, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of each tensor, a part along dim ``join``: the whole, of which dim ``split`` has this rank's part. All are of one
    dtype, and travel together.
    """
    return _ExchangeDims.apply(exchange, split, join, *parts)  # type: ignore[no-any-return]


def gather(exchange: Exchange, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The parts of all ranks along ``dim``."""
    return _Gather.apply(x, exchange, dim)  # type: ignore[no-any-return]


class _ExchangeDims(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, split: int, join: int, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how, size = (exchange, split, join), exchange.size
        stacked = [torch.stack(part.chunk(size, split)) for part in parts]
        received = exchange.all_to_all(torch.cat([part.view(size, -1) for part in stacked], 1))
        pieces = received.split([part[0].numel() for part in stacked], 1)
        return tuple(
            torch.cat(piece.reshape(part.shape).unbind(), join) for piece, part in zip(pieces, stacked, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange, split, join = ctx.how
        return None, None, None, *_ExchangeDims.apply(exchange, join, split, *grads)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, dim: int) -> torch.Tensor:
        ctx.how = exchange, dim
        return torch.cat(exchange.all_gather(x).unbind(), dim)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange, dim = ctx.how
        received = exchange.all_to_all(torch.stack(grads[0].chunk(exchange.size, dim)))
        total = torch.empty_like(received[0], dtype=torch.float32)
        add_up(received.unbind(), total)
        return total.to(received.dtype), None, None
