"""Gradients between backward and update: landed in the grad plane as they arrive, with their norm in the same pass.

Sums of squares are made on the way, over fixed tiles, so the same bits come out wherever the plane lives.

    within reach     the plane is where modules compute: copied or added there, at once
    straight         it leaves the device as it is: summed up there, and one copy into its plane that nobody waits for
    through staging  the host has to add it, or to write a file: tile by tile on a worker, the next tiles on their way

What leaves the device keeps its bytes there in the ledger until it has landed, or until others need them and the
device comes behind the copy. Backward waits for none of it: an update takes the events of its chunk's landings along,
sums that the host makes are waited for by whoever asks for a norm. Sums of a CUDA kernel come to the host all at once,
when somebody asks first.
"""

from __future__ import annotations

import contextlib
from collections import deque
from functools import partial
from typing import NamedTuple, NoReturn

import torch

from gemini import kernels
from gemini.errors import GeminiError
from gemini.interrupts import WHOLE
from gemini.ledger import WELCOME, Turn, Want
from gemini.memory.chunks.chunk import Chunk, Plane
from gemini.memory.devices.device import DONE, Event
from gemini.memory.movement.mover import Mover, StagingSet, Working, tiles
from gemini.memory.movement.transfers import Held, Lane, Transfer
from gemini.memory.store import ChunkStore
from gemini.planning.planes import GRAD, GRAD_ERROR, GRADS
from gemini.ranks.wire import Tag, Wire
from gemini.tiers import Tier
from gemini.train.gradients.homes import WAIT_FOR_LANDING, GradientHomes, adds_up
from gemini.train.gradients.norms import GradientNorms
from gemini.train.params.by_name import read_range
from gemini.train.params.handle import Leftover, ParamHandle, ParamSet

HOLDER = "gradients in flight"

_LANDING = WELCOME | {Turn.LANDINGS}
"""Asked for gradients that wait for their landing: windows that are fetched again anyway, and those before them."""


def refuse_grad(handle: ParamHandle, grad: torch.Tensor) -> NoReturn:
    """Refuse a gradient with a graph of its own, a sparse one, and one of another dtype than the param's."""
    if grad.requires_grad:
        raise GeminiError(
            f"the gradient of {handle.name!r} was asked for with create_graph=True: it goes into a chunk, where it "
            "cannot be differentiated again. Leave create_graph out here (gradients of inputs may have it), or use an "
            "unwrapped model"
        )
    if grad.layout is not torch.strided:
        raise GeminiError(f"{handle.name!r} has a sparse gradient: build its module with sparse=False")
    raise GeminiError(
        f"the gradient of {handle.name!r} is {grad.dtype}, its weights are {handle.view.dtype}: the model changed the "
        "dtype of this param inside forward (module.to(...)). Keep it so with GeminiConfig(keep_fp32=[its name]), use "
        "precision='fp32', or cast the inputs of that module instead of its params"
    )


class _Straight(Transfer):
    """A gradient on its way home by one copy, begun on ``stream``. The device reads ``grad`` until that is over."""

    def __init__(self, chunk: Chunk, grad: torch.Tensor, held: Held, stream: int):
        super().__init__(Lane.LANDING, of=chunk)
        self.grad, self.held, self.stream = [grad], held, stream

    def give_back(self) -> None:
        # The memory before its bytes: who finds these free allocates.
        self.grad.clear()
        super().give_back()

    def give_way(self) -> None:
        """Let what is computed from here on come behind the copy, and have the memory, which no other stream gets."""
        with WHOLE:
            self.copies.wait_on_device()
            self.give_back()


class _GradPlace(NamedTuple):
    """The place of a param's gradient in the planes of its chunk: one of ``view`` and ``home``, or through staging."""

    view: torch.Tensor | None = None  # in the plane, where the device computes with it
    lost: torch.Tensor | None = None  # what rounding a sum to view loses, where that is kept
    home: torch.Tensor | None = None
    """In the plane, where the device copies to it and what leaves the device is just what it holds."""


