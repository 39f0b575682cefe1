"""Streams, events and windows of a GPU: blocks of a pool of their own, each written again only behind its last use.

An error of the GPU belongs to the whole process: CUDA tells it in whichever call comes next, and nothing works
afterwards. What can fail on its own (a file, a refused copy) is told before the copy is under way.

The caching allocator orders the reuse of a block on the stream that it was allocated for: whoever works on that stream
finds all earlier uses behind it. Windows are filled by copies on other streams, long before the computing stream has
come to that point, so that order is too late for them and, counted from the host, too much: a copy that waits for all
that the computing stream was given waits for layers that never saw its block. Hence:

1. All windows are allocated in one ``torch.cuda.MemPool``, on one stream that computes nothing. No other allocation
   gets a block of this pool, so every write and every read of a block is a window's.
2. When a window gives its block back, a mark is made in each computing stream. All that read the window was given
   before (the manager evicts nothing that is in use), so it is behind these marks; copies into and out of it are behind
   the last event of each copy stream that touched it. These events are kept by the block's addresses
   (:class:`LastUses`).
3. A window that gets (part of) these addresses takes the events with them. Every computing stream waits for those of
   other streams at once: they are copies that it waited for long ago, unless nobody wanted them. A copy stream waits
   for all of them before its first copy that touches the window, and for nothing else that is computed.
4. So between two writes of a block by different windows there is always: last use of the first -> event -> wait of the
   stream that writes next. What is computed on further streams (``Device.beside``) must have been waited for by a
   computing stream before the window goes.
5. The pool's own stream waits for the same events before a block is given back. Nobody waits for that stream where the
   pool is private; but the allocator does before it unmaps memory (expandable segments), and without a pool (another
   allocator backend) a window waits for it instead of the events of its block.

Blocks are cut out of one segment that is allocated beforehand. What is free of it may be in pieces that are all too
short: who makes room asks for a place, too (:meth:`WindowMemory.has_place`; docs/decisions/2026-11-21-cuda-memory.md).
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from gemini import waiting
from gemini.errors import GeminiError
from gemini.memory.devices.device import Event
from gemini.memory.devices.pages import StorageWindow
from gemini.waiting import PROGRESS

if TYPE_CHECKING:
    from gemini.memory.devices.cuda import CudaDevice

SPIN_SECONDS = 50e-6
"""How long a wait asks without a pause: about what it takes to be woken up once."""

_SHORTEST, _LONGEST = 20e-6, 100e-6
"""Seconds between two questions after that: a sixteenth of what was waited so far, within these bounds."""

SMALL = 2**20
"""Bytes up to which torch's allocator takes memory from other segments than larger ones."""

_HAS_CHOICE = "include_traces" in inspect.signature(torch.cuda.MemPool.snapshot).parameters  # torch from 2.12 on
_WITHOUT_TRACES = {"include_traces": False} if _HAS_CHOICE else {}
"""Without what was allocated when, a list of blocks takes 10 us and not 200."""

_MANY = 256
"""Free ranges, above which those whose uses are all over are forgotten."""


