"""One optimizer update of one chunk, tile by tile, wherever its planes live (:class:`Path`).

Each param has a ``ParamUpdate``; neighbours that are updated alike go through the kernel together, if the rule does not
ask where they stand. A tile begins (what is not here is on its way), runs, and finishes (what was brought is back), on
the training thread or on the update worker. Where nothing is brought, tiles are cut once (:class:`TilesInPlace`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch

from gemini import kernels, rules
from gemini.errors import NonFiniteGradient
from gemini.memory.chunks.chunk import Chunk, Parts, Plane, begin_move
from gemini.memory.devices.device import Event
from gemini.memory.movement.mover import Mover, StagingSet, by_home, tiles
from gemini.memory.watching import NOTHING
from gemini.planning.layout import page_up
from gemini.planning.planes import GRAD, RESIDUAL, WEIGHTS, PlaneKind
from gemini.planning.timeline import Track
from gemini.rules import UpdateRule
from gemini.tiers import Tier
from gemini.train.params.handle import ParamHandle
from gemini.train.update.guess import CERTAIN, Guess

_IN_PLACE_TILE = 2**22
"""Elements of a tile where nothing is staged: milliseconds, so that what became more urgent does not wait for long."""


class ParamUpdate(NamedTuple):
    """A param to update, as far as this rank keeps it; ``grad`` is that part of its gradient, flat, where it is not in
    the chunk's grad plane. The scalars were fixed when it was made: what a program sets afterwards is of the next step.
    """

    handle: ParamHandle
    scalars: Any
    grad: torch.Tensor | None = None
    sums: kernels.Sums | None = None
    """Of a gradient in the plane that nobody has looked at yet; there when it has landed."""

    @property
    def is_unseen(self) -> bool:
        """Whether nobody has looked for inf and NaN yet."""
        return self.grad is not None or self.sums is not None


class Path(Enum):
    """How a chunk is updated."""

    IN_PLACE = "in place"  # all that it touches is in host memory
    STAGED = "staged"  # on the host; what is not in its memory passes through staging
    STREAMED = "streamed"  # on the device, through whose memory tiles pass
    ON_DEVICE = "on the device"  # all that it touches is in the device's own memory


class ChunkUpdate(NamedTuple):
    """The update of one chunk, with its path as it was when it was handed over: no plane moves until it is over."""

    chunk: Chunk
    params: list[ParamUpdate]
    rule: UpdateRule
    path: Path
    in_place: TilesInPlace | None = None  # its tiles, if they were cut before
    window: torch.Tensor | None = None
    """The weights as they are, where they are gathered: read there and not from their home."""
    ready: Event | None = None
    """Of what the device computes, all that its planes there must wait for; None: all that it was given."""

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
    if Path not in chunk.prepared:
        tiers, on_gpu = {plane.tier for plane in chunk.planes.values()}, mover.device.tier is Tier.GPU
        # A transient gradient of a GPU is not within reach of the host: it passes through staging.
        from_device = on_gpu and GRAD not in chunk.planes
        if chunk.streamed and not any(tier.in_files for tier in tiers):
            path = Path.STREAMED
        elif on_gpu and tiers == {Tier.GPU}:
            path = Path.ON_DEVICE
        elif not from_device and all(plane.host_reaches for plane in chunk.planes.values()):
            path = Path.IN_PLACE
        else:
            path = Path.STAGED
        chunk.prepared[Path] = path
    return chunk.prepared[Path]  # type: ignore[no-any-return]


def update_of(
    mover: Mover, rules_of: Mapping[bool, UpdateRule], chunk: Chunk, params: list[ParamUpdate]
) -> ChunkUpdate:
    """The update of a chunk, with the path that it takes: as the planes lie now. ``rules_of``: those of chunks, by
    whether these keep their states exact.
    """
    key = "update", params[0].handle  # each optimizer has its own params of a chunk
    known: TilesInPlace | None = chunk.prepared.get(key)
    if known is not None and known.fits(params):
        return ChunkUpdate(chunk, params, known.rule, Path.IN_PLACE, known)
    update = ChunkUpdate(chunk, params, rules_of[chunk.spec.exact], path_of(mover, chunk))
    # Other arrays would not last: gradients that autograd left, views that are made in inference mode.
    if update.path is Path.IN_PLACE and update.landed and not torch.is_inference_mode_enabled():
        chunk.prepared[key] = in_place = TilesInPlace(mover, update)
        return update._replace(in_place=in_place)
    return update


class UpdateSpan(NamedTuple):
    """Elements ``[start, stop)`` of a chunk that are updated in one go, as the param is: the first one of them, where
    neighbours are updated alike; ``number`` is its place among those of the update.
    """

    start: int
    stop: int
    number: int


class Part(NamedTuple):
    """Elements ``[first, last)`` of a chunk, which make one tile, with the spans in it."""

    spans: list[UpdateSpan]
    first: int
    last: int


class Tile:
    """A part of a chunk's update. Begun, run and finished by one thread. ``stop``: on the device: nothing is updated
    there if it is not 0 by then. ``factor``: on the device: what gradients are multiplied by there, in place of the
    scalars' own. ``guess``: of which this is a part, and which may have to be undone.
    """

    def __init__(
        self,
        mover: Mover,
        update: ChunkUpdate,
        part: Part,
        *,
        stop: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
        guess: Guess = CERTAIN,
    ):
        self.chunk, self.path, self.params = update.chunk, update.path, update.params
        self.staging: StagingSet | None = None  # its own until `finish`; None for the calling thread's
        self._stop, self._factor, self._guess = stop, factor, guess
        self._mover, self._rule, self._landed = mover, update.rule, update.landed
        self._window, self._after = update.window, update.ready
        self._spans, self._first, self._last = part
        self._views: dict[str, torch.Tensor] = {}  # by kind: where the update works
        self._staged: list[PlaneKind] = []  # kinds that were brought, and are taken back
        self._beside: list[tuple[torch.Tensor, torch.Tensor]] = []  # weights, and a copy that a guess updates
        self._events: list[Event] = []  # transfers under way: in, and after `run` out
        self._label = f"update chunk {update.chunk.spec.index}", update.chunk.spec.index  # for those who record

    def begin(self) -> None:
        """Start to bring what cannot be worked on where it is."""
        elsewhere, on_device = {}, self.path is Path.ON_DEVICE
        for kind, plane in self.chunk.updated:
            view = None
            if plane.in_memory:
                view = (plane.device_view if on_device else plane.host_view)(self._first, self._last)
            if view is None:
                elsewhere[kind] = plane
                continue
            place = self._views[kind] = self._guess.place(kind, view)
            if place is not view:
                self._beside.append((view, place))
        if elsewhere:
            self._bring(elsewhere)
        if not self._landed and self.path is Path.STAGED and self._mover.device.tier is Tier.GPU:
            inbound = self._set().staged(GRAD, self._grad_of(self._spans[0]).dtype, self._last - self._first)
            self._views[GRAD] = inbound
            for span in self._spans:
                into = inbound[span.start - self._first : span.stop - self._first]
                self._events.append(self._begin_copy(into, self._grad_of(span)))

    def _bring(self, planes: dict[PlaneKind, Plane]) -> None:
        """Start to bring planes into staging, which are taken back when they are updated."""
        self._views.update(self._areas(planes))
        if WEIGHTS in planes and self._window is not None:
            # A copy, though the window is in host memory: a call that computes still may read the old weights there.
            del planes[WEIGHTS]
            self._events.append(self._begin_copy(self._views[WEIGHTS], self._window[self._first : self._last]))
        self._move([(plane, self._views[kind]) for kind, plane in planes.items()], write=False)

    def _move(self, parts: Parts, *, write: bool) -> None:
        """Start to read the range of these planes into host tensors, or to overwrite it."""
        for tier, num_bytes, own in by_home(parts):
            ends = (Tier.CPU, tier) if write else (tier, Tier.CPU)
            begin = partial(begin_move, own, self._first, self._last, self._after, write=write)
            self._events.append(self._mover.under_way(*ends, num_bytes, begin, *self._label))

    def _begin_copy(self, into: torch.Tensor, source: torch.Tensor) -> Event:
        """Start to copy what the computing device has."""
        device = self._mover.device
        copy = partial(device.copy, into, source, "evict", self._after, behind_computing=self._after is None)
        return self._mover.under_way(device.tier, Tier.CPU, into.nbytes, copy, *self._label)

    def run(self) -> None:
        """Wait for what was brought, update, and start to take it back."""
        # What is brought must be there, and the slot must not be written by a copy any more.
        self._wait()
        # Before the kernel overwrites it.
        if not self._guess.is_kept:
            for kind, view in self._views.items():
                self._guess.save(kind, self._first, self._last, view)
        self._update()
        # The update reads gradients and changes none.
        parts = [(self.chunk.planes[kind], self._views[kind]) for kind in self._staged if kind != GRAD]
        if parts:
            self._move(parts, write=True)

    def _update(self) -> None:
        for several, arrays in self._calls():
            self._update_spans(several, arrays)

    def _calls(self) -> list[tuple[list[UpdateSpan], rules.Arrays]]:
        """Spans and arrays of each call: on a device one if all gradients are in the grad plane; else one per span."""
        at_once = GRAD in self._views and self.path in (Path.ON_DEVICE, Path.STREAMED)
        calls = [self._spans] if at_once else [[span] for span in self._spans]
        return [(several, self._arrays(several)) for several in calls]

    def _arrays(self, several: list[UpdateSpan]) -> rules.Arrays:
        """The arrays of one call: the part of each view that its spans cover."""
        first, last = several[0].start, several[-1].stop
        of = {
            kind: _part(view, self.chunk.planes, kind, first - self._first, last - self._first)
            for kind, view in self._views.items()
        }
        grad = of[GRAD] if GRAD in of else self._grad_of(several[0])
        return rules.Arrays(of[WEIGHTS], of.get(RESIDUAL), of, grad)

    def _update_spans(self, several: list[UpdateSpan], arrays: rules.Arrays) -> None:
        """Run the rule over spans of one call, with the scalars of each."""
        first, params, recorder = several[0].start, self.params, self._mover.watch.recorder
        segments = [
            rules.Segment(start - first, stop - first, params[n].scalars, self._where(start, params[n].handle))
            for start, stop, n in several
        ]
        with NOTHING if recorder is None else recorder.span(Track.UPDATE, *self._label):
            if self._rule.spec.whole:
                self._update_whole(arrays, segments, params[several[0].number].handle.factors)
            else:
                self._rule.run(arrays, segments, self._stop, self._factor)

    def _update_whole(
        self, arrays: rules.Arrays, segments: list[rules.Segment], factors: dict[str, torch.Tensor]
    ) -> None:
        """Run a rule that needs a param whole: the tile is one, with its factors among its states, where that runs."""
        device, states = arrays.grad.device, dict(arrays.states)
        states.update({name: value.to(device) for name, value in factors.items()})
        # Budgets have room for the temporaries of one param: the worker and the training thread take turns.
        with self._mover.one_at_a_time:
            self._rule.run(arrays._replace(states=states), segments, self._stop)
        for name, value in factors.items():
            # What was copied there is copied back; on the same device the rule has changed it in place.
            if value.device != device:
                value.copy_(states[name])

    def _where(self, start: int, handle: ParamHandle) -> rules.Where | None:
        """The place of a span in its param, for rules that ask for it."""
        if self._rule.spec.needs == "elements":
            return None
        return rules.Where(handle.name, handle.part.offset + start - handle.part.start, handle.view.shape)

    def finish(self) -> None:
        """Wait until everything is home."""
        self._wait()
        # Behind the wait: the other planes of the tile are home, and a guess that is kept finds all of it.
        for home, new in self._beside:
            self._guess.bring_home(home, new)

    def is_finished(self) -> bool:
        """Whether :meth:`finish` would return at once. Never blocks."""
        return all(event.is_complete() for event in self._events)

    def abandon(self) -> None:
        """After a failure: nothing of this tile is under way any more, whatever became of it."""
        # All of them, whatever they raise: staging and planes are given to others next.
        for event in self._events:
            with contextlib.suppress(Exception):  # the first failure is what is told
                event.wait()
        self._events.clear()

    def _wait(self) -> None:
        while self._events:
            self._events[0].wait()
            # After its wait: an interrupt in it leaves the event to be waited for by `abandon`.
            self._events.pop(0)

    def _set(self) -> StagingSet:
        # The set of the thread that runs this, whichever that is.
        return self.staging or self._mover.own_staging()

    def _areas(self, planes: Mapping[PlaneKind, Plane]) -> dict[PlaneKind, torch.Tensor]:
        """Staging for planes, which are brought and taken back."""
        self._staged += planes
        return self._set().areas(planes, self._last - self._first)

    def _grad_of(self, span: UpdateSpan) -> torch.Tensor:
        """The part of a gradient, left by autograd, that a span covers. Both count from the param's part of a chunk."""
        handle, grad = self.params[span.number].handle, self.params[span.number].grad
        assert grad is not None
        return grad[span.start - handle.part.start : span.stop - handle.part.start]


