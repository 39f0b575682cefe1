"""A script of the library's collectives (NCCL): one place launches all of them, in one order that is that of all ranks.

Ranks whose collectives are in different orders wait for each other for ever, so both kinds are in one order here
(:attr:`gemini.planning.script.Script.gathers_before`), and one thread, the *launcher*, gives them to a stream of their
own. Who begins one offers it to the launcher, which takes it when all before it were launched. It first hears one small
number from each rank, on the host: that it takes part, or that it *parts*. Nobody launches a collective from which a
rank has parted, nor anything after it: there all ranks leave the script, and gradients that were not reduced stay where
they are. These numbers travel while the device works on what was launched before.

Sums land on a thread of their own, so that what waits for copies to the host holds nothing up.

No wait may be for somebody who waits for this rank in turn. What stands before a collective was begun on every rank
that follows; so a rank offers a gather only when it has begun the reductions before it, and parts before it waits for a
reduction whose gathers it has not begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from gemini.errors import GeminiError, RankLost
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import DONE, WAIT_SECONDS, Device, Event
from gemini.memory.movement.worker import Job, Worker
from gemini.planning.script import Script
from gemini.ranks.wire import Tag, Wire
from gemini.train.sharding.scripted import PARTS, Scripted

_TAKES_PART = 1
_STREAM = "landing"


class Parted(GeminiError):
    """Nothing comes of a collective, since a rank has left the script."""


class Launch(Event):
    """The end of a collective that was offered to the launcher.

    Args:
        waiting: around a wait for the other ranks.
    """

    what = "a collective"

    def __init__(self, waiting: Callable[[], AbstractContextManager[None]]):
        super().__init__()
        self.job: Job | None = None
        self.end: Event = DONE
        """Once it is launched."""
        self._waiting = waiting

    def await_launch(self) -> None:
        """Block until the device has it; how long that may take is the process group's.

        Raises:
            Parted: if it never gets it.
            RankLost: if a rank does not answer.
        """
        assert self.job is not None
        if not self.job.is_complete():
            with self._waiting():
                self.job.wait_until_over()
        self.job.wait()

    def is_complete(self) -> bool:
        assert self.job is not None
        return self.job.is_complete() and (self.job.error is not None or self.end.is_complete())

    def wait(self, timeout: float = WAIT_SECONDS) -> None:
        self.await_launch()
        self.end.wait(timeout)

    def wait_on_device(self) -> None:
        self.await_launch()
        self.end.wait_on_device()


class LaunchedStep(Scripted):
    """Where this rank is in a script that the library plays.

    Args:
        wire: among the same ranks, on the host.
        fetch: brings this rank's shard of a chunk into its window, or says when it may be read there: the end of that.
        launch: gives the all-gather of a chunk to the device, behind that; the end of it.
        launcher: the worker that launches.
        landing: the worker on which sums land.
        is_worker: whether the calling thread is not the one that computes.
        waiting: around a wait for weights.
    """

    def __init__(
        self, script: Script, wire: Wire, *, device: Device, fetch: Callable[[Chunk, bool], Event],
        launch: Callable[[Chunk, Event], Event], settle: Callable[[], None], launcher: Worker, landing: Worker,
        is_worker: Callable[[], bool], waiting: Callable[[], AbstractContextManager[None]],
    ):  # fmt: skip
        super().__init__(script, settle)
        self._wire, self._device, self._fetch, self._launch = wire, device, fetch, launch
        self._launcher, self._landing, self._is_worker, self._waiting = launcher, landing, is_worker, waiting
        self._num_places = len(script.gathers) + len(script.reductions)
        self._order = threading.Lock()
        self._next = 0  # the place in the order that is given to the launcher next
        self._offered: dict[int, Job] = {}
        self._launches: list[Job] = []
        self._leaves = False

    # ---- gathers ------------------------------------------------------------------------------------------------

    def may_come(self, number: int) -> bool:
        return len(self._jobs) >= self.script.reductions_before_gather(number)

    def gather(self, chunk: Chunk, *, again: bool = False) -> Launch | None:
        with self._turn:
            following = self.next_gather()
            if self._leaves or self.is_parted or following is None or following.chunk != chunk.spec.index:
                return None
            number = self._gathered
            if not self.may_come(number):
                self.part()
                return None
            ready, launch = self._fetch(chunk, again), Launch(self._waiting)

            def run() -> None:
                self._hear(_TAKES_PART, f"the all-gather of {chunk.name}")
                with self._launching():
                    launch.end = self._launch(chunk, ready)

            launch.job = self._offer(number + self.script.reductions_before_gather(number), run)
            self._gathered += 1
        if not self._is_worker():
            try:
                launch.await_launch()
            except Parted:
                return None
        return launch

    # ---- reductions ---------------------------------------------------------------------------------------------

    @property
    def next_reduction(self) -> int | None:
        return None if self._leaves else super().next_reduction

    def reduce(self, brings: int, add_up: Callable[[list[int]], None], launch: Callable[[], Event]) -> Job:
        number, heard, end = len(self._jobs), [0], DONE

        def run() -> None:
            nonlocal heard, end
            heard = self._hear(brings, "the beginning of a reduction")
            with self._launching():
                end = launch()

        def land() -> None:
            offered.wait_until_over()
            if isinstance(offered.error, Parted):
                return
            offered.wait()
            end.wait()
            with self._device.beside(_STREAM):
                add_up(heard)
                landed = self._device.mark()
            landed.wait()

        with WHOLE:
            offered = self._offer(number + self.script.gathers_before[number], run)
            job = self._landing.submit(land, number)
            self._jobs.append(job)
        return job

    def before_waiting_for(self, job: Job) -> None:
        self._settle()
        if self._gathered < self.script.gathers_before[self._jobs.index(job)]:
            self.finish()

    # ---- order --------------------------------------------------------------------------------------------------

    def _offer(self, place: int, run: Callable[[], None]) -> Job:
        job = Job(run, place)
        with WHOLE, self._order:
            self._launches.append(job)
            self._offered[place] = job
            self._give()
        return job

    def _give(self) -> None:
        """The launcher gets what is at the next places; all that was offered, if this rank leaves."""
        while self._next in self._offered:
            self._launcher.put(self._offered.pop(self._next))
            self._next += 1
        for place in sorted(self._offered) if self._leaves else ():
            self._launcher.put(self._offered.pop(place))

    @contextmanager
    def _launching(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # what others have launched here does not end; nothing more is begun
            self.is_parted = True
            raise

    def _hear(self, says: int, what: str) -> list[int]:
        """On the launcher: what all ranks say before a collective.

        Raises:
            Parted: if one of them parts, or has before, or they bring different things.
        """
        if not self.is_parted:
            said, whole = torch.tensor([says], dtype=torch.int64, device="cpu"), False
            try:
                heard: list[int] = self._wire.swap(Tag.HEADER, said, what).view(-1).tolist()
                whole = PARTS not in heard and len(set(heard)) == 1
            finally:  # nor does anything come of what stands behind a rank that is lost
                self.is_parted = not whole
            if whole:
                return heard
        raise Parted("a rank has left the script of this step")

    def _say_parting(self) -> None:
        self._hear(PARTS, "leaving a script")

    def part(self) -> None:
        """Leave the script where this rank has offered nothing any more; what it has offered behind that ends, too."""
        with WHOLE, self._order:
            if self._leaves:
                return
            self._leaves = True
            if self._next < self._num_places:
                job = Job(self._say_parting, self._next)
                self._launches.append(job)
                self._launcher.put(job)
            self._give()

    # ---- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        self._settle()
        is_through = self.next_gather() is None and self.next_reduction is None and not self._leaves
        self.part()
        for job in [*self._launches, *self._jobs]:
            job.wait_until_over()
            if isinstance(job.error, RankLost):
                raise job.error
        return is_through and not self.is_parted
