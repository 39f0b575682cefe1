"""Expert parallel: one rank of a mesh's ``ep`` has some experts of every layer, and all of what is no expert.

Experts are matrices of three dims, of which the first counts experts; they are divided by the plan that transformers
has for that. Tokens go to the ranks that have their experts, and what these make of them comes back: two all-to-alls
per layer. Each (token, expert) pair travels as a row, with its weight, so that whichever kernel computes the experts
sees its own arguments: rows, the expert of each by its number here, and weights. Their gradients travel the way back.
What a rank is sent depends on the others' routers, so each layer begins with the numbers of rows. Each exchange begins
with where its rank stands: of one that evaluates alone, the others hear before rows of different sizes meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gemini.errors import RankMismatch
from gemini.ranks.group import Ranks, place_in, size_of
from gemini.ranks.wire import Tag, Wire
from gemini.train.modules.reading import is_a, is_tuner_layer, own_params
from gemini.train.params.handle import TensorSlice
from gemini.train.slices.alike import refuse_differing
from gemini.train.slices.slicing import WholeParams, style_of

_WHAT = "an exchange of tokens (expert parallel)"


_PLACES = (
    "the forward of {}, before its experts",
    "the forward of {}, behind its experts",
    "the backward of {}, before its experts",
    "the backward of {}, behind its experts",
)
DISPATCH, COMBINE, COMBINE_BACKWARD, DISPATCH_BACKWARD = range(4)
"""Places of a rank in a layer, and how an error calls them."""


class ExpertExchange:
    """The exchange among ranks that have the experts of the modules ``names``, at most ``most`` of one on all ranks."""

    def __init__(self, wire: Wire, names: Sequence[str], most: int):
        self.wire, self._names, self._most = wire, names, most

    def meet(self, point: int, layer: int, numbers: torch.Tensor | None = None) -> torch.Tensor:
        """Wait until all ranks stand at ``point`` of a layer; some integers of each, stacked, on the CPU. Raises
        RankMismatch, on every rank, if one stands elsewhere.
        """
        # As long for every layer and point: ranks that stand elsewhere can read it.
        said = torch.zeros(2 + self._most, dtype=torch.int64, device="cpu")
        # One that evaluates stands elsewhere: it makes no backward, in which the others would wait for it.
        said[0], said[1] = 2 * point + (not torch.is_grad_enabled()), layer
        if numbers is not None:
            said[2 : 2 + len(numbers)] = numbers
        told = self.wire.swap(Tag.EXPERTS, said, _WHAT)
        if not bool((told[:, :2] == told[0, :2]).all()):
            where = "; ".join(
                f"rank {rank} is in {_PLACES[at // 2].format(self._names[number])}"
                f"{' (without gradients)' if at % 2 and at < 2 * COMBINE_BACKWARD else ''}"
                for rank, (at, number) in zip(self.wire.global_ranks, told[:, :2].tolist(), strict=True)
            )
            raise RankMismatch(
                f"ranks with other experts of the same layers (ep) do different things: {where}. Every rank of a mesh "
                "with ep must make the same forwards and backwards, evaluations too"
            )
        return told[:, 2:] if numbers is None else told[:, 2 : 2 + len(numbers)]


class _Way(NamedTuple):
    """A way of rows: how many go to and come from each rank, and where ranks meet before they go back in backward."""

    exchange: ExpertExchange
    sent: list[int]
    received: list[int]
    back: tuple[int, int]


class _SwapRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.way = way
        return tuple(way.exchange.wire.all_to_all(Tag.EXPERTS, part, way.sent, way.received, _WHAT) for part in parts)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        way: _Way = ctx.way
        # Backwards of layers may run in another order on a rank that took another path.
        way.exchange.meet(*way.back)
        return None, *(way.exchange.wire.all_to_all(Tag.EXPERTS, grad, way.received, way.sent, _WHAT) for grad in grads)


def dispatched_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """``forward`` of a module that has some of its layer's experts; a method. ``hidden_states``: of this rank's tokens,
    (tokens, hidden size): what all experts make of them is the result. ``top_k_index``: each token's experts by their
    numbers in the whole layer, (tokens, k); ``top_k_weights``: what each of these counts, (tokens, k).
    """
    exchange: ExpertExchange
    exchange, layer = self.__dict__["_gemini_experts"]
    num_here = int(self.num_experts)  # type: ignore[arg-type]
    (num_tokens, top_k), size = top_k_index.shape, exchange.wire.size
    experts = top_k_index.reshape(-1)
    # Stable, so that rows of one expert stay in the order of tokens: sums depend on it.
    order = experts.argsort(stable=True)
    counts = torch.bincount(experts, minlength=num_here * size).cpu()
    # On the CPU: the sizes of the next messages are needed there before they can begin.
    told = exchange.meet(DISPATCH, layer, counts).view(size, size, num_here)
    sent = told[exchange.wire.rank].sum(-1).tolist()
    of_here = told[:, exchange.wire.rank]  # by the rank they come from, and by expert
    # Known before any row travels: memory for them is made once.
    received = of_here.sum(-1).tolist()
    there = _Way(exchange, sent, received, (DISPATCH_BACKWARD, layer))
    rows, weights = _SwapRows.apply(there, hidden_states[order // top_k], top_k_weights.reshape(-1)[order])
    numbers = torch.arange(num_here, device="cpu").repeat(size).repeat_interleave(of_here.reshape(-1))
    numbers = numbers.to(experts.device)
    num_rows = len(rows)
    if not num_rows:  # a row of zeros, so that backward comes through here and these experts have a gradient
        rows, weights, numbers = rows.sum(0, keepdim=True), weights.sum(0, keepdim=True), numbers.new_zeros(1)
    # The module's own kernel, with one expert for each row and its weight.
    made = type(self).forward(self, rows, numbers.unsqueeze(-1), weights.unsqueeze(-1))
    # Again: a rank that failed in its experts is heard of here, and not by rows that never come.
    exchange.meet(COMBINE, layer)
    (back,) = _SwapRows.apply(_Way(exchange, received, sent, (COMBINE_BACKWARD, layer)), made[:num_rows])
    # Back in the order of tokens and of their k experts, in which the sum is made.
    return back[order.argsort()].view(num_tokens, top_k, -1).sum(1).to(hidden_states.dtype)


_MODULES, _PARAMS = "ep_dispatch_experts", "grouped_gemm"
"""Styles of transformers' ``ep_plan``."""


