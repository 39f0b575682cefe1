"""How chunks go among the ranks that divide them, and forwards and backwards whose collectives follow a script.

Channel         weights are gathered, gradients are added up and scattered: messages of our own, in host memory
LibraryChannel  the same by the library's collectives among GPUs (NCCL), on a stream of their own
ScriptedStep    a script that ranks have agreed on, in which none of these is negotiated

Both channels make the same sums of the same terms; over the wire they are made here, in the order of ranks.

One place launches all collectives of a script, in one order that is that of all ranks: among GPUs, ranks whose
collectives are in different orders wait for each other for ever. So both kinds are in one order here
(:attr:`gemini.planning.script.Script.gathers_before`), and one thread, the *launcher*, begins them. Who wants one
offers it to the launcher, which takes it when all before it were launched. It first hears a small number from each
rank: that it takes part, or that it *parts*. With it come those of what stands behind and is offered already, so where
the launcher is late one message is for many. Nobody launches a collective from which a rank has parted, nor anything
after it: there all ranks leave the script, and gradients that were not reduced stay where they are. These numbers
travel while what was launched before is under way.

Sums land on a thread of their own, so that what waits for messages or for copies to the host holds nothing up.

No wait may be for somebody who waits for this rank in turn. What stands before a collective was begun on every rank
that follows; so a rank offers a gather only when it has begun the reductions before it, and parts before it waits for a
reduction whose gathers it has not begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from gemini.errors import GeminiError, RankLost
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import DONE, AllOf, Event
from gemini.memory.movement.manager import Manager
from gemini.memory.movement.transfers import Job, Worker
from gemini.memory.store import ChunkStore
from gemini.planning.script import Gather, Script
from gemini.planning.timeline import Track
from gemini.ranks.wire import Tag, Wire

STREAM = "collectives"


class Channel:
    """The chunks of one model, over the wire; ``scratch``: host memory for pieces of gradients."""

    needs_all = False
    """Whether a rank without any gradient of a chunk takes part in the sum, with zeros."""

    def __init__(self, wire: Wire, store: ChunkStore, scratch: torch.Tensor):
        self.wire = wire
        self.device = store.device
        self.mover = store.mover
        self._scratch = scratch

    def fetch(self, chunk: Chunk) -> Event:
        """Bring this rank's shard of a chunk into its window, for :meth:`gather` and :meth:`launch_gather`."""
        fetched = self.mover.fetch(chunk.weights, self._section(chunk.flat), chunk.spec.index)
        fetched.wait()  # the wire reads it on the host
        return fetched

    def fetch_ahead(self, chunk: Chunk) -> Event:
        """Begin :meth:`fetch` ahead of its use: the event after which the shard may be read there."""
        return self.fetch(chunk)

    def gather(self, chunk: Chunk) -> None:
        """Fill the window of a chunk with the shards of all ranks, all of which gather it now."""
        with torch.profiler.record_function("gemini::all_gather"), self.during(Track.GATHER, chunk):
            self.wire.begin_all_gather(Tag.ALL_GATHER, chunk.flat, f"the all-gather of {chunk.name}").wait()

    def launch_gather(self, chunk: Chunk, ready: Event) -> Event:
        """Begin to fill the window of a chunk when ``ready`` is complete; the end of that. Called by the launcher."""
        with torch.profiler.record_function("gemini::all_gather"), self.during(Track.GATHER, chunk):
            return self.wire.begin_all_gather(Tag.ALL_GATHER, chunk.flat, f"the all-gather of {chunk.name}")

    def launch_reduce(self, chunk: Chunk, whole: torch.Tensor, ready: Event) -> Event:
        """Begin to add up the gradients of a chunk when ``ready`` is complete, as far as that goes without host memory
        for what arrives; the end of that. :meth:`sums` gives what comes of it.
        """
        return DONE

    def sums(
        self, chunk: Chunk, whole: torch.Tensor | None, senders: Mapping[int, torch.dtype], *, is_launched: bool = False
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """This rank's section of the sum over ranks, piece by piece: ``(start, stop, sum)``, a piece for the moment.
        ``whole``: this rank's gradient of the whole chunk, None if it has none. ``senders``: the ranks that have one,
        and its dtype there. ``is_launched``: whether :meth:`launch_reduce` was called.
        """
        # A rank without any of these gradients sends nothing, and the sum has no term of it.
        own = whole if self.wire.rank in senders else None
        what = f"the reduce-scatter of {chunk.name}"
        return self.wire.reduce_scatter(Tag.REDUCE_SCATTER, own, senders, chunk.weights.numel, self._scratch, what)

    def during(self, track: Track, chunk: Chunk) -> AbstractContextManager[None]:
        """Note a time in which weights or gradients travel."""
        index = chunk.spec.index
        return self.mover.about(track.value, f"{track.value} chunk {index}", index, track=track)

    def _section(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of what has a section for each rank."""
        return whole.chunk(self.wire.size)[self.wire.rank]


class LibraryChannel(Channel):
    """The chunks of one model by collectives of the library, in the windows themselves."""

    needs_all = True

    def fetch(self, chunk: Chunk) -> Event:
        fetched = self.mover.fetch(chunk.weights, self._section(chunk.flat), chunk.spec.index)
        # The collective comes behind the copy on the stream: the host need not wait for it.
        fetched.wait_on_device()
        return fetched

    def fetch_ahead(self, chunk: Chunk) -> Event:
        fetched = self.mover.fetch(chunk.weights, self._section(chunk.flat), chunk.spec.index)
        # A cast on the computing stream fills the window: the launcher has a stream of its own and must follow it.
        return AllOf([fetched, self.device.mark()]) if self.mover.computes(chunk) else fetched

    def gather(self, chunk: Chunk) -> None:
        with torch.profiler.record_function("gemini::all_gather"), self.during(Track.GATHER, chunk):
            what = f"the all-gather of {chunk.name}"
            self.wire.all_gather_by_library(Tag.ALL_GATHER, chunk.flat, self._section(chunk.flat), what)

    def launch_gather(self, chunk: Chunk, ready: Event) -> Event:
        return self.device.launch(lambda: self.gather(chunk), STREAM, chunk.flat, ready)

    def launch_reduce(self, chunk: Chunk, whole: torch.Tensor, ready: Event) -> Event:
        return self.device.launch(lambda: self._reduce(chunk, whole), STREAM, whole, ready)

    def _reduce(self, chunk: Chunk, whole: torch.Tensor) -> None:
        """The sum stands in this rank's section of the whole gradient."""
        what = f"the reduce-scatter of {chunk.name}"
        with self.during(Track.REDUCE, chunk):
            self.wire.reduce_scatter_by_library(Tag.REDUCE_SCATTER, self._section(whole), whole, what)

    def sums(
        self, chunk: Chunk, whole: torch.Tensor | None, senders: Mapping[int, torch.dtype], *, is_launched: bool = False
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        assert whole is not None
        if not is_launched:
            self._reduce(chunk, whole)
        # All at once: the sum stands where the gradient was, and takes no room of its own.
        yield 0, chunk.weights.numel, self._section(whole)


# ---- a script ---------------------------------------------------------------------------------------------------

_PARTS = 0
"""The word of a rank that leaves the script, where the others say what they bring."""
_TAKES_PART = 1
_AT_ONCE = 16  # collectives that a message is for at most: 128 bytes, and the gathers and sums of a block or more
_STREAM = "landing"


class Parted(GeminiError):
    """Raised where nothing comes of a collective, since a rank has left the script."""


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
    """The place of this rank in a script, and what it has begun. ``manager`` gives gathers ahead to a worker. The first
    of ``lanes`` launches collectives, on the other one sums land.
    """

    def __init__(self, script: Script, channel: Channel, manager: Manager, lanes: Sequence[Worker]):
        self.script = script
        self.is_parted = False
        """Whether a rank has parted: what was not reduced will not be."""
        self._channel = channel
        self._manager = manager
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
        self._offered: dict[int, tuple[Job, int]] = {}
        self._says: list[int] = []  # what this rank says of each place that the launcher has, in their order
        self._heard = 0  # before this place all take part in everything; the launcher's own
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
        nothing comes of it because a rank has parted. ``again``: it holds them, and others want this rank's.
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
        """Begin the next reduction: ``launch`` lets it begin and gives the end of that, then ``add_up`` is called on a
        worker, if none has parted. ``brings``: a number above 0 that says in which form; it must be the same on all.
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
        self._manager.await_begun()
        if self._gathered < self.script.gathers_before[self._jobs.index(job)]:
            self.finish()

    # ---- order --------------------------------------------------------------------------------------------------

    def _offer(self, place: int, says: int, what: str, begin: Callable[[], Event]) -> Launch:
        """Offer a collective for its place in the order; this rank ``says`` a number for it. Called by any thread."""
        launch = Launch(Job(place))

        def run() -> None:
            self._hear(place, what)
            try:
                launch.end = begin()
            except BaseException:  # what others have launched here does not end; nothing more is begun
                self.is_parted = True
                raise

        launch.job.run = run
        with WHOLE, self._order:
            self._launches.append(launch.job)
            self._offered[place] = launch.job, says
            self._give()
        return launch

    def _give(self) -> None:
        """Give the launcher what is at the next places; all that was offered, if this rank leaves. Needs ``_order``."""
        # The launcher never sees a collective before all that stand before it: it has no order of its own to keep.
        while self._next in self._offered:
            job, says = self._offered.pop(self._next)
            self._says.append(says)
            self._launcher.put(job)
            self._next += 1
        # Behind the place where this rank leaves all end as parted, so that no thread waits for them.
        for place in sorted(self._offered) if self._leaves else ():
            self._launcher.put(self._offered.pop(place)[0])

    def _hear(self, place: int, what: str) -> None:
        """Hear, on the launcher's thread, up to where all ranks say the same; raises Parted if not of this place."""
        # Once a rank has parted nobody says anything more: the others have left at the same place.
        if not self.is_parted and place >= self._heard:
            # Others append meanwhile, behind these. What is not offered yet reads as parting, and is asked again.
            own = self._says[place : place + _AT_ONCE]
            said = torch.tensor(own + [_PARTS] * (_AT_ONCE - len(own)), dtype=torch.int64, device="cpu")
            try:
                # Of the same rows on every rank, so all stop at the same place.
                alike = (self._channel.wire.swap(Tag.HEADER, said, what) == said).all(0) & (said != _PARTS)
                self._heard = place + int(alike.long().cumprod(0).sum())
            finally:  # nor does anything come of what stands behind a rank that is lost
                self.is_parted = self._heard <= place
        if self.is_parted:
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
                job.run = partial(self._hear, self._next, "leaving a script")
                self._says.append(_PARTS)
                self._launches.append(job)
                self._launcher.put(job)
            self._give()

    # ---- the end ------------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Wait until nothing of the script is under way any more. True if it came to its end, on all ranks as far as is
        known. Raises RankLost if one of them does not answer.
        """
        self._manager.await_begun()
        is_through = self.next_gather() is None and self.next_reduction is None and not self._leaves
        self.part()
        # Launches first: what a lost rank left behind ends there, and the sums behind it with it.
        for job in [*self._launches, *self._jobs]:
            job.wait_until_over()
            if isinstance(job.error, RankLost):
                raise job.error
        return is_through and not self.is_parted
