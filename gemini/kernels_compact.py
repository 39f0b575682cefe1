"""Compact states in torch lines: the definition that the native kernels (csrc/compact.h) equal bit for bit.

Every 64 elements of a param share a scale, the power of two at or above the largest magnitude, kept as its biased
exponent in a byte (E8M0; 0 for a block of zeros). Between -1 and 1, in units of it:

    signed states (momentum)    int8 c     sign(c) (c / 127)^2    rounded to the nearest c
    averages of squares         uint8 c    (c / 255)^4            dithered; c is 1 at least where they are not 0

An average of squares with beta2 = 0.999 moves its code by less than 0.13 in a step, so rounding to the nearest would
freeze it. It is rounded up instead where its fraction between two codes exceeds a threshold that changes with the
element and the step: the upper bits of ``index * A + step * B + salt(name)`` (a Weyl sequence). So the mean is right,
nothing random is kept, and the bits depend on nothing but the param, the element and the step.

The fractional powers are a guess at an inverse root, out of the bits, and some terms of the series of its error:
products and sums alone, the same on every processor. Scales are powers of two, so nothing is divided.

Companding by powers follows FlashOptim (arXiv:2602.23349), scales per block bitsandbytes (Dettmers et al., 2021,
arXiv:2110.02861); that rounding freezes averages of squares is in SOLO (arXiv:2505.00347).
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.nn.functional import pad

from gemini.interrupts import without_grad
from gemini.kernels_reference import to_fp32

BLOCK = 64
_PER_INDEX, _PER_STEP = 0x85EBCA6B, 0x9E3779B9
_INV_127_2, _INV_255_4 = to_fp32(1 / 127**2), to_fp32(1 / 255**4)
_255_4 = to_fp32(255.0**4)
_GUESS_ROOT, _GUESS_FOURTH = 0x5F375000, 0x4F582000
NEAREST = None
"""As a dither: none, squares are rounded to the nearest of their two codes in value. For what is encoded once."""


def dither_of(name: str, offset: int, step: int) -> int:
    """The start of the Weyl sequence for elements from ``offset`` of the param ``name`` on, in update ``step``."""
    return (offset * _PER_INDEX + step * _PER_STEP + zlib.crc32(name.encode())) & 0xFFFFFFFF


# ---- states ----------------------------------------------------------------------------------------------------------


@without_grad
def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 values of a state, flat; of int8 codes a signed one, of uint8 codes squares."""
    c = codes.float()
    if codes.dtype is torch.int8:
        values = c * c.abs() * _INV_127_2
    else:
        square = c * c
        values = square * square * _INV_255_4
    return values * _each(scales.int() << 23, len(codes))


@without_grad
def encode(values: Tensor, codes: Tensor, scales: Tensor, dither: int | None = NEAREST) -> None:
    """Write the codes and scales of fp32 ``values``; ``dither`` is where the sequence begins (:func:`dither_of`)."""
    n = len(values)
    magnitudes = pad(values.view(torch.int32) & 0x7FFFFFFF, (0, -n % BLOCK)).view(-1, BLOCK)
    largest = magnitudes.amax(1) if n else magnitudes.new_zeros(0)
    exponents = ((largest.clamp(max=0x7F000000) + 0x7FFFFF) >> 23).clamp_(max=253)
    scales.copy_(exponents)
    x = values.abs() * _each((254 - exponents) << 23, n)
    x = torch.where(x < 1, x, 1.0)
    if codes.dtype is torch.int8:
        rounded = _root_127(x).round()  # half to even
        codes.copy_(torch.where(values < 0, -rounded, rounded))
        return
    below = _fourth_root_255(x).int().clamp_(max=254).float()
    low, high = below * below, (below + 1) * (below + 1)
    low, high = low * low, high * high
    up = x * _255_4 - low > _threshold(dither, n, values.device) * (high - low)
    codes.copy_(torch.maximum(below + up, (values.view(torch.int32) & 0x7FFFFFFF != 0).float()))


def _each(bits: Tensor, n: int) -> Tensor:
    """The fp32 number with these bits of its block, for each of ``n`` elements."""
    return bits.view(torch.float32).repeat_interleave(BLOCK)[:n]


def _threshold(dither: int | None, n: int, device: torch.device) -> Tensor | float:
    if dither is None:
        return 0.5
    sequence = torch.arange(n, device=device) * _PER_INDEX + dither & 0xFFFFFFFF
    return (sequence >> 9 | 0x3F800000).int().view(torch.float32) - 1


# Of a guess r at an inverse root, e = 1 - x r^p says how far it is off, and x r^(p - 1) (1 - e)^(1/p - 1) is the root:
# some terms of that.


def _root_127(x: Tensor) -> Tensor:
    """127 times the square root of numbers in [0, 1], to 0.013."""
    r = (_GUESS_ROOT - (x.view(torch.int32) >> 1)).view(torch.float32)
    t = x * r
    e = 1 - t * r
    return t * (127 + e * (63.5 + e * 47.625))


def _fourth_root_255(x: Tensor) -> Tensor:
    """255 times the fourth root of numbers in [0, 1], to 0.034."""
    r = (_GUESS_FOURTH - (x.view(torch.int32) >> 2)).view(torch.float32)
    t = x * r * (r * r)
    e = 1 - t * r
    return t * (255 + e * (191.25 + e * (167.34375 + e * 153.3984375)))
