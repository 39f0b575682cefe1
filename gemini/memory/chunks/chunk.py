"""A chunk at run time: its planes at their homes, the window in which its weights are gathered, and its state.

A *plane* is one kind of content (weights, residual, states, gradient) and has exactly one home, in memory or in the
spill file; ``load`` and ``store`` move element ranges of it through host tensors. The gathered weights that modules
read are ``Chunk.flat``: the weights plane itself where its home is the computing tier (a *resident* chunk), else a
window whose content is a clean copy that may be dropped at any time nobody reads it.

Its state is a row of one small table (``USE_TABLE``): an event that the table does not have is an error that names the
chunk, the state, and what would have been legal. ``docs/states.md`` shows it as a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any

import torch

from gemini.errors import IllegalTransition
from gemini.memory.devices.device import DONE, Device, Event, Window
from gemini.memory.durable.slots import SlotPair
from gemini.memory.nvme import Extent, SpillFile
from gemini.planning.layout import ChunkSpec, page_up
from gemini.planning.planes import ALIGN, GRAD_ERROR, GRADS, PAGE, WEIGHTS, PlaneKind, PlaneSpec
from gemini.planning.policy import NEVER
from gemini.tiers import DRIVE, Tier

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Use(Enum):
    """A state of the gathered weights of a chunk: who holds memory for them, and who reads them.

    FREE: nobody; the weights are only at home (if home is the computing tier, a chunk is never FREE).
    FETCHING: there is memory for them and they are on their way; nobody reads it, and it may be taken once they came.
    HOLD: they are gathered and nobody reads them now; their memory may be taken (weights are clean: dropped, not
        copied).
    COMPUTE: a module reads them in forward or backward; their memory may not be taken.
    GRAD_READY: gathered, and every gradient of the chunk has arrived, so that this step reads them no more: first to
        go.
    UPDATING: an update reads the old weights out of the gathered ones, in place of their home; nobody else reads them,
        and their memory goes when it is over.
    """

    FREE = "free"
    FETCHING = "fetching"
    HOLD = "hold"
    COMPUTE = "compute"
    GRAD_READY = "grad_ready"
    UPDATING = "updating"
    __hash__ = object.__hash__  # Enum's own is written in Python, and each step of a chunk looks into the table


class UseChange(Enum):
    """An event of a chunk. A fetch ends with ARRIVE, or with FAIL."""

    FETCH = "fetch"
    ARRIVE = "arrive"
    FAIL = "fail"
    ACQUIRE = "acquire"
    RELEASE = "release"
    GRADS = "grads"
    UPDATE = "update"
    EVICT = "evict"
    __hash__ = object.__hash__


USE_TABLE: dict[tuple[Use, UseChange], Use] = {
    (Use.FREE, UseChange.FETCH): Use.FETCHING,
    (Use.FETCHING, UseChange.ARRIVE): Use.HOLD,
    # Nothing is lost: the copy at home stays the authoritative one.
    (Use.FETCHING, UseChange.FAIL): Use.FREE,
    (Use.HOLD, UseChange.ACQUIRE): Use.COMPUTE,
    # A recomputation, or another backward of the same graph, reads it once more.
    (Use.GRAD_READY, UseChange.ACQUIRE): Use.COMPUTE,
    (Use.COMPUTE, UseChange.RELEASE): Use.HOLD,
    (Use.HOLD, UseChange.GRADS): Use.GRAD_READY,
    (Use.HOLD, UseChange.UPDATE): Use.UPDATING,
    (Use.GRAD_READY, UseChange.UPDATE): Use.UPDATING,
    (Use.HOLD, UseChange.EVICT): Use.FREE,
    (Use.GRAD_READY, UseChange.EVICT): Use.FREE,
    # The one way out: the window has the weights of before the update, which nobody may read afterwards.
    (Use.UPDATING, UseChange.EVICT): Use.FREE,
}


def step(state: Use, event: UseChange, who: str) -> Use:
    """The state after ``event``; IllegalTransition, with what is legal, where there is none. No worker makes one."""
    after = USE_TABLE.get((state, event))
    if after is None:
        legal = sorted(e.value for s, e in USE_TABLE if s is state)
        raise IllegalTransition(f"{who} is {state.value}: {event.value} is not legal here, only {', '.join(legal)}")
    return after


class PendingUpdate(Event):
    """An update in flight. Ends on the thread that makes it; no worker calls :meth:`settle`."""

    def settle(self) -> None:
        """Wait for it, and take note that it is over; what broke it off is raised."""
        raise NotImplementedError


class Plane:
    """One kind of content of one chunk, at its home. Ranges are in elements of the chunk, their starts multiples of a
    page; a plane has one item for each ``block`` of them. Several threads may use it at once, on ranges of which nobody
    else writes any.
    """

    dtype: torch.dtype
    tier: Tier
    numel: int
    block: int = 1
    in_memory = False
    """Whether ranges of it may be in place."""

    @property
    def num_bytes(self) -> int:
        """In whole pages."""
        return page_up(self.items(self.numel) * self.dtype.itemsize, PAGE)

    def items(self, numel: int) -> int:
        """Items for so many elements."""
        # Rounded up: the last item stands for a block that is not full.
        return -(-numel // self.block)

    def page_up(self, numel: int) -> int:
        """The element count rounded up to whole pages of this plane: a range that a file reads and writes."""
        align = max(ALIGN, PAGE // self.dtype.itemsize)
        return -(-numel // align) * align

    def load(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Copy ``[start, stop)`` into the host tensor ``into`` (same dtype and length), before what others ask for."""
        begin_move([(self, into)], start, stop, write=False, urgent=True).wait()

    def store(self, start: int, stop: int, source: torch.Tensor) -> None:
        """Overwrite ``[start, stop)`` with the host tensor ``source`` (same dtype and length)."""
        begin_move([(self, source)], start, stop, write=True).wait()

    @property
    def host_reaches(self) -> bool:
        """Whether the CPU can work on ranges in place."""
        return self.host_view(0, 0) is not None

    def host_view(self, start: int, stop: int) -> torch.Tensor | None:
        """The range in place, where the CPU can work on it, else None."""
        return None

    def device_view(self, start: int, stop: int) -> torch.Tensor | None:
        """The range in place, where the computing device can work on it, else None."""
        return None


