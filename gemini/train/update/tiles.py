"""One optimizer update of one chunk, tile by tile, wherever its planes live.

Planes in host memory are updated in place; planes in the spill file (or in a device's own memory) pass through staging
and are written back. Where every plane stands on the computing device, the update runs there. Params of one tile may
have different hyperparameters, step counts, or no gradient: each is a segment, and neighbours that are updated alike go
through the kernel together. A tile begins (what is not here is on its way), runs, and finishes (what was brought is
back); who does that, and how many at once, is the caller's: the training thread, or the update lane.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from gemini import kernels
from gemini.errors import NonFiniteGradient
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import Event
from gemini.memory.movement.mover import Mover, page_up, tiles
from gemini.memory.movement.staging import StagingSet
from gemini.memory.watching.recorder import NOTHING
from gemini.planning.planes import OPTIMIZER_PLANES, PlaneKind
from gemini.planning.timeline import Lane
from gemini.tiers import Tier
from gemini.train.params.guard import ParamHandle

if TYPE_CHECKING:
    from gemini.train.engine import Engine

_UPDATED = (PlaneKind.WEIGHTS, *OPTIMIZER_PLANES)

_IN_PLACE_TILE = 2**22
"""Elements of a tile where nothing is staged: milliseconds, so that what became more urgent does not wait for long."""


class Segment(NamedTuple):
    """A param to update, as far as this rank keeps it; ``grad`` is that part of its gradient, flat, where it is not in
    the chunk's grad plane.
    """

    handle: ParamHandle
    hyper: kernels.AdamHyper
    grad: torch.Tensor | None = None


class Tile:
    """A part of a chunk's update. ``staging`` is its own until :meth:`finish`; None for the calling thread's."""

    def __init__(self, mover: Mover, chunk: Chunk, segments: list[Segment], first: int, last: int):
        self.chunk = chunk
        self.staging: StagingSet | None = None
        self.stop: torch.Tensor | None = None
        """On the device: nothing is updated there if it is not 0 by then."""
        self._mover, self._segments = mover, segments
        self._first, self._last = first, last
        self._views: dict[PlaneKind, torch.Tensor] = {}
        self._staged: list[PlaneKind] = []
        self._events: list[Event] = []
        self._on_device = runs_on_device(mover, chunk, grads_landed=segments[0].grad is None)
        self._told = f"update chunk {chunk.spec.index}", chunk.spec.index  # for those who record

    def begin(self) -> None:
        """Start to bring what cannot be worked on where it is."""
        grads_landed = self._segments[0].grad is None
        kinds = planes_of(self.chunk, grads_landed=grads_landed)
        if self._on_device:
            for kind in kinds:
                view = self.chunk.planes[kind].device_view(self._first, self._last)
                assert view is not None
                self._views[kind] = view
            return
        for kind in kinds:
            plane = self.chunk.planes[kind]
            view = plane.host_view(self._first, self._last)
            if view is None:
                view = self._area(kind, plane.dtype)
                self._staged.append(kind)
                self._events.append(self._mover.begin_load(plane, self._first, self._last, view, *self._told))
            self._views[kind] = view
        if not grads_landed and self._mover.device.tier is Tier.GPU:
            inbound = self._views[PlaneKind.GRAD] = self._area(PlaneKind.GRAD, self._grad_of(self._segments[0]).dtype)
            for a, b, segment in self._spans():
                part = self._grad_of(segment)[a - segment.handle.part.start : b - segment.handle.part.start]
                into = inbound[a - self._first : b - self._first]
                behind = not self._mover.in_worker  # the lane has waited for it, and what is computed since is more
                copy = partial(self._mover.device.copy, into, part, "evict", behind_computing=behind)
                self._events.append(self._mover.under_way(Tier.GPU, Tier.CPU, into.nbytes, copy, *self._told))

    def run(self) -> None:
        """Wait for what was brought, update, and start to take it back."""
        self._wait()
        if self._on_device:
            self._run_on_device()
            return
        residual = self._views.get(PlaneKind.RESIDUAL)
        landed = self._views.get(PlaneKind.GRAD)
        recorder = self._mover.recorder
        for a, b, segment in self._spans():
            part = slice(a - self._first, b - self._first)
            start = segment.handle.part.start
            grad = self._grad_of(segment)[a - start : b - start] if landed is None else landed[part]
            with NOTHING if recorder is None else recorder.span(Lane.ADAM, *self._told):
                kernels.adam_update(
                    self._views[PlaneKind.WEIGHTS][part],
                    None if residual is None else residual[part],
                    self._views[PlaneKind.EXP_AVG][part],
                    self._views[PlaneKind.EXP_AVG_SQ][part],
                    grad,
                    segment.hyper,
                )
        for kind in self._staged:
            if kind is not PlaneKind.GRAD:
                plane = self.chunk.planes[kind]
                view = self._views[kind]
                self._events.append(self._mover.begin_store(plane, self._first, self._last, view, *self._told))

    def _run_on_device(self) -> None:
        """In one launch where all gradients are in the grad plane, else in one for each."""
        weights, exp_avg, exp_avg_sq = (
            self._views[kind] for kind in (PlaneKind.WEIGHTS, PlaneKind.EXP_AVG, PlaneKind.EXP_AVG_SQ)
        )
        residual, landed = self._views.get(PlaneKind.RESIDUAL), self._views.get(PlaneKind.GRAD)
        spans = list(self._spans())
        recorder = self._mover.recorder
        for together in [spans] if landed is not None else [[span] for span in spans]:
            first, last = together[0][0], together[-1][1]
            part = slice(first - self._first, last - self._first)
            if landed is not None:
                grad = landed[part]
            else:
                segment = together[0][2]
                grad = self._grad_of(segment)[first - segment.handle.part.start : last - segment.handle.part.start]
            with NOTHING if recorder is None else recorder.span(Lane.ADAM, *self._told):
                kernels.adam_update_segments(
                    weights[part],
                    None if residual is None else residual[part],
                    exp_avg[part],
                    exp_avg_sq[part],
                    grad,
                    [kernels.Segment(a - first, b - first, segment.hyper) for a, b, segment in together],
                    stop=self.stop,
                )

    def finish(self) -> None:
        """Wait until everything is home."""
        self._wait()

    def is_finished(self) -> bool:
        """Whether :meth:`finish` would return at once."""
        return all(event.is_complete() for event in self._events)

    def abandon(self) -> None:
        """After a failure: nothing of this tile is under way any more, whatever became of it."""
        for event in self._events:
            try:
                event.wait()
            except Exception:
                continue  # the first failure is what is told
        self._events.clear()

    def _wait(self) -> None:
        while self._events:
            self._events[0].wait()
            self._events.pop(0)

    def _area(self, kind: PlaneKind, dtype: torch.dtype) -> torch.Tensor:
        staged = self._mover.staged if self.staging is None else self.staging.staged
        return staged(kind, dtype, self._last - self._first)

    @staticmethod
    def _grad_of(segment: Segment) -> torch.Tensor:
        assert segment.grad is not None
        return segment.grad

    def _spans(self) -> Iterator[tuple[int, int, Segment]]:
        for start, stop, segment in _spans(self._segments):
            yield max(start, self._first), min(stop, self._last), segment


def check_finite(segments: list[Segment]) -> None:
    """Refuse gradients with inf or NaN that nobody has looked at yet: a wait for the device if they are there.

    Raises:
        NonFiniteGradient: naming the param; nothing of this chunk was touched.
    """
    unseen = [(segment, segment.grad) for segment in segments if segment.grad is not None]
    found = kernels.totals([kernels.sum_squares(grad) for _, grad in unseen])
    for (segment, _), total in zip(unseen, found, strict=True):
        if not math.isfinite(total):
            raise NonFiniteGradient(
                f"the gradient of {segment.handle.name!r} holds inf or NaN. It was not updated, but other params were "
                "in this backward: resume from a checkpoint"
            )


def runs_on_device(mover: Mover, chunk: Chunk, grads_landed: bool) -> bool:
    """Whether every plane of the update stands on a device with memory of its own."""
    kinds = planes_of(chunk, grads_landed=grads_landed)
    return mover.device.tier is Tier.GPU and all(chunk.planes[kind].tier is Tier.GPU for kind in kinds)


def planes_of(chunk: Chunk, *, grads_landed: bool) -> list[PlaneKind]:
    """What an update of a chunk works on; gradients only where they have a plane."""
    return [kind for kind in _UPDATED if kind in chunk.planes] + [PlaneKind.GRAD] * grads_landed


def is_staged(mover: Mover, chunk: Chunk, segments: list[Segment]) -> bool:
    """Whether something of the update has to pass through host staging."""
    landed = segments[0].grad is None
    if runs_on_device(mover, chunk, landed):
        return False
    kinds = planes_of(chunk, grads_landed=landed)
    from_device = not landed and mover.device.tier is Tier.GPU
    return from_device or any(chunk.planes[kind].host_view(0, 0) is None for kind in kinds)


def tiles_of(
    mover: Mover, chunk: Chunk, segments: list[Segment], tile: int, stop: torch.Tensor | None = None
) -> Iterator[Tile]:
    """The tiles of an update of at most ``tile`` elements, in order; larger ones where nothing is staged.

    A device gets all in one: it is one launch there, and nothing more urgent could overtake it. ``stop`` is a flag on
    the device that stops the update there (:mod:`gemini.train.update.finite`).
    """
    if segments and runs_on_device(mover, chunk, segments[0].grad is None):
        size = chunk.spec.numel
    else:
        size = tile if is_staged(mover, chunk, segments) else _IN_PLACE_TILE
    for first, last, active in cut(segments, size):
        made = Tile(mover, chunk, active, first, last)
        made.stop = stop
        yield made


def cut(segments: list[Segment], tile: int) -> Iterator[tuple[int, int, list[Segment]]]:
    """Ranges of at most ``tile`` elements over all segments, in order, each with those that it touches."""
    segments = [s for s in segments if s.handle.part.numel]
    if not segments:
        return
    start = min(s.handle.part.start for s in segments)
    stop = page_up(max(s.handle.part.stop for s in segments))
    for first, last in tiles(start, stop, tile):
        active = [s for s in segments if s.handle.part.start < last and s.handle.part.stop > first]
        if active:
            yield first, last, active


def update_chunk(engine: Engine, chunk: Chunk, parts: Iterable[Tile]) -> None:
    """Update a chunk now, tile by tile, and drop the gathered copy that this has overtaken."""
    engine.before_write(chunk)
    try:
        about = engine.mover.about("update", f"update chunk {chunk.spec.index}", chunk.spec.index)
        with torch.profiler.record_function("gemini::adam"), about:
            for tile in parts:
                try:
                    tile.begin()
                    tile.run()
                    tile.finish()
                except BaseException:
                    tile.abandon()
                    raise
        engine.manager.drop([chunk])
        engine.write_observers.after_write(chunk)
    except BaseException as e:
        # A repeated step would update finished tiles twice, and planes may be torn: there is no way on from here.
        engine.state.mark_corrupted(e)
        engine.updates.forget()  # this error is told; what it means for those in flight goes without saying
        raise


def _spans(segments: list[Segment]) -> Iterator[tuple[int, int, Segment]]:
    """Element ranges to update in one go: neighbours that are updated alike, the padding between them included.

    Padding goes through the update like everything else and nobody ever reads what becomes of it; a few long calls keep
    the kernel's threads busy where many short ones would wake them in vain.
    """
    run: list[Segment] = []
    for segment in sorted(segments, key=lambda s: s.handle.part.start):
        follows = run and segment.handle.part.start == page_up(run[-1].handle.part.stop)
        if not (follows and segment.grad is None and run[-1].grad is None and segment.hyper == run[-1].hyper):
            if run:
                yield run[0].handle.part.start, run[-1].handle.part.stop, run[0]
            run = []
        run.append(segment)
    if run:
        yield run[0].handle.part.start, run[-1].handle.part.stop, run[0]
