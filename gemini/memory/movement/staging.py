"""Staging: memory that planes pass through where they cannot be worked on in place, one set per thread that works.

A set has room for one tile of every kind of plane, each in an area of its own. Whoever passes something else through
it takes areas by number (*scratch*): no thread updates a tile and does something else in the same set at once.

The training thread has one set. The update worker has another, cut into *slots* of smaller tiles, so that one tile is
read while one is updated and one is written. Updates that are streamed through the device have slots in its memory. All
bytes are in the ledger ("staging"), reserved when the model is placed, or on the host at the first use.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gemini.ledger import Ledger
from gemini.memory.chunks.chunk import Plane
from gemini.memory.devices.device import Device, Event
from gemini.planning.planes import ADAM, GRAD, WEIGHTS, PlaneKind, RuleSpec, is_wide
from gemini.planning.working import staged_bytes, staging_bytes
from gemini.tiers import Tier

SLOTS = 4
"""Tiles of the update worker under way at once: one or two being read, one in the update, one being written."""


class _Memory:
    """One buffer for all areas of a set; it comes with the first use. Whole, so that huge pages can stand behind it:
    they make a read from the disk several times as fast as pages of 4 KiB (MiB-sized areas alone would not get any).
    Made by whichever thread uses its set first, and used by that one alone.
    """

    def __init__(self, device: Device, num_bytes: int, *, on_device: bool = False):
        self._device, self._num_bytes, self._on_device = device, num_bytes, on_device
        self._buffer: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        if self._buffer is None:
            with torch.inference_mode(False):  # it outlives the eval that may have asked first
                make = self._device.make_buffer if self._on_device else self._device.make_host_buffer
                self._buffer = make(self._num_bytes)
                if self._on_device:
                    # Zeroed by the computing stream. Copies into slots wait for nothing that was computed before, so
                    # without this wait the zeros could come after them.
                    self._device.mark().wait()
        return self._buffer

    def forget(self) -> None:
        """Give the memory back: the next use makes another buffer."""
        if self._buffer is not None:
            # Not by dropping it alone: a worker's last tile may live until its next one.
            self._buffer.untyped_storage().resize_(0)
        self._buffer = None


class StagingSet:
    """Room for one tile of every kind of plane of ``rule``, from byte ``at`` of some memory."""

    def __init__(self, memory: _Memory, tile: int, at: int = 0, *, rule: RuleSpec = ADAM):
        self.tile = tile
        self._memory = memory
        self._leaving: dict[str, Event] = {}
        self._areas: dict[str, tuple[int, int]] = {}
        for kind, size in staged_bytes(tile, rule).items():
            self._areas[kind] = at, size
            at += size
        # Areas of fp32 size alone: what goes through by number may be of any dtype.
        first = [WEIGHTS, GRAD]
        self._scratch = first + [spec.kind for spec in rule.staged if is_wide(spec) and spec.kind not in first]

    @property
    def num_scratch(self) -> int:
        """Areas that :meth:`scratch` has: three at least."""
        return len(self._scratch)

    def staged(self, kind: PlaneKind, dtype: torch.dtype, num_items: int) -> torch.Tensor:
        """The first items of the area of ``kind``, as ``dtype``. Valid until it is asked again. Waits for a copy out of
        it that is under way (:meth:`leaves`); how that ended is told to whoever began it.
        """
        # Taken out first: an event that is over must not be asked again, nor keep what was copied.
        leaving = self._leaving.pop(kind, None)
        if leaving is not None:
            leaving.wait_until_over()
        num_bytes, (at, size) = num_items * dtype.itemsize, self._areas[kind]
        assert num_bytes <= size, (kind, num_items, dtype, self.tile)
        return self._memory.get()[at : at + num_bytes].view(dtype)

    def areas(self, planes: Mapping[PlaneKind, Plane], numel: int) -> dict[PlaneKind, torch.Tensor]:
        """Areas for so many elements of these planes, each as :meth:`staged`."""
        return {kind: self.staged(kind, plane.dtype, plane.items(numel)) for kind, plane in planes.items()}

    def scratch(self, number: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first elements of area ``number``, as :meth:`staged`: it has room for a tile of fp32."""
        return self.staged(self._scratch[number], dtype, numel)

    def leaves(self, number: int, event: Event) -> None:
        """A copy out of scratch area ``number`` was begun, which is over with ``event``."""
        self._leaving[self._scratch[number]] = event


class Staging:
    """All sets of one engine.

    Args:
        tile: elements of a tile.
        reserved: bytes of staging that are in the ledger already; the first set is reserved at its first use if there
            are none. What is reserved beyond it makes the sets of workers.
        device_tile: elements of a tile in the device's memory; ``on_device`` bytes there are reserved for such tiles.
        rule: of the updates, whose planes are staged.
    """

    def __init__(
        self,
        device: Device,
        tile: int,
        ledger: Ledger,
        reserved: int,
        *,
        device_tile: int = 0,
        on_device: int = 0,
        rule: RuleSpec = ADAM,
    ):
        self.tile, self._rule = tile, rule
        self.num_bytes = staging_bytes(tile, rule)
        """Of one set in host memory."""
        self._device, self._ledger = device, ledger
        self.is_reserved = reserved > 0
        """Whether the bytes of the training thread's set are in the ledger."""
        self._own = StagingSet(_Memory(device, self.num_bytes), tile, rule=rule)
        # Whole sets beyond the first one, as they were planned.
        self._num_left = max(reserved // self.num_bytes - 1, 0)
        memory, slot = _Memory(device, on_device, on_device=True), staging_bytes(device_tile, rule)
        self._there = memory
        count = on_device // slot if slot else 0
        self.on_device = [StagingSet(memory, device_tile, number * slot, rule=rule) for number in range(count)]
        """Slots in the device's memory: the update worker's, or the training thread's where there is no such worker."""

    @property
    def own(self) -> StagingSet:
        """The training thread's set, reserved now if it was not. Asked by that thread alone: workers take no memory."""
        if not self.is_reserved:
            self.reserve()
        return self._own

    def reserve(self) -> bool:
        """Take the bytes of the training thread's set before its first use; whether they had not been taken."""
        if self.is_reserved:
            return False
        self._ledger.reserve(Tier.CPU, self.num_bytes, "staging")
        self.is_reserved = True  # behind the books: a refusal leaves it to be tried again
        return True

    def give_back(self) -> None:
        """Undo :meth:`reserve`, before the set was used."""
        self._ledger.release(Tier.CPU, self.num_bytes, "staging")
        self.is_reserved = False

    def leave_device(self) -> None:
        """Let go of the slots' memory there until they are used again. No update is under way."""
        self._there.forget()

    def take(self) -> StagingSet | None:
        """A set for a worker, while there is one left: who comes first gets one."""
        return next(iter(self.take_slots(1)), None)

    def take_slots(self, num_slots: int = SLOTS) -> list[StagingSet]:
        """A set for a worker, cut into slots of smaller tiles (one, where a tile is a whole param), if one is left."""
        num_slots = 1 if self._rule.whole else num_slots
        if self._num_left == 0:
            return []
        self._num_left -= 1
        align = self._rule.align
        # At least one aligned tile, also where the set is too small for so many slots; then there are fewer slots.
        tile = max(self.tile // num_slots // align * align, align)
        num_slots, slot = min(num_slots, max(self.tile // tile, 1)), staging_bytes(tile, self._rule)
        # One buffer behind all slots: see `_Memory`.
        memory = _Memory(self._device, max(self.num_bytes, num_slots * slot))
        return [StagingSet(memory, tile, number * slot, rule=self._rule) for number in range(num_slots)]
