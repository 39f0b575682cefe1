"""Cuts a whole model into the slice of one rank of a mesh's ``tp``, by the plan that the model has.

First params become slices, each the same object as before. Then modules get what they do before and after their own
forward. Both are undone if the model cannot be managed. Batches of ranks that compute with parts of one model must be
the same on all of them: of different ones slices would add up what means nothing.

How a module computes with a slice of its params is said by the styles of transformers' ``tp_plan``, here on plain
tensors: along which dim a param is cut, and what is done around the module's own forward. A layer cut by columns and
the next one by rows meet twice: their results are added up over the slices in forward, and the gradients of their input
in backward. gloo and NCCL add up each element in one place: all ranks get the same bits. Of a linear layer cut by rows
the bias is added once, after the sum.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from gemini.config import GeminiConfig
from gemini.errors import RankMismatch, warn
from gemini.patches import Overrides
from gemini.planning.plan import Plan
from gemini.planning.trace import Source
from gemini.ranks.agree import Facts, agree, checksum_of
from gemini.ranks.group import Ranks, names_of, size_of
from gemini.ranks.wire import Tag, Wire, guarded
from gemini.train.modules.codes import first_coded
from gemini.train.modules.reading import is_tuner_layer, own_params
from gemini.train.observers import iter_tensors
from gemini.train.params.handle import SET_DATA, ParamHandle, TensorSlice

# ---- how a module computes with a slice -----------------------------------------------------------------------------


Way = Callable[[torch.Tensor], torch.Tensor]

_DOING = "a sum over the slices of a layer (tp)"


class _Through(Function):
    """What ``there`` makes of a value; ``back`` makes its gradient."""

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
    if kind in ("embedding_colwise", "columns"):
        return 1, 1
    return ()


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
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    rows = weight.shape[0]
    here = ids - slices.rank * rows
    # Other slices have the other rows: here they count as zeros, and the sum brings them.
    is_here = (here >= 0) & (here < rows)
    found = own(here.clamp(0, rows - 1))
    return slices.sum(found * is_here.unsqueeze(-1))


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


# ---- how a model is cut ---------------------------------------------------------------------------------------------


def first_differing(model: nn.Module, mesh: DeviceMesh, dim: str) -> str:
    """The first param that is not the same on all ranks along ``dim``."""
    said = [(name, tuple(param.shape), checksum_of(param.data)) for name, param in model.named_parameters()]
    everyone: list[Any] = [None] * size_of(mesh, dim)
    dist.all_gather_object(everyone, said, group=mesh.get_group(names_of(mesh).index(dim)))
    # Up to the shortest list: another number of params is said below.
    for of_param in zip(*everyone, strict=False):
        if any(other != of_param[0] for other in of_param):
            return str(of_param[0][0])
    return "" if len({len(said) for said in everyone}) == 1 else "the number of params"


def refuse_differing(model: nn.Module, mesh: DeviceMesh, dim: str, doing: str) -> None:
    """See that the model is the same on all ranks along ``dim``. Raises RankMismatch, on every rank, if it is not."""
    if differing := first_differing(model, mesh, dim):
        raise RankMismatch(
            f"{doing}: {differing!r} is not the same on all ranks of {dim}, which must have the same whole model: load "
            "the same weights, or draw them from the same seed"
        )


def style_of(plan: Mapping[str, str], name: str) -> str:
    """The style of a module or param, empty where it has none: a plan of transformers writes * for every number."""
    return plan.get(name) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")


class SlicePlan:
    """By the ends of names of modules their styles: of those that are cut by ``columns`` and by ``rows``, and of
    ``others``. ``counts``: the attributes that count heads or columns of this slice.
    """

    def __init__(self, columns: str, rows: str, others: Mapping[str, str], counts: Mapping[str, tuple[str, ...]]):
        self.styles = dict.fromkeys(columns.split(), "colwise") | dict.fromkeys(rows.split(), "rowwise") | dict(others)
        self.counts = counts


_HEAD = {"lm_head": "colwise_gather_output"}
PLANS = {
    "gpt2": SlicePlan(
        "mlp.c_fc",
        "attn.c_proj mlp.c_proj",
        {"attn.c_attn": "packed_colwise:3", **_HEAD},
        {"attn": ("split_size", "num_heads"), "attn.c_attn": ("nf",), "mlp.c_fc": ("nf",)},
    ),
    "opt": SlicePlan(
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj fc1",
        "self_attn.out_proj fc2",
        _HEAD,
        {"self_attn": ("num_heads",)},
    ),
    "bloom": SlicePlan(
        "self_attention.query_key_value mlp.dense_h_to_4h",
        "self_attention.dense mlp.dense_4h_to_h",
        {"self_attention": "alibi", **_HEAD},
        {"self_attention": ("num_heads",)},
    ),
    "bert": SlicePlan(
        "attention.self.query attention.self.key attention.self.value intermediate.dense",
        "attention.output.dense output.dense",
        {},
        {},
    ),
    "t5": SlicePlan(
        "SelfAttention.q SelfAttention.k SelfAttention.v EncDecAttention.q EncDecAttention.k EncDecAttention.v "
        "DenseReluDense.wi DenseReluDense.wi_0 DenseReluDense.wi_1",
        "SelfAttention.o EncDecAttention.o DenseReluDense.wo",
        {"relative_attention_bias": "columns", **_HEAD},
        {"SelfAttention": ("n_heads",), "EncDecAttention": ("n_heads",)},
    ),
}
"""By ``config.model_type``."""


def _own_plan(model: nn.Module) -> SlicePlan:
    return PLANS.get(getattr(getattr(model, "config", None), "model_type", ""), SlicePlan("", "", {}, {}))


def of_end(name: str, by_end: Mapping[str, object]) -> str | None:
    """The longest of the ends that ``name`` has."""
    found = [end for end in by_end if name == end or name.endswith(f".{end}")]
    # "attn.c_proj" before "c_proj": the longer end says more.
    return max(found, key=len) if found else None


class WholeParams(Overrides):
    """The params of a model that become slices, and what they and their modules were before."""

    comes_back = False
    """Whether the model is whole again when it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.params: dict[str, TensorSlice] = {}
        """By every name of a param that is cut, which slice of it is here."""
        self._whole: list[tuple[nn.Parameter, torch.Tensor]] = []

    def cut(self, model: nn.Module, cuts: Mapping[str, TensorSlice]) -> None:
        """Leave the slices of these params, in place."""
        named = dict(model.named_parameters(remove_duplicate=False))
        self.params = dict(cuts)
        for param, cut in {id(named[name]): (named[name], cut) for name, cut in cuts.items()}.values():
            # Kept until the model is managed: what is refused later gives the whole model back.
            self._whole.append((param, param.data))
            # In place: optimizers and ties hold this very object.
            SET_DATA(param, cut.of(param.data))

    def by_param(self, model: nn.Module) -> dict[int, TensorSlice]:
        """The slices by the ids of the params of ``model``, which may have let go of some."""
        named = dict(model.named_parameters(remove_duplicate=False))
        return {id(named[name]): cut for name, cut in self.params.items() if name in named}

    def put_on(self, model: nn.Module, ranks: Ranks | None = None) -> None:
        """Until :meth:`take_away`, modules of ``model`` (this one or one built alike) compute with what is here."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Make the params whole again."""
        while self._whole:
            SET_DATA(*self._whole.pop())

    def keep(self) -> None:
        """Let go of whole values: there is no way back."""
        self._whole.clear()


