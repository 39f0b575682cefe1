"""Updates in flight: ``optimizer.step()`` hands them over and returns, and whoever needs a chunk waits for its own.

Exact whatever the timing: hyperparameters, clipping and step counts are fixed when an update is handed over, no weight
is read between then and its end, and no gradient is overwritten before it was used. What the next forward needs first
goes first. All waiting is in :class:`Updates`: ``wait`` for one chunk (others call ``Chunk.settle``), ``drain`` for
all; both undo what is only guessed.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Container, Iterable, Mapping
from functools import cached_property
from typing import NamedTuple, NoReturn, cast

import torch

from gemini import kernels
from gemini.config import GeminiConfig
from gemini.errors import NonFiniteGradient
from gemini.interrupts import WHOLE
from gemini.ledger import OF_BUDGET, Turn, Want
from gemini.memory.chunks.chunk import Chunk, Use
from gemini.memory.devices.device import DONE, Event
from gemini.memory.devices.pages import PAGE
from gemini.memory.movement.mover import Mover
from gemini.memory.movement.transfers import Held, Lane
from gemini.memory.store import ChunkStore
from gemini.rules import UpdateRule
from gemini.tiers import Tier
from gemini.train.gradients.store import HOLDER
from gemini.train.observers import WriteObservers
from gemini.train.params.exposure import Exposure
from gemini.train.params.handle import ParamHandle, note_writes
from gemini.train.step import StepState
from gemini.train.update.guess import CERTAIN, Guess, GuessRecord
from gemini.train.update.tiles import (
    ChunkUpdate,
    ParamUpdate,
    Path,
    Tile,
    check_finite,
    path_of,
    streamed_tiles,
    tiles_of,
    update_of,
)
from gemini.train.update.worker import UpdateJob, UpdateWorker, update_threads

_WAITING = OF_BUDGET - {Turn.FLIGHTS}  # asked for gradients that wait for their update: those before them


class Updates:
    """The updates of one model. Called by the training thread alone, but for :meth:`note_lost`. ``alone``: whether the
    model is this process's only.
    """

    def __init__(
        self,
        store: ChunkStore,
        state: StepState,
        exposure: Exposure,
        observers: WriteObservers,
        rule: UpdateRule,
        *,
        alone: bool,
        config: GeminiConfig,
    ):
        self._chunks, self._device, self._ledger = store.chunks, store.device, store.ledger
        self._mover, self._manager, self._state = store.mover, store.manager, state
        self._moves = store.moves
        self._observers = observers
        self._rules = {exact: rule.of(exact) for exact in (False, True)}
        """Those of chunks, by whether these keep their states exact."""
        self._exposure = exposure
        self._transfers = store.transfers
        self.pending = cast(dict[int, UpdateJob], store.transfers.open[Lane.UPDATE])
        """Updates that may still be under way, by chunk."""
        self.guesses = GuessRecord()
        self.collected: dict[int, list[ParamUpdate]] = {}
        """By chunk, inside a backward: what :meth:`complete` is going to update."""
        self.unseen = DeferredFiniteChecks(state, store.mover, rule, alone=alone)
        self._config = config
        self._worker: UpdateWorker | None = None
        # The worker knows this object weakly: a thread must not keep a model alive.
        if store.transfers.beside:
            on_device = store.mover.staging.on_device
            self._worker = UpdateWorker(store.mover, store.transfers.slots, weakref.ref(self), device_slots=on_device)
            store.transfers.threads[Lane.UPDATE] = self._worker
            store.ledger.register(Turn.UPDATES, self._end_one, store.device.tier)
            store.ledger.register(Turn.GUESSES, self._undo_one, Tier.CPU)

    # ---- handing over -------------------------------------------------------------------------------------------

    def submit(
        self, params: Mapping[int, list[ParamUpdate]], stop: torch.Tensor | None, factor: torch.Tensor | None
    ) -> None:
        """Update these params, by chunk, in the order of their next use: behind what follows, or now where that cannot
        be. ``stop`` and ``factor``: see :meth:`_update_now`.
        """
        if self._observers:
            # Before any job is queued: a checkpoint behind the training waits here for the updates of the step before,
            # so that none of them stands behind one that waits for the checkpoint.
            self._observers.before_updates()
        updates = [update_of(self._mover, self._rules, self._chunks[index], own) for index, own in params.items()]
        ordered = sorted(updates, key=lambda update: update.chunk.first_use)
        jobs, now = list[UpdateJob](), list[ChunkUpdate]()
        # All guesses that are not kept are told to end before one of them is waited for.
        for update in [update for update in ordered if not self._keep(update)]:
            if self._can_overlap(update):
                self.wait(update.chunk)  # another optimizer's part of it
                jobs.append(self._job(update))
            else:
                now.append(update)
        if jobs:
            # Before the jobs are handed over: from then on these copies are of the step before.
            self._manager.drop([job.chunk for job in jobs])
            for job in jobs:
                self._exposure.withdraw(job.chunk)  # a step inside gathered()
            self._put(jobs)
        # Behind the jobs: the worker reads and updates beside these.
        for update in now:
            if self.pending:
                self.wait(update.chunk)
            self._update_now(update, stop, factor)
        if self._moves:
            # Last: it waits for the updates of chunks that the program looks at.
            self._manager.refresh_lent()

    def _keep(self, update: ChunkUpdate) -> bool:
        """Whether the update is under way already, because it was guessed."""
        job = self.pending.get(update.chunk.spec.index)
        # `keep` drops it if the step asks for another update: then it is undone and made anew below.
        if job is None or not (job.is_undecided and job.guess.keep(update.params)):
            return False
        update.chunk.is_guessed = False
        self.guesses.num_kept += 1
        return True

    def _put(self, jobs: list[UpdateJob]) -> None:
        """Hand jobs over, all or none: an interrupt must leave no update under way that nobody knows."""
        try:
            with WHOLE:
                for job in jobs:
                    # Before the thread can end it: whoever reads the chunk from here on finds something to wait for.
                    job.chunk.update = job
                self._transfers.submit(*jobs)
        except BaseException as e:
            self._state.mark_corrupted(e)
            for job in jobs:
                # One that is under way stays known, and ends by itself.
                if self.pending.get(job.chunk.spec.index) is not job:
                    job.finish(e)
                    if job.guess.drop():
                        self._undo(job)
                    self._forget(job)
            raise

    def _update_now(self, update: ChunkUpdate, stop: torch.Tensor | None, factor: torch.Tensor | None = None) -> None:
        """``stop``: a flag on the device that stops the update there (:class:`DeferredFiniteChecks`). ``factor``: a
        number there that gradients are multiplied by (clipping).
        """
        if self._transfers.open[Lane.LANDING]:
            self._transfers.end_of(Lane.LANDING, update.chunk).wait()
        if update.path is Path.STREAMED:
            slot = self._mover.staging.on_device[0]
            self._run_now(update.chunk, streamed_tiles(self._mover, update, slot.tile, self._device.mark(), slot))
        else:
            self._run_now(update.chunk, tiles_of(self._mover, update, self._mover.tile, stop, factor))

    def _run_now(self, chunk: Chunk, parts: Iterable[Tile]) -> None:
        """Update a chunk now, tile by tile, and drop the gathered copy that this has overtaken, if there can be one."""
        has_copy = not chunk.resident
        if has_copy or self._observers:
            # Before the first tile: no fetch reads the home any more when this returns.
            self._observers.before_write(chunk)
        try:
            about = self._mover.about("update", f"update chunk {chunk.spec.index}", chunk.spec.index)
            with torch.profiler.record_function("gemini::update"), about:
                for tile in parts:
                    try:
                        tile.begin()
                        tile.run()
                        tile.finish()
                    except BaseException:
                        # Its planes or its staging may still be written to.
                        tile.abandon()
                        raise
            if has_copy:
                self._manager.drop([chunk])
        except BaseException as e:
            # A repeated step would update finished tiles twice, and planes may be torn: there is no way on from here.
            self._state.mark_corrupted(e)
            self.forget()  # this error is told; what it means for those in flight goes without saying
            raise

    def _can_overlap(self, update: ChunkUpdate) -> bool:
        """Whether the update can run on a worker: it has staging if it needs some, else there is a spare core. Where
        every plane stands on the device, the update is one more thing that it computes. What is streamed always goes
        through the worker, whose slots on the device are all there are.
        """
        if self._worker is None:
            return False
        if update.path is Path.IN_PLACE:
            # Without a spare core both would be slower for it.
            return update_threads(self._config, self._device.tier) > 0
        return update.path is Path.STREAMED or (update.path is Path.STAGED and self._worker.slot_tile > 0)

    def _job(self, update: ChunkUpdate, guess: Guess = CERTAIN) -> UpdateJob:
        """A job for the worker, to be handed over now."""
        job = UpdateJob(
            update,
            update.chunk.first_use,
            moved=self._mover.watch.moved,
            threads=max(update_threads(self._config, self._device.tier), 1),
            # Now: everything that the device was given so far made these gradients, and nothing after it did.
            ready=self._device.mark(),
            observers=self._observers,
            guess=guess,
        )
        job.landed = self._transfers.end_of(Lane.LANDING, update.chunk)
        return job

    # ---- inside backward ----------------------------------------------------------------------------------------

    def collect(self, param: ParamUpdate) -> None:
        """Queue the update of one param inside backward; :meth:`complete` of its chunk runs it."""
        self.collected.setdefault(param.handle.chunk.spec.index, []).append(param)

    def complete(self, chunk: Chunk, *, now: bool = False, stop: torch.Tensor | None = None) -> None:
        """Every gradient of the chunk that will come has come: update what was collected; ``now``: before returning.
        ``stop``: a flag on the device that stops the update there, if it runs there; for landed gradients.
        """
        params = self.collected.pop(chunk.spec.index, [])
        if not params:
            return
        if self._observers:
            self._observers.before_updates()
        update = update_of(self._mover, self._rules, chunk, params)
        # While the program's own writes to params are still to be seen: the update would hide them.
        self._exposure.look_for_writes(chunk)
        WHOLE.hold(lambda: torch._C._current_graph_task_id() != -1)  # until backward is over: all of it is one update
        # Before the first change: from here on the step cannot be dropped as if nothing had been.
        self._state.updated_in_backward = True
        self.unseen.num_chunks += 1
        note_writes(param.handle for param in params)
        for param in params:
            # Here, on the training thread: the next step may be counted before this update is made.
            param.handle.num_steps += 1
        num_bytes = sum(grad.nbytes for _, grad in update.grads())
        self.wait(chunk)  # another optimizer's part of it
        # Behind the wait, which may have taken the window away.
        update = update._replace(window=self._window_of(update))
        behind = not now and self._can_overlap(update) and self._hold(num_bytes)
        if self._worker is None or not (behind or update.path is Path.STREAMED):
            if stop is None:
                self._transfers.end_of(Lane.LANDING, chunk).wait()  # sums come with it
                stop = self.unseen.stop_for(update)
            self._update_now(update, stop)
            return
        job = self._job(update)
        if behind and num_bytes:
            # The gradients were reserved by `_hold`; the end of the job gives them back.
            job.held = Held(self._ledger, self._device.tier, num_bytes, HOLDER)
        self._begin_inside(job)
        # Streamed without room for its gradients: it is made by the worker, which has the slots, and waited for.
        if not behind:
            self.wait(chunk)

    def guess(self, chunk: Chunk, params: list[ParamUpdate]) -> None:
        """Begin an update that :meth:`submit` may ask for, where it can be undone and overlapped; gradients stay."""
        update = update_of(self._mover, self._rules, chunk, params)
        if update.path is Path.STREAMED or not self._can_overlap(update):
            return
        with WHOLE:
            # An update before it, of the same chunk: what this one would undo to must be that.
            self.wait(chunk)
            guess = Guess.of(chunk, params, self._ledger)
            if guess is None:
                return
            if self._observers:
                self._observers.before_updates()
            # Before it is handed over: nothing may fetch the chunk ahead from then on.
            chunk.is_guessed = True
            self._begin_inside(self._job(update._replace(window=self._window_of(update)), guess=guess))

    def _begin_inside(self, job: UpdateJob) -> None:
        """Hand over an update inside backward. Calls that compute still may read the old weights in their window."""
        if job.update.window is None:
            self._manager.drop([job.chunk])
        else:
            # The window stays for the update to read, and goes with its end.
            self._manager.begin_update(job.chunk)
        self._exposure.withdraw(job.chunk)
        self._put([job])

    def drop_guesses(self, indices: Container[int]) -> None:
        """Undo the guesses of these chunks: nobody is going to ask for them."""
        # A copy: ending one takes it off the list.
        jobs = [job for index, job in self.pending.items() if job.is_undecided and index in indices]
        for job in jobs:
            job.guess.drop()  # so that none is worked on while another one is waited for
        for job in jobs:
            self._await(job)

    def _window_of(self, update: ChunkUpdate) -> torch.Tensor | None:
        """The gathered weights, where they spare the update a drive. A window of other ranks' parts too is left alone:
        it may go before the sums of gradients have come.
        """
        chunk, weights = update.chunk, update.chunk.weights
        # The window holds what the home does, for nobody else.
        is_current = chunk.use in (Use.HOLD, Use.COMPUTE, Use.GRAD_READY) and not (chunk.stale or chunk.is_lent)
        spares = update.path is Path.STAGED and weights.tier.in_files and chunk.window is not None and is_current
        whole = (chunk.flat.dtype, chunk.flat.numel()) == (weights.dtype, weights.numel)
        return chunk.flat if spares and whole else None

    def _hold(self, num_bytes: int) -> bool:
        """Reserve gradients that wait for their update. False if there is no room, also when those before them are
        over: then the update is made at once, and its gradient with it gone.
        """
        return not num_bytes or self._ledger.reserve_if_room(self._device.tier, num_bytes, HOLDER, _WAITING)

    # ---- waiting ------------------------------------------------------------------------------------------------

    def wait(self, chunk: Chunk) -> None:
        """Wait until the chunk's update is over; one that is only guessed is undone. Raises whatever broke it off."""
        job = self.pending.get(chunk.spec.index)
        if job is not None:
            self._await(job)

    def drain(self) -> None:
        """Wait until no update is in flight, all gradients used in backward were looked at, and guesses are undone."""
        # All at once: one by one the others would be worked on in vain.
        self.drop_guesses(self.pending)
        while self.pending:
            self._await(next(iter(self.pending.values())))
        if self.unseen.num_chunks:
            self.unseen.look()

    def await_held(self) -> None:
        for job in list(self.pending.values()):
            if job.held:
                # Not `_await`: they stay in the list, and their errors are told where their chunks are needed.
                job.wait_until_over()

    def _end_one(self, want: Want) -> bool:
        """Wait for an update whose end gives back memory; False if there is none."""
        return self._await_first(job for job in list(self.pending.values()) if job.held is not None)

    def _undo_one(self, want: Want) -> bool:
        """End a guess that holds host memory, which others need: undone, if it is not kept. False if there is none."""
        return self._await_first(job for job in list(self.pending.values()) if job.guess.num_bytes > 0)

    def _await_first(self, jobs: Iterable[UpdateJob]) -> bool:
        for job in jobs:
            self._await(job)
            return True
        return False

    def forget(self) -> None:
        """Wait for all, whatever became of them: everything is going to be overwritten."""
        for job in self.pending.values():
            job.guess.drop()
            with contextlib.suppress(Exception):
                job.wait()
            with contextlib.suppress(Exception):
                self._undo(job)
            self._manager.end_update(job.chunk)
            job.chunk.update = None
        self.pending.clear()
        self.collected.clear()
        self.unseen.forget()

    def note_lost(self, cause: BaseException) -> None:
        """An update broke off, on its thread. The model is marked before the job ends: whoever wakes up finds it so."""
        self._state.mark_corrupted(cause, reported=False)

    def check(self) -> None:
        """Raise what broke an update off that nobody has waited for."""
        broken_off = self._state.corrupted_by  # known a moment before the jobs end
        for job in list(self.pending.values()):
            if broken_off or (job.is_complete() and job.error is not None):
                self._await(job)

    def _await(self, job: UpdateJob) -> None:
        """Wait for an update, undo it if it is a guess, and take it off the list; its error is raised behind that."""
        index, is_guess = job.chunk.spec.index, job.guess.drop()
        if not job.is_complete():
            assert self._worker is not None
            # It is the next one now, whatever the order of the forward says.
            self._worker.hurry(job)
            about = self._mover.about("update", f"wait for the update of chunk {index}", index)
            # This thread only waits here, and its cores are free.
            with self._worker.all_cores(), about, contextlib.suppress(Exception):  # raised below
                job.wait()
        if is_guess:
            self._undo(job)
        # Off the list last: what an interrupt breaks off here is taken up again by the next wait for it.
        self._forget(job)
        if is_guess or job.error is None:
            return  # a guess is of no use to anybody, also if it failed
        if self._state.corrupted_by:
            self.forget()  # all of them ended with this error, which is told once
        job.wait()

    def _forget(self, job: UpdateJob) -> None:
        """Take an update that is over off the list."""
        job.chunk.update = None
        self._manager.end_update(job.chunk)
        self._transfers.end(job)

    def _undo(self, job: UpdateJob) -> None:
        """Undo a guess that was dropped and is over, and nothing else. Raises StorageError if the spill file fails."""
        if job.guess.is_dropped and job.chunk.is_guessed:
            with WHOLE, self._state.changing():
                job.guess.undo()
                job.chunk.is_guessed = False
                self.guesses.num_undone += 1

    def close(self) -> None:
        """End with the model: chunks that somebody keeps must keep no job."""
        for job in self.pending.values():
            job.chunk.update = None
        self.pending.clear()


