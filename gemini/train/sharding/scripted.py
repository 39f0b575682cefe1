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
from functools import partial
from typing import NamedTuple

import torch

from gemini.errors import GeminiError, RankLost
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import DONE, Event
from gemini.memory.movement.fetches import Fetches
from gemini.memory.movement.worker import Job, Worker
from gemini.planning.script import Gather, Script
from gemini.ranks.wire import Tag
from gemini.train.sharding.channel import Channel

_PARTS = 0
"""The word of a rank that leaves the script, where the others say what they bring."""
_TAKES_PART = 1
_STREAM = "landing"


class Parted(GeminiError):
    """Raised where nothing comes of a collective, since a rank has left the script."""


class Lanes(NamedTuple):
    """The worker that launches collectives, and the one on which sums land."""

    launcher: Worker
    landing: Worker


class Launch(Event):
    """The end of a collective that was offered to the launcher."""

    what = "a collective"

    def __init__(self, job: Job):
        super().__init__()
        self.job = job
        """Over when it is under way; with Parted if it never is, with RankLost if a rank does not answer."""
        self.end: Event = DONE
        """Once it is launched."""

    def is_complete(self) -> bool:
        return self.job.is_complete() and (self.job.error is not None or self.end.is_complete())

    def wait(self) -> None:
        self.job.wait()
        self.end.wait()

    def wait_on_device(self) -> None:
        self.job.wait()
        self.end.wait_on_device()


class ScriptedStep:
    """The place of this rank in a script, and what it has begun.

    Args:
        channel: moves the chunks.
        fetches: gives gathers ahead of their use to a worker.
    """

    def __init__(self, script: Script, channel: Channel, fetches: Fetches, lanes: Lanes):
        self.script = script
        self.is_parted = False
        """Whether a rank has parted: what was not reduced will not be."""
        self._channel = channel
        self._fetches = fetches
        self._launcher, self._landing = lanes
        # The training thread and the fetch worker begin gathers; only one of them takes the next place of the script.
        self._turn = threading.RLock()
        self._gathered = 0  # of the script's gathers, how many have begun
        self._given = 0  # the same with those that a worker is about to begin
        self._jobs: list[Job] = []  # the reductions that have begun
        self._num_places = len(script.gathers) + len(script.reductions)
        # Offers come from the training thread, the fetch worker and autograd's threads.
        self._order = threading.Lock()
        self._next = 0  # the place in the order that is given to the launcher next
        self._offered: dict[int, Job] = {}
        self._launches: list[Job] = []
        self._leaves = False

    # ---- gathers ------------------------------------------------------------------------------------------------

    def upcoming(self) -> Iterator[tuple[int, int]]:
        """List what to gather ahead, (moment, chunk): who asks for another one has begun the one before."""
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
            begin = partial(self._channel.launch_gather, chunk, ready)
            place = number + self.script.reductions_before_gather(number)
            # Counted only behind the offer: who fails before it has taken no part, and the others hear that it parts.
            launch = self._offer(place, _TAKES_PART, f"the all-gather of {chunk.name}", begin)
            self._gathered += 1
        if not self._channel.mover.in_worker:
            try:
                # If nothing comes of it the caller asks the others itself, and they wait for that now.
                launch.job.wait()
            except Parted:
                return None
        return launch

    # ---- reductions ---------------------------------------------------------------------------------------------

    @property
    def next_reduction(self) -> int | None:
        """The chunk whose gradients are reduced next; None at the end, and where this rank leaves."""
        reductions, begun = self.script.reductions, len(self._jobs)
        return reductions[begun].chunk if begun < len(reductions) and not self._leaves else None

    def reduce(self, brings: int, add_up: Callable[[], None], launch: Callable[[], Event]) -> Job:
        """Begin the next reduction.

        Args:
            brings: a number above 0 that says in which form; all ranks must bring the same.
            add_up: called on a worker if none has parted.
            launch: lets it begin, before ``add_up``; the end of that.
        """
        number, device = len(self._jobs), self._channel.device

        def land() -> None:
            launched.job.wait_until_over()
            if isinstance(launched.job.error, Parted):
                return
            launched.wait()
            with device.beside(_STREAM):
                add_up()
                landed = device.mark()
            landed.wait()

        with WHOLE:
            place = number + self.script.gathers_before[number]
            launched = self._offer(place, brings, "the beginning of a reduction", launch)
            # Both or neither: an interrupt in between would leave a launch that nobody lands. The worker takes one
            # after the other, in the order of the script.
            job = self._landing.submit(land, number)
            self._jobs.append(job)
        return job

    def before_waiting_for(self, job: Job) -> None:
        """Part before this rank waits for a reduction whose gathers it has not begun: nobody else would begin them."""
        self._fetches.await_begun()
        if self._gathered < self.script.gathers_before[self._jobs.index(job)]:
            self.finish()

    # ---- order --------------------------------------------------------------------------------------------------

    def _offer(self, place: int, says: int, what: str, begin: Callable[[], Event]) -> Launch:
        """Offer a collective for its place in the order; this rank ``says`` a number for it. Called by any thread."""
        launch = Launch(Job(place))

        def run() -> None:
            self._hear(says, what)
            try:
                launch.end = begin()
            except BaseException:  # what others have launched here does not end; nothing more is begun
                self.is_parted = True
                raise

        launch.job.run = run
        with WHOLE, self._order:
            self._launches.append(launch.job)
            self._offered[place] = launch.job
            self._give()
        return launch

    def _give(self) -> None:
        """Give the launcher what is at the next places; all that was offered, if this rank leaves. Needs ``_order``."""
        # The launcher never sees a collective before all that stand before it: it has no order of its own to keep.
        while self._next in self._offered:
            self._launcher.put(self._offered.pop(self._next))
            self._next += 1
        # Behind the place where this rank leaves all end as parted, so that no thread waits for them.
        for place in sorted(self._offered) if self._leaves else ():
            self._launcher.put(self._offered.pop(place))

    def _hear(self, says: int, what: str) -> None:
        """Hear before a collective that all ranks say the same. Runs on the launcher's thread. Raises Parted if one of
        them parts, or has before, or they bring different things.
        """
        # Once a rank has parted nobody says anything more: the others have left at the same place.
        if not self.is_parted:
            said, whole = torch.tensor([says], dtype=torch.int64, device="cpu"), False
            try:
                heard = self._channel.wire.swap(Tag.HEADER, said, what)
                whole = says != _PARTS and bool((heard == says).all())
            finally:  # nor does anything come of what stands behind a rank that is lost
                self.is_parted = not whole
            if whole:
                return
        raise Parted("a rank has left the script of this step")

    def part(self) -> None:
        """Leave the script where this rank has offered nothing any more; what it has offered behind that ends, too.
        Called by any thread.
        """
        with WHOLE, self._order:
            if self._leaves:
                return
            self._leaves = True
            # At the next place and no later one: what was launched before it ends on all ranks.
            if self._next < self._num_places:
                job = Job(self._next)
                job.run = partial(self._hear, _PARTS, "leaving a script")
                self._launches.append(job)
                self._launcher.put(job)
            self._give()

    # ---- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Wait until nothing of the script is under way any more. True if it came to its end, on all ranks as far as is
        known. Raises RankLost if one of them does not answer.
        """
        self._fetches.await_begun()
        is_through = self.next_gather() is None and self.next_reduction is None and not self._leaves
        self.part()
        # Launches first: what a lost rank left behind ends there, and the sums behind it with it.
        for job in [*self._launches, *self._jobs]:
            job.wait_until_over()
            if isinstance(job.error, RankLost):
                raise job.error
        return is_through and not self.is_parted
