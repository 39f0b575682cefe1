"""The backward pass of one model: gradients arrive, move into their chunks, and are used or wait for the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from gemini.errors import GeminiError, ParamAccessError
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk
from gemini.planning.planes import GRAD
from gemini.train.gradients import scaling
from gemini.train.gradients.store import refuse_grad
from gemini.train.modules.calls import CallRecord
from gemini.train.observers import own_work
from gemini.train.params.by_name import owner_of
from gemini.train.params.exposure import hide
from gemini.train.params.guard import ManagedParameter
from gemini.train.params.handle import Leftover, ParamHandle, stepping_in_backward
from gemini.train.passes.forward import ForwardPass, Parts
from gemini.train.step import at_end_of_backward
from gemini.waiting import PROGRESS

_OrdinaryParams = torch._C.DisableTorchFunctionSubclass  # type: ignore[attr-defined]
_graph_task = torch._C._current_graph_task_id
_is_trained = attrgetter("trained")
_NONE = -2
"""No backward: autograd's own number for that is -1."""


class BackwardPass:
    """Takes what autograd tells, and keeps account of gradients until they are used. Hooks call it on the thread that
    runs the graph: on CUDA that is autograd's own thread of the device, while the thread that called ``backward()``
    waits. So everything here that changes the books takes ``parts.lock``.
    """

    def __init__(self, parts: Parts):
        store = parts.store
        self.observers, self.gradients, self.scaling = parts.observers, parts.gradients, parts.scaling
        self.sink, self._params, self._state = parts.sink, parts.params, parts.state
        self._chunks, self._manager, self._moves = store.chunks, store.manager, store.moves
        self._lock, self._calls, self._exposure = parts.lock, parts.calls, parts.exposure
        self._activations, self._updates = parts.activations, parts.updates
        self._by_names = parts.by_names
        self._task = _NONE  # the backward, by autograd's number, that has begun last
        self._plain_task = _NONE
        """The backward, by autograd's number, whose gradients are only kept, and used by nobody before the step."""
        self.arrived: list[ParamHandle] = []
        """Params whose gradients this backward has begun to land, each as often as one came."""
        self.num_landed = 0
        self.adds = False  # whether there were gradients of an earlier backward when those of this one began to land
        self._last: Chunk | None = None
        """The chunk of several params whose gradients came last in the backward before. They leave as they come: behind
        it nothing is computed while they are copied."""
        self.landed_before: Counter[ParamHandle] = Counter()
        """Gradients that are not added again: a backward that broke off, and is made once more, has landed them."""
        self._works: Callable[[], Any] = lambda: None
        """Whether the backward that has begun last, alone, is running still: autograd keeps that for as long."""

    # ---- the pass -----------------------------------------------------------------------------------------------

    def be_alone(self, record: CallRecord | None = None) -> None:
        """Wait for forwards of other threads: the backward begins. Before the lock is taken: they end under it.
        ``record``: of the call whose backward begins. A forward that it is part of waits for this backward.
        """
        # Not that of another thread, which is waited for. One inside of this one is part of it.
        occupancy = self._state.occupancy
        if self._state.in_backward and (self._task == _graph_task() or occupancy.is_own):
            return
        # The one sign that the whole graph is done. It belongs to the graph that runs now, so a backward that breaks
        # off never calls it, and Recovery ends the phase.
        running = at_end_of_backward(self._is_over)
        if not occupancy.is_own:
            occupancy.begin_alone(running, self._calls.thread_of(record) if record else None)
            self._works = running
        self._task = _graph_task()

    def begin(self) -> None:
        """Enter the backward phase: a gradient is about to flow into the model. Called under the lock."""
        # Every hook comes through here: only the first of a backward finds anything to do.
        if self._state.in_backward:
            return
        self._state.check_there()
        self._state.check_masters("a backward")
        self._state.begin_backward()
        self.arrived, self.num_landed = [], 0
        for recording in self.observers.recordings:
            recording.begin_backward()
        # After the phase has changed: the guards ask it whether anybody computes.
        self._exposure.begin()
        for chunk in self._chunks:
            # Counted anew in every backward: an interrupted one leaves a count that no gradient would bring to zero.
            chunk.num_missing_grads = sum(map(_is_trained, self._params.by_chunk[chunk.spec.index]))
        if self._activations.offloads:
            self._activations.flights.begin_backward()

    @own_work
    def begin_of(self, record: CallRecord) -> None:
        """Gather what the backward of one call reads, and let go of calls that are over."""
        if self._task != _graph_task():
            self.be_alone(record)
        with self._lock:
            self.begin()
            if record.num_exchanges != self._calls.num_exchanges:
                # Where weights stay in place torch counts the writes itself, and would say no more than that.
                raise ParamAccessError(
                    "since the forward that this backward is of, `ema.swapped_in()` has put averages in the place of "
                    "the weights, or weights back: call backward before the block is entered, or run the forward again"
                )
            if self._moves:
                self._calls.begin_backward(record)
                self._manager.look_ahead()
            if self._exposure.written:
                self._exposure.refuse_writes()

    @own_work
    def _is_over(self) -> None:
        """Run as autograd's final callback, on the thread that ended the graph, and without a lock of ours."""
        with self._lock:
            if not self._state.in_backward:  # two threads of one backward may have come first
                return
            try:
                self._end_whole()
            finally:
                # Last: a forward that begins now interrupts what the schedule has of a step.
                self._state.occupancy.end_alone(self._works)

    def _end_whole(self) -> None:
        if self.sink.divides:
            self._calls.end_backward()  # nothing is read any more: room for what is still to be reduced
        if self.gradients.gathering is not None:
            self.gradients.gathering.begin_copies()  # of a chunk of which some param has no gradient in this backward
        self._last = next((own.chunk for own in reversed(self.arrived) if len(own.chunk.spec.slots) > 1), None)
        # Before the phase ends: the sink asks `takes_gradients`, which ends with it.
        self.sink.end_backward()
        self.end()
        # Of a backward inside a forward (forces) the step goes on: its schedule is not complete yet.
        if self._moves and not self._calls.running:
            self._manager.foresight.end()
        # After the last update was handed over: a Ctrl-C that has waited for them may raise here.
        if self._state.updated_in_backward:
            WHOLE.let_go()
        # With retain_graph a further backward of the same forward is to come.
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
            self._state.close()  # last: what breaks off before leaves it open, to be looked at

    def end(self) -> None:
        """Leave the backward phase: the graph is done, or was abandoned. Called under the lock, or by Recovery."""
        self._plain_task = _NONE
        # No node asks any more: what was kept gathered for the rest of this backward is released.
        if self._moves:
            self._calls.end_backward()
        if self._activations.offloads:
            self._activations.end_backward()
        self._state.end_backward()
        for recording in self.observers.recordings:
            recording.end_backward()
        # Last, for it may raise (a write inside backward): the phase has ended by then.
        self._exposure.rest_if_idle()

    # ---- gradients ----------------------------------------------------------------------------------------------

    def hook_of(self, handle: ParamHandle) -> Callable[[torch.Tensor], None]:
        """Make the hook that moves a param's gradient into its chunk. It does not keep the model alive."""
        return partial(_take_grad, handle)

    def take_grad(self, handle: ParamHandle) -> None:
        """Move ``param.grad`` into the chunk: the post-accumulate hook of every trained param. Called on autograd's
        thread, once for each time that autograd accumulates; takes the lock.
        """
        # Taken away at once: autograd would add the next gradient of this param to one that is still there. A guarded
        # param would warn of a read of p.grad without the switch.
        with _OrdinaryParams():
            grad, handle.param.grad = handle.param.grad, None
        if grad is None:
            return
        if grad.dtype is not handle.view.dtype or grad.requires_grad or grad.layout is not torch.strided:
            refuse_grad(handle, grad)
        # An update in flight may still read the grad plane, so the short way is for backwards without any.
        if self._plain_task != _graph_task() or self._updates.pending or self.landed_before:
            self._take(handle, grad)
            return
        # Nothing but this is to be done, and it is done for every param: what is touched here is cold by now.
        with self._lock:
            chunk = handle.chunk
            if handle.norm_sums is not None:
                self.gradients.homes.promote([chunk])  # a shared param under reentrant checkpointing arrives twice
            self.arrived.append(handle)
            # With others of its chunk, except where it would count as added before that is so (`landed_before`).
            alone = self.adds or chunk is self._last
            self.gradients.land(handle, grad, 0 if alone else chunk.num_missing_grads - 1)
            self.num_landed += 1
            chunk.num_missing_grads -= 1
            if not chunk.num_missing_grads:
                PROGRESS.count += 1
                if chunk.window is not None:
                    self._manager.grads_complete(chunk)

    @own_work
    def _take(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Take the first gradient of a backward, or one with which more is to be done than to keep it."""
        if self._task != _graph_task():
            self.be_alone()
        with self._lock:
            self.begin()
            self._keep(handle, grad)
            chunk = handle.chunk
            chunk.num_missing_grads -= 1
            if not chunk.num_missing_grads:
                PROGRESS.count += 1  # threads that wait for this backward give up when nothing goes on
                if chunk.window is not None:
                    # Nobody reads its weights again in this backward: its window is the first to go.
                    self._manager.grads_complete(chunk)
                self.sink.complete(chunk)

    def _keep(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        if self.scaling.is_needed or scaling.are_any_scaled:
            self.scaling.enter()  # first, for it may refuse
        if not self._state.takes_gradients:
            self._begin_gradients()
        if self._updates.pending:
            # An update of the step before may still read the plane that this gradient overwrites.
            handle.chunk.settle()
        if self.landed_before[handle] > 0:
            self.landed_before[handle] -= 1
        else:
            self.arrived.append(handle)
            self.sink.take(handle, grad)
            self.num_landed += 1
        if self.sink.only_keeps and not stepping_in_backward and self.observers.around_own_work is None:
            # From the next gradient on the short way will do. autograd's number of the backward tells it from all
            # others, so one that broke off leaves nothing to reset.
            self._plain_task = _graph_task()

    def _begin_gradients(self) -> None:
        """Make ready for gradients: the first of a param has arrived in this backward. A pass that gives none
        (``autograd.grad`` of an input) updates nothing, and leaves gradients that wait alone.
        """
        # Before anything lands: the coefficient would else be applied to the new gradients too.
        if self._state.clipping.was_asked:
            self.fold_clipping()  # it was of what is there
        if self._state.updated_in_backward and not self._state.accumulating:
            raise GeminiError(
                "a second backward before optimizer.step(): with step_in_backward=True the backward before it has "
                "updated the weights. Call optimizer.step() after every backward that updates, and put all but the "
                "last micro-batch of a step inside `with model.no_sync()`"
            )
        if self._updates.pending or self._updates.unseen.num_chunks:
            self._updates.drain()  # of params that this forward has not read
        self.adds = self.sink.has_gradients
        if self.adds:
            for handle in self._params.handles:
                if handle.leftover is Leftover.TORN:
                    handle.refuse_incomplete_gradient()
            self.sink.begin_adding()
        # Last: a backward that is refused above has changed nothing, and `abandon` goes by this.
        self._state.takes_gradients = True

    def read_grad(self, handle: ParamHandle) -> torch.Tensor | None:
        """Return the gradient as the loss gives it, clipped only if the step of that is over; on the CPU, or None."""
        if self.sink.has_replicas:
            # Their sums are made after backward, so what is in the plane may be this rank's part alone.
            self.sink.settle()
        self.gradients.drain()
        handle.refuse_incomplete_gradient()
        if not handle.has_grad:
            if handle.leftover is not Leftover.ZEROS:
                return None
            return torch.zeros(handle.param.shape, dtype=handle.chunk.planes[GRAD].dtype, device="cpu")
        if GRAD not in handle.chunk.planes:
            return None
        grad = self._by_names.read_plane(handle, GRAD)
        if handle.clip_folded != 1.0:
            # What a step before has folded in is part of the gradient; clipping of this step is the update's.
            grad = grad.float().mul_(handle.clip_folded)
        return grad.float().mul_(self.scaling.unscale) if self.scaling.is_scaled else grad

    def discard(self, handles: Iterable[ParamHandle] | None = None, *, leftover: Leftover = Leftover.NOTHING) -> None:
        """Forget gradients (all, or some), and the clipping that was computed from them: ``zero_grad()``. ``leftover``:
        what stands in their place.
        """
        if leftover is Leftover.ZEROS and self.sink.transient:
            raise GeminiError(
                'zero_grad(set_to_none=False) with gradients="transient": gradients are kept nowhere, so there is '
                "nothing to set to zero, and torch would update params of a zero gradient. Call zero_grad(), or use "
                'GeminiConfig(gradients="retain")'
            )
        chosen = self._params.handles if handles is None else list(handles)
        # First what is not in planes yet: it would land in them afterwards.
        self.sink.discard(chosen)
        if self._updates.pending:
            # A guessed update still reads the gradients, so it is undone before they go.
            self._updates.drop_guesses({handle.chunk.spec.index for handle in chosen})
        self.gradients.discard(chosen, leftover=leftover)
        for recording in self.observers.recordings:
            recording.discard()
        # Last: if no gradient is left the coefficient is forgotten, else it goes to each that is.
        self.fold_clipping()

    def fold_clipping(self) -> None:
        """Note the clipping of the whole model beside each gradient that is there, for it is not of those to come."""
        clipping = self._state.clipping
        if clipping.was_asked and not any(handle.has_grad for handle in self._params.handles):
            clipping.forget()
        if clipping.was_asked:
            self.gradients.fold_clipping(clipping.take())

    def abandon(self) -> None:
        """End a backward that an exception broke off, whose gradients are of no use."""
        # Asked before `end`, which forgets it: only a backward that gave gradients can have updated anything.
        has_begun = self._state.takes_gradients
        self._calls.abandon(backward=True)
        try:
            self.end()
        finally:
            self._state.occupancy.end_alone(self._works)
        if self._state.updated_in_backward and has_begun:
            self._state.updated_in_backward = False
            self._state.mark_corrupted(GeminiError("its backward ended early, after some params were updated in it"))


# ---- after an interrupt ----------------------------------------------------------------------------------------------


class Recovery:
    """Ends what an exception or Ctrl-C has left open in one model. Takes no lock: what was interrupted may have left
    the books in any state, and no other thread may change them now.
    """

    def __init__(self, parts: Parts, forward: ForwardPass, backward: BackwardPass):
        self._params, self._manager, self._state = parts.params, parts.store.manager, parts.state
        self._forward, self._backward, self._exposure = forward, backward, parts.exposure
        self._activations, self._gradients, self._updates = parts.activations, parts.gradients, parts.updates

    def forget_interrupted(self) -> None:
        """End what was under way, if anything is; nothing if a backward is running in this thread. It also runs where
        all is in order (a second forward before the backward of the first), so each part of it leaves alone what nobody
        has interrupted; and all of it waits for another time while other threads are at work.
        """
        state = self._state
        if (state.num_open or state.occupancy.is_part) and torch._C._current_graph_task_id() == -1:
            state.occupancy.if_alone(self._forget)

    def why_not_again(self) -> str:
        """Say why a backward that broke off cannot be made again with its forward; nothing if it can."""
        backward = self._backward
        if not (self._state.in_backward and self._state.takes_gradients):
            return ""
        if self._state.updated_in_backward:
            return "params were updated in it"
        # The sum may have been changed already, and not counted.
        is_cut = backward.adds and backward.num_landed < len(backward.arrived)
        return "a gradient was being added to the sum of those before" if is_cut else ""

    def break_off(self, *, again: bool) -> str:
        """End what broke off, such that no gradient of its backward counts, or each once if it is made ``again``: what
        became of them, in words.
        """
        backward, state = self._backward, self._state
        has_any = state.in_backward and state.takes_gradients
        adds, landed = backward.adds, Counter(backward.arrived)
        self.forget_interrupted()
        if state.corrupted_by:
            return "Params were updated in it: load the last checkpoint"
        if has_any and not adds:
            backward.discard()
        elif has_any and again:
            backward.landed_before.update(landed)
        elif has_any or backward.landed_before:
            for handle in self._params.handles:
                handle.leftover = Leftover.TORN if handle.has_grad else handle.leftover
            return "The gradients of this step have a part of it: call optimizer.zero_grad() and begin the step anew"
        return "Weights, states and gradients are as before it"

    def _forget(self) -> None:
        """Make all as if what broke off had not begun."""
        state = self._state
        # A Ctrl-C that waits for updates inside backward would wait for a backward that is gone.
        WHOLE.let_go()
        self._forward.abandon()
        # Updates in flight that hold gradients of this backward end before its gradients are thrown away.
        self._updates.collected.clear()
        self._updates.await_held()
        # The backward broke off: what is landing of it is of no use.
        self._gradients.start_over(alone=not self._backward.sink.divides)
        self._manager.foresight.interrupt()
        self._activations.recover()
        with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
            for handle in self._params.handles:
                handle.param.grad = None  # of autograd, if the interrupt came just before the hook that takes it
        # After `forward.abandon`: a forward inside backward has to end before the phase of the backward can.
        if state.in_backward:
            self._backward.abandon()
        self._exposure.rest_if_idle()
        if not state.computing:
            # An interrupt may have come between making params ordinary and noting it.
            hide([handle for handle in self._params.handles if not isinstance(handle.param, ManagedParameter)])
            state.num_open = 0
        # Pins that nobody has noted (an interrupt between pinning and noting) would keep windows for good.
        if not (state.computing or self._forward.transformed or self._manager.is_balanced()):
            self._manager.start_over()


def _take_grad(handle: ParamHandle, param: torch.Tensor) -> None:
    (handle.owner() or owner_of(handle)).backward.take_grad(handle)
