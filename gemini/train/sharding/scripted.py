"""A forward and backward whose collectives follow a script that ranks agreed on: none of them is negotiated.

One place launches all of them, in one order that is that of all ranks: among GPUs, ranks whose collectives are in
different orders wait for each other for ever. So both kinds are in one order here
(:attr:`gemini.planning.script.Script.gathers_before`), and one thread, the *launcher*, begins them. Who wants one
offers it to the launcher, which takes it when all before it were launched. It first hears one small number from each
rank: that it takes part, or that it *parts*. Nobody launches a collective from which a rank has parted, nor anything
after it: there all ranks leave the script, and gradients that were not reduced stay where they are. These numbers
travel while what was launched before is under way.

Sums land on a thread of their own, so that what waits for messages or for copies to the host holds nothing up.

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
from gemini.memory.devices.device import DONE, WAIT_SECONDS, Event
from gemini.memory.movement.worker import Job, Worker
from gemini.planning.script import Gather, Script
from gemini.ranks.wire import Tag, Wire
from gemini.train.sharding.channel import Channel

_PARTS = 0
"""What a rank says that leaves the script, where the others say what they bring."""
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
        """Block until it is under way; how long that may take is the process group's.

        Raises:
            Parted: if it never is.
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


class ScriptedStep:
    """Where this rank is in a script.

    Args:
        wire: among the ranks that follow it.
        channel: which moves the chunks.
        settle: waits until the gathers that were given to a worker have begun, or have failed.
        launcher: the worker that launches.
        landing: the worker on which sums land.
        is_worker: whether the calling thread is not the one that computes.
        waiting: around a wait for weights.
    """

    def __init__(
        self, script: Script, wire: Wire, channel: Channel, *, settle: Callable[[], None], launcher: Worker,
        landing: Worker, is_worker: Callable[[], bool], waiting: Callable[[], AbstractContextManager[None]],
    ):  # fmt: skip
        self.script = script
        self.is_parted = False
        """Whether a rank has parted: what was not reduced will not be."""
        self._wire, self._channel, self._settle = wire, channel, settle
        self._launcher, self._landing, self._is_worker, self._waiting = launcher, landing, is_worker, waiting
        self._turn = threading.RLock()
        self._gathered = 0  # of the script's gathers, how many have begun
        self._given = 0  # the same with those that a worker is about to begin
        self._jobs: list[Job] = []  # the reductions that have begun
        self._num_places = len(script.gathers) + len(script.reductions)
        self._order = threading.Lock()
        self._next = 0  # the place in the order that is given to the launcher next
        self._offered: dict[int, Job] = {}
        self._launches: list[Job] = []
        self._leaves = False

    # ---- gathers ------------------------------------------------------------------------------------------------

    def upcoming(self) -> Iterator[tuple[int, int]]:
        """What to gather ahead, (moment, chunk): who asks for another one has begun the one before."""
        self._given = max(self._given, self._gathered)
        while self._given < len(self.script.gathers) and self._may_come(self._given):
            yield self.script.gathers[self._given]
            self._given += 1

    def _may_come(self, number: int) -> bool:
        """Whether gather ``number`` may be begun now."""
        return len(self._jobs) >= self.script.reductions_before_gather(number)

    def next_gather(self) -> Gather | None:
        """The first one that has not begun."""
        gathers = self.script.gathers
        return gathers[self._gathered] if self._gathered < len(gathers) else None

    def gather(self, chunk: Chunk, *, again: bool = False) -> Launch | None:
        """Begin to gather the weights of a chunk into its window: the end of that. None if it is not its turn, or
        nothing comes of it because a rank has parted.

        ``again``: the window holds them already, and others want what this rank has.
        """
        with self._turn:
            following = self.next_gather()
            if self._leaves or self.is_parted or following is None or following.chunk != chunk.spec.index:
                return None
            number = self._gathered
            if not self._may_come(number):
                self.part()
                return None
            ready = self._channel.device.mark() if again else self._channel.fetch_ahead(chunk)
            launch = Launch(self._waiting)

            def run() -> None:
                self._hear(_TAKES_PART, f"the all-gather of {chunk.name}")
                with self._launching():
                    launch.end = self._channel.launch_gather(chunk, ready)

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
        """The chunk whose gradients are reduced next; None at the end, and where this rank leaves."""
        reductions, begun = self.script.reductions, len(self._jobs)
        return reductions[begun].chunk if begun < len(reductions) and not self._leaves else None

    def reduce(self, brings: int, add_up: Callable[[list[int]], None], launch: Callable[[], Event]) -> Job:
        """Begin the next reduction.

        Args:
            brings: a number for the others that says in which form, above 0.
            add_up: called on a worker with the numbers of all ranks, if none has parted.
            launch: lets it begin, before ``add_up``; the end of that.
        """
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
            with self._channel.device.beside(_STREAM):
                add_up(heard)
                landed = self._channel.device.mark()
            landed.wait()

        with WHOLE:
            offered = self._offer(number + self.script.gathers_before[number], run)
            job = self._landing.submit(land, number)
            self._jobs.append(job)
        return job

    def before_waiting_for(self, job: Job) -> None:
        """This rank is about to wait for a reduction."""
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
                whole = _PARTS not in heard and len(set(heard)) == 1
            finally:  # nor does anything come of what stands behind a rank that is lost
                self.is_parted = not whole
            if whole:
                return heard
        raise Parted("a rank has left the script of this step")

    def _say_parting(self) -> None:
        self._hear(_PARTS, "leaving a script")

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
        """Wait until nothing of the script is under way any more. True if it came to its end, on all ranks as far as is
        known.

        Raises:
            RankLost: if one of them does not answer.
        """
        self._settle()
        is_through = self.next_gather() is None and self.next_reduction is None and not self._leaves
        self.part()
        for job in [*self._launches, *self._jobs]:
            job.wait_until_over()
            if isinstance(job.error, RankLost):
                raise job.error
        return is_through and not self.is_parted
