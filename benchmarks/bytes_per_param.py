"""Bytes of weights, masters and optimizer states against the size of a model, of every optimizer and of LoRA.

    python benchmarks/bytes_per_param.py --picture docs/images/bytes_by_optimizer.png --out REPORT.md

Arithmetic of layouts: the planes of all chunks that ``GeminiDDP`` would cut of Llama shapes, in whole pages, padding,
scales, factors and small exact params among them. Nothing is allocated. Gradients are used inside backward
("transient"); kept ones are 2 bytes more per trained param. LoRA is of rank 16 on every linear layer of the
blocks, its base frozen in bf16.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import add_out, head, publish, table
from gemini.optim import (
    AdaLomoRule,
    AdanRule,
    LionRule,
    MuonRule,
    PlainSGDRule,
    SGDRule,
)
from gemini.planning.layout import DEFAULT_MAX_CHUNK, ParamSpec, make_layout
from gemini.planning.planes import ADAM, RuleSpec, factor_bytes, plane_specs
from gemini.planning.rules import compact

RANK = 16
"""Of LoRA's matrices."""

PUBLISHED = {"CoLLiE, Adan and Sophia": 34.5, "CoLLiE, Adam and Lion": 30.5, "CoLLiE, LOMO and LoRA": 2.1}
"""GB per billion params of GPU memory, read off the plot in CoLLiE's repository (arXiv:2312.00407): gradients,
activations of 2,048 tokens and workspaces are in them."""


class Shape(NamedTuple):
    """Of a Llama; ``kv`` is the width of keys and values."""

    hidden: int
    wide: int
    layers: int
    kv: int
    vocab: int = 32000

    def matrices(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a block."""
        h, w, kv = self.hidden, self.wide, self.kv
        return {"q": (h, h), "k": (kv, h), "v": (kv, h), "o": (h, h), "gate": (w, h), "up": (w, h), "down": (h, w)}

    def params(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "embed.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            yield from ((f"layers.{layer}.{name}.weight", shape) for name, shape in self.matrices().items())
            yield from ((f"layers.{layer}.{name}.weight", (self.hidden,)) for name in ("norm1", "norm2"))
        yield "norm.weight", (self.hidden,)
        yield "head.weight", (self.vocab, self.hidden)

    def adapters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for layer in range(self.layers):
            for name, (rows, columns) in self.matrices().items():
                yield f"layers.{layer}.{name}.lora_A.weight", (RANK, columns)
                yield f"layers.{layer}.{name}.lora_B.weight", (rows, RANK)


SHAPES = [
    Shape(2048, 5632, 22, 256), Shape(4096, 11008, 32, 4096), Shape(5120, 13824, 40, 5120),
    Shape(6656, 17920, 60, 6656), Shape(8192, 28672, 80, 1024),
]  # fmt: skip
RULES: dict[str, RuleSpec] = {
    "Adan": AdanRule().spec, "AdamW": ADAM, "Muon": MuonRule().spec,
    "Lion": LionRule().spec, "SGD with momentum": SGDRule().spec, "AdamW, compact": compact(ADAM),
    "Lion, compact": compact(LionRule().spec), "SGD with momentum, compact": compact(SGDRule().spec),
    "AdaLomo": AdaLomoRule().spec, "LOMO, SGD": PlainSGDRule().spec, "LOMO, SGD, compact": compact(PlainSGDRule().spec),
}  # fmt: skip


def bytes_of(shape: Shape, rule: RuleSpec, *, lora: bool = False) -> int:
    params = [(name, size, not lora) for name, size in shape.params()]
    params += [(name, size, True) for name, size in shape.adapters()] if lora else []
    specs = [
        ParamSpec(name, math.prod(size), trainable, rule.keeps_exact(size, trainable=trainable))
        for name, size, trainable in params
    ]
    found = 0
    for chunk in make_layout(specs, ranks=1, max_chunk=DEFAULT_MAX_CHUNK, align=rule.align).chunks:
        planes = plane_specs("bf16", "transient", rule.of(chunk.exact), trainable=chunk.trainable).values()
        found += sum(spec.page_bytes(chunk.numel) for spec in planes)
    return found + sum(factor_bytes(rule.factors, size) for _, size, trainable in params if trainable)


def draw(found: dict[str, list[float]], sizes: list[float], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 7.5), layout="constrained")
    same: dict[tuple[float, ...], list[str]] = {}
    for name, per_param in found.items():
        same.setdefault(tuple(round(b, 1) for b in per_param), []).append(name)
    for names in same.values():
        gb = [size * each for size, each in zip(sizes, found[names[0]], strict=True)]
        style = "-" if "compact" not in names[0] else "--"
        axes.plot(sizes, gb, style, marker="o", markersize=3, label=f"{'; '.join(names)}: {found[names[0]][-1]:.2f}")
    for name, each in PUBLISHED.items():
        axes.plot(sizes, [size * each for size in sizes], ":", linewidth=2, label=f"{name}: {each}")
    axes.set(xscale="log", yscale="log", xlabel="billion params", ylabel="GB of weights, masters and states")
    axes.set_xticks(sizes, [f"{size:.1f}" for size in sizes], minor=False)
    axes.minorticks_off()
    axes.set_yticks(
        [2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000],
        ["2", "5", "10", "20", "50", "100", "200", "500", "1,000", "2,000"],
    )
    axes.grid(alpha=0.3)
    axes.legend(title="bytes per param of the largest", fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="draw a .png")
    add_out(parser)
    args = parser.parse_args()
    sizes = [sum(math.prod(size) for _, size in shape.params()) / 1e9 for shape in SHAPES]
    found = {name: [bytes_of(shape, rule) / n / 1e9 for shape, n in zip(SHAPES, sizes, strict=True)]
             for name, rule in RULES.items()}  # fmt: skip
    for name, rule in (("LoRA, AdamW", ADAM), ("LoRA, AdamW, compact", compact(ADAM))):
        found[name] = [bytes_of(shape, rule, lora=True) / n / 1e9 for shape, n in zip(SHAPES, sizes, strict=True)]
    what = "Weights, masters and optimizer states, by the layouts of Llama shapes; no gradients, no activations."
    report = head("Bytes per param of every optimizer", [what])
    names = [f"{size:.2f}B" for size in sizes]
    rows = [[name, *(f"{each:.3f}" for each in per)] for name, per in found.items()]
    report += ["Bytes per param:", "", *table(["optimizer", *names], rows), ""]
    rows = [[name, *(f"{each * n:,.1f}" for each, n in zip(per, sizes, strict=True))] for name, per in found.items()]
    rows += [[name, *(f"{each * n:,.1f}" for n in sizes)] for name, each in PUBLISHED.items()]
    report += ["GB:", "", *table(["optimizer", *names], rows)]
    if args.picture:
        draw(found, sizes, args.picture)
    publish(report, args.out)


if __name__ == "__main__":
    main()
