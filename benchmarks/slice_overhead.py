"""What computing in slices (tensor parallel) costs a layer beside its sums: Python's and autograd's time.

    python benchmarks/slice_overhead.py --rounds 9 --out benchmarks/reports/slice_overhead_<hardware>_<date>.md

One model computes the first of two slices of each layer, with sums that send nothing; another one has layers of just
these sizes and knows of no slices. Both run forward and backward in turn; the difference of a round over the layers is
the cost of one. Layers are narrow, so that the arithmetic hides nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import add_out, head, publish, table
from benchmarks._rounds import Spread, measure_in_turn, seconds_of
from gemini.train.slices.slicing import imagine_slices

SIZE = 2


def llama(layers: int, hidden: int, parts: int) -> Any:
    """With 1 / ``parts`` of the heads and of the MLP."""
    torch.manual_seed(0)
    heads = 8
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=4 * hidden // parts, num_hidden_layers=layers,
        num_attention_heads=heads // parts, num_key_value_heads=heads // parts, head_dim=hidden // heads,
        use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=64, help="its width (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="of a batch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="forwards and backwards in a round")
    add_out(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sliced = llama(args.layers, args.hidden, 1)
    imagine_slices(sliced, SIZE, Counter())
    models = {"slices of layers": sliced, "layers of their sizes": llama(args.layers, args.hidden, SIZE)}
    ids = torch.randint(0, 256, (1, args.tokens))

    def run(name: str) -> None:
        for _ in range(args.steps):
            models[name](input_ids=ids, labels=ids).loss.backward()

    times = measure_in_turn(list(models), args.rounds, lambda name: seconds_of(lambda: run(name)))
    rows = [[name, f"{Spread.of(times[name]).median / args.steps * 1e3:.2f}"] for name in models]
    more = [a - b for a, b in zip(*times.values(), strict=True)]
    each = Spread.of(more).median / args.steps / args.layers * 1e3
    intro = (
        f"Llama of {args.layers} layers, width {args.hidden}, {args.tokens} tokens, one thread; {args.rounds} rounds "
        f"of {args.steps} forwards and backwards in turn."
    )
    lines = [
        *head("Overhead of slices", [intro], 1), "", *table(["a forward and backward of", "ms"], rows), "",
        f"Slices cost a layer {each:.3f} ms (aim: at most 1): {'met' if each <= 1 else 'NOT MET'}.",
    ]  # fmt: skip
    publish(lines, args.out)


if __name__ == "__main__":
    main()
