"""Compute a sequence of every causal language model of transformers in parts, and compare with the whole.

    python tests/hunts/context_zoo.py                      # some minutes
    python tests/hunts/context_zoo.py --only 'Llama|Gemma' --parts 2

Two or more tiny copies of a model, each in a thread with its part of the sequence, hand each other what ranks would
send. For each class: whether loss and gradients are those of the whole sequence, or the error with which it is refused.
Exit code 1 if something came out otherwise: a model that is not refused and gives something else, or an error that is
not of Gemini.
"""

import copy
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from gemini.train.context import (  # noqa: E402
    ContextParallel,
    Exchange,  # noqa: E402
    part_of,
)
from tests.hunts.zoo.runner import Untried  # noqa: E402
from tests.hunts.zoo.whole import Gradients, Limits, compare, gradients, hunt, long, make_parser  # noqa: E402


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

    def compare(self, facts: Any, refusal: Any) -> None:
        """They are cut from one batch."""


def in_parts(model: nn.Module, batch: dict[str, Any], size: int) -> tuple[float, Gradients, str]:
    """The mean of the losses and gradients of all parts.

    Raises:
        GeminiError: if the model is refused; whatever a part raises.
        Untried: if the model draws numbers, of which each part would draw its own.
    """
    if len({gradients(copy.deepcopy(model), batch, seed)[0] for seed in (0, 1)}) > 1:
        raise Untried("it draws numbers of its own")
    desk, results = Desk(size), dict[int, Any]()
    copies = [copy.deepcopy(model) for _ in range(size)]

    def compute(rank: int) -> None:
        try:
            ContextParallel(copies[rank], Handed(rank, size, desk), "auto").put()
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
    return sum(loss for loss, _ in results.values()) / size, total, ""


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--parts", type=int, default=2, help="of each sequence")
    args = parser.parse_args()
    size = args.parts
    return hunt(
        ("causal LM",), args.only,
        lambda entry: compare(
            entry, lambda batch: long(batch, 4 * size, size), lambda model, batch: in_parts(model, batch, size),
            Limits(1e-6, 1e-5),
        ),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
