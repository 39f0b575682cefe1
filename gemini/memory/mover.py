"""Moves bytes between homes, windows and staging, tile by tile, and counts what crosses each boundary.

A tile is at most ``TILE`` elements of a chunk. Everything that cannot be worked on in place (spill file, a device's own
memory) passes through one host staging area of one tile per plane, whatever the size of a param: a fused expert weight
of 0.9 G elements needs no more staging than a bias. The mover decides nothing and evicts nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from gemini.memory.chunk import Chunk, FilePlane, Plane
from gemini.memory.device import Device
from gemini.memory.pages import PAGE
from gemini.memory.recorder import NOTHING, Recorder
from gemini.memory.stalls import Stalls
from gemini.planning.layout import ALIGN
from gemini.planning.planes import PlaneKind
from gemini.planning.timeline import Lane
from gemini.planning.traffic import path
from gemini.planning.working import STAGED_BYTES, staging_bytes
from gemini.tiers import Ledger, Tier


def page_up(numel: int) -> int:
    """The element count rounded up to where the next param can start: a whole page in every plane."""
    return -(-numel // ALIGN) * ALIGN


def tiles(start: int, stop: int, tile: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of at most ``tile`` elements that cover ``[start, stop)``."""
    for at in range(start, stop, tile):
        yield at, min(at + tile, stop)


class _Both:
    """Two context managers as one; the first one is around the second."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, outer: AbstractContextManager[None], inner: AbstractContextManager[None]):
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *exc: Any) -> None:
        try:
            self._inner.__exit__(*exc)
        finally:
            self._outer.__exit__(*exc)


class Mover:
    """One per engine. Staging that was not reserved when the model was placed is reserved at its first use."""

    def __init__(self, device: Device, tile: int, ledger: Ledger):
        self.device = device
        self.tile = tile
        self._ledger = ledger
        self._unreserved = staging_bytes(tile) - ledger.held(Tier.CPU, "staging")
        self.moved: Counter[str] = Counter()
        self.recorder: Recorder | None = None
        self.stalls = Stalls()
        self._staging: dict[PlaneKind, torch.Tensor] = {}

    def staged(self, kind: PlaneKind, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first ``numel`` elements of the staging area of ``kind``, as ``dtype``. Valid until it is asked again."""
        if kind not in self._staging:
            if self._unreserved:
                self._ledger.reserve(Tier.CPU, self._unreserved, "staging")
                self._unreserved = 0
            with torch.inference_mode(False):  # it outlives the eval that may have asked first
                self._staging[kind] = self.device.make_host_buffer(self.tile * STAGED_BYTES[kind])
        return self._staging[kind][: numel * dtype.itemsize].view(dtype)

    def crossing(self, source: Tier, target: Tier, num_bytes: int) -> AbstractContextManager[None]:
        """Around one copy: counts its bytes, and records it where somebody does.

        Bytes between the GPU and NVMe cross host memory, and count on both boundaries.
        """
        for boundary in path(source, target):
            self.moved[str(boundary)] += num_bytes
        return NOTHING if self.recorder is None else self.recorder.move(source, target, num_bytes)

    def about(
        self, cause: str, name: str, chunk: int = -1, *, lane: Lane | None = None
    ) -> AbstractContextManager[None]:
        """Around what is done for ``name``, and keeps ``lane`` busy if there is one.

        On the training thread it is a wait by ``cause``, which counts in :attr:`stalls`; those who record are told on
        any thread.
        """
        waiting, recorder = self.stalls.waiting(cause), self.recorder
        if recorder is None:
            return waiting
        if lane is None:
            return _Both(waiting, recorder.about(cause, name, chunk))
        return _Both(waiting, recorder.span(lane, name, chunk, cause=cause))

    def load(self, plane: Plane, start: int, stop: int, into: torch.Tensor) -> torch.Tensor:
        """Fill the host tensor ``into`` from a plane."""
        with self.crossing(plane.tier, Tier.CPU, into.numel() * into.element_size()):
            plane.load(start, stop, into)
        return into

    def store(self, plane: Plane, start: int, stop: int, source: torch.Tensor) -> None:
        """Overwrite a plane's range from the host tensor ``source``."""
        with self.crossing(Tier.CPU, plane.tier, source.numel() * source.element_size()):
            plane.store(start, stop, source)

    def host_tile(self, kind: PlaneKind, plane: Plane, start: int, stop: int) -> tuple[torch.Tensor, bool]:
        """The range as a host tensor, and whether it is staged (then it must be stored after it was changed)."""
        view = plane.host_view(start, stop)
        if view is not None:
            return view, False
        return self.load(plane, start, stop, self.staged(kind, plane.dtype, stop - start)), True

    def gather(self, chunk: Chunk) -> None:
        """Fill a populated window with the weights from home, cast to the compute dtype if home is a wider master."""
        self.fetch(chunk.weights, chunk.flat, chunk.spec.index)

    def fetch(self, plane: Plane, flat: torch.Tensor, index: int) -> None:
        """Fill ``flat``, gathered weights of chunk ``index`` on the computing device, from a weights plane."""
        about = self.about(f"fetch from {plane.tier.value}", f"fetch chunk {index}", index)
        with torch.profiler.record_function("gemini::fetch"), about:
            numel = plane.numel
            source = plane.host_view(0, numel)
            straight = self.device.tier is Tier.CPU and flat.data_ptr() % PAGE == 0
            if plane.dtype == flat.dtype and source is not None:
                with self.crossing(Tier.CPU, self.device.tier, plane.num_bytes):
                    self.device.copy(flat, source, "fetch").wait()
            elif plane.dtype == flat.dtype and isinstance(plane, FilePlane) and straight:
                self.load(plane, 0, numel, flat)
            else:
                for start, stop in tiles(0, numel, self.tile):
                    self._gather_tile(plane, flat, start, stop)

    def _gather_tile(self, plane: Plane, flat: torch.Tensor, start: int, stop: int) -> None:
        on_device = plane.device_view(start, stop)
        if on_device is not None:
            flat[start:stop].copy_(on_device)
            return
        tile, _ = self.host_tile(PlaneKind.WEIGHTS, plane, start, stop)
        if tile.dtype != flat.dtype:
            cast = self.staged(PlaneKind.EXP_AVG, flat.dtype, stop - start)
            tile = cast.copy_(tile)
        with self.crossing(Tier.CPU, self.device.tier, tile.numel() * tile.element_size()):
            self.device.copy(flat[start:stop], tile, "fetch").wait()
