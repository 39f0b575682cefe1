"""The thread on which updates run beside training: chunk after chunk by deadline, tiles of staged ones in a pipeline.

While one tile is updated, the next ones are read and the ones before are written back, each in a slot of staging. An
update that fails ends all others that wait: the model is then half of one step and half of the next, and whoever waits
for any of them is told why. If they were all guesses, nothing is lost.
"""

from __future__ import annotations

import heapq
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

from gemini import kernels
from gemini.config import GeminiConfig
from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import PendingUpdate
from gemini.memory.devices.device import DONE, Event
from gemini.memory.movement.mover import Mover, StagingSet, Working
from gemini.memory.movement.transfers import Job, JobThread, Lane, Transfer
from gemini.memory.system import num_cores
from gemini.memory.watching import Moved
from gemini.tiers import Tier
from gemini.train.observers import WriteObservers
from gemini.train.update.guess import Guess
from gemini.train.update.tiles import STREAM, ChunkUpdate, Path, Tile, check_finite, streamed_tiles, tiles_of

if TYPE_CHECKING:
    from gemini.train.update.updates import Updates


class UpdateJob(Transfer, PendingUpdate):
    """The update of one chunk. Made and settled by the training thread; all else happens on the worker's. ``urgency``:
    when the chunk is needed next; the smallest goes first. ``moved``: the step that its bytes count for. ``threads``:
    that share one call of the kernel. ``ready``: what the computing device was given when this was handed over is done;
    its gradients are there then. ``observers``: told before anything of the chunk changes. ``guess``: whether it is
    wanted, which one that begins inside backward may not know yet.
    """

    def __init__(
        self,
        update: ChunkUpdate,
        urgency: float,
        *,
        moved: Moved,
        threads: int,
        ready: Event,
        observers: WriteObservers,
        guess: Guess,
    ):
        super().__init__(Lane.UPDATE, urgency, key=update.chunk.spec.index)
        # Whoever launches is ahead of this thread: what was given to the device since has nothing to do with the chunk.
        self.chunk, self.update = update.chunk, update._replace(ready=ready)
        # The step under way now: the update may end in the next one.
        self.working, self.threads = Working(moved), threads
        self.ready, self.observers, self.guess = ready, observers, guess
        self.landed: Event = DONE
        """Its gradients are in their plane, where they were on the way there when this was handed over."""
        self.num_open = 0  # tiles that were cut and have not finished
        self.all_begun = False

    def settle(self) -> None:
        # None where the model is gone: nobody has books any more, and the job ends with its thread.
        books = self.worker.books() if isinstance(self.worker, UpdateWorker) else None
        if books is not None:
            books.wait(self.chunk)

    @property
    def is_there(self) -> bool:
        """Whether its gradients have been computed and are home."""
        return self.ready.is_complete() and self.landed.is_complete()

    @property
    def is_undecided(self) -> bool:
        """Whether it is a guess still, which may have to be undone."""
        return not self.guess.is_kept

    def finish(self, error: BaseException | None = None) -> None:
        # Gradients that autograd left, and views of planes, must not live as long as somebody keeps the job.
        self.update = self.update._replace(params=[], in_place=None)
        # Before anybody who waits wakes up: they look at the room that this gives back.
        self.guess.end()
        super().finish(error)


