"""What becomes of the gradients of a model, chosen once when it is wrapped.

GradientSink  kept in grad planes until the step, or until their chunk is complete (``step_in_backward``)
UsedAtOnce    used from where autograd left them, and kept nowhere (``gradients="transient"``)
Reduction     divided among ranks first (:mod:`gemini.train.sharding.reduction`)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemini.memory.chunks.chunk import Chunk
from gemini.memory.store import ChunkStore
from gemini.train.params.handle import ParamHandle, Stepper, stepping_in_backward
from gemini.train.step import StepState
from gemini.train.update.in_backward import InBackward


class GradientSink:
    """The sink that keeps them. For one process, or for ranks none of which has the same params. Called inside a
    backward, on the thread that runs it, and by the training thread at the step.
    """

    only_keeps = True
    """Whether a gradient that arrives is kept, and nothing else is done where no optimizer steps inside backward."""
    divides = False
    """Whether ranks divide them."""
    has_replicas = False
    """Whether other ranks have the same shard."""

    def __init__(self, store: ChunkStore, state: StepState, in_backward: InBackward):
        self.store = store
        self.state = state
        self.in_backward = in_backward
        self.gradients = in_backward.gradients
        self.updates = in_backward.updates

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for a step. It asks every param: not for what each step does."""
        return self.state.num_unreduced > 0 or self.gradients.has_any

    def begin_adding(self) -> None:
        """Make room to add: the first gradient of a further backward has arrived, while those of an earlier one wait.

        Raises:
            GeminiError: if these are kept nowhere.
            BudgetExceeded: if there is no room to accumulate.
        """
        self.in_backward.refuse_adding()
        self.gradients.homes.promote(self.store.chunks)

    def take(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Take the gradient of a param, which has arrived."""
        if stepping_in_backward:
            self.in_backward.refuse_used(handle)
        # Before it lands: a bf16 plane without an error plane cannot be added to.
        if handle.norm_sums is not None:
            self.gradients.homes.promote([handle.chunk])
        self.gradients.land(handle, grad)

    def complete(self, chunk: Chunk) -> None:
        """Use what there is of a chunk: every gradient of it has arrived."""
        if stepping_in_backward:
            # What was collected of it first: an update from the plane comes on top of that.
            self.updates.complete(chunk)
            self.in_backward.use_landed(chunk)

    def end_backward(self) -> None:
        """End a backward: no more gradients will come of it. Those that still land go on beside what comes next."""
        if not stepping_in_backward:
            return
        self.updates.complete_all()
        if self.state.takes_gradients:
            # Chunks of which some param had no gradient were never complete. In backward order, as the others were.
            for chunk in reversed(self.store.chunks):
                self.in_backward.use_landed(chunk)

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


class UsedAtOnce(GradientSink):
    """Each is collected for the update of its chunk, which is made when all of them are there."""

    only_keeps = False

    def take(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        self.in_backward.use(handle, grad)
