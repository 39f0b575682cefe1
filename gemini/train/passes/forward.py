"""The forward pass of one model: modules begin and end, and the weights that they read are there meanwhile.

Writes to gathered weights become the masters exactly: those of a program inside ``model.gathered(write=True)``, and
those of a module inside its own forward. ``nn.Embedding(max_norm=...)`` and modules of the program's own with a number
called ``max_norm`` scale rows, OFT with ``coft=True`` and CPT bound what they have, and layers with a merged adapter
that is disabled take it out first. Elements that such a write changed have no residual any more, others keep theirs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.errors import ParamAccessError
from gemini.interrupts import WHOLE, call_without_grad, without_grad, yield_without_grad
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.store import ChunkStore
from gemini.ranks.agree import Attempt, Point, value_facts
from gemini.ranks.wire import Wire
from gemini.train.activations.store import ActivationStore
from gemini.train.gradients.scaling import Scaling
from gemini.train.gradients.store import GradientStore
from gemini.train.modules.calls import CallRecord, Calls, begin_backward_of
from gemini.train.modules.saved_weights import SavedWeights
from gemini.train.observers import (
    Observers,
    WriteObservers,
    innermost_transform,
    is_differentiating,
    iter_tensors,
    own_work,
    without_transforms,
)
from gemini.train.params.by_name import ByName, owner_of
from gemini.train.params.exposure import Exposure, take_in, undo_writes
from gemini.train.params.handle import ParamHandle, ParamSet, handles_of, note_writes
from gemini.train.setup.adoption import TrainedParams
from gemini.train.sharding.shards import Company
from gemini.train.step import StepState
from gemini.train.update.sinks import GradientSink
from gemini.train.update.updates import Updates


@dataclass(frozen=True)
class Parts:
    """The parts of one wrapped model that its passes and steps work with, made from top to bottom."""

    params: ParamSet
    store: ChunkStore
    state: StepState
    lock: AbstractContextManager[Any]
    """Lock of the books: one thread at a time changes what is gathered. Workers never take it."""
    observers: Observers
    writes: WriteObservers
    exposure: Exposure
    saved_weights: SavedWeights
    calls: Calls
    updates: Updates
    gradients: GradientStore
    activations: ActivationStore
    scaling: Scaling
    company: Company
    sink: GradientSink
    by_names: ByName
    slices: Wire  # among the ranks with slices of the same params; this one alone of params that are whole


class ForwardPass:
    """Takes what hooks of modules tell, and serves params to others than their module, in a forward and at rest. A
    model may be called from several threads, and on CUDA a recomputation comes on autograd's thread. What changes the
    books takes ``parts.lock``; each thread has its own stack of calls. Graphs keep ``passes``, and no model.
    """

    def __init__(self, parts: Parts, trained: TrainedParams, passes: weakref.ref[Any]):
        self.calls, self.observers, self.exposure = parts.calls, parts.observers, parts.exposure
        self._manager, self.state, self.lock = parts.store.manager, parts.state, parts.lock
        self._saved_weights, self._activations = parts.saved_weights, parts.activations
        self.updates, self._trained, self._company = parts.updates, trained, parts.company
        self._moves, self._device = parts.store.moves, parts.store.device
        self._by_names, self._writes, self._passes = parts.by_names, parts.writes, passes
        self.transformed: dict[int, list[Chunk]] = {}
        """By thread: chunks, each acquired once, that its ``torch.func`` may still read."""

    # ---- calls of modules ---------------------------------------------------------------------------------------

    @own_work
    def begin_call(
        self,
        module: nn.Module,
        chunks: tuple[Chunk, ...],
        resident: tuple[Chunk, ...] = (),
        keep: tuple[Chunk, ...] = (),
    ) -> None:
        """Gather what a hooked module reads, and wait for the updates of what it reads in place. Takes the lock.
        ``keep``: what modules inside it read, kept for all of them.
        """
        state = self.state
        if threading.get_ident() not in state.occupancy.inside:
            state.occupancy.enter(is_part=True)
        if not state.computing:
            # Counted before anything can fail: an interrupt from here on is found by the next call.
            state.num_open += 1
            self.let_go_of_transformed()
        if self._activations.offloads and not state.in_backward:
            self._activations.begin_forward()
        # Moving weights is no part of a transform around the model: inside one, copies would be recorded and batched.
        with self.lock if innermost_transform() is None else without_transforms(self.lock):
            if not state.computing:
                self._begin()
            for recording in self.observers.recordings:
                recording.begin_call(module)
            try:
                # What is in place and still being updated is waited for here, by the block that reads it.
                if resident:
                    self.exposure.catch_up(resident)
                # Not while others are in the model (they need room as well), nor where every module is watched.
                if len(self.calls.running) > 1 or self.observers.are_there:
                    keep = ()
                record = self.calls.begin(module, chunks, keep)
                # After the gathering: if that fails there is no call whose end could end the phase.
                if not state.in_forward:
                    state.in_forward = state.computing = True
                if self._moves:
                    record.stream = self._device.stream_number()
                    self._manager.look_ahead()
            finally:
                # If nothing has begun after all, what `_begin` has made ordinary is guarded again.
                if not state.computing or self.exposure.written:
                    self.exposure.rest_if_idle()
        if self._moves:
            # Saved-tensor hooks are of this thread alone, so they need no lock.
            self._saved_weights.begin_call(record)
            if chunks and is_differentiating():
                self._keep_for_transform(chunks)

    def _begin(self) -> None:
        """Begin a forward while nothing computes: errors of updates first, then the schedule, then the guards."""
        # An update that failed on its thread is told here, before a forward computes with half of it.
        if self.updates.pending:
            self.updates.check()
        if self._activations.offloads:
            self._activations.flights.check()
        self.state.check_whole()
        self.state.check_there()
        if self._moves:
            # A view of a window that somebody keeps shows the weights of before the last step until this.
            self._manager.refresh_lent()
            self._manager.begin_forward(in_step=torch.is_grad_enabled())
            if torch.is_grad_enabled():
                # All ranks come here for a forward with gradients: they compare scripts before the first gather.
                self._company.begin_step()
                self._manager.look_ahead()
        self.exposure.begin()

    @own_work
    def end_call(self, module: nn.Module) -> CallRecord | None:
        """End the call of a hooked module that is done, or failed; None if it never began. Takes the lock."""
        try:
            with self.lock if innermost_transform() is None else without_transforms(self.lock):
                record = self.calls.end(module)
                if not self.calls.running:
                    self._end_if_over()
                for recording in self.observers.recordings:
                    recording.end_call()
                if record and record.parent:
                    # A view of weights that it gave, or left somewhere, may be read until the call around is over.
                    for chunk in record.chunks:
                        if chunk.is_lent:
                            self.lend(chunk)
                if not self.state.computing or self.exposure.written:
                    self.exposure.rest_if_idle()
                if not torch.is_grad_enabled() and not self.state.computing:  # else its backward is still to come
                    self.state.close()
            if self._activations.offloads and not self.calls.running:
                self._activations.end_forward()
            return record
        finally:
            if self.state.occupancy.parts and self.state.occupancy.is_part and not self.calls.depth:
                self.state.occupancy.leave()  # last: whoever is alone from here on finds all in order

    def unwind(self, depth: int) -> None:
        """End the calls of this thread beyond ``depth``, which an exception ended without their hooks."""
        with self.lock:
            self.calls.unwind(depth)
            self._end_if_over()

    def abandon(self) -> None:
        """End all calls of this thread, and those of threads that have died. Called by Recovery alone."""
        self.calls.abandon()
        if self.state.occupancy.is_part:
            self.state.occupancy.leave()
        self._end_if_over()
        self.let_go_of_transformed()

    def _end_if_over(self) -> None:
        # The last thread that runs a forward ends the phase of all.
        if self.state.in_forward and not self.calls.running:
            self.state.end_forward()

    @own_work
    def lend(self, chunk: Chunk) -> None:
        """Let the call around a module keep a chunk gathered of which that has left a view behind."""
        self.calls.hold(chunk)

    # ---- torch.func ---------------------------------------------------------------------------------------------

    def _keep_for_transform(self, chunks: tuple[Chunk, ...]) -> None:
        """Keep chunks gathered until a transform is over, since ``torch.func.grad`` saves params where nobody sees."""
        with without_transforms(self.lock):
            if not self.transformed:
                self.state.num_open += 1  # it ends without telling
            kept = self.transformed.setdefault(threading.get_ident(), [])
            for chunk in chunks:
                if chunk not in kept:
                    self._manager.acquire(chunk)
                    kept.append(chunk)

    def let_go_of_transformed(self) -> None:
        """Release what was kept for transforms, which do not tell when they end: this thread's, unless one runs in it,
        and that of threads that ended.
        """
        if not self.transformed:
            return
        with self.lock:
            going = self.transformed.keys() - {thread.ident for thread in threading.enumerate()}
            if innermost_transform() is None:
                going.add(threading.get_ident())
            for thread in going:
                for chunk in self.transformed.pop(thread, []):
                    self._manager.release(chunk)

    # ---- reads by others ----------------------------------------------------------------------------------------

    def follow_flips(self) -> None:
        """Give params that became trained (``requires_grad`` was flipped) the planes and hooks that they lack."""
        if self.state.requires_grad_changed:
            self._trained.follow()
            self.state.requires_grad_changed = False  # behind it: what was refused is refused again

    @contextmanager
    def opened(self, chunks: Iterable[Chunk]) -> Iterator[None]:
        """Gather the weights of ``chunks`` and make their params ordinary ones, outside of a module's call."""
        self.state.check_there()
        # Noted first, as in `begin_call`: an interrupt inside is found by whoever comes next.
        occupancy = self.state.occupancy
        is_first = threading.get_ident() not in occupancy.inside
        try:
            occupancy.enter()
            self.state.num_open += 1
            with self.state.gathering(), self._exposed(chunks), self._saved_weights.open():
                yield
        finally:
            if is_first:
                occupancy.leave()
            with without_transforms(self.lock):
                self.exposure.rest_if_idle()
                # With autograd on a backward may follow that reads them: that one closes.
                if not torch.is_grad_enabled():
                    self.state.close()

    @contextmanager
    def _exposed(self, chunks: Iterable[Chunk]) -> Iterator[None]:
        acquired: list[Chunk] = []
        try:
            with without_transforms(self.lock):
                # Before new pins: a lent window with old content must be fetched again before anybody reads it.
                self._manager.refresh_lent()
                for chunk in chunks:
                    self._manager.acquire(chunk)
                    acquired.append(chunk)
                    self.exposure.expose(chunk)
            yield
        finally:
            with without_transforms(self.lock):
                # Guarded first: the release drops a window that an update has overtaken.
                for chunk in acquired:
                    self.exposure.cover(chunk)
                    self._manager.release(chunk)

    # ---- a param that an operation reads outside its own module's forward ---------------------------------------

    def in_call(self, func: Callable[..., Any], args: Any, kwargs: Any, handles: list[ParamHandle]) -> Any:
        """Run an operation that reads params outside their own module's forward, while the model computes. The
        operation is a call of its own: its chunks are gathered for it, and again when the gradient of its result
        arrives. A result that is a view of the weights lends them to the call around it.
        """
        chunks = {handle.chunk.spec.index: handle.chunk for handle in handles}
        for chunk in chunks.values():
            if chunk.resident:
                # In place there is nothing to gather: this waits for the update, if one is under way.
                self.exposure.expose(chunk)
        moving = tuple(chunk for chunk in chunks.values() if not chunk.resident)
        if not moving:
            return func(*args, **kwargs)
        record = CallRecord(None, moving, self.calls.innermost, self.calls.num_exchanges)
        with self.opened(moving):
            result = func(*args, **kwargs)
        # After the block: the block itself looked into the window, and would count as somebody else.
        with self.lock:
            for chunk in moving:
                if chunk.is_lent:
                    self.lend(chunk)
        record.on_gradient(result, partial(begin_backward_of, self._passes, record))
        # An operation that writes to a weight (`w.mul_(2)` in another module's forward) is refused here, by name.
        self.exposure.refuse_writes()
        return result

    def opened_at_rest(self, chunks: Iterable[Chunk]) -> AbstractContextManager[None]:
        """:meth:`opened` around an operation that reads while no module computes."""
        self.updates.check()
        self.state.check_whole()
        self.follow_flips()
        return self.opened(chunks)

    def outside(self, func: Callable[..., Any], args: Any, kwargs: Any, handles: list[ParamHandle]) -> Any:
        """Run an operation that autograd records and that reads params while no module computes (a loss with a weight).
        A view of weights that autograd does not follow is refused: a write to it would leave masters behind.
        """
        # One operation may read weights of two models (distillation): each has its own books.
        owners = {id(owner): owner for owner in map(owner_of, handles)}
        storages = {handle.chunk.face.untyped_storage()._cdata: handle for handle in handles}
        with ExitStack() as stack:
            for owner in owners.values():
                chunks = {h.chunk.spec.index: h.chunk for h in handles if h.owner() is owner}
                stack.enter_context(owner.forward.opened_at_rest(chunks.values()))
            result = func(*args, **kwargs)
        for tensor in iter_tensors(result):
            # A view that autograd follows is found by torch's count of the window's storage, and lends it.
            if not tensor.requires_grad and _storage_of(tensor) in storages:
                handle = storages[_storage_of(tensor)]
                raise ParamAccessError(
                    f"{getattr(func, '__name__', func)} of managed param {handle.name!r} outside of forward gives a "
                    "view of its weights, which live in a chunk. Use model.full_param(name) or model.gathered([param])"
                )
        return result

    # ---- writes to gathered weights, which become the masters exactly -------------------------------------------

    @contextmanager
    def gathered(self, handles: list[ParamHandle], *, write: bool) -> Iterator[None]:
        """Keep the full weights of ``handles`` readable; with ``write`` what was written becomes the master exactly.
        Autograd is off where weights are written. An exception inside undoes what was written.
        """
        chunks = list({handle.chunk.spec.index: handle.chunk for handle in handles}.values())
        if write:
            yield from self._written(handles, chunks)
            return
        with self.opened(chunks):
            try:
                yield
            except BaseException:
                with WHOLE:
                    _undo_writes(handles, {})
                raise

    def _written(self, handles: list[ParamHandle], chunks: list[Chunk]) -> Iterator[None]:
        """Open chunks to write to, once; masters become what was written, or after an error stay what they were."""
        is_first = not self.state.occupancy.is_own
        try:
            if is_first:
                self.state.occupancy.begin_alone()
            # Before the copies: an update in flight still changes weights that are in place.
            for chunk in chunks:
                chunk.settle()
            before = _copies_of(handles)
            # A checkpoint that is being written has these chunks first: `before_write` waits for it.
            with self.opened(chunks):
                for chunk in chunks:
                    self._writes.before_write(chunk)  # one that never moves is written in place
                yield from self._shown(handles, before)
        finally:
            with WHOLE:
                # In any case: after an error a window has values that no master has, after a write perhaps no rounding.
                self._manager.drop(chunks)
                self._manager.refresh_lent()
            if is_first:
                self.state.occupancy.end_alone()

    def _shown(self, handles: list[ParamHandle], before: dict[str, torch.Tensor]) -> Iterator[None]:
        """Yield while a program writes to open weights, and take over what it wrote, or undo it after an error."""
        # Once masters change there is no way back: what was shown must not be undone under them.
        takes_over = False
        try:
            yield from yield_without_grad()  # torch allows writes to weights only there
            # Before any master changes, on every rank: what one refuses, or has not written alike, all refuse.
            with Attempt() as attempt:
                _refuse_other_memory(handles)
            facts = partial(value_facts, ((h.name, self._by_names.to_compare(h, h.view)) for h in handles))
            self._by_names.agree(Point.WRITE, "gathered(write=True)", facts, attempt.refusal)
            with WHOLE, self.state.changing():  # Ctrl-C leaves no write half done
                takes_over = True
                for handle in handles:
                    self._by_names.take_over(handle, before.get(handle.name))
        except BaseException:
            with WHOLE:
                if takes_over:
                    note_writes(handles)  # else the guard would tell of them in the place of what went wrong
                else:  # weights in place get their old values, windows are dropped behind this
                    _undo_writes(handles, before)
            raise

    def begin_rewriting(self, handles: list[ParamHandle]) -> dict[str, torch.Tensor]:
        """Begin the call of a module that may rewrite these; gives what those are now that are rewritten in place."""
        for chunk in resident_chunks(handles):
            self._writes.before_write(chunk)
        return call_without_grad(_copies_of, handles)

    @without_grad
    def end_rewriting(self, handles: list[ParamHandle], before: dict[str, torch.Tensor]) -> None:
        """End the call, and take over what it wrote; ``before``: what :meth:`begin_rewriting` gave."""
        with self.lock, WHOLE, self.state.changing():
            for handle in handles:
                # PEFT sets `weight.data`: the values come into the window before torch's count is compared.
                take_in(handle)
                if handle.param._version != handle.version:
                    handle.version = handle.param._version  # torch has counted this write itself
                    handle.num_writes += 1
                    self._by_names.take_over(handle, before.get(handle.name))

    def unmerge(self, layer: Any) -> None:
        """Take the merged adapters of a tuner layer out of its weights, with the bits of PEFT."""
        handles = handles_of(layer.parameters())
        before = self.begin_rewriting(handles)
        try:
            call_without_grad(layer.unmerge)
        finally:
            self.end_rewriting(handles, before)


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except RuntimeError:  # sparse, or a wrapper without memory of its own
        return None


def resident_chunks(handles: Iterable[ParamHandle]) -> tuple[Chunk, ...]:
    """Find the chunks whose weights are written to in place: their updates have to be over when a write begins."""
    return tuple({handle.chunk.spec.index: handle.chunk for handle in handles if handle.chunk.resident}.values())


def _refuse_other_memory(handles: Iterable[ParamHandle]) -> None:
    for handle in handles:
        if handle.param.data_ptr() != handle.view.data_ptr() or handle.param.dtype != handle.chunk.flat.dtype:
            raise ParamAccessError(
                f"inside gathered(write=True) {handle.name!r} was given other memory (param.data = ...), which is not "
                "taken over: write into it, with param.copy_(value)"
            )


def _undo_writes(handles: Iterable[ParamHandle], before: dict[str, torch.Tensor]) -> None:
    for handle in handles:
        undo_writes(handle)
        if handle.name in before:
            handle.view.copy_(before[handle.name])


def _copies_of(handles: Iterable[ParamHandle]) -> dict[str, torch.Tensor]:
    """Copy weights that are about to be written to in place: nothing else tells which elements were changed."""
    return {handle.name: handle.view.clone() for handle in handles if handle.chunk.resident}
