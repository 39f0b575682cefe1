"""``step_in_backward``: gradients are used inside backward, as soon as those of a whole chunk are there.

With transient gradients from where autograd left them; else from the grad planes, in the backward that is the last of
its step: the one outside ``no_sync()``.
"""

from __future__ import annotations

import torch

from gemini import kernels
from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import Chunk
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


class InBackward:
    """The updates of one model that are made inside backward. Called inside a backward, on the thread that runs it.

    Args:
        transient: whether gradients are kept nowhere.
    """

    def __init__(
        self,
        params: ParamSet,
        state: StepState,
        updates: Updates,
        gradients: GradientStore,
        scaling: Scaling,
        *,
        transient: bool,
    ):
        self.transient = transient
        self._by_chunk, self._state = params.by_chunk, state
        self.updates, self.gradients, self.scaling = updates, gradients, scaling

    def use(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Collect a transient gradient (as far as this rank keeps it) for the update of its chunk, or measure it.

        Raises:
            GeminiError: if no optimizer owns the param, or it got a gradient in this backward already.
        """
        # By the number of the backward: nothing need be reset when the next one begins.
        if handle.in_backward == self._state.backward_number:
            raise GeminiError(
                f"{handle.name!r} got its gradient in two parts (shared under reentrant checkpointing), the first of "
                'which may be used already: gradients="transient" cannot be used with this model; use '
                'gradients="retain"'
            )
        if self._state.measuring:
            handle.norm_sums = kernels.sum_squares(grad.detach().contiguous().view(-1))
            handle.in_backward = self._state.backward_number
            return
        optimizer = optimizer_of(handle.param)
        if optimizer is None:
            raise GeminiError(
                f'gradients="transient": no HybridAdam(step_in_backward=True) owns {handle.name!r}, so its gradient '
                "would be lost. Give all trained params to the optimizer before the first backward, or freeze this one"
            )
        scalars = optimizer.scalars_in_backward(handle, self._state.backward_number, self._state.clip_in_backward)
        self.updates.collect(ParamUpdate(handle, scalars, grad.detach().contiguous().view(-1)))
        # Last: after an error above, the gradient was not used.
        handle.in_backward = self._state.backward_number

    def refuse_used(self, handle: ParamHandle) -> None:
        """Refuse another part of a gradient that was used in this backward already.

        Raises:
            GeminiError: it would be another step of this param.
        """
        if handle.in_backward == self._state.backward_number:
            raise GeminiError(
                f"{handle.name!r} got its gradient in two parts (shared under reentrant checkpointing), and "
                "HybridAdam(step_in_backward=True) has used the first one: leave step_in_backward out, or checkpoint "
                "with use_reentrant=False"
            )

    def refuse_adding(self) -> None:
        """Refuse a second backward in a step where nothing is kept that it could add to.

        Raises:
            GeminiError: naming the remedy.
        """
        if self.transient:
            raise GeminiError(
                'a second backward before optimizer.step(): gradients="transient" keeps nothing to add to. '
                'Use GeminiConfig(gradients="accumulate") (or "retain") to accumulate over micro-batches'
            )

    def use_landed(self, chunk: Chunk) -> None:
        """Update the params of a chunk whose gradients are in the grad plane, and whose optimizer steps in backward.

        Raises:
            NonFiniteGradient: for inf or NaN; nothing of the chunk was touched. Where the sums of its gradients are
                not on the host yet, whoever updates looks, and the step tells of it.
        """
        if not stepping_in_backward or self.transient or self._state.accumulating:
            return
        ready: list[tuple[ParamHandle, Stepper]] = []
        for handle in self._by_chunk.get(chunk.spec.index, ()):
            optimizer = optimizer_of(handle.param) if handle.has_grad else None
            if optimizer is not None and optimizer.step_in_backward:
                ready.append((handle, optimizer))
        guessed = [of for of in ready if of[1].speculate]
        if guessed:  # whatever else is updated in this chunk is no guess, and would be undone with them
            ready = [of for of in ready if of not in guessed]
            if not ready:
                self._guess(chunk, guessed)
        if not ready:
            return
        handles = [handle for handle, _ in ready]
        stop = self.updates.stop_for_landed(chunk, handles)
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
            handle.in_backward = self._state.backward_number
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
        scale = self._state.clip_coefficient * self.scaling.unscale * handle.clip
        return ParamUpdate(handle, optimizer.scalars_in_backward(handle, self._state.backward_number, scale))