STANDS_IN = "_gemini_stands_in"
"""An attribute of classes of modules that stand in for those of another rank."""


class SlicedModel(WholeParams):
    """A model whose params are slices; ``slices``: the ranks that have the others."""

    def __init__(self, slices: Slices, styles: Mapping[str, str], counts: Mapping[str, tuple[str, ...]]):
        super().__init__()
        self.slices, self._styles, self._counts = slices, styles, counts
        self._hooks: list[RemovableHandle] = []

    def take_away(self) -> None:
        """Let modules compute with whole params again, unless :meth:`keep` has let go of what they were."""
        while self._before and self._hooks:
            self._hooks.pop().remove()
        super().take_away()

    def keep(self) -> None:
        super().keep()
        self._before.clear()

    def put_on(self, model: nn.Module, ranks: Ranks | None = None) -> None:
        for name, module in model.named_modules():
            # Of a stage on another rank: it has no params here, and computes nothing.
            if getattr(type(module), STANDS_IN, False):
                continue
            for attribute in self._counts.get(name, ()):
                self._put(module, attribute, getattr(module, attribute) // self.slices.size)
            style = self._styles.get(name)
            if style is None or STYLES[parts_of(style)[0]] is None:
                continue
            self._put(module, "_gemini_slice", (style, self.slices))
            if style == "embedding_rowwise" and getattr(module, "padding_idx", None) is not None:
                rows = self.params[f"{name}.weight"].own_shape[0]
                # The row of the padding in this slice, if it is one of its rows.
                here = module.padding_idx - self.slices.rank * rows
                self._put(module, "padding_idx", here if 0 <= here < rows else None)
            if style == "mla_kv_a_proj":
                config: Any = model.config
                self._put(module, "_gemini_rope_dim", config.get_text_config().qk_rope_head_dim)
            self._put(module, "forward", MethodType(sliced_forward, module))
        # Always, also after an error: what one forward has shared must not be taken for that of the next.
        self._hooks.append(model.register_forward_hook(lambda *_: self.slices.forget(), always_call=True))
        self._put(model, "_gemini_sliced", self)


def slice_tensors(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str] | None = None) -> nn.Module:
    """Slice the matrices of ``model`` for tensor parallel, in place: each rank keeps its own slice. Returns ``model``.

    :class:`gemini.GeminiDDP` calls it for a model that has a ``tp_plan``. Call it yourself, before ``GeminiDDP`` and
    with the same mesh, to give another plan.

    Args:
        model: the whole model, with the same weights on every rank of ``tp``.
        mesh: a ``DeviceMesh`` with a dimension named ``tp``. Without one the model is not changed.
        plan: which modules and params to slice, and how: ``{"model.layers.*.mlp.up_proj": "colwise", ...}``, where
            ``*`` stands for a number. The styles are those of transformers. By default the ``tp_plan`` of the model.

    Raises:
        ValueError: if there is no plan, a style is unknown, a size is not a multiple of the number of ranks, or the
            model has adapters, 4-bit weights, or slices already. Nothing was changed.
        RankMismatch: on all ranks, if their weights differ.
    """
    sliced = cut_whole(model, mesh, plan)
    if sliced is not None:
        sliced.put_on(model)
        sliced.keep()
    return model


