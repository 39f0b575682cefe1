"""How chunks go among the ranks that divide them: weights are gathered, gradients are added up and scattered.

Channel         messages of our own, in host memory (:mod:`gemini.ranks.wire`)
LibraryChannel  the library's collectives among GPUs (NCCL), on a stream of their own

Both make the same sums of the same terms; over the wire they are made here, in the order of ranks. A collective is
*launched* from one place (:mod:`gemini.train.sharding.scripted`) or done at once, where ranks have just agreed on it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import torch

from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import DONE, AllOf, Event
from gemini.memory.store import ChunkStore
from gemini.planning.timeline import Track
from gemini.ranks.wire import Pending, Tag, Wire

STREAM = "collectives"


class Arrival(Event):
    """The end of messages on the wire. Who waits first looks after them; any thread may. How long that takes is the
    process group's; if a rank does not answer, it ends as RankLost.
    """

    what = "an all-gather"

    def __init__(self, pending: Pending):
        super().__init__()
        self._pending = pending
        self._turn = threading.Lock()

    def wait(self) -> None:
        # Two threads may want the same weights: the second one finds them there, or the same error.
        with self._turn:
            if not self.is_complete():
                try:
                    self._pending.wait()
                except GeminiError as e:
                    self.finish(e)
                    raise
                self.finish()
        if self._error is not None:
            raise self._error


class Channel:
    """The chunks of one model, over the wire.

    Args:
        scratch: host memory for pieces of gradients.
    """

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
        self._await(fetched)
        return fetched

    def _await(self, fetched: Event) -> None:
        fetched.wait()  # the wire reads it on the host

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
            return Arrival(self.wire.begin_all_gather(Tag.ALL_GATHER, chunk.flat, f"the all-gather of {chunk.name}"))

    def launch_reduce(self, chunk: Chunk, whole: torch.Tensor, ready: Event) -> Event:
        """Begin to add up the gradients of a chunk when ``ready`` is complete, as far as that goes without host memory
        for what arrives; the end of that. :meth:`sums` gives what comes of it.
        """
        return DONE

    def sums(
        self, chunk: Chunk, whole: torch.Tensor | None, senders: Mapping[int, torch.dtype], *, is_launched: bool = False
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """This rank's section of the sum over ranks, piece by piece: ``(start, stop, sum)``, a piece for the moment.

        Args:
            whole: this rank's gradient of the whole chunk, None if it has none.
            senders: the ranks that have one, and its dtype there.
            is_launched: whether :meth:`launch_reduce` was called.
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

    def _await(self, fetched: Event) -> None:
        # The collective comes behind the copy on the stream: the host need not wait for it.
        fetched.wait_on_device()

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
