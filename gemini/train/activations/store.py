"""Checkpointed activations in host memory or in the file of a tier, from forward to their recomputation.

With ``GeminiConfig(offload_activations=...)`` the inputs of checkpointed blocks, and all that is saved in kept ones
(:mod:`gemini.train.activations.kept`), leave the computing tier as they are saved and come back, the same bits, when
backward asks for them. torch saves them through the saved-tensor hooks that are open around the outermost forward; what
other operations save passes through these too and is left alone, weights above all. A tensor that several blocks were
given is stored once. With overlap the moves are made beside computing (:mod:`gemini.train.activations.flights`), else
here, in turn.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from typing import Any

import torch
import torch.utils.checkpoint
from torch.multiprocessing.reductions import StorageWeakRef

from gemini.errors import BudgetExceeded, warn
from gemini.interrupts import WHOLE
from gemini.ledger import WELCOME, Turn
from gemini.memory.devices.pages import PAGE, in_pages
from gemini.memory.movement.mover import tiles
from gemini.memory.movement.transfers import Lane
from gemini.memory.store import ChunkStore
from gemini.tiers import Tier
from gemini.train.activations.flights import Flights, Gone, Offloaded, Parked, in_bytes
from gemini.train.activations.kept import INSIDE
from gemini.train.modules import saved_weights, token_tiles
from gemini.train.modules.calls import Calls
from gemini.train.modules.reading import is_compiled

ACTIVATIONS = "activations"

MIN_BYTES = 16 * 2**10
"""Smaller tensors stay: a mask or a position is not worth the move."""

_OF_CHECKPOINTING = frozenset((torch.utils.checkpoint.__file__, token_tiles.__file__))
_OF_COMPILED = f"{os.path.dirname(torch.__file__)}{os.sep}_functorch{os.sep}"
_BETWEEN = (torch.autograd.function.__file__, saved_weights.__file__)


class ActivationStore:
    """The store of the checkpointed activations of one model. Open while its outermost forward runs. Called by the
    threads that run it and its backward; only :meth:`Offloaded.let_go` comes from anywhere. ``wanted``: the
    ``offload_activations`` of the config or the plan.
    """

    def __init__(self, store: ChunkStore, calls: Calls, wanted: str | None):
        tier = Tier(wanted or store.device.tier)
        if wanted and tier is store.device.tier:
            warn(f"offload_activations={wanted!r} has no effect: forward and backward run on the {wanted} already")
        # Notes of finalizers: a deque, since adding to it is one C call and takes no lock.
        self.gone: deque[Gone] = deque()
        self.offloads = tier is not store.device.tier  # whether anything of this has an effect
        self._tier = tier
        self._calls = calls
        self._ledger, self._device, self._mover = store.ledger, store.device, store.mover
        self._file = store.files.get(tier)
        self._slots: dict[int, int] = {}  # bytes of what is taken of the file, by offset
        self.parked = Parked(store.ledger, ACTIVATIONS)
        # Storages of weights: autograd saves views of them, which must stay where they are.
        self._weights = {of.untyped_storage()._cdata for chunk in store.chunks for of in (chunk.flat, chunk.face)}
        self._is_open = False
        self._warned = False
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[Offloaded]]] = {}
        self._stored: weakref.WeakSet[Offloaded] = weakref.WeakSet()
        self.flights = Flights(store, tier)
        store.ledger.register(Turn.FLIGHTS, self.parked.trim, Tier.CPU)

    def begin_forward(self) -> None:
        """From here on what checkpointing saves is offloaded."""
        if not self._is_open and self.offloads and torch.is_grad_enabled():
            # Before anything is saved: here nothing is in the middle of being stored.
            self._find_lost()
            self._known.clear()
            self.flights.begin_forward()
            # Pushed and noted together: hooks that nobody knows would stay open for good.
            with WHOLE:
                torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
                self._is_open = True

    def end_forward(self) -> None:
        """The outermost forward is over, or was interrupted."""
        if self._is_open:
            with WHOLE:
                self._is_open = False
                torch._C._autograd._pop_saved_tensors_default_hooks()

    def end_backward(self) -> None:
        """Give back what is left: nothing is asked for any more."""
        self.flights.end_backward()
        self._forget()
        self.collect()

    def _forget(self) -> None:
        for offloaded in self._stored:
            offloaded.back = None

    def recover(self) -> None:
        """Close what an interrupt may have left open, and let the books say what there is. Nobody computes."""
        self.end_forward()
        self.flights.start_over()
        self._forget()
        if self.offloads:
            self._find_lost()

    def _find_lost(self) -> None:
        """Give back the places of tensors that nothing refers to, those too of which nobody told: an interrupt that
        comes in a finalizer ends it, and is not heard of again.
        """
        self.collect()
        stored = [offloaded for offloaded in self._stored if offloaded.place is not None]
        there = self.parked.num_bytes + sum(offloaded.num_bytes for offloaded in stored)
        lost = self._ledger.held(self._tier, ACTIVATIONS) - there
        if lost > 0 and not self.gone:
            self._ledger.release(self._tier, lost, ACTIVATIONS)
            for place in self._slots.keys() - {offloaded.place for offloaded in stored}:
                self._give_back(place)

    def drain(self) -> None:
        """Wait until nothing is in flight; what could not be written is raised."""
        self.flights.drain()
        self.flights.check()
        self.collect()
        self.parked.trim()

    def close(self) -> None:
        """The model ends, perhaps with a forward that an interrupt ended: other models must not save by its hooks."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
        if top is not None and top[0] == self._pack:
            # Only if its own hooks are the innermost: they are a stack, and the top of it is taken off.
            self.end_forward()
        self.flights.start_over()

    def collect(self) -> None:
        """Give back the places of tensors that nothing refers to any more, when nothing moves there."""
        while self.gone:
            # It stays on the list until nothing moves there: after an interrupt this begins with it again.
            place, num_bytes, flight = self.gone[0]
            if flight is not None and (self._file is not None or flight.lane is Lane.RESTORE):
                # Before the place is given away: the drive would write to its next owner. One that leaves for host
                # memory need not be waited for: the next copy to its place comes behind it on the same stream.
                self.flights.take_back(flight)
            self.gone.popleft()
            if self._file is None:
                self.parked.put(place)
                continue
            self._give_back(place)
            self._ledger.release(self._tier, num_bytes, ACTIVATIONS)

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Replace what autograd saves by what is kept of it; runs for everything that is saved. What stays is detached:
        an output that held its own graph would be freed by the garbage collector only.
        """
        return self._offload(tensor) or tensor.detach()

    def _offload(self, tensor: torch.Tensor) -> Offloaded | None:
        """Store a tensor elsewhere; None for what stays."""
        if tensor.numel() * tensor.element_size() < MIN_BYTES:
            return None
        if not INSIDE.kept and not saved_by_checkpointing(3):
            if not (_saver(3).startswith(_OF_COMPILED) and self._checkpoints_compiled()):
                return None
        if tensor.device != self._device.torch_device or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self._weights:
            return None
        # The version too: a tensor that was written to since is another value at the same address.
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key in self._known:
            alive, known = self._known[key]
            offloaded = known()
            # Both: a storage that is gone may have had its address given to another.
            if offloaded is not None and not alive.expired():
                return self._noted(offloaded)
        # Before room is asked for: places of tensors that are gone may be all that is needed.
        self.collect()
        about = self._mover.about("activation", "offload activations")
        with torch.profiler.record_function("gemini::offload_activation"), about:
            offloaded = self._store(tensor.detach())
        if offloaded is None:
            return None
        # The weak reference keeps the storage's address from being given to another one.
        self._known[key] = (StorageWeakRef(storage), weakref.ref(offloaded))
        return self._noted(offloaded)

    def _noted(self, offloaded: Offloaded) -> Offloaded:
        """Count one more who will ask for it."""
        offloaded.wanted += INSIDE.kept
        offloaded.of_nodes &= INSIDE.kept
        self.flights.note(offloaded, at_once=offloaded.wanted > 1)
        return offloaded

    def _checkpoints_compiled(self) -> bool:
        """Whether a compiled block of transformers that checkpoints computes now: compiled code saves its inputs."""
        call = self._calls.innermost
        block = None if call is None else call.module
        if block is None or not (block.training and getattr(block, "gradient_checkpointing", False)):
            return False
        return is_compiled(block)

    def _store(self, tensor: torch.Tensor) -> Offloaded | None:
        """Store a tensor at a new place; None where there is no room."""
        num_bytes = in_pages(tensor.nbytes)
        try:
            if self._file is not None:
                self._mover.scratch(1, torch.uint8, PAGE)  # what a move needs beside the tensor's own place, first
            # The object that gives the bytes back is there when they are taken.
            with WHOLE:
                place: Any = self.parked.take(num_bytes)
                if place is not None:
                    offloaded = Offloaded(self.gone, tensor, place)
                else:
                    self.parked.trim()  # of other sizes: batches have changed
                    with self._ledger.reserving(self._tier, num_bytes, ACTIVATIONS, WELCOME):
                        if self._file is None:
                            place = self._device.make_host_buffer(num_bytes)
                        else:
                            place = self._file.allocate(num_bytes)
                            self._slots[place] = num_bytes
                        offloaded = Offloaded(self.gone, tensor, place)
                # Known from here on: whoever keeps the error of an interrupt keeps it, and its place is not lost.
                self._stored.add(offloaded)
        except BudgetExceeded as e:
            if not self._warned:
                self._warned = True
                warn(
                    f"offload_activations={self._tier.value!r}: some checkpointed activations stay on "
                    f"{self._device.name} for lack of room ({e}). Raise the {self._tier.value} budget"
                )
            return None
        try:
            if not self.flights.save(offloaded, tensor):
                self._move(offloaded, tensor if tensor.stride() == offloaded.stride else tensor.clone(), out=True)
        except BaseException:
            # Noted and collected at once, as if it had been dropped: bytes and place go back the same way.
            offloaded.let_go()
            self.collect()
            raise
        return offloaded

    def _give_back(self, place: Any) -> None:
        """Let others have a place; no effect for one that was given back. A buffer goes with the last reference."""
        if self._file is not None and place in self._slots:
            self._file.give_back(place, self._slots.pop(place))

    def _move(self, offloaded: Offloaded, values: torch.Tensor, *, out: bool) -> None:
        """Move its values out to their place, or back, here and now; to and from a file through staging."""
        file, tier, values = self._file, self._device.tier, in_bytes(values)
        piece = offloaded.num_bytes if file is None else max(self._mover.tile * 4 // PAGE * PAGE, PAGE)
        for start, stop in tiles(0, offloaded.num_bytes, piece):
            host = offloaded.place if file is None else self._mover.scratch(1, torch.uint8, stop - start)
            here = values[start : min(stop, values.numel())]
            there = host[: here.numel()]
            if file is not None and not out:
                with self._mover.crossing(file.tier, Tier.CPU, stop - start):
                    file.read(host, offloaded.place + start)
            into, source, stream = (there, here, "offload") if out else (here, there, "restore")
            with self._mover.crossing(tier if out else Tier.CPU, Tier.CPU if out else tier, stop - start):
                self._device.copy(into, source, stream).wait()
            if file is not None and out:
                with self._mover.crossing(Tier.CPU, file.tier, stop - start):
                    file.write(host, offloaded.place + start)

    def _unpack(self, packed: Any) -> torch.Tensor:
        """Bring back what autograd asks for, in the strides that it was saved with."""
        if not isinstance(packed, Offloaded):
            return packed
        packed.wanted -= 1
        back, packed.back = packed.back, None
        if back is None:
            back = self._bring(packed)
        if packed.wanted > 0:  # the products of one input, one after another
            packed.back = back
        return back

    def _bring(self, packed: Offloaded) -> torch.Tensor:
        about = self._mover.about("activation", "fetch activations")
        with torch.profiler.record_function("gemini::fetch_activation"), about:
            out = self.flights.take(packed)
            if out is None:
                out = packed.empty()
                self._move(packed, out, out=False)
            # Behind the taking: its memory is free, and the place has moved.
            self.flights.read_ahead()
            return out


def saved_by_checkpointing(depth: int) -> bool:
    """Whether checkpointing, torch's or that of tiles, is what saves a tensor now: the next Python code above the hooks
    is its own. ``depth``: how many functions of ours are between here and there, this one included.
    """
    return _saver(depth + 1) in _OF_CHECKPOINTING


def _saver(depth: int) -> str:
    """The file of the code that saves a tensor now."""
    frame = sys._getframe(depth)
    # Frames of hooks, ours and autograd's, stand between the saving code and here.
    while frame.f_back is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return frame.f_code.co_filename
