"""Staging: memory that planes pass through where they cannot be worked on in place, one set per thread that works.

A set has room for one tile of every kind of plane. The training thread has one. The update lane has another, cut into
*slots* of smaller tiles, so that one tile is read while one is updated and one is written. Updates that are streamed
through the device have slots in its memory. All bytes are in the ledger ("staging"), reserved when the model is placed,
or on the host at the first use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gemini.memory.devices.device import Device, Event
from gemini.planning.layout import ALIGN
from gemini.planning.planes import PlaneKind
from gemini.planning.working import STAGED_BYTES, staging_bytes
from gemini.tiers import Ledger, Tier

SLOTS = 4
"""Tiles of the update lane under way at once: one or two being read, one in the update, one being written."""


class _Memory:
    """One buffer for all areas of a set; it comes with the first use. Whole, so that huge pages can stand behind it:
    they make a read from the disk several times as fast as pages of 4 KiB (MiB-sized areas alone would not get any).
    """

    def __init__(self, make: Callable[[int], torch.Tensor], num_bytes: int):
        self._make, self._num_bytes = make, num_bytes
        self._buffer: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        if self._buffer is None:
            with torch.inference_mode(False):  # it outlives the eval that may have asked first
                self._buffer = self._make(self._num_bytes)
        return self._buffer


class StagingSet:
    """Room for one tile of every kind of plane, from byte ``at`` of some memory."""

    def __init__(self, memory: _Memory, tile: int, at: int = 0):
        self.tile = tile
        self._memory = memory
        self._leaving: dict[PlaneKind, Event] = {}
        self._at: dict[PlaneKind, int] = {}
        for kind, size in STAGED_BYTES.items():
            self._at[kind] = at
            at += tile * size

    def staged(self, kind: PlaneKind, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first ``numel`` elements of the area of ``kind``, as ``dtype``. Valid until it is asked again.

        Waits for a copy out of it that is under way (:meth:`leaves`); how that ended is told to whoever began it.
        """
        leaving = self._leaving.pop(kind, None)
        if leaving is not None:
            leaving.wait_until_over()
        num_bytes, at = numel * dtype.itemsize, self._at[kind]
        assert num_bytes <= self.tile * STAGED_BYTES[kind], (kind, numel, dtype, self.tile)
        return self._memory.get()[at : at + num_bytes].view(dtype)

    def leaves(self, kind: PlaneKind, event: Event) -> None:
        """A copy out of the area of ``kind`` was begun, which is over with ``event``."""
        self._leaving[kind] = event


class Staging:
    """All sets of one engine.

    Args:
        tile: elements of a tile.
        reserved: bytes of staging that are in the ledger already; the first set is reserved at its first use if there
            are none. What is reserved beyond it makes the sets of lanes.
        device_tile: elements of a tile in the device's memory; ``on_device`` bytes there are reserved for such tiles.
    """

    def __init__(
        self, device: Device, tile: int, ledger: Ledger, reserved: int, *, device_tile: int = 0, on_device: int = 0
    ):
        self.tile = tile
        self._device, self._ledger = device, ledger
        self.is_reserved = reserved > 0
        """Whether the bytes of the training thread's set are in the ledger."""
        self._own = StagingSet(_Memory(device.make_host_buffer, staging_bytes(tile)), tile)
        self._num_left = max(reserved // staging_bytes(tile) - 1, 0)
        memory, slot = _Memory(self._make_on_device, on_device), staging_bytes(device_tile)
        count = on_device // slot if slot else 0
        self.on_device = [StagingSet(memory, device_tile, number * slot) for number in range(count)]
        """Slots in the device's memory: the update lane's, or the training thread's where there is no such lane."""

    @property
    def own(self) -> StagingSet:
        """The training thread's set.

        Raises:
            BudgetExceeded: if it was not reserved, and there is no room.
        """
        self.reserve()
        return self._own

    def reserve(self) -> bool:
        """Take the bytes of the training thread's set before its first use; whether they had not been taken.

        Raises:
            BudgetExceeded: if there is no room.
        """
        if self.is_reserved:
            return False
        self._ledger.reserve(Tier.CPU, staging_bytes(self.tile), "staging")
        self.is_reserved = True
        return True

    def give_back(self) -> None:
        """Undo :meth:`reserve`, before the set was used."""
        self._ledger.release(Tier.CPU, staging_bytes(self.tile), "staging")
        self.is_reserved = False

    def _make_on_device(self, num_bytes: int) -> torch.Tensor:
        buffer = self._device.make_buffer(num_bytes)
        self._device.mark().wait()  # zeroed: copies into slots wait for nothing that was computed before
        return buffer

    def take(self) -> StagingSet | None:
        """A set for a lane, while there is one left."""
        slots = self._take(1)
        return slots[0] if slots else None

    def take_slots(self) -> list[StagingSet]:
        """The same cut into slots of smaller tiles; none if no set is left."""
        return self._take(SLOTS)

    def _take(self, num_slots: int) -> list[StagingSet]:
        if self._num_left == 0:
            return []
        self._num_left -= 1
        memory = _Memory(self._device.make_host_buffer, staging_bytes(self.tile))
        tile = max(self.tile // num_slots // ALIGN * ALIGN, ALIGN)
        num_slots = min(num_slots, max(self.tile // tile, 1))
        return [StagingSet(memory, tile, number * staging_bytes(tile)) for number in range(num_slots)]
