"""An activation that is elsewhere, its way there and back, and the memory that it travels in.

That memory is in the ledger ("activations in flight") before it is taken, from room that is left over: beside the
planes, and beside windows that the plan keeps. Used by the training thread alone.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch

from gemini.errors import GeminiError
from gemini.memory.devices.device import Event
from gemini.memory.devices.pages import PAGE
from gemini.memory.movement.worker import Job, Worker
from gemini.memory.store import ChunkStore
from gemini.tiers import WELCOME, Ledger, Tier, Turn, Want

IN_FLIGHT = "activations in flight"

AHEAD = WELCOME | {Turn.BUFFERS}
"""Asked for the memory of one that comes ahead of its use."""
BEHIND = AHEAD | {Turn.FLIGHTS}
"""And of one that leaves: those before it as well."""


class Offloaded:
    """One saved tensor that is elsewhere. Its place is free again when nothing refers to it."""

    __slots__ = (
        "__weakref__", "device", "dtype", "error", "num_bytes", "place", "restoring", "saving", "shape",
        "stride", "_gone",
    )  # fmt: skip

    def __init__(self, gone: deque[Gone], tensor: torch.Tensor, place: Any):
        self._gone, self.place = gone, place
        self.dtype, self.device, self.shape = tensor.dtype, tensor.device, tensor.shape
        self.stride = torch.empty_like(tensor, device="meta").stride()
        self.num_bytes = in_pages(tensor.nbytes)
        self.saving: Flight | None = None
        self.restoring: Flight | None = None
        self.error: BaseException | None = None
        """What kept it from being written."""

    def let_go(self) -> None:
        """Nobody will read it. May run in the middle of anything, under any lock: only leave a note."""
        place, self.place = self.place, None
        if place is not None:
            self._gone.append(Gone(place, self.num_bytes, self.saving, self.restoring))

    def __del__(self) -> None:
        self.let_go()


class Gone(NamedTuple):
    """What is left of an :class:`Offloaded` that nobody will read."""

    place: Any
    num_bytes: int
    saving: Flight | None
    restoring: Flight | None


class Flight:
    """One tensor on its way, in either direction, and the memory that it travels in."""

    __slots__ = ("buffer", "called_back", "copied", "event", "num_bytes", "of", "on_device")

    def __init__(self, offloaded: Offloaded):
        self.of = weakref.ref(offloaded)
        self.num_bytes = offloaded.num_bytes
        self.buffer: torch.Tensor | None = None
        """Page-aligned host memory, between the computing memory and the drive."""
        self.on_device: torch.Tensor | None = None
        """Where the host does not compute: the values there, of the tensor's shape and contiguous."""
        self.event: Event | None = None
        self.copied: Event | None = None
        """The copy out of ``on_device``, whose memory nobody else may have before it is over."""
        self.called_back = False

    def is_over(self) -> bool:
        return all(event is None or event.is_complete() for event in (self.event, self.copied))

    def begin(self, worker: Worker, job: Job) -> None:
        """The job is known before it runs: an interrupt between two lines here loses nothing."""
        self.event = job
        worker.put(job)

    def wait(self) -> Exception | None:
        """Block until it is over: what went wrong."""
        if isinstance(self.event, Job) and self.event.worker is None:  # interrupted just before it was put
            self.called_back = True
            self.event.finish(GeminiError("an activation was not moved: interrupted"))
        try:
            if self.copied is not None:
                self.copied.wait_until_over()
            if self.event is not None:
                self.event.wait()
        except Exception as e:
            return e.with_traceback(None)  # its frames hold what is being moved, and it is kept for a while
        return None


class _ForBuffer(Want):
    """A buffer of its size that nothing travels in, or memory for one."""

    def __init__(self, ledger: Ledger, num_bytes: int, asking: frozenset[Turn], parked: dict[int, list[torch.Tensor]]):
        super().__init__(ledger, Tier.CPU, num_bytes, IN_FLIGHT, asking)
        self._parked = parked
        self.buffer: torch.Tensor | None = None

    def take(self) -> bool:
        if parked := self._parked.get(self.num_bytes):
            self.buffer = parked.pop()
        return self.buffer is not None or super().take()


class Room:
    """The memory of all flights of one model.

    Args:
        staged: they pass through page-aligned host buffers, on their way to and from the drive.
    """

    def __init__(self, store: ChunkStore, *, staged: bool):
        self._ledger = store.ledger
        self._device, self._computing = store.device, store.device.tier
        self._is_staged = staged
        self.is_apart = store.device.keeps_windows
        """Whether what windows leave is of no use here."""
        self._parked: dict[int, list[torch.Tensor]] = {}
        store.ledger.register(Turn.BUFFERS, self.trim, Tier.CPU)

    def held(self, tier: Tier) -> int:
        """Bytes of that tier."""
        return self._ledger.held(tier, IN_FLIGHT)

    def start_over(self) -> None:
        """Nothing is held, whatever the books say: an interrupt came between two lines of them."""
        self.trim()
        for tier in {self._computing, Tier.CPU}:
            held = self._ledger.held(tier, IN_FLIGHT)
            if held:
                self._ledger.release(tier, held, IN_FLIGHT)

    def lend(self, flight: Flight, asking: frozenset[Turn]) -> bool:
        """Memory for a flight, from room that is left over. False if there is none; then it has none."""
        if self._is_staged and flight.buffer is None:
            flight.buffer = self._take_buffer(flight.num_bytes, asking)
            if flight.buffer is None:
                return False
        if self._computing is Tier.CPU or self._ledger.reserve_if_room(
            self._computing, flight.num_bytes, IN_FLIGHT, asking
        ):
            return True
        if flight.buffer is not None:
            self._park(flight.buffer)
            flight.buffer = None
        return False

    def _take_buffer(self, num_bytes: int, asking: frozenset[Turn]) -> torch.Tensor | None:
        want = _ForBuffer(self._ledger, num_bytes, asking, self._parked)
        if not self._ledger.obtain(want):
            return None
        if want.buffer is not None:
            return want.buffer
        try:
            return self._device.make_host_buffer(num_bytes, zeroed=False)
        except BaseException:
            self._ledger.release(Tier.CPU, num_bytes, IN_FLIGHT)
            raise

    def _park(self, buffer: torch.Tensor) -> None:
        """For the next one of its size: its pages are there already."""
        self._parked.setdefault(buffer.nbytes, []).append(buffer)

    def trim(self, want: Want | None = None) -> bool:
        """Give buffers back that nothing travels in; False if there are none."""
        num_bytes = sum(size * len(parked) for size, parked in self._parked.items())
        self._parked.clear()
        if num_bytes:
            self._ledger.release(Tier.CPU, num_bytes, IN_FLIGHT)
        return num_bytes > 0

    def free(self, flight: Flight, *, park: bool = False) -> None:
        """A flight is over."""
        buffer, on_device = flight.buffer, self._computing is not Tier.CPU
        flight.buffer = flight.on_device = None
        if on_device:
            self._ledger.release(self._computing, flight.num_bytes, IN_FLIGHT)
        if buffer is not None and park:
            self._park(buffer)
        elif buffer is not None:
            self._ledger.release(Tier.CPU, flight.num_bytes, IN_FLIGHT)


def in_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
