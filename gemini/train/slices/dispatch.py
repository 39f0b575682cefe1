"""Tokens to the ranks that have their experts, and what these make of them back: two all-to-alls per layer.

Each (token, expert) pair travels as a row, with its weight, so that whichever kernel computes the experts sees its own
arguments: rows, the expert of each by its number here, and weights. Their gradients travel the way back. What a rank is
sent depends on the others' routers, so each layer begins with the numbers of rows. Each exchange begins with where its
rank stands: of one that evaluates alone, the others hear before rows of different sizes meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gemini.errors import RankMismatch
from gemini.ranks import collectives
from gemini.ranks.wire import Tag, Wire

_WHAT = "an exchange of tokens (expert parallel)"


class Point(IntEnum):
    """Where a rank stands; numbers are two apart, and one more without gradients."""

    DISPATCH = 0
    COMBINE = 2
    COMBINE_BACKWARD = 4
    DISPATCH_BACKWARD = 6


_WORDS = {
    Point.DISPATCH: "the forward of {}, before its experts",
    Point.COMBINE: "the forward of {}, behind its experts",
    Point.COMBINE_BACKWARD: "the backward of {}, before its experts",
    Point.DISPATCH_BACKWARD: "the backward of {}, behind its experts",
}


class ExpertExchange:
    """Among the ranks that have the experts of the same layers.

    Args:
        collective: the library's group for CUDA tensors; None on the CPU.
        names: of the modules that have experts.
        most: experts that one of them has over all ranks.
    """

    def __init__(self, wire: Wire, collective: dist.ProcessGroup | None, names: Sequence[str], most: int):
        self._wire, self._collective, self._names, self._most = wire, collective, names, most
        self.rank, self.size = wire.rank, wire.size

    def meet(self, point: Point, layer: int, numbers: torch.Tensor | None = None) -> torch.Tensor:
        """Wait until all ranks stand at ``point`` of a layer; some integers of each, stacked, on the CPU.

        Raises:
            RankMismatch: on every rank, if one stands elsewhere.
            RankLost: if one does not answer.
        """
        said = torch.zeros(2 + self._most, dtype=torch.int64, device="cpu")
        said[0], said[1] = point + (not torch.is_grad_enabled()), layer
        if numbers is not None:
            said[2 : 2 + len(numbers)] = numbers
        told = self._wire.swap(Tag.EXPERTS, said, _WHAT)
        if not bool((told[:, :2] == told[0, :2]).all()):
            where = "; ".join(
                f"rank {rank} is in {self._place(*at)}"
                for rank, at in zip(self._wire.global_ranks, told[:, :2].tolist(), strict=True)
            )
            raise RankMismatch(
                f"ranks with other experts of the same layers (ep) do different things: {where}. Every rank of a mesh "
                "with ep must make the same forwards and backwards, evaluations too"
            )
        return told[:, 2:] if numbers is None else told[:, 2 : 2 + len(numbers)]

    def _place(self, said: int, layer: int) -> str:
        words = _WORDS[Point(said & ~1)].format(self._names[layer])
        return words + (" (without gradients)" if said & 1 and said < Point.COMBINE_BACKWARD else "")

    def swap_rows(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """``sent[i]`` of the rows in turn go to rank i; of the result ``received[i]`` in turn come from there.

        Raises:
            RankLost: if another rank does not answer.
        """
        rows = rows.contiguous()
        into = rows.new_empty((sum(received), *rows.shape[1:]))
        if self._collective is not None and rows.is_cuda:
            collectives.all_to_all_rows(into, rows, received, sent, self._collective, _WHAT)
            return into
        outgoing, incoming = rows.split(sent), into.split(received)
        peers = self._wire.peers
        pending = self._wire.start(Tag.EXPERTS, {p: outgoing[p] for p in peers}, {p: incoming[p] for p in peers}, _WHAT)
        incoming[self.rank].copy_(outgoing[self.rank])
        pending.wait()
        return into


class _Way(NamedTuple):
    """From where to where rows go, and where it is asked on the way back whether all stand there."""

    exchange: ExpertExchange
    sent: list[int]
    received: list[int]
    back: tuple[Point, int]


class _SwapRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.way = way
        return tuple(way.exchange.swap_rows(part, way.sent, way.received) for part in parts)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        way: _Way = ctx.way
        way.exchange.meet(*way.back)
        return None, *(way.exchange.swap_rows(grad, way.received, way.sent) for grad in grads)


def dispatched_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """``forward`` of a module that has some of the experts of its layer; a method.

    Args:
        hidden_states: of this rank's tokens, (tokens, hidden size).
        top_k_index: the experts of each token by their numbers in the whole layer, (tokens, k).
        top_k_weights: what each of these counts, (tokens, k).

    Returns:
        what all experts make of this rank's tokens, (tokens, hidden size).

    Raises:
        RankMismatch: if a rank with other experts stands elsewhere.
        RankLost: if it does not come at all.
    """
    exchange: ExpertExchange
    exchange, layer = self.__dict__["_gemini_experts"]
    num_here = int(self.num_experts)  # type: ignore[arg-type]
    (num_tokens, top_k), size = top_k_index.shape, exchange.size
    experts = top_k_index.reshape(-1)
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=num_here * size).cpu()
    told = exchange.meet(Point.DISPATCH, layer, counts).view(size, size, num_here)
    sent = told[exchange.rank].sum(-1).tolist()
    of_here = told[:, exchange.rank]  # by the rank they come from, and by expert
    received = of_here.sum(-1).tolist()
    there = _Way(exchange, sent, received, (Point.DISPATCH_BACKWARD, layer))
    rows, weights = _SwapRows.apply(there, hidden_states[order // top_k], top_k_weights.reshape(-1)[order])
    numbers = torch.arange(num_here, device="cpu").repeat(size).repeat_interleave(of_here.reshape(-1))
    numbers = numbers.to(experts.device)
    num_rows = len(rows)
    if not num_rows:  # a row of zeros, so that backward comes through here and these experts have a gradient
        rows, weights, numbers = rows.sum(0, keepdim=True), weights.sum(0, keepdim=True), numbers.new_zeros(1)
    made = type(self).forward(self, rows, numbers.unsqueeze(-1), weights.unsqueeze(-1))
    exchange.meet(Point.COMBINE, layer)
    (back,) = _SwapRows.apply(_Way(exchange, received, sent, (Point.COMBINE_BACKWARD, layer)), made[:num_rows])
    by_token = back[order.argsort()].view(num_tokens, top_k, -1)
    return by_token.sum(1).to(hidden_states.dtype)
