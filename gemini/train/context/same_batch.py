"""The first batch of ranks that compute with slices of one model must be the same on all of them: tensor parallel adds
up what each slice makes of it, and of different batches that is a sum without meaning.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gemini.errors import RankMismatch
from gemini.ranks.group import checksum_of
from gemini.ranks.wire import Wire
from gemini.train.modules.calls import iter_tensors


def compare_first_batch(model: nn.Module, wire: Wire) -> RemovableHandle:
    """Compare what the first forward with gradients is given, by checksums, among the ranks of ``wire``.

    The forward raises RankMismatch, on every rank and naming the argument, if they differ.
    """

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        named = {**{f"argument {number}": value for number, value in enumerate(args)}, **kwargs}
        own = {name: sums for name, value in named.items() if (sums := [_said(t) for t in iter_tensors(value)])}
        heard = [json.loads(text) for text in wire.exchange_texts(json.dumps(own), "comparing the first batch")]
        for rank, other in zip(wire.global_ranks, heard, strict=True):
            for name in {**heard[0], **other}:
                if other.get(name) != heard[0].get(name):
                    raise RankMismatch(
                        f"the first batch of rank {rank} has another {name} than that of rank {wire.global_ranks[0]} "
                        f"({other.get(name)} against {heard[0].get(name)}): ranks that differ in tp alone compute with "
                        "the same batch. Give the sampler rank, world = gemini.data_rank(mesh)"
                    )
        handle.remove()

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)
    return handle


def _said(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} checksum {checksum_of(tensor):08x}"
