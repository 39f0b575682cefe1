"""The library's collectives among GPUs (NCCL), on the stream of the caller; a failure is a lost rank.

torch 2.13 has new names for two of them and warns of the old ones, which 2.11 alone has.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gemini.ranks.wire import guarded


def all_gather(into: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, what: str) -> None:
    """``own`` of every rank, one behind the other. ``own`` may be this rank's place in ``into``.

    Raises:
        RankLost: if it fails; ``what`` says what it was for.
    """
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    guarded(what, lambda: call(into, own, group=group))


def reduce_scatter(into: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, what: str) -> None:
    """This rank's section of the sum over ranks of ``whole``. ``into`` may be its place there.

    Raises:
        RankLost: if it fails.
    """
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    guarded(what, lambda: call(into, whole, group=group))


def all_to_all(into: torch.Tensor, parts: torch.Tensor, group: dist.ProcessGroup, what: str) -> None:
    """``parts[i]`` goes to rank i; ``into[i]`` is what rank i has sent.

    Raises:
        RankLost: if it fails.
    """
    guarded(what, lambda: dist.all_to_all_single(into, parts, group=group))


def all_to_all_rows(
    into: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup, what: str
) -> None:
    """``sent[i]`` rows in turn go to rank i, and ``received[i]`` rows come from it.

    Raises:
        RankLost: if it fails.
    """
    guarded(what, lambda: dist.all_to_all_single(into, rows, received, sent, group=group))
