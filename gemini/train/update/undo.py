"""What a guessed update overwrites outside of a durable store, so that it can be undone.

Tile by tile, on the thread that updates: what a tile is about to overwrite is copied first. Weights that modules read
in place are another matter: a graph, or whoever has a view of them, may look at them until the step. The update writes
those beside, and they come home when the step keeps it. Either way it is one copy, in host memory that the ledger has
as long as it is needed: only what is free anyway, and given back to whoever finds no room.
"""

from __future__ import annotations

import threading

import torch

from gemini.memory.chunks.chunk import Chunk, DurablePlane, FilePlane, Plane
from gemini.memory.devices.pages import host_bytes
from gemini.planning.planes import GRADS, WEIGHTS, PlaneKind
from gemini.tiers import NOBODY, Ledger, Tier

HOLDER = "guesses"


class Undo:
    """Of one chunk's update. ``planes``: what it writes, by kind, that has no slots."""

    def __init__(self, chunk: Chunk, planes: dict[PlaneKind, Plane], ledger: Ledger):
        self.num_bytes = sum(plane.num_bytes for plane in planes.values())
        """That it holds, until it is over."""
        self._planes, self._ledger, self._in_sight = planes, ledger, chunk.resident
        self._lock = threading.Lock()
        self._is_kept = self._is_over = False
        self._old: list[tuple[Plane, int, int, torch.Tensor]] = []
        self._new: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Weights that are to come home, with their place there."""

    @staticmethod
    def of(chunk: Chunk, ledger: Ledger) -> Undo | None:
        """None where a plane is the device's, or memory has no room right now."""
        planes = {
            kind: plane for kind, plane in chunk.updated if kind not in GRADS and not isinstance(plane, DurablePlane)
        }
        undo = Undo(chunk, planes, ledger)
        if any(plane.tier is Tier.GPU for plane in planes.values()) or not undo._has_room():
            return None
        return undo

    def _has_room(self) -> bool:
        """Of what is free: asking would take it from other guesses."""
        return not self.num_bytes or self._ledger.reserve_if_room(Tier.CPU, self.num_bytes, HOLDER, NOBODY)

    # ---- on the thread that updates -----------------------------------------------------------------------------

    def place(self, kind: PlaneKind, view: torch.Tensor) -> torch.Tensor:
        """Where a tile updates what stands in memory at ``view``: there, or beside it."""
        return view.clone() if kind == WEIGHTS and self._in_sight and not self._is_kept else view

    def save(self, kind: PlaneKind, start: int, stop: int, old: torch.Tensor) -> None:
        """A tile is about to overwrite ``[start, stop)`` of a plane."""
        plane = self._planes.get(kind)
        if plane is None or (kind == WEIGHTS and self._in_sight):
            return
        with self._lock:
            if not self._is_kept:
                self._old.append((plane, start, stop, _copy(old) if isinstance(plane, FilePlane) else old.clone()))

    def bring_home(self, home: torch.Tensor, new: torch.Tensor) -> None:
        """A tile has written weights to their place beside ``home``."""
        with self._lock:
            if self._is_kept:
                home.copy_(new)
            else:
                self._new.append((home, new))

    def end(self) -> None:
        """Nothing of the update is under way any more."""
        with self._lock:
            self._is_over = True
            if self._is_kept:
                self._release()

    # ---- on the thread that trains ------------------------------------------------------------------------------

    def keep(self) -> None:
        """The update counts: what it has written so far is there to be read."""
        with self._lock:
            self._is_kept = True
            for home, new in self._new:
                home.copy_(new)
            self._new.clear()
            self._old.clear()
            beside = self._planes.get(WEIGHTS) if self._in_sight and not self._is_over else None
            self._release(0 if beside is None else beside.num_bytes)  # a tile of weights may be on its way home

    def undo(self) -> None:
        """It does not, and it is over. One that was cut short is taken up again.

        Raises:
            StorageError: if the spill file fails; then the chunk is torn.
        """
        self._new.clear()
        try:
            while self._old:
                plane, start, stop, old = self._old[-1]
                plane.store(start, stop, old)
                self._old.pop()
        except Exception:
            self._old.clear()
            self._release()
            raise
        self._release()

    def _release(self, rest: int = 0) -> None:
        num_bytes, self.num_bytes = self.num_bytes - rest, rest
        if num_bytes:
            self._ledger.release(Tier.CPU, num_bytes, HOLDER)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """In memory that the spill file can write from."""
    return host_bytes(tensor.nbytes).view(tensor.dtype).copy_(tensor)
