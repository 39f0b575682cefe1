"""Gradients that a device uses before the host knows whether they are finite.

Where the whole update of a chunk runs on a device with kernels of its own, the device looks: a flag that the sums of
squares set stops the update of that chunk, and the host is told later. Of updates inside backward, each of which has a
flag, when the step ends; of those of a step, which have one together, before the next backward takes its first
gradient: the flag is on its way to the host from the step on, which waits for nothing given to the device since.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from gemini import kernels
from gemini.errors import NonFiniteGradient
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import Event
from gemini.memory.devices.pages import PAGE
from gemini.memory.movement.mover import Mover
from gemini.rules import UpdateRule
from gemini.tiers import Tier
from gemini.train.params.handle import ParamHandle
from gemini.train.step import StepState
from gemini.train.update.tiles import ChunkUpdate, Path, check_finite, path_of

_FLAGS = PAGE // 4
"""Of steps that nobody has looked at yet: one for each optimizer of a model, and none outlives a backward."""


class _Update(NamedTuple):
    """An update of a chunk on the device, or of all of a step, and the sums that tell whether it took place."""

    handles: list[ParamHandle]
    sums: list[kernels.Sums]
    flag: tuple[torch.Tensor, Event] | None = None
    """What stopped it, on its way to the host; None if the sums alone tell."""

    def is_good(self) -> bool:
        """Whether the flag says that it took place. Waits for its copy to the host, which has begun long ago."""
        if self.flag is None:
            return False
        there, copied = self.flag
        # For the one copy, not for what the device was given since.
        copied.wait()
        return not int(there)


class DeferredFiniteChecks:
    """What is yet to be looked at of the gradients of one model that were used. Called by the training thread alone;
    ``alone``: whether the model is this process's only.
    """

    def __init__(self, state: StepState, mover: Mover, rule: UpdateRule, *, alone: bool) -> None:
        self._state, self._mover, self._rule, self._alone = state, mover, rule, alone
        self._updates: list[_Update] = []
        self.num_chunks = 0
        """Handed over for their update since :meth:`look` was called, on the device and on the host; a step is one."""
        self._here: torch.Tensor | None = None  # host memory that flags are copied to
        self._num_flags = 0

    def stop_for(self, update: ChunkUpdate) -> torch.Tensor | None:
        """The flag that stops an update if a gradient that autograd left is not finite; None if none has to. Raises
        NonFiniteGradient for an update on the host, which looks at once; nothing of this chunk was touched.
        """
        grads = [grad for _, grad in update.grads()]
        stops = update.path is Path.ON_DEVICE and update.rule.has_kernel
        if not (grads and stops and kernels.leaves_sums_there(grads[0])):
            check_finite(update)
            return None
        # The sums set it, on the same stream and before the update reads it.
        flag = kernels.new_flag(grads[0])
        sums = [kernels.sum_squares(grad, flag) for grad in grads]
        self._updates.append(_Update([param.handle for param in update.params], sums))
        return flag

    def stop_for_landed(self, chunk: Chunk, handles: list[ParamHandle]) -> torch.Tensor | None:
        """The flag that stops an update from the chunk's plane, from the sums that its gradients came with; None if it
        is for the host.
        """
        sums = [handle.norm_sums for handle in handles if handle.norm_sums is not None]
        stops = self._rule.has_kernel and path_of(self._mover, chunk) is Path.ON_DEVICE
        flag = kernels.nonfinite_flag(sums) if stops else None
        if flag is not None:
            self._updates.append(_Update(handles, sums))
        return flag

    def stop_for_step(self, handles: list[ParamHandle], clip: kernels.ClipFactor | None) -> torch.Tensor | None:
        """The flag that stops every update of a step if one of its gradients is not finite; None if the host has to
        look, because it has a part in them.

        Args:
            clip: of the gradients that were clipped, whose norm tells the same.
        """
        mover = self._mover
        if mover.device.tier is not Tier.GPU or not self._rule.has_kernel:
            return None
        sums = [handle.norm_sums for handle in handles if handle.norm_sums is not None]
        # Sums that came to the host tell it already, and it looks before the update.
        if any(not isinstance(part, kernels.DeviceSums) or part.is_here for own in sums for part in own):
            return None
        chunks = {handle.chunk.spec.index: handle.chunk for handle in handles}.values()
        if any(path_of(mover, chunk) is not Path.ON_DEVICE for chunk in chunks):
            return None
        flag = clip.nonfinite if clip is not None and clip.is_of(sums) else kernels.nonfinite_flag(sums)
        if flag is not None:
            if self._here is None:
                self._here = mover.device.make_host_buffer(PAGE).view(flag.dtype)
            self._num_flags += 1
            # Each flag in a place of its own, in turn: a copy must not overwrite one that nobody has looked at.
            here = self._here[self._num_flags % _FLAGS :][:1]
            self._updates.append(_Update(handles, sums, (here, mover.device.copy(here, flag, "flag"))))
            self.num_chunks += 1
        return flag

    def look(self) -> None:
        """See what became of the updates on the device: a wait, once for all of them. Raises NonFiniteGradient, naming
        the first param; what was updated and what was not it says.
        """
        # Taken out first: what is raised below is told once.
        updates, self._updates = self._updates, []
        num_chunks, self.num_chunks = self.num_chunks, 0
        updates = [update for update in updates if not update.is_good()]
        if not updates:
            return
        found = iter(kernels.totals([sums for update in updates for sums in update.sums]))
        bad: list[ParamHandle] = []
        num_stopped = 0
        for update in updates:
            own = [handle for handle in update.handles if not math.isfinite(next(found))]
            if own:
                num_stopped += 1
                for handle in update.handles:
                    # The device did not update it, so the step that was counted when it was handed over was none.
                    handle.num_steps -= 1
            bad += own
        if not bad:
            return
        problem = f"the gradient of {bad[0].name!r} holds inf or NaN (and {len(bad) - 1} more params)."
        # Nothing changed anywhere: the step can be dropped. With other ranks nobody knows what theirs did.
        if num_stopped == num_chunks and self._alone:
            self._state.updated_in_backward = False
            raise NonFiniteGradient(
                f"{problem} No weight was changed: call optimizer.zero_grad() to drop this step and go on, or look for "
                "the cause (learning rate, data)"
            )
        error = NonFiniteGradient(
            f"{problem} Their chunks were not updated, but {num_chunks - num_stopped} others of this rank were in this "
            "backward: resume from a checkpoint"
        )
        self._state.mark_corrupted(error)
        raise error

    def forget(self) -> None:
        """Forget all of it: everything is going to be overwritten."""
        self._updates.clear()
        self.num_chunks = 0
