"""Cuts a whole model into the slice of one rank of a mesh's ``tp``, by the plan that the model has."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MethodType

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gemini.ranks.mesh import names_of, size_of
from gemini.train.slices.plans import PLANS, Plan, of_end
from gemini.train.slices.styles import STYLES, Shard, Slices, parts_of, shard_of, sliced_forward


def slice_tensors(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str] | None = None) -> nn.Module:
    """Leave this rank's slice of every matrix that ``plan`` cuts, in place; for :class:`gemini.GeminiDDP` with the same
    mesh.

    Args:
        model: whole, on every rank of ``tp`` with the same weights.
        mesh: with a dim ``tp``.
        plan: names of modules and params (``*`` for numbers) to styles; the model's own ``tp_plan`` by default.

    Raises:
        ValueError: for a model without a plan, styles that mean nothing, and sizes that do not divide; nothing is
            changed then.
    """
    size = size_of(mesh, "tp")
    if size == 1:
        return model
    slices = Slices(mesh.get_group(names_of(mesh).index("tp")))
    chosen = expanded(model, plan_of(model) if plan is None else plan)
    shards = shards_of(model, chosen)
    _check(model, shards, chosen, size)
    cut: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, param in list(module._parameters.items()):
            full = f"{module_name}.{name}" if module_name else name
            if param is None or full not in shards:
                continue
            if id(param) not in cut:
                own = shards[full].of(param.detach(), slices.rank, slices.size)
                cut[id(param)] = nn.Parameter(own, requires_grad=param.requires_grad)
            module._parameters[name] = cut[id(param)]
    for name, module in model.named_modules():
        for attribute in counts_of(model, name) if plan is None else ():
            setattr(module, attribute, getattr(module, attribute) // size)
        style = chosen.get(name)
        if style is None or STYLES[parts_of(style)[0]] is None:
            continue
        module.__dict__["_gemini_slice"] = (style, slices)
        if style == "embedding_rowwise" and getattr(module, "padding_idx", None) is not None:
            rows = module.weight.shape[0]
            here = module.padding_idx - slices.rank * rows
            module.padding_idx = here if 0 <= here < rows else None
        if style == "mla_kv_a_proj":
            module.__dict__["_gemini_rope_dim"] = model.config.get_text_config().qk_rope_head_dim  # type: ignore[union-attr]
        module.forward = MethodType(sliced_forward, module)  # type: ignore[method-assign]
    model.register_forward_hook(lambda *_: slices.forget(), always_call=True)
    return model


def plan_of(model: nn.Module) -> dict[str, str]:
    """The plan that transformers has for a model.

    Raises:
        ValueError: if it has none.
    """
    found = getattr(model, "tp_plan", None)
    own = _own_plan(model)
    if own is not None:
        return {name: own.styles[end] for name, _ in model.named_modules() if (end := of_end(name, own.styles))}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no plan for tensor parallel (tp_plan): give one, names of modules to styles "
            f"({', '.join(STYLES)}), or use dp in place of tp"
        )
    return dict(found)


def _own_plan(model: nn.Module) -> Plan | None:
    return PLANS.get(getattr(getattr(model, "config", None), "model_type", ""))


def counts_of(model: nn.Module, name: str) -> tuple[str, ...]:
    """Attributes of a module that count what a slice has a part of."""
    own = _own_plan(model)
    end = None if own is None else of_end(name, own.counts)
    return () if own is None or end is None else own.counts[end]


def expanded(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The plan with the names of this model's modules and params in place of patterns.

    Raises:
        ValueError: for styles that mean nothing here.
    """
    unknown = {style for style in plan.values() if parts_of(style)[0] not in STYLES}
    if unknown:
        raise ValueError(f"tensor parallel by style {sorted(unknown)[0]!r}: known are {', '.join(STYLES)}")

    def rule_for(name: str) -> str | None:
        return plan.get(name) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))

    found: dict[str, str] = {}
    for module_name, module in model.named_modules():
        style = rule_for(module_name)
        for name, param in module._parameters.items():
            full = f"{module_name}.{name}" if module_name else name
            if param is not None and (own := rule_for(full) or style) is not None:
                found[full] = own
        if style is not None:
            found[module_name] = style
    return _with_tied(model, found)


def _with_tied(model: nn.Module, chosen: dict[str, str]) -> dict[str, str]:
    """An embedding whose weight is that of a head that is cut by words is cut by words too."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(id(param), []).append((name, module))
    for shared in owners.values():
        if len(shared) > 1 and any(chosen.get(name) == "colwise_gather_output" for name, _ in shared):
            for name, module in shared:
                if isinstance(module, nn.Embedding):
                    chosen[name] = chosen[f"{name}.weight"] = "embedding_rowwise"
    return chosen


def shards_of(model: nn.Module, chosen: Mapping[str, str]) -> dict[str, Shard]:
    """By the name of a param, how it is cut; of params with several names each."""
    found = {}
    for module_name, module in model.named_modules():
        for name, param in module._parameters.items():
            full = f"{module_name}.{name}" if module_name else name
            if (
                param is not None
                and full in chosen
                and (shard := shard_of(chosen[full], module, name, param)) is not None
            ):
                found[full] = shard
    return found


def _check(model: nn.Module, shards: Mapping[str, Shard], chosen: Mapping[str, str], size: int) -> None:
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    heads = {
        what: number
        for what in ("num_attention_heads", "num_key_value_heads")
        if isinstance(number := getattr(text, what, None), int)
    }
    cuts_heads = any(re.search(r"(q|k|v|qkv)_proj$|query_key_value$", name) for name in chosen)
    for what, number in heads.items() if cuts_heads else ():
        if number % size:
            raise ValueError(
                f"tensor parallel over {size} ranks: the model has {what}={number}, which that does not divide. Sizes "
                f"that do: {_divisors(math.gcd(*heads.values()))}"
            )
    for name, shard in shards.items():
        length = shard.shape[shard.dim] // shard.groups
        if length % size:
            raise ValueError(
                f"tensor parallel over {size} ranks: {name} has {length} to cut along dim {shard.dim}, which that does "
                f"not divide. Sizes that do: {_divisors(length)}"
            )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(2, min(number, 64) + 1) if number % n == 0) or "none"