class UpdateWorker(JobThread):
    """The thread that updates. Everything here but ``all_cores``, ``settle`` and the queue is its own: no lock is taken
    for it. ``slots``: staging for tiles that cannot be updated in place; without any, only chunks that can be are
    accepted. ``books``: who keeps the books of updates in flight, and is told what broke one off. A worker must not
    keep a model alive. ``device_slots``: staging on the device, for tiles that are streamed.
    """

    def __init__(
        self, mover: Mover, slots: list[StagingSet], books: weakref.ref[Updates], *, device_slots: list[StagingSet]
    ):
        super().__init__("update")
        self.slot_tile = slots[0].tile if slots else 0
        self._device_tile = device_slots[0].tile if device_slots else 0
        self._mover, self.books = mover, books
        self._free, self._free_on_device = list(slots), list(device_slots)
        self._has_all_cores = False
        self._tiles: Iterator[tuple[UpdateJob, Tile]] | None = None
        self._next: tuple[UpdateJob, Tile] | None = None
        self._reading: deque[tuple[UpdateJob, Tile]] = deque()  # tiles that have begun, the oldest first
        self._writing: deque[tuple[UpdateJob, Tile]] = deque()  # tiles that were updated and are on their way home
        self._open: dict[UpdateJob, None] = {}  # jobs that were taken and are not over

    @contextmanager
    def all_cores(self) -> Iterator[None]:
        """The training thread, which calls this, only waits inside: the update may use every core."""
        self._has_all_cores = True
        try:
            yield
        finally:
            self._has_all_cores = False

    def _work(self) -> None:
        while True:
            try:
                if self._is_closed and self._open:
                    raise _deleted()
                # First: reads are given to the drive before this thread computes, and go on beside it.
                self._begin_tiles()
                # Before what is on its way home is waited for: the kernel runs while the drive writes.
                if self._reading:
                    self._update(*self._reading.popleft())
                elif self._writing:
                    self._end(*self._writing.popleft())
                elif not self._sleep():
                    return
            # Of whatever kind: without this, those who wait would never be told.
            except BaseException as e:
                self._break_off(e)

    def _end_here(self) -> None:
        """End all jobs that were taken. A fetch may wait for one, and the end of the model for that fetch."""
        for job in list(self._open):
            job.finish(_deleted())

    def _begin_tiles(self) -> None:
        """Start what comes next, as far as there are slots. One tile in place at a time: nothing is brought for it."""
        while True:
            self._next = self._next or self._next_tile()
            if not self._next:
                return
            job, tile = self._next
            free = self._slots_of(tile)
            if tile.path in (Path.STAGED, Path.STREAMED):
                # In order, and only what is home: this thread has better things to do than to wait.
                while not free and self._writing and self._writing[0][1].is_finished():
                    self._end(*self._writing.popleft())
                if not free:
                    # Every slot is on its way back: nothing can be done but wait for the first.
                    if not self._reading:
                        self._end(*self._writing.popleft())
                        continue
                    return
                tile.staging = free.pop()
            # In place nothing is brought, so beginning early gains nothing, and what was begun before goes first.
            elif self._reading:
                return
            self._next = None
            # Before it begins: a failure in `begin` must find it here to be abandoned, with what it has begun.
            self._reading.append((job, tile))
            with self._mover.working(job.working):
                tile.begin()

    def _next_tile(self) -> tuple[UpdateJob, Tile] | None:
        """The next tile of the job at hand, else of the next job; None if there is none to begin now."""
        while True:
            if self._tiles is None:
                job = self._take()
                if job is None:
                    return None
                assert isinstance(job, UpdateJob)
                self._open[job] = None  # from here on whatever goes wrong ends it: somebody waits
                kernels.set_flush_mode(job.flush_mode)
                self._check(job)
                # Before its first tile is cut: then fetches out of the home are over, and a checkpoint has the chunk.
                job.observers.before_write(job.chunk)
                # Without params there are no tiles: it ends at once, and there is nothing to undo.
                if not job.guess.begin():
                    job.update = job.update._replace(params=[])
                # The waiting above may have been long.
                if self._is_closed:
                    raise _deleted()
                self._tiles = self._tiles_of(job)
            found = next(self._tiles, None)
            if found is not None:
                # Counted before it begins: one that waits for a slot is not over either.
                found[0].num_open += 1
                return found
            self._tiles = None

    def _pop(self) -> Job | None:
        """Take the most urgent of the jobs whose gradients are there; else the one that was handed over first. Whoever
        launches is far ahead of a device: the update that is needed first may have gradients that come last. None while
        what has begun had better go first.
        """
        jobs = (job for _, _, job in sorted(self._waiting) if isinstance(job, UpdateJob))
        there = next((job for job in jobs if job.is_there), None)
        # The device may take its time with gradients; and of what is updated in place nothing is brought, so to begin
        # it early gains nothing, while those of a more urgent one may come.
        may_wait = there is None or there.update.path not in (Path.STAGED, Path.STREAMED)
        if self._reading and may_wait or self._writing and there is None:
            return None
        job = there or min(self._waiting, key=itemgetter(1))[2]
        self._waiting = [entry for entry in self._waiting if entry[2] is not job]
        heapq.heapify(self._waiting)
        return job

    def _check(self, job: UpdateJob) -> None:
        """Wait for gradients on their way home, and look at those that nobody has looked at, once they are there."""
        job.landed.wait()
        if not any(param.is_unseen for param in job.update.params):
            return
        # The host reads gradients; a device that streams looks at them behind `ready` on a stream of its own.
        if job.update.path is not Path.STREAMED:
            job.ready.wait()
        with self._mover.device.beside(STREAM):  # not behind what was given to the device since
            job.ready.wait_on_device()
            check_finite(job.update)

    def _tiles_of(self, job: UpdateJob) -> Iterator[tuple[UpdateJob, Tile]]:
        """The tiles of a job, cut as they are asked for; a guess that is dropped ends at the next one."""
        parts: Iterable[Tile]
        if job.update.path is Path.STREAMED:
            parts = streamed_tiles(self._mover, job.update, self._device_tile, job.ready)
        else:
            parts = tiles_of(self._mover, job.update, max(self.slot_tile, 1), guess=job.guess)
        for tile in parts:
            # Between two tiles, so that none is left half updated.
            if job.guess.is_dropped:
                break
            yield job, tile
        job.all_begun = True
        # A job without any tile ends here, and one whose last tile was home before the next was asked for.
        self._finish_if_done(job)

    def _update(self, job: UpdateJob, tile: Tile) -> None:
        # Before it runs: a failure must find it here to be abandoned.
        self._writing.append((job, tile))
        kernels.limit_threads(None if self._has_all_cores else job.threads)
        with torch.profiler.record_function("gemini::update"), self._mover.working(job.working):
            tile.run()
        # In place: nothing is on its way home.
        if tile.staging is None:
            self._writing.pop()
            self._end(job, tile)

    def _end(self, job: UpdateJob, tile: Tile) -> None:
        try:
            tile.finish()
        except BaseException:
            self._writing.append((job, tile))  # to be abandoned with the rest
            raise
        self._give_back(tile)
        job.num_open -= 1
        self._finish_if_done(job)

    def _finish_if_done(self, job: UpdateJob) -> None:
        if job.all_begun and job.num_open == 0 and job in self._open:
            del self._open[job]
            job.finish()

    def _give_back(self, tile: Tile) -> None:
        if tile.staging is not None:
            self._slots_of(tile).append(tile.staging)
            tile.staging = None

    def _slots_of(self, tile: Tile) -> list[StagingSet]:
        return self._free_on_device if tile.path is Path.STREAMED else self._free

    def _break_off(self, error: BaseException) -> None:
        """An update failed: nothing is under way afterwards, and everybody who waits is told."""
        with self._lock:
            # Jobs that wait and not only those under way: after half of a step the rest must not be updated.
            ended = [*self._open, *(job for _, _, job in self._waiting if isinstance(job, UpdateJob))]
            self._waiting = []
        # Guesses that nobody had asked for are undone, and lose nothing.
        lost = [job for job in ended if not job.guess.drop()]
        books = self.books()
        if lost and books is not None:
            # Before the jobs end: whoever waits for one looks at once whether the model is corrupted.
            books.note_lost(error)
        for _, tile in (*self._reading, *self._writing, *filter(None, [self._next])):
            # Nothing may still be written to staging, or home, when the jobs end and memory is given back.
            tile.abandon()
            self._give_back(tile)
        self._reading.clear()
        self._writing.clear()
        self._tiles = self._next = None
        self._open = {}
        for job in ended:
            # Last: everything is as it will stay.
            job.finish(error)


def _deleted() -> GeminiError:
    return GeminiError("the model was deleted while it was updated")


def update_threads(config: GeminiConfig, compute: Tier) -> int:
    """Those of ``config``, or what computing leaves. Where a GPU computes these are all cores but two, for the
    threads that launch forward and backward; two processors of one core count as one, since an update waits for memory.
    Else it is what torch leaves. None where it takes them all: an update beside computing would slow both down (on 2
    cores with 2 torch threads a step of a 70M Llama took 2 to 7 % longer), and is made at once, by all of them.
    """
    if config.update_threads is not None:
        return config.update_threads
    threads, on_gpu = kernels.get_num_threads(), compute is Tier.GPU
    left = max(min(threads, num_cores() - 2), 1) if on_gpu else max(threads - torch.get_num_threads(), 0)
    return left if config.hardware is None else config.hardware.useful_threads(left)
