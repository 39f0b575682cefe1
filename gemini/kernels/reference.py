"""The numeric kernels in a few torch lines: the definition that every native kernel equals bit for bit.

Each function works on any device, in slabs, so that its temporaries stay small. Arithmetic is plain IEEE fp32 in the
order written here; gemini.kernels checks the arguments. What an update is stands in the rules (:mod:`gemini.rules`);
what its compact states are, and the flush-to-zero mode, are here too.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from gemini.interrupts import without_grad
from gemini.planning.rules import BLOCK

NORM_BLOCK, NORM_LANES, NORM_TILE = 4096, 32, 1 << 20

_SLAB = 4 * NORM_TILE  # elements per pass: bounds the temporaries (about 100 MB with fp64 squares)
_CANONICAL_NAN = 0x7FC00000


def _slabs(n: int) -> Iterator[slice]:
    return (slice(begin, min(begin + _SLAB, n)) for begin in range(0, n, _SLAB))


# ---- split master ----------------------------------------------------------------------------------------------------


def _join(hi: Tensor, lo: Tensor) -> Tensor:
    lower = lo.int() << 8 if lo.dtype is torch.int8 else lo.int()  # the upper byte alone: 24 bits
    return ((hi.view(torch.int16).int() << 16) + lower).view(torch.float32)


def _split(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    bits = master.view(torch.int32)
    bits = torch.where(bits & 0x7FFFFFFF > 0x7F800000, _CANONICAL_NAN, bits)
    if lo.dtype is torch.int8:
        bits = (bits + 0x7F + (bits >> 8 & 1)) & -0x100  # half to even
    rounded = (bits + 0x8000) >> 16  # half away from zero
    hi.view(torch.int16).copy_(rounded)
    lower = bits - (rounded << 16)
    lo.copy_(lower >> 8 if lo.dtype is torch.int8 else lower)


@without_grad
def split_master(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    for part in _slabs(master.numel()):
        _split(master[part], hi[part], lo[part])


@without_grad
def join_master(hi: Tensor, lo: Tensor, out: Tensor) -> None:
    for part in _slabs(out.numel()):
        out[part] = _join(hi[part], lo[part])


# ---- gradients and their norm ----------------------------------------------------------------------------------------


@without_grad
def copy_grad(dst: Tensor, src: Tensor) -> list[float]:
    dst.copy_(src)
    return sum_squares(dst)


@without_grad
def accumulate_grad(acc: Tensor, src: Tensor, rounded: Tensor | None) -> list[float]:
    for part in _slabs(acc.numel()):
        acc[part] += src[part].float()
    return sum_squares(acc if rounded is None else rounded.copy_(acc))


@without_grad
def sum_grad24(hi: Tensor, lo: Tensor, src: Tensor, adding: bool) -> list[float]:
    for part in _slabs(hi.numel()):
        values = src[part].float()
        _split(_join(hi[part], lo[part]) + values if adding else values, hi[part], lo[part])
    return sum_squares(hi)


@without_grad
def sum_squares(src: Tensor) -> list[float]:
    sums: list[float] = []
    for part in _slabs(src.numel()):
        blocks = _block_sums(src[part])
        per_tile = NORM_TILE // NORM_BLOCK
        sums += [total(blocks[begin : begin + per_tile]) for begin in range(0, len(blocks), per_tile)]
    return sums


def _block_sums(x: Tensor) -> list[float]:
    """One fp64 sum of squares per block of 4096: 32 lanes in sequence, then lanes pairwise."""
    rows_per_block = NORM_BLOCK // NORM_LANES
    rows = min(rows_per_block, -(-x.numel() // NORM_LANES))  # rows beyond would add +0.0
    x = pad(x.float(), (0, -x.numel() % NORM_BLOCK)).double().view(-1, rows_per_block, NORM_LANES)
    squares = x * x
    lanes = squares[:, 0]
    for row in range(1, rows):
        lanes = lanes + squares[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0].tolist()


def total(sums: list[float]) -> float:
    result = 0.0
    for value in sums:
        result += value
    return result


def flush_mode() -> int:
    # In both modes that torch sets the half of the smallest normal number is zero, or counts as one.
    return int(sys.float_info.min / 2 == 0.0)


def set_flush_mode(mode: int) -> None:
    torch.set_flush_denormal(mode != 0)


# ---- compact states --------------------------------------------------------------------------------------------------
#
# Every 64 elements of a param share a scale: the least power of two of which the largest magnitude is 63/64 at most,
# kept as its biased exponent in a byte (E8M0). In units of it:
#
#     signed states (momentum)  int8 c   128 root(x), and the sign   rounded to the nearest c
#     averages of squares       uint8 c  256 root(root(x))           dithered; c is 1 at least where they are not 0
#
# ``root`` has straight pieces: it halves the bits of a float, which are its logarithm within an eighth. So a code is a
# shift of bits and decoding is the shift back, with an offset, and the same on every processor. Between two codes next
# to each other the value goes along a straight line (squares: from c = 4 on, 2^-24 of the scale), so that a code which
# is right in the mean is a value which is right in the mean.
#
# An average of squares with beta2 = 0.999 moves its code by less than 0.13 in a step, so rounding to the nearest would
# freeze it. It is rounded up instead where its fraction between two codes exceeds a threshold that changes with the
# element and the step: the upper bits of ``index * A + step * B + salt(name)`` (a Weyl sequence). So the mean is right,
# nothing random is kept, and the bits depend on nothing but the param, the element and the step.
#
# Codes by roots follow FlashOptim (arXiv:2602.23349), scales per block bitsandbytes (Dettmers et al., 2021,
# arXiv:2110.02861); that rounding freezes averages of squares is in SOLO (arXiv:2505.00347).

_PER_INDEX, _PER_STEP = 0x85EBCA6B, 0x9E3779B9
_LIMIT = 0x3F7C0000  # the bits of 63/64, the largest value in units of a scale
_TO_SIGNED, _TO_SQUARE = 0x23400000, 0x33A00000
"""What bits of values in units of the scale, shifted, lack to be those of codes: 1 would have 128, and 256."""


def dither_of(name: str, offset: int, step: int) -> int:
    """The start of the Weyl sequence for elements from ``offset`` of the param ``name`` on, in update ``step``."""
    return (offset * _PER_INDEX + step * _PER_STEP + zlib.crc32(name.encode())) & 0xFFFFFFFF


@without_grad
def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 values of a state, flat; of int8 codes a signed one, of uint8 codes squares."""
    c = codes.float().view(torch.int32)
    if codes.dtype is torch.int8:
        bits = (c & 0x7FFFFFFF).clamp_(min=_TO_SIGNED) - _TO_SIGNED << 1 | c & -0x80000000
    else:
        bits = c.clamp_(min=_TO_SQUARE) - _TO_SQUARE << 2
    return bits.view(torch.float32) * _each(scales.int() << 23, len(codes))


