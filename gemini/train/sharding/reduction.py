"""Gradients of all ranks: whole on each rank until their chunk is complete, then each rank's shard of the sum.

    take           a param's gradient into the whole gradient of its chunk, divided by the number of ranks
    reduce         once complete on every rank: each rank receives and adds up its shard, and lands it: reduce-scatter
    settle         once per step: sums across replicas, and every param's part of the norm from every rank
    agree_on_step  all ranks are about to update the same params with the same hyperparameters

Whole gradients are in the ledger as "gradients in flight". Where there is no room for another one, those that are open
are reduced before they are complete; a param's gradient still arrives once, so this changes no sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import torch

from gemini import kernels
from gemini.errors import BudgetExceeded, GeminiError
from gemini.ledger import NEEDED, Turn, Want
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import Window
from gemini.memory.movement.mover import Working
from gemini.memory.movement.transfers import Job, Lane
from gemini.patches import replaced
from gemini.planning.planes import GRAD
from gemini.planning.timeline import Track
from gemini.ranks.agree import Facts, Point, Request, tell
from gemini.ranks.wire import Tag
from gemini.train.gradients.homes import adds_up
from gemini.train.params.handle import Leftover, ParamHandle, Stepper, owners_of, stepping_in_backward
from gemini.train.sharding.facts import facts_of_gradients, facts_of_step
from gemini.train.sharding.replicas import Replicas
from gemini.train.sharding.scripted import ScriptedStep
from gemini.train.sharding.shards import Shards
from gemini.train.update.sinks import GradientSink

_HOLDER = "gradients in flight"
_PLAN = 8
"""The bit in the detail of a request from which on it says what a rank is about to update inside backward."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BACKWARDS = "the number of backwards since the last step"


class _WholeGradient:
    """The gradient of a whole chunk as this rank computed it, until it is reduced."""

    def __init__(self, window: Window, dtype: torch.dtype):
        self.window = window
        self.flat = window.bytes[: window.num_bytes].view(dtype)
        self.arrived: set[str] = set()
        self.is_reduced = False


class _Landing(NamedTuple):
    """A reduction as the training thread leaves it to whoever lands it, perhaps when another backward has begun."""

    chunk: Chunk
    handles: list[ParamHandle]  # of the gradients that arrive
    adding: dict[str, bool]  # by param of the chunk, whether its plane has a gradient
    flat: torch.Tensor | None  # this rank's whole gradient, if it has any
    senders: Mapping[int, torch.dtype]  # the ranks that have one, and its dtype there


