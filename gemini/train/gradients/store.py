"""Gradients between backward and update: landed in the grad plane as they arrive, with their norm in the same pass.

Sums of squares are made on the way, over fixed tiles, so the same bits come out wherever the plane lives.

    within reach     the plane is where modules compute: copied or added there, at once
    straight         it leaves the device as it is, summed up there: with the others of its chunk, if all have room
    by the host      it has to be added: copied through staging, and the device calls the host behind each copy
    through staging  a file has it, or the device cannot call the host: tile by tile on a worker

What leaves the device keeps its bytes there in the ledger until it has landed, or until others need them and the
device comes behind the copy. Backward waits for none of it: an update takes the events of its chunk's landings along,
sums that the host makes are waited for by whoever asks for a norm. Sums of a CUDA kernel come to the host all at once,
when somebody asks first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from gemini import kernels
from gemini.errors import GeminiError
from gemini.interrupts import WHOLE
from gemini.ledger import NOBODY, WELCOME, Turn, Want
from gemini.memory.chunks.chunk import Chunk, Plane
from gemini.memory.devices.device import DONE, AllOf, Event
from gemini.memory.movement.mover import Working, tiles
from gemini.memory.movement.transfers import Held, Lane, Transfer
from gemini.memory.store import ChunkStore
from gemini.planning.planes import GRAD, GRADS
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


class _Flight(Transfer):
    """Gradients of a chunk that leave together, of who computes on ``stream``: they are read until ``left``."""

    def __init__(self, chunk: Chunk, held: Held, stream: int):
        # Nothing of a job, which it has none of.
        self.lane, self.of, self.key = Lane.LANDING, chunk, self
        self.held, self.stream = held, stream
        self.grads: list[tuple[ParamHandle, torch.Tensor, Any]] = []  # with places in the plane, or None
        self.left = self.landed = DONE
        self.begin: Callable[[_Flight], None] | None = None  # of gradients that wait for more of their chunk

    @property
    def copies(self) -> Event:  # type: ignore[override]
        """Their end. Who asks waits, or has others wait for it: those of gradients that wait themselves begin now."""
        self.begin_copies()
        return self.landed

    def begin_copies(self) -> None:
        """Let gradients go that wait for more of their chunk: no more come, or somebody waits for these."""
        if self.begin is not None:
            with WHOLE:
                begin, self.begin = self.begin, None
                begin(self)

    def is_over(self) -> bool:
        return self.begin is None and self.landed.is_complete()

    def went_well(self) -> bool:
        return self.begin is None and self.landed is DONE

    def give_back(self) -> None:
        # The memory before its bytes: who finds these free allocates.
        self.grads.clear()
        super().give_back()

    def give_way(self) -> None:
        """Let what is computed from here on come behind the copy, and have the memory, which no other stream gets."""
        with WHOLE:
            self.begin_copies()
            self.left.wait_on_device()
            self.give_back()


class _Summed(Event):
    """The end of what the host adds up, with what ``Device.host_sums`` gives. Who knows it is over finds ``sums``."""

    def __init__(self, handle: ParamHandle, sums: kernels.Sums, left: Event, landed: Event, found: Any):
        super().__init__()
        self._handle, self._sums, self._left, self._landed, self._found = handle, sums, left, landed, found

    def is_complete(self) -> bool:
        if not (self._left.is_complete() and self._landed.is_complete()):  # who records notes the first
            return False
        with contextlib.suppress(GeminiError):
            self.wait()
        return True

    def wait(self) -> None:
        try:
            self._landed.wait()
            # In place, by any thread, and always the same: by now the gradient may be that of an update.
            self._sums[:] = self._found.sums()
        except Exception as e:
            # What there is of it may be torn, and what was added since with it: it has no gradient now.
            self._handle.norm_sums = None
            raise GeminiError(f"the gradient of {self._handle.name!r} did not land: {e}") from e


class _GradPlace(NamedTuple):
    """The place of a param's gradient in the planes of its chunk: ``view``, or one that it leaves the device for."""

    view: torch.Tensor | None = None  # in the plane, where the device computes with it
    lost: torch.Tensor | None = None  # what rounding a sum to view or summed loses, where that is kept
    home: torch.Tensor | None = None  # in the plane, where that holds what leaves the device, which copies to it
    summed: torch.Tensor | None = None  # in the plane, where the host reaches all of it
    of_chunk: int = 0  # bytes of the plane
    rounded: torch.Tensor | None = None  # where a sum goes home rounded


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
        self._transfers, self._manager = store.transfers, store.manager
        self._behind = Lane.LANDING in store.transfers.staging
        """Whether gradients leave the device behind backward; else each is waited for."""
        self._staging = store.transfers.staging.get(Lane.LANDING)
        """Where those land that the host works on; without it each of them is waited for."""
        self._by_worker: Event = DONE  # the last landing by the worker: nothing else uses that staging meanwhile
        self._land_by_host: Any = None
        if (own := self._staging or store.transfers.staging.get(Lane.REDUCE)) is not None:
            areas = [own.scratch(number, torch.float32, own.tile) for number in range(own.num_scratch)]
            self._land_by_host = store.device.host_sums(areas)
        self.landing = store.transfers.open[Lane.LANDING]  # gradients on their way
        self.gathering: _Flight | None = None  # the last of those that waited for more of its chunk, or does
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

    def land(self, handle: ParamHandle, grad: torch.Tensor, num_to_come: int = 0) -> None:
        """Keep ``grad`` (of the param's shape, any strides), added to what is there from earlier backwards.
        ``num_to_come``: of its chunk in this backward. With the last all are on their way.
        """
        adding, flat = handle.norm_sums is not None, (grad if grad.is_contiguous() else grad.contiguous()).view(-1)
        if handle.leftover is Leftover.ZEROS and not adding:
            flat = flat + 0.0  # onto zeros, as torch adds it: of -0.0 that makes 0.0
        # Looked up once: the same range of the same plane in every step, until the planes change.
        place, flight = handle.chunk.prepared.get(handle), self.gathering
        if place is None:
            place = handle.chunk.prepared[handle] = self._place_of(handle)
        if flight is not None and flight.begin is not None and flight.of is handle.chunk:
            # What those of a chunk have in common was looked at with the first.
            if place.home is not None and not adding and flight.stream == self._device.stream_number():
                flight.grads.append((handle, flat, place.home))
                handle.norm_sums = []  # it is there; its sums come with the copies
                if not num_to_come:
                    flight.begin_copies()
                return
        # Clipped before and added to now: what is there gets its factor, and the new gradient has none.
        if adding and handle.clip != 1.0:
            self.apply_clip(handle)
        if place.view is None:
            self._leave(handle, flat, place, adding, num_to_come)
        elif place.rounded is not None and adding:
            is_last = not self._manager.more_to_come  # a param may arrive again: its sum stays, and is rounded anew
            handle.norm_sums = kernels.accumulate_grad(place.view, flat, place.rounded if is_last else None)
            (self.homes.rounded.add if is_last else self.homes.rounded.discard)(handle)
        elif place.lost is not None or adding:
            handle.norm_sums = _keep(place.view, place.lost, flat, adding)
        else:
            handle.norm_sums = kernels.copy_grad(place.view, flat)

    def _place_of(self, handle: ParamHandle) -> _GradPlace:
        chunk, start, stop = handle.chunk, handle.slot.start, handle.slot.stop
        view, lost = self._views(chunk, start, stop)
        if view is not None or not handle.slot.numel:
            home = self.homes.away.get(chunk)
            narrow = home.device_view(start, stop) if home and home.dtype is torch.bfloat16 else None
            return _GradPlace(view, lost, rounded=narrow)
        place, *rest = [plane.host_view(start, stop) for plane in _grad_planes(chunk)]
        if place is None or None in rest:
            return _GradPlace()
        # Its planes hold just the gradient, and a copy there is not waited for where it is begun.
        is_same = not rest and place.dtype == handle.view.dtype and self._device.copies_beside(place)
        lost, summed = rest[0] if rest else None, place if self._behind else None
        return _GradPlace(None, lost, place if is_same else None, summed, chunk.planes[GRAD].num_bytes)

    def _leave(
        self, handle: ParamHandle, flat: torch.Tensor, place: _GradPlace, adding: bool, num_to_come: int
    ) -> None:
        """Land a gradient that leaves the device, or whose planes are not both there."""
        chunk = handle.chunk
        # Where no kernel leaves sums on the device, only the host makes them without being waited for.
        straight = place.home is not None and not adding and (flat.is_cpu or kernels.leaves_sums_there(flat))
        if (flight := self.gathering) is not None and flight.begin is not None:
            flight.begin_copies()
        by_host = place.summed is not None and self._land_by_host is not None
        if straight or (by_host and self._by_worker.is_complete()):
            self._take_off(handle, flat, place, adding, num_to_come if straight else None)
            return
        if self.landing:
            self._reap()
        if self._staging is not None:
            with WHOLE:
                if self._is_held(chunk, flat.nbytes):
                    self._leave_to_worker(handle, flat, adding)
                    return
        if adding:
            self.await_sums()  # it adds to what the worker may still be adding to
        handle.norm_sums = self.land_piece(chunk, flat, handle.slot.start, adding)

    def _take_off(
        self, handle: ParamHandle, flat: torch.Tensor, place: _GradPlace, adding: bool, num_to_come: int | None
    ) -> None:
        """Let a gradient leave without a worker, with ``num_to_come`` others of its chunk; None: through the host."""
        chunk = handle.chunk
        with WHOLE:  # what is reserved, and held by nothing yet, would stay taken
            if self.landing:
                self._reap()
            waits = bool(num_to_come) and self._is_held(chunk, place.of_chunk, NOBODY)
            num_bytes = place.of_chunk if waits else flat.nbytes * self._is_held(chunk, flat.nbytes)
            held = Held(self._ledger, self._device.tier, num_bytes, HOLDER)
            flight = _Flight(chunk, held, self._device.stream_number())
            flight.grads.append((handle, flat, place.home))
            if waits:
                self.landing[flight] = self.gathering = flight
                flight.begin, handle.norm_sums = self._begin_straight, []
                return
            if num_to_come is None:
                self._begin_by_host(flight, place, adding)
            else:
                self._begin_straight(flight)
            self._transfers.add(flight)
        if not num_bytes:
            flight.give_way()
            if self.synchronous or not self._behind:
                self.drain()

    def _is_held(self, chunk: Chunk, num_bytes: int, asking: frozenset[Turn] = _LANDING) -> bool:
        """Whether gradients may land behind backward: then their bytes are reserved."""
        return (
            chunk.planes[GRAD].tier is not self._device.tier
            and self._behind
            and not self.synchronous
            and self._ledger.reserve_if_room(self._device.tier, num_bytes, HOLDER, asking)
        )

    def _begin_straight(self, flight: _Flight) -> None:
        """Let gradients leave as they are, and make their sums where they are. In ``WHOLE``."""
        if flight.stream != self._device.stream_number():
            self._device.synchronize()  # somebody else waits for them, and what made them may be under way

        def begin() -> Event:
            handles, flats, homes = zip(*flight.grads, strict=True)
            for handle, sums in zip(handles, kernels.sums_of(flats), strict=True):
                handle.norm_sums = sums
            # Kept by the landing: on a GPU its memory is free with it, and not behind whatever is copied later.
            return self._device.copy_all([*zip(homes, flats, strict=True)], "evict")

        self._begin(flight, begin)

    def _begin_by_host(self, flight: _Flight, place: _GradPlace, adding: bool) -> None:
        """Let the one gradient of a flight go through the host, which adds it up. In ``WHOLE``."""
        ((handle, flat, _),) = flight.grads
        sums, landed = list[Any](), list[Any]()

        def begin() -> Event:
            piece = self._mover.tile * 4 // flat.element_size()  # an area has room for fp32
            left, *landed[:] = self._land_by_host(flat, place.summed, place.lost, piece, adding)
            return left

        self._begin(flight, begin)
        flight.landed, handle.norm_sums = _Summed(handle, sums, flight.left, *landed), sums

    def _begin(self, flight: _Flight, begin: Callable[[], Event]) -> None:
        index, num_bytes = flight.of.spec.index, sum([flat.nbytes for _, flat, _ in flight.grads])
        name = f"land gradients of chunk {index}"
        try:
            flight.left = flight.landed = self._mover.under_way(Tier.GPU, Tier.CPU, num_bytes, begin, name, index)
        except BaseException as e:
            for handle, *_ in flight.grads:
                handle.norm_sums = None  # what there is of it may be torn
            self._transfers.end(flight)
            if isinstance(e, GeminiError | torch.OutOfMemoryError) or not isinstance(e, Exception):
                raise
            raise GeminiError(f"gradients of {flight.of.name} did not leave {self._device.name}: {e}") from e

    def _leave_to_worker(self, handle: ParamHandle, flat: torch.Tensor, adding: bool) -> None:
        """Let the lane's thread land a gradient, whose bytes are reserved."""
        mover, held = self._mover, Held(self._ledger, self._device.tier, flat.nbytes, HOLDER)
        working, chunk, at = Working(mover.watch.moved, self._staging), handle.chunk, handle.slot.start
        # Now: behind it the gradient is there. Its copies wait for this and not for what is computed afterwards.
        written, before = self._device.mark(), handle.norm_sums
        sums: kernels.Sums = []
        # They have the staging until they are over, and the sums of what this may add to.
        flights = AllOf([flight.copies for flight in self.landing.values() if isinstance(flight, _Flight)])

        def land() -> None:
            try:
                flights.wait_until_over()
                # Landings are in order, so the one that this adds to is over, and has left sums if it went well.
                if adding and flat.numel() and not before:
                    raise GeminiError(f"the gradient of {handle.name!r} that this one adds to has not landed")
                with torch.profiler.record_function("gemini::land"), mover.working(working):
                    # In place: by now the gradient may be that of an update, and the param have none.
                    sums.extend(self.land_piece(chunk, flat, at, adding, written))
            except BaseException:
                handle.norm_sums = None  # what was there of it may be torn
                raise

        # A param that has a gradient and no landing would be updated with what its plane had before.
        with WHOLE:
            handle.norm_sums = sums  # it is there; its sums come with it
            try:
                # All as urgent: in the order of arrival.
                self._by_worker = self._transfers.begin(Lane.LANDING, land, of=chunk, held=held)
            except BaseException:
                handle.norm_sums = None  # it never began to land
                raise

    def _views(self, chunk: Chunk, start: int, stop: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The views in which gradients land, and what rounding loses; None where the device does not reach them."""
        view, *lost = [plane.device_view(start, stop) for plane in _grad_planes(chunk)]
        # Both or neither: the kernel that adds reads and writes the two together.
        return (None, None) if lost and lost[0] is None else (view, lost[0] if lost else None)

    def _reap(self) -> bool:
        """Take note of landings that are over, in their order, which gives back their bytes: whether there were any.
        What has failed stays, to be told by :meth:`drain`.
        """
        before = len(self.landing)
        for first in list(self.landing.values()):
            if not first.went_well() and (not first.is_over() or first.outcome()):
                break
            self._transfers.end(first)
        return len(self.landing) < before

    def relieve(self, want: Want) -> bool:
        """Give back the memory of the first landing that has some, if any. Called by the training thread, through the
        ledger; what has all of its copies is waited for by the device and not by this thread.
        """
        if self._reap():
            return True
        first, stream = None, self._device.stream_number()
        for flight in self.landing.values():
            if flight.held and flight.held.num_bytes and not flight.is_over():
                if isinstance(flight, _Flight) and flight.stream == stream:
                    flight.give_way()
                    return True
                first = first or flight
        if first and (error := self._transfers.wait(first, *WAIT_FOR_LANDING)):
            raise error
        self._reap()
        return first is not None

    def knows_sums(self, handles: list[ParamHandle]) -> bool:
        """Whether the sums of these gradients are numbers on the host already."""
        sums = [handle.norm_sums for handle in handles if handle.slot.numel]
        return all(own and not any(isinstance(s, kernels.DeviceSums) and not s.is_here for s in own) for own in sums)

    def await_sums(self) -> None:
        """Wait for the sums that the host makes as gradients land. Those of a device are never waited for here. Raises
        StorageError and whatever else kept a gradient from landing.
        """
        for landing in list(self.landing.values()) if self.landing else ():
            by_host = landing.copies is DONE or isinstance(landing.copies, _Summed)
            if by_host and self._transfers.wait(landing, *WAIT_FOR_LANDING):
                self.drain()

    def drain(self) -> None:
        """Wait until every gradient has landed. Raises whatever kept one from it; what has landed stays."""
        self._transfers.drain(Lane.LANDING, *WAIT_FOR_LANDING)

    def _land_at_once(self, flat: torch.Tensor, views: list[torch.Tensor | None], adding: bool) -> kernels.Sums:
        """Land what ranks have added up on a GPU, perhaps more than a tile; a worker waits for the last of it."""
        assert self._land_by_host is not None
        self._mover.count(Tier.GPU, Tier.CPU, flat.nbytes)
        piece = self._mover.tile * 4 // flat.element_size()
        into, lost = views if len(views) > 1 else (views[0], None)
        _, landed, found = self._land_by_host(flat, into, lost, piece, adding, behind_computing=False)
        landed.wait()
        return found.sums()  # type: ignore[no-any-return]

    def land_piece(
        self, chunk: Chunk, flat: torch.Tensor, at: int, adding: bool, after: Event | None = None
    ) -> kernels.Sums:
        """Keep ``flat`` at element ``at`` (a whole page) of a grad plane: the sums of squares of its norm tiles. Called
        by any thread that has staging of its own; ``after``: what the device computes it with, where that is not over.
        """
        assert not adding or adds_up(chunk), "promote before adding"
        view, lost = self._views(chunk, at, at + flat.numel()) if chunk.planes[GRAD].in_memory else (None, None)
        if view is not None:
            return _keep(view, lost, flat, adding)
        # The same in every step, until the planes change.
        planes = chunk.prepared.get(GRADS) or chunk.prepared.setdefault(GRADS, _grad_planes(chunk))
        if self._land_by_host is not None and self._staging is None and self._mover.in_worker and flat.is_cuda:
            views = [plane.host_view(at, at + flat.numel()) for plane in planes]
            if all(view is not None for view in views):
                return self._land_at_once(flat, views, adding)
        return self._land_tiles(chunk, planes, flat, at, adding, after)

    def _land_tiles(
        self, chunk: Chunk, planes: list[Plane], flat: torch.Tensor, at: int, adding: bool, after: Event | None
    ) -> kernels.Sums:
        """Keep a piece of a gradient tile by tile, through host staging where a plane is in a file."""
        crosses = flat.device.type != "cpu" or self._device.tier is Tier.GPU
        sums: kernels.Sums = []
        with self._mover.about("gradient landing", f"land gradients of chunk {chunk.spec.index}", chunk.spec.index):
            numel = flat.numel()
            for start, stop in [(0, numel)] if 0 < numel <= self._mover.tile else tiles(0, numel, self._mover.tile):
                # A slice of all of it would be one more operation of torch's.
                incoming = flat if stop - start == flat.numel() else flat[start:stop]
                if crosses:
                    incoming = self._brought(incoming, after)
                parts, staged = self._on_host(planes, at + start, at + stop, loaded=adding)
                # Tile by tile in order: the norm is a fixed tree over these sums.
                sums += _keep(parts[0], parts[1] if len(parts) > 1 else None, incoming, adding)
                for plane, end, tile in staged:
                    self._mover.store([(plane, tile)], at + start, end)
        return sums

    def _brought(self, tile: torch.Tensor, after: Event | None) -> torch.Tensor:
        """A tile of a gradient that the device computes, in the caller's own staging on the host."""
        inbound, own = self._mover.scratch(0, tile.dtype, tile.numel()), self._mover.own_staging()
        # A worker's gradient is there behind `after`; what was computed since is more than this copy needs.
        how = {"behind_computing": not self._mover.in_worker, "kept": True}
        copy = partial(self._device.copy, inbound, tile, "evict", after, **how)
        copied = self._mover.under_way(Tier.GPU, Tier.CPU, inbound.nbytes, copy, "land gradients", -1)
        own.leaves(0, copied)  # an interrupt must leave no area to others that it is copied to
        copied.wait()
        return inbound

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

    def _on_host(
        self, planes: list[Plane], start: int, stop: int, *, loaded: bool
    ) -> tuple[list[torch.Tensor], list[tuple[Plane, int, torch.Tensor]]]:
        """Elements of grad planes where the host works on them: all, and those in staging, ``loaded`` or not, which are
        to be stored up to the ends that are given with them.
        """
        parts: list[torch.Tensor] = []
        staged: list[tuple[Plane, int, torch.Tensor]] = []
        for number, plane in enumerate(planes, 1):
            # Up to the next page: what lies behind the param's end is padding, nobody reads it as a gradient.
            end = start + plane.page_up(stop - start)
            tile = plane.host_view(start, end) if plane.in_memory else None
            if tile is None:
                tile = self._mover.scratch(number, plane.dtype, end - start)
                if loaded:
                    self._mover.load(plane, start, end, tile)
                staged.append((plane, end, tile))
            parts.append(tile[: stop - start])
        return parts, staged

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
        for start, stop in tiles(part.start, part.stop, self._mover.tile):
            parts, staged = self._on_host(planes, start, stop, loaded=True)
            if len(parts) == 1:
                sums += kernels.sum_squares(parts[0].mul_(handle.clip))
            else:  # with what rounding has lost
                whole = self._mover.scratch(0, torch.float32, parts[0].numel())
                kernels.join_master(parts[0], parts[1], whole)
                sums += kernels.sum_grad24(parts[0], parts[1], whole.mul_(handle.clip), adding=False)
            for plane, end, tile in staged:
                self._mover.store([(plane, tile)], start, end)
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


def _keep(into: torch.Tensor, lost: torch.Tensor | None, flat: torch.Tensor, adding: bool) -> kernels.Sums:
    """Copy or add a gradient to its plane: the sums of squares. ``lost``: what rounding loses, where that is kept."""
    if lost is not None:
        return kernels.sum_grad24(into, lost, flat, adding=adding)
    return kernels.accumulate_grad(into, flat) if adding else kernels.copy_grad(into, flat)


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
