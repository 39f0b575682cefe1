"""The script of a step: in which order its ranks gather chunks and reduce gradients. A pure function of integers that
every rank knows alike (what each moment needs, what the plan lets go before it, which chunks are there, when gradients
were complete), so ranks need not ask each other before a collective. Equal checksums mean the same step.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

AHEAD = 1
"""How many gathers for later moments come before a reduction. With one the weights of the next chunk are on their way
while gradients are computed; with more they would wait for room longer.
"""


class Gather(NamedTuple):
    """Chunk ``chunk`` is gathered for ``moment``."""

    moment: int
    chunk: int


class Reduce(NamedTuple):
    """The gradients of ``chunk`` are complete in ``moment``, and are reduced then."""

    moment: int
    chunk: int


@dataclass(frozen=True)
class Script:
    """The collectives of a step: what is gathered for a moment is asked for before gradients are complete in it."""

    gathers: tuple[Gather, ...]
    reductions: tuple[Reduce, ...]

    @property
    def checksum(self) -> int:
        """A sum of all of it, never 0."""
        return zlib.crc32(json.dumps([self.gathers, self.reductions]).encode()) | 1 << 32

    @cached_property
    def gathers_before(self) -> tuple[int, ...]:
        """How many gathers come before each reduction: those until its moment, and :data:`AHEAD` further ones."""
        until = [sum(gather.moment <= reduction.moment for gather in self.gathers) for reduction in self.reductions]
        return tuple(min(number + AHEAD, len(self.gathers)) for number in until)

    def reductions_before_gather(self, number: int) -> int:
        """In that order: how many reductions come before gather ``number``, all of them of earlier moments."""
        return bisect_right(self.gathers_before, number)


def make_script(
    needs: Sequence[Collection[int]],
    let_go: Sequence[Collection[int]],
    there: Collection[int],
    completed: Mapping[int, int],
) -> Script:
    """The script of one forward and backward, from the chunks that each moment reads (of those that have to be
    gathered), those that the plan lets go when it begins, those that are there when the step begins, and by chunk the
    moment in which all its gradients had arrived, in the order in which they had.
    """
    gathered, gathers = set(there), []
    for moment, (needed, gone) in enumerate(zip(needs, let_go, strict=True)):
        gathered.difference_update(gone)
        for chunk in sorted(set(needed) - gathered):
            gathers.append(Gather(moment, chunk))
            gathered.add(chunk)
    latest, reductions = 0, []
    for chunk, moment in completed.items():
        latest = max(latest, moment)
        reductions.append(Reduce(latest, chunk))
    return Script(tuple(gathers), tuple(reductions))
