"""A script over the wire: ranks send each other pieces of tensors themselves (CPU).

Gathers go out ahead of their use and reductions behind backward, each kind in the order of the script on every rank,
so that messages find each other. A reduction begins with one small number from each rank: what it brings, or that it
*parts*: then nobody adds up anything, and the gradients stay where they are.

A rank may leave at any place, because its program does something else or fails. It says so by parting from all
reductions that are left, and serves all gathers that are left (:meth:`WiredStep.finish`): it sends its shards, and
throws away what it receives. The others go on until they meet a reduction from which it has parted; there they leave as
well. So whoever waits for a collective of the script gets it, and when all have finished all stand at the end of it.

No wait may be for somebody who waits for this rank in turn. What the script has before a collective was begun on every
rank that follows; so a rank that is about to wait first looks whether it has begun that itself, and else leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from gemini.errors import GeminiError, RankLost
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import DONE, WAIT_SECONDS, Event
from gemini.memory.movement.worker import Job, Worker
from gemini.planning.script import Gather, Script
from gemini.ranks.wire import Pending, Tag, Wire
from gemini.train.sharding.scripted import PARTS, Scripted


class Arrival(Event):
    """The end of an all-gather on the wire. Who waits first looks after the messages.

    Args:
        before: called before a wait.
        waiting: around it.
    """

    what = "an all-gather"

    def __init__(
        self, pending: Pending, before: Callable[[], None], waiting: Callable[[], AbstractContextManager[None]]
    ):
        super().__init__()
        self._pending, self._before, self._waiting, self._turn = pending, before, waiting, threading.Lock()

    def wait(self, timeout: float = WAIT_SECONDS) -> None:
        """Block until the weights are there; how long that may take is the process group's.

        Raises:
            RankLost: if a rank does not answer.
        """
        if not self.is_complete():
            self._before()
        with self._turn:
            if not self.is_complete():
                try:
                    with self._waiting():
                        self._pending.wait()
                except GeminiError as e:
                    self.finish(e)
                    raise
                self.finish()
        if self._error is not None:
            raise self._error


class WiredStep(Scripted):
    """Where this rank is in a script whose messages go over the wire.

    Args:
        post: puts a chunk's weights on the wire, from its home into its window.
        throw_away: sends this rank's shard of a chunk and receives what nobody wants.
        lane: the worker whose jobs are the reductions.
        is_worker: whether the calling thread is not the one that computes.
        waiting: around a wait for weights.
    """

    def __init__(
        self, script: Script, wire: Wire, *, post: Callable[[Chunk], Pending], throw_away: Callable[[int], None],
        settle: Callable[[], None], lane: Worker, is_worker: Callable[[], bool],
        waiting: Callable[[], AbstractContextManager[None]],
    ):  # fmt: skip
        super().__init__(script, settle)
        self._wire, self._post, self._throw_away = wire, post, throw_away
        self._lane, self._is_worker, self._waiting = lane, is_worker, waiting

    # ---- gathers ------------------------------------------------------------------------------------------------

    def gather(self, chunk: Chunk, *, again: bool = False) -> Arrival | None:
        with self._turn:
            following = self.next_gather()
            if following is None or following.chunk != chunk.spec.index:
                return None
            pending = self._post(chunk)
            self._gathered += 1
        return Arrival(pending, lambda: self._before_arrival(following), self._waiting)

    def _before_arrival(self, gather: Gather) -> None:
        if not self._is_worker() and len(self._jobs) < self.script.reductions_before(gather.moment):
            self.part()

    # ---- reductions ---------------------------------------------------------------------------------------------

    def reduce(self, brings: int, add_up: Callable[[list[int]], None], launch: Callable[[], Event]) -> Job:
        def run() -> None:
            said = torch.tensor([brings], dtype=torch.int64, device="cpu")
            heard = self._wire.swap(Tag.HEADER, said, "the beginning of a reduction").view(-1).tolist()
            if PARTS in heard:
                self.is_parted = True
            else:
                add_up(heard)

        with WHOLE:
            job = self._lane.submit(run, len(self._jobs))
            self._jobs.append(job)
        return job

    def before_waiting_for(self, job: Job) -> None:
        self._settle()
        moment = self.script.reductions[self._jobs.index(job)].moment
        if self._gathered < self.script.gathers_until(moment):
            self.finish()

    def part(self) -> None:
        while self.next_reduction is not None:
            self.reduce(PARTS, lambda heard: None, lambda: DONE)

    # ---- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Do what is left of the script, for the others: see :meth:`Scripted.finish`."""
        self._settle()
        is_through = self.next_reduction is None and self.next_gather() is None
        self.part()
        while (gather := self.next_gather()) is not None:
            self._throw_away(gather.chunk)
            self._gathered += 1
        for job in self._jobs:
            job.wait_until_over()
            if isinstance(job.error, RankLost):
                raise job.error
        return is_through and not self.is_parted
