"""How a module computes with a slice of its params.

That is said by the styles of transformers' ``tp_plan``, here on plain tensors: along which dim a param is cut, and what
is done around the module's own forward. A layer cut by columns and the next one by rows meet twice: their results are
added up over the slices in forward, and the gradients of their input in backward. gloo and NCCL add up each element in
one place: all ranks get the same bits. Of a linear layer cut by rows the bias is added once, after the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function

from gemini.ranks.wire import guarded
from gemini.train.modules.reading import own_params

Way = Callable[[torch.Tensor], torch.Tensor]

_DOING = "a sum over the slices of a layer (tp)"


class _Through(Function):
    """Put a value through ``there``, and its gradient through ``back``."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
        ctx.back = back
        return there(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.back(grads[0]), None, None


def _as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value.view_as(value)


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
            # Queries, keys and values read one input: one sum of its gradient, in place of three.
            self._given, self._taken = value, self.sum_in_backward(value)
        return self._taken

    def forget(self) -> None:
        """Forget what was shared: the forward is over, or the backward of what it has shared last begins."""
        self._given = self._taken = None

    def sum_in_backward(self, value: torch.Tensor) -> torch.Tensor:
        """The value as it is, which all slices have; each knows a part of its gradient."""
        return _Through.apply(value, _as_it_is, self._add_up_gradient)  # type: ignore[no-any-return]

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of the slices' values, whose gradient all slices know. All raise RankLost if one does not answer."""
        return _Through.apply(value, self._add_up, _as_it_is)  # type: ignore[no-any-return]

    def join(self, value: torch.Tensor) -> torch.Tensor:
        """The slices' values side by side in the last dim; all know the gradient of that."""
        return _Through.apply(value, self._joined, self._own)  # type: ignore[no-any-return]

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """This slice's part of the last dim of a value that all have; each knows its part of the gradient."""
        return _Through.apply(value, self._own, self._joined)  # type: ignore[no-any-return]

    def _add_up_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        # A recomputed forward gives a tensor of its own, which must not be met with the one before.
        self.forget()
        return self._add_up(grad)

    def _add_up(self, value: torch.Tensor) -> torch.Tensor:
        # The sum is made in place, and autograd may still need what it was made of.
        value = value.contiguous().clone()
        self._sum(value)
        return value

    def _joined(self, value: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._gather(parts, value.contiguous())
        return torch.cat(parts, -1)

    def _own(self, value: torch.Tensor) -> torch.Tensor:
        return value.chunk(self.size, -1)[self.rank].contiguous()

    def _sum(self, value: torch.Tensor) -> None:
        with guarded(_DOING):
            dist.all_reduce(value, group=self.group)

    def _gather(self, parts: list[torch.Tensor], own: torch.Tensor) -> None:
        with guarded(_DOING):
            dist.all_gather(parts, own, group=self.group)


class ImaginedSlices(Slices):
    """The first of ``size`` slices, as it looks to who traces it: what others would send has shapes and no values. The
    bytes that it would send in rings are counted in ``sent``, under "tp".
    """

    def __init__(self, size: int, sent: Counter[str]):
        self.rank, self.size, self._sent = 0, size, sent
        self._given = self._taken = None

    def _sum(self, value: torch.Tensor) -> None:
        self._sent["tp"] += 2 * value.nbytes * (self.size - 1) // self.size

    def _gather(self, parts: list[torch.Tensor], own: torch.Tensor) -> None:
        self._sent["tp"] += own.nbytes * (self.size - 1)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer's weight has inputs before outputs: gpt2's ``Conv1D``."""
    return type(module).__name__ == "Conv1D"


def cutting_of(style: str, module: nn.Module, name: str, param: torch.Tensor) -> tuple[()] | tuple[int, int]:
    """Along which dim ``style`` cuts the param ``name`` of ``module``, and how many matrices lie side by side there,
    each of which is cut; empty if every rank has all of it.
    """
    kind, groups = parts_of(style)
    outputs, inputs = (param.ndim - 1, param.ndim - 2) if is_transposed(module) else (param.ndim - 2, param.ndim - 1)
    if kind in ("colwise", "colwise_gather_output", "packed_colwise"):
        return outputs if param.ndim > 1 else 0, groups
    if kind in ("rowwise", "rowwise_split_input", "packed_rowwise"):
        return () if name == "bias" or param.ndim == 1 else (inputs, groups)
    if kind == "embedding_rowwise":
        return 0, 1
    return (1, 1) if kind in ("embedding_colwise", "columns") and param.ndim > 1 else ()


def parts_of(style: str) -> tuple[str, int]:
    """The name of a style, and how many matrices lie side by side: ``packed_colwise:3``; by default 2 if packed."""
    kind, _, groups = style.partition(":")
    return kind, int(groups) if groups else 2 if kind.startswith("packed") else 1


Forward = Callable[..., Any]


def _colwise(module: nn.Module, own: Forward, slices: Slices, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return own(slices.share(x), *args, **kwargs)


def _joined(module: nn.Module, own: Forward, slices: Slices, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return slices.join(own(slices.share(x), *args, **kwargs))


def _rowwise(module: nn.Module, own: Forward, slices: Slices, x: torch.Tensor) -> torch.Tensor:
    weight: Any = module.weight
    out = slices.sum(x @ weight if is_transposed(module) else nn.functional.linear(x, weight))
    # The bias after the sum: added in each slice it would count as often as there are slices.
    bias = getattr(module, "bias", None)
    return out if bias is None else out + bias


def _embedding_by_rows(module: nn.Module, own: Forward, slices: Slices, ids: torch.Tensor) -> torch.Tensor:
    weight: Any = module.weight
    rows = weight.shape[0]
    here = ids - slices.rank * rows
    # Other slices have the other rows: here they count as zeros, and the sum brings them.
    is_here = (here >= 0) & (here < rows)
    return slices.sum(own(here.clamp(0, rows - 1)) * is_here.unsqueeze(-1))


def _whole_with_summed_grads(module: nn.Module, own: Forward, slices: Slices, *args: Any, **kwargs: Any) -> Any:
    kept = own_params(module)
    for name in kept:
        # So that the module reads the summed view under the param's name, also where it asks its attributes.
        del module._parameters[name]
    try:
        for name, param in kept.items():
            setattr(module, name, slices.sum_in_backward(param))
        return own(*args, **kwargs)
    finally:
        for name in kept:
            module.__dict__.pop(name, None)
        module._parameters.update(kept)


def _summed(module: nn.Module, own: Forward, slices: Slices, *args: Any, **kwargs: Any) -> Any:
    return slices.sum(own(*args, **kwargs))


def _experts(module: nn.Module, own: Forward, slices: Slices, hidden: torch.Tensor, *routing: Any, **kw: Any) -> Any:
    # Each slice has a part of every expert: of the gradients of tokens and routing weights it knows a part.
    hidden = slices.sum_in_backward(hidden)
    if len(routing) >= 2:
        index, weights, *more = routing
        routing = (index, slices.sum_in_backward(weights), *more)
    return slices.sum(own(hidden, *routing, **kw))


def _rotated(module: nn.Module, own: Forward, slices: Slices, *args: Any, **kwargs: Any) -> torch.Tensor:
    """DeepSeek's: a part of the output goes to all heads of this slice past every layer that is cut."""
    out, rope = own(*args, **kwargs), module.__dict__["_gemini_rope_dim"]
    passed, turned = out.split([out.shape[-1] - rope, rope], -1)
    return torch.cat([passed, slices.sum_in_backward(turned)], -1)


def _divided(module: nn.Module, own: Forward, slices: Slices, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return own(x / slices.size, *args, **kwargs)


def _alibi(module: nn.Module, own: Forward, slices: Slices, *args: Any, alibi: torch.Tensor, **kwargs: Any) -> Any:
    """Bloom's attention: of the biases of all heads those of this slice."""
    heads = int(module.num_heads)  # type: ignore[arg-type]
    whole = alibi.unflatten(0, (-1, heads * slices.size))
    mine = whole[:, slices.rank * heads : (slices.rank + 1) * heads].flatten(0, 1)
    return own(*args, alibi=mine, **kwargs)


STYLES: dict[str, Callable[..., Any] | None] = {
    "colwise": _colwise,
    "packed_colwise": _colwise,
    "colwise_gather_output": _joined,
    "rowwise": _rowwise,
    "packed_rowwise": _rowwise,
    "rowwise_split_input": lambda module, own, slices, x: _rowwise(module, own, slices, slices.cut(x)),
    "embedding_rowwise": _embedding_by_rows,
    "embedding_colwise": _joined,
    "replicated_with_grad_allreduce": _whole_with_summed_grads,
    "all_reduce": _summed,
    "moe_tp_experts": _experts,
    "mla_kv_a_proj": _rotated,
    "moe_identity_expert": _divided,
    "alibi": _alibi,
    "columns": None,
    "local_params": None,
    "replicate": None,
}
"""Styles by name, as functions around a module's own forward; None: nothing is around it."""


def sliced_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a module with a slice of its params; a method, so that a copy of the module has its own."""
    style, slices = self.__dict__["_gemini_slice"]
    how = STYLES[parts_of(style)[0]]
    assert how is not None

    def own(*args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    return how(self, own, slices, *args, **kwargs)
