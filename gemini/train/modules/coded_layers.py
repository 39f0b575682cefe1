"""Layers of bitsandbytes that read 4-bit codes: what of them is done otherwise where codes live in chunks.

Their backward reads the codes again, which their forward keeps on ``ctx``, out of sight of saved-tensor hooks: a window
would then stay until backward. Given to autograd instead they are found again by their place. And on processors with
AVX512-BF16 an evaluation packs the codes anew in the layout of another kernel, for good: managed layers keep theirs, so
that evaluation computes as training does.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from gemini.patches import patch
from gemini.train.params.codes import is_of_library, move_scales

_PACKS = "support_avx512bf16_for_cpu"


def is_coded_layer(module: nn.Module) -> bool:
    """Whether bitsandbytes computes this module with 4-bit codes."""
    return is_of_library(type(module), "Linear4bit")


def prepare_layers(model: nn.Module, device: torch.device) -> None:
    """Bring scales to where they are read, and see that codes are given to autograd and stay as they are."""
    move_scales(model, device)
    layers = [module for module in model.modules() if is_coded_layer(module)]
    if layers:
        _give_codes_to_autograd(sys.modules["bitsandbytes.autograd._functions"])
    for layer in layers:
        layer.__dict__.setdefault("_gemini_packs", getattr(layer, _PACKS, False))
        setattr(layer, _PACKS, False)


def release_layers(model: nn.Module) -> None:
    """The model is an ordinary one again, in host memory."""
    move_scales(model, "cpu")
    for layer in model.modules():
        packs = layer.__dict__.pop("_gemini_packs", None)
        if packs is not None:
            setattr(layer, _PACKS, packs)


def _give_codes_to_autograd(functions: Any) -> None:
    """In the place of the library's function one that keeps the codes with ``save_for_backward``; it computes by the
    library's own code, and so the same bits, for models that are not managed too.
    """
    original = functions.MatMul4Bit
    if hasattr(original, "_gemini_saves"):
        return

    class MatMul4Bit(original):  # type: ignore[misc, valid-type]
        _gemini_saves = True

        @staticmethod
        def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            output = original.forward(ctx, *args, **kwargs)
            kept = getattr(ctx, "tensors", ())
            if any(tensor is not None for tensor in kept):
                ctx.save_for_backward(*kept)
                ctx.tensors = (None,) * len(kept)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved = ctx.saved_tensors
            if saved:
                ctx.tensors = saved
            try:
                return original.backward(ctx, *grads)
            finally:
                if saved:
                    ctx.tensors = (None,) * len(saved)

    MatMul4Bit.__qualname__ = original.__qualname__
    patch("bitsandbytes.autograd._functions.MatMul4Bit", MatMul4Bit)
