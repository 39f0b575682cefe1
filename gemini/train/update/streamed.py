"""Updates that are streamed: planes from host memory pass through the device, which updates them, and go back changed.

A tile's planes are copied into a slot of staging in the device's memory on a stream of their own, the kernel follows on
a stream beside the computing one, and copies on a third one take back what it changed. Everything is ordered by
events on the device: the host begins tiles and waits only for a slot to be home again. What stands on the device
already (transient gradients, weights that live there) is worked on in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from gemini.memory.devices.device import Event
from gemini.memory.movement.mover import Mover
from gemini.memory.movement.staging import StagingSet
from gemini.planning.planes import GRAD
from gemini.tiers import Tier
from gemini.train.update.tiles import ChunkUpdate, Span, Tile, cut

STREAM = "update"
"""The stream of the device on which streamed updates are computed."""


class StreamedTile(Tile):
    """A part of such an update; its staging is memory of the device.

    Args:
        ready: what the computing device was given before the update was handed over. Gradients that stand on the
            device are there then, and nothing reads the weights any more.
    """

    def __init__(self, mover: Mover, update: ChunkUpdate, spans: list[Span], first: int, last: int, *, ready: Event):
        super().__init__(mover, update, spans, first, last)
        self._ready = ready

    def begin(self) -> None:
        """Start to bring what stands in host memory. What used the slot before is over: nothing else is waited for."""
        for kind, plane in self.chunk.updated:
            view = plane.device_view(self._first, self._last)
            if view is None:
                home = plane.host_view(self._first, self._last)
                assert home is not None, (self.chunk.name, kind, plane.tier)
                view = self._area(kind, plane)
                copy = partial(self._mover.device.copy, view, home, "update in", behind_computing=False)
                self._events.append(self._mover.under_way(Tier.CPU, Tier.GPU, view.nbytes, copy, *self._label))
            self._views[kind] = view

    def run(self) -> None:
        """Let the device update what was brought as soon as it is there, and start to take it back after that."""
        device = self._mover.device
        with device.beside(STREAM):
            for event in (self._ready, *self._events):
                event.wait_on_device()
            self._update()
            updated = device.mark()
        self._events.append(updated)
        for kind in self._staged:
            if kind != GRAD:
                home, view = self.chunk.planes[kind].host_view(self._first, self._last), self._views[kind]
                assert home is not None
                copy = partial(device.copy, home, view, "update out", updated, behind_computing=False)
                self._events.append(self._mover.under_way(Tier.GPU, Tier.CPU, view.nbytes, copy, *self._label))


def streamed_tiles(mover: Mover, update: ChunkUpdate, tile: int, ready: Event) -> Iterator[StreamedTile]:
    """The tiles of a streamed update, in order."""
    for spans, first, last in cut(update, tile):
        yield StreamedTile(mover, update, spans, first, last, ready=ready)


def streamed_in_turn(mover: Mover, work: ChunkUpdate) -> Iterator[StreamedTile]:
    """The same through the one slot of the thread that trains, where there is no update worker."""
    slot: StagingSet = mover.staging.on_device[0]
    for tile in streamed_tiles(mover, work, slot.tile, mover.device.mark()):
        tile.staging = slot
        yield tile