def cut_whole(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str] | None = None, *, is_filled: bool = True
) -> SlicedModel | None:
    """The first half of :func:`slice_tensors`, which can be undone and raises what that does; None without ``tp``."""
    if size_of(mesh, "tp") == 1:
        return None
    if sliced_in(model) is not None:
        raise ValueError(f"this {type(model).__name__} is in slices already")
    if is_filled:
        refuse_differing(model, mesh, "tp", "tensor parallel")
    return _cut_params(model, Slices(mesh.get_group(names_of(mesh).index("tp"))), plan)


def imagine_slices(model: nn.Module, size: int, sent: Counter[str]) -> None:
    """Let a model without values compute the first of ``size`` slices, for tracing. Raises as :func:`slice_tensors`."""
    sliced = _cut_params(model, ImaginedSlices(size, sent))
    sliced.keep()
    sliced.put_on(model)


def _cut_params(model: nn.Module, slices: Slices, plan: Mapping[str, str] | None = None) -> SlicedModel:
    adapted = [name for name, module in model.named_modules() if is_tuner_layer(module)]
    if adapted:
        raise ValueError(
            f"tensor parallel does not slice adapters ({adapted[0]!r}), as it would have to with their layers. Use dp "
            "in place of tp"
        )
    if coded := first_coded(model):
        raise ValueError(
            f"tensor parallel does not slice 4-bit weights ({coded!r}), which share scales in blocks. Use dp in place "
            "of tp: it divides 4-bit weights among ranks"
        )
    counted: Mapping[str, tuple[str, ...]] = {}
    if plan is None:
        plan, counted = plan_of(model), _own_plan(model).counts
    styles = expanded(model, plan)
    cuts = cuts_of(model, styles, slices.rank, slices.size)
    if not cuts:
        raise ValueError(
            f"tensor parallel over {slices.size} ranks: the plan cuts no param of this {type(model).__name__}. Its "
            f"names are for example {', '.join(list(plan)[:3])}"
        )
    # Before anything is changed, so that nothing need be undone.
    _check_heads(model, styles, slices.size)
    counts = {name: counted[end] for name, _ in model.named_modules() if (end := of_end(name, counted))}
    sliced = SlicedModel(slices, styles, counts)
    sliced.cut(model, cuts)
    return sliced


