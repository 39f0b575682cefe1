"""Moves bytes between homes, windows and staging, tile by tile, and counts what crosses each boundary.

A tile is at most ``TILE`` elements of a chunk. Everything that cannot be worked on in place (spill file, a device's own
memory) passes through host staging of one tile per plane, whatever the size of a param: a fused expert weight of 0.9 G
elements needs no more staging than a bias. The mover decides nothing and evicts nothing. Several threads use it: each
has a set of staging of its own, and counts for the step that its work belongs to.

A *set* of staging has room for one tile of every kind of plane, each in an area of its own. Whoever passes something
else through it takes areas by number (*scratch*): no thread updates a tile and does something else in the same set at
once. The training thread has one set. The update worker has another, cut into *slots* of smaller tiles, so that one
tile is read while one is updated and one is written. Updates that are streamed through the device have slots in its
memory. All bytes are in the ledger ("staging"), reserved when the model is placed, or on the host at the first use.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from gemini.ledger import Ledger
from gemini.memory.chunks.chunk import Chunk, FilePlane, Parts, Plane, begin_move
from gemini.memory.devices.device import DONE, AllOf, Device, Event
from gemini.memory.devices.pages import PAGE
from gemini.memory.nvme import SpillFile
from gemini.memory.watching import NOTHING, Activity, Moved, Watch
from gemini.planning.planes import ADAM, GRAD, WEIGHTS, PlaneKind, RuleSpec, is_wide
from gemini.planning.timeline import TRACKS
from gemini.planning.working import staged_bytes, staging_bytes
from gemini.tiers import Boundary, Tier
from gemini.waiting import PROGRESS


def tiles(start: int, stop: int, tile: int) -> list[tuple[int, int]]:
    """Consecutive ranges of at most ``tile`` elements that cover ``[start, stop)``."""
    if start < stop <= start + tile:
        return [(start, stop)]
    return [(at, min(at + tile, stop)) for at in range(start, stop, tile)]


def by_home(parts: Parts) -> list[tuple[Tier, int, Parts]]:
    """Put together what :func:`begin_move` takes at once (all in one file, a plane in memory), with tier and bytes."""
    homes: dict[SpillFile | Plane, list[tuple[Plane, torch.Tensor]]] = {}
    for plane, memory in parts:
        homes.setdefault(plane.file if isinstance(plane, FilePlane) else plane, []).append((plane, memory))
    return [(own[0][0].tier, sum([memory.nbytes for _, memory in own]), own) for own in homes.values()]


SLOTS = 4
"""Tiles of the update worker under way at once: one or two being read, one in the update, one being written."""


class _Memory:
    """One buffer for all areas of a set, made at the first use by the one thread that uses it; in host memory of a GPU
    at once if it ``is_reserved``, for its driver takes long. Whole, so that huge pages can stand behind it: they make a
    read from the disk several times as fast as pages of 4 KiB.
    """

    def __init__(self, device: Device, num_bytes: int, *, on_device: bool = False, is_reserved: bool = True):
        self._device, self._num_bytes, self._on_device = device, num_bytes, on_device
        self.buffer: torch.Tensor | None = None
        if device.tier is Tier.GPU and is_reserved and not on_device:
            self.get()

    def get(self) -> torch.Tensor:
        if self.buffer is None:
            with torch.inference_mode(False):  # it outlives the eval that may have asked first
                make = self._device.make_buffer if self._on_device else self._device.make_host_buffer
                self.buffer = make(self._num_bytes)
                if self._on_device:
                    # Zeroed by the computing stream. Copies into slots wait for nothing that was computed before, so
                    # without this wait the zeros could come after them.
                    self._device.mark().wait()
        return self.buffer

    def forget(self) -> None:
        """Give the memory back: the next use makes another buffer."""
        if self.buffer is not None:
            # Not by dropping it alone: a worker's last tile may live until its next one.
            self.buffer.untyped_storage().resize_(0)
        self.buffer = None


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
        """The first items of the area of ``kind``, as ``dtype``, until it is asked again. Waits for a copy out of it
        that is under way (:meth:`leaves`); how that ended is told to whoever began it.
        """
        # Taken out first: an event that is over must not be asked again, nor keep what was copied.
        leaving = self._leaving.pop(kind, None)
        if leaving is not None:
            leaving.wait_until_over()
        num_bytes, (at, size) = num_items * dtype.itemsize, self._areas[kind]
        assert num_bytes <= size, (kind, num_items, dtype, self.tile)
        memory = self._memory.buffer
        return (self._memory.get() if memory is None else memory)[at : at + num_bytes].view(dtype)

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
    """All sets of one engine. Of the bytes that are in the ledger already the first set is made, which is reserved at
    its first use if there are none, then those of workers; of those on the device slots of ``device_tile`` elements.
    """

    def __init__(self, device: Device, tile: int, ledger: Ledger, device_tile: int, rule: RuleSpec):
        reserved, on_device = [ledger.held(tier, "staging") for tier in (Tier.CPU, Tier.GPU)]
        self.tile, self._rule = tile, rule
        self.num_bytes = staging_bytes(tile, rule)
        """Of one set in host memory."""
        self._device, self._ledger = device, ledger
        self.is_reserved = reserved > 0
        """Whether the bytes of the training thread's set are in the ledger."""
        self._own = StagingSet(_Memory(device, self.num_bytes, is_reserved=self.is_reserved), tile, rule=rule)
        # Whole sets beyond the first one, as they were planned.
        self._num_left = max(reserved // self.num_bytes - 1, 0)
        self._there, slot = _Memory(device, on_device, on_device=True), staging_bytes(device_tile, rule)
        count = on_device // slot if slot else 0
        self.on_device = [StagingSet(self._there, device_tile, number * slot, rule=rule) for number in range(count)]
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

    def take_slots(self, num_slots: int = SLOTS) -> list[StagingSet]:
        """A set for a worker, cut into slots of smaller tiles (one, where a tile is a whole param), if one is left: who
        comes first gets one.
        """
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


class Working(NamedTuple):
    """The things that a worker thread works with: the step that its work belongs to, and its set of staging."""

    moved: Moved
    staging: StagingSet | None = None


class _ThreadWork(threading.local):
    working: Working | None = None  # None on the training thread


class Mover:
    """One per engine. Staging that was not reserved when the model was placed is reserved at its first use."""

    def __init__(self, device: Device, tile: int, ledger: Ledger, *, device_tile: int = 0, rule: RuleSpec = ADAM):
        self.device = device
        self.tile = tile
        self.staging = Staging(device, tile, ledger, device_tile, rule)
        self.watch = Watch()
        self.about = self.watch.about
        self.one_at_a_time = threading.Lock()
        """For updates of whole params: budgets have room for the temporaries of one."""
        self._of_thread = _ThreadWork()

    @contextmanager
    def working(self, working: Working) -> Iterator[None]:
        """Set what a worker thread works with, inside the block. On the thread of the worker itself."""
        # What was there before comes back: a job may run another one inside.
        before, self._of_thread.working = self._of_thread.working, working
        try:
            yield
        finally:
            self._of_thread.working = before

    @property
    def in_worker(self) -> bool:
        """Whether this is a worker thread, which began behind the computation of what it reads on the device."""
        return self._of_thread.working is not None

    def scratch(self, number: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """``numel`` elements of scratch area ``number`` of this thread's staging. Valid until it is asked again."""
        return self.own_staging().scratch(number, dtype, numel)

    def own_staging(self) -> StagingSet:
        """The set of staging of the calling thread. No two threads get the same one, so none has a lock."""
        working = self._of_thread.working
        return self.staging.own if working is None or working.staging is None else working.staging

    def crossing(self, source: Tier, target: Tier, num_bytes: int) -> AbstractContextManager[None]:
        """Around one copy: counts its bytes, and records it where somebody does."""
        self.count(source, target, num_bytes)
        return NOTHING if self.watch.recorder is None else self.watch.recorder.move(source, target, num_bytes)

    def count(self, source: Tier, target: Tier, num_bytes: int) -> None:
        """Bytes that cross a boundary now."""
        # Waits of other threads give up only when nothing has moved for minutes.
        PROGRESS.count += 1
        # A worker counts for the step that handed its work over, though that may be over by now.
        (self._of_thread.working or self.watch).moved.add(source, target, num_bytes)

    def under_way(
        self, source: Tier, target: Tier, num_bytes: int, begin: Callable[[], Event], name: str, chunk: int
    ) -> Event:
        """Begin with ``begin`` and count the bytes: the end of it, of which who records is told when it is noticed."""
        self.count(source, target, num_bytes)
        recorder = self.watch.recorder
        if recorder is None or (track := TRACKS.get(Boundary(source, target))) is None:
            return begin()
        return recorder.fly(begin, Activity(recorder, track, name, "", chunk, num_bytes))

    def load(self, plane: Plane, start: int, stop: int, into: torch.Tensor) -> torch.Tensor:
        """Fill the host tensor ``into`` from a plane."""
        with self.crossing(plane.tier, Tier.CPU, into.nbytes):
            plane.load(start, stop, into)
        return into

    def store(self, parts: Parts, start: int, stop: int) -> None:
        """Overwrite the same range of these planes from host tensors; a file is asked once."""
        first, memory = parts[0]
        for tier, num_bytes, own in by_home(parts) if len(parts) > 1 else [(first.tier, memory.nbytes, parts)]:
            with self.crossing(Tier.CPU, tier, num_bytes):
                begin_move(own, start, stop, write=True).wait()

    def host_tile(self, number: int, plane: Plane, start: int, stop: int) -> tuple[torch.Tensor, bool]:
        """The range as a host tensor, and whether it is scratch area ``number``, to be stored after a change."""
        view = plane.host_view(start, stop)
        if view is not None:
            return view, False
        return self.load(plane, start, stop, self.scratch(number, plane.dtype, plane.items(stop - start))), True

    def gather(self, chunk: Chunk) -> Event:
        """Start to fill a populated window with the weights from home, cast to the compute dtype (:meth:`fetch`)."""
        return self.fetch(chunk.weights, chunk.flat, chunk.spec.index)

    def needs_staging(self, chunk: Chunk) -> bool:
        """Whether :meth:`gather` passes through staging."""
        plane, flat = chunk.weights, chunk.flat
        # A cast needs an area to read into, and so does what the disk cannot write to the window itself.
        return plane.dtype != flat.dtype or not (plane.host_reaches or self._is_straight(plane, flat))

    def computes(self, chunk: Chunk) -> bool:
        """Whether :meth:`gather` is work for the computing device, a cast of masters that it keeps: it belongs to
        the thread that computes, whose stream puts it before what reads the result.
        """
        return self.device.tier is Tier.GPU and chunk.planes[WEIGHTS].tier is Tier.GPU

    def _is_straight(self, plane: Plane, flat: torch.Tensor) -> bool:
        """Whether the disk can fill ``flat`` itself."""
        # O_DIRECT wants pages: a window that does not begin at one is filled through staging.
        return isinstance(plane, FilePlane) and self.device.tier is Tier.CPU and flat.data_ptr() % PAGE == 0

    def fetch(self, plane: Plane, flat: torch.Tensor, index: int) -> Event:
        """Start to fill ``flat``, gathered weights of chunk ``index`` in a window, from a weights plane: the end of it.
        The copies wait for the last use of the window's memory and for nothing else. Reading a file is waited for here;
        what can be told at once is raised, and then nothing is under way.
        """
        about = self.about(f"fetch from {plane.tier.value}", f"fetch chunk {index}", index)
        with torch.profiler.record_function("gemini::fetch"), about:
            numel = plane.numel
            source = plane.host_view(0, numel)
            # From host memory: one copy of the whole, without staging.
            if plane.dtype == flat.dtype and source is not None:
                return self._send(flat, source)
            if plane.dtype == flat.dtype and self._is_straight(plane, flat):
                self.load(plane, 0, numel, flat)
                return DONE
            return self._send_tiles(plane, flat)

    def _send(self, into: torch.Tensor, source: torch.Tensor) -> Event:
        """Start the copy of weights into a window."""
        with self.crossing(Tier.CPU, self.device.tier, source.nbytes):
            # Not behind computing: the window carries the events of its last use, and all else that the device was
            # given until now is later than this chunk or has nothing to do with it.
            event = self.device.copy(into, source, "fetch", behind_computing=False)
            if self.watch.recorder is not None:
                # Who records wants to know its end, and nobody would look for it.
                event.wait()
        return event

    def _send_tiles(self, plane: Plane, flat: torch.Tensor) -> Event:
        """Tile after tile through areas of staging: some are being read into while another one is on its way."""
        copies = _TileCopies(self, plane, flat)
        try:
            for start, stop in tiles(0, plane.numel, self.tile):
                on_device = plane.device_view(start, stop)
                if on_device is not None:
                    # A cast by the device itself, on the stream of this thread: see `computes`.
                    flat[start:stop].copy_(on_device)
                else:
                    copies.add(start, stop)
            return copies.send_all()
        except BaseException:
            copies.abandon()
            raise


class _TileCopies:
    """The tiles of a plane on their way into a window: read into areas of the calling thread's staging, cast into
    others where the dtypes differ, and sent from there.
    """

    def __init__(self, mover: Mover, plane: Plane, flat: torch.Tensor):
        self._mover, self._plane, self._flat = mover, plane, flat
        self._staging, self._casts = mover.own_staging(), plane.dtype != flat.dtype
        # A worker has a set of its own and uses all of it; the training thread leaves most of its set to others.
        rest = tuple(range(2, self._staging.num_scratch))
        self._read_into: tuple[int, ...] = (0, 1) if mover.in_worker else (0,)
        self._send_from: tuple[int, ...] = rest
        if not self._casts:
            self._read_into = self._send_from = (0, *rest, 1) if mover.in_worker else (0, 2)
        # Without a cast one area is left to the copy out of it.
        self._most_reading = len(self._read_into) - (not self._casts)
        self._reading: deque[tuple[int, int, torch.Tensor, Event]] = deque()
        """Tiles that were begun and not sent, the oldest first."""
        self._sent: dict[int, Event] = {}
        """By area, the last copy out of it."""
        self._num_begun = self._num_sent = 0

    def add(self, start: int, stop: int) -> None:
        """Begin to read a tile; if there is no area for it, the oldest one is sent first."""
        if len(self._reading) == self._most_reading:
            self._send_oldest()
        tile, read = self._plane.host_view(start, stop), DONE
        if tile is None:
            place = self._read_into[self._num_begun % len(self._read_into)]
            tile = self._area(place, self._plane.dtype, stop - start)
            # As with copies: who records wants to know when it was over.
            if self._mover.watch.recorder is not None:
                self._mover.load(self._plane, start, stop, tile)
            else:
                self._mover.count(self._plane.tier, Tier.CPU, tile.nbytes)
                # Somebody waits for it: before other requests.
                read = begin_move([(self._plane, tile)], start, stop, write=False, urgent=True)
        self._reading.append((start, stop, tile, read))
        self._num_begun += 1

    def send_all(self) -> Event:
        """Send what was read: the end of all copies."""
        while self._reading:
            self._send_oldest()
        return AllOf(list(self._sent.values()))

    def abandon(self) -> None:
        """Wait until nothing is written to staging or window any more: both are given to others."""
        for *_, read in self._reading:
            read.wait_until_over()
        AllOf(list(self._sent.values())).wait_until_over()

    def _send_oldest(self) -> None:
        start, stop, tile, read = self._reading[0]
        read.wait()
        place = self._send_from[self._num_sent % len(self._send_from)]
        if self._casts:
            tile = self._area(place, self._flat.dtype, stop - start).copy_(tile)
        self._sent[place] = self._mover._send(self._flat[start:stop], tile)
        # Known to the set and not to this call alone: the next user of the area waits for it, whoever that is.
        self._staging.leaves(place, self._sent[place])
        # Last: after an error in here it is still in the list, and `abandon` waits for its read.
        self._reading.popleft()
        self._num_sent += 1

    def _area(self, place: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        # `scratch` waits for the copy out of this area: the disk would overwrite what is still being sent.
        tile = self._staging.scratch(place, dtype, numel)
        if place in self._sent:
            # `scratch` does not say how that ended.
            self._sent[place].wait()
        return tile