class CudaEvent(Event):
    """A point in a stream. CUDA's own wait has no limit, so the host asks again and again."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, what: str):
        self.what = what
        self.stream = stream.cuda_stream
        """Which stream it is a point of."""
        self._device = device
        self._event = torch.cuda.Event()
        # Recorded here and never again: an event that is recorded anew would be another point.
        self._event.record(stream)

    def is_complete(self) -> bool:
        try:
            return self._event.query()
        except RuntimeError:  # over, though not well: wait() says how
            return True

    def wait(self) -> None:
        try:
            # No clock is read where it is over already.
            if self._event.query():
                return
            since = time.perf_counter()
            # Asked and not synchronized with: `synchronize` of CUDA has no limit, and Ctrl-C waits for it.
            while not self._event.query():
                waited = time.perf_counter() - since
                if waited > waiting.LOOK_SECONDS:
                    with PROGRESS.elsewhere():
                        self._wait_long()
                    return
                # 0 lets other threads of Python run; a sleep also gives the processor away, and costs a wake-up.
                time.sleep(0 if waited < SPIN_SECONDS else min(max(waited / 16, _SHORTEST), _LONGEST))
        except GeminiError:
            raise
        except RuntimeError as e:  # an error of the GPU, of this work or of any before it
            raise GeminiError(f"{self.what} failed: {e}") from e

    def _wait_long(self) -> None:
        looks = waiting.patience(lambda: self.what, is_elsewhere=True)
        looked = time.perf_counter()
        while not self._event.query():
            time.sleep(_LONGEST)
            if time.perf_counter() - looked > waiting.LOOK_SECONDS:
                next(looks)
                looked = time.perf_counter()

    def wait_on_device(self) -> None:
        with torch.cuda.device(self._device):
            # The current stream of the calling thread: each thread has its own.
            self.hold_back(torch.cuda.current_stream(self._device))

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """Let what ``stream`` is given from now on come after this event."""
        if stream.cuda_stream != self.stream:  # of its own points each stream is past
            stream.wait_event(self._event)

    def finish(self, error: BaseException | None = None) -> None:
        raise AssertionError("the GPU says when its work is over")


class CopyStream(NamedTuple):
    """One copy stream. Changed under the lock of its device."""

    stream: torch.cuda.Stream
    in_flight: deque[tuple[CudaEvent, list[torch.Tensor]]]
    """Host memory of copies under way, in their order: the GPU's engines use it and hold no reference."""


class LastUses:
    """The events behind which free ranges of addresses may be written again. Changed under the lock of its device."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, tuple[CudaEvent, ...]]] = []

    def note(self, start: int, stop: int, events: list[CudaEvent]) -> None:
        """``[start, stop)`` is free from now on, behind ``events``."""
        # What was noted of these addresses before is overtaken: the new events come after it.
        self.take(start, stop)
        self._ranges.append((start, stop, tuple(events)))
        if len(self._ranges) > _MANY:
            # Only ranges whose uses are over: anything else would let a copy overtake one that still reads the block.
            self._ranges = [kept for kept in self._ranges if not all(event.is_complete() for event in kept[2])]

    def take(self, start: int, stop: int) -> list[CudaEvent]:
        """The events that have to be over before ``[start, stop)``, which is taken now, may be written."""
        found: dict[int, CudaEvent] = {}
        kept = []
        for first, last, events in self._ranges:
            if last <= start or stop <= first:
                kept.append((first, last, events))
                continue
            found.update((id(event), event) for event in events if not event.is_complete())
            # What sticks out on either side stays free, behind the same events.
            if first < start:
                kept.append((first, start, events))
            if stop < last:
                kept.append((stop, last, events))
        self._ranges = kept
        return list(found.values())


class WindowMemory:
    """The pool of one device's windows. Changed under the lock of that device."""

    def __init__(self, device: CudaDevice):
        self._device, self.computing_streams, self._lock = device.torch_device, device.computing_streams, device.lock
        self._new_stream = device.new_stream
        self._stream: torch.cuda.Stream | None = None
        self._pool: torch.cuda.MemPool | None = None
        self._last_uses = LastUses()
        self._planned = 0
        self.is_private = torch.cuda.get_allocator_backend() == "native"
        """Whether there is a pool, whose memory nothing else gets."""

    @contextmanager
    def own(self) -> Iterator[None]:
        """Let what the calling thread allocates inside be of the pool. The allocator demands one thread at a time."""
        with self._lock, torch.cuda.device(self._device):
            if self._stream is None:
                # Computes nothing, so that the order in which the allocator hands blocks on waits for no layer.
                self._stream = self._new_stream()
            if self._pool is None and self.is_private:
                self._pool = torch.cuda.MemPool()
            own = self._pool
            pool = contextlib.nullcontext() if own is None else torch.cuda.use_mem_pool(own, self._device)
            with torch.cuda.stream(self._stream), pool:
                yield

    def reserve(self, num_bytes: int) -> None:
        """Get one segment for so many bytes of windows, in place of those of an earlier call. Where the driver has none
        that long, or with ``max_split_size_mb`` (the allocator would cut nothing out of it), they come one by one.
        """
        self._planned = num_bytes
        if self._pool is not None:
            # Copies may still read blocks of the old pool, and what is noted of them is forgotten in the next line.
            torch.cuda.synchronize(self._device)
            self._pool, self._last_uses = None, LastUses()
            torch.cuda.empty_cache()
        if num_bytes == 0 or torch.cuda.memory_stats(self._device).get("max_split_size", -1) > 0:
            return
        with contextlib.suppress(torch.cuda.OutOfMemoryError), self.own():
            # Allocated and let go at once: the segment stays in the pool, in one piece.
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def has_place(self, num_bytes: int) -> bool:
        """Whether a block of so many bytes can be cut out of a segment, or there may be a further segment for it."""
        if self._pool is None or num_bytes <= SMALL:
            return True
        # In memory of the pool alone: the rest of the allocator's has nothing for windows.
        segments = [s for s in self._pool.snapshot(**_WITHOUT_TRACES) if s["segment_type"] == "large"]
        free = [block["size"] for s in segments for block in s["blocks"] if block["state"] == "inactive"]
        got = sum(segment["total_size"] for segment in segments)
        return max(free, default=0) >= num_bytes or got + num_bytes <= self._planned

    def begin(self, address: int, num_bytes: int) -> list[CudaEvent]:
        """A window has this block: what has to be over before it is written."""
        with self._lock, torch.cuda.device(self._device):
            assert self._stream is not None
            if self._pool is None:  # a block may come from anybody: its stream has all its uses behind it
                return [CudaEvent(self._device, self._stream, "the use of a block")]
            return self._last_uses.take(address, address + num_bytes)

    def end(self, address: int, num_bytes: int, touched: list[CudaEvent]) -> None:
        """A window is about to give this block back, which ``touched`` are the last copies of."""
        with self._lock, torch.cuda.device(self._device):
            assert self._stream is not None
            # Marks of now: everything that read the window was given to these streams before.
            events = [CudaEvent(self._device, stream, "the computation") for stream in self.computing_streams()]
            events += touched
            for event in events:
                # For the allocator, which waits for this stream before it unmaps memory.
                event.hold_back(self._stream)
            self._last_uses.note(address, address + num_bytes, events)


