"""How many threads share an update that runs beside computing."""

from __future__ import annotations

import torch

from gemini import kernels
from gemini.tiers import Tier


def update_threads(setting: int | None, compute: Tier) -> int:
    """``setting``, or the processors that computing leaves, at least one: all where a GPU computes."""
    if setting is not None:
        return setting
    if compute is Tier.GPU:
        return kernels.get_num_threads()
    return max(kernels.get_num_threads() - torch.get_num_threads(), 1)
