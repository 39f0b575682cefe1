"""Cuts a whole model into the slice of one rank of a mesh's ``tp``, by the plan that the model has.

First params become slices, each the same object as before. Then modules get what they do before and after their own
forward. Both are undone if the model cannot be managed. Batches of ranks that compute with parts of one model must be
the same on all of them: of different ones slices would add up what means nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from gemini.config import GeminiConfig
from gemini.errors import RankMismatch, warn
from gemini.patches import Overrides
from gemini.planning.plan import Plan
from gemini.planning.trace import Source
from gemini.ranks.agree import Facts, agree, checksum_of
from gemini.ranks.group import Ranks, names_of, size_of
from gemini.ranks.wire import Tag, Wire
from gemini.train.modules.codes import first_coded
from gemini.train.modules.reading import is_tuner_layer, own_params
from gemini.train.observers import iter_tensors
from gemini.train.params.handle import SET_DATA, ParamHandle, TensorSlice
from gemini.train.slices.styles import STYLES, ImaginedSlices, Slices, cutting_of, parts_of, sliced_forward


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
