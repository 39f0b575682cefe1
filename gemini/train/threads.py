"""How many threads share an update that runs beside computing."""

from __future__ import annotations

import torch

from gemini import kernels


def update_threads(setting: int | None) -> int:
    """``setting``, or the processors that torch's own threads leave, at least one."""
    if setting is not None:
        return setting
    return max(kernels.get_num_threads() - torch.get_num_threads(), 1)
