"""One forward and backward whose collectives follow a script that ranks agreed on, so that none is negotiated.

How they are made is another thing for messages of our own (:mod:`gemini.train.sharding.wired`) and for the library's
collectives among GPUs (:mod:`gemini.train.sharding.launched`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import Event
from gemini.memory.movement.worker import Job
from gemini.planning.script import Gather, Script

PARTS = 0
"""What a rank says that leaves the script, where the others say what they bring."""


class Scripted(ABC):
    """Where this rank is in a script.

    Args:
        settle: waits until the gathers that were given to a worker have begun, or have failed.
    """

    def __init__(self, script: Script, settle: Callable[[], None]):
        self.script = script
        self.is_parted = False
        """Whether a rank has parted: what was not reduced will not be."""
        self._settle = settle
        self._turn = threading.RLock()
        self._gathered = 0  # of the script's gathers, how many have begun
        self._given = 0  # the same with those that a worker is about to begin
        self._jobs: list[Job] = []

    def upcoming(self) -> Iterator[tuple[int, int]]:
        """What to gather ahead, (moment, chunk): who asks for another one has begun the one before."""
        self._given = max(self._given, self._gathered)
        while self._given < len(self.script.gathers) and self.may_come(self._given):
            yield self.script.gathers[self._given]
            self._given += 1

    def may_come(self, number: int) -> bool:
        """Whether gather ``number`` may be given to a worker now."""
        return True

    def next_gather(self) -> Gather | None:
        """The first one that has not begun."""
        gathers = self.script.gathers
        return gathers[self._gathered] if self._gathered < len(gathers) else None

    @property
    def next_reduction(self) -> int | None:
        """The chunk whose gradients are reduced next; None at the end."""
        reductions, begun = self.script.reductions, len(self._jobs)
        return reductions[begun].chunk if begun < len(reductions) else None

    @abstractmethod
    def gather(self, chunk: Chunk, *, again: bool = False) -> Event | None:
        """Begin to gather the weights of a chunk into its window: the end of that. None if it is not its turn, or
        nothing comes of it because a rank has parted.

        ``again``: the window holds them already, and others want what this rank has.
        """

    @abstractmethod
    def reduce(self, brings: int, add_up: Callable[[list[int]], None], launch: Callable[[], Event]) -> Job:
        """Begin the next reduction.

        Args:
            brings: a number for the others that says in which form, above 0.
            add_up: called on a worker with the numbers of all ranks, if none has parted.
            launch: where the library reduces: lets it begin to, before ``add_up``; the end of that.
        """

    @abstractmethod
    def before_waiting_for(self, job: Job) -> None:
        """This rank is about to wait for a reduction."""

    @abstractmethod
    def part(self) -> None:
        """Take no part in the reductions that are left."""

    @abstractmethod
    def finish(self) -> bool:
        """Nothing of the script is under way any more. True if it came to its end, on all ranks as far as is known.

        Raises:
            RankLost: if one of them does not answer.
        """
