"""Params become managed, trained later on, and ordinary ones again: values move home, and back if a wrap fails."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch

from gemini.config import GeminiConfig
from gemini.errors import BudgetExceeded, GeminiError, human_bytes
from gemini.interrupts import WHOLE, call_without_grad
from gemini.memory.chunks.chunk import Chunk, make_plane
from gemini.memory.store import ChunkStore
from gemini.planning.planes import RuleSpec, factor_bytes, plane_specs, precision_of
from gemini.tiers import Tier
from gemini.train.activations.store import ActivationStore
from gemini.train.modules.saved_weights import SavedWeights
from gemini.train.params.by_name import ByName, owner_of
from gemini.train.params.exposure import Exposure, poison
from gemini.train.params.handle import ParamHandle, ParamSet, find_siblings, handle_of, make_factors, owners


class Adoption:
    """The params of one model change hands. ``is_divided``: whether the rest of each param is on other ranks."""

    def __init__(
        self,
        params: ParamSet,
        store: ChunkStore,
        by_names: ByName,
        exposure: Exposure,
        saved_weights: SavedWeights,
        *,
        is_divided: bool,
    ):
        self._params, self._chunks, self._by_names = params, store.chunks, by_names
        self._exposure, self._saved_weights, self._is_divided = exposure, saved_weights, is_divided
        self._taken = dict[ParamHandle, tuple[torch.dtype, torch.Tensor | None]]()
        self._is_whole = False
        self.becomes_whole = False  # whether params that are slices become whole again at the end, as experts do
        self._values: dict[ParamHandle, torch.Tensor] = {}

    def take_all(self, *, filled: bool = False) -> None:
        """Move the params home one by one; whatever breaks that off, :meth:`give_back` undoes what was done of it.
        ``filled``: the homes hold the values already; such a model has nothing to go back to.
        """
        for index, handles in self._params.by_chunk.items():
            for group in self._by_names.neighbours(handles):
                originals = [handle.param.data for handle in group]
                if not filled:
                    self._by_names.write_first(group, originals)
                with WHOLE:  # one that is half taken could not be given back
                    for handle, original in zip(group, originals, strict=True):
                        self._become_view(handle, original, filled=filled)
            # A chunk at a time: its params are freed before those of the next one are written.
            if self._chunks[index].gathered:
                self._exposure.hide(self._chunks[index])
            else:
                self._exposure.poison(self._chunks[index])
                self._saved_weights.watch(self._chunks[index], handles)
        find_siblings(self._params.handles)
        if filled:
            self.keep()

    def read_back(self) -> None:
        """Read the values that :meth:`give_back` gives, of all params at once. It takes minutes where weights are in
        files, and an error or an interrupt in the middle of it changes nothing: until all are here, none is given.
        """
        read = self._by_names.read_whole if self.becomes_whole else self._by_names.read
        handles = self._params.handles
        self._values = call_without_grad(lambda: {handle: handle.as_it_was(read(handle)) for handle in handles})

    def give_back(self) -> None:
        """Make taken params ordinary ones again: with the values they had, as long as that can be done; once the model
        is whole, with those that :meth:`read_back` has read, on the CPU in the compute dtype.
        """
        if self._is_whole:
            if not self._values:  # a wrap that breaks off
                self.read_back()
            values, self._values = self._values, {}
            for index, handles in self._params.by_chunk.items():
                for handle in handles:
                    _make_ordinary(handle, values.pop(handle))
                    # A view would keep the memory of the chunk.
                    handle.view = torch.empty(0, device="cpu")
                self._chunks[index].clear_planes()  # nobody reads its home any more
        elif not self._is_divided:
            for handle, (dtype, original) in self._taken.items():
                if original is None:
                    original = handle.as_it_was(self._by_names.read(handle, torch.float32).to(dtype))
                _make_ordinary(handle, original)
        else:
            return  # other ranks may be past this point: the model must be made anew
        self._params.handles.clear()  # in place, for others hold the same list

    def keep(self) -> None:
        """The model is whole: there is no way back to what it was."""
        self._taken.clear()
        self._is_whole = True

    def _become_view(self, handle: ParamHandle, original: torch.Tensor, *, filled: bool) -> None:
        """Make a param a view of its chunk, and note what undoing that needs: its dtype is enough, unless it is frozen
        and gets narrower, or float64. Then the original is kept until the model is whole.
        """
        param = handle.param
        if not filled:
            like = torch.empty_like(original, device="meta")  # of a view with gaps: dense, with its order of dims
            handle.layout = () if like.is_contiguous() else like.stride()
        # Its memory goes with that of the value.
        param.grad = None
        param.data = handle.view
        # Behind the change of data: a write by the program is known by a higher number.
        handle.version = param._version
        param._gemini = handle  # type: ignore[attr-defined]
        handle.trained, handle.optimizer = param.requires_grad, owners.get(param, handle.optimizer)
        if handle.trained:
            handle.hook = param.register_post_accumulate_grad_hook(owner_of(handle).backward.hook_of(handle))
        # A trained param has an fp32 master, which has all bits of its original up to fp32.
        narrowed = not handle.chunk.spec.trainable and original.dtype.itemsize > param.dtype.itemsize
        # Param by param: what is given back is what was taken, wherever that breaks off.
        self._taken[handle] = original.dtype, original if narrowed or original.dtype.itemsize > 4 else None


def _make_ordinary(handle: ParamHandle, value: torch.Tensor) -> None:
    param = handle.param
    if handle.hook is not None:
        handle.hook.remove()
    del handle.param._gemini  # type: ignore[attr-defined]
    param.__class__ = handle.kind
    param.data = value


def take_apart(chunks: Iterable[Chunk], handles: Iterable[ParamHandle]) -> None:
    """The model ends: params refuse to be read, and neither they nor a chunk that somebody keeps hold any memory."""
    # A wrap that broke off before it came to a param leaves it to the program.
    handles = [handle for handle in handles if handle_of(handle.param) is handle]
    poison(handles)
    for handle in handles:
        handle.view = torch.empty(0, device="cpu")
        if handle.hook is not None:
            handle.hook.remove()
    for chunk in chunks:
        chunk.clear_planes()
        # Whoever keeps a chunk keeps no memory with it.
        chunk.window = chunk.lender = None
        chunk.on_gone.clear()
        chunk.flat = chunk.face = torch.empty(0, dtype=chunk.flat.dtype, device="cpu")


class TrainedParams:
    """Follows which params of one model are trained."""

    def __init__(
        self, params: ParamSet, store: ChunkStore, activations: ActivationStore, config: GeminiConfig, rule: RuleSpec
    ):
        self._params, self._store, self._activations = params, store, activations
        self._precision, self._gradients, self._rule = config.precision, config.gradients, rule

    def follow(self) -> None:
        """Take up a flip of ``requires_grad``: a param that became trained gets its hook, its chunk what it lacks."""
        # Saved inputs on their way may be in the room that the new planes need.
        self._activations.drain()
        for handle in self._params.handles:
            handle.trained = handle.param.requires_grad
            if handle.trained and handle.hook is None:
                self._make_trainable(handle.chunk)
                handle.hook = handle.param.register_post_accumulate_grad_hook(owner_of(handle).backward.hook_of(handle))

    def _make_trainable(self, chunk: Chunk) -> None:
        """Give a frozen chunk the planes of a trained one, all or none of them."""
        if chunk.trained:
            return
        store, numel, handles = self._store, chunk.weights.numel, self._params.by_chunk[chunk.spec.index]
        # The precision and the rule that the chunk was laid out for.
        rule, precision = self._rule.of(chunk.spec.exact), precision_of(chunk.spec, self._precision)
        self._refuse_untrainable(chunk, precision)
        specs = plane_specs(precision, self._gradients, rule, trainable=True)
        missing = {kind: spec for kind, spec in specs.items() if kind not in chunk.planes}
        tier = self._tier_for(chunk, sum(spec.page_bytes(numel) for spec in missing.values()), rule)
        # Each is reserved before it is allocated, and stays open to the end: what fails gives all of it back. WHOLE is
        # outside of that: behind the first change nothing may be given back any more.
        with WHOLE, ExitStack() as made:
            planes, factors = {}, []
            for kind, spec in missing.items():
                made.enter_context(store.ledger.reserving(tier, spec.page_bytes(numel), kind))
                planes[kind] = make_plane(spec, numel, tier, store.device, store.files)
            for handle in handles:
                num_bytes = factor_bytes(self._rule.factors, tuple(handle.param.shape))
                made.enter_context(store.ledger.reserving(Tier.CPU, num_bytes, "factors"))
                factors.append(make_factors(self._rule, handle.param.shape))
            chunk.change_planes(planes)
            for handle, own in zip(handles, factors, strict=True):
                handle.factors = own
            # Last: a chunk that lacks a plane is frozen still.
            chunk.trained = True

    def _refuse_untrainable(self, chunk: Chunk, precision: str) -> None:
        if precision == "fp16":
            raise GeminiError(
                f"{chunk.name} was frozen when the model was wrapped: in fp16 it has no fp32 master to train. "
                "Set requires_grad before wrapping, or use precision='bf16'"
            )
        if self._rule.whole and chunk.spec.numel > self._store.mover.tile:
            raise GeminiError(
                f"{chunk.name} was frozen when the model was wrapped, and the rule {self._rule.name!r} passes whole "
                "params through staging, which has no room for it: set requires_grad before wrapping"
            )

    def _tier_for(self, chunk: Chunk, num_bytes: int, rule: RuleSpec) -> Tier:
        """The fastest tier below the GPU that has room, or makes it, for what a chunk lacks."""
        store = self._store
        # A rule that is `in_memory` updates whole planes there, and stages nothing from a drive.
        below = [t for t in store.ledger.tiers if t is not Tier.GPU and not (rule.in_memory and t.in_files)]
        # What goes to a drive is staged. As long as nothing is, what stays leaves room for that, if it can.
        staging, make_room = store.mover.staging, store.ledger.make_room
        aside = staging.num_bytes if not staging.is_reserved and any(tier.in_files for tier in below) else 0
        rooms = [(t, aside + (0 if t.in_files else num_bytes)) for t in below]
        rooms += [(t, num_bytes) for t in below if not t.in_files]
        tier = next((t for t, in_memory in rooms if make_room(Tier.CPU, in_memory) and make_room(t, num_bytes)), None)
        if tier is None:
            raise BudgetExceeded(
                f"{chunk.name} became trained after wrapping and needs {human_bytes(num_bytes)} for gradients and "
                "optimizer states, which no tier has (a drive only beside room for staging on the cpu): set "
                "requires_grad before wrapping, or raise a budget"
            )
        if tier.in_files:
            staging.reserve()
        return tier
