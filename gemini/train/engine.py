"""The engine behind one wrapped model: phases, gathered weights, gradients, loss scale, reads and writes by name.

``GeminiDDP`` is the face, hooks tell the engine what happens, ``HybridAdam`` asks it for gradients and homes. The
engine knows when the model computes (a forward is on the stack, a backward is running, or ``gathered()`` is open) and
keeps the params guarded at all other times.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from gemini.config import GeminiConfig
from gemini.errors import BudgetExceeded, GeminiError
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import make_device
from gemini.memory.movement.manager import Manager
from gemini.memory.movement.mover import Moved, Mover
from gemini.memory.movement.worker import Worker
from gemini.planning.planes import GRAD
from gemini.ranks.group import join
from gemini.rules import rule_of
from gemini.tiers import Tier
from gemini.train.activations.store import make_activation_store
from gemini.train.gradients.loss_scale import LossScale
from gemini.train.gradients.scaled_backward import Scaling
from gemini.train.gradients.store import GradientStore, check_grad
from gemini.train.modules import stray_reads
from gemini.train.modules.calls import CallRecord, Calls
from gemini.train.modules.saved_weights import SavedWeights
from gemini.train.modules.transforms import is_differentiating, is_transforming, without_transforms
from gemini.train.params.by_name import ByName
from gemini.train.params.exposure import Exposure
from gemini.train.params.guard import ManagedParameter, ParamHandle, stepping_in_backward
from gemini.train.recording import Recording
from gemini.train.recovery import forget_interrupted
from gemini.train.report import check_planes
from gemini.train.setup.build import Taken, adopt_all, build, follow_requires_grad, give_back, iter_chunks, take_apart
from gemini.train.setup.problem import prepare
from gemini.train.sharding.reduction import Reduction
from gemini.train.sharding.shards import Shards
from gemini.train.step import StepState
from gemini.train.update.in_backward import refuse_used, step_landed, use_in_backward
from gemini.train.update.updates import Updates
from gemini.train.write_observers import WriteObservers


class Engine:
    """One per wrapped model; the model owns it, everything else refers to it weakly."""

    def __init__(
        self,
        model: nn.Module,
        config: GeminiConfig,
        *,
        process_group: Any = None,
        mesh: Any = None,
        fill: Callable[[Engine], None] | None = None,
    ):
        """``fill``: what writes the values of params that hold none yet to their homes."""
        config = self.config = config.resolved()
        self.rule = rule_of(config.optimizer)
        self.self_reference = weakref.ref(self)
        self.state = StepState()
        self.lock = threading.RLock()
        """Of the books: who gathers, lets go or lands takes it, so that a model may be called from several threads."""
        self.device = make_device(config.device)
        ranks = join(process_group, mesh, cuda=self.device.torch_device.type == "cuda")
        if ranks is not None:
            prepare(model, config, ranks, filled=fill is None)
        built = build(model, config, self.device, self.self_reference, ranks)
        self.plan, self.problem, self.placement = built.decision.plan, built.decision.problem, built.decision.placement
        self.layout, self.ledger, self.spill = self.problem.layout, built.ledger, built.spill
        self.chunks, self.handles = built.chunks, built.handles
        self.by_chunk = iter_chunks(self.handles)
        self.working_set = built.working_set
        self.write_observers = WriteObservers()
        self.recording: Recording | None = None  # who is told of everything while model.recording() is open
        self.mover = Mover(self.device, built.tile, self.ledger, device_tile=built.device_tile, rule=self.rule.spec)
        self.exposure = Exposure(self)
        self.saved_weights = SavedWeights(self)
        self.updates = Updates(self, built.first_use, overlap=config.overlap, threads=config.update_threads)
        self.shards = None if ranks is None else Shards(self, ranks, self.problem.exchange)
        self.reduction = None if self.shards is None else Reduction(self, self.shards)
        alone = self.shards is None or ranks is None or ranks.size == 1
        self.manager = Manager(
            self.chunks,
            ledger=self.ledger,
            device=self.device,
            mover=self.mover,
            on_evict=self.exposure.poison,
            gather=None if alone or self.shards is None else self.shards.gather,
            foresight=built.foresight,
            # What ranks gather they gather together, when all of them ask for it.
            worker=Worker("fetch") if config.overlap and alone else None,
            worker_staging=self.mover.staging.take() if config.overlap and alone else None,
            update_of=self.updates.job_of,
            await_update=self.updates.wait,
            is_lent=self.saved_weights.is_lent,
            relieve=lambda: self.activations.relieve() or self.updates.relieve() or self.gradients.relieve(),
            unpin=lambda: self.calls.relieve(),
            leave=lambda: self.activations.missing(),
        )
        self.gradients = GradientStore(
            self.handles,
            ledger=self.ledger,
            device=self.device,
            mover=self.mover,
            manager=self.manager,
            spill=self.spill,
            working_set=0 if ranks is None and all(chunk.resident for chunk in self.chunks) else built.working_set,
            worker=Worker("landing") if config.overlap and alone and self.device.tier is Tier.GPU else None,
        )
        self.by_names = ByName(self)
        self.activations = make_activation_store(self, built.decision.offload_activations, config.overlap and alone)
        self.loss_scale = LossScale() if config.precision == "fp16" else None
        self.scaling = Scaling(self, self.loss_scale)
        self.moved_last_step = Moved()
        self.transformed: list[Chunk] = []  # what torch.func may still read
        self.calls = Calls(self.acquire, self.release, self.exposure.expose, self.exposure.cover)
        if fill is not None:
            fill(self)
        # How to undo it, as long as the model is not whole; a model that was filled has nothing to go back to.
        taken = adopt_all(self, filled=fill is not None)
        self.taken: list[Taken] = taken if fill is None else []
        self.mover.moved = Moved()  # coming home is no part of the first step
        self.mover.stalls.clear()
        gc.collect(0)

    def forget_params(self) -> None:
        """They are ordinary ones again, and none of this engine's."""
        self.handles = []

    def record(self, recording: Recording | None) -> None:
        """From now on ``recording`` is told of everything, or nobody is."""
        self.recording = recording

    def give_back(self) -> None:
        """The params are as they were before this engine took them over, which has just happened."""
        if self.shards is None and self.taken:
            give_back(self, self.taken)

    # ---- phases -------------------------------------------------------------------------------------------------

    def before_write(self, chunk: Chunk) -> None:
        """Masters or states of a chunk are about to change."""
        self.write_observers.before_write(chunk)

    def restored(self) -> None:
        """Masters and states are those of a checkpoint: what belongs to the ones before is gone."""
        self.discard_grads()
        self.state.mark_restored()
        self.manager.drop(self.chunks)

    def begin_call(self, module: nn.Module, chunks: tuple[Chunk, ...], resident: tuple[Chunk, ...] = ()) -> None:
        """A hooked module starts to compute: gather what it reads, and wait for the updates of what is in place."""
        if not self.state.computing:
            self.let_go_of_transformed()
        with self.lock, without_transforms():
            if not self.state.computing:
                self.state.open()
                self.updates.check()
                self.activations.check()
                self.state.check_whole()
                self.saved_weights.begin_forward()
                self.manager.refresh_lent()
                self.exposure.begin()
                if torch.is_grad_enabled():
                    self.manager.foresight.begin()
            if self.recording is not None:
                self.recording.begin_call(module)
            try:
                self.exposure.catch_up(resident)
                record = self.calls.begin(module, chunks)
                if not self.state.in_forward:
                    self.state.begin_forward()
                self.manager.look_ahead()
            finally:
                self.exposure.rest_if_idle()
        self.saved_weights.begin_call(record)
        if chunks and is_differentiating():
            self._keep_for_transform(chunks)

    def _keep_for_transform(self, chunks: tuple[Chunk, ...]) -> None:
        """``torch.func.grad`` and its kin save params in a way that nobody sees: these stay until it is over."""
        with self.lock, without_transforms():
            for chunk in chunks:
                if chunk not in self.transformed:
                    self.acquire(chunk)
                    self.transformed.append(chunk)

    def let_go_of_transformed(self) -> None:
        """Something begins that is in no transform: those before are over."""
        if self.transformed and not is_transforming():
            chunks, self.transformed = self.transformed, []
            for chunk in chunks:
                self.release(chunk)

    def end_call(self, module: nn.Module) -> CallRecord | None:
        """A hooked module is done, or failed. None if it never began."""
        with self.lock, without_transforms():
            record = self.calls.end(module)
            self._end_forward_if_over()
            if self.recording is not None:
                self.recording.end_call()
            if record is not None and record.parent is not None:
                for chunk in record.chunks:
                    if self.saved_weights.is_lent(chunk):
                        self.lend(chunk)
            self.exposure.rest_if_idle()
            if not torch.is_grad_enabled() and not self.state.computing:  # else its backward is still to come
                self.state.close()
        return record

    def unwind(self, depth: int) -> None:
        """A call ended without its hooks, by an exception: so did all inside it that this thread runs."""
        with self.lock:
            self.calls.unwind(depth)
            self._end_forward_if_over()

    def _end_forward_if_over(self) -> None:
        if self.state.in_forward and not self.calls.running:
            self.state.end_forward()

    def lend(self, chunk: Chunk) -> None:
        """A module has left a view of its weights behind: the call around it goes on with it."""
        around = self.calls.hold(chunk)
        if around is not None:
            self.saved_weights.lend(around)

    def recover_if_interrupted(self) -> None:
        """Forget a forward or backward that an exception ended without its hooks; called where none can be running."""
        forget_interrupted(self)

    def begin_backward(self) -> None:
        """A gradient of a backward is about to flow into the model.

        Raises:
            GeminiError: if the gradients would have another scale than the program means (fp16).
        """
        self.scaling.enter()
        if self.state.in_backward:
            return
        self.state.begin_backward()
        if self.recording is not None:
            self.recording.begin_backward()
        self.exposure.begin()
        for chunk in self.chunks:
            chunk.num_missing_grads = sum(handle.trained for handle in self.by_chunk[chunk.spec.index])
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_over)
        self.activations.begin_backward()

    def _begin_gradients(self) -> None:
        """The first gradient of a param has arrived in this backward.

        A pass that gives none (``autograd.grad`` of an input) updates nothing, and leaves gradients that wait alone.

        Raises:
            BudgetExceeded: if gradients of an earlier backward are kept and there is no room to accumulate.
        """
        self._fold_clipping()  # it was of what is there
        if self.state.updated_in_backward and not self.state.accumulating:
            raise GeminiError(
                "a second backward before optimizer.step(): with step_in_backward=True the backward before it has "
                "updated the weights. Call optimizer.step() after every backward that updates, and put all but the "
                "last micro-batch of a step inside `with model.no_sync()`"
            )
        self.updates.drain()  # of params that this forward has not read
        if self.has_gradients:
            if self.config.gradients == "transient":
                raise GeminiError(
                    'a second backward before optimizer.step(): gradients="transient" keeps nothing to add to. '
                    'Use GeminiConfig(gradients="accumulate") (or "retain") to accumulate over micro-batches'
                )
            self.gradients.promote(self.chunks, idle=True)
        self.state.take_gradients()

    def begin_backward_of(self, record: CallRecord) -> None:
        """The backward of one call begins."""
        with self.lock:
            self.begin_backward()
            self.calls.begin_backward(record)
            self.manager.look_ahead()
            self.exposure.refuse_writes()

    def _backward_is_over(self) -> None:
        with self.lock:
            self._end_whole_backward()

    def _end_whole_backward(self) -> None:
        if self.reduction is not None:
            self.calls.end_backward()  # nothing is read any more: room for what is still to be reduced
            self.reduction.end_backward()
        self.gradients.drain()
        self.updates.complete_all()
        if self.state.takes_gradients and not self.state.accumulating and stepping_in_backward:
            for chunk in reversed(self.chunks):
                step_landed(self, chunk)
        self.end_backward()
        if not self.calls.running:
            self.manager.foresight.end()
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
            self.state.close()
        WHOLE.let_go()

    def end_backward(self) -> None:
        """The whole graph is done (or was abandoned)."""
        self.calls.end_backward()
        self.activations.end_backward()
        self.state.end_backward()
        if self.recording is not None:
            self.recording.end_backward()
        self.exposure.rest_if_idle()

    # ---- gathered weights ---------------------------------------------------------------------------------------

    def read_in_call(self, func: Callable[..., Any], args: Any, kwargs: Any, handles: list[ParamHandle]) -> Any:
        """An operation reads params outside their own module's forward, while the model computes."""
        return stray_reads.read_in_call(self, func, args, kwargs, handles)

    def read_outside(self, func: Callable[..., Any], args: Any, kwargs: Any, handles: list[ParamHandle]) -> Any:
        """An operation that autograd records reads params while no module computes."""
        return stray_reads.read_outside(self, func, args, kwargs, handles)

    def begin_reading(self) -> None:
        """Params are about to be read for a gradient, and no module computes."""
        self.updates.check()
        self.state.check_whole()
        if self.state.take_flips():
            follow_requires_grad(self)

    def acquire(self, chunk: Chunk) -> None:
        """Gather the weights of a chunk and keep them there until :meth:`release`."""
        try:
            self.manager.acquire(chunk)
        except BudgetExceeded as e:
            if self.reduction is None or self.reduction.reduces:
                raise
            raise self.reduction.without_room(e) from e

    def release(self, chunk: Chunk) -> None:
        """Unpin."""
        self.manager.release(chunk)

    @contextmanager
    def reading(self, chunk: Chunk) -> Iterator[None]:
        """Gather the weights of a chunk for a moment."""
        self.acquire(chunk)
        try:
            yield
        finally:
            self.release(chunk)

    @contextmanager
    def open_gathered(self, chunks: Iterable[Chunk]) -> Iterator[None]:
        """Outside of a module's call: the weights of ``chunks`` are gathered and their params ordinary ones."""
        self.state.open()
        try:
            with self.state.gathering(), self._exposed(chunks), self.saved_weights.open():
                yield
        finally:
            with self.lock, without_transforms():
                self.exposure.rest_if_idle()
                if not torch.is_grad_enabled():
                    self.state.close()

    @contextmanager
    def _exposed(self, chunks: Iterable[Chunk]) -> Iterator[None]:
        acquired: list[Chunk] = []
        try:
            with self.lock, without_transforms():
                self.manager.refresh_lent()
                for chunk in chunks:
                    self.acquire(chunk)
                    acquired.append(chunk)
                    self.exposure.expose(chunk)
            yield
        finally:
            with self.lock, without_transforms():
                for chunk in acquired:
                    self.exposure.cover(chunk)
                    self.release(chunk)

    # ---- gradients ----------------------------------------------------------------------------------------------

    def take_grad(self, handle: ParamHandle) -> None:
        """The post-accumulate hook: move ``param.grad`` into the chunk."""
        with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
            grad, handle.param.grad = handle.param.grad, None
        if grad is not None:
            with self.lock:
                self._take(handle, grad)

    def _take(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        check_grad(handle, grad)
        self.begin_backward()
        if not self.state.takes_gradients:
            self._begin_gradients()
        chunk = handle.chunk
        if self.updates.pending:
            self.updates.wait(chunk)
        if self.reduction is not None:
            self.reduction.take(handle, grad)
        elif self.config.gradients == "transient":
            use_in_backward(self, handle, grad)
        else:
            refuse_used(self, handle)
            if handle.has_grad:
                self.gradients.promote([chunk])  # a shared param under reentrant checkpointing arrives twice
            self.gradients.land(handle, grad)
        chunk.num_missing_grads -= 1
        if chunk.num_missing_grads == 0:
            self.manager.grads_complete(chunk)
            if self.reduction is not None:
                self.reduction.complete(chunk)
            else:
                self.updates.complete(chunk)
                if not self.state.accumulating:
                    step_landed(self, chunk)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of an earlier backward wait for the update."""
        return any(handle.has_grad for handle in self.handles) or (
            self.reduction is not None and self.reduction.has_unreduced
        )

    def sync_grads(self) -> None:
        """With several ranks: make gradients and their norms those of all ranks. All of them must come here."""
        if self.reduction is not None:
            self.reduction.sync_grads()

    @property
    def grad_unscale(self) -> float:
        """What gradients in the planes are multiplied by to be those of the loss."""
        return self.scaling.unscale

    def read_grad(self, handle: ParamHandle) -> torch.Tensor | None:
        """The gradient as the loss gives it (clipping not applied), on the CPU, or None."""
        if self.shards is not None and self.shards.ranks.replicas is not None:
            self.sync_grads()
        if not handle.has_grad:
            return None
        grad = self.by_names.read_plane(handle, GRAD)
        if grad is not None and handle.clip_folded != 1.0:
            grad = grad.float().mul_(handle.clip_folded)
        if grad is None or (self.loss_scale is None and not self.scaling.is_by_scaler):
            return grad
        return grad.float().mul_(self.grad_unscale)

    def discard_grads(self, handles: Iterable[ParamHandle] | None = None) -> None:
        """zero_grad: forget gradients (all, or some), and the clipping that was computed from them."""
        self.recover_if_interrupted()
        chosen = self.handles if handles is None else list(handles)
        if self.reduction is not None:
            self.reduction.discard(chosen)
        self.gradients.discard(chosen)
        if self.recording is not None:
            self.recording.discard()
        self._fold_clipping()

    def _fold_clipping(self) -> None:
        """Clipping of the whole model goes to the gradients that are there, each, and to none that is still to come."""
        coefficient = self.state.take_clipping()
        if coefficient is not None:
            self.gradients.fold_clipping(coefficient)

    def end_step(self) -> None:
        """After an optimizer step: what moved since the last one is what the report shows."""
        self._fold_clipping()
        self.state.forget_update_in_backward()
        self.moved_last_step, self.mover.moved = self.mover.moved, Moved()
        self.mover.stalls.end_step()
        if self.shards is not None:
            self.shards.end_step()
        if self.recording is not None:
            self.recording.end_step()
        self.write_observers.step_ended()
        self.manager.look_ahead()

    def drain(self) -> None:
        """Wait until nothing is in flight: the world is as if everything had been done in turn.

        Raises:
            StorageError and whatever else broke off an update.
        """
        self.let_go_of_transformed()
        self.updates.drain()
        self.manager.drain()
        self.activations.drain()

    # ---- the end ----------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Everything that must hold between steps; for tests."""
        self.drain()
        self.manager.check_invariants()
        check_planes(self)
        if not self.state.computing:
            assert all(isinstance(h.param, ManagedParameter) for h in self.handles)
            assert all(c.pins == 0 for c in self.chunks)

    def close(self) -> None:
        """Give everything back, whoever still holds a param: it keeps its shape and name, and refuses to be read."""
        self.write_observers.close()
        for workers in (self.updates, self.manager, self.gradients, self.activations):
            workers.close()
        take_apart(self.chunks, self.handles)
        if self.shards is not None:
            self.shards.close()
        if self.spill is not None:
            self.spill.close()
        self.device.close()

    def __del__(self) -> None:
        # At the end of the interpreter the system takes everything back, and torch may be half gone.
        if hasattr(self, "manager") and not sys.is_finalizing():
            with _disable_current_modes():  # garbage is collected in the middle of anything, of fake tensors too
                self.close()
