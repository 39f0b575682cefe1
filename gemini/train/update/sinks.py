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
    """Keeps them. Of one process, or of ranks none of which has the same params."""

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

    def begin_adding(self) -> None:
        """The first gradient of a further backward has arrived, while those of an earlier one wait.

        Raises:
            GeminiError: if these are kept nowhere.
            BudgetExceeded: if there is no room to accumulate.
        """
        self.in_backward.refuse_adding()
        self.gradients.promote(self.store.chunks)

    def take(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """A param's gradient has arrived."""
        if stepping_in_backward:
            self.in_backward.refuse_used(handle)
        if handle.norm_sums is not None:
            self.gradients.promote([handle.chunk])
        self.gradients.land(handle, grad)

    def complete(self, chunk: Chunk) -> None:
        """Every gradient of a chunk has arrived."""
        if stepping_in_backward:
            self.updates.complete(chunk)
            self.in_backward.use_landed(chunk)

    def end_backward(self) -> None:
        """No more will come of this backward."""
        if self.gradients.landing:
            self.gradients.drain()
        if not stepping_in_backward:
            return
        self.updates.complete_all()
        if self.state.takes_gradients:
            for chunk in reversed(self.store.chunks):
                self.in_backward.use_landed(chunk)

    def settle(self) -> None:
        """Make gradients and their norms those of all ranks, all of which must come here."""

    def note_clipping(self, max_norm: float, handles: Sequence[ParamHandle] | None) -> None:
        """``clip_grad_norm_`` was called with a limit, for these params or for all."""

    def agree_on_step(self, optimizer: Stepper) -> None:
        """``optimizer.step()`` is about to update: all ranks are about to make the same step."""

    def discard(self, handles: Sequence[ParamHandle]) -> None:
        """``zero_grad``: forget what is not in planes yet."""


class UsedAtOnce(GradientSink):
    """Each is collected for the update of its chunk, which is made when all of them are there."""

    only_keeps = False

    def take(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        self.in_backward.use(handle, grad)