# ---- gradients that are used before the host knows whether they are finite -------------------------------------------

# Where the whole update of a chunk runs on a device with kernels of its own, the device looks: a flag that is made of
# the sums of squares stops the update of that chunk, and the host is told later. Of updates inside backward, each of
# which has a flag, when the step ends; of those of a step, which have one together, before the next backward takes its
# first gradient: the flag is on its way from the step on, and nothing given to the device since is waited for.

_FLAGS = PAGE // 4
"""Of steps that nobody has looked at yet: one for each optimizer of a model, and none outlives a backward."""


class _Used(NamedTuple):
    """Gradients of an update of a chunk on the device, or of all of a step; their sums tell whether it took place."""

    handles: list[ParamHandle]
    sums: dict[ParamHandle, kernels.Sums]
    """Zeros that nothing landed in (``zero_grad(set_to_none=False)``) have none."""
    flag: torch.Tensor | None = None
    """What stopped it, if it is not 0: on the host, once it is copied there. None if the sums alone tell."""
    copied: Event = DONE

    def is_good(self) -> bool:
        """Whether the flag says that it took place. Waits for the copy, which has begun long ago, and nothing since."""
        self.copied.wait()
        return self.flag is not None and not int(self.flag)


def _sums_of(handles: list[ParamHandle]) -> dict[ParamHandle, kernels.Sums]:
    return {handle: handle.norm_sums for handle in handles if handle.norm_sums is not None}


