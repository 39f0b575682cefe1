"""What a manifest says of params, groups and buffers, of one stage of a model or of all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini.errors import RankMismatch
from gemini.train.checkpoint.states import factors_of, groups_of
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.by_name import ByName
from gemini.train.params.codes import scales_in
from gemini.train.params.handle import ParamSet, StageParam, handle_of
from gemini.train.params.state_dict import beside_params


class ModelPart(NamedTuple):
    """Of the params that are here, by the names that they have in the whole model."""

    params: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    buffers: dict[str, Any]
    """All that the model's state has beside params, and the scales of codes, which are nothing without them."""
    factors: dict[str, dict[str, torch.Tensor]]
    exact: list[str]


def part_of(model: nn.Module, optimizer: HybridOptimizer, params: ParamSet, by_names: ByName) -> ModelPart:
    """What this process has.

    Raises:
        TypeError: for params of the optimizer that are not managed, of a model in stages: there are no names for them.
    """
    handles = params.handles
    if params.of_stages and any(handle_of(p) is None for group in optimizer.param_groups for p in group["params"]):
        raise TypeError(
            "a checkpoint of a pipeline over ranks holds managed params alone, and this optimizer has others too: give "
            "those to an optimizer of their own"
        )
    described = {
        h.whole_name: {"shape": list(h.whole_shape), "step": h.num_steps, "trained": h.chunk.trained}
        | ({} if h.cut is None else {"cut": [h.cut.dim, h.cut.groups, h.cut.size]})
        | ({"coded": True} if h.chunk.spec.coded else {})
        | ({"fp32": True} if h.chunk.spec.fp32 else {})
        for h in handles
    }
    exact = [h.whole_name for h in handles if h.chunk.spec.exact]
    buffers = {**scales_in(model.named_parameters()), **beside_params(model, by_names)}
    return ModelPart(described, groups_of(optimizer), buffers, factors_of(handles), exact)


def joined(parts: Sequence[ModelPart], order: Mapping[str, StageParam]) -> ModelPart:
    """All stages together, in the order of the whole model.

    Raises:
        RankMismatch: if they have other numbers of param groups.
    """
    first = parts[0]
    if len({len(part.groups) for part in parts}) > 1:
        raise RankMismatch(
            f"the stages of a pipeline have {sorted({len(part.groups) for part in parts})} param groups: make the same "
            "number on each of them (groups may be empty), so that one checkpoint can hold them"
        )
    groups = []
    for index, group in enumerate(first.groups):
        names = {name for part in parts for name in part.groups[index]["params"]}
        groups.append({**group, "params": [name for name in order if name in names]})
    params = {name: value for part in parts for name, value in part.params.items()}
    exact = {name for part in parts for name in part.exact}
    buffers = {name: value for part in reversed(parts) for name, value in part.buffers.items()}
    factors = {name: value for part in parts for name, value in part.factors.items()}
    return ModelPart(
        {name: params[name] for name in order}, groups, buffers, factors, [name for name in order if name in exact]
    )  # fmt: skip


def own_groups(groups: Any, params: ParamSet) -> Any:
    """Of groups of all stages those params that are here, in the order of the whole model."""
    if not params.of_stages or not isinstance(groups, list):
        return groups
    own = {handle.whole_name for handle in params.handles}

    def of_group(group: Any) -> Any:
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(names, list):
            return group
        return {**group, "params": [name for name in params.of_stages if name in own and name in names]}

    return [of_group(group) for group in groups]


def own_values(saved: Any, params: ParamSet, own: Mapping[str, Any]) -> Any:
    """Of saved values of all stages, by name, those that are here too."""
    if not params.of_stages or not isinstance(saved, dict):
        return saved
    return {name: value for name, value in saved.items() if name in own}
