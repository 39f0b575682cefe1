"""A step with adapters as it would be on a base of 4-bit weights: the same step, other bytes. A pure function.

The form is that of bitsandbytes (QLoRA, https://arxiv.org/abs/2305.14314, section 3): two codes in a byte, one fp32
scale for each block of 64 weights, and with double quantization a byte for each of those, with an fp32 one for each
block of 256. Per weight that is 0.5 bytes of codes, which live in chunks, and 0.0625 or 0.0159 of scales, which stay
where they are read. A product makes the weight in the compute dtype first, in forward and again in backward.
"""

from __future__ import annotations

from dataclasses import replace

from gemini.planning.planes import compute_itemsize
from gemini.planning.trace import MemoryTrace, Moment, TracedParam

BLOCK, BLOCK_OF_SCALES = 64, 256
"""Weights with one scale, and scales with one of their own."""

_TABLE, _TABLE_OF_SCALES = 16, 256
"""What the codes stand for, in fp32: beside each weight."""

_IN_ADAPTER = ".base_layer.weight"
"""What PEFT calls the weight that an adapter is put on."""


def scale_bytes(numel: int, *, double: bool = True) -> int:
    """Bytes beside the codes of a weight of ``numel`` elements."""
    blocks = -(-numel // BLOCK)
    if not double:
        return 4 * (_TABLE + blocks)
    return blocks + 4 * (_TABLE + _TABLE_OF_SCALES + -(-blocks // BLOCK_OF_SCALES) + 1)


def is_base_weight(param: TracedParam) -> bool:
    """Whether a param is the weight of a linear layer that has an adapter."""
    return param.name.endswith(_IN_ADAPTER) and len(param.shape) == 2 and not param.trainable


def with_4bit_base(trace: MemoryTrace, *, double: bool = True) -> MemoryTrace:
    """The step with the weights of all layers that have adapters in 4 bits.

    Raises:
        ValueError: for a trace without such layers.
    """
    sizes = {i: param.numel for i, param in enumerate(trace.params) if is_base_weight(param)}
    if not sizes:
        raise ValueError("4-bit weights are frozen, and no layer of this step has an adapter to train in their place")
    params = tuple(
        replace(param, shape=((sizes[i] + 1) // 2, 1), coded=True) if i in sizes else param
        for i, param in enumerate(trace.params)
    )
    read_by = {trace.params[i].name.removesuffix(".weight"): numel for i, numel in sizes.items()}
    itemsize = compute_itemsize(trace.precision)

    def with_weight(moment: Moment) -> Moment:
        numel = read_by.get(moment.module)
        if numel is None:
            return moment
        made = numel * itemsize + 4 * -(-numel // BLOCK) * double
        return replace(
            moment, peak_bytes=moment.peak_bytes + made, num_ops=moment.num_ops + 1,
            touched_bytes=moment.touched_bytes + made + numel // 2,
        )  # fmt: skip

    return replace(
        trace,
        params=params,
        moments=tuple(map(with_weight, trace.moments)),
        buffer_bytes=trace.buffer_bytes + sum(scale_bytes(numel, double=double) for numel in sizes.values()),
        tiled=None if trace.tiled is None else with_4bit_base(trace.tiled, double=double),
    )
