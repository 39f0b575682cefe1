"""Fetches of gathered weights: begun on a worker ahead of their use, or here and now, and what waits for their copies.

A fetch has two ends. It is *under way* once its copies have been given to the device: what had to come before it is
over (an update, the reading of a file), and what can go wrong with it on the host has. A fetch ahead is a job of the
worker until then. It is *over* with ``chunk.fetched``, the end of those copies, and for that the host does not wait
where the device can: whoever reads the window there is put behind it (:meth:`Fetches.let_compute_wait`), so that a GPU
is given the work of many layers ahead. Who gives the memory back, or writes the weights' home on the host, waits too.

A copy that fails says so in ``chunk.fetched``, if the computing thread can wait for it; then the fetch is tried again.
On CUDA nobody knows until later: an error of the GPU comes up in whichever call is next, and ends the program's use of
it (see :mod:`gemini.memory.devices.cuda_windows`). For the manager, which gives the windows their memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Protocol

from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import DONE, Event
from gemini.memory.movement.foresight import Foresight
from gemini.memory.movement.mover import Mover, Working
from gemini.memory.movement.transfers import Lane, Transfers
from gemini.planning.timeline import Track


class WeightSource(Protocol):
    """A source of the weights that windows are filled with."""

    in_order: bool
    """Whether ranks fetch together: in the order in which it was asked for, whoever waits."""

    def gather(self, chunk: Chunk) -> Event:
        """Start to fill the populated window of a chunk: the end of that."""

    def upcoming(self) -> Iterable[tuple[int, int]]:
        """What is fetched ahead from here on, (moment, chunk)."""

    def follow(self) -> None:
        """Do what comes behind the chunk that was just acquired."""


class Homes:
    """The chunks' own homes as the source, in the order that the foresight plans."""

    in_order = False

    def __init__(self, mover: Mover, foresight: Foresight):
        self.gather, self.upcoming = mover.gather, foresight.upcoming

    def follow(self) -> None:
        """Do nothing: only ranks have something behind a gather."""


