"""Once per step: gradients and what is about to be done with them become the same thing on every rank.

settle         sums across replicas, and every param's part of the norm from every rank
agree_on_step  all ranks are about to update the same params with the same hyperparameters

Of its shard each rank has the sum of one replica, and needs that of all: once per step, before the norm; with updates
inside backward, before each of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch

from gemini import kernels
from gemini.errors import GeminiError, RankMismatch
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.movement.mover import tiles
from gemini.planning.planes import GRAD, GRAD_ERROR
from gemini.ranks.agree import Facts, Point, agree, plain, tell
from gemini.ranks.wire import Tag, Wire
from gemini.train.gradients.scaling import Scaling
from gemini.train.params.handle import ParamHandle, Stepper, handles_of, owners_of
from gemini.train.sharding.shards import Shards
from gemini.train.step import StepState
from gemini.train.update.sinks import GradientSink

_BACKWARDS = "the number of backwards since the last step"


def facts_of_gradients(handles: Sequence[ParamHandle]) -> Facts:
    """State which params have a gradient."""
    names = [handle.name for handle in handles]
    return Facts({"the gradient": array("b", [handle.has_grad for handle in handles])}, names)


def facts_of_step(
    handles: Sequence[ParamHandle], optimizers: Iterable[Stepper], scaling: Scaling, state: StepState
) -> Facts:
    """State all that an update by these optimizers depends on, but the gradients and how they came."""
    values: dict[str, str] = {}
    groups: dict[str, int] = {}
    number, optimizers = 0, list(optimizers)
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


class StepSync(GradientSink):
    """The step under way, as far as the ranks of a model have told each other; has the parts of the sink ``into``."""

    def __init__(self, shards: Shards, into: GradientSink):
        of = into.params, into.store, into.state, into.updates, into.gradients, into.scaling
        super().__init__(*of, transient=into.transient)
        self._shards, self._ranks, self._mover = shards, shards.ranks, into.store.mover
        self.has_replicas = self._ranks.num_replicas > 1
        self.is_done = False
        """Whether gradients are the same thing on every rank: every rank knows their norms."""
        self._clippings: list[str] = []
        """The calls of ``clip_grad_norm_`` of this step; one without a limit only looks at the norm."""
        self._num_dropped = 0
        """How often gradients were dropped since the last step (``zero_grad``)."""
        self._num_backwards = 0
        """Since the last step, outside of ``no_sync``."""
        # Other ranks of ep have other experts: what all of their tokens gave these has come with backward, and is
        # added up among those that have the same ones.
        self._wires: dict[int, Wire] = {}
        for index, handles in self.params.by_chunk.items():
            are_experts = self._ranks.experts.size > 1 and any(handle.cut is not None for handle in handles)
            across = self._ranks.copies if are_experts else self._ranks.replicas
            if across.size > 1:
                self._wires[index] = across
        self._summed: set[int] = set()
        """Chunks whose gradients were added up over replicas, or have been dropped since."""

    # ---- what has happened since the last step ----------------------------------------------------------------------

    def gradient_arrives(self) -> None:
        """Take up a gradient of a further backward; with replicas it may not come after the sums across them."""
        if self._summed:
            if any(map(self._is_summed, self._summed)):
                raise GeminiError("a backward after clip_grad_norm_: clip after the last backward of a step")
            self._summed.clear()  # they were dropped; once, before sums land behind backward
        self.undo()

    def _is_summed(self, index: int) -> bool:
        return index in self._summed and any(handle.has_grad for handle in self.params.by_chunk[index])

    def backward_ended(self, *, is_alike: bool) -> None:
        """Count a backward outside of ``no_sync``; ``is_alike``: it followed its script to the end."""
        # Ranks compare it: one that made a backward more has other sums.
        self._num_backwards += 1
        if not is_alike:
            self.undo()  # nobody had a gradient

    def discard(self, handles: Sequence[ParamHandle]) -> None:
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

    def end_step(self) -> None:
        """Note that an optimizer step is over, skipped or made."""
        self._clippings.clear()
        self._num_dropped = self._num_backwards = 0
        if not self.has_gradients:
            self.is_done = False
            self._summed.clear()

    # ---- the same gradients and norms on every rank -----------------------------------------------------------------

    def end_script(self, *, has_all: bool) -> bool:
        """End a backward that followed its script: ranks tell each other whether it is over, what they have, and its
        norms. ``has_all``: this one has nothing else of this backward to reduce. True if that holds for all of them.
        """
        handles = self.params.handles
        checksum = facts_of_gradients(handles).checksum
        # In the message that ends the script, so that the norm costs no wait of its own. With replicas it comes once
        # these have been added up.
        norms = [] if self.has_replicas else self._own_norms()
        said = [has_all and not self.state.num_unreduced, checksum, *norms]
        own = torch.tensor(said, dtype=torch.float64, device="cpu")
        rows = self._ranks.wire.swap(Tag.AGREEMENT, own, "the end of a backward and the gradient norm")
        # Some rank has more to reduce: these norms are not those of whole gradients.
        if not rows[:, 0].all():
            return False
        if not self.has_replicas and bool((rows[:, 1] == checksum).all()):
            self._take_norms(rows[:, 2:])
        return True

    def settle(self) -> None:
        """Make the gradients of a step the same thing on every rank: once per step, before the norm or the update.
        Raises RankMismatch, on every rank, if ranks have other gradients, or one of them has dropped some.
        """
        if self.is_done:
            return
        if self.state.num_unreduced:
            raise GeminiError(
                "optimizer.step() or clip_grad_norm_ after a backward inside no_sync(), or one that failed: the last "
                "backward of a step must be outside of no_sync(), so that gradients are reduced. zero_grad() drops them"
            )
        gradients = facts_of_gradients(self.params.handles)
        # Before replicas are added up: what is missing would be zeros in the sum, and noticed by nobody. They may have
        # other gradients until here, of as many backwards.
        said = self._shards.meet_all(Point.SYNC_GRADS, gradients.checksum << 8 | self._num_backwards % 256)
        if any(len(set(row)) > 1 for row in said) or len({detail % 256 for row in said for detail in row}) > 1:
            facts = Facts({_BACKWARDS: str(self._num_backwards)}) | gradients
            tell(self._ranks.everyone, "clip_grad_norm_ or optimizer.step()", facts)
        self._sum_over_replicas()
        norms = torch.tensor(self._own_norms(), dtype=torch.float64, device="cpu")
        self._take_norms(self._ranks.wire.swap(Tag.AGREEMENT, norms, "the gradient norm"))

    def _own_norms(self) -> list[float]:
        """Sum up the squares of this rank's part of every param's gradient; 0 where there is none."""
        return kernels.totals([handle.norm_sums or [] for handle in self.params.handles])

    def _take_norms(self, rows: torch.Tensor) -> None:
        """Take over what all ranks say of it: ranks x params."""
        for handle, parts in zip(self.params.handles, rows.T.tolist(), strict=True):
            if handle.has_grad:
                handle.norm_sums = parts
        self.is_done = True

    def undo(self) -> None:
        """Go back to this rank's part of a norm that all ranks know, for a backward after ``clip_grad_norm_``."""
        if not self.is_done:
            return
        for handle in self.params.handles:
            if handle.norm_sums is not None:
                handle.norm_sums = handle.norm_sums[self._ranks.rank : self._ranks.rank + 1]
        self.is_done = False

    def agree_on_step(self, optimizer: Stepper) -> None:
        """``optimizer.step()`` is about to update params: all ranks come here, and must be about to do the same."""
        self.settle()
        # Gradients first: where they differ, that is what an error should name.
        facts = facts_of_gradients(self.params.handles) | self._facts_of_step([optimizer])
        self._shards.agree(Point.STEP, "optimizer.step()", lambda: facts)

    def facts_of_updates(self) -> Facts:
        """Collect all that updates inside backward depend on."""
        # The optimizers of the params, in the order of the model.
        return self._facts_of_step(owners_of(self.params.handles))

    def _facts_of_step(self, optimizers: Iterable[Stepper]) -> Facts:
        before = {
            "clip_grad_norm_": ", ".join(self._clippings) or "not called",
            _BACKWARDS: str(self._num_backwards),
            "how often zero_grad() dropped gradients since the last step": str(self._num_dropped),
        }
        return Facts(before) | facts_of_step(self.params.handles, optimizers, self.scaling, self.state)

    # ---- replicas ---------------------------------------------------------------------------------------------------

    def sum_now(self, chunk: Chunk, section: torch.Tensor, present: Sequence[ParamHandle], plan: int) -> None:
        """Add up gradients that are about to be used, and are kept nowhere: ``section``, this rank's shard, becomes the
        sum over replicas. ``present`` have a gradient in it, and ``plan`` is the checksum of what updates depend on:
        raises RankMismatch, on every rank, if they are others on a replica.
        """
        names = [handle.name for handle in present]
        facts = Facts({"the chunk": chunk.spec.index, "the gradients in it": names, "the hyperparameters": plan})
        # Not as other agreements: a replica that stands elsewhere says more there.
        agree(self._ranks.replicas, f"the update of {chunk.name} inside backward", lambda: facts, tag=Tag.HEADER)
        across = self._wires.get(chunk.spec.index)
        if across is None:
            return
        for start, stop in tiles(0, section.numel(), self._shards.replica_scratch.numel() // 8):
            tile = section[start:stop].cpu()
            across.all_reduce(Tag.ALL_REDUCE, tile, self._shards.replica_scratch, f"the all-reduce of {chunk.name}")
            if tile.data_ptr() != section[start:stop].data_ptr():
                section[start:stop].copy_(tile)

    def _sum_over_replicas(self) -> None:
        """Add up what was not, chunk by chunk in the order of the layout. Raises RankMismatch, on every rank, if some
        have dropped what others have added up.
        """
        if not self.has_replicas:
            return
        summed = [self._is_summed(index) for index in self._wires]
        flags = [handle.has_grad for handle in self.params.handles]
        said = torch.tensor([*summed, *flags], dtype=torch.uint8, device="cpu")
        rows = self._ranks.replicas.swap(Tag.AGREEMENT, said, "comparing gradients across replicas")
        anywhere = rows[:, len(summed) :].any(0).tolist()
        with_grad = {handle.name for handle, is_there in zip(self.params.handles, anywhere, strict=True) if is_there}
        for index, column in zip(self._wires, rows[:, : len(summed)].T.tolist(), strict=True):
            chunk = self.store.chunks[index]
            # Sums of all and of one cannot be added up any more: one of them would count twice.
            if len(set(column)) > 1:
                raise RankMismatch(
                    f"the gradients of {chunk.name} were added up over the replicas of this model, and one of them "
                    "has dropped or replaced its own since. Every rank must make the same backwards and zero_grad() "
                    "the same gradients"
                )
            handles = [handle for handle in self.params.by_chunk[index] if handle.name in with_grad]
            if handles and not column[0]:
                self._add_up(chunk, handles)
                self._summed.add(index)

    def _add_up(self, chunk: Chunk, handles: Sequence[ParamHandle]) -> None:
        """This rank's shard of the gradients of a chunk, of which some replica has these, becomes the sum."""
        plane, scratch, across = chunk.planes[GRAD], self._shards.replica_scratch, self._wires[chunk.spec.index]
        absent = [handle for handle in handles if not handle.has_grad]
        sums: dict[str, kernels.Sums] = {handle.name: [] for handle in handles}
        for start, stop in tiles(0, plane.numel, min(self._mover.tile, scratch.numel() // 8)):
            tile, is_staged = self._mover.host_tile(1, plane, start, stop)
            # Other replicas have these gradients; this one adds zeros, and has them from here on.
            for handle in absent:
                tile[max(handle.part.start - start, 0) : max(handle.part.stop - start, 0)].zero_()
            across.all_reduce(Tag.ALL_REDUCE, tile, scratch, f"the all-reduce of {chunk.name}")
            if is_staged:
                self._mover.store(plane, start, stop, tile)
            for handle in handles:
                first, last = max(handle.part.start, start), min(handle.part.stop, stop)
                if first < last:
                    sums[handle.name] += kernels.sum_squares(tile[first - start : last - start])
        if GRAD_ERROR in chunk.planes:
            # The error of rounding was of this replica's part, which is in the sum now.
            error = chunk.planes[GRAD_ERROR]
            for start, stop in tiles(0, error.numel, self._mover.tile):
                tile, is_staged = self._mover.host_tile(1, error, start, stop)
                tile.zero_()
                if is_staged:
                    self._mover.store(error, start, stop, tile)
        for handle in handles:
            handle.norm_sums = sums[handle.name]
