"""Train a tiny model of every language model of transformers whole and in tiles of tokens, and compare.

    python tests/hunts/token_tiles.py                      # causal and masked language models, some minutes
    python tests/hunts/token_tiles.py --only 'Llama|Gemma' --tokens 16

For each class: whether its loss has the same bits, and how far the worst gradient is off, as a part of the largest
element of the same gradient; or the error with which it is refused. Exit code 1 if something came out otherwise:
another loss, a gradient off by more than 1e-6, or an error that is not of Gemini.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import nn  # noqa: E402

from gemini.errors import GeminiError  # noqa: E402
from gemini.train.modules.token_tiles import tile_tokens  # noqa: E402
from tests.hunts.zoo.mappings import Entry, all_entries  # noqa: E402
from tests.hunts.zoo.runner import Untried, build, find_batches, loss_of, seed_all  # noqa: E402

KINDS = ("causal LM", "masked LM")
WORST = 1e-6


def without_dropout(model: nn.Module) -> nn.Module:
    """Dropout draws other numbers in tiles than in one."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
    return model


def long(batch: dict[str, object], tokens: int) -> dict[str, object]:
    """The same batch, so often after itself that there are several tiles (what has a length of tokens)."""
    length = next((v.shape[1] for k, v in batch.items() if k == "input_ids" and isinstance(v, torch.Tensor)), 0)
    times = -(-3 * tokens // max(length, 1))
    return {
        k: v.repeat(1, times) if isinstance(v, torch.Tensor) and v.dim() == 2 and v.shape[1] == length else v
        for k, v in batch.items()
    }


def gradients(model: nn.Module, batch: dict[str, object]) -> tuple[float, dict[str, torch.Tensor]]:
    loss, _ = loss_of(model, batch, 0)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare(entry: Entry, tokens: int) -> tuple[str, str]:
    """How it ended, and what is to be said of it."""
    seed_all(0)
    try:
        batches, how = find_batches(entry, "fp32")
        if how != "loss":
            return "untried", "no loss of its own"
        batch = batches(0)
        if not isinstance(batch.get("labels"), torch.Tensor):
            return "untried", "no labels"
        long_batch = long(batch, tokens)
        loss, wanted = gradients(without_dropout(build(entry)), long_batch)
    except Untried as e:
        return "untried", str(e)[:100]
    except Exception as e:
        return "untried", f"longer: {type(e).__name__} {str(e)[:80]}"
    model = without_dropout(build(entry))
    try:
        tiles = tile_tokens(model, tokens)
        found, got = gradients(model, long_batch)
    except GeminiError as e:
        return "refused", re.sub(r"^tile_tokens=\d+: ", "", str(e))[:100]
    except Exception as e:
        return "FAILED", f"{type(e).__name__}: {str(e)[:120]}"
    worst = max(
        ((got[n] - g).abs().max() / g.abs().max().clamp(min=1e-3 * max(float(w.abs().max()) for w in wanted.values())))
        .item() if n in got else float("inf")
        for n, g in wanted.items()
    )  # fmt: skip
    parts = f"{len(tiles.mlps)} MLPs{' and head' if tiles.head else ''}"
    if found != loss:
        return "LOSS", f"{parts}: {found!r} instead of {loss!r}"
    return ("right" if worst <= WORST else "GRADIENT"), f"{parts}: worst gradient off by {worst:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="classes whose name matches this regular expression")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a tile")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for kind, entry in all_entries():
        if kind in KINDS and re.search(args.only, entry.name):
            end, words = compare(entry, args.tokens)
            counts[end] += 1
            print(f"{end:9} {entry.name:45} {words}", flush=True)
    print(dict(counts))
    return int(any(end.isupper() for end in counts))


if __name__ == "__main__":
    sys.exit(main())
