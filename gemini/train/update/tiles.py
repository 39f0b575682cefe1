"""One optimizer update of one chunk, tile by tile, wherever its planes live.

Planes in host memory are updated in place; planes in the spill file (or in a device's own memory) pass through staging
and are written back. Where every plane stands on the computing device, the update runs there. Params of one tile may
have different hyperparameters, step counts, or no gradient: each has a ``ParamUpdate``, and neighbours that are updated
alike go through the kernel together (if the rule does not ask where they stand). A tile begins (what is not here is on
its way), runs, and finishes (what was brought is back); who does that, and how many at once, is the caller's: the
training thread, or the update worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch

from gemini import kernels, rules
from gemini.errors import NonFiniteGradient
from gemini.memory.chunks.chunk import Chunk, Plane
from gemini.memory.devices.device import Event
from gemini.memory.movement.mover import Mover, tiles
from gemini.memory.movement.staging import StagingSet
from gemini.memory.watching.recorder import NOTHING
from gemini.planning.layout import page_up
from gemini.planning.planes import GRAD, RESIDUAL, WEIGHTS, PlaneKind
from gemini.planning.timeline import Track
from gemini.rules import UpdateRule
from gemini.tiers import Tier
from gemini.train.params.handle import ParamHandle

_IN_PLACE_TILE = 2**22
"""Elements of a tile where nothing is staged: milliseconds, so that what became more urgent does not wait for long."""


class ParamUpdate(NamedTuple):
    """A param to update, as far as this rank keeps it; ``grad`` is that part of its gradient, flat, where it is not in
    the chunk's grad plane.
    """

    handle: ParamHandle
    scalars: Any
    grad: torch.Tensor | None = None


class Path(Enum):
    """How a chunk is updated."""

    IN_PLACE = "in place"
    """All that it touches is in host memory."""
    STAGED = "staged"
    """On the host; what is not in its memory passes through staging."""
    STREAMED = "streamed"
    """On the device, through whose memory tiles pass."""
    ON_DEVICE = "on the device"
    """All that it touches is in the device's own memory."""


class ChunkUpdate(NamedTuple):
    """The update of one chunk, with its path as it was when it was handed over: no plane moves until it is over."""

    chunk: Chunk
    params: list[ParamUpdate]
    rule: UpdateRule
    path: Path

    @property
    def landed(self) -> bool:
        """Whether the gradients are in their plane; else they are where autograd left them."""
        return GRAD in self.chunk.planes

    def grads(self) -> list[tuple[ParamUpdate, torch.Tensor]]:
        """Gradients that are where autograd left them."""
        return [(param, param.grad) for param in self.params if param.grad is not None]


def path_of(mover: Mover, chunk: Chunk) -> Path:
    """How a chunk is updated now. What the placement streams is not if something of it went to the spill file since
    (sums of gradients for which memory had no room).
    """
    tiers, on_gpu = {plane.tier for plane in chunk.planes.values()}, mover.device.tier is Tier.GPU
    if chunk.streamed and Tier.NVME not in tiers:
        return Path.STREAMED
    if on_gpu and tiers == {Tier.GPU}:
        return Path.ON_DEVICE
    from_device = on_gpu and GRAD not in chunk.planes
    in_place = all(plane.host_view(0, 0) is not None for plane in chunk.planes.values())
    return Path.IN_PLACE if in_place and not from_device else Path.STAGED


