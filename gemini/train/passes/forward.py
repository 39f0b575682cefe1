"""The forward pass of one model: modules begin and end, and the weights that they read are there meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gemini.memory.chunks.chunk import Chunk
from gemini.train.modules.calls import CallRecord
from gemini.train.own_work import innermost_transform, is_differentiating, own_work, without_transforms
from gemini.train.passes.parts import Parts
from gemini.train.setup.trained import TrainedParams


class ForwardPass:
    """What hooks of modules tell, and reads of params by others than their module.

    Args:
        lock: of the books, so that a model may be called from several threads.
        begin_step: called when a forward that a backward may follow begins.
    """

    def __init__(self, parts: Parts, trained: TrainedParams):
        self.calls, self.observers, self.exposure = parts.calls, parts.observers, parts.exposure
        self._manager, self._state, self._lock = parts.store.manager, parts.state, parts.lock
        self._saved_weights, self._activations = parts.saved_weights, parts.activations
        self._updates, self._trained, self._company = parts.updates, trained, parts.company
        self._moves = parts.store.moves
        self._transformed: list[Chunk] = []
        """What ``torch.func`` may still read."""

    # ---- calls of modules ---------------------------------------------------------------------------------------

    @own_work
    def begin_call(self, module: nn.Module, chunks: tuple[Chunk, ...], resident: tuple[Chunk, ...] = ()) -> None:
        """A hooked module starts to compute: gather what it reads, and wait for the updates of what is in place."""
        state = self._state
        if not state.computing:
            state.num_open += 1
            self.let_go_of_transformed()
        if self._activations.offloads and not state.in_backward:
            self._activations.begin_forward()
        with self._lock, without_transforms():
            if not state.computing:
                self._begin()
            if self.observers.recording is not None:
                self.observers.recording.begin_call(module)
            try:
                self.exposure.catch_up(resident)
                record = self.calls.begin(module, chunks)
                if not state.in_forward:
                    state.begin_forward()
                if self._moves:
                    self._manager.look_ahead()
            finally:
                self.exposure.rest_if_idle()
        if self._moves:
            self._saved_weights.begin_call(record)
            if chunks and is_differentiating():
                self._keep_for_transform(chunks)
        elif record.parent is None:
            self.settle()

    def _begin(self) -> None:
        """Nothing computes yet."""
        if self._updates.pending:
            self._updates.check()
        if self._activations.offloads:
            self._activations.check()
        self._state.check_whole()
        if self._moves:
            self._saved_weights.begin_forward()
            self._manager.refresh_lent()
        if self._moves:
            self._manager.begin_forward(in_step=torch.is_grad_enabled())
        if self._moves and torch.is_grad_enabled():
            self._company.begin_step()
            self._manager.look_ahead()
        self.exposure.begin()

    def settle(self) -> None:
        """Where nothing moves: if no update is awaited any more, and nobody records, modules inside of the call that is
        outermost in this thread need not be looked at until it ends.
        """
        if not self.exposure.late and self.observers.recording is None:
            thread = threading.get_ident()
            self._state.settle(thread, id(self.calls.running[thread][0].module))

    @own_work
    def end_call(self, module: nn.Module) -> CallRecord | None:
        """A hooked module is done, or failed. None if it never began."""
        with self._lock, without_transforms():
            record = self.calls.end(module)
            if record is None or record.parent is None:
                self._state.unsettle()
            self._end_if_over()
            if self.observers.recording is not None:
                self.observers.recording.end_call()
            if record is not None and record.parent is not None:
                for chunk in record.chunks:
                    if chunk.is_lent:
                        self.lend(chunk)
            self.exposure.rest_if_idle()
            if not torch.is_grad_enabled() and not self._state.computing:  # else its backward is still to come
                self._state.close()
        if self._activations.offloads and not self.calls.running:
            self._activations.end_forward()
        return record

    def unwind(self, depth: int) -> None:
        """A call ended without its hooks, by an exception: so did all inside it that this thread runs."""
        with self._lock:
            self.calls.unwind(depth)
            self._state.unsettle()
            self._end_if_over()

    def abandon(self) -> None:
        """So did all calls of this thread, and those of threads that ended."""
        self.calls.abandon()
        self._state.unsettle()
        self._end_if_over()
        self.let_go_of_transformed()

    def _end_if_over(self) -> None:
        if self._state.in_forward and not self.calls.running:
            self._state.end_forward()

    @own_work
    def lend(self, chunk: Chunk) -> None:
        """A module has left a view of its weights behind: the call around it goes on with it."""
        around = self.calls.hold(chunk)
        if around is not None:
            self._saved_weights.lend(around)

    def close(self) -> None:
        """The model ends; graphs may still refer to its weights."""
        self._saved_weights.close()

    # ---- torch.func ---------------------------------------------------------------------------------------------

    @property
    def is_transformed(self) -> bool:
        """Whether chunks are kept for a transform."""
        return bool(self._transformed)

    def _keep_for_transform(self, chunks: tuple[Chunk, ...]) -> None:
        """``torch.func.grad`` and its kin save params in a way that nobody sees: these stay until it is over."""
        with self._lock, without_transforms():
            if not self._transformed:
                self._state.num_open += 1  # it ends without telling
            for chunk in chunks:
                if chunk not in self._transformed:
                    self._manager.acquire(chunk)
                    self._transformed.append(chunk)

    def let_go_of_transformed(self) -> None:
        """Something begins that is in no transform: those before are over."""
        if self._transformed and innermost_transform() is None:
            chunks, self._transformed = self._transformed, []
            for chunk in chunks:
                self._manager.release(chunk)

    # ---- reads by others ----------------------------------------------------------------------------------------

    def begin_reading(self) -> None:
        """Params are about to be read for a gradient, and no module computes."""
        self._updates.check()
        self._state.check_whole()
        self.follow_flips()

    def follow_flips(self) -> None:
        """``requires_grad`` of a param may have been flipped: what became trained gets what it lacks."""
        if self._state.take_flips():
            self._trained.follow()

    @contextmanager
    def opened(self, chunks: Iterable[Chunk]) -> Iterator[None]:
        """Outside of a module's call: the weights of ``chunks`` are gathered and their params ordinary ones."""
        self._state.num_open += 1
        try:
            with self._state.gathering(), self._exposed(chunks), self._saved_weights.open():
                yield
        finally:
            with self._lock, without_transforms():
                self.exposure.rest_if_idle()
                if not torch.is_grad_enabled():
                    self._state.close()

    @contextmanager
    def _exposed(self, chunks: Iterable[Chunk]) -> Iterator[None]:
        acquired: list[Chunk] = []
        try:
            with self._lock, without_transforms():
                self._manager.refresh_lent()
                for chunk in chunks:
                    self._manager.acquire(chunk)
                    acquired.append(chunk)
                    self.exposure.expose(chunk)
            yield
        finally:
            with self._lock, without_transforms():
                for chunk in acquired:
                    self.exposure.cover(chunk)
                    self._manager.release(chunk)

    def lend_what_is_left(self, chunks: Iterable[Chunk]) -> None:
        """An operation that read these is over: if its result is a view of weights, the call around it goes on."""
        with self._lock:
            for chunk in chunks:
                if chunk.is_lent:
                    self.lend(chunk)
