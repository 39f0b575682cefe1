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
from typing import NamedTuple

from gemini.errors import RankMismatch


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


SERVED = (Point.GATHER, Point.READ)
"""Points at which a rank waits for what all of them give it."""
_REDUCING = (Point.REDUCE, Point.END_BACKWARD, Point.CONTEXT)
"""Points at which a rank takes part in a reduction, whatever it has of the gradients."""


class Request(NamedTuple):
    """One rank's wish: a point, which chunk or param it is about, what else the others must know, and how many steps
    the rank has made, which an error tells.
    """

    point: Point
    about: int = 0
    detail: int = 0
    num_steps: int = 0

    @property
    def subject(self) -> tuple[Point, int]:
        return self.point, self.about


def choose(requests: Sequence[Request]) -> tuple[Point, int] | None:
    """Choose what is done now, from what all ranks want; None if nothing can be. A pure function of the requests."""
    served = [request.subject for request in requests if request.point in SERVED]
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


def mismatch(requests: Sequence[Request], ranks: Sequence[int]) -> RankMismatch:
    """The error for requests of these ranks that can never meet."""
    where = "; ".join(
        f"rank {rank} is at {request.point.words} after {request.num_steps} steps"
        for rank, request in zip(ranks, requests, strict=True)
    )
    return RankMismatch(
        f"the ranks of this model were asked to do different things: {where}. Every rank must make the same backwards "
        "and steps, and call save_checkpoint, load_checkpoint and save_pretrained together. If the data of one rank "
        "ends early, give all the same number of batches (DistributedSampler(drop_last=True), or stop all at the "
        "shortest)"
    )
