"""Batches of ranks that compute with parts of one model must be the same on all of them: of different ones slices would
add up what means nothing, and stages would compute the loss of one for the labels of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gemini.errors import RankMismatch
from gemini.ranks.agree import agree
from gemini.ranks.facts import Facts, checksum_of
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
        compare_batches(wire, named, values=True)
        handle.remove()

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)
    return handle


def compare_batches(wire: Wire, named: Mapping[str, Any], *, values: bool, refusal: Exception | None = None) -> None:
    """Compare the tensors of a batch among the ranks of ``wire``, which differ in ``tp`` or ``pp`` alone: by shapes and
    dtypes, and with ``values`` by checksums. ``refusal``: why this rank cannot compute with its own.

    Raises:
        RankMismatch: on every rank, if they differ; if another rank refuses its batch, on those that do not.
    """

    def facts() -> Facts:
        said = {name: [_said(tensor, values) for tensor in iter_tensors(value)] for name, value in named.items()}
        return Facts({name: sums for name, sums in said.items() if sums})

    doing = "the first batch" if values else "the batch"
    agree(wire, doing, facts, refusal, words="batch", refused=RankMismatch)


def _said(tensor: torch.Tensor, values: bool) -> str:
    said = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return f"{said} checksum {checksum_of(tensor):08x}" if values else said
