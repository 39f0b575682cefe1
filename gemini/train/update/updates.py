"""Updates in flight: ``optimizer.step()`` hands them over and returns, and whoever needs a chunk waits for its own.

Exact whatever the timing: hyperparameters, clipping and step counts are fixed when an update is handed over, no weight
is read between then and its end (gathered copies are dropped, params that stay in place are guarded), and no gradient
is overwritten before it was used. What is needed first goes first: the order of the next forward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from gemini.errors import BudgetExceeded
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk
from gemini.train.gradients.store import HOLDER
from gemini.train.params.guard import note_writes
from gemini.train.update.finite import DeferredFiniteChecks
from gemini.train.update.streamed import streamed_in_turn
from gemini.train.update.threads import update_threads
from gemini.train.update.tiles import ChunkUpdate, ParamUpdate, Path, path_of, tiles_of, update_chunk
from gemini.train.update.worker import UpdateJob, UpdateWorker

if TYPE_CHECKING:
    from gemini.train.engine import Engine


class Updates:
    """The updates of one engine.

    Args:
        first_use: by chunk, the moment of a step at which it is read first.
        overlap: whether there is a worker; else every update is done when it is handed over.
    """

    def __init__(self, engine: Engine, first_use: Mapping[int, int], *, overlap: bool, threads: int | None):
        self.order = "next use"
        """Or "fifo", the order in which gradients became complete: for comparison."""
        self._reference = engine.self_reference
        self._observers = engine.write_observers  # not by way of the model, which may end while a job waits for one
        self._first_use = first_use
        self._jobs: dict[int, UpdateJob] = {}
        self._number = 0
        self._collected: dict[int, list[ParamUpdate]] = {}
        self.unseen = DeferredFiniteChecks()
        self._threads = threads
        self._worker: UpdateWorker | None = None
        if overlap:
            staging, on_lost = engine.mover.staging, _mark_lost(self._reference)
            self._worker = UpdateWorker(engine.mover, staging.take_slots(), on_lost, device_slots=staging.on_device)

    @property
    def pending(self) -> bool:
        """Whether some update may still be under way."""
        return bool(self._jobs)

    def is_pending(self, chunk: Chunk) -> bool:
        """Whether the chunk's update may still be under way."""
        return chunk.spec.index in self._jobs

    def job_of(self, chunk: Chunk) -> UpdateJob | None:
        """What a thread that is about to read the chunk has to wait for."""
        return self._jobs.get(chunk.spec.index)

    # ---- handing over -------------------------------------------------------------------------------------------

    def submit(self, params: Mapping[int, list[ParamUpdate]]) -> None:
        """Update these params, by chunk, in the order of their next use: behind what follows, or now where that cannot
        be.
        """
        engine = self._engine()
        updates = [self._chunk_update(engine.chunks[index], own) for index, own in params.items()]
        ordered = sorted(updates, key=lambda update: self._urgency(update.chunk))
        jobs, now = list[UpdateJob](), list[ChunkUpdate]()
        for update in ordered:
            if self._worker is not None and self._can_overlap(self._worker, update):
                self.wait(update.chunk)  # another optimizer's part of it
                jobs.append(self._job(update))
            else:
                now.append(update)
        if jobs:
            assert self._worker is not None
            engine.manager.drop([job.chunk for job in jobs])
            for job in jobs:
                engine.exposure.withdraw(job.chunk)  # a step inside gathered()
            self._put(engine, self._worker, jobs)
        for update in now:
            self.wait(update.chunk)
            self._update_now(update)
        engine.manager.refresh_lent()

    def _put(self, engine: Engine, worker: UpdateWorker, jobs: list[UpdateJob]) -> None:
        """Noted first: an interrupt must leave none under way of which nobody knows."""
        try:
            self._jobs.update({job.chunk.spec.index: job for job in jobs})
            worker.put(*jobs)
        except BaseException as e:
            engine.state.mark_corrupted(e)
            for job in jobs:
                if worker.cancel(job) or job.worker is None:
                    self._jobs.pop(job.chunk.spec.index, None)
                    job.finish(e)
            raise

    def _update_now(self, update: ChunkUpdate, stop: torch.Tensor | None = None) -> None:
        """``stop``: a flag on the device that stops the update there (:mod:`gemini.train.update.finite`)."""
        engine = self._engine()
        if update.path is Path.STREAMED:
            update_chunk(engine, update.chunk, streamed_in_turn(engine, update))
        else:
            update_chunk(engine, update.chunk, tiles_of(engine.mover, update, engine.mover.tile, stop))

    def _can_overlap(self, worker: UpdateWorker, update: ChunkUpdate) -> bool:
        """Whether the update can run on the worker: it has staging if it needs some, else there is a spare core.

        Where every plane stands on the device, the update is one more thing that it computes. What is streamed always
        goes through the worker, whose slots on the device are all there are.
        """
        if update.path is Path.IN_PLACE:
            return self._num_threads() > 0
        return update.path is Path.STREAMED or (update.path is Path.STAGED and worker.slot_tile > 0)

    def _chunk_update(self, chunk: Chunk, params: list[ParamUpdate]) -> ChunkUpdate:
        engine = self._engine()
        return ChunkUpdate(chunk, params, engine.rule, path_of(engine.mover, chunk))

    def _num_threads(self) -> int:
        return update_threads(self._threads, self._engine().device.tier)

    def _job(self, update: ChunkUpdate, release: Callable[[], None] | None = None) -> UpdateJob:
        return UpdateJob(
            update,
            self._urgency(update.chunk),
            moved=self._engine().mover.moved,
            threads=max(self._num_threads(), 1),
            ready=self._engine().device.mark(),
            before=self._observers.before_write,
            after=self._observers.after_write,
            release=release,
        )

    def _urgency(self, chunk: Chunk) -> float:
        self._number += 1
        return self._number if self.order == "fifo" else self._first_use.get(chunk.spec.index, 2**62)

    # ---- inside backward ----------------------------------------------------------------------------------------

    def collect(self, param: ParamUpdate) -> None:
        """Queue the update of one param inside backward; :meth:`complete` of its chunk runs it."""
        self._collected.setdefault(param.handle.chunk.spec.index, []).append(param)

    def complete(self, chunk: Chunk, *, now: bool = False, stop: torch.Tensor | None = None) -> None:
        """Every gradient of the chunk that will come has come: update what was collected; ``now``: before returning.

        ``stop``: a flag on the device that stops the update there, if it runs there; for landed gradients.
        """
        params = self._collected.pop(chunk.spec.index, None)
        if not params:
            return
        update, engine = self._chunk_update(chunk, params), self._engine()
        engine.exposure.look_for_writes(chunk)
        WHOLE.hold(_in_a_backward)  # until the engine says that the backward is over: all of it is one update
        engine.state.note_update_in_backward()
        self.unseen.num_chunks += 1
        note_writes(param.handle for param in params)
        for param in params:
            param.handle.num_steps += 1
        num_bytes = sum(s.grad.numel() * s.grad.element_size() for s in params if s.grad is not None)
        worker = self._worker
        self.wait(chunk)  # another optimizer's part of it
        behind = worker is not None and not now and self._can_overlap(worker, update) and self._hold(num_bytes)
        if worker is None or not (behind or update.path is Path.STREAMED):
            if stop is None:
                stop = self.unseen.stop_for(update)
            self._update_now(update, stop)
            return
        ledger, tier = engine.ledger, engine.device.tier

        def release() -> None:
            ledger.release(tier, num_bytes, HOLDER)

        job = self._job(update, release if behind and num_bytes else None)
        engine.manager.drop([chunk])
        engine.exposure.withdraw(chunk)
        self._put(engine, worker, [job])
        if not behind:
            self.wait(chunk)

    def complete_all(self) -> None:
        """The backward is over: chunks of which some params had no gradient."""
        engine = self._engine()
        for index in sorted(self._collected, reverse=True):
            self.complete(engine.chunks[index])

    def forget_collected(self) -> None:
        """The backward broke off."""
        self._collected.clear()

    def _hold(self, num_bytes: int) -> bool:
        """Reserve gradients that wait for their update; where there is no room, earlier ones make some.

        False if nothing is left to wait for: then the update is made at once, and its gradient with it gone.
        """
        engine = self._engine()
        while num_bytes:
            try:
                engine.ledger.reserve(engine.device.tier, num_bytes, HOLDER)
                break
            except BudgetExceeded:
                if not (self.relieve() or engine.gradients.relieve()):
                    return False
        return True

    # ---- waiting ------------------------------------------------------------------------------------------------

    def wait(self, chunk: Chunk) -> None:
        """Until the chunk's update is over.

        Raises:
            StorageError and whatever else broke an update off.
        """
        job = self._jobs.get(chunk.spec.index)
        if job is not None:
            self._await(job)

    def drain(self) -> None:
        """Until no update is in flight, and every gradient that was used in backward has been looked at."""
        while self._jobs:
            self._await(next(iter(self._jobs.values())))
        self.unseen.look(self._engine())

    def relieve(self) -> bool:
        """Wait for an update whose end gives back memory; False if there is none."""
        for job in list(self._jobs.values()):
            if job.holds_gradients:
                self._await(job)
                return True
        return False

    def forget(self) -> None:
        """Wait for all, whatever became of them: everything is going to be overwritten."""
        for job in self._jobs.values():
            with contextlib.suppress(Exception):
                job.wait()
        self._jobs.clear()
        self._collected.clear()
        self.unseen.forget()

    def check(self) -> None:
        """Raise what broke an update off that nobody has waited for."""
        broken_off = self._engine().state.corrupted_by is not None  # known a moment before the jobs end
        for job in list(self._jobs.values()):
            if broken_off or (job.is_complete() and job.error is not None):
                self._await(job)

    def _await(self, job: UpdateJob) -> None:
        index = job.chunk.spec.index
        if not job.is_complete():
            assert self._worker is not None
            if self.order != "fifo":
                self._worker.hurry(job)
            about = self._engine().mover.about("update", f"wait for the update of chunk {index}", index)
            with self._worker.all_cores(), about, contextlib.suppress(Exception):  # raised below
                job.wait()
        self._jobs.pop(index, None)
        if job.error is not None and self._engine().state.corrupted_by is not None:
            self.forget()  # all of them ended with this error, which is told once
        job.wait()

    def close(self) -> None:
        """The model ends."""
        self._jobs.clear()
        if self._worker is not None:
            self._worker.close()

    # ---- inside -------------------------------------------------------------------------------------------------

    def _engine(self) -> Engine:
        engine = self._reference()
        assert engine is not None
        return engine


def _in_a_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _mark_lost(reference: weakref.ref[Engine]) -> Callable[[BaseException], None]:
    """What the worker tells of an update that broke off; it refers to nothing that refers to the worker."""

    def mark_lost(cause: BaseException) -> None:
        engine = reference()
        if engine is not None:
            engine.state.mark_corrupted(cause, reported=False)

    return mark_lost
