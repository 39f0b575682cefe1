"""Options that other Adams have and ``HybridAdam`` has not: each refused with what is to be written instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_INSTEAD = {
    "adamw_mode": "write decoupled=True for AdamW, decoupled=False for Adam with L2",
    "adam_w_mode": "write decoupled=True for AdamW, decoupled=False for Adam with L2",
    "decoupled_weight_decay": "write decoupled=True for AdamW, decoupled=False for Adam with L2",
    "amsgrad": "the largest second moment so far is not kept; leave it out",
    "maximize": "negate the loss",
    "foreach": "leave it out: chunks are updated by one kernel each",
    "fused": "leave it out: chunks are updated by one kernel each",
    "capturable": "leave it out: steps are not captured into CUDA graphs",
    "differentiable": "leave it out: nothing can be differentiated through an update",
    "bias_correction": "leave it out: biases are corrected, as in torch",
    "nvme_offload_fraction": "say where states live with GeminiConfig(placement=gemini.StaticPlacement(...))",
    "nvme_offload_dir": "say it with GeminiConfig(memory=gemini.MemoryBudget(nvme_path=...))",
    "momentum": "write betas=(momentum, 0.999)",
}


def refuse_options(given: Mapping[str, Any]) -> None:
    """Refuse what ``HybridAdam`` does not take.

    Raises:
        TypeError: naming the option, and what to write.
    """
    for name in given:
        instead = _INSTEAD.get(name, "it takes params, lr, betas, eps, weight_decay, decoupled and step_in_backward")
        raise TypeError(f"HybridAdam has no option {name}=: {instead}")
