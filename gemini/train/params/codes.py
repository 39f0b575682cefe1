"""Weights of 4 bits: params whose elements are bytes of codes, and the scales that make numbers of them.

bitsandbytes keeps such a weight as a ``Params4bit``: uint8 codes, two weights in each, and beside them a
``quant_state`` with one fp32 scale for each block of 64 weights (QLoRA, https://arxiv.org/abs/2305.14314, section 3;
its double quantization keeps a byte for each, and an fp32 one for 256 of those). Codes are frozen params in chunks of
bytes; scales stay on the device, as buffers do. Told by names: the library is never imported here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

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


def num_weights(param: torch.Tensor) -> int:
    """Count the weights of a param: two in each byte of codes."""
    return param.numel() * (2 if is_coded(param) else 1)


def check_coded(name: str, param: Any) -> None:
    """Refuse codes that are not, or cannot be kept as, bytes in chunks.

    Raises:
        ValueError: naming the remedy.
    """
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


def first_coded(model: nn.Module) -> str | None:
    """Find the name of a param of 4-bit codes, where there is one."""
    return next((name for name, param in model.named_parameters() if is_coded(param)), None)


def scales_in(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Find the tensors that belong to codes among named params, by names under those of the params: they are the
    model's own, to be written in place.
    """
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
