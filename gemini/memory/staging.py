"""Staging: host memory that planes pass through where they cannot be worked on in place, one set per thread that works.

A set has room for one tile of every kind of plane. The training thread has one. The update lane has another, cut into
*slots* of smaller tiles, so that one tile is read while one is updated and one is written. All bytes are in the ledger
("staging"), reserved when the model is placed or at the first use.
"""

from __future__ import annotations

import torch

from gemini.memory.device import Device
from gemini.planning.layout import ALIGN
from gemini.planning.planes import PlaneKind
from gemini.planning.working import STAGED_BYTES, staging_bytes
from gemini.tiers import Ledger, Tier

SLOTS = 4
"""Tiles of the update lane under way at once: one or two being read, one in the update, one being written."""


class StagingSet:
    """Room for one tile of every kind of plane; memory comes with the first use of each kind."""

    def __init__(self, device: Device, tile: int):
        self.tile = tile
        self._device = device
        self._areas: dict[PlaneKind, torch.Tensor] = {}

    def staged(self, kind: PlaneKind, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first ``numel`` elements of the area of ``kind``, as ``dtype``. Valid until it is asked again."""
        if kind not in self._areas:
            with torch.inference_mode(False):  # it outlives the eval that may have asked first
                self._areas[kind] = self._device.make_host_buffer(self.tile * STAGED_BYTES[kind])
        return self._areas[kind][: numel * dtype.itemsize].view(dtype)


class Staging:
    """All sets of one engine.

    Args:
        tile: elements of a tile.
        reserved: bytes of staging that are in the ledger already; the first set is reserved at its first use if there
            are none. What is reserved beyond it makes the sets of lanes.
    """

    def __init__(self, device: Device, tile: int, ledger: Ledger, reserved: int):
        self.tile = tile
        self._device, self._ledger = device, ledger
        self._is_reserved = reserved > 0
        self._own = StagingSet(device, tile)
        self._num_left = max(reserved // staging_bytes(tile) - 1, 0)

    @property
    def own(self) -> StagingSet:
        """The training thread's set.

        Raises:
            BudgetExceeded: if it was not reserved, and there is no room.
        """
        if not self._is_reserved:
            self._ledger.reserve(Tier.CPU, staging_bytes(self.tile), "staging")
            self._is_reserved = True
        return self._own

    def take(self) -> StagingSet | None:
        """A set for a lane, while there is one left."""
        if self._num_left == 0:
            return None
        self._num_left -= 1
        return StagingSet(self._device, self.tile)

    def take_slots(self) -> list[StagingSet]:
        """The same cut into slots of smaller tiles; none if no set is left."""
        if self._num_left == 0:
            return []
        self._num_left -= 1
        slot = max(self.tile // SLOTS // ALIGN * ALIGN, ALIGN)
        return [StagingSet(self._device, slot) for _ in range(max(min(SLOTS, self.tile // slot), 1))]