class CudaWindow(StorageWindow):
    """A resizable storage of the pool, whose block carries the order of its uses along."""

    def __init__(self, num_bytes: int, device: torch.device, memory: WindowMemory):
        self._memory = memory
        self._address = 0  # while there is memory
        self._ready: list[CudaEvent] = []  # uses of the block by others, before this window
        self._followers: set[int] = set()  # streams that come after them
        self.touched: dict[str, CudaEvent] = {}
        """The last copy of each stream that reads or writes this memory."""
        with memory.own():
            super().__init__(num_bytes, device)

    def populate(self) -> None:
        try:
            with self._memory.own():
                super().populate()
        except torch.cuda.OutOfMemoryError:  # the allocator keeps what it has cached elsewhere while a pool is in use
            torch.cuda.empty_cache()
            with self._memory.own():
                super().populate()
        self._address = self.bytes.untyped_storage().data_ptr()
        self._ready = self._memory.begin(self._address, self.num_bytes)
        self._followers = set()
        # Computing streams at once: they wait for copies of long ago. Copy streams wait when they touch the window.
        for stream in self._memory.computing_streams():
            self.let_follow(stream)

    def let_follow(self, stream: torch.cuda.Stream) -> None:
        """Let what ``stream`` is given from now on come after all uses of the block by others before this window."""
        if stream.cuda_stream not in self._followers:
            for event in self._ready:
                event.hold_back(stream)
            self._followers.add(stream.cuda_stream)

    def depopulate(self) -> bool:
        # Before the memory goes: the block may be another window's as soon as it is back.
        if self._address:
            self._memory.end(self._address, self.num_bytes, list(self.touched.values()))
            self._address = 0
        self._ready, self.touched = [], {}
        return super().depopulate()
