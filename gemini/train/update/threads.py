"""How many threads share an update that runs beside computing."""

from __future__ import annotations

import torch

from gemini import kernels
from gemini.tiers import Tier


def update_threads(setting: int | None, compute: Tier) -> int:
    """``setting``, or the processors that computing leaves: all where a GPU computes, none where torch takes them all.

    Then an update beside computing would slow both down, and one that needs no drive is better made at once, by all of
    them (on 2 cores with 2 torch threads a step of a 70M Llama at 128 tokens took 2 to 7 % longer beside computing).
    """
    if setting is not None:
        return setting
    if compute is Tier.GPU:
        return kernels.get_num_threads()
    return max(kernels.get_num_threads() - torch.get_num_threads(), 0)
