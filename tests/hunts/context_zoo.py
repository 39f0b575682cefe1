"""Compute a sequence of every causal language model of transformers in parts, and compare with the whole.

    python tests/hunts/context_zoo.py                      # some minutes
    python tests/hunts/context_zoo.py --only 'Llama|Gemma' --parts 2

Two or more tiny copies of a model, each in a thread with its part of the sequence, hand each other what ranks would
send. For each class: whether loss and gradients are those of the whole sequence, or the error with which it is refused.
Exit code 1 if something came out otherwise: a model that is not refused and gives something else, or an error that is
not of Gemini.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import nn  # noqa: E402

from gemini.errors import GeminiError  # noqa: E402
from gemini.train.context.attention import Exchange  # noqa: E402
from gemini.train.context.parallel import (
    ContextParallel,  # noqa: E402
    part_of,  # noqa: E402
)
from tests.hunts.token_tiles import gradients, long, without_dropout  # noqa: E402
from tests.hunts.zoo.mappings import Entry, all_entries  # noqa: E402
from tests.hunts.zoo.runner import Untried, build, find_batches, loss_of, seed_all  # noqa: E402

WORST = 1e-5


class Desk:
    """Where threads lay down what the others take."""

    def __init__(self, size: int):
        self._barrier, self._there = threading.Barrier(size, timeout=60), [None] * size

    def swap(self, rank: int, value: Any) -> list[Any]:
        """What each has laid down."""
        self._there[rank] = value
        self._barrier.wait()
        found = list(self._there)
        self._barrier.wait()
        return found

    def leave(self) -> None:
        """One has failed: nobody waits for it."""
        self._barrier.abort()


class Handed(Exchange):
    """Between threads."""

    def __init__(self, rank: int, size: int, desk: Desk):
        self.rank, self.size, self._desk = rank, size, desk

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        return torch.stack([other[self.rank] for other in self._desk.swap(self.rank, parts)])

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._desk.swap(self.rank, own))

    def tell(self, numbers: torch.Tensor) -> list[list[int]]:
        return [other.tolist() for other in self._desk.swap(self.rank, numbers)]


def in_parts(model: nn.Module, batch: dict[str, Any], size: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean of the losses and gradients of all parts.

    Raises:
        GeminiError: if the model is refused; whatever a part raises.
    """
    desk, results = Desk(size), dict[int, Any]()
    copies = [copy.deepcopy(model) for _ in range(size)]

    def compute(rank: int) -> None:
        try:
            ContextParallel(copies[rank], Handed(rank, size, desk), "auto", range(size)).put()
            results[rank] = gradients(copies[rank], part_of(batch, rank, size))
        except BaseException as e:
            results[rank] = e
            desk.leave()

    threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [found for found in results.values() if isinstance(found, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    names = {name for _, grads in results.values() for name in grads}
    total = {name: sum(grads[name] for _, grads in results.values() if name in grads) / size for name in names}
    return sum(loss for loss, _ in results.values()) / size, total


def compare(entry: Entry, size: int) -> tuple[str, str]:
    """How it ended, and what is to be said of it."""
    seed_all(0)
    try:
        batches, how = find_batches(entry, "fp32")
        batch = batches(0)
        if how != "loss" or not isinstance(batch.get("labels"), torch.Tensor):
            return "untried", "no loss or no labels of its own"
        whole_batch = {
            name: value.repeat(1, size) if isinstance(value, torch.Tensor) and value.dim() == 2 else value
            for name, value in long(batch, 4 * size).items()
        }
        model = without_dropout(build(entry))
        loss, wanted = gradients(copy.deepcopy(model), whole_batch)
        if float(loss_of(copy.deepcopy(model), whole_batch, 1)[0]) != loss:
            return "untried", "it draws numbers of its own"
    except Untried as e:
        return "untried", str(e)[:100]
    except Exception as e:
        return "untried", f"longer: {type(e).__name__} {str(e)[:80]}"
    try:
        found, got = in_parts(model, whole_batch, size)
    except (GeminiError, ValueError) as e:
        own = isinstance(e, GeminiError) or "sequence_batch" in str(e)
        return ("refused" if own else "FAILED"), re.sub(r"^context parallel[^:]*: ", "", str(e))[:120]
    except Exception as e:
        return "FAILED", f"{type(e).__name__}: {str(e)[:120]}"
    least = 1e-3 * max(float(grad.abs().max()) for grad in wanted.values())
    worst = max(
        float((got[n] - g).abs().max()) / max(float(g.abs().max()), least) if n in got else float("inf")
        for n, g in wanted.items()
        if float(g.abs().max()) or n in got
    )
    words = f"loss off by {abs(found - loss):.1e}, gradients by {worst:.1e}"
    return ("right" if abs(found - loss) <= 1e-6 * max(abs(loss), 1) and worst <= WORST else "OTHER"), words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="classes whose name matches this regular expression")
    parser.add_argument("--parts", type=int, default=2, help="of each sequence")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for kind, entry in all_entries():
        if kind == "causal LM" and re.search(args.only, entry.name):
            end, words = compare(entry, args.parts)
            counts[end] += 1
            print(f"{end:9} {entry.name:45} {words}", flush=True)
    print(dict(counts))
    return int(any(end.isupper() for end in counts))


if __name__ == "__main__":
    sys.exit(main())
