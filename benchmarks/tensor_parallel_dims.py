"""What 2-D, 2.5-D and 3-D tensor parallel would bring: bytes kept and sent by a rank, in closed form.

    python benchmarks/tensor_parallel_dims.py

A transformer block of width h on n tokens is four products X W: of n x h by h x 3h and h x h (attention), of n x h by
h x 4h and n x 4h by 4h x h (MLP). With |X| elements and so on, a rank of p receives in a forward and a backward

    1-D    4 sums of n h over all ranks, each 2 (p - 1) / p n h                       M. Shoeybi et al., 2019
    2-D    p = q^2: 3 (q - 1) / q^2 (|X| + |W|) for each product                      SUMMA; Q. Xu et al., 2021
    2.5-D  p = d q^2: 3 (q - 1) / q^2 (|X| / d + |W|), and the sum of gradients of W  B. Wang et al., 2021
           over d: 2 (d - 1) / d |W| / q^2
    3-D    p = q^3: 3 (q - 1) / q^3 (|X| + |W| + |Y|)                                 Z. Bian et al., 2021
    cp     sequences in parts, weights in shards over the same ranks (what Gemini has): 3 (p - 1) / p |W|, and the
           exchanges of heads, 8 (p - 1) / p^2 n h

and keeps of the block's activations, 34 bytes for each of n h (V. Korthikanti et al., 2022): 10 + 24 / p of them in
1-D, 34 / p else; of weights, gradients and states 16 bytes for each of 12 h^2 / p, / q^2 in 2.5-D.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

PEAK, WIRES = 312e12 * 0.83, {"300 GB/s": 300e9 * 0.9, "16 GB/s": 16e9 * 0.9}
"""Of an A100 and its NVLink (data sheets), and of a PCIe 3.0 link in place of it, with the shares of ``Efficiency``."""


class Way(NamedTuple):
    """``sent``: elements that a rank sends in a forward and backward. ``kept``: bytes. ``behind``: whether computing
    need not wait for most of it.
    """

    name: str
    sent: float
    kept: float
    behind: bool = False


def ways(p: int, n: int, h: int) -> Iterator[Way]:
    products = ((n * h, 3 * h * h, 3 * n * h), (n * h, h * h, n * h), (n * h, 4 * h * h, 4 * n * h),
                (4 * n * h, 4 * h * h, n * h))  # fmt: skip
    weights = sum(w for _, w, _ in products)
    everything = 34 * n * h / p + 16 * weights / p
    yield Way("1-D", 8 * (p - 1) / p * n * h, (10 + 24 / p) * n * h + 16 * weights / p)
    if (q := round(p**0.5)) ** 2 == p:
        yield Way("2-D", sum(3 * (q - 1) / q**2 * (x + w) for x, w, _ in products), everything)
    if p % 4 == 0 and (q := round((p / 2) ** 0.5)) ** 2 * 2 == p:
        each = (3 * (q - 1) / q**2 * (x / 2 + w) + w / q**2 for x, w, _ in products)
        yield Way("2.5-D (d = 2)", sum(each), 34 * n * h / p + 16 * weights / q**2)
    if (q := round(p ** (1 / 3))) ** 3 == p:
        yield Way("3-D", sum(3 * (q - 1) / q**3 * (x + w + y) for x, w, y in products), everything)
    yield Way("cp", 3 * (p - 1) / p * weights + 8 * (p - 1) / p**2 * n * h, everything, behind=True)


def main() -> None:
    # Width 3,072 as in the ViT of S. Li et al., 2021; tokens from a few long sequences to a large batch of images.
    for p in (4, 8, 64):
        for n in (4096, 32768, 131072):
            h = 3072
            computing = 72 * n * h * h / p / PEAK
            print(f"{p} GPUs, {n:,} tokens, width {h:,}: computing {computing * 1e3:.2f} ms for a block")
            base: Way | None = None
            for way in ways(p, n, h):
                base = base or way
                cells = []
                for name, wire in WIRES.items():
                    sending = 2 * way.sent / wire
                    whole = max(computing, sending) if way.behind else computing + sending
                    cells.append(f"{whole * 1e3:9.2f} ms at {name}")
                less = 1 - way.kept / base.kept
                print(f"  {way.name:<14}{2 * way.sent / 2**20:9,.0f} MiB sent{way.kept / 2**30:8.2f} GiB kept "
                      f"({less:4.0%} less){''.join(cells)}")  # fmt: skip


if __name__ == "__main__":
    main()