def cut_if_whole(model: nn.Module, mesh: Any, *, is_filled: bool) -> SlicedModel | None:
    """Cut a model that is to be managed over ``mesh``: None if it has been cut by hand, or need not be cut.
    ``is_filled``: it has its values; else it is whole, and the same on every rank. Raises as :func:`slice_tensors`.
    """
    size = 1 if mesh is None else size_of(mesh, "tp")
    found = sliced_in(model)
    if found is not None:
        if found.slices.size != size:
            raise ValueError(
                f"this {type(model).__name__} is in slices over tp={found.slices.size}, and the mesh has tp={size}: "
                "give GeminiDDP the mesh that the model was sliced for"
            )
        return None
    if size == 1 or not (_own_plan(model).styles or getattr(model, "tp_plan", None)):
        return None
    if is_filled and (differing := first_differing(model, mesh, "tp")):
        warn(
            f"{type(model).__name__} has other weights on each rank of tp ({differing!r} is the first), so it is "
            "treated as sliced by hand already. If it is meant to be a whole model, give all ranks the same weights: "
            "load the same files, or set the same seed"
        )
        return None
    return _cut_params(model, Slices(mesh.get_group(names_of(mesh).index("tp"))))


def cuts_in(model: nn.Module) -> dict[int, TensorSlice]:
    """Find the slices of a model that was sliced before, or of a part of it, by the ids of its params."""
    found: dict[int, TensorSlice] = {}
    for module in model.modules():
        if "_gemini_sliced" in module.__dict__:
            found |= module.__dict__["_gemini_sliced"].by_param(module)
    return found


def sliced_in(model: nn.Module) -> SlicedModel | None:
    """Find what :func:`slice_tensors` has made of a model, or of a module in it."""
    return next((m.__dict__["_gemini_sliced"] for m in model.modules() if "_gemini_sliced" in m.__dict__), None)


def plan_of(model: nn.Module) -> dict[str, str]:
    """The plan that transformers has for a model. Raises ValueError if it has none."""
    if own := _own_plan(model).styles:
        return {name: own[end] for name, _ in model.named_modules() if (end := of_end(name, own))}
    found = getattr(model, "tp_plan", None)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no plan for tensor parallel (tp_plan): give one, names of modules to styles "
            f"({', '.join(STYLES)}), or use dp in place of tp"
        )
    return dict(found)


