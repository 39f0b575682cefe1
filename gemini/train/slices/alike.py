"""What ranks with slices of one model must have alike: the whole model that is cut, settings that can be kept over it,
gradients of the same params, and the batch; of different ones slices would add up what means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from gemini.config import GeminiConfig
from gemini.errors import RankMismatch
from gemini.planning.plan import Plan
from gemini.planning.trace import Source
from gemini.ranks.agree import Facts, agree, checksum_of
from gemini.ranks.group import Ranks, names_of, size_of
from gemini.ranks.wire import Tag, Wire
from gemini.train.observers import iter_tensors
from gemini.train.params.handle import ParamHandle


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
            f"use one that works element by element (AdamW, Lion, SGD), or dp in place of {dim}"
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

    agree(wire, "the first batch" if values else "the batch", facts, refusal, words="batch")
