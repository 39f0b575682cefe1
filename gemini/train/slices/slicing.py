"""Cuts a whole model into the slice of one rank of a mesh's ``tp``, by the plan that the model has.

First params become slices, each the same object as before. Then modules get what they do before and after their own
forward (:mod:`gemini.train.slices.layers`). Both are undone if the model cannot be managed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from gemini.errors import warn
from gemini.interrupts import WHOLE
from gemini.patches import Overrides
from gemini.ranks.group import Ranks, names_of, size_of
from gemini.train.modules.codes import first_coded
from gemini.train.modules.float8 import is_float8
from gemini.train.modules.reading import is_tuner_layer, own_params
from gemini.train.params.handle import SET_DATA, TensorSlice
from gemini.train.slices.alike import first_differing, refuse_differing
from gemini.train.slices.layers import STYLES, ImaginedSlices, Slices, cutting_of, parts_of, sliced_forward


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

    def __init__(self, params: Mapping[str, TensorSlice]):
        super().__init__()
        self.params = dict(params)
        """By every name of a param that is cut, which slice of it stays here."""
        self._whole: list[tuple[nn.Parameter, torch.Tensor]] = []

    def cut(self, model: nn.Module) -> None:
        """Leave the slices of the params of ``model``, in place; what breaks off is undone by :meth:`give_back`."""
        by_id = self.by_param(model)
        for param in [param for param in model.parameters() if id(param) in by_id]:
            # Kept until the model is managed: what is refused later gives the whole model back.
            self._whole.append((param, param.data))
            # In place: optimizers and ties hold this very object.
            SET_DATA(param, by_id[id(param)].of(param.data))

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

    def __init__(
        self,
        params: Mapping[str, TensorSlice],
        slices: Slices,
        styles: Mapping[str, str],
        counts: Mapping[str, tuple[str, ...]],
    ):
        super().__init__(params)
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
    sliced = slices_of(model, mesh, plan)
    if sliced is not None:
        with WHOLE:
            sliced.cut(model)
            sliced.put_on(model)
            sliced.keep()
    return model


def slices_of(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str] | None = None, *, is_filled: bool = True
) -> SlicedModel | None:
    """Which slices :func:`slice_tensors` leaves, with what it raises; nothing is cut yet. None without ``tp``."""
    if size_of(mesh, "tp") == 1:
        return None
    if sliced_in(model) is not None:
        raise ValueError(f"this {type(model).__name__} is in slices already")
    if is_filled:
        refuse_differing(model, mesh, "tp", "tensor parallel")
    return _make_slices(model, Slices(mesh.get_group(names_of(mesh).index("tp"))), plan)


def imagine_slices(model: nn.Module, size: int, sent: Counter[str]) -> None:
    """Let a model without values compute the first of ``size`` slices, for tracing. Raises as :func:`slice_tensors`."""
    sliced = _make_slices(model, ImaginedSlices(size, sent))
    sliced.cut(model)
    sliced.keep()
    sliced.put_on(model)


def _make_slices(model: nn.Module, slices: Slices, plan: Mapping[str, str] | None = None) -> SlicedModel:
    """Make the slices by ``plan``, by default the model's own; nothing is cut. Raises as :func:`slice_tensors`."""
    _refuse_uncuttable(model)
    plan = plan_of(model) if plan is None else plan
    styles = expanded(model, plan)
    cuts = cuts_of(model, styles, slices.rank, slices.size)
    if not cuts:
        raise ValueError(
            f"tensor parallel over {slices.size} ranks: the plan cuts no param of this {type(model).__name__}. Its "
            f"names are for example {', '.join(list(plan)[:3])}"
        )
    _check_heads(model, styles, slices.size)
    # Counts of heads or columns that a slice divides: of modules that compute with columns of this slice alone.
    counts = _own_plan(model).counts
    here = [name for name, style in styles.items() if parts_of(style)[0] in ("colwise", "packed_colwise")]
    found = {name: counts[end] for name, _ in model.named_modules() if (end := of_end(name, counts))}
    own = {name: own for name, own in found.items() if any(f"{cut}.".startswith(f"{name}.") for cut in here)}
    return SlicedModel(cuts, slices, styles, own)


def _refuse_uncuttable(model: nn.Module) -> None:
    if adapted := [name for name, module in model.named_modules() if is_tuner_layer(module)]:
        raise ValueError(
            f"tensor parallel does not slice adapters ({adapted[0]!r}), as it would have to with their layers. Use dp "
            "in place of tp"
        )
    if multiplied := [name for name, module in model.named_modules() if is_float8(module)]:
        raise ValueError(
            f"tensor parallel does not slice layers that multiply in float8 ({multiplied[0]!r}), whose scales are of "
            "whole weights. Use dp in place of tp"
        )
    if coded := first_coded(model):
        raise ValueError(
            f"tensor parallel does not slice 4-bit weights ({coded!r}), which share scales in blocks. Use dp in place "
            "of tp: it divides 4-bit weights among ranks"
        )


def slices_if_whole(model: nn.Module, mesh: Any, *, is_filled: bool) -> SlicedModel | None:
    """Which slices of a model are to be managed over ``mesh``: None if it has been cut by hand, or need not be cut.
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
    return _make_slices(model, Slices(mesh.get_group(names_of(mesh).index("tp"))))


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
    unknown = {style for style in plan.values() if not re.fullmatch(rf"({'|'.join(STYLES)})(:[1-9]\d*)?", style)}
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
            length, parts = cut.shape[cut.dim], cut.groups * size
            if length % parts:
                raise ValueError(
                    f"tensor parallel over {size} ranks: {full} has {length} elements along dim {cut.dim}, which is "
                    f"not a multiple of {parts}"
                )
            found[full] = cut
    return found


def _check_heads(model: nn.Module, styles: Mapping[str, str], size: int) -> None:
    # An attention that is not cut may have any number of heads.
    if not any(re.search(r"(q|k|v|qkv)_proj$|query_key_value$|c_attn$|\.query$", name) for name in styles):
        return
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    for what in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(text, what, None)
        if isinstance(number, int) and number % size:
            raise ValueError(
                f"tensor parallel over {size} ranks: the model has {what}={number}, which is not a multiple of {size}"
            )