@without_grad
def encode(values: Tensor, codes: Tensor, scales: Tensor, dither: int | None = None) -> None:
    """Write the codes and scales of fp32 ``values``; ``dither`` is where the sequence begins (:func:`dither_of`). None:
    squares are rounded to the nearest code, for what is encoded once.
    """
    n = len(values)
    magnitudes = pad(values.view(torch.int32) & 0x7FFFFFFF, (0, -n % BLOCK)).view(-1, BLOCK)
    largest = magnitudes.amax(1) if n else magnitudes.new_zeros(0)
    exponents = ((largest.clamp(max=0x7F000000) + 0x83FFFF) >> 23).clamp_(max=253)
    scales.copy_(exponents)
    x = (values.abs() * _each((254 - exponents) << 23, n)).view(torch.int32).clamp_(max=_LIMIT)
    if codes.dtype is torch.int8:
        rounded = ((x >> 1) + _TO_SIGNED).view(torch.float32).round_()  # half to even
        codes.copy_(torch.where(values < 0, -rounded, rounded))
        return
    threshold: Tensor | float = (
        1.5  # between 1 and 2, of 15 bits: added to a code it is exact where that is the largest
    )
    if dither is not None:
        sequence = torch.arange(n, device=values.device) * _PER_INDEX + dither & 0xFFFFFFFF
        threshold = (sequence >> 9 & 0x7FFF00 | 0x3F800000).int().view(torch.float32)
    found = (((x >> 2) + _TO_SQUARE).view(torch.float32) + threshold).int() - 1
    codes.copy_(torch.maximum(found, (values.view(torch.int32) & 0x7FFFFFFF != 0).int()))


def _each(bits: Tensor, n: int) -> Tensor:
    """The fp32 number with these bits of its block, for each of ``n`` elements."""
    return bits.view(torch.float32).repeat_interleave(BLOCK)[:n]