class DeferredFiniteChecks:
    """Looks that are yet to be taken at gradients of one model that were used. Called by the training thread alone;
    ``alone``: whether the model is this process's only.
    """

    def __init__(self, state: StepState, mover: Mover, rule: UpdateRule, *, alone: bool) -> None:
        self._state, self._mover, self._rule, self._alone = state, mover, rule, alone
        self._used: list[_Used] = []
        self.num_chunks = 0
        """Handed over for their update since :meth:`look` was called, on the device and on the host; a step is one."""
        self._num_flags = 0

    @cached_property
    def _here(self) -> torch.Tensor:
        """Host memory that flags are copied to."""
        return self._mover.device.make_host_buffer(PAGE).view(torch.int32)

    def _is_on_device(self, chunks: Iterable[Chunk]) -> bool:
        return self._rule.has_kernel and all(path_of(self._mover, chunk) is Path.ON_DEVICE for chunk in chunks)

    def stop_for(self, update: ChunkUpdate) -> torch.Tensor | None:
        """The flag that stops an update if a gradient that autograd left is not finite; None if none has to. Raises
        NonFiniteGradient for an update on the host, which looks at once; nothing of this chunk was touched.
        """
        grads = [grad for _, grad in update.grads()]
        if not (grads and self._is_on_device([update.chunk]) and kernels.leaves_sums_there(grads[0])):
            check_finite(update)
            return None
        sums = {param.handle: kernels.sum_squares(grad) for param, grad in update.grads()}
        return self._flag([param.handle for param in update.params], sums)

    def stop_for_landed(self, chunk: Chunk, handles: list[ParamHandle]) -> torch.Tensor | None:
        """The flag that stops an update from the chunk's plane, by its gradients' sums; None if the host looks."""
        return self._flag(handles, _sums_of(handles)) if self._is_on_device([chunk]) else None

    def _flag(self, handles: list[ParamHandle], sums: dict[ParamHandle, kernels.Sums]) -> torch.Tensor | None:
        flag = kernels.nonfinite_flag([*sums.values()])
        if flag is not None:
            self._used.append(_Used(handles, sums))
        return flag

    def stop_for_step(self, handles: list[ParamHandle], clip: kernels.ClipFactor | None) -> torch.Tensor | None:
        """The flag that stops every update of a step if one of its gradients is not finite; None if the host has to
        look, because it has a part in them. ``clip``: of the gradients that were clipped, whose norm tells the same.
        """
        mover = self._mover
        if mover.device.tier is not Tier.GPU:
            return None
        sums = _sums_of(handles)
        each = [*sums.values()]
        # Sums that came to the host tell it already, and it looks before the update.
        if any(not isinstance(part, kernels.DeviceSums) or part.is_here for own in each for part in own):
            return None
        if not self._is_on_device({handle.chunk.spec.index: handle.chunk for handle in handles}.values()):
            return None
        flag = clip.nonfinite if clip is not None and clip.is_of(each) else kernels.nonfinite_flag(each)
        if flag is not None:
            self._num_flags += 1
            # Each flag in a place of its own, in turn: a copy must not overwrite one that nobody has looked at.
            here = self._here[self._num_flags % _FLAGS :][:1]
            self._used.append(_Used(handles, sums, here, mover.device.copy(here, flag, "flag")))
            self.num_chunks += 1
        return flag

    def look(self) -> None:
        """See what became of the updates on the device: a wait, once for all of them. Raises NonFiniteGradient, naming
        the first param; what was updated and what was not it says.
        """
        try:
            used = [one for one in self._used if not one.is_good()]
            found = iter(kernels.totals([sums for one in used for sums in one.sums.values()]))
            bad_of = [[handle for handle in one.sums if not math.isfinite(next(found))] for one in used]
            stopped = [(one, bad) for one, bad in zip(used, bad_of, strict=True) if bad]
        except Exception:  # told once; what a Ctrl-C breaks off is looked at again
            self.forget()
            raise
        with WHOLE:  # else an interrupt would leave steps counted that were not made, and nobody told
            num_updated = self.num_chunks - len(stopped)
            self.forget()
            for one, _ in stopped:
                for handle in one.handles:
                    # The step was counted when its update was handed over, and the device did not make it.
                    handle.num_steps -= 1
            if stopped:
                self._refuse([handle for _, bad in stopped for handle in bad], num_updated)

    def _refuse(self, bad: list[ParamHandle], num_updated: int) -> NoReturn:
        """Raise NonFiniteGradient. ``num_updated``: chunks of the same backward, or steps, that were updated."""
        problem = f"the gradient of {bad[0].name!r} holds inf or NaN (and {len(bad) - 1} more params)."
        # Nothing changed anywhere: the step can be dropped. With other ranks nobody knows what theirs did.
        if num_updated == 0 and self._alone:
            self._state.updated_in_backward = False
            raise NonFiniteGradient(
                f"{problem} No weight was changed: call optimizer.zero_grad() to drop this step and go on, or look for "
                "the cause (learning rate, data)"
            )
        error = NonFiniteGradient(
            f"{problem} Their chunks were not updated, but {num_updated} others of this rank were in this backward: "
            "resume from a checkpoint"
        )
        self._state.mark_corrupted(error)
        raise error

    def forget(self) -> None:
        """Forget all of it: everything is going to be overwritten."""
        self._used.clear()
        self.num_chunks = 0
