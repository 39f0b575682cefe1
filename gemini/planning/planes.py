"""The planes of a chunk: which kinds of content it has, and how many bytes each takes per element.

bf16:  weights 2 (the bf16 half of the fp32 master) + residual 2 (the other half) + moments 4 + 4 = 12 bytes per param
fp16:  weights 4 (the fp32 master; cast when it is gathered)           + moments 4 + 4           = 12 bytes per param
fp32:  weights 4 (the master itself)                                   + moments 4 + 4           = 12 bytes per param

and gradients between backward and update: 2 bytes (4 in fp32, or where accumulated), none where updates run in
backward.
"""

from __future__ import annotations

from enum import Enum


class PlaneKind(Enum):
    """One kind of content of a chunk."""

    WEIGHTS = "weights"
    RESIDUAL = "residual"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GRAD = "grad"

    __hash__ = object.__hash__  # Enum's own is Python, and kinds are keys for every tile that moves


OPTIMIZER_PLANES = (PlaneKind.RESIDUAL, PlaneKind.EXP_AVG, PlaneKind.EXP_AVG_SQ)

PRECISIONS = ("bf16", "fp16", "fp32")
GRADIENTS = ("transient", "retain", "accumulate")


def compute_itemsize(precision: str) -> int:
    """Bytes per element of the gathered weights, as forward and backward read them."""
    return 4 if precision == "fp32" else 2


def plane_itemsizes(precision: str, gradients: str, *, trainable: bool) -> dict[PlaneKind, int]:
    """Bytes per element of every plane that a chunk has. Frozen chunks have weights alone, in the compute dtype."""
    if not trainable:
        return {PlaneKind.WEIGHTS: compute_itemsize(precision)}
    sizes = {PlaneKind.WEIGHTS: 2 if precision == "bf16" else 4}
    if precision == "bf16":
        sizes[PlaneKind.RESIDUAL] = 2
    sizes[PlaneKind.EXP_AVG] = sizes[PlaneKind.EXP_AVG_SQ] = 4
    if gradients != "transient":
        sizes[PlaneKind.GRAD] = 4 if gradients == "accumulate" else compute_itemsize(precision)
    return sizes
