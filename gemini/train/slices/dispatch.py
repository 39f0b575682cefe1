"""Tokens to the ranks that have their experts, and what these make of them back: two all-to-alls per layer.

Each (token, expert) pair travels as a row, with its weight, so that whichever kernel computes the experts sees its own
arguments: rows, the expert of each by its number here, and weights. Their gradients travel the way back. What a rank is
sent depends on the others' routers, so each layer begins with the numbers of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gemini.ranks import collectives
from gemini.ranks.wire import Tag, Wire

_WHAT = "an exchange of tokens (expert parallel)"


class ExpertExchange:
    """Among the ranks that have the experts of the same layers.

    Args:
        collective: the library's group for CUDA tensors; None on the CPU.
    """

    def __init__(self, wire: Wire, collective: dist.ProcessGroup | None):
        self._wire, self._collective = wire, collective
        self.rank, self.size = wire.rank, wire.size

    def tell(self, numbers: torch.Tensor) -> torch.Tensor:
        """Some integers of every rank, stacked, on the CPU.

        Raises:
            RankLost: if another rank does not answer.
        """
        return self._wire.swap(Tag.EXPERTS, numbers.cpu(), _WHAT)

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


class _SwapRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: ExpertExchange, sent: list[int], received: list[int], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.how = exchange, sent, received
        return tuple(exchange.swap_rows(part, sent, received) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange, sent, received = ctx.how
        return None, None, None, *_SwapRows.apply(exchange, received, sent, *grads)


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
        RankLost: if a rank with other experts does not come here.
    """
    exchange: ExpertExchange = self.__dict__["_gemini_experts"]
    num_here = int(self.num_experts)  # type: ignore[arg-type]
    (num_tokens, top_k), size = top_k_index.shape, exchange.size
    experts = top_k_index.reshape(-1)
    order = experts.argsort(stable=True)
    told = exchange.tell(torch.bincount(experts, minlength=num_here * size)).view(size, size, num_here)
    sent = told[exchange.rank].sum(-1).tolist()
    of_here = told[:, exchange.rank]  # by the rank they come from, and by expert
    received = of_here.sum(-1).tolist()
    rows, weights = _SwapRows.apply(
        exchange, sent, received, hidden_states[order // top_k], top_k_weights.reshape(-1)[order]
    )
    numbers = torch.arange(num_here).repeat(size).repeat_interleave(of_here.reshape(-1)).to(experts.device)
    num_rows = len(rows)
    if not num_rows:  # a row of zeros, so that backward comes through here and these experts have a gradient
        rows, weights, numbers = rows.sum(0, keepdim=True), weights.sum(0, keepdim=True), numbers.new_zeros(1)
    made = type(self).forward(self, rows, numbers.unsqueeze(-1), weights.unsqueeze(-1))
    (back,) = _SwapRows.apply(exchange, received, sent, made[:num_rows])
    by_token = back[order.argsort()].view(num_tokens, top_k, -1)
    return by_token.sum(1).to(hidden_states.dtype)
