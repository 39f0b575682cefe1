"""How long a GPU takes for a matrix product: tiles, waves of tiles, and the memory that it reads and writes.

A product of m x k by k x n is cut into tiles of m x n, one thread block each, and an SM takes one after another. So a
tile that is partly empty takes as long as a full one (tile quantization), and so does a last wave in which some SMs
have none (wave quantization)::

    seconds = max(waves * SMs * 2 * tile_m * tile_n * k / FLOP/s,    bytes of both factors and the result / bytes/s)

Source: NVIDIA, "Matrix Multiplication Background User's Guide" (DU-09799-001), "Typical Tile Dimensions in cuBLAS and
Performance" (the sizes of tiles; larger ones reuse more of what they read, smaller ones occupy more SMs), "Tile
Quantization", "Wave Quantization". FLOP/s are those of the best product on this GPU, whose tiles and waves are full.

Assumptions, as cuBLAS does not publish how it chooses: it takes the largest tile of which every SM gets one; if there
is none, the smallest, with k split among the SMs that would have none. A small tile is as fast as its size says, so
that small products come out a little too fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

TILES = (((256, 128), (128, 256)), ((128, 128),), ((256, 64), (64, 256)), ((128, 64), (64, 128)), ((64, 64),))
"""Sizes of tiles, the most efficient first; those of one size together."""


class Product(NamedTuple):
    """``times`` products of ``m x k`` by ``k x n``, each of them ``batch`` at once."""

    batch: int
    m: int
    n: int
    k: int
    times: int | float = 1  # a whole number stays one in a file that is read and written again

    @property
    def flops(self) -> float:
        return 2 * self.batch * self.m * self.n * self.k * self.times

    @property
    def elements(self) -> float:
        """Of both factors and the result: what is read and written at least."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n) * self.times


class AttentionWork(NamedTuple):
    """FLOP of fused attention.

    Attributes:
        counted: in full, whatever the mask.
        forward, backward: of these, what kernels do: half under a causal mask, above whose diagonal they skip tiles.
    """

    counted: int = 0
    forward: int = 0
    backward: int = 0

    def __add__(self, other: tuple[int, ...]) -> AttentionWork:  # type: ignore[override]
        return AttentionWork(*(own + more for own, more in zip(self, other, strict=True)))

    def scaled(self, number: float) -> AttentionWork:
        return AttentionWork(*(round(each * number) for each in self))


def scaled(products: Iterable[Product], number: float) -> tuple[Product, ...]:
    """So many times the same products."""
    return tuple(product._replace(times=product.times * number) for product in products)


def occupied(product: Product, sms: int | None) -> float:
    """The FLOP of a product with those of empty parts of tiles and waves: what a GPU with so many SMs is busy for.

    Without ``sms`` only the empty parts of the smallest tiles count.
    """
    for tiles in TILES:
        cut = [(product.batch * -(-product.m // m) * -(-product.n // n), m * n) for m, n in tiles]
        number, area = min(cut)
        if sms is not None and number >= sms:
            number = sms * -(-number // sms)
            break
    return 2.0 * number * area * product.k * product.times
