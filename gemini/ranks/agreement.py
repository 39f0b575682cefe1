"""How ranks agree on what comes next, so that no collective ever depends on who arrives first.

A rank that needs the others says what it wants and waits until all ranks have said what they want; where they follow a
script together it need not. From these requests, the same on every rank, follows what is done: weights or values that
any rank needs are served first, by all, whatever they want themselves; gradients are reduced when no rank needs
anything served, the last chunk of the layout first; who begins a step goes on by itself; everything else is done when
all ranks stand at the same point. So ranks may take different paths through a model (an expert that only one of them
uses, one more evaluation, a longer ``generate``) and neither hang nor mix up messages, and the order of sums follows
from the programs alone, not from their timing or from budgets.

Where requests can never meet (one rank has begun its next step, the other wants to save) all ranks raise the same
error.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch

from gemini.errors import RankMismatch
from gemini.ranks.wire import Tag, Wire


class Point(IntEnum):
    """Places where ranks meet, and how an error calls them."""

    words: str

    def __new__(cls, number: int, words: str = "") -> Point:
        point = int.__new__(cls, number)
        point._value_, point.words = number, words
        return point

    GATHER = 0, "a forward or backward (it needs weights)"
    READ = 1, "reading a param by name"
    REDUCE = 2, "a backward (its gradients are to be reduced)"
    END_BACKWARD = 3, "the end of a backward"
    SYNC_GRADS = 4, "clip_grad_norm_ or optimizer.step()"
    SAVE_CHECKPOINT = 5, "save_checkpoint"
    LOAD_CHECKPOINT = 6, "load_checkpoint"
    EXPORT = 7, "save_pretrained"
    WRITE = 8, "gathered(write=True)"
    STEP = 9, "optimizer.step()"
    LOAD_MODEL = 10, "load_state_dict"
    LOAD_OPTIMIZER = 11, "optimizer.load_state_dict"
    COPY = 12, "a write to a param (param.copy_)"
    CONTEXT = 13, "attention over the parts of a sequence"
    BEGIN_STEP = 14, "a forward or backward (it begins)"
    PARK = 15, "parked()"
    SWAP = 16, "swapped_in()"


_SERVED = (Point.GATHER, Point.READ)
_REDUCING = (Point.REDUCE, Point.END_BACKWARD, Point.CONTEXT)
"""Points at which a rank takes part in a reduction, whatever it has of the gradients."""


class Request(NamedTuple):
    """One rank's wish: a point, which chunk or param it is about, and what else the others must know."""

    point: Point
    about: int = 0
    detail: int = 0

    @property
    def subject(self) -> tuple[Point, int]:
        return self.point, self.about


class Handler(Protocol):
    """What does the work that ranks have agreed on, on all of them in the same order."""

    def serve(self, subject: tuple[Point, int], receivers: list[int]) -> None:
        """Give every rank in ``receivers`` (perhaps this one) the weights of a chunk or the values of a param."""

    def reduce(self, index: int, requests: list[Request]) -> None:
        """Sum up the gradients of chunk ``index`` over the ranks, whatever this rank has of them."""


class Agreement:
    """The agreements of one engine. ``num_steps`` tells how far a rank is, for the error message."""

    def __init__(self, wire: Wire):
        self._wire = wire
        # Of all ranks, at the last exchange.
        self._steps: list[int] = []
        self.num_steps = 0
        self.num_exchanges = 0

    def reach(self, request: Request, handler: Handler) -> list[Request]:
        """Wait, serving the others, until ``request`` is done (served, reduced), or all ranks stand at its point.

        Returns the requests of all ranks at that moment.

        Raises:
            RankMismatch: on every rank, if the requests can never meet.
            RankLost: if a rank died or does not answer.
        """
        while True:
            # The same list on every rank, so that all of them choose the same.
            requests = self._exchange(request)
            chosen = choose(requests)
            if chosen is None:
                raise RankMismatch(_explain(requests, self._steps, self._wire.global_ranks))
            point, index = chosen
            if point in _SERVED:
                handler.serve(chosen, [rank for rank, other in enumerate(requests) if other.subject == chosen])
            elif point is Point.REDUCE:
                handler.reduce(index, requests)
            # Else it was what other ranks wanted: this one says the same again, until its own turn comes.
            if request.subject == chosen:
                return requests

    def _exchange(self, request: Request) -> list[Request]:
        said = torch.tensor(
            [request.point, request.about, request.detail, self.num_steps], dtype=torch.int64, device="cpu"
        )
        rows = self._wire.swap(Tag.AGREEMENT, said, request.point.words).tolist()
        self.num_exchanges += 1
        self._steps = [row[3] for row in rows]
        return [Request(Point(row[0]), row[1], row[2]) for row in rows]


def choose(requests: Sequence[Request]) -> tuple[Point, int] | None:
    """Choose what is done now, from what all ranks want; None if nothing can be. A pure function of the requests."""
    served = [request.subject for request in requests if request.point in _SERVED]
    if served:
        # Any order would do that is the same on all ranks.
        return min(served)
    if any(request.point is Point.BEGIN_STEP for request in requests):
        return Point.BEGIN_STEP, 0  # who begins a step needs nobody to begin it as well
    reduced = [request.about for request in requests if request.point is Point.REDUCE]
    if reduced and all(request.point in _REDUCING for request in requests):
        # Backward goes through the layout from its end: what comes first there is complete first.
        return Point.REDUCE, max(reduced)
    # Everything else is for all ranks at once.
    if all(request.subject == requests[0].subject for request in requests):
        return requests[0].subject
    return None


def _explain(requests: Sequence[Request], steps: Sequence[int], ranks: Sequence[int]) -> str:
    where = "; ".join(
        f"rank {rank} is at {request.point.words} after {num_steps} steps"
        for rank, request, num_steps in zip(ranks, requests, steps, strict=True)
    )
    return (
        f"the ranks of this model were asked to do different things: {where}. Every rank must make the same backwards "
        "and steps, and call save_checkpoint, load_checkpoint and save_pretrained together. If the data of one rank "
        "ends early, give all the same number of batches (DistributedSampler(drop_last=True), or stop all at the "
        "shortest)"
    )
