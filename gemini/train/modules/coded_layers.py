"""Layers of bitsandbytes that read 4-bit codes: what of them is done otherwise where codes live in chunks.

Their backward reads the codes again, which their forward keeps on ``ctx``, out of sight of saved-tensor hooks: a window
would then stay until backward. Given to autograd instead they are found again by their place. And on processors with
AVX512-BF16 an evaluation packs the codes anew in the layout of another kernel, for good: managed layers keep theirs, so
that evaluation computes as training does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from gemini.patches import patch
from gemini.train.modules.reading import Structure
from gemini.train.params.codes import is_of_library

_PACKS = "support_avx512bf16_for_cpu"


def is_coded_layer(module: nn.Module) -> bool:
    """Whether bitsandbytes computes this module with 4-bit codes."""
    return is_of_library(type(module), "Linear4bit")


def prepare_layers(structure: Structure, device: torch.device) -> Callable[[], None]:
    """Bring scales to where they are read, and see that codes are given to autograd and stay as they are.

    Returns:
        What makes the layers ordinary ones, with scales in host memory.
    """
    coded = [param for param, _ in structure.params if id(param) in structure.coded]
    layers = [module for _, module in structure.modules if is_coded_layer(module)] if coded else []
    if layers:
        # Where a layer of the library is, so is the library: looked up and not imported.
        _give_codes_to_autograd(sys.modules["bitsandbytes.autograd._functions"])
    # What the library has found out of this processor, to be given back at the end.
    packed = [getattr(layer, _PACKS, False) for layer in layers]

    def release() -> None:
        _move_scales(coded, "cpu")
        for layer, packs in zip(layers, packed, strict=True):
            setattr(layer, _PACKS, packs)

    try:
        _move_scales(coded, device)
        for layer in layers:
            setattr(layer, _PACKS, False)
    # What was moved until then is moved back: the caller has no way to, having got nothing.
    except BaseException:
        release()
        raise
    return release


def _move_scales(coded: Iterable[Any], device: torch.device | str) -> None:
    for param in coded:
        param.quant_state.to(device)


def _give_codes_to_autograd(functions: Any) -> None:
    """Replace the library's function by one that keeps the codes with ``save_for_backward``; it computes by the
    library's own code, and so the same bits, for models that are not managed too.
    """
    original = functions.MatMul4Bit
    # Once in a process, for models that come after as well.
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
                # With a reference left on ctx the window would stay lent until this node is freed.
                ctx.tensors = (None,) * len(kept)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved = ctx.saved_tensors
            if saved:
                ctx.tensors = saved
            try:
                return original.backward(ctx, *grads)
            # Taken off again: with retain_graph the node lives on, and so would the lent window.
            finally:
                if saved:
                    ctx.tensors = (None,) * len(saved)

    MatMul4Bit.__qualname__ = original.__qualname__
    patch("bitsandbytes.autograd._functions.MatMul4Bit", MatMul4Bit)
