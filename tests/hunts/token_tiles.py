"""Train a tiny model of every language model of transformers whole and in tiles of tokens, and compare.

    python tests/hunts/token_tiles.py                      # causal and masked language models, some minutes
    python tests/hunts/token_tiles.py --only 'Llama|Gemma' --tokens 16

For each class: whether its loss has the same bits, and how far the worst gradient is off, as a part of the largest
element of the same gradient; or the error with which it is refused. Exit code 1 if something came out otherwise:
another loss, a gradient off by more than 1e-6, or an error that is not of Gemini.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch import nn  # noqa: E402

from gemini.train.modules.token_tiles import tile_tokens  # noqa: E402
from tests.hunts.zoo.whole import Gradients, Limits, compare, gradients, hunt, long, make_parser  # noqa: E402


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a tile")
    args = parser.parse_args()

    def in_tiles(model: nn.Module, batch: dict[str, Any]) -> tuple[float, Gradients, str]:
        tiles = tile_tokens(model, args.tokens)
        return *gradients(model, batch), f"{len(tiles.mlps)} MLPs{' and head' if tiles.head else ''}: "

    return hunt(
        ("causal LM", "masked LM"), args.only,
        lambda entry: compare(entry, lambda batch: long(batch, args.tokens), in_tiles, Limits(0.0, 1e-6)),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
