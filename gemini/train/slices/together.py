"""Ranks with slices of one model: what goes with that, and what they tell each other outside of the forward.

Norms, steps and whole values: all ranks come to each of these calls, in the same order, as they come to the sums inside
the forward. A param that is not cut has the same gradient on all of them, to the bit; what the first one says of it
counts. Batches of ranks that compute with parts of one model must be the same on all of them: of different ones slices
would add up what means nothing, and stages would compute the loss of one for the labels of another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gemini.config import GeminiConfig
from gemini.errors import RankMismatch
from gemini.planning.plan import Plan
from gemini.planning.planes import RuleSpec
from gemini.planning.trace import Source
from gemini.ranks.agree import Facts, agree, checksum_of
from gemini.ranks.group import Ranks
from gemini.ranks.wire import Tag, Wire
from gemini.train.observers import iter_tensors
from gemini.train.params.handle import ParamHandle


def refuse_unsuited(config: GeminiConfig, rule: RuleSpec, ranks: Ranks, *, in_stages: bool) -> None:
    """Refuse settings under which slices would not compute what the whole model does. ``in_stages``: the model is that
    of a :class:`gemini.Pipeline` over ranks.
    """
    dim = "tp" if ranks.experts.size == 1 else "ep"
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


class OtherSlices:
    """The ranks with slices of the same params, as one of them sees them.

    Args:
        wire: among them.
    """

    def __init__(self, wire: Wire):
        self._wire = wire

    def totals(self, handles: Sequence[ParamHandle], own: Sequence[float | None]) -> list[float | None]:
        """Sums of squares over whole gradients, in the order of slices; the same on all ranks. None for no gradient.
        Raises RankMismatch, on every rank, if one has a gradient that another has not.
        """
        said = torch.tensor([_NONE if total is None else total for total in own], dtype=torch.float64, device="cpu")
        rows = self._wire.swap(Tag.VALUES, said, "the gradient norm of slices").T.tolist()
        totals: list[float | None] = []
        for handle, row in zip(handles, rows, strict=True):
            # On all ranks the same rows, so that all of them raise or none.
            missing = [rank for rank, total in zip(self._wire.global_ranks, row, strict=True) if total == _NONE]
            there = [rank for rank in self._wire.global_ranks if rank not in missing]
            if missing and there:
                raise RankMismatch(
                    f"{handle.name!r} has a gradient on ranks {there} and none on ranks {missing}, which have "
                    "other slices of the model (tp, ep): all of them must run the same forward and backward. No weight "
                    "was changed"
                )
            # A param that all have has the same gradient everywhere; one that is not finite anywhere must be found by
            # all.
            is_sum = handle.cut is not None or not all(map(math.isfinite, row))
            totals.append(None if missing else sum(row) if is_sum else row[0])
        return totals

    def compare(self, facts: Facts) -> None:
        """Compare these facts of a step among ranks with slices of the same params, which are about to make it."""
        agree(self._wire, "optimizer.step()", lambda: facts)

    def join(self, handle: ParamHandle, own: torch.Tensor) -> torch.Tensor:
        """The whole value of a param, of which ``own`` (in its shape, on the CPU) is this rank's slice."""
        assert handle.cut is not None
        return handle.cut.join(list(self._wire.swap(Tag.BY_NAME, own.contiguous(), f"reading {handle.name}")))


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
