"""Gradients of params that two stages of a pipeline read (tied embeddings): each adds the other's to its own.

Of two terms the order does not matter, so both ranks have the same bits, and their copies of the param stay the same.
"""

from __future__ import annotations

import torch

from gemini.ranks.wire import Tag, Wire
from gemini.train.gradients.store import GradientStore
from gemini.train.params.handle import ParamSet


def sum_tied(params: ParamSet, gradients: GradientStore, stages: Wire) -> None:
    """After the last backward of a step; all stages come here.

    Raises:
        RankLost: if another one does not.
    """
    by_name = {handle.whole_name: handle for handle in params.handles}
    for name, shared in params.of_stages.items():
        if len(shared.ranks) < 2 or stages.rank not in shared.ranks:
            continue
        handle = by_name[name]
        own = gradients.own_part(handle)
        others = [torch.empty_like(own) for _ in shared.ranks[1:]]
        peers = [rank for rank in shared.ranks if rank != stages.rank]
        stages.start(
            Tag.VALUES, dict.fromkeys(peers, own), dict(zip(peers, others, strict=True)), f"adding up {name}"
        ).wait()  # fmt: skip
        for other in others:
            gradients.add_part(handle, other)
