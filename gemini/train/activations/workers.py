"""Moves of offloaded activations beside computing: written behind forward, read ahead of backward.

What a tensor holds when it is saved is copied at once, into memory that is in the ledger ("activations in flight"), and
moves on from there: nobody waits for the drive, and the model may overwrite the tensor as it likes. Backward asks for
tensors in about the reverse order of their saving, so the ones before are read while it recomputes. All of it takes
room that is left over and gives way to whoever needs that: where there is none, moves are made in turn as without
overlap. The books are kept by the training thread alone; workers move bytes and know no model.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque

import torch

from gemini.interrupts import WHOLE
from gemini.memory.devices.device import Event
from gemini.memory.movement.mover import Working
from gemini.memory.movement.worker import Job, Worker
from gemini.memory.store import ChunkStore
from gemini.tiers import Tier, Turn, Want
from gemini.train.activations.flights import AHEAD, BEHIND, IN_FLIGHT, Flight, Offloaded, Room

DEPTH = 64 * 2**20
"""Bytes in flight in one direction at most; two tensors may be, whatever their size."""

_TOGETHER = 8
"""Tensors that one checkpointed block saves: backward asks for them in the order of saving, within the block."""

_SAVE, _RESTORE = "offload activations", "fetch activations"


class ActivationWorkers:
    """One per model that overlaps and offloads activations.

    Args:
        tier: where they wait.
    """

    def __init__(self, store: ChunkStore, tier: Tier):
        self._device, self._mover, self._spill = store.device, store.mover, store.spill
        self._room = Room(store, staged=tier is Tier.NVME)
        self._tier, self._computing = tier, store.device.tier
        self._savers, self._restorers = Worker("offload"), Worker("restore")
        self._saving: deque[Flight] = deque()
        self._restoring: list[Flight] = []
        self._untold: list[BaseException] = []
        self._order: list[weakref.ref[Offloaded] | None] = []
        self._at = -1
        self._largest = 0
        self._is_starved = False
        store.ledger.register(Turn.FLIGHTS, self.relieve, *{Tier.CPU, self._computing})
        store.ledger.register_claim(self._computing, self.missing)

    # ---- behind forward -----------------------------------------------------------------------------------------

    def save(self, offloaded: Offloaded, tensor: torch.Tensor) -> bool:
        """Begin to move what ``tensor`` holds now. False if there is no room for that, and nothing is in flight.

        Raises:
            StorageError: if an earlier one could not be written.
        """
        self.check()
        num_bytes = offloaded.num_bytes
        self._largest = max(self._largest, num_bytes)
        flight = Flight(offloaded)
        while self._too_many(num_bytes):
            self._end_oldest()
        if not self._room.lend(flight, BEHIND):
            self._room.trim()
            self._is_starved = True
            return False
        offloaded.saving = flight
        self._saving.append(flight)
        try:
            self._begin_save(flight, offloaded, tensor)
        except BaseException:
            if flight.event is None:  # nothing moves that others would end
                self._saving.remove(flight)
                offloaded.saving = None
                self._room.free(flight)
            raise
        return True

    def _too_many(self, num_bytes: int) -> bool:
        return sum(flight.num_bytes for flight in self._saving) + num_bytes > max(DEPTH, 2 * num_bytes)

    def _begin_save(self, flight: Flight, offloaded: Offloaded, tensor: torch.Tensor) -> None:
        mover, device, computing, num_bytes = self._mover, self._device, self._computing, flight.num_bytes
        buffer, place, copied = flight.buffer, offloaded.place, None
        if computing is Tier.CPU:
            assert buffer is not None
            values = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            values.copy_(tensor)
        else:
            on_device = tensor.clone(memory_format=torch.contiguous_format)
            source, into = _bytes(on_device), (place if buffer is None else buffer)[: tensor.nbytes]
            with WHOLE:  # memory of a flight whose event nobody has would be given to others while it is copied
                copied = mover.under_way(
                    computing, Tier.CPU, num_bytes, lambda: device.copy(into, source, "offload", kept=True), _SAVE, -1
                )
                flight.on_device, flight.copied, flight.event = on_device, copied, copied
        if self._tier is Tier.CPU:
            return
        spill, working = self._spill, Working(mover.watch.moved)
        assert spill is not None and buffer is not None

        def write() -> None:
            about = mover.about("activation", _SAVE)
            with torch.profiler.record_function("gemini::offload_activation"), mover.working(working), about:
                if copied is not None:
                    copied.wait()
                with mover.crossing(Tier.CPU, Tier.NVME, num_bytes):
                    spill.write(buffer, place)

        flight.begin(self._savers, Job(write, 0.0))

    def _end_oldest(self) -> None:
        """Wait for the save that was begun first."""
        if self._saving:
            flight = self._saving[0]
            if not flight.is_over():
                with self._mover.about("activation", "wait for room to offload activations"):
                    flight.wait()
            self.reap()

    def reap(self) -> None:
        """Take note of the saves that are over; what went wrong is told by :meth:`check`."""
        while self._saving and self._saving[0].is_over():
            flight = self._saving[0]
            error = flight.wait()
            offloaded = flight.of()
            if offloaded is not None:
                offloaded.saving, offloaded.error = None, None if error is None else _without_traceback(error)
            if error is not None and not flight.called_back:
                self._untold.append(error)
            self._saving.popleft()
            self._room.free(flight, park=error is None and flight.event is not None)

    def check(self) -> None:
        """Raise what went wrong behind, once; then nothing is in flight."""
        self.reap()
        if self._untold:
            error = self._untold[0]
            self.drain()
            self._untold.clear()
            raise error

    # ---- ahead of backward --------------------------------------------------------------------------------------

    def note(self, offloaded: Offloaded) -> None:
        """It was saved, perhaps once more: backward asks for it as often."""
        self._order.append(weakref.ref(offloaded))

    def begin_forward(self) -> None:
        """What no graph refers to any more will not be asked for."""
        self._is_starved = False
        self._order = [known for known in self._order if known is not None and known() is not None]

    def begin_backward(self) -> None:
        """Begin to read what was saved last."""
        self._at = len(self._order) - 1
        self.read_ahead()

    def read_ahead(self) -> None:
        """Begin to read what backward asks for next, as far as there is room."""
        self.reap()
        wanted: list[Offloaded] = []
        num_bytes = 0
        for at in range(min(self._at + _TOGETHER, len(self._order) - 1), -1, -1):
            known = self._order[at]
            offloaded = None if known is None else known()
            if offloaded is None or offloaded in wanted:
                continue
            if wanted and num_bytes + offloaded.num_bytes > max(DEPTH, 2 * offloaded.num_bytes):
                break
            wanted.append(offloaded)
            num_bytes += offloaded.num_bytes
        for flight in [f for f in self._restoring if f.of() not in wanted]:
            self.call_back(flight)
        for offloaded in wanted:
            if offloaded.saving is None and offloaded.restoring is None and not self._begin_restore(offloaded):
                return

    def _begin_restore(self, offloaded: Offloaded) -> bool:
        flight = Flight(offloaded)
        if not self._room.lend(flight, AHEAD):
            return False
        offloaded.restoring = flight
        self._restoring.append(flight)
        mover, device, computing, num_bytes = self._mover, self._device, self._computing, flight.num_bytes
        into, size = None, offloaded.shape.numel() * offloaded.dtype.itemsize
        if computing is not Tier.CPU:
            flight.on_device = torch.empty(offloaded.shape, dtype=offloaded.dtype, device=offloaded.device)
            into = _bytes(flight.on_device)
        place, buffer = offloaded.place, flight.buffer
        if self._tier is Tier.CPU:
            assert into is not None
            copying, source = into, place[:size]

            def restore() -> Event:
                return device.copy(copying, source, "restore", kept=True)

            with WHOLE:
                flight.event = mover.under_way(Tier.CPU, computing, num_bytes, restore, _RESTORE, -1)
            return True
        spill, working = self._spill, Working(mover.watch.moved)
        assert spill is not None and buffer is not None
        free = device.mark()  # behind it nobody uses what is the memory of ``into`` now; the worker comes much later

        def read() -> None:
            about = mover.about("activation", _RESTORE)
            with torch.profiler.record_function("gemini::fetch_activation"), mover.working(working), about:
                with mover.crossing(Tier.NVME, Tier.CPU, num_bytes):
                    spill.read(buffer, place)
                if into is not None:
                    with mover.crossing(Tier.CPU, computing, num_bytes):
                        arrived = device.copy(
                            into, buffer[:size], "restore", after=free, behind_computing=False, kept=True
                        )
                        arrived.wait()

        flight.begin(self._restorers, Job(read, 0.0))
        return True

    def take(self, offloaded: Offloaded) -> torch.Tensor | None:
        """The values, contiguous, if they came ahead or have not left yet; None: they must be moved now.

        Raises:
            StorageError: if they, or others, could not be written.
        """
        self.check()
        if offloaded.error is not None:
            raise offloaded.error
        self._count_use(offloaded)
        if offloaded.saving is not None:
            return self._copy_of(offloaded, offloaded.saving)
        flight = offloaded.restoring
        if flight is None:
            return None
        if not flight.is_over() and isinstance(flight.event, Job):
            self._restorers.hurry(flight.event)
        with self._mover.about("activation", "wait for activations"):
            error = flight.wait()
        values = None  # one that failed is tried again by whoever needs it: here and now
        if error is None:
            values = self._copy_of(offloaded, flight) if flight.on_device is None else flight.on_device
        self._end_restore(flight)
        return values

    def _copy_of(self, offloaded: Offloaded, flight: Flight) -> torch.Tensor:
        """What a flight has in the memory that computes."""
        if flight.on_device is not None:
            return flight.on_device.clone()
        assert flight.buffer is not None
        out = torch.empty(offloaded.shape, dtype=offloaded.dtype, device=offloaded.device)
        into = _bytes(out)
        into.copy_(flight.buffer[: into.numel()])
        return out

    def _count_use(self, offloaded: Offloaded) -> None:
        """Backward has come to the last time that this was saved, of those that it has not come to."""
        for at in range(len(self._order) - 1, -1, -1):
            known = self._order[at]
            if known is not None and known() is offloaded:
                self._order[at], self._at = None, at
                break
        while self._order and self._order[-1] is None:
            self._order.pop()

    def call_back(self, flight: Flight) -> None:
        """What is on its way is not wanted any more: its memory is free afterwards, and nobody writes to its place."""
        worker = self._restorers if flight in self._restoring else self._savers
        if isinstance(flight.event, Job) and worker.cancel(flight.event):
            flight.called_back = True
        if not flight.is_over():
            with self._mover.about("activation", "wait for activations that nobody wants"):
                flight.wait()
        if flight in self._restoring:
            self._end_restore(flight)
        else:
            self.reap()

    def _end_restore(self, flight: Flight) -> None:
        error, offloaded = flight.wait(), flight.of()
        if offloaded is not None:
            offloaded.restoring = None
        self._restoring.remove(flight)
        self._room.free(flight, park=error is None and flight.event is not None)

    # ---- room ---------------------------------------------------------------------------------------------------

    def headroom_bytes(self) -> int:
        """Memory that windows should leave for transfers of activations: two tensors', or none if one found no room, or
        has no use for theirs.
        """
        return 0 if self._is_starved or self._room.is_apart else 2 * self._largest

    def missing(self) -> int:
        """What of that they do not hold, in flight or ready to be."""
        return max(self.headroom_bytes() - self._room.held(self._computing), 0)

    def relieve(self, want: Want) -> bool:
        """Give back some memory, waiting if need be; False if none of that tier is held."""
        if want.holder == IN_FLIGHT:  # whose buffer is one that was just parked
            return self._end_one(saves_first=True)
        return self._room.held(want.tier) > 0 and self._give()

    def _give(self) -> bool:
        return self._room.trim() or (self._end_one() and (self._room.trim() or True))

    def _end_one(self, *, saves_first: bool = False) -> bool:
        if self._saving and (saves_first or not self._restoring):
            self._end_oldest()
        elif self._restoring:
            self.call_back(self._restoring[-1])
        else:
            return False
        return True

    def end_backward(self) -> None:
        """Nothing is asked for until another backward."""
        while self._restoring:
            self.call_back(self._restoring[-1])
        self.reap()
        self._room.trim()

    def drain(self) -> None:
        """Wait until nothing is in flight, whatever became of it."""
        while self._give():
            pass

    def start_over(self) -> None:
        """After an interrupt, which may have come between two lines of the books: nothing is held."""
        self.drain()
        self._room.start_over()

    def close(self) -> None:
        """The model ends."""
        self._savers.close()
        self._restorers.close()
        self.start_over()


def _without_traceback(error: Exception) -> Exception:
    """The same without a traceback, whose frames would keep the graph alive that keeps the error."""
    raised = copy.copy(error)
    raised.__cause__ = error.__cause__
    return raised


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