def expanded(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The plan, with names of modules and params in place of patterns. Raises ValueError for styles unknown here."""
    unknown = {style for style in plan.values() if parts_of(style)[0] not in STYLES}
    if unknown:
        raise ValueError(f"tensor parallel by style {sorted(unknown)[0]!r}: known are {', '.join(STYLES)}")
    found: dict[str, str] = {}
    for module_name, module in model.named_modules():
        style = style_of(plan, module_name)
        for name in own_params(module):
            full = f"{module_name}.{name}" if module_name else name
            if own := style_of(plan, full) or style:
                found[full] = own
        if style:
            found[module_name] = style
    return _with_tied(model, found)


def _with_tied(model: nn.Module, chosen: dict[str, str]) -> dict[str, str]:
    """Cut an embedding by words whose weight is that of a head that is cut by words."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for param in own_params(module).values():
            owners.setdefault(id(param), []).append((name, module))
    for shared in owners.values():
        if len(shared) > 1 and any(chosen.get(name) == "colwise_gather_output" for name, _ in shared):
            for name, module in shared:
                if isinstance(module, nn.Embedding):
                    chosen[name] = chosen[f"{name}.weight"] = "embedding_rowwise"
    return chosen


def cuts_of(model: nn.Module, styles: Mapping[str, str], rank: int, size: int) -> dict[str, TensorSlice]:
    """Make the slices of ``rank``, by the name of the param that is cut; of params with several names under each.
    Raises ValueError for one that ``size`` does not divide, or whose names are to be cut in two ways.
    """
    found: dict[str, TensorSlice] = {}
    by_param: dict[int, tuple[str, TensorSlice | None]] = {}
    for module_name, module in model.named_modules():
        for name, param in own_params(module).items():
            full = f"{module_name}.{name}" if module_name else name
            how = cutting_of(styles[full], module, name, param) if full in styles else ()
            cut = TensorSlice(tuple(param.shape), *how, rank, size) if how else None
            # A tied param is cut once, whatever its names are called in the plan.
            first = by_param.setdefault(id(param), (full, cut))
            if first[1] != cut:
                raise ValueError(
                    f"tensor parallel: {first[0]} and {full} are one param, and the plan cuts them in two ways. Give "
                    "slice_tensors a plan that cuts both alike, or none of them"
                )
            if cut is None:
                continue
            length = cut.shape[cut.dim] // cut.groups
            if length % size:
                raise ValueError(
                    f"tensor parallel over {size} ranks: {full} has {length} elements along dim {cut.dim}, which is "
                    f"not a multiple of {size}"
                )
            found[full] = cut
    return found


def _check_heads(model: nn.Module, styles: Mapping[str, str], size: int) -> None:
    # An attention that is not cut may have any number of heads.
    if not any(re.search(r"(q|k|v|qkv)_proj$|query_key_value$", name) for name in styles):
        return
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    for what in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(text, what, None)
        if isinstance(number, int) and number % size:
            raise ValueError(
                f"tensor parallel over {size} ranks: the model has {what}={number}, which is not a multiple of {size}"
            )


# ---- ranks with slices of one model, outside of the forward ----------------------------------------------------------


def refuse_unsuited(config: GeminiConfig, ranks: Ranks, *, is_cut: bool, in_stages: bool) -> None:
    """Refuse settings that cannot be kept over replicas or slices of a model. ``is_cut``: this rank has slices of its
    params. ``in_stages``: the model is that of a :class:`gemini.Pipeline` over ranks.
    """
    if ranks.replicas.size > 1 and ranks.experts.size == 1 and config.gradients == "transient":
        raise ValueError(
            'gradients="transient" updates inside backward, before the gradients of the replicas are added up: '
            'with a 2-D mesh use gradients="retain" or "accumulate", or a mesh of one dimension'
        )
    if config.memory.durable and (ranks.replicas.size > 1 or ranks.slice_):
        raise ValueError(
            f"MemoryBudget(durable=True) is for ranks that divide one model, and this mesh has "
            f"{'replicas' if ranks.replicas.size > 1 else 'slices'} of it, each with a "
            "store of its own. Leave durable out and use save_checkpoint(folder, ..., wait=False)"
        )
    if ranks.slice_ and config.precision == "fp16" and not ranks.is_one_model:
        raise ValueError(
            f'precision="fp16" with a model in slices (this rank has {ranks.slice_}): each slice would decide for '
            'itself whether a step overflowed. Use precision="bf16"'
        )
    if not is_cut or ranks.slices.size == 1:
        return
    rule, dim = config.rule_spec, "tp" if ranks.experts.size == 1 else "ep"
    if config.gradients == "transient" and ranks.experts.size == 1:
        raise ValueError(
            'gradients="transient" updates inside backward, when a slice of a model (tp) can only check its own '
            'part of each gradient for inf and NaN: use gradients="retain" or "accumulate"'
        )
    if rule.whole:
        raise ValueError(
            f"the optimizer {rule.name} looks at whole params, and a mesh with {dim} leaves slices of them on a rank: "
            f"use one that works element by element (AdamW, Lion, SGD, Adan, Sophia), or dp in place of {dim}"
        )
    if config.tile_tokens is not None and (config.tile_tokens != "auto" or ranks.experts.size > 1):
        raise ValueError(
            f"tile_tokens={config.tile_tokens!r} with a model in slices ({dim}): layers that communicate with other "
            "ranks cannot be computed in tiles. Leave tile_tokens out"
        )
    trace = config.placement.trace if isinstance(config.placement, Plan) else config.trace
    if ranks.experts.size > 1 and trace is not None and trace.source is Source.AHEAD:
        raise ValueError(
            "a trace (or plan) made with gemini.trace includes all experts, but with ep each rank has only some of "
            "them. Leave it out (trace=, placement=)"
        )
    if ranks.stages.size > 1 and not in_stages:
        raise ValueError(
            "a mesh with pp and tp: GeminiDDP cuts matrices (tp), and gemini.Pipeline makes stages (pp) as well. Give "
            "the whole model to that, or use dp in place of pp"
        )


_NONE = -1.0
"""In place of the sum of squares of a gradient that is not there."""


def whole_totals(wire: Wire, handles: Sequence[ParamHandle], own: Sequence[float | None]) -> list[float | None]:
    """Sums of squares over whole gradients, in the order of the slices that the ranks of ``wire`` have; the same on all
    of them. None for no gradient. Raises RankMismatch, on every rank, if one has a gradient that another has not.
    """
    said = torch.tensor([_NONE if total is None else total for total in own], dtype=torch.float64, device="cpu")
    rows = wire.swap(Tag.VALUES, said, "the gradient norm of slices").T.tolist()
    totals: list[float | None] = []
    for handle, row in zip(handles, rows, strict=True):
        # On all ranks the same rows, so that all of them raise or none.
        missing = [rank for rank, total in zip(wire.global_ranks, row, strict=True) if total == _NONE]
        there = [rank for rank in wire.global_ranks if rank not in missing]
        if missing and there:
            raise RankMismatch(
                f"{handle.name!r} has a gradient on ranks {there} and none on ranks {missing}, which have "
                "other slices of the model (tp, ep): all of them must run the same forward and backward. No weight "
                "was changed"
            )
        # A param that all have has the same gradient everywhere, to the bit; one not finite anywhere is found by all.
        is_sum = handle.cut is not None or not all(map(math.isfinite, row))
        totals.append(None if missing else sum(row) if is_sum else row[0])
    return totals


def compare_first_batch(model: nn.Module, wire: Wire) -> RemovableHandle:
    """Compare what the first forward with gradients is given, by checksums, among the ranks of ``wire`` (``tp``)."""

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        named = {**{f"argument {number}": value for number, value in enumerate(args)}, **kwargs}
        compare_batches(wire, named, values=True)
        # Once: what is compared is how the data is dealt out, which does not change.
        handle.remove()

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)
    return handle


def compare_batches(
    wire: Wire, named: Mapping[str, Any], *, values: bool, refusal: BaseException | None = None
) -> None:
    """Compare the tensors of a batch among the ranks of ``wire``, which differ in ``tp`` or ``pp`` alone: by shapes and
    dtypes, and with ``values`` by checksums. ``refusal``: why this rank cannot compute with its own. Raises
    RankMismatch, on every rank, if they differ; if another rank refuses its batch, on those that do not.
    """

    def said(tensor: torch.Tensor) -> str:
        form = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        return f"{form} checksum {checksum_of(tensor):08x}" if values else form

    def facts() -> Facts:
        of_all = {name: list(map(said, iter_tensors(value))) for name, value in named.items()}
        return Facts({name: tensors for name, tensors in of_all.items() if tensors})

    doing = "the first batch" if values else "the batch"
    agree(wire, doing, facts, refusal, words="batch")