class Reduction(GradientSink):
    """The gradients of a model that is shared with other ranks. ``dtype``: in which they are added up, unless their
    params stay in fp32. ``room``: bytes of the computing tier for whole gradients.
    """

    divides = True

    def __init__(self, shards: Shards, into: GradientSink, *, dtype: torch.dtype, room: int):
        of = into.params, into.store, into.state, into.updates, into.gradients, into.scaling
        super().__init__(*of, transient=into.transient)
        store = self.store
        self.reduces = True
        """Whether gradients that are complete are reduced now; False inside ``no_sync``."""
        self._shards, self._ranks, self._channel = shards, shards.ranks, shards.channel
        self._device, self._manager, self._mover = store.device, store.manager, store.mover

        # Whole gradients: those that are open, by chunk, the dtype and the share of the mean that each rank gives, and
        # the bytes that all of them may take.
        self._whole: dict[int, _WholeGradient] = {}
        self._dtype = dtype
        self._scale = 1.0 / (self._ranks.wire.size * self._ranks.replicas.size)
        self._room = room
        # Windows of gradients that were reduced, without memory, by their bytes.
        self._spare: dict[int, list[Window]] = {}

        # Behind backward: the reductions by chunk, the first one is over first; what sums go through to planes that the
        # device does not see, and what the next backward is expected to complete.
        self._behind: dict[int, Job] = {}
        self._staging = store.transfers.staging.get(Lane.REDUCE)
        grads = [chunk.planes[GRAD] for chunk in store.chunks if GRAD in chunk.planes]
        self._needs_staging = any(plane.device_view(0, 0) is None for plane in grads)
        # In which moments chunks became complete in the backward of that number, and in the one that ended before it;
        # and the chunks of which the ranks have not had all gradients.
        self._moments: dict[int, int] = {}
        self._moments_of = 0
        self._moments_before: dict[int, int] = {}
        self._partial: set[int] = set()

        # Inside backward: its number, and the checksum of what its updates depend on, once the first is planned.
        self._plan = (-1, 0)

        # The step under way, as far as the ranks have told each other.
        self.has_replicas = self._ranks.replicas.size > 1
        self._replicas = Replicas(shards, store)
        self.is_done = False
        """Whether gradients are the same thing on every rank: every rank knows their norms."""
        self._clippings: list[str] = []
        """The calls of ``clip_grad_norm_`` of this step; one without a limit only looks at the norm."""
        self._num_dropped = 0
        """How often gradients were dropped since the last step (``zero_grad``)."""
        self._num_backwards = 0
        """Since the last step, outside of ``no_sync``."""

        # Last: from here on others call this.
        shards.reducing = self
        store.ledger.register(Turn.SUMS, self._reduce_early, store.device.tier)
        store.ledger.register_claim(store.device.tier, self.missing)
        store.ledger.register_remark("windows", self.explain)

    def take(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Keep a param's gradient, divided by the number of ranks, until that of its chunk is complete."""
        chunk = handle.chunk
        self.gradient_arrives()
        # Its whole gradient is on the wire: what arrives now must not change it.
        while chunk.spec.index in self._behind:  # a param that arrives once more
            self._wait_for_first()
        whole = self._whole.get(chunk.spec.index)
        if whole is None:
            whole = self._open(chunk)
        view = whole.flat[handle.slot.start : handle.slot.stop]
        flat = grad.detach().contiguous().view(-1)
        # A param that several modules share arrives several times in one backward.
        if handle.name in whole.arrived:
            view.add_(flat, alpha=self._scale)
        else:
            torch.mul(flat, self._scale, out=view) if view.dtype == flat.dtype else view.copy_(flat).mul_(self._scale)
            whole.arrived.add(handle.name)

    def complete(self, chunk: Chunk) -> None:
        """Begin or await the reduction of a chunk, every gradient of which has arrived on this rank."""
        index, moment = chunk.spec.index, self._manager.foresight.place
        if self._moments_of != self.state.backward_number:  # what broke off before it ended is none of this one
            self._moments, self._moments_of = {}, self.state.backward_number
        if moment is not None:
            self._moments[index] = moment
        if not self.reduces:
            return
        step = self._shards.step
        if step is None or step.is_parted:
            self._reduce(index)
            return
        # In the script's order, in which chunks need not become complete: what is early waits for its turn.
        while (following := step.next_reduction) in self._moments and following in self._whole:
            if not self._is_full(following):
                return
            self._begin(step, following)
        if stepping_in_backward:
            self.leave_script()  # sums that are there may be used

    def end_backward(self) -> None:
        """The backward is over: reduce what was left incomplete, then wait until it is over on every rank."""
        # First: until the script is over on all ranks its messages come before any question.
        is_alike = self._shards.finish(at_end=True)
        if self._moments:
            self._moments_before, self._moments = self._moments, {}
        if self.reduces:
            # From the end of the layout, as all ranks do: which of them are open may differ between ranks.
            for index in sorted(self._whole, reverse=True):
                self._reduce(index)
            # A script that all have followed to its end has said all that this would ask.
            if not is_alike:
                self._check_plans(self._shards.meet(Point.END_BACKWARD, self._planned() << _PLAN))
            # Compared: a rank that made a backward more outside of ``no_sync`` has other sums.
            self._num_backwards += 1
            if not is_alike:
                self.undo()  # nobody had a gradient
        super().end_backward()

    def _reduce(self, index: int) -> None:
        dtype = _DTYPES.index(self._whole[index].flat.dtype)
        detail = int(self._is_full(index)) | dtype << 1 | self._planned() << _PLAN
        self._shards.reach(Request(Point.REDUCE, index, detail))

    def _is_full(self, index: int) -> bool:
        """Whether this rank has the gradients of all params of a chunk."""
        handles = self.params.by_chunk[index]
        return len(self._whole[index].arrived) == sum(handle.trained for handle in handles) == len(handles)

    # ---- behind backward ----------------------------------------------------------------------------------------

    def completed(self) -> Mapping[int, int] | None:
        """The chunks that the next backward reduces behind it, as the last one has them; None if it cannot."""
        if not self.reduces:
            return {}
        if self.transient or (self._staging is None and self._needs_staging):
            return None
        trained = {index for index, own in self.params.by_chunk.items() if all(handle.trained for handle in own)}
        known = trained - self._partial
        return {index: moment for index, moment in self._moments_before.items() if index in known}

    def _begin(self, step: ScriptedStep, index: int) -> None:
        """Reduce a chunk behind backward: it is its turn, and this rank has all of its gradients."""
        chunk = self.store.chunks[index]
        handles = self.params.by_chunk[index]
        # Now, on the training thread: the worker lands it later, when another backward may have begun.
        adding = {handle.name: handle.has_grad for handle in handles}
        if any(adding.values()) and not adds_up(chunk):
            step.part()  # sums need another plane first, for which room is made here only
            return
        chunk.settle()
        whole = self._whole[index]
        # All ranks bring the same dtype, or the script ends here.
        dtype = whole.flat.dtype
        landing = _Landing(chunk, handles, adding, whole.flat, dict.fromkeys(range(self._ranks.wire.size), dtype))
        working = Working(self._mover.watch.moved, self._staging)

        def add_up() -> None:  # runs on the landing worker
            with self._mover.working(working):
                self._land_sums(landing, is_launched=True)
            whole.is_reduced = True

        # What computes the gradient is on the device still: the collective comes behind it.
        launch = partial(self._channel.launch_reduce, chunk, whole.flat, self._device.mark())
        self._behind[index] = step.reduce(1 + _DTYPES.index(dtype), add_up, launch)

    def _wait_for_first(self) -> None:
        """Wait until the first reduction behind backward is over, or will not be."""
        index, job = next(iter(self._behind.items()))
        if self._shards.step is not None:
            self._shards.step.before_waiting_for(job)
        with self._mover.about(Track.REDUCE.value, f"wait for chunk {index}", index):
            job.wait_until_over()
        self.leave_script()

    def leave_script(self) -> None:
        """Give the memory of gradients back that were reduced. Those that were not, because a rank has parted, stay."""
        for index, job in list(self._behind.items()):
            if not job.is_complete():
                return
            del self._behind[index]
            # Before the error of the job is raised: memory of what was reduced goes back in any case.
            is_reduced = self._whole[index].is_reduced
            if is_reduced:
                self._close(index)
            job.wait()
            if is_reduced:
                self.use_landed(self.store.chunks[index])

    def missing(self) -> int:
        """Bytes of the computing tier that fetches ahead leave to whole gradients."""
        if self._shards.step is None:
            return 0
        return max(self._room - self._manager.room.ledger.held(self._device.tier, _HOLDER), 0)

    def _planned(self) -> int:
        """The checksum of all that updates inside this backward depend on; 0 if there are none."""
        if not self.transient:
            return 0
        # Once per backward, before its first update: all ranks must mean the same moment.
        backward = self.state.backward_number
        if self._plan[0] != backward:  # counters change with the first update
            self._plan = backward, self._facts_of_updates(owners_of(self.params.handles)).checksum
        return self._plan[1]

    def _check_plans(self, details: list[int]) -> None:
        """Refuse updates inside backward that ranks disagree about, before the first of them."""
        if len({detail >> _PLAN for detail in details}) > 1:
            facts = self._facts_of_updates(owners_of(self.params.handles))
            tell(self._ranks.everyone, "the updates inside backward", facts)

    def reduce(self, index: int, requests: list[Request]) -> None:
        """Add up chunk ``index`` on all ranks: each receives its shard of the sum and lands it."""
        chunk = self.store.chunks[index]
        chunk.settle()  # a guess that was made of less
        self._check_plans([request.detail for request in requests])
        self.undo()  # norms that all ranks knew are those of other gradients now
        handles, whole = self.params.by_chunk[index], self._whole.get(index)
        arrived, dtypes = self._who_has_what(index, requests, whole, handles)
        (self._partial.discard if arrived.all() else self._partial.add)(index)
        present = [handle for number, handle in enumerate(handles) if arrived[:, number].any()]
        senders = {rank: dtypes[rank] for rank in range(self._ranks.wire.size) if arrived[rank].any()}
        if any(handle.has_grad for handle in present):
            self.gradients.homes.promote([chunk])
        transient = self.transient
        if whole is None and (transient or self._channel.needs_all):
            # Others wait in this reduction: no other one may be begun to make room for it.
            whole = self._open(chunk, NEEDED)
        if whole is not None:
            for handle in handles:
                if handle.name not in whole.arrived:
                    # Another rank has this gradient: here it is zero, and not what the memory held before.
                    whole.flat[handle.slot.start : handle.slot.stop].zero_()
        flat = None if whole is None else whole.flat
        if transient:
            assert flat is not None
            self._use(chunk, present, flat, senders)
        else:
            adding = {handle.name: handle.has_grad for handle in handles}
            self._land_sums(_Landing(chunk, present, adding, flat, senders))
        if whole is not None:
            self._close(index)
        if arrived.all():
            self.use_landed(chunk)

    def _who_has_what(
        self, index: int, requests: list[Request], whole: _WholeGradient | None, handles: list[ParamHandle]
    ) -> tuple[torch.Tensor, list[torch.dtype]]:
        """Find out which gradients of a chunk each rank has (ranks x params), and in which dtype."""
        if all(request.subject == (Point.REDUCE, index) and request.detail & 1 for request in requests):
            everything = torch.ones((self._ranks.wire.size, len(handles)), dtype=torch.bool, device="cpu")
            return everything, [_DTYPES[(request.detail & (1 << _PLAN) - 1) >> 1] for request in requests]
        names = set() if whole is None else whole.arrived
        dtype = self._dtype_of(self.store.chunks[index]) if whole is None else whole.flat.dtype
        own = torch.tensor([_DTYPES.index(dtype), *(handle.name in names for handle in handles)], dtype=torch.uint8)
        rows = self._ranks.wire.swap(Tag.AGREEMENT, own, "comparing which gradients there are")
        return rows[:, 1:].bool(), [_DTYPES[int(row[0])] for row in rows]

    def _land_sums(self, landing: _Landing, *, is_launched: bool = False) -> None:
        """Add up the gradients of a chunk, and keep this rank's shard of the sum."""
        chunk, failure = landing.chunk, None
        if not any(landing.adding.values()):
            self._replicas.summed.discard(chunk.spec.index)
        for handle in landing.handles:
            self.gradients.apply_clip(handle)
            handle.norm_sums = []
        with self._channel.during(Track.REDUCE, chunk):
            for piece in self._channel.sums(chunk, landing.flat, landing.senders, is_launched=is_launched):
                # After a failure the rest is taken all the same: the others must get what they wait for.
                if failure is None:
                    try:
                        self._land(landing, *piece)
                    except Exception as e:
                        failure = e
        if failure is not None:
            raise failure

    def _land(self, landing: _Landing, start: int, stop: int, total: torch.Tensor) -> None:
        """Keep a piece of the sum: elements ``[start, stop)`` of this rank's shard."""
        chunk = landing.chunk
        dtype = chunk.planes[GRAD].dtype
        rounded = total if total.dtype == dtype or adds_up(chunk) else total.to(dtype)
        for handle in landing.handles:
            first, last = max(handle.part.start, start), min(handle.part.stop, stop)
            if first < last:
                piece = rounded[first - start : last - start]
                sums = self.gradients.land_piece(chunk, piece, first, landing.adding[handle.name])
                assert handle.norm_sums is not None
                handle.norm_sums += sums

    def _use(
        self, chunk: Chunk, handles: list[ParamHandle], flat: torch.Tensor, senders: Mapping[int, torch.dtype]
    ) -> None:
        """``gradients="transient"``: add up into this rank's section of the whole gradient, and update with that."""
        section = flat.chunk(self._ranks.wire.size)[self._ranks.wire.rank]
        for handle in handles:
            self.gradients.apply_clip(handle)
            handle.norm_sums = None
        with self._channel.during(Track.REDUCE, chunk):
            for start, stop, total in self._channel.sums(chunk, flat, senders):
                section[start:stop].copy_(total)
        if self.has_replicas:
            self._replicas.sum_now(chunk, section, handles, self._planned())
        for handle in handles:
            self.use(handle, section[handle.part.start : handle.part.stop])
        self.updates.complete(chunk, now=True)  # the whole gradient makes room for the next one

    def _dtype_of(self, chunk: Chunk) -> torch.dtype:
        return torch.float32 if chunk.spec.fp32 else self._dtype

    def _open(self, chunk: Chunk, asking: frozenset[Turn] = NEEDED | {Turn.SUMS}) -> _WholeGradient:
        """Memory for the gradient of a whole chunk; without room, others are reduced before they are complete."""
        # Micro-batches inside no_sync are added up here, in fp32.
        dtype = self._dtype_of(chunk) if self.reduces else torch.float32
        num_bytes = chunk.spec.numel * dtype.itemsize
        # Windows of one size are used again: their address space stays reserved.
        spare = self._spare.setdefault(num_bytes, [])
        window = spare.pop() if spare else self._device.make_window(num_bytes)
        while self._behind and self._manager.room.ledger.held(self._device.tier, _HOLDER) + num_bytes > self._room:
            self._wait_for_first()
        try:
            self._manager.room.populate(window, _HOLDER, what=f"the gradient of {chunk.name}", asking=asking)
        except BudgetExceeded as e:
            spare.append(window)
            if self.reduces:
                raise
            raise self.explain(e) from e
        whole = _WholeGradient(window, dtype)
        self._whole[chunk.spec.index] = whole
        self.state.num_unreduced += 1
        return whole

    def _reduce_early(self, want: Want) -> bool:
        """Reduce a gradient before it is complete, for the next one; False if none may be, or there is none."""
        if not self.reduces or not (self._behind or self._whole):
            return False
        if self._behind:
            self._wait_for_first()
        else:
            self._reduce(max(self._whole))
        return True

    def explain(self, error: BudgetExceeded) -> BudgetExceeded:
        """Say more of missing room inside ``no_sync``: whole gradients may be what takes it."""
        if self.reduces:
            return error
        return BudgetExceeded(
            f"{error}. Inside no_sync() whole gradients are kept on every rank, 4 bytes per param: leave it "
            "out (gradients are then divided after each backward) or raise the budget"
        )

    def _close(self, index: int) -> None:
        window = self._whole.pop(index).window
        self.state.num_unreduced -= 1
        self._manager.room.depopulate(window, _HOLDER)
        self._spare.setdefault(window.num_bytes, []).append(window)

    def discard(self, handles: Sequence[ParamHandle]) -> None:
        """Forget gradients that were not reduced (``zero_grad``); those that were are forgotten next."""
        if self._behind:
            self._shards.finish()
        self._num_dropped += any(handle.has_grad for handle in handles)
        self._clippings.clear()  # what was clipped is gone too
        for handle in handles:
            whole = self._whole.get(handle.chunk.spec.index)
            if whole is not None and handle.name in whole.arrived:
                whole.arrived.remove(handle.name)
                handle.leftover = Leftover.USED  # until what takes its place is known
                if not whole.arrived:
                    self._close(handle.chunk.spec.index)

    def without_reducing(self) -> AbstractContextManager[None]:
        return replaced(self, "reduces", False)

    # ---- what has happened since the last step ----------------------------------------------------------------------

    def gradient_arrives(self) -> None:
        """Take up a gradient of a further backward; with replicas it may not come after the sums across them."""
        if self._replicas.summed:
            self._replicas.refuse_more()
        self.undo()

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
            self._replicas.summed.clear()

    # ---- the same gradients and norms on every rank -----------------------------------------------------------------

    def end_script(self, *, has_all: bool) -> bool:
        """End a backward that followed its script: ranks tell each other whether it is over, what they have, and its
        norms. ``has_all``: this one has nothing else of this backward to reduce. True if that holds for all of them.
        """
        checksum = facts_of_gradients(self.params.handles).checksum
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
        if self.has_replicas:
            self._replicas.sum_all()
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
                handle.norm_sums = handle.norm_sums[self._ranks.wire.rank : self._ranks.wire.rank + 1]
        self.is_done = False

    def agree_on_step(self, optimizer: Stepper) -> None:
        """``optimizer.step()`` is about to update params: all ranks come here, and must be about to do the same."""
        self.settle()
        # Gradients first: where they differ, that is what an error should name.
        facts = facts_of_gradients(self.params.handles) | self._facts_of_updates([optimizer])
        self._shards.agree(Point.STEP, "optimizer.step()", lambda: facts)

    def _facts_of_updates(self, optimizers: Sequence[Stepper]) -> Facts:
        before = {
            "clip_grad_norm_": ", ".join(self._clippings) or "not called",
            _BACKWARDS: str(self._num_backwards),
            "how often zero_grad() dropped gradients since the last step": str(self._num_dropped),
        }
        return Facts(before) | facts_of_step(self.params.handles, optimizers, self.scaling, self.state)