class Fetches:
    """The fetches of one manager. Called by the training thread alone; what runs on the lane's thread is ``fetch`` in
    :meth:`begin`, which takes no lock of it.
    """

    def __init__(self, mover: Mover, source: WeightSource, transfers: Transfers):
        self.source = source
        """Where weights come from. Another one is set before the first fetch."""
        self.begins_ahead = transfers.beside
        self.ahead = transfers.open[Lane.FETCH]
        """Those that nobody has asked for yet, by index of the chunk; over when all copies are under way."""
        self._mover, self._transfers = mover, transfers
        self._staging = transfers.staging.get(Lane.FETCH)

    def can_begin(self, chunk: Chunk) -> bool:
        """Whether it can be fetched ahead."""
        # A guess may be undone, and then what was fetched is not what the step left. Without staging of its own the
        # lane would share the training thread's areas.
        if chunk.is_guessed or not self.begins_ahead or (self._staging is None and self._mover.needs_staging(chunk)):
            return False
        # Work of the computing stream would stand there behind layers that were given to it before, far ahead of its
        # use.
        return not self._mover.computes(chunk)

    def begin(self, chunk: Chunk, moment: int) -> None:
        """Fill the populated window of a chunk beside training, behind the update of its weights."""
        # Read here, on the training thread: by the time the job runs these may be others.
        update, source, mover = chunk.update, self.source, self._mover
        working = Working(mover.watch.moved, self._staging)

        def fetch() -> None:
            # The one wait of a lane for another: the update lane takes no memory and waits for no fetch of a new
            # weight, so there is no circle.
            if update is not None:
                update.wait()
            with mover.working(working):
                # Set before the job is over, and read by nobody until then.
                chunk.fetched = source.gather(chunk)

        self._transfers.begin(Lane.FETCH, fetch, moment, key=chunk.spec.index, of=chunk)

    def begin_now(self, chunk: Chunk) -> None:
        """Fill the populated window of a chunk, and let computing wait for it. An error is raised when it is over."""
        chunk.fetched = self.source.gather(chunk)
        if chunk.fetched is DONE:
            return
        try:
            self._wait_on_device(chunk)
        except BaseException:
            # The error is told by raising it; the chunk would keep it, with all frames of its traceback.
            _forget_if_over(chunk)
            raise

    def arrive(self, chunk: Chunk) -> bool:
        """Somebody needs a chunk that is fetched ahead: let computing wait for it; False if it failed."""
        arriving = self.ahead[chunk.spec.index]
        if not arriving.is_complete():
            # The lane waits for the update of this chunk. Waiting here moves that update to the front, and tells its
            # error where it belongs.
            chunk.settle()
            # Ranks take gathers in the order in which all of them post them.
            if not self.source.in_order:
                self._transfers.hurry(arriving)
        arrived = self._transfers.wait(arriving, *self._what(chunk)) is None
        try:
            if arrived:
                self._wait_on_device(chunk)
        except Exception:  # it is tried again, and then told
            arrived = False
        self._end(chunk)
        return arrived

    def let_compute_wait(self, chunk: Chunk) -> None:
        """Let whatever is computed from now on, on whichever stream, read the window."""
        # Also where there is nothing to wait for: when the window goes, its memory is not written before this stream is
        # done with it.
        self._mover.device.computes_here()
        if chunk.fetched is not DONE:
            if not chunk.fetched.is_complete():
                self._wait_on_device(chunk)
            _forget_if_over(chunk)

    def call_back(self, chunk: Chunk) -> None:
        """Give up a fetch ahead that is not wanted any more: the window may be given back afterwards."""
        arriving = self.ahead[chunk.spec.index]
        self._transfers.take_back(arriving, *self._what(chunk))
        if not arriving.taken_back:
            # A GPU's window goes behind the copies into it by itself; elsewhere they must be over first.
            with contextlib.suppress(Exception):
                chunk.fetched.wait_on_device()
        self._end(chunk)

    def await_begun(self) -> None:
        """Wait until all fetches ahead are under way, or have failed."""
        for arriving in self.ahead.values():
            # On the lane, a wait for the update that it is behind; no error is raised, whoever needs the chunk is told.
            arriving.wait_until_over()

    def drain(self) -> None:
        """Wait until nothing is on its way; what failed is told when it is needed."""
        self.await_begun()
        for arriving in self.ahead.values():
            arriving.of.fetched.wait_until_over()

    def start_over(self, chunk: Chunk) -> None:
        """Make sure that nothing of this chunk is under way, whatever the books say: an interrupt cut them in two."""
        if arriving := self.ahead.get(chunk.spec.index):
            self._transfers.take_back(arriving, *self._what(chunk))
        chunk.fetched.wait_until_over()
        self._end(chunk)

    def close(self) -> None:
        """End with the model: a chunk that somebody keeps must keep nothing else."""
        for arriving in list(self.ahead.values()):
            self._end(arriving.of)

    def _wait_on_device(self, chunk: Chunk) -> None:
        with self._mover.about(*self._what(chunk)):
            chunk.fetched.wait_on_device()

    def _what(self, chunk: Chunk) -> tuple[str, str, int]:
        """Cause, name and index of a wait."""
        index = chunk.spec.index
        cause = Track.GATHER.value if self.source.in_order else f"fetch from {chunk.weights.tier.value}"
        return cause, f"wait for chunk {index}", index

    def _end(self, chunk: Chunk) -> None:
        _forget_if_over(chunk)
        self.ahead.pop(chunk.spec.index, None)


def _forget_if_over(chunk: Chunk) -> None:
    """Drop an event that is over: one that failed has its error, whose traceback would keep the model alive."""
    if chunk.fetched.is_complete():
        chunk.fetched = DONE
