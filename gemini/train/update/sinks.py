"""What becomes of the gradients of a model. They are kept in grad planes until the step; with ``step_in_backward`` used
when all of their chunk are there, in the backward that is the last of its step; with ``gradients="transient"`` used
from where autograd left them. Ranks that share params divide them first (:mod:`gemini.train.sharding.reduction`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from gemini import kernels
from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.store import ChunkStore
from gemini.train.gradients.scaling import Scaling
from gemini.train.gradients.store import GradientStore
from gemini.train.params.handle import (
    Leftover,
    ParamHandle,
    ParamSet,
    Stepper,
    is_in_stages,
    optimizer_of,
    stepping_in_backward,
)
from gemini.train.step import StepState
from gemini.train.update.tiles import ParamUpdate
from gemini.train.update.updates import Updates


class GradientSink:
    """The way of one model's gradients. For one process, or for ranks none of which has the same params. Called
    inside a backward, on the thread that runs it, and by the training thread at the step. ``transient``: whether
    gradients are kept nowhere.
    """

    divides = False  # whether ranks divide them
    has_replicas = False  # whether other ranks have the same shard

    def __init__(
        self,
        params: ParamSet,
        store: ChunkStore,
        state: StepState,
        updates: Updates,
        gradients: GradientStore,
        scaling: Scaling,
        *,
        transient: bool,
    ):
        self.params, self.store, self.state, self.updates = params, store, state, updates
        self.gradients, self.scaling, self.transient = gradients, scaling, transient
        self.only_keeps = not (self.divides or transient)
        """Whether a gradient that arrives is kept, and that is all where no optimizer steps inside backward."""

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for a step. It asks every param: not for what each step does."""
        return self.state.num_unreduced > 0 or self.gradients.has_any

    def begin_adding(self) -> None:
        """Make room to add: the first gradient of a further backward has arrived, while those of an earlier one wait.
        Raises GeminiError if these are kept nowhere; BudgetExceeded if there is no room to accumulate.
        """
        if self.transient:
            raise GeminiError(
                'a second backward before optimizer.step(): gradients="transient" keeps nothing to add to. '
                'Use GeminiConfig(gradients="accumulate") (or "retain") to accumulate over micro-batches'
            )
        self.gradients.homes.promote(self.store.chunks)

    def take(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Take a gradient, which has arrived. Raises GeminiError if a part of it was used in this backward already."""
        if self.transient:
            self.use(handle, grad)
            return
        if stepping_in_backward and handle.in_backward == self.state.backward_number:
            raise GeminiError(
                f"{handle.name!r} got its gradient in two parts (shared under reentrant checkpointing), and "
                "HybridAdam(step_in_backward=True) has used the first one: leave step_in_backward out, or checkpoint "
                "with use_reentrant=False"
            )
        # Before it lands: a bf16 plane without an error plane cannot be added to.
        if handle.norm_sums is not None:
            self.gradients.homes.promote([handle.chunk])
        self.gradients.land(handle, grad)

    def complete(self, chunk: Chunk) -> None:
        """Use what there is of a chunk: every gradient of it has arrived."""
        if stepping_in_backward:
            # What was collected of it first: an update from the plane comes on top of that.
            self.updates.complete(chunk)
            self.use_landed(chunk)

    def end_backward(self) -> None:
        """End a backward: no more gradients will come of it. Those that still land go on beside what comes next."""
        if not stepping_in_backward:
            return
        # A copy, since `complete` takes them out. The last chunk first, as backward has come to them.
        for index in sorted(self.updates.collected, reverse=True):
            self.updates.complete(self.store.chunks[index])
        if self.state.takes_gradients:
            # Chunks of which some param had no gradient were never complete. In backward order, as the others were.
            for chunk in reversed(self.store.chunks):
                self.use_landed(chunk)

    def settle(self) -> None:
        """Make gradients and their norms those of all ranks, all of which must come here."""
        self.gradients.await_sums()

    def note_clipping(self, max_norm: float, handles: Sequence[ParamHandle] | None) -> None:
        """``clip_grad_norm_`` was called with a limit, for these params or for all."""

    def agree_on_step(self, optimizer: Stepper) -> None:
        """``optimizer.step()`` is about to update: all ranks are about to make the same step, and norms are known."""
        self.gradients.await_sums()

    def discard(self, handles: Sequence[ParamHandle]) -> None:
        """``zero_grad``: forget what is not in planes yet."""

    def without_reducing(self) -> AbstractContextManager[None]:
        """``no_sync``: gradients of backwards inside stay whole on each rank, and are added up."""
        return nullcontext()

    def use(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Collect a transient gradient (as far as this rank keeps it) for the update of its chunk, or measure it.
        Raises GeminiError if no optimizer owns the param, or it got a gradient in this backward already.
        """
        # By the number of the backward: nothing need be reset when the next one begins.
        if handle.in_backward == self.state.backward_number:
            raise GeminiError(
                f"{handle.name!r} got its gradient in two parts (shared under reentrant checkpointing), the first of "
                'which may be used already: gradients="transient" cannot be used with this model; use '
                'gradients="retain"'
            )
        if self.state.measuring:
            handle.norm_sums = kernels.sum_squares(grad.detach().contiguous().view(-1))
            handle.in_backward = self.state.backward_number
            return
        optimizer = optimizer_of(handle.param)
        if optimizer is None:
            raise GeminiError(
                f'gradients="transient": no HybridAdam(step_in_backward=True) owns {handle.name!r}, so its gradient '
                "would be lost. Give all trained params to the optimizer before the first backward, or freeze this one"
            )
        scalars = optimizer.scalars_in_backward(handle, self.state.backward_number, self.state.clipping.in_backward)
        self.updates.collect(ParamUpdate(handle, scalars, grad.detach().contiguous().view(-1)))
        # Last: after an error above, the gradient was not used.
        handle.in_backward = self.state.backward_number

    def use_landed(self, chunk: Chunk) -> None:
        """Update the params of a chunk whose gradients are in the grad plane, and whose optimizer steps in backward.
        Raises NonFiniteGradient for inf or NaN; nothing of the chunk was touched. Where the sums of its gradients are
        not on the host yet, whoever updates looks, and the step tells of it.
        """
        if not stepping_in_backward or self.transient or self.state.accumulating:
            return
        guessed, ready = list[tuple[ParamHandle, Stepper]](), list[tuple[ParamHandle, Stepper]]()
        for handle in self.params.by_chunk.get(chunk.spec.index, ()):
            optimizer = optimizer_of(handle.param) if handle.has_grad else None
            if optimizer is not None and optimizer.step_in_backward:
                (guessed if optimizer.speculate else ready).append((handle, optimizer))
        # Whatever else is updated in this chunk is no guess, and would be undone with them.
        if not ready:
            if guessed:
                self._guess(chunk, guessed)
            return
        handles = [handle for handle, _ in ready]
        stop = self.updates.unseen.stop_for_landed(chunk, handles)
        # Nobody waits here for sums that are still made: the update that comes behind their landing looks at them.
        knows = stop is not None or self.gradients.knows_sums(handles)
        # Before any of the chunk is updated: a refusal leaves all of it as it was.
        if stop is None and knows:
            self.gradients.norms.check_finite(handles)
        for handle, optimizer in ready:
            param = self._update(handle, optimizer)
            self.updates.collect(param if knows else param._replace(sums=handle.norm_sums))
            # From here on the gradient is used: the step must not use it again.
            handle.norm_sums, handle.leftover = None, Leftover.USED
            handle.in_backward = self.state.backward_number
        self.updates.complete(chunk, stop=stop)

    def _guess(self, chunk: Chunk, ready: list[tuple[ParamHandle, Stepper]]) -> None:
        """Begin the update that the step of these params makes if it clips nothing."""
        known = self.updates.pending.get(chunk.spec.index)
        if (known is not None and known.is_undecided) or not self.updates.guesses.pays:
            return
        if any(optimizer is not ready[0][1] for _, optimizer in ready):
            return  # it takes the steps of both
        if any(is_in_stages(handle.param) for handle, _ in ready):
            return  # other stages' gradients are added yet
        self.updates.guess(chunk, [self._update(*of) for of in ready])

    def _update(self, handle: ParamHandle, optimizer: Stepper) -> ParamUpdate:
        """The update of a param whose gradient is in its plane, nothing of which is clipped from now on."""
        scale = self.state.clipping.coefficient * self.scaling.unscale * handle.clip
        return ParamUpdate(handle, optimizer.scalars_in_backward(handle, self.state.backward_number, scale))
