"""Other optimizers on managed params are refused when they step. ``GeminiDDP`` sees to it, whether or not the program
has ever looked at one of ours.
"""

from __future__ import annotations

from typing import Any

import torch

from gemini.errors import GeminiError
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.handle import handle_of


def refuse_stock_optimizers(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A stock optimizer would find no gradient on managed params and do nothing, silently."""
    if isinstance(optimizer, HybridOptimizer):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            handle = handle_of(param)
            if handle is not None:
                raise GeminiError(
                    f"{type(optimizer).__name__} cannot update {handle.name!r}: the gradients and masters of a managed "
                    "model live in chunks. Use gemini.HybridAdam(model.parameters(), ...), another optimizer of "
                    f"gemini.optim, or this one as a rule: gemini.optim.adopt({type(optimizer).__name__})"
                )
