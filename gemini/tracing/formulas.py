"""Floating point operations of an operation: torch's own formulas, and those it lacks.

Source: ``torch.utils.flop_counter`` (a multiplication and an addition count as two; attention counts its products in
full, whether or not the mask is causal). It has no formula for the CPU's fused attention nor for grouped products.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating point operations of one call of ``func``; 0 for what is no product, convolution or attention."""
    packet: Any = getattr(func, "_overloadpacket", None)
    ours = _OURS.get(packet)
    if is_coded_product(packet):
        return _coded(args, out)
    if ours is not None:
        return ours(args, out)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


TILE = 64
"""Rows and columns of the smallest tile that cuBLAS computes large products in (NVIDIA, "Matrix Multiplication
Background", DU-09799, section 2.3); a part of one takes as long as all of it (section 3.1, tile quantization).
"""


class Executed(NamedTuple):
    """What a GPU computes for an operation: products in whole tiles, and attention without what its mask leaves out."""

    tiled: int = 0
    attention: int = 0


def executed(func: Any, args: Any, kwargs: Any, flops: int) -> Executed:
    """Of an operation with so many floating point operations."""
    packet: Any = getattr(func, "_overloadpacket", None)
    first = _OPERANDS.get(packet)
    if first is not None:
        (*batch, rows, inner), columns = args[first].shape, args[first + 1].shape[-1]
        return Executed(tiled=2 * math.prod(batch) * _whole_tiles(rows) * inner * _whole_tiles(columns))
    if "attention" in getattr(packet, "__name__", ""):
        return Executed(attention=flops // 2 if _is_causal(func, args, kwargs) else flops)
    return Executed(tiled=flops)


def _whole_tiles(size: int) -> int:
    return -(-size // TILE) * TILE


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[place] if place < len(args) else kwargs.get("is_causal", argument.default_value))
    return False


_OPERANDS: dict[Any, int] = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
"""Where the two factors of a product stand among its arguments."""


def _attention(args: Any, out: Any) -> int:
    return sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)


def _attention_backward(args: Any, out: Any) -> int:
    return sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape)


def _grouped(args: Any, out: Any) -> int:
    """Rows of one operand times the other's: each row belongs to one group, whichever operand is cut into groups."""
    first, second = args[0], args[1]
    if first.dim() == 2 and second.dim() == 3:
        return 2 * first.shape[0] * first.shape[1] * second.shape[2]
    if first.dim() == 3 and second.dim() == 2:
        return 2 * first.shape[1] * first.shape[2] * second.shape[1]
    if first.dim() == 2:
        return 2 * first.shape[0] * first.shape[1] * second.shape[1]
    return 2 * first.shape[0] * first.shape[1] * first.shape[2] * second.shape[2]


def _coded(args: Any, out: Any) -> int:
    """A product with a weight of 4-bit codes (bitsandbytes), whose own shape is the third argument."""
    rows, columns = args[2]
    return 2 * args[0].numel() // columns * rows * columns


_CODED = "bitsandbytes::gemm_4bit"


def is_coded_product(packet: Any) -> bool:
    """Whether an operation is one. By name: the library need not be installed."""
    return getattr(packet, "_qualified_op_name", "") == _CODED


_OURS: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    **({_aten._grouped_mm: _grouped} if hasattr(_aten, "_grouped_mm") else {}),
}
