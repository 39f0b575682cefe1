"""Weights of 4 bits: params whose elements are bytes of codes, the scales that make numbers of them, and their layers.

bitsandbytes keeps such a weight as a ``Params4bit``: uint8 codes, two weights in each, and beside them a
``quant_state`` with one fp32 scale for each block of 64 weights (QLoRA, https://arxiv.org/abs/2305.14314, section 3;
its double quantization keeps a byte for each, and an fp32 one for 256 of those). Codes are frozen params in chunks of
bytes; scales stay on the device, as buffers do. Told by names: the library is never imported here.

Its layers keep codes on ``ctx`` for backward, out of sight of saved-tensor hooks: given to autograd instead they are
found again by their place. And with AVX512-BF16 an evaluation would pack codes anew for another kernel, for good.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.patches import patch

if TYPE_CHECKING:
    from gemini.train.modules.reading import Structure

_PACKS = "support_avx512bf16_for_cpu"

WHAT_WORKS = (
    "of quantized weights GeminiDDP manages those of bitsandbytes in 4 bits: "
    "BitsAndBytesConfig(load_in_4bit=True), frozen, with adapters beside them (QLoRA)"
)


def is_of_library(kind: type, name: str) -> bool:
    """Whether a class is, or comes from, that of bitsandbytes with this name."""
    return any(c.__name__ == name and c.__module__.startswith("bitsandbytes.") for c in kind.__mro__)


def is_coded(param: torch.Tensor) -> bool:
    """Whether a param holds 4-bit codes. The fake one of a trace has what bitsandbytes notes of it, not its class."""
    return is_of_library(type(param), "Params4bit") or "bnb_quantized" in param.__dict__


def check_coded(name: str, param: Any) -> None:
    """Refuse codes that are not, or cannot be kept as, bytes in chunks."""
    state = getattr(param, "quant_state", None)
    if not param.bnb_quantized or state is None:
        raise ValueError(
            f"param {name!r} is not quantized yet: bitsandbytes does it when the model is brought to a device. Call "
            'model.to("cpu") or model.to("cuda") before GeminiDDP(model)'
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            f"param {name!r} was packed for inference on this processor by an evaluation before: wrap the model before "
            "it is evaluated, or load it again"
        )
    if param.dtype is not torch.uint8:
        raise ValueError(
            f"param {name!r} keeps its codes as {param.dtype} (bnb_4bit_quant_storage), which is for FSDP: GeminiDDP "
            "divides bytes. Leave bnb_4bit_quant_storage out (torch.uint8)"
        )


def first_coded(model: nn.Module) -> str:
    """Find the name of a param of 4-bit codes; an empty one where there is none."""
    return next((name for name, param in model.named_parameters() if is_coded(param)), "")


def scales_in(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors that belong to codes, by names under those of the params: the model's own, to be written in place."""
    return {
        f"{name}.{key}": tensor
        for name, param in named
        if is_coded(param)
        for key, tensor in _tensors_of(param.quant_state, "")  # type: ignore[attr-defined]
    }


def _tensors_of(state: Any, prefix: str) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    for key, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            found.append((prefix + key, value))
        # Double quantization: the scales are codes themselves, with a state of their own.
        elif key == "state2" and value is not None:
            found += _tensors_of(value, f"{prefix}{key}.")
    return found


def prepare_layers(structure: Structure, device: torch.device) -> Callable[[], None]:
    """Bring scales to where they are read, and see that codes are given to autograd and stay as they are. Returns what
    makes the layers ordinary ones, with scales in host memory.
    """
    coded = [param for param, _ in structure.params if id(param) in structure.coded]
    layers = [module for _, module in structure.modules if is_of_library(type(module), "Linear4bit")] if coded else []
    if layers:
        # Where a layer of the library is, so is the library: looked up and not imported.
        _give_codes_to_autograd(sys.modules["bitsandbytes.autograd._functions"])
    # What the library has found out of this processor, to be given back at the end.
    packed = [getattr(layer, _PACKS, False) for layer in layers]

    def move_scales(to: Any) -> None:
        for param in coded:
            param.quant_state.to(to)  # type: ignore[attr-defined]

    def release() -> None:
        move_scales("cpu")
        for layer, packs in zip(layers, packed, strict=True):
            setattr(layer, _PACKS, packs)

    try:
        move_scales(device)
        for layer in layers:
            setattr(layer, _PACKS, False)
    # What was moved until then is moved back: the caller has no way to, having got nothing.
    except BaseException:
        release()
        raise
    return release


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
