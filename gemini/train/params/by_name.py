"""Reading and writing the content of one managed param by name: weights, masters, states, gradients, wherever they
live.

Everything that shows or changes weights outside of forward comes through here (``state_dict``, ``full_param``, loading,
``gathered(write=True)``), so that the two halves of a bf16 master are always written together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from gemini import kernels
from gemini.config import GeminiConfig
from gemini.errors import GeminiError, ParamAccessError
from gemini.interrupts import WHOLE
from gemini.kernels import crc32
from gemini.memory.chunks.chunk import Chunk, Parts, Plane
from gemini.memory.movement.mover import Mover, tiles
from gemini.memory.store import ChunkStore
from gemini.patches import replaced
from gemini.planning.planes import RESIDUAL, WEIGHTS, PlaneKind
from gemini.ranks.agree import Point, value_facts
from gemini.ranks.wire import Tag, Wire
from gemini.train.observers import WriteObservers, without_transforms
from gemini.train.params.handle import ParamHandle, ParamSet, WaitingResidual, note_writes
from gemini.train.step import StepState, alone


class ByName:
    """Reads and writes the params of one model, by any of their names. ``company``: who shares the model, a
    :class:`gemini.train.sharding.shards.Company`; ``slices``: among the ranks with slices of the same params.
    """

    def __init__(
        self,
        handles: list[ParamHandle],
        store: ChunkStore,
        state: StepState,
        *,
        observers: WriteObservers,
        company: Any,
        slices: Wire,
    ):
        self._mover, self._manager, self._observers = store.mover, store.manager, observers
        self._company, self._slices = company, slices
        self.state = state
        self.agree = company.agree
        self._deferred: list[tuple[ParamHandle, torch.Tensor]] | None = None
        self.handles = handles
        self._handles = {name: handle for handle in self.handles for name in handle.names}

    def __getitem__(self, name: str) -> ParamHandle:
        if name not in self._handles:
            raise KeyError(f"no managed param is called {name!r}; there are {', '.join(list(self._handles)[:3])}")
        return self._handles[name]

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    @alone
    def read(self, handle: ParamHandle, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Copy the full weights to the CPU, in the dtype that modules read; ``torch.float32`` gives the exact master.
        Codes are bytes in any case.
        """
        with without_transforms():
            return self._read(handle, handle.chunk.flat.dtype if dtype is None or handle.chunk.spec.coded else dtype)

    def read_whole(self, handle: ParamHandle, dtype: torch.dtype | None = None) -> torch.Tensor:
        """:meth:`read` of the whole param where it is a slice of one."""
        return self.joined(handle, self.read(handle, dtype))

    @alone
    def in_place(self, handle: ParamHandle, dtype: torch.dtype) -> torch.Tensor | None:
        """Find the weights where they stand, if that is in host memory, in this dtype and all of them; else None."""
        handle.chunk.settle()
        plane, slot = handle.chunk.weights, handle.slot
        is_here = plane.dtype == dtype and not self._company.divides
        view = plane.host_view(slot.start, slot.stop) if is_here else None
        return None if view is None else view.view(handle.own_shape)

    def joined(self, handle: ParamHandle, own: torch.Tensor) -> torch.Tensor:
        """Join the whole value of a param, of which ``own``, in its shape, is what is here."""
        if not handle.cut or self._slices.size == 1:
            return own
        return handle.cut.join(list(self._slices.swap(Tag.BY_NAME, own.contiguous(), f"reading {handle.name}")))

    def to_compare(self, handle: ParamHandle, own: torch.Tensor) -> torch.Tensor:
        """Find what must be the same on all who agree: ``own``, or of a slice among others the whole value."""
        if not self._company.ranks.experts.size > 1 or own.shape != handle.own_shape:
            return own
        return self.joined(handle, own.detach().cpu())

    def write_whole(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """:meth:`write` what is here of a whole value."""
        if value.shape != handle.whole_shape:
            raise ValueError(f"{handle.name!r} has shape {handle.whole_shape}, was given {tuple(value.shape)}")
        self.write(handle, handle.cut.of(value) if handle.cut else value)

    def _read(self, handle: ParamHandle, dtype: torch.dtype) -> torch.Tensor:
        weights = self._whole(handle, WEIGHTS)
        if dtype is torch.float32 and RESIDUAL in handle.chunk.planes:
            weights = _joined(weights, self._whole(handle, RESIDUAL))
        return weights.to(dtype).view(handle.own_shape)

    def _whole(self, handle: ParamHandle, kind: PlaneKind) -> torch.Tensor:
        """Collect a param's values in a plane, flat, from all ranks."""
        plane = handle.chunk.planes[kind]
        out = torch.empty(plane.items(handle.slot.numel), dtype=plane.dtype, device="cpu")
        self.read_into(handle, kind, out)
        return out

    @alone
    def read_into(self, handle: ParamHandle, kind: PlaneKind, out: torch.Tensor) -> None:
        """Do that into a flat host tensor of the plane's dtype. All ranks read together, or serve one that does."""
        handle.chunk.settle()
        self._company.read_into(handle, kind, out)

    @alone
    def write(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Make ``value`` (the param's shape; any float dtype, bytes of codes) the master, exactly, and drop a gathered
        copy. Every rank writes its part, so all must be given the same.
        """
        if value.shape != handle.own_shape:
            raise ValueError(f"{handle.name!r} has shape {tuple(handle.own_shape)}, was given {tuple(value.shape)}")
        refuse_codes(handle, value)
        handle.chunk.settle()
        # Written again they would lose the residual: a model's weights alone do not have the lower half.
        if handle.restored == handle.num_steps and same_bits(self.read(handle).to(value.dtype), value):
            return  # a checkpoint has brought just these weights, and the rest of their masters with them
        lower = self._waiting_for(handle, value)
        with WHOLE:  # the two halves of a bf16 master, above all
            self._observers.before_write(handle.chunk)
            rest = None if lower is None else _own_part(handle, lower)
            with self.state.changing():
                self._write(handle.chunk, handle.part.start, _own_part(handle, value), rest)
            self._forget_copies(handle)

    def write_first(self, handles: list[ParamHandle], values: list[torch.Tensor]) -> None:
        """:meth:`write` the first values of :meth:`neighbours`, while a model is wrapped: nobody has read them or looks
        on, and where it breaks off the params have their own memory still.
        """
        chunk, base = handles[0].chunk, handles[0].part.start
        flat = _own_part(handles[0], values[0])
        if len(handles) > 1:
            dtype = torch.float32 if RESIDUAL in chunk.planes else chunk.weights.dtype
            flat = torch.zeros(handles[-1].part.stop - base, dtype=dtype, device="cpu")
            for handle, value in zip(handles, values, strict=True):
                flat[handle.part.start - base : handle.part.stop - base].copy_(_own_part(handle, value))
        self._write(chunk, base, flat, None)

    def neighbours(self, handles: list[ParamHandle]) -> Iterator[list[ParamHandle]]:
        """Put together the params of a chunk that one tile has room for, as they stand; larger ones are alone. Those of
        which nothing is here come first.
        """
        group: list[ParamHandle] = []
        for handle in sorted(handles, key=lambda handle: (handle.part.start, handle.part.stop)):
            if group and handle.part.stop - group[0].part.start > self._mover.tile:
                yield group
                group = []
            group.append(handle)
        yield group

    def _write(self, chunk: Chunk, base: int, flat: torch.Tensor, lower: torch.Tensor | None) -> None:
        """Split flat masters, of elements from ``base`` on, into planes. ``lower``: the residual, or the fp32 master of
        an fp16 param, if known. Called inside `WHOLE` where there are masters: an interrupt between the two planes
        would leave halves of two.
        """
        planes = chunk.planes
        flat = lower if lower is not None and RESIDUAL not in planes else flat
        for start, stop in tiles(0, flat.numel(), self._mover.tile):
            part = flat[start:stop].to("cpu").contiguous()
            halves = {WEIGHTS: part}
            if RESIDUAL in planes:
                hi, lo = _halves(part, planes[RESIDUAL].dtype)
                halves = {WEIGHTS: hi, RESIDUAL: lo if lower is None else lower[start:stop]}
            parts = [(planes[kind], half) for kind, half in halves.items()]
            store_tile(self._mover, parts, base + start, base + stop)

    def _forget_copies(self, handle: ParamHandle) -> None:
        # First the count: a graph from before must be refused, also if dropping the window fails.
        note_writes([handle])
        self._manager.drop([handle.chunk])
        self._manager.refresh_lent()

    def complete(self, handle: ParamHandle, rest: torch.Tensor, of: int | None) -> None:
        """Make ``rest``, as an optimizer was saved with it, the lower bits of the master, in fp16 all of it: now if the
        weights are those with the sum ``of`` that it was saved with, else when they are written. A master knows itself
        which weights it belongs to; of bits without a sum nothing is known.
        """
        # Kept also when it fits at once: the weights may be loaded again after the optimizer's state.
        waiting = WaitingResidual(rest, of, handle.num_steps)
        if self.rounds(handle):
            kind, waits = WEIGHTS, True
            waiting.met = same_bits(self.read(handle), rest.to(handle.chunk.flat.dtype))
        else:
            kind, waits = RESIDUAL, of is not None
            waiting.met = not waits or of == self.sum_of_weights(handle)
        handle.waiting = waiting if waits else None
        if waiting.met:
            self.write_plane(handle, kind, rest)

    def rounds(self, handle: ParamHandle) -> bool:
        """Whether a param's weights, as modules read them, are the rounding of the master that is kept: in fp16."""
        kept = handle.chunk.planes[WEIGHTS].dtype
        return handle.chunk.trained and RESIDUAL not in handle.chunk.planes and kept != handle.chunk.flat.dtype

    def sum_of_weights(self, handle: ParamHandle) -> int:
        """Compute the CRC-32 of the weights of a bf16 param. All ranks ask together, or serve one that does."""
        return crc32(self._whole(handle, WEIGHTS))

    def _waiting_for(self, handle: ParamHandle, value: torch.Tensor) -> torch.Tensor | None:
        """Find the residual that waits for just these weights, of a param that had no update since it was loaded.
        Values with lower bits of their own keep these.
        """
        waiting = handle.waiting
        # An update since then has made other masters, to which these lower bits do not belong.
        if not waiting or waiting.num_steps != handle.num_steps:
            return None
        if self.rounds(handle):
            weights = waiting.residual.to(handle.chunk.flat.dtype)
            fits = same_bits(weights.to(value.dtype).reshape(-1), value.reshape(-1))
            waiting.met |= fits
            return waiting.residual if fits else None
        total, whole = 0, True
        for start, stop in tiles(0, value.numel(), self._mover.tile):
            hi, lo = _halves(value.detach().reshape(-1)[start:stop])
            total, whole = crc32(hi, total), whole and not lo.any()
        waiting.met |= total == waiting.of
        return waiting.residual if total == waiting.of and whole else None

    @alone
    def overwrite(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Write as a program does it, on every rank: ``param.copy_(value)``, which is how torch loads a state. Where a
        rank writes something else, all raise.
        """
        self._on_all(handle, value, self.write)

    @alone
    def rewrite(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Take over what a program has made of :meth:`read`, on every rank: ``param.mul_(2)``. Elements that it changed
        become the master exactly, others keep theirs.
        """
        self._on_all(handle, value, self._rewrite)

    def _rewrite(self, handle: ParamHandle, value: torch.Tensor) -> None:
        handle.chunk.settle()
        with WHOLE:
            self._observers.before_write(handle.chunk)
            old = read_range(self._mover, handle.chunk.weights, handle)
            with self.state.changing():
                store_range(self._mover, handle.chunk.weights, handle.part.start, self._merged(handle, value, old))
            self._forget_copies(handle)

    def _on_all(
        self, handle: ParamHandle, value: torch.Tensor, write: Callable[[ParamHandle, torch.Tensor], None]
    ) -> None:
        if self._deferred is not None:
            self._deferred.append((handle, value))
            return
        # Values are compared before any is written: a rank that disagrees raises on all, and no master differs.
        name = handle.name
        self.agree(Point.COPY, f"writing {name!r}", lambda: value_facts([(name, self.to_compare(handle, value))]))
        write(handle, value)

    @contextmanager
    def deferred(self) -> Iterator[list[tuple[ParamHandle, torch.Tensor]]]:
        """List what a program writes inside, params and values, instead of writing it."""
        writes = list[tuple[ParamHandle, torch.Tensor]]()
        with replaced(self, "_deferred", writes):
            yield writes

    @alone
    def read_plane(self, handle: ParamHandle, kind: PlaneKind) -> torch.Tensor:
        """Read a param in a plane of its chunk, in its shape (flat, where a plane has one item for many elements)."""
        whole = self._whole(handle, kind)
        return whole.view(handle.own_shape) if handle.chunk.planes[kind].block == 1 else whole

    @alone
    def write_plane(self, handle: ParamHandle, kind: PlaneKind, value: torch.Tensor) -> None:
        """Overwrite a param's part of a plane."""
        plane = handle.chunk.planes.get(kind)
        if not plane:
            raise GeminiError(f"{handle.name!r} has no {kind}: it is frozen, or gradients are transient")
        shape = handle.own_shape if plane.block == 1 else (plane.items(handle.slot.numel),)
        if value.shape != shape:
            raise ValueError(f"{kind} of {handle.name!r} has shape {tuple(value.shape)}, wanted {tuple(shape)}")
        handle.chunk.settle()
        self._observers.before_write(handle.chunk)
        store_range(self._mover, plane, handle.part.start, _own_part(handle, value, plane.block).to("cpu"))

    @alone
    def exchange(self, handle: ParamHandle, kind: PlaneKind) -> None:
        """Let a param's master and its values in a plane of fp32 change places, bit for bit. Called inside `WHOLE`."""
        handle.chunk.settle()
        planes = handle.chunk.planes
        self._observers.before_write(handle.chunk)
        master = read_range(self._mover, planes[WEIGHTS], handle)
        if RESIDUAL in planes:
            master = _joined(master, read_range(self._mover, planes[RESIDUAL], handle))
        self._write(handle.chunk, handle.part.start, read_range(self._mover, planes[kind], handle), None)
        self._forget_copies(handle)
        store_range(self._mover, planes[kind], handle.part.start, master)

    def take_over(self, handle: ParamHandle, before: torch.Tensor | None) -> None:
        """Make a param's gathered weights its master: written elements exactly, others keep their residual; a loaded
        residual that waits for just these weights completes them. ``before``: what the weights were, if they were
        changed in place.
        """
        chunk, slot = handle.chunk, handle.slot
        if handle.param._version != handle.version:
            note_writes([handle])
        self._observers.before_write(chunk)
        old = read_range(self._mover, chunk.weights, handle) if before is None else before.to("cpu").reshape(-1)
        new = self._merged(handle, chunk.flat[slot.start : slot.stop], old)
        # In place the weights are their plane, and were written by the program already.
        if not chunk.resident:
            store_range(self._mover, chunk.weights, handle.part.start, new)

    def _merged(self, handle: ParamHandle, shown: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """Make what the plane of weights, ``old``, is to be now that weights are ``shown`` (all of them): changed
        elements exactly these. Their residual is nothing from here on, unless a loaded one waits for these weights.
        """
        new, planes = _own_part(handle, shown).to("cpu"), handle.chunk.planes
        if RESIDUAL in planes:
            lower = self._waiting_for(handle, shown)
            if lower is None:
                residual = read_range(self._mover, planes[RESIDUAL], handle)
                # Compared as bits: -0.0 and NaN would be told wrong as numbers.
                residual[new.view(torch.int16) != old.view(torch.int16)] = 0
            else:
                residual = _own_part(handle, lower).to("cpu")
            store_range(self._mover, planes[RESIDUAL], handle.part.start, residual)
        elif (lower := self._waiting_for(handle, shown)) is not None:
            new = _own_part(handle, lower).to("cpu")
        elif old.dtype != new.dtype:
            # The plane has the fp32 master itself, which an element that nobody changed must keep.
            untouched = old.to(new.dtype).view(torch.int16) == new.view(torch.int16)
            new = torch.where(untouched, old, new.to(old.dtype))
        return new


# ---- the model behind a param ----------------------------------------------------------------------------------------


class Owner(Protocol):
    """The model as its params know it, weakly: a param that a program keeps must not keep chunks."""

    config: GeminiConfig
    params: ParamSet
    store: ChunkStore
    state: StepState
    by_names: ByName
    # Of rooms above: `Decision`, `ForwardPass`, `BackwardPass`, `Recovery`, `Stepping`.
    decision: Any
    forward: Any
    backward: Any
    recovery: Any
    stepping: Any

    def drain(self) -> None:
        """Wait until nothing is in flight."""


def owner_of(handle: ParamHandle) -> Owner:
    owner: Owner | None = handle.owner()
    if not owner:
        raise ParamAccessError(f"the model that managed {handle.name!r} was deleted; its params hold nothing any more")
    return owner


def refuse_codes(handle: ParamHandle, value: torch.Tensor) -> None:
    """Refuse values of a param of 4-bit codes that are none, and codes for any other one, with a ValueError."""
    if (value.dtype is torch.uint8) is not handle.chunk.spec.coded:
        what = "quantized, its values are codes in uint8" if handle.chunk.spec.coded else "not quantized"
        raise ValueError(f"{handle.name!r} is {what}, and was given {value.dtype}")


# ---- planes ----------------------------------------------------------------------------------------------------------


def same_bits(here: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether two tensors, on any devices, have the same bits in the same order."""
    return torch.equal(*(of.detach().to("cpu").contiguous().view(-1).view(torch.uint8) for of in (here, value)))


def _halves(values: torch.Tensor, residual: torch.dtype = torch.int16) -> tuple[torch.Tensor, torch.Tensor]:
    """Split flat values on any device into bf16 weights and residuals."""
    hi = torch.empty(values.numel(), dtype=torch.bfloat16, device="cpu")
    lo = torch.empty(values.numel(), dtype=residual, device="cpu")
    kernels.split_master(values.to("cpu", torch.float32).contiguous(), hi, lo)
    return hi, lo


def _joined(weights: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    master = torch.empty(weights.numel(), dtype=torch.float32, device="cpu")
    kernels.join_master(weights, residual, master)
    return master


def _own_part(handle: ParamHandle, value: torch.Tensor, block: int = 1) -> torch.Tensor:
    """Cut out what this rank keeps of a param's full values (one for each ``block`` elements), flat."""
    part = handle.part
    return value.detach().reshape(-1)[part.offset // block : -(-(part.offset + part.stop - part.start) // block)]


def read_range(mover: Mover, plane: Plane, handle: ParamHandle, out: torch.Tensor | None = None) -> torch.Tensor:
    """Read what this rank keeps of a param in a plane, as a flat host tensor: a new one, or ``out``."""
    out = torch.empty(plane.items(handle.part.numel), dtype=plane.dtype, device="cpu") if out is None else out
    base = handle.part.start
    for start, stop in tiles(0, handle.part.numel, mover.tile):
        out[start // plane.block : plane.items(stop)].copy_(host_part(mover, plane, base + start, base + stop))
    return out


def host_part(mover: Mover, plane: Plane, start: int, stop: int) -> torch.Tensor:
    """Give at most a tile of a plane as a host tensor, in place or staged: a staged one lives until the next call."""
    # Files are read in whole pages; what lies behind the range is cut off. Into area 0: what is stored uses others.
    tile, _ = mover.host_tile(0, plane, start, start + plane.page_up(stop - start))
    return tile[: plane.items(stop - start)]


def store_range(mover: Mover, plane: Plane, base: int, source: torch.Tensor) -> None:
    """Overwrite a plane from element ``base`` (whole pages) on, cast to its dtype."""
    for start, stop in tiles(0, source.numel() * plane.block, mover.tile):
        store_tile(mover, [(plane, source[start // plane.block : plane.items(stop)])], base + start, base + stop)


def copy_plane(mover: Mover, source: Plane, target: Plane) -> None:
    """Overwrite a plane with another one of as many elements, cast to its dtype, tile by tile."""
    for start, stop in tiles(0, source.numel, mover.tile):
        store_tile(mover, [(target, host_part(mover, source, start, stop))], start, stop)


def store_tile(mover: Mover, parts: Parts, start: int, stop: int) -> None:
    """Overwrite at most a tile of these planes, cast to their dtypes."""
    staged: dict[int, list[tuple[Plane, torch.Tensor]]] = {}
    for area, (plane, items) in enumerate(parts, 1):
        view = plane.host_view(start, stop)
        if view is not None:
            view.copy_(items)
            continue
        # Files are written in whole pages, which end elsewhere in planes of another dtype.
        end = start + plane.page_up(stop - start)
        whole = mover.scratch(area, plane.dtype, plane.items(end - start))
        whole[items.numel() :].zero_()
        whole[: items.numel()].copy_(items)
        staged.setdefault(end, []).append((plane, whole))
    for end, own in staged.items():
        mover.store(own, start, end)
