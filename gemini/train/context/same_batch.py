"""Batches of ranks that compute with parts of one model must be the same on all of them: of different ones slices would
add up what means nothing, and stages would compute the loss of one for the labels of another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gemini.errors import RankMismatch
from gemini.ranks.group import checksum_of
from gemini.ranks.wire import Wire
from gemini.train.modules.calls import iter_tensors


def compare_first_batch(model: nn.Module, wire: Wire) -> RemovableHandle:
    """Compare what the first forward with gradients is given, by checksums, among the ranks of ``wire`` (``tp``).

    The forward raises RankMismatch, on every rank and naming the argument, if they differ.
    """

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        named = {**{f"argument {number}": value for number, value in enumerate(args)}, **kwargs}
        compare_batches(wire, named, "tp", values=True)
        handle.remove()

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)
    return handle


def compare_batches(
    wire: Wire, named: Mapping[str, Any], dim: str, *, values: bool, refusal: Exception | None = None
) -> None:
    """Compare the tensors of a batch among the ranks of ``wire``, which differ in ``dim`` alone: by shapes and dtypes,
    and with ``values`` by checksums. ``refusal``: why this rank cannot compute with its own.

    Raises:
        RankMismatch: on every rank, if they differ; if another rank refuses its batch, on those that do not.
    """
    own = {name: sums for name, value in named.items() if (sums := [_said(t, values) for t in iter_tensors(value)])}
    said = json.dumps([own, None if refusal is None else str(refusal)])
    heard = [json.loads(text) for text in wire.exchange_texts(said, "comparing batches")]
    if refusal is not None:
        raise refusal
    for rank, (_, refused) in zip(wire.global_ranks, heard, strict=True):
        if refused is not None:
            raise RankMismatch(f"rank {rank} refuses its batch: {refused}. No rank has computed anything of it")
    first = heard[0][0]
    for rank, (other, _) in zip(wire.global_ranks, heard, strict=True):
        for name in {**first, **other}:
            if other.get(name) != first.get(name):
                raise RankMismatch(
                    f"the {'first ' if values else ''}batch of rank {rank} has another {name} than that of rank "
                    f"{wire.global_ranks[0]} ({other.get(name)} against {first.get(name)}): ranks that differ in {dim} "
                    "alone compute with the same batch. Give the sampler rank, world = gemini.data_rank(mesh)"
                )


def _said(tensor: torch.Tensor, values: bool) -> str:
    said = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return f"{said} checksum {checksum_of(tensor):08x}" if values else said
