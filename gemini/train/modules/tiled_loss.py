"""The loss of an output head in tiles of tokens, with its gradients made while the logits of a tile are there.

The gradient of a sum or a mean of cross entropies is known in forward, but for one number: the gradient of the result
itself. So a tile's logits are made once. Their gradient, that of the tile's hidden states, and what the tile adds to
the gradients of the head's weight and bias are made at once of them, as if the loss that the model returns were to get
the gradient 1; backward multiplies by what it gets instead. What cannot be made so (losses of single tokens, fp16,
whose loss scale is not known in forward) is computed under ``torch.utils.checkpoint``, and once more in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

TILE = object()
"""Stands for a tile of logits among the arguments of a step."""


def split_rows(rows: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
    """``rows`` (tokens first) in parts of at most ``tokens``, of nearly equal size: none has one row alone."""
    parts = max(-(-rows.shape[0] // tokens), 1)
    least, more = divmod(rows.shape[0], parts)
    # Not tensor_split, which slices: in backward each slice makes a gradient of all rows, nearly all of it zeros.
    return rows.split([least + (part < more) for part in range(parts)])


class LogitStep(NamedTuple):
    """Something that a model does with each logit by itself. Where it takes logits, ``args`` has :data:`TILE`."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, tile: torch.Tensor) -> Any:
        return self.func(*(tile if value is TILE else value for value in self.args), **self.kwargs)

    @property
    def learns(self) -> bool:
        """Whether something else than the logits gets a gradient by it."""
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in self.args)


class TiledLoss(NamedTuple):
    """A cross entropy of logits that are made ``tokens`` at a time.

    Attributes:
        steps: what is done with a tile of logits (tokens x vocabulary), in order.
        dtype: of the losses of tokens.
        target: the class of each token.
        divisor: by which the model is going to divide a sum.
    """

    tokens: int
    steps: tuple[LogitStep, ...]
    dtype: torch.dtype
    target: torch.Tensor
    ignore_index: int
    reduction: str
    divisor: Any = 1

    def whole(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Compute it of ``hidden`` (tokens x hidden units), logits of a tile by ``head``, and once more in backward."""

        def losses_of(part: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self._losses(head(part), target)

        # Every tile is a region of its own: its logits live for the time of one tile, in forward and in backward.
        parts = self._parts(hidden)
        return self._reduced(torch.cat([checkpoint(losses_of, *part, use_reentrant=False) for part in parts]))

    def can_be_made_at_once(self, hidden: torch.Tensor, layer: nn.Linear) -> bool:
        """Whether :meth:`at_once` gives the same loss and all gradients that :meth:`whole` gives."""
        learned = [each for each in (hidden, layer.weight, layer.bias) if each is not None]
        return (
            self.reduction in ("mean", "sum")
            and any(each.requires_grad for each in learned)
            and {each.dtype for each in learned} in ({torch.bfloat16}, {torch.float32}, {torch.float64})
            and not torch.is_autocast_enabled(hidden.device.type)
            and not any(step.learns for step in self.steps)
        )

    def at_once(self, hidden: torch.Tensor, layer: nn.Linear, again: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Compute it of ``hidden`` with its gradients. The weight of ``layer`` is there, and need not be later.

        Args:
            again: :meth:`whole` of the same, for a second derivative.
        """
        return _AtOnce.apply(self, again, hidden, layer.weight, layer.bias)  # type: ignore[no-any-return, no-untyped-call]

    def _parts(self, hidden: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts = split_rows(hidden, self.tokens)
        return list(zip(parts, self.target.split([part.shape[0] for part in parts]), strict=True))

    def _losses(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            logits = step(logits)
        return functional.cross_entropy(logits, target, ignore_index=self.ignore_index, reduction="none")

    def _reduced(self, losses: torch.Tensor) -> torch.Tensor:
        if self.reduction == "none":
            return losses
        # As a cross entropy over one class: the sum over tokens is torch's own, in its order.
        rated = torch.where(self.target == self.ignore_index, self.ignore_index, 0)
        return functional.nll_loss(-losses[:, None], rated, ignore_index=self.ignore_index, reduction=self.reduction)

    def _expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient of the result, where the model's loss gets 1, and that of each token's loss then."""
        with torch.enable_grad():
            losses = torch.zeros(self.target.shape, dtype=self.dtype, device=self.target.device, requires_grad=True)
            result = self._reduced(losses)
            expected = torch.ones_like(result, requires_grad=False)
            if self.reduction == "sum":
                expected = (expected / self.divisor).to(result.dtype)
            return expected, torch.autograd.grad(result, losses, expected)[0]


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, loss: TiledLoss, again: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.loss, ctx.again = loss, again
        ctx.save_for_backward(hidden, weight, bias)
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[2:]
        ctx.expected, of_losses = loss._expected()
        losses = torch.empty_like(of_losses)
        made: list[torch.Tensor | None] = [torch.empty_like(hidden) if of_hidden else None, None, None]
        start = 0
        for part, target in loss._parts(hidden.detach()):
            stop = start + part.shape[0]
            with torch.enable_grad():
                logits = functional.linear(
                    part.detach().requires_grad_(), weight.detach(), None if bias is None else bias.detach()
                )
                # Not the logits themselves: what the steps do not need of them goes before the gradient comes.
                edge = get_gradient_edge(logits)
                own = loss._losses(logits, target)
                del logits
            losses[start:stop] = own.detach()
            (grad,) = torch.autograd.grad(own, [edge], of_losses[start:stop])
            del own, edge
            if made[0] is not None:
                torch.mm(grad, weight, out=made[0][start:stop])
            if of_weight:
                # The product adds to the sum itself: no tile has a gradient of its own, as large as the weight.
                made[1] = grad.t() @ part if made[1] is None else made[1].addmm_(grad.t(), part)
            if of_bias:
                made[2] = grad.sum(0) if made[2] is None else made[2].add_(grad.sum(0))
            del grad
            start = stop
        ctx.made = made
        return loss._reduced(losses)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled() or ctx.made is None:
            return None, None, *_AtOnce._differentiable(ctx, given)
        # Exactly 1 for what was expected, also if that is infinite; never looked at, which would wait for a GPU.
        factor = torch.where(given == ctx.expected, 1.0, given / ctx.expected)
        made, is_kept = ctx.made, torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        if is_kept:
            made = [None if grad is None else grad.clone() for grad in made]
        else:
            # Given away: the loss may be kept for long, and its graph with it.
            ctx.made = None
        for grad in made:
            # A few rows at a time, in the precision of the loss: a product in bf16 would round the factor first.
            for rows in () if grad is None else grad.split(ctx.loss.tokens):
                rows.copy_(rows.to(factor.dtype) * factor)
        return None, None, *made

    @staticmethod
    def _differentiable(ctx: Any, given: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradients as functions of what they follow from: as the loss in tiles gives them otherwise."""
        # Of a graph that was let go of, this raises torch's own error.
        inputs = ctx.saved_tensors
        with torch.enable_grad():
            wanted = [each for each, is_needed in zip(inputs, ctx.needs_input_grad[2:], strict=True) if is_needed]
            found = iter(torch.autograd.grad(ctx.again(inputs[0]), wanted, given, create_graph=True))
        return [next(found) if is_needed else None for is_needed in ctx.needs_input_grad[2:]]