class TileInPlace(Tile):
    """A part of an update of which nothing is brought: its arrays are the same in every step."""

    def __init__(self, mover: Mover, update: ChunkUpdate, part: Part):
        super().__init__(mover, update, part)
        # Views are looked up here, once; `begin` of a step has nothing to do.
        super().begin()
        self._every_step = self._calls()

    def begin(self) -> None:
        """Bring nothing: it is all there."""

    def run(self) -> None:
        for several, arrays in self._every_step:
            self._update_spans(several, arrays)

    def finish(self) -> None:
        """Take nothing back: it is all there still."""


class TilesInPlace:
    """The tiles of a chunk's update in place, for as long as its planes are there (``Chunk.prepared``), and its params
    and which of them are updated alike stay the same.
    """

    def __init__(self, mover: Mover, update: ChunkUpdate):
        self.rule = update.rule
        self._handles = [param.handle for param in update.params]
        self._alike = _alike(update.params)
        self._tiles = [TileInPlace(mover, update, part) for part in cut(update, _IN_PLACE_TILE)]

    def fits(self, params: list[ParamUpdate]) -> bool:
        """Whether they are those of this update too."""
        return [param.handle for param in params] == self._handles and _alike(params) == self._alike

    def of_step(self, params: list[ParamUpdate]) -> list[TileInPlace]:
        """The tiles, with what these params are updated with."""
        for tile in self._tiles:
            # Scalars are all that differs between two steps.
            tile.params = params
        return self._tiles


