"""Where the bytes of one model are: its chunks and their memory, as one value for all who work on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gemini.ledger import Ledger
from gemini.memory.chunks.chunk import Chunk, FilePlane, MemoryPlane, Plane, make_plane
from gemini.memory.devices.device import Device
from gemini.memory.durable.folder import StoreFolder
from gemini.memory.movement.manager import Manager
from gemini.memory.movement.mover import Mover
from gemini.memory.movement.transfers import Transfers
from gemini.memory.nvme import SpillFile
from gemini.planning.planes import PlaneSpec
from gemini.tiers import Tier


@dataclass(frozen=True)
class ChunkStore:
    """The chunks of a model, what they live in and what moves them."""

    chunks: list[Chunk]
    device: Device
    ledger: Ledger
    mover: Mover
    transfers: Transfers
    manager: Manager
    files: Mapping[Tier, SpillFile]
    """Of each tier that keeps files, the one with its planes and what else it holds."""
    working_set: int
    """Bytes of the computing tier that a step takes at most beside planes."""
    durable: StoreFolder | None = None
    """Where weights and states outlive the process."""

    @cached_property
    def moves(self) -> bool:
        """Whether the weights of some chunk do: else there is nothing to gather, to evict and to look ahead for."""
        return not all(chunk.resident for chunk in self.chunks)

    def make_plane(self, spec: PlaneSpec, numel: int, tier: Tier, *, crosses: bool = True) -> Plane:
        """Make a plane, whose bytes are reserved; they are given back if it cannot be made."""
        try:
            return make_plane(spec, numel, tier, self.device, self.files, crosses=crosses)
        except BaseException:
            self.ledger.release(tier, spec.page_bytes(numel), spec.kind)
            raise

    def give_back(self, kind: str, *planes: Plane) -> None:
        """Give back planes of that kind. The slot before the bytes: who finds bytes free allocates a slot at once."""
        for plane in planes:
            if isinstance(plane, FilePlane):
                plane.give_back()
            if isinstance(plane, MemoryPlane) and plane.window is not None:
                self.manager.room.depopulate(plane.window, kind)  # it waits for the next one of its size
            else:
                self.ledger.release(plane.tier, plane.num_bytes, kind)