class Tile:
    """A part of a chunk's update. ``staging`` is its own until :meth:`finish`; None for the calling thread's.

    Args:
        params: those of the update that it touches.
    """

    def __init__(self, mover: Mover, update: ChunkUpdate, params: list[ParamUpdate], first: int, last: int):
        self.chunk, self.path = update.chunk, update.path
        self.staging: StagingSet | None = None
        self.stop: torch.Tensor | None = None
        """On the device: nothing is updated there if it is not 0 by then."""
        self.factor: torch.Tensor | None = None
        """On the device: what gradients are multiplied by there, in place of the scalars' own."""
        self._mover, self._rule, self._landed = mover, update.rule, update.landed
        self._spans = list(_spans(update.rule, params, first, last))
        self._first, self._last = first, last
        self._views: dict[str, torch.Tensor] = {}
        self._staged: list[PlaneKind] = []
        self._events: list[Event] = []
        self._label = f"update chunk {update.chunk.spec.index}", update.chunk.spec.index  # for those who record

    def begin(self) -> None:
        """Start to bring what cannot be worked on where it is."""
        for kind, plane in self.chunk.planes.items():
            on_device = self.path is Path.ON_DEVICE
            view = plane.device_view(self._first, self._last) if on_device else plane.host_view(self._first, self._last)
            if view is None:
                view = self._area(kind, plane)
                self._events.append(self._mover.begin_load(plane, self._first, self._last, view, *self._label))
            self._views[kind] = view
        if not self._landed and self.path is Path.STAGED and self._mover.device.tier is Tier.GPU:
            dtype = self._grad_of(*self._spans[0]).dtype
            inbound = self._set().staged(GRAD, dtype, self._last - self._first)
            self._views[GRAD] = inbound
            for a, b, param in self._spans:
                into = inbound[a - self._first : b - self._first]
                behind = not self._mover.in_worker  # the worker has waited for it, and what is computed since is more
                part = self._grad_of(a, b, param)
                copy = partial(self._mover.device.copy, into, part, "evict", behind_computing=behind)
                self._events.append(self._mover.under_way(Tier.GPU, Tier.CPU, into.nbytes, copy, *self._label))

    def run(self) -> None:
        """Wait for what was brought, update, and start to take it back."""
        self._wait()
        self._update()
        for kind in self._staged:
            if kind != GRAD:
                plane = self.chunk.planes[kind]
                view = self._views[kind]
                self._events.append(self._mover.begin_store(plane, self._first, self._last, view, *self._label))

    def _update(self) -> None:
        """On a device in one call where all gradients are in the grad plane; else in one for each span."""
        views, recorder, spans = self._views, self._mover.recorder, self._spans
        landed = views.get(GRAD)
        at_once = landed is not None and self.path in (Path.ON_DEVICE, Path.STREAMED)
        for several in [spans] if at_once else [[span] for span in spans]:
            first, last = several[0][0], several[-1][1]
            of = {kind: _part(view, self.chunk.planes, kind, first - self._first, last - self._first)
                  for kind, view in views.items()}  # fmt: skip
            grad = self._grad_of(*several[0]) if landed is None else of[GRAD]
            segments = [rules.Segment(a - first, b - first, s.scalars, self._where(a, s)) for a, b, s in several]
            with NOTHING if recorder is None else recorder.span(Track.UPDATE, *self._label):
                with _beside(several[0][2].handle.factors, of, grad.device):
                    self._rule.run(of[WEIGHTS], of.get(RESIDUAL), of, grad, segments, self.stop, self.factor)

    def _where(self, start: int, param: ParamUpdate) -> rules.Where | None:
        if self._rule.spec.needs == "elements":
            return None
        handle = param.handle
        return rules.Where(handle.name, handle.part.offset + start - handle.part.start, handle.view.shape)

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

    def _set(self) -> StagingSet:
        return self._mover.own_staging() if self.staging is None else self.staging

    def _area(self, kind: PlaneKind, plane: Plane) -> torch.Tensor:
        """Staging for a plane, which is brought and taken back."""
        self._staged.append(kind)
        return self._set().staged(kind, plane.dtype, plane.items(self._last - self._first))

    @staticmethod
    def _grad_of(start: int, stop: int, param: ParamUpdate) -> torch.Tensor:
        assert param.grad is not None
        return param.grad[start - param.handle.part.start : stop - param.handle.part.start]