class MemoryPlane(Plane):
    """A plane in memory: the host's, or the device's own (then host code reaches it by copies)."""

    in_memory = True
    window: Window | None = None  # the one that the memory is of, if it goes as that of windows does

    def __init__(self, tensor: torch.Tensor, tier: Tier, device: Device, *, block: int = 1):
        self.tensor, self.tier, self._device = tensor, tier, device
        self.dtype, self.numel, self.block = tensor.dtype, tensor.numel() * block, block
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        """Those that were asked for: the same ranges are, step after step."""

    def give_up(self) -> None:
        """Give the memory back, but not the tensor: views of it are right again after :meth:`take_again`."""
        self._views.clear()
        self.tensor.untyped_storage().resize_(0)

    def take_again(self) -> None:
        """Put memory behind the tensor once more; its content is undefined."""
        self.tensor.untyped_storage().resize_(self.num_bytes)

    def num_views(self) -> int:
        """Count the tensors over the memory, of whomever, without the plane's own."""
        self._views.clear()
        # Two are that one, and the storage that is asked.
        return torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata) - 2  # type: ignore[attr-defined]

    def begin_move(self, start: int, stop: int, memory: torch.Tensor, after: Event | None, *, write: bool) -> Event:
        """As :func:`begin_move` of this plane alone."""
        own = self._range(start, stop)
        into, source = (own, memory) if write else (memory, own)
        if self.tier is Tier.GPU:
            # Neither stream is that of weights that are fetched meanwhile, perhaps far ahead.
            return self._device.copy(into, source, "store" if write else "evict", after, behind_computing=after is None)
        into.copy_(source)
        return DONE

    def host_view(self, start: int, stop: int) -> torch.Tensor | None:
        return self._range(start, stop) if self.tier is Tier.CPU else None

    def device_view(self, start: int, stop: int) -> torch.Tensor | None:
        return self._range(start, stop) if self.tier is self._device.tier else None

    def _range(self, start: int, stop: int) -> torch.Tensor:
        view = self._views.get((start, stop))
        if view is None:
            # In items: several elements share one where states are compact.
            view = self.tensor[start // self.block : self.items(stop)]
            if type(view) is torch.Tensor and not torch.is_inference_mode_enabled():  # else it is of that mode only
                self._views[start, stop] = view
        return view


class FilePlane(Plane):
    """A plane in the file of a tier. Ranges given to it end on a page as well (params are padded to whole pages)."""

    def __init__(self, file: SpillFile, numel: int, dtype: torch.dtype):
        self.tier, self.file = file.tier, file
        self.numel, self.dtype = numel, dtype
        self._offset = file.allocate(numel * dtype.itemsize)

    def to_read(self, start: int, stop: int, into: torch.Tensor) -> Iterable[Extent]:
        """The extents of the file to read so that ``into`` is that range."""
        # The file moves whole pages of `into`; a length that does not fit would reach into the next plane.
        assert into.numel() == stop - start and into.dtype == self.dtype
        return [Extent(into, self._offset + start * self.dtype.itemsize)]

    # Those to write, for one request, which asks for them in turn.
    to_write = to_read

    def give_back(self) -> None:
        """End this plane: its slot may be allocated again. No transfer of it may be under way."""
        self.file.give_back(self._offset, self.num_bytes)


class DurablePlane(FilePlane):
    """A plane in a file with a name, where it has two slots: what was committed last is not overwritten."""

    def __init__(self, pair: SlotPair, numel: int, dtype: torch.dtype):
        self.tier, self.file = DRIVE, pair.file
        self.pair, self.numel, self.dtype = pair, numel, dtype

    def to_read(self, start: int, stop: int, into: torch.Tensor) -> Iterable[Extent]:
        assert into.numel() == stop - start and into.dtype == self.dtype
        return self.pair.to_read(into, start * self.dtype.itemsize)

    def to_write(self, start: int, stop: int, source: torch.Tensor) -> Iterable[Extent]:
        assert source.numel() == stop - start and source.dtype == self.dtype
        return self.pair.to_write(source, start * self.dtype.itemsize)

    def give_back(self) -> None:
        """The slots are the plane's as long as the file lives."""


Parts = Sequence[tuple[Plane, torch.Tensor]]
"""Planes, each with the host tensor that a range of it is read into, or written from."""


def begin_move(
    parts: Parts, start: int, stop: int, after: Event | None = None, *, write: bool, urgent: bool = False
) -> Event:
    """Start to read, or overwrite, the same range of these planes of one home; a file is asked once, ``urgent`` reads
    before others. ``after``: of what the device computes, all that this waits for; None: what it was given until now.
    """
    first, memory = parts[0]
    if isinstance(first, MemoryPlane):
        return first.begin_move(start, stop, memory, after, write=write)
    of_file: Any = parts
    extents = [(plane.to_write if write else plane.to_read)(start, stop, tensor) for plane, tensor in of_file]
    file, asked = of_file[0][0].file, chain.from_iterable(extents)
    return file.begin_write(asked) if write else file.begin_read(asked, urgent=urgent)


def make_plane(
    spec: PlaneSpec,
    numel: int,
    tier: Tier,
    device: Device,
    files: Mapping[Tier, SpillFile],
    pair: SlotPair | None = None,
    *,
    crosses: bool = True,
) -> Plane:
    """A zeroed plane in its home, which is reserved. ``crosses``: it goes between host and device in every step."""
    dtype = getattr(torch, spec.dtype)
    if tier is DRIVE and pair is not None:
        return DurablePlane(pair, numel, dtype)
    if (file := files.get(tier)) is not None:
        assert spec.block == 1, spec
        return FilePlane(file, numel, dtype)
    assert not tier.in_files, f"no file for {tier}"
    # In whole pages, as they were reserved; the plane is what it needs of them.
    make_here = device.make_host_buffer if crosses else device.make_kept_buffer
    make = device.make_buffer if tier is Tier.GPU else make_here
    memory = make(spec.page_bytes(numel))[: spec.num_bytes(numel)]
    return MemoryPlane(memory.view(dtype), tier, device, block=spec.block)


@dataclass(eq=False)
class Chunk:
    """The run-time side of a :class:`ChunkSpec`. ``pins`` counts who reads the gathered weights now. Of all its fields
    a worker sets ``fetched`` alone, before its job is over.
    """

    spec: ChunkSpec
    planes: dict[PlaneKind, Plane]
    flat: torch.Tensor
    window: Window | None
    face: torch.Tensor
    """The gathered weights as modules see them: ``flat``, perhaps over another storage (``Window.face``)."""
    use: Use = Use.FREE
    pins: int = 0
    last_use: int = 0  # a count of acquires, not a time
    arrived: int = 0  # that count when its window was filled last
    stale: bool = False
    """The window was overtaken by an update: drop it as soon as nobody reads it."""
    grads_complete: bool = False
    """All gradients arrived while the weights were in use: GRAD_READY as soon as they are released."""
    fetched: Event = DONE
    """The end of the copies into the window, of the last fetch: what reads it comes after them on the device, and who
    writes its home on the host waits for them (:meth:`begin_write`)."""
    ahead: bool = False
    """Fetched ahead of its use, which is still to come."""
    on_gone: list[Callable[[Chunk], None]] = field(default_factory=list)
    """Told when its gathered weights went away."""
    lender: Any = None
    """The saved weights that count who looks into its window (``is_lent``); None where nobody can."""
    update: PendingUpdate | None = None
    """Its update in flight: whoever reads or writes the chunk's home settles it first (:meth:`settle`)."""
    is_guessed: bool = False
    """An update of it may yet be undone: nothing fetches it ahead, and whoever reads it has it undone."""
    num_missing_grads: int = 0
    """Params whose gradient has yet to arrive in this backward."""
    first_use: int = NEVER
    """The moment of a step at which it is read first, as far as that is known beforehand."""
    streamed: bool = False
    """Its update runs on the device, through which planes from host memory pass."""
    prepared: dict[Hashable, Any] = field(default_factory=dict)
    """What others have made of its planes for every step alike (views, and what is done with them), by what they call
    it: it lasts as long as the planes do."""
    trained: bool = False
    """It has the planes of an update rule: since the model was wrapped, or since one of its params became trained."""

    @property
    def name(self) -> str:
        return f"chunk {self.spec.index} ({self.spec.slots[0].name} ...)"

    @property
    def states(self) -> list[PlaneKind]:
        """The kinds of planes that its updates keep: the other half of the master, and the planes of the rule."""
        return [kind for kind in self.planes if kind != WEIGHTS and kind not in GRADS]

    @property
    def updated(self) -> list[tuple[PlaneKind, Plane]]:
        """The planes that an update reads, by kind."""
        return [(kind, plane) for kind, plane in self.planes.items() if kind != GRAD_ERROR]

    def change_planes(self, planes: Mapping[PlaneKind, Plane]) -> None:
        """Put these planes in the place of what was there of their kinds. No update of the chunk may be in flight."""
        # Before the planes change: what is prepared has views of the old memory; an update through one would be lost.
        self.prepared.clear()
        self.planes.update(planes)

    def clear_planes(self) -> None:
        """Forget its planes: their homes are free for others."""
        self.prepared.clear()
        self.planes.clear()

    @property
    def resident(self) -> bool:
        """The weights' home is where modules read them: nothing to gather, nothing to evict."""
        return self.window is None

    @property
    def gathered(self) -> bool:
        """Whether the gathered weights are there to be read."""
        return self.use not in (Use.FREE, Use.FETCHING)

    @property
    def weights(self) -> Plane:
        return self.planes[WEIGHTS]

    @property
    def is_lent(self) -> bool:
        """Whether somebody else has a tensor over its window, which then stays."""
        return self.lender is not None and self.lender.is_lent(self)  # type: ignore[no-any-return]

    def tell_gone(self) -> None:
        """Tell who listens that its gathered weights go away."""
        for listener in self.on_gone:
            listener(self)

    def settle(self) -> None:
        """Wait until no update of the chunk is in flight; one that was only guessed is undone."""
        if self.update is not None:
            self.update.settle()

    def begin_write(self) -> None:
        """Wait until nothing is on its way out of the weights' home, which is about to change, or a copy would get half
        of the old and half of the new. Called by whoever writes, on any thread.
        """
        if self.fetched is not DONE:
            self.fetched.wait_until_over()

    def step(self, event: UseChange) -> None:
        """Make a transition of ``use``. Never called by a worker."""
        # The table is looked at here first: this runs for every acquire, and `step` is called for its error only.
        self.use = USE_TABLE.get((self.use, event)) or step(self.use, event, self.name)
