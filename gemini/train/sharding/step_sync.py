"""Once per step: gradients and what is about to be done with them become the same thing on every rank.

sync_grads     sums across replicas that were not made, and every param's part of the norm from every rank
agree_on_step  all ranks are about to update the same params with the same hyperparameters
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Sized

import torch

from gemini import kernels
from gemini.errors import GeminiError
from gemini.ranks.agree import Facts, Point, plain
from gemini.ranks.wire import Tag
from gemini.train.gradients.scaling import Scaling
from gemini.train.params.handle import ParamHandle, Stepper, handles_of, optimizer_of
from gemini.train.sharding.replicas import ReplicaSums
from gemini.train.sharding.shards import Shards
from gemini.train.step import StepState


def facts_of_gradients(handles: Sequence[ParamHandle]) -> Facts:
    """State which params have a gradient."""
    names = [handle.name for handle in handles]
    return Facts({"the gradient": array("b", [handle.has_grad for handle in handles])}, names)


def facts_of_step(
    handles: Sequence[ParamHandle], optimizers: Sequence[Stepper], scaling: Scaling, state: StepState
) -> Facts:
    """State all that an update by these optimizers depends on, but the gradients and how they came."""
    values: dict[str, str] = {}
    groups: dict[str, int] = {}
    number = 0
    for which, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            label = f"param group {index}" + (f" of optimizer {which}" if len(optimizers) > 1 else "")
            managed = handles_of(group["params"])
            for name in optimizer.defaults if managed else ():
                values[f"{name} of {label}"] = repr(plain(group.get(name, "not given")))
            for handle in managed:
                groups[handle.name] = number
            number += 1
    values["the factor that takes the loss scale out of gradients"] = repr(float(scaling.unscale))
    values["the coefficient of clip_grad_norm_"] = repr(float(state.clip_coefficient))
    return Facts(
        {
            **values,
            "the param group": array("q", [groups.get(handle.name, -1) for handle in handles]),
            "requires_grad": array("b", [handle.trained for handle in handles]),
            "what zero_grad(set_to_none=False) left": array("b", [h.takes_step and not h.has_grad for h in handles]),
            "the number of updates": array("q", [handle.num_steps for handle in handles]),
            "the clipping": array("d", [handle.clip for handle in handles]),
        },
        [handle.name for handle in handles],
    )


class StepSync:
    """The step under way, as far as the ranks of one model have told each other of it."""

    def __init__(self, shards: Shards, replicas: ReplicaSums, state: StepState, scaling: Scaling):
        self.is_done = False
        """Whether gradients are the same thing on every rank: every rank knows their norms."""
        self._shards, self._ranks, self._params = shards, shards.ranks, shards.params
        self._replicas, self._state, self._scaling = replicas, state, scaling
        self._clippings: list[str] = []
        """The calls of ``clip_grad_norm_`` of this step; one without a limit only looks at the norm."""
        self._num_dropped = 0
        """How often gradients were dropped since the last step (``zero_grad``)."""
        self._num_backwards = 0
        """Since the last step, outside of ``no_sync``."""

    def gradient_arrives(self) -> None:
        """Take up a gradient of a further backward; with replicas it may not come after the sums across them."""
        if self.is_done and not self._replicas.are_none and any(h.has_grad for h in self._params.handles):
            raise GeminiError("a backward after clip_grad_norm_: clip after the last backward of a step")
        self.undo()

    def end_script(self, *, has_all: bool) -> bool:
        """End a backward that followed its script: ranks tell each other whether it is over, what they have, and its
        norms. True if it is over on all of them.
        """
        handles = self._params.handles
        checksum = facts_of_gradients(handles).checksum
        # In the message that ends the script, so that the norm costs no wait of its own.
        norms = self._own_norms() if self._replicas.are_none else []  # which come once replicas have been added up
        own = torch.tensor([has_all, checksum, *norms], dtype=torch.float64, device="cpu")
        rows = self._ranks.wire.swap(Tag.AGREEMENT, own, "the end of a backward and the gradient norm")
        # Some rank has more to reduce: these norms are not those of whole gradients.
        if not rows[:, 0].all():
            return False
        if self._replicas.are_none and bool((rows[:, 1] == checksum).all()):
            self._take_norms(rows[:, 2:])
        return True

    def backward_ended(self, *, is_alike: bool) -> None:
        """Count a backward outside of ``no_sync``; ``is_alike``: it followed its script to the end."""
        # Ranks compare it: one that made a backward more has other sums.
        self._num_backwards += 1
        if not is_alike:
            self.undo()  # nobody had a gradient

    def gradients_dropped(self, handles: Sequence[ParamHandle]) -> None:
        """Note a ``zero_grad``: what was clipped is gone too."""
        self._num_dropped += any(handle.has_grad for handle in handles)
        self._clippings.clear()

    def note_clipping(self, max_norm: float, handles: Sequence[ParamHandle] | None) -> None:
        """Note a call of ``clip_grad_norm_``, for ranks to compare and errors to say."""
        of = ""
        if handles is not None:
            first, *others = sorted(handle.name for handle in handles) or ["no param"]
            of = f" of {first!r} {f'and {len(others)} more' if others else 'alone'}"
        self._clippings.append(f"max_norm {max_norm!r}{of}")

    def end_step(self, *, has_gradients: bool) -> None:
        """Note that an optimizer step is over, skipped or made."""
        self._clippings.clear()
        self._num_dropped = self._num_backwards = 0
        if self.is_done and not has_gradients:
            self.is_done = False

    def sync_grads(self, whole: Sized) -> None:
        """Make the gradients of a step the same thing on every rank: once per step, before the norm or the update.

        Args:
            whole: the gradients of this rank that were not reduced; there may be none.

        Raises:
            RankMismatch: on every rank, if ranks have other gradients, or one of them has dropped some.
        """
        if self.is_done:
            return
        if whole:
            raise GeminiError(
                "optimizer.step() or clip_grad_norm_ after a backward inside no_sync(), or one that failed: the last "
                "backward of a step must be outside of no_sync(), so that gradients are reduced. zero_grad() drops them"
            )
        gradients = facts_of_gradients(self._params.handles)
        # Before replicas are added up: a missing gradient would be zeros in the sum, and noticed by nobody.
        said = self._shards.meet_all(Point.SYNC_GRADS, gradients.checksum)
        if any(len(set(row)) > 1 for row in said):  # replicas may have other gradients until here
            self._shards.refuse_differing("clip_grad_norm_ or optimizer.step()", gradients)
        self._replicas.sum_all()
        norms = torch.tensor(self._own_norms(), dtype=torch.float64, device="cpu")
        self._take_norms(self._ranks.wire.swap(Tag.AGREEMENT, norms, "the gradient norm"))

    def _own_norms(self) -> list[float]:
        """Sum up the squares of this rank's part of every param's gradient; 0 where there is none."""
        return kernels.totals([handle.norm_sums or [] for handle in self._params.handles])

    def _take_norms(self, rows: torch.Tensor) -> None:
        """Take over what all ranks say of it: ranks x params."""
        for handle, parts in zip(self._params.handles, rows.T.tolist(), strict=True):
            if handle.has_grad:
                handle.norm_sums = parts
        self.is_done = True

    def agree_on_step(self, optimizer: Stepper, whole: Sized) -> None:
        """``optimizer.step()`` is about to update params: all ranks come here, and must be about to do the same."""
        self.sync_grads(whole)
        # Gradients first: where they differ, that is what an error should name.
        facts = facts_of_gradients(self._params.handles) | self._facts_of_step([optimizer])
        self._shards.agree(Point.STEP, "optimizer.step()", lambda: facts)

    def undo(self) -> None:
        """Go back to this rank's part of a norm that all ranks know, for a backward after ``clip_grad_norm_``."""
        if not self.is_done:
            return
        for handle in self._params.handles:
            if handle.norm_sums is not None:
                handle.norm_sums = handle.norm_sums[self._ranks.rank : self._ranks.rank + 1]
        self.is_done = False

    def facts_of_updates(self) -> Facts:
        """Collect all that updates inside backward depend on."""
        # The optimizers of the params, in the order of the model.
        owners = {id(o): o for handle in self._params.handles if (o := optimizer_of(handle.param)) is not None}
        return self._facts_of_step(list(owners.values()))

    def _facts_of_step(self, optimizers: Sequence[Stepper]) -> Facts:
        before = {
            "clip_grad_norm_": ", ".join(self._clippings) or "not called",
            "the number of backwards since the last step": str(self._num_backwards),
            "how often zero_grad() dropped gradients since the last step": str(self._num_dropped),
        }
        return Facts(before) | facts_of_step(self._params.handles, optimizers, self._scaling, self._state)