@contextmanager
def _beside(factors: dict[str, torch.Tensor], states: dict[str, torch.Tensor], device: torch.device) -> Iterator[None]:
    """A param's factors among its states, where the update runs; a tile is a whole param then."""
    states.update({name: value.to(device) for name, value in factors.items()})
    yield
    for name, value in factors.items():
        if value.device != device:
            value.copy_(states[name])


def _part(view: torch.Tensor, planes: Mapping[PlaneKind, Plane], kind: str, start: int, stop: int) -> torch.Tensor:
    """Elements ``[start, stop)`` of a tile's view of a plane."""
    block = planes[kind].block if kind in planes else 1
    return view[start:stop] if block == 1 else view[start // block : -(-stop // block)]


def check_finite(update: ChunkUpdate) -> None:
    """Refuse gradients with inf or NaN that nobody has looked at yet: a wait for the device if they are there.

    Raises:
        NonFiniteGradient: naming the param; nothing of this chunk was touched.
    """
    unseen = update.grads()
    found = kernels.totals([kernels.sum_squares(grad) for _, grad in unseen])
    for (param, _), total in zip(unseen, found, strict=True):
        if not math.isfinite(total):
            raise NonFiniteGradient(
                f"the gradient of {param.handle.name!r} holds inf or NaN. It was not updated, but other params were "
                "in this backward: resume from a checkpoint"
            )


def tiles_of(
    mover: Mover, update: ChunkUpdate, tile: int, stop: torch.Tensor | None = None, factor: torch.Tensor | None = None
) -> Iterator[Tile]:
    """The tiles of an update of at most ``tile`` elements, in order; larger ones where nothing is staged.

    A device gets all in one: it is one launch there, and nothing more urgent could overtake it. ``stop`` and ``factor``
    are what the device alone knows of them: see :class:`Tile`.
    """
    size = {Path.STAGED: tile, Path.ON_DEVICE: update.chunk.spec.numel}.get(update.path, _IN_PLACE_TILE)
    for first, last, active in cut(update, size):
        made = Tile(mover, update, active, first, last)
        made.stop, made.factor = stop, factor
        yield made


def cut(update: ChunkUpdate, tile: int) -> Iterator[tuple[int, int, list[ParamUpdate]]]:
    """Ranges of at most ``tile`` elements over all params, in order, each with those that it touches; one for each
    param where the rule needs it whole.
    """
    params, align = [s for s in update.params if s.handle.part.numel], update.chunk.spec.align
    if not params:
        return
    if update.rule.spec.whole:
        for param in sorted(params, key=lambda s: s.handle.part.start):
            yield param.handle.part.start, page_up(param.handle.part.stop, align), [param]
        return
    start = min(s.handle.part.start for s in params)
    stop = page_up(max(s.handle.part.stop for s in params), align)
    for first, last in tiles(start, stop, tile):
        active = [s for s in params if s.handle.part.start < last and s.handle.part.stop > first]
        if active:
            yield first, last, active


def _spans(
    rule: UpdateRule, params: list[ParamUpdate], first: int, last: int
) -> Iterator[tuple[int, int, ParamUpdate]]:
    """Element ranges of ``[first, last)`` to update in one go: neighbours that are updated alike, the padding between
    them included, if the rule does not ask where they stand.

    Padding goes through the update like everything else and nobody ever reads what becomes of it; a few long calls keep
    the kernel's threads busy where many short ones would wake them in vain.
    """
    merges = rule.spec.needs == "elements"
    runs: list[list[ParamUpdate]] = []
    for param in sorted(params, key=lambda s: s.handle.part.start):
        before = runs[-1][-1] if runs else None
        if (
            merges and before is not None and param.grad is None and before.grad is None
            and param.handle.part.start == page_up(before.handle.part.stop, param.handle.chunk.spec.align)
            and param.scalars == before.scalars
        ):  # fmt: skip
            runs[-1].append(param)
        else:
            runs.append([param])
    for run in runs:
        yield max(run[0].handle.part.start, first), min(run[-1].handle.part.stop, last), run[0]
