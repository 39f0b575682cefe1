"""Floating point operations of an operation: torch's own formulas, and those it lacks.

Source: ``torch.utils.flop_counter`` (a multiplication and an addition count as two; attention counts its products in
full, whether or not the mask is causal). It has no formula for the CPU's fused attention nor for grouped products.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from gemini.planning.products import AttentionWork

_aten = torch.ops.aten


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating point operations of one call of ``func``; 0 for what is no product, convolution or attention."""
    shape = product_of(func, args)
    if shape is not None:
        return 2 * math.prod(shape)
    packet: Any = getattr(func, "_overloadpacket", None)
    ours = _OURS.get(packet)
    if ours is not None:
        return ours(args)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def product_of(func: Any, args: Any) -> tuple[int, int, int, int] | None:
    """Batch, m, n and k of a call that multiplies matrices of m x k and k x n; None for what is no such product. Of one
    with a weight of 4-bit codes (bitsandbytes) the third argument is the weight's own shape.
    """
    packet: Any = getattr(func, "_overloadpacket", None)
    if is_coded_product(packet):
        rows, columns = args[2]
        return 1, args[0].numel() // columns, rows, columns
    at = _PRODUCTS.get(packet)
    if at is None:
        return None
    first, second = args[at].shape, args[at + 1].shape
    return (int(first[0]) if len(first) == 3 else 1), int(first[-2]), int(second[-1]), int(first[-1])


def attention_of(func: Any, args: Any, kwargs: Any, flops: int) -> AttentionWork:
    """What a call with so many FLOP does of fused attention: all of them or none."""
    names = [argument.name for argument in func._schema.arguments]
    if "query" not in names:
        return AttentionWork()
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    causal = given.get("is_causal") and given["query"].shape[-2] == given["key"].shape[-2]
    done = flops // 2 if causal else flops
    return AttentionWork(flops, backward=done) if "grad_out" in names[0] else AttentionWork(flops, forward=done)


def _attention(args: Any) -> int:
    return sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)


def _attention_backward(args: Any) -> int:
    return sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape)


def _grouped(args: Any) -> int:
    """Rows of one operand times the other's: each row belongs to one group, whichever operand is cut into groups."""
    first, second = args[0], args[1]
    if first.dim() == 2 and second.dim() == 3:
        return 2 * first.shape[0] * first.shape[1] * second.shape[2]
    if first.dim() == 3 and second.dim() == 2:
        return 2 * first.shape[1] * first.shape[2] * second.shape[1]
    if first.dim() == 2:
        return 2 * first.shape[0] * first.shape[1] * second.shape[1]
    return 2 * first.shape[0] * first.shape[1] * first.shape[2] * second.shape[2]


_PRODUCTS: dict[Any, int] = {
    _aten.mm: 0,
    _aten.addmm: 1,
    _aten.addmm_: 1,
    _aten.bmm: 0,
    _aten.baddbmm: 1,
    _aten._scaled_mm: 0,
}
"""At which argument the two matrices of a product begin."""

_CODED = "bitsandbytes::gemm_4bit"


def is_coded_product(packet: Any) -> bool:
    """Whether an operation is one. By name: the library need not be installed."""
    return getattr(packet, "_qualified_op_name", "") == _CODED


_OURS: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._grouped_mm: _grouped,
}