class SpreadExperts(WholeParams):
    """A model that has some of its experts, by the names of the ``modules`` that have them."""

    comes_back = True

    def __init__(self, params: Mapping[str, TensorSlice], modules: list[str]):
        super().__init__(params)
        self._modules = modules

    def put_on(self, model: nn.Module, ranks: Ranks | None = None) -> None:
        assert ranks is not None
        here = {name: module for name, module in model.named_modules() if name in self._modules}
        most = max((int(module.num_experts) for module in here.values()), default=0)  # type: ignore[arg-type]
        exchange = ExpertExchange(ranks.experts, list(here), most)
        for number, module in enumerate(here.values()):
            # Kernels count the experts that are here by this attribute.
            self._put(module, "num_experts", int(module.num_experts) // exchange.wire.size)  # type: ignore[arg-type]
            self._put(module, "_gemini_experts", (exchange, number))
            self._put(module, "forward", MethodType(dispatched_forward, module))


def experts_of(model: nn.Module, mesh: DeviceMesh | None, *, is_filled: bool) -> SpreadExperts | None:
    """Say which experts stay here; nothing is cut yet. None without ``ep``. ``is_filled``: the model has its values;
    else it is the same on every rank. Raises ValueError for a model without experts, adapters of experts, and sizes
    that do not divide; RankMismatch, on every rank, if ranks of ``ep`` have other weights.
    """
    if mesh is None or (size := size_of(mesh, "ep")) == 1:
        return None
    plan = plan_of(model)
    found = [name for name, _ in model.named_modules() if style_of(plan, name) == _MODULES]
    adapted = next((name for name in found if any(map(is_tuner_layer, model.get_submodule(name).modules()))), None)
    if adapted is not None:
        raise ValueError(
            f"expert parallel does not divide adapters of experts ({adapted!r}): choose other modules for the adapters "
            "(target_modules=, target_parameters=), or use dp in place of ep"
        )
    cuts: dict[str, TensorSlice] = {}
    for name in found:
        for own, param in own_params(model.get_submodule(name)).items():
            if style_of(plan, f"{name}.{own}") != _PARAMS:
                continue
            if param.shape[0] % size:
                raise ValueError(
                    f"expert parallel over ep={size} ranks: {name} has {param.shape[0]} experts, which is not a "
                    f"multiple of {size}"
                )
            cuts[f"{name}.{own}"] = TensorSlice(tuple(param.shape), 0, 1, place_in(mesh, "ep"), size)
    if not cuts:
        raise ValueError(
            f"mesh has ep={size}, and {type(model).__name__} has no plan of transformers for dividing experts "
            "(ep_plan): use dp in place of ep"
        )
    if is_filled:
        refuse_differing(model, mesh, "ep", "expert parallel")
    return SpreadExperts(cuts, found)


def plan_of(model: nn.Module) -> dict[str, str]:
    """The plan that transformers has for a model, or for the base of one with adapters; empty if there is none."""
    base = model.get_base_model() if is_a(type(model), "PeftModel") else model  # type: ignore[operator]
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    return {f"{prefix}{name}": style for name, style in (getattr(base, "ep_plan", None) or {}).items()}
