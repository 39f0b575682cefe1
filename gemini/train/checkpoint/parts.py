"""What this rank keeps of every master and moment, and reading it in pieces: what a checkpoint is made of and into.

A *source* is one param's part of one plane on this rank. Its key (``exp_avg/model.norm.weight``) and its place in the
whole param are all a checkpoint knows: chunks, shards, tiers and the number of ranks are of the run, not of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from gemini.memory.chunks.chunk import Plane
from gemini.memory.devices.device import Device
from gemini.planning.planes import WEIGHTS, PlaneKind
from gemini.train.params.guard import ParamHandle

if TYPE_CHECKING:
    from gemini.train.engine import Engine

Buffer = Callable[[int], torch.Tensor]
"""So many bytes of host memory, page-aligned, for what cannot be read in place; overwritten when asked again."""


class Source(NamedTuple):
    """A param's part of a plane on this rank. It holds the plane, so that it outlives the model if it must."""

    key: str
    kind: PlaneKind
    handle: ParamHandle
    plane: Plane

    @property
    def numel(self) -> int:
        """Items of this rank's part: elements, or of a plane with one item for a block of them, blocks."""
        return self.plane.items(self.handle.part.numel)

    @property
    def offset(self) -> int:
        """Where in the whole param's items they begin."""
        return self.handle.part.offset // self.plane.block

    def place(self, start: int) -> int:
        """The element of the plane at which item ``start`` of the part stands."""
        return self.handle.part.start + start * self.plane.block

    def read(self, start: int, stop: int, device: Device, buffer: Buffer) -> torch.Tensor:
        """Items ``[start, stop)`` of the part (``start`` on a page) as a host tensor, in place or in the buffer."""
        first, last = self.place(start), self.place(stop)
        in_place = self.plane.host_view(first, last)
        if in_place is not None:
            return in_place
        padded = self.plane.page_up(last - first)
        staged = buffer(self.plane.items(padded) * self.plane.dtype.itemsize).view(self.plane.dtype)
        on_device = self.plane.device_view(first, last)
        if on_device is not None:  # on a lane of its own: the saver is not the only one who copies
            device.copy(staged[: stop - start], on_device, "checkpoint").wait()
        else:
            self.plane.load(first, first + padded, staged)
        return staged[: stop - start]


def sources_of(engine: Engine) -> dict[str, Source]:
    """Every source of this rank by key, chunk after chunk."""
    found = [
        Source(f"{kind}/{handle.name}", kind, handle, handle.chunk.planes[kind])
        for handle in engine.handles
        for kind in (WEIGHTS, *handle.chunk.states)
    ]
    return {source.key: source for source in sorted(found, key=lambda source: source.handle.chunk.spec.index)}