def _alike(params: list[ParamUpdate]) -> list[int]:
    """The number of the first param that is updated with the same scalars, for each param."""
    first: dict[int, int] = {}
    # By identity: params of one group share one object, and comparing values would cost time in every step.
    return [first.setdefault(id(param.scalars), number) for number, param in enumerate(params)]


def _part(view: torch.Tensor, planes: Mapping[PlaneKind, Plane], kind: str, start: int, stop: int) -> torch.Tensor:
    """Elements ``[start, stop)`` of a tile's view of a plane."""
    block = planes[kind].block if kind in planes else 1
    return view[start:stop] if block == 1 else view[start // block : -(-stop // block)]


def check_finite(update: ChunkUpdate) -> None:
    """Refuse gradients with inf or NaN that nobody has looked at yet: a wait for the device if they are there. Those
    that land have landed. Raises NonFiniteGradient, naming the param; nothing of this chunk was touched.
    """
    unseen = [param for param in update.params if param.is_unseen]
    for part in (part for param in unseen for part in param.sums or []):
        if isinstance(part, kernels.DeviceSums):
            part.note_over()  # before the copy that has landed
    sums = [kernels.sum_squares(param.grad) if param.grad is not None else param.sums or [] for param in unseen]
    # All at once: one wait for the device and not one for each gradient.
    for param, total in zip(unseen, kernels.totals(sums), strict=True):
        if not math.isfinite(total):
            raise NonFiniteGradient(
                f"the gradient of {param.handle.name!r} holds inf or NaN. It was not updated, but other params were "
                "in this backward: resume from a checkpoint"
            )


def tiles_of(
    mover: Mover,
    update: ChunkUpdate,
    tile: int,
    stop: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    guess: Guess = CERTAIN,
) -> Iterable[Tile]:
    """The tiles of an update of at most ``tile`` elements, in order; larger ones where nothing is staged. A device gets
    all in one launch, which nothing more urgent could overtake. ``stop``, ``factor``, ``guess``: see :class:`Tile`.
    """
    # What was cut before has neither flag nor copies: those make tiles of their own.
    if update.in_place is not None and stop is None and guess.is_kept:
        return update.in_place.of_step(update.params)
    size = {Path.STAGED: tile, Path.ON_DEVICE: update.chunk.spec.numel}.get(update.path, _IN_PLACE_TILE)
    return (Tile(mover, update, part, stop=stop, factor=factor, guess=guess) for part in cut(update, size))


def cut(update: ChunkUpdate, tile: int) -> Iterator[Part]:
    """Parts of at most ``tile`` elements over all params, in order; of a rule that needs params whole one for each."""
    numbers, align = [n for n, s in enumerate(update.params) if s.handle.part.numel], update.chunk.spec.align
    if not numbers:
        return
    numbers.sort(key=lambda n: update.params[n].handle.part.start)
    parts = [(n, update.params[n].handle.part) for n in numbers]
    if update.rule.spec.whole:
        for number, part in parts:
            yield Part([UpdateSpan(part.start, part.stop, number)], part.start, page_up(part.stop, align))
        return
    for first, last in tiles(parts[0][1].start, page_up(max(part.stop for _, part in parts), align), tile):
        # None where a whole tile lies between params that are updated: nothing of it is read.
        active = [n for n, part in parts if part.start < last and part.stop > first]
        if active:
            yield Part(list(_spans(update, active, first, last)), first, last)


def _spans(update: ChunkUpdate, numbers: list[int], first: int, last: int) -> Iterator[UpdateSpan]:
    """The spans of ``[first, last)``: neighbours that are updated alike go together, the padding between them included,
    if the rule does not ask where they stand. ``numbers``: of the params that are touched, as they stand. Padding is
    updated like everything else and nobody ever reads it; a few long calls keep the kernel's threads busy where many
    short ones would wake them in vain.
    """
    merges, params, align = update.rule.spec.needs == "elements", update.params, update.chunk.spec.align
    runs: list[list[int]] = []
    for number in numbers:
        param, before = params[number], params[runs[-1][-1]] if runs else None
        # A gradient of its own is another array: such a param goes alone. Scalars are compared as `TilesInPlace.fits`
        # does: equal ones may differ in the next step.
        if (
            merges
            and before is not None
            and param.grad is before.grad is None
            and param.scalars is before.scalars
            and param.handle.part.start == page_up(before.handle.part.stop, align)
        ):
            runs[-1].append(number)
        else:
            runs.append([number])
    for run in runs:
        start, stop = params[run[0]].handle.part.start, params[run[-1]].handle.part.stop
        yield UpdateSpan(max(start, first), min(stop, last), run[0])


# A tile's planes are copied into a slot of staging in the device's memory on a stream of their own, the kernel follows
# on a stream beside the computing one, and copies on a third one take back what it changed. Everything is ordered by
# events on the device: the host begins tiles and waits only for a slot to be home again. What stands on the device
# already (transient gradients, weights that live there) is worked on in place.

STREAM = "update"  # the stream of the device on which streamed updates are computed


class StreamedTile(Tile):
    """A part of such an update; its staging is memory of the device. ``ready``: what the computing device was given
    before the update was handed over. Gradients on the device are there then, and nothing reads the weights any more.
    """

    def __init__(self, mover: Mover, update: ChunkUpdate, part: Part, *, ready: Event):
        super().__init__(mover, update, part)
        self._ready = ready

    def begin(self) -> None:
        """Start to bring what stands in host memory. What used the slot before is over: nothing else is waited for."""
        for kind, plane in self.chunk.updated:
            view = plane.device_view(self._first, self._last)
            if view is None:
                home = plane.host_view(self._first, self._last)
                assert home is not None, (self.chunk.name, kind, plane.tier)
                # In memory of the device. The slot is this tile's until it is home again.
                view = self._areas({kind: plane})[kind]
                copy = partial(self._mover.device.copy, view, home, "update in", behind_computing=False)
                self._events.append(self._mover.under_way(Tier.CPU, Tier.GPU, view.nbytes, copy, *self._label))
            self._views[kind] = view

    def run(self) -> None:
        """Let the device update what was brought as soon as it is there, and start to take it back after that."""
        device = self._mover.device
        with device.beside(STREAM):
            # On the device: the host goes on to the next tile.
            for event in (self._ready, *self._events):
                event.wait_on_device()
            self._update()
            # Inside: it marks the stream of the update and not the computing one.
            updated = device.mark()
        # Also where nothing is taken back: the slot is free when the kernel has read it.
        self._events.append(updated)
        for kind in self._staged:
            if kind != GRAD:
                home, view = self.chunk.planes[kind].host_view(self._first, self._last), self._views[kind]
                assert home is not None
                copy = partial(device.copy, home, view, "update out", updated, behind_computing=False)
                self._events.append(self._mover.under_way(Tier.GPU, Tier.CPU, view.nbytes, copy, *self._label))


def streamed_tiles(
    mover: Mover, update: ChunkUpdate, tile: int, ready: Event, slot: StagingSet | None = None
) -> Iterator[StreamedTile]:
    """The tiles of a streamed update, in order; with one ``slot``, each is finished before the next is asked for."""
    for part in cut(update, tile):
        found = StreamedTile(mover, update, part, ready=ready)
        found.staging = slot
        yield found
