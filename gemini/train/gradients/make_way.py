"""Optimizer states go down to NVMe to make way in host memory, for staging that no plan had foreseen.

Where a plan keeps everything in memory nothing is staged, and a full budget has no room for staging either. When
gradients then need sums on NVMe, some states go there too: every byte of them, so nothing changes but the speed.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemini.errors import BudgetExceeded, human_bytes
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk, FilePlane, MemoryPlane
from gemini.memory.movement.mover import Mover, tiles
from gemini.memory.nvme import SpillFile
from gemini.planning.planes import RESIDUAL, PlaneKind
from gemini.tiers import Ledger, Tier


def move_moments_down(
    chunks: Iterable[Chunk], num_bytes: int, also: int, *, ledger: Ledger, mover: Mover, spill: SpillFile | None
) -> None:
    """Make ``num_bytes`` of host memory free, while no update is in flight. ``also``: bytes of NVMe to be left free.

    Raises:
        BudgetExceeded: if there is no NVMe, no room in it, or too little to move; then nothing was moved.
        StorageError: if a write fails; then nothing was moved either.
    """
    missing = num_bytes - ledger.free(Tier.CPU)
    chosen: list[tuple[Chunk, PlaneKind, MemoryPlane]] = []
    for chunk in reversed(list(chunks)):
        for kind in chunk.states:
            plane = chunk.planes[kind]
            moves = isinstance(plane, MemoryPlane) and plane.tier is Tier.CPU and plane.block == 1
            if missing > 0 and kind != RESIDUAL and moves:
                assert isinstance(plane, MemoryPlane)
                chosen.append((chunk, kind, plane))
                missing -= plane.num_bytes
    going = sum(plane.num_bytes for *_, plane in chosen)
    room = ledger.free(Tier.NVME) - also if spill is not None and Tier.NVME in ledger.tiers else 0
    if missing > 0 or going > room:
        raise BudgetExceeded(
            f"staging asked for {human_bytes(num_bytes)} of cpu, where {human_bytes(ledger.free(Tier.CPU))} are free, "
            f"and states cannot move to nvme to make room: {human_bytes(max(room, 0))} are free there"
        )
    assert spill is not None
    below: list[FilePlane] = []
    try:
        for _, kind, plane in chosen:
            with ledger.reserving(Tier.NVME, plane.num_bytes, kind):
                below.append(FilePlane(spill, plane.numel, plane.dtype))
            for start, stop in tiles(0, plane.numel, mover.tile):
                mover.store(below[-1], start, stop, plane.tensor[start:stop])
    except BaseException:
        for (_, kind, _), copy in zip(chosen, below, strict=False):
            copy.give_back()
            ledger.release(Tier.NVME, copy.num_bytes, kind)
        raise
    with WHOLE:
        for (chunk, kind, plane), copy in zip(chosen, below, strict=True):
            chunk.change_planes({kind: copy})
            ledger.release(Tier.CPU, plane.num_bytes, kind)