class GradientStore:
    """The grad planes of one engine. Called by the training thread, or by the one that runs its backward;
    ``land_piece`` and what it calls also run on the landing lane's.
    """

    def __init__(self, handles: list[ParamHandle], store: ChunkStore, norms: GradientNorms, *, working_set: int):
        """``norms``: of these gradients. ``working_set``: bytes of the computing tier that a step takes beside planes,
        which sums must leave free.
        """
        self.norms, self._handles = norms, handles
        self.homes = GradientHomes(handles, store, working_set=working_set)
        self._ledger, self._device, self._mover = store.ledger, store.device, store.mover
        self._transfers = store.transfers
        self._behind = Lane.LANDING in store.transfers.staging
        """Whether gradients leave the device behind backward; else each is waited for."""
        self._staging = store.transfers.staging.get(Lane.LANDING)
        """Where those land that the host works on; without it each of them is waited for."""
        self._number = 0  # of landings by the worker, for their order
        self.landing = store.transfers.open[Lane.LANDING]  # gradients on their way
        store.ledger.register(Turn.LANDINGS, self.relieve, store.device.tier)
        self.synchronous = False  # whether gradients land at once: a MemoryTracer sets it, so that live bytes are exact

    @property
    def has_any(self) -> bool:
        """Whether there is a gradient of any param."""
        # A loop, and no property: all of them are asked in every backward.
        for handle in self._handles:
            if handle.norm_sums is not None:
                return True
        return False

    def land(self, handle: ParamHandle, grad: torch.Tensor) -> None:
        """Keep ``grad`` (of the param's shape, any strides), added to what is there from earlier backwards."""
        adding, flat = handle.norm_sums is not None, (grad if grad.is_contiguous() else grad.contiguous()).view(-1)
        if handle.leftover is Leftover.ZEROS and not adding:
            flat = flat + 0.0  # onto zeros, as torch adds it: of -0.0 that makes 0.0
        # Clipped before and added to now: what is there gets its factor, and the new gradient has none.
        if adding and handle.clip != 1.0:
            self.apply_clip(handle)
        # Looked up once: the same range of the same plane in every step, until the planes change.
        place = handle.chunk.prepared.get(handle)
        if place is None:
            place = handle.chunk.prepared[handle] = self._place_of(handle)
        view, lost, home = place
        if view is None:
            self._leave(handle, flat, home, adding)
        elif lost is not None or adding:
            handle.norm_sums = _keep(view, lost, flat, adding)
        else:
            handle.norm_sums = kernels.copy_grad(view, flat)

    def _place_of(self, handle: ParamHandle) -> _GradPlace:
        chunk, start = handle.chunk, handle.slot.start
        view, lost = self._views(chunk, start, start + handle.slot.numel)
        home = chunk.planes[GRAD].host_view(start, start + handle.slot.numel)
        # Its planes hold something else than the gradient, or a copy there would be waited for where it is begun.
        if home is None or GRAD_ERROR in chunk.planes or home.dtype != handle.view.dtype or not handle.slot.numel:
            return _GradPlace(view, lost)
        return _GradPlace(view, lost, home if self._device.copies_beside(home) else None)

    def _leave(self, handle: ParamHandle, flat: torch.Tensor, home: torch.Tensor | None, adding: bool) -> None:
        """Land a gradient that leaves the device, or whose planes are not both there."""
        if self.landing:
            self._reap()
        chunk = handle.chunk
        # Where no kernel leaves sums on the device, only the host makes them without being waited for.
        if home is not None and not adding and (flat.is_cpu or kernels.leaves_sums_there(flat)):
            with WHOLE:  # what is reserved, and held by nothing yet, would stay taken
                behind = self._is_held(chunk, flat)
                landing = self._leave_straight(handle, flat, home, behind=behind)
            if not behind:
                landing.give_way()
                if self.synchronous or not self._behind:
                    self.drain()
            return
        if self._staging is not None:
            with WHOLE:
                if self._is_held(chunk, flat):
                    self._leave_to_worker(handle, flat, adding)
                    return
        if adding:
            self.await_sums()  # it adds to what the worker may still be adding to
        handle.norm_sums = self._land_staged(chunk, flat, handle.slot.start, adding)

    def _is_held(self, chunk: Chunk, flat: torch.Tensor) -> bool:
        """Whether a gradient may land behind backward: then its bytes are reserved."""
        leaves = chunk.planes[GRAD].tier is not self._device.tier
        return (
            leaves
            and self._behind
            and not self.synchronous
            and self._ledger.reserve_if_room(self._device.tier, flat.nbytes, HOLDER, _LANDING)
        )

    def _leave_straight(
        self, handle: ParamHandle, flat: torch.Tensor, home: torch.Tensor, *, behind: bool
    ) -> _Straight:
        """Sum up a gradient where it is, and begin to copy it home. ``behind``: its bytes are reserved."""
        index = handle.chunk.spec.index
        held = Held(self._ledger, self._device.tier, flat.nbytes if behind else 0, HOLDER)
        landing = _Straight(handle.chunk, flat, held, self._device.stream_number())
        try:
            sums = kernels.sum_squares(flat)
            with WHOLE:
                # Kept by the landing: on a GPU its memory is free with it, and not behind whatever is copied later.
                copy = partial(self._device.copy, home, flat, "evict", kept=True)
                landing.copies = self._mover.under_way(
                    Tier.GPU, Tier.CPU, flat.nbytes, copy, f"land gradients of chunk {index}", index
                )
                self._transfers.add(landing)
                handle.norm_sums = sums
        except BaseException:
            if landing.copies is DONE:  # never begun
                landing.give_back()
            raise
        return landing

    def _leave_to_worker(self, handle: ParamHandle, flat: torch.Tensor, adding: bool) -> None:
        """Let the lane's thread land a gradient, whose bytes are reserved."""
        mover, held = self._mover, Held(self._ledger, self._device.tier, flat.nbytes, HOLDER)
        working, chunk, at = Working(mover.watch.moved, self._staging), handle.chunk, handle.slot.start
        # Now: behind it the gradient is there. Its copies wait for this and not for what is computed afterwards.
        written, before = self._device.mark(), handle.norm_sums
        sums: kernels.Sums = []

        def land() -> None:
            try:
                # Landings are in order, so the one that this adds to is over, and has left sums if it went well.
                if adding and not before:
                    raise GeminiError(f"the gradient of {handle.name!r} that this one adds to has not landed")
                with torch.profiler.record_function("gemini::land"), mover.working(working):
                    # In place: by now the gradient may be that of an update, and the param have none.
                    sums.extend(self.land_piece(chunk, flat, at, adding, written))
            except BaseException:
                # What was there of it may be torn: it has no gradient now.
                if handle.norm_sums is sums:
                    handle.norm_sums = None
                raise

        self._number += 1
        # A param that has a gradient and no landing would be updated with what its plane had before.
        with WHOLE:
            handle.norm_sums = sums  # it is there; its sums come with it
            # In the order of arrival.
            self._transfers.begin(Lane.LANDING, land, self._number, of=chunk, held=held)

    def _views(self, chunk: Chunk, start: int, stop: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The views in which gradients land, and what rounding loses; None where the device does not reach them."""
        plane, error = chunk.planes[GRAD].device_view(start, stop), None
        if GRAD_ERROR in chunk.planes:
            error = chunk.planes[GRAD_ERROR].device_view(start, stop)
            # Both or neither: the kernel that adds reads and writes the two together.
            plane = None if error is None else plane
        return plane, error

    def _reap(self) -> bool:
        """Take note of landings that are over, in their order, which gives back their bytes: whether there were any.
        What has failed stays, to be told by :meth:`drain`.
        """
        found = False
        for first in list(self.landing.values()):
            if not first.is_over() or first.outcome():
                break
            self._transfers.end(first)
            found = True
        return found

    def relieve(self, want: Want) -> bool:
        """Give back the memory of a landing, the first that has some; False if there is none. Called by the training
        thread, through the ledger. What is copied straight is waited for by the device and not by this thread.
        """
        if self._reap():
            return True
        holding = [one for one in self.landing.values() if one.held and one.held.num_bytes and not one.is_over()]
        for straight in holding:
            if isinstance(straight, _Straight) and straight.stream == self._device.stream_number():
                straight.give_way()
                return True
        for waiting in holding[:1]:
            if error := self._transfers.wait(waiting, *WAIT_FOR_LANDING):
                raise error
            self._reap()
        return bool(holding)

    def knows_sums(self, handles: list[ParamHandle]) -> bool:
        """Whether the sums of these gradients are numbers on the host already."""
        sums = [handle.norm_sums for handle in handles if handle.slot.numel]
        return all(own and not any(isinstance(s, kernels.DeviceSums) and not s.is_here for s in own) for own in sums)

    def await_sums(self) -> None:
        """Wait for the sums that the host makes as gradients land. Those of a device are never waited for here. Raises
        StorageError and whatever else kept a gradient from landing.
        """
        for landing in list(self.landing.values()) if self.landing else ():
            if landing.copies is DONE and self._transfers.wait(landing, *WAIT_FOR_LANDING):
                self.drain()

    def drain(self) -> None:
        """Wait until every gradient has landed. Raises whatever kept one from it; what has landed stays."""
        self._transfers.drain(Lane.LANDING, *WAIT_FOR_LANDING)

    def land_piece(
        self, chunk: Chunk, flat: torch.Tensor, at: int, adding: bool, after: Event | None = None
    ) -> kernels.Sums:
        """Keep ``flat`` at element ``at`` (a whole page) of a grad plane: the sums of squares of its norm tiles. Called
        by any thread that has staging of its own; ``after``: what the device computes it with, where that is not over.
        """
        assert not adding or adds_up(chunk), "promote before adding"
        view, lost = self._views(chunk, at, at + flat.numel())
        if view is not None:
            return _keep(view, lost, flat, adding)
        return self._land_staged(chunk, flat, at, adding, after)

    def own_part(self, handle: ParamHandle) -> torch.Tensor:
        """This rank's part of a gradient, flat, on the host: a copy; zeros where there is none."""
        plane, part = handle.chunk.planes[GRAD], handle.part
        out = torch.zeros(part.numel, dtype=plane.dtype, device="cpu")
        if handle.has_grad:
            # Its landing may still be under way, and then the plane has the gradient of the last step.
            self.drain()
            read_range(self._mover, plane, handle, out)
        return out

    def add_part(self, handle: ParamHandle, flat: torch.Tensor) -> None:
        """Add to this rank's part of a gradient, which may not be there yet."""
        adding, part, sums = handle.has_grad, handle.part, []
        for start, stop in tiles(0, part.numel, self._mover.tile):
            here = flat[start:stop].to(self._device.torch_device).contiguous()
            sums += self.land_piece(handle.chunk, here, part.start + start, adding)
        handle.norm_sums = sums

    def land_zeros(self, handles: list[ParamHandle]) -> None:
        """Give these params, which have no gradient, one of zeros."""
        for handle in handles:
            zero = torch.zeros((), dtype=handle.chunk.planes[GRAD].dtype, device=self._device.torch_device)
            self.add_part(handle, zero.expand(handle.part.numel))

    def _land_staged(
        self, chunk: Chunk, flat: torch.Tensor, base: int, adding: bool, after: Event | None = None
    ) -> kernels.Sums:
        """Tile by tile through host staging: inbound from the device, outbound to a device plane or the spill file.
        While the host works on one tile the next ones are on their way.
        """
        index, staging = chunk.spec.index, self._mover.own_staging()
        # The same in every step, until the planes change.
        if GRADS not in chunk.prepared:
            chunk.prepared[GRADS] = _through(chunk, staging)
        planes, areas, is_outbound = chunk.prepared[GRADS]
        crosses = flat.device.type != "cpu" or self._device.tier is Tier.GPU
        # An area has room for fp32: of what is narrower more than a tile comes at once, where it need not be staged.
        piece = self._mover.tile if is_outbound else self._mover.tile * 4 // flat.element_size()
        # Tiles that are not kept yet: on their way, each in an area of its own, or the one that is here.
        coming: deque[tuple[int, int, torch.Tensor, Event]] = deque()
        most = len(areas) if crosses else 1
        sums: kernels.Sums = []
        with self._mover.about("gradient landing", f"land gradients of chunk {index}", index):
            try:
                for number, (start, stop) in enumerate(tiles(0, flat.numel(), piece)):
                    if len(coming) == most:
                        sums += self._land_tile(staging, planes, base, coming, adding)
                    # A slice of all of it would be one more operation of torch's.
                    incoming, copied = flat if stop - start == flat.numel() else flat[start:stop], DONE
                    if crosses:
                        incoming, copied = self._begin_inbound(staging, areas[number % most], incoming, after)
                    coming.append((start, stop, incoming, copied))
                while coming:
                    sums += self._land_tile(staging, planes, base, coming, adding)
            except BaseException:
                # Staging is used again: nothing may still be copied into it.
                for *_, copied in coming:
                    copied.wait_until_over()
                raise
        return sums

    def _begin_inbound(
        self, staging: StagingSet, area: int, part: torch.Tensor, after: Event | None
    ) -> tuple[torch.Tensor, Event]:
        """Start to copy a part of a gradient from the device into staging."""
        inbound = staging.scratch(area, part.dtype, part.numel())
        # A worker's gradient is there behind `after`; what was computed since is more than this copy needs.
        behind = not self._mover.in_worker
        copy = partial(self._device.copy, inbound, part, "evict", after, behind_computing=behind, kept=True)
        return inbound, self._mover.under_way(Tier.GPU, Tier.CPU, inbound.nbytes, copy, "land gradients", -1)

    def _land_tile(
        self,
        staging: StagingSet,
        planes: list[Plane],
        base: int,
        coming: deque[tuple[int, int, torch.Tensor, Event]],
        adding: bool,
    ) -> kernels.Sums:
        """Wait for the tile that was begun first, and keep it: its sums of squares."""
        start, stop, incoming, copied = coming[0]
        if copied is not DONE:
            copied.wait()
        parts: list[torch.Tensor] = []
        staged: list[tuple[Plane, int, torch.Tensor]] = []
        for number, plane in enumerate(planes, 1):
            # Up to the next page: what lies behind the param's end is padding, nobody reads it as a gradient.
            end = start + plane.page_up(stop - start)
            target = plane.host_view(base + start, base + end)
            if target is None:
                target = staging.scratch(number, plane.dtype, end - start)
                if adding:
                    self._mover.load(plane, base + start, base + end, target)
                staged.append((plane, base + end, target))
            parts.append(target[: stop - start])
        # Tile by tile in order: the norm is a fixed tree over these sums.
        sums = _keep(parts[0], parts[1] if len(parts) > 1 else None, incoming, adding)
        for plane, end, target in staged:
            # Waited for: the area is used again by the next tile.
            self._mover.store([(plane, target)], base + start, end)
        # Last: after an error it is still in the list, and waited for with the others.
        coming.popleft()
        return sums

    def clip(self, handles: list[ParamHandle], coefficient: float) -> None:
        """Let the update scale the gradients of these params, beside the coefficient of the whole model."""
        for handle in handles:
            if handle.has_grad:
                handle.clip *= coefficient

    def fold_clipping(self, coefficient: float) -> None:
        """Let what was clipped and is still there after its step, or a part of it, be what it was clipped to, as in
        torch: the factor stays beside it, and from now on readers see it.
        """
        self.clip(self._handles, coefficient)
        for handle in self._handles:
            handle.clip_folded = handle.clip

    def apply_clip(self, handle: ParamHandle) -> None:
        """Give a gradient that was clipped its factor, as in torch: more is going to be added to it."""
        if not handle.has_grad or handle.clip == 1.0:
            return
        # Its landing may still be under way.
        self.drain()
        part, sums = handle.part, []
        planes = _grad_planes(handle.chunk)
        for start, stop in tiles(0, part.numel, self._mover.tile):
            ends = [part.start + start + plane.page_up(stop - start) for plane in planes]
            own = [
                self._mover.host_tile(number, plane, part.start + start, end)
                for number, (plane, end) in enumerate(zip(planes, ends, strict=True), 1)
            ]
            sums += _scaled([tile[: stop - start] for tile, _ in own], handle.clip, self._mover)
            for plane, end, (tile, is_staged) in zip(planes, ends, own, strict=True):
                if is_staged:
                    self._mover.store([(plane, tile)], part.start + start, end)
        handle.norm_sums, handle.clip, handle.clip_folded = sums, 1.0, 1.0

    def start_over(self, *, alone: bool) -> None:
        """Give back the bytes of gradients in flight after an interrupt, which may have come when a gradient had its
        bytes and nobody had the gradient. No update holds any. ``alone``: no other rank's sums do.
        """
        # First: what still lands gives its own bytes back, and the rest is nobody's.
        self._drop_landing()
        if alone:
            self._ledger.release(self._device.tier, self._ledger.held(self._device.tier, HOLDER), HOLDER)

    def _drop_landing(self) -> None:
        """Wait until nothing lands, whatever became of it."""
        while self.landing:
            with contextlib.suppress(Exception):
                self.drain()

    def discard(self, handles: list[ParamHandle], *, leftover: Leftover = Leftover.NOTHING) -> None:
        """Forget gradients, and what failed of their landing. ``leftover``: what stands in their place; nothing stays
        nothing where there was none.
        """
        # What failed of their landing is forgotten with them. After a step there are none, and what still lands is on
        # its way to the updates of that.
        if self.landing and any(handle.has_grad for handle in handles):
            self._drop_landing()
        for landing in [landing for landing in self.landing.values() if landing.is_over()]:
            self._transfers.end(landing)
        for handle in handles:
            had = handle.has_grad or handle.leftover is not Leftover.NOTHING
            handle.leftover = leftover if had else Leftover.NOTHING
            handle.norm_sums, handle.clip, handle.clip_folded = None, 1.0, 1.0


def _grad_planes(chunk: Chunk) -> list[Plane]:
    return [chunk.planes[kind] for kind in GRADS if kind in chunk.planes]


def _through(chunk: Chunk, staging: StagingSet) -> tuple[list[Plane], list[int], bool]:
    """How gradients pass through staging: the planes, the areas in which tiles of gradients come, and whether others
    are taken by tiles of the planes, which the host then does not work on in place.
    """
    planes = _grad_planes(chunk)
    outbound = {number for number, plane in enumerate(planes, 1) if not plane.host_reaches}
    return planes, [area for area in range(staging.num_scratch) if area not in outbound], bool(outbound)


def _keep(into: torch.Tensor, lost: torch.Tensor | None, flat: torch.Tensor, adding: bool) -> kernels.Sums:
    """Copy or add a gradient to its plane: the sums of squares. ``lost``: what rounding loses, where that is kept."""
    if lost is not None:
        return kernels.sum_grad24(into, lost, flat, adding=adding)
    return kernels.accumulate_grad(into, flat) if adding else kernels.copy_grad(into, flat)


def _scaled(tiles: list[torch.Tensor], factor: float, mover: Mover) -> kernels.Sums:
    """Multiply gradients, with what rounding them has lost where that is kept."""
    if len(tiles) == 1:
        return kernels.sum_squares(tiles[0].mul_(factor))
    whole = mover.scratch(0, torch.float32, tiles[0].numel())
    kernels.join_master(tiles[0], tiles[1], whole)
    return kernels.sum_grad24(tiles[0], tiles[1], whole.mul_(factor), adding=False)


# ---- params of two stages --------------------------------------------------------------------------------------------

# Gradients of params that two stages of a pipeline read (tied embeddings): each adds the other's to its own.
#
# Of two terms the order does not matter, so both ranks have the same bits, and their copies of the param stay the same.


def sum_tied(params: ParamSet, gradients: GradientStore, stages: Wire) -> None:
    """After the last backward of a step; all stages come here. Raises RankLost if another one does not."""
    by_name = {handle.whole_name: handle for handle in params.handles}
    for name, shared in params.of_stages.items():
        if len(shared.ranks) < 2 or stages.rank not in shared.ranks:
            continue
        handle = by_name[name]
        own = gradients.own_part(handle)
        others = [torch.empty_like(own) for _ in shared.ranks[1:]]
        # Its own first, then the others: the same bits on two ranks, and not on more.
        peers = [rank for rank in shared.ranks if rank != stages.rank]
        stages.start(
            Tag.VALUES, dict.fromkeys(peers, own), dict(zip(peers, others, strict=True)), f"adding up {name}"
        ).wait()
        for other in others:
            gradients.add_part(handle, other)
