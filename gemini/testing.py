"""What tests and benchmarks need and no user: a GPU for machines without one, and a clock for it.

The GPU has its own memory and byte budget, and copies that are not complete at once: they run on threads behind a clock
that tests control. A :class:`RandomClock` makes them as unruly as a GPU's. Its windows may be cut out of one stretch of
addresses, as on a GPU: what is free may then be in pieces. Importing this module, which nothing of the product does,
makes it the device that ``device="standin"`` names.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable

import torch

from gemini.interrupts import WHOLE, call_without_grad
from gemini.memory.devices.device import Event, HostMemoryDevice, register_device
from gemini.memory.devices.pages import PAGE, FramePool, PageWindow, Window, in_pages
from gemini.patches import register
from gemini.tiers import Tier


class Arena:
    """Who has which range of ``size`` bytes, a whole number of pages.

    used = the sum of what was taken, in pages,   used + free = size,   no two free ranges touch   (in tests)
    """

    def __init__(self, size: int):
        assert size > 0 and size % PAGE == 0, size
        self.size = size
        self.used = 0
        self._free = [(0, size)]  # (offset, size), by offset
        self._taken: dict[int, int] = {}

    @property
    def free(self) -> tuple[tuple[int, int], ...]:
        """The free ranges, (offset, size), by offset."""
        return tuple(self._free)

    def take(self, num_bytes: int) -> int | None:
        """The offset of a range of ``num_bytes``, rounded up to pages; None if there is none that long."""
        assert num_bytes > 0, num_bytes
        size = in_pages(num_bytes)
        long_enough = [number for number, (_, free) in enumerate(self._free) if free >= size]
        if not long_enough:
            return None
        # One of just this size first: buffers of one size class then cut nothing up.
        number = next((number for number in long_enough if self._free[number][1] == size), long_enough[0])
        offset, free = self._free.pop(number)
        if free > size:
            self._free.insert(number, (offset + size, free - size))
        self._taken[offset] = size
        self.used += size
        return offset

    def give_back(self, offset: int) -> None:
        """Free again what was taken at ``offset``, joined with its free neighbours."""
        size = self._taken.pop(offset)
        self.used -= size
        start, stop = offset, offset + size
        number = bisect_left(self._free, (offset, 0))
        if number < len(self._free) and self._free[number][0] == stop:
            stop += self._free.pop(number)[1]
        if number > 0 and sum(self._free[number - 1]) == start:
            number -= 1
            start = self._free.pop(number)[0]
        self._free.insert(number, (start, stop - start))


class Pieces:
    """The stretch, and further ones where a window has no place: then there are more bytes than were reserved."""

    def __init__(self) -> None:
        self.num_moves = 0
        """How often windows were moved together."""
        self._arenas: list[Arena] = []

    @property
    def num_bytes(self) -> int:
        """What windows have or had: nothing else gets it."""
        return sum(arena.size for arena in self._arenas)

    def reserve(self, num_bytes: int) -> None:
        """Make a stretch of so many bytes, instead of those there are."""
        assert not any(arena.used for arena in self._arenas), "windows have memory"
        self._arenas = [Arena(num_bytes)] if num_bytes > 0 else []

    def has_place(self, num_bytes: int) -> bool:
        """As :meth:`gemini.memory.devices.device.Device.has_place`."""
        return any(size >= num_bytes for arena in self._arenas for _, size in arena.free)

    def take(self, num_bytes: int) -> tuple[Arena, int]:
        """A block: where it is."""
        for arena in self._arenas:
            address = arena.take(num_bytes)
            if address is not None:
                return arena, address
        self._arenas.append(Arena(num_bytes))
        return self.take(num_bytes)


class PieceWindow(PageWindow):
    """Host pages with an address in the stretch."""

    def __init__(self, num_bytes: int, pieces: Pieces):
        super().__init__(num_bytes, FramePool())
        self._pieces = pieces
        self._block: tuple[Arena, int] | None = None

    def populate(self) -> None:
        self._block = self._pieces.take(self.num_bytes)
        super().populate()

    def depopulate(self) -> bool:
        self.discard()
        return False

    def discard(self) -> None:
        if self._block is not None:
            arena, address = self._block
            arena.give_back(address)
        self._block = None
        super().discard()


SHORT, LONG = 0.0002, 0.003
"""Seconds: the longest of the ordinary delays, and of the long ones (four in ten)."""


class RandomClock:
    """Delays each copy by a time drawn for its stream, or until copies of other streams have overtaken it. The n-th
    copy of a stream gets the same fate under the same seed, whatever the other streams do; how threads then meet is up
    to the system. Nothing is held for longer than ``longest`` seconds, or once the clock is closed.
    """

    def __init__(self, seed: int, *, longest: float = LONG):
        self._seed, self._longest = seed, longest
        self._fates: dict[str, random.Random] = {}
        self._released: Counter[str] = Counter()
        self._change = threading.Condition()
        self._closed = False
        self.order: list[str] = []
        """The streams of the copies released so far, in the order of their release."""

    def __call__(self, stream: str) -> None:
        """Hold the calling thread, which is about to make a copy of ``stream``."""
        with self._change:
            held_for, overtaken_by = self.draw(stream)
            target = self._others(stream) + overtaken_by
            until = time.monotonic() + held_for
            while not self._closed and not (overtaken_by and self._others(stream) >= target):
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._change.wait(left)
            self._released[stream] += 1
            self.order.append(stream)
            self._change.notify_all()

    def draw(self, stream: str) -> tuple[float, int]:
        """Of the stream's next copy: seconds to hold it at most, and how many others may end that sooner (0: none)."""
        fates = self._fates.setdefault(stream, random.Random(f"{self._seed}/{stream}"))
        kind, fraction = fates.random(), fates.random()
        if kind < 0.3:
            return 0.0, 0
        if kind < 0.6:
            return fraction * min(SHORT, self._longest), 0
        if kind < 0.88:
            return self._longest, 1 + int(3 * fraction)
        return fraction * self._longest, 0

    def close(self) -> None:
        """Release everything, now and from now on."""
        with WHOLE, self._change:  # copies stand there
            self._closed = True
            self._change.notify_all()

    def _others(self, stream: str) -> int:
        return self._released.total() - self._released[stream]


END_SECONDS = 10.0
"""How long the end of a device waits for each of its streams."""


class StandinDevice(HostMemoryDevice):
    """A GPU for machines without one: its own tier and budget, computed on by the CPU, with copies that take time.
    ``memory``: bytes it pretends to have when no ``gpu=`` budget is given. ``gate``: called on the stream's thread
    before each copy is made, with the stream's name; it may block (a test's clock, or a :class:`RandomClock`, which is
    closed with the device). ``poison``: fill what a copy will overwrite with 0xFF (NaN, in every float) as soon as the
    copy may begin, so that one who reads it before the copy is complete is found out whatever was there before.
    ``in_pieces``: windows are cut out of one stretch of addresses, as on a GPU.
    """

    name = "standin"
    tier = Tier.GPU
    keeps_windows = True

    def __init__(
        self,
        memory: int = 2**30,
        gate: Callable[[str], None] | None = None,
        *,
        poison: bool = False,
        in_pieces: bool = False,
    ):
        super().__init__()
        self.pieces = Pieces() if in_pieces else None
        if in_pieces:
            self.frames = None
        self._memory = memory
        self._gate = gate or (lambda stream: None)
        self._poison = poison
        self._lock = threading.Lock()
        self._streams: dict[str, _CopyStream] = {}
        _live.add(self)

    def copy(
        self,
        into: torch.Tensor,
        source: torch.Tensor,
        stream: str,
        after: Event | None = None,
        *,
        behind_computing: bool = True,
        kept: bool = False,
    ) -> Event:
        event, gate, poison, ends = Event(), self._gate, self._poison, [into, source]
        if poison and after is None:
            _fill_with_nan(into)

        def run() -> None:  # knows nothing of the device: a copy under way does not keep it alive
            try:
                gate(stream)
                if after is not None:
                    after.wait()
                    if poison:
                        _fill_with_nan(ends[0])
                with torch.inference_mode(ends[0].is_inference()):
                    call_without_grad(ends[0].copy_, ends[1])
                ends.clear()  # before it is over: then their memory is their owners' alone
            except BaseException as e:  # surfaces in wait(): a stream never dies
                event.finish(e)
            else:
                event.finish()

        with WHOLE, self._lock:
            if stream not in self._streams:
                self._streams[stream] = _CopyStream(stream)
            self._streams[stream].put(run)
        return event

    def make_window(self, num_bytes: int) -> Window:
        return super().make_window(num_bytes) if self.pieces is None else PieceWindow(num_bytes, self.pieces)

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)  # as a GPU's, its storage can be resized

    def reserve_windows(self, num_bytes: int) -> None:
        if self.pieces is not None:
            self.pieces.reserve(num_bytes)

    def has_place(self, num_bytes: int) -> bool:
        return self.pieces is None or self.pieces.has_place(num_bytes)

    def move_windows_together(self, windows: Iterable[Window]) -> None:
        super().move_windows_together(windows)
        if self.pieces is not None:
            self.pieces.num_moves += 1

    def free_bytes(self) -> int:
        return self._memory

    def close(self) -> None:
        if isinstance(self._gate, RandomClock):
            self._gate.close()
        with self._lock:
            streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending() and hasattr(self, "_streams"):
            self.close()


class _CopyStream:
    """A thread that runs jobs in order. The thread knows only the queue, so an abandoned stream can be ended."""

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name=f"gemini-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def end(self) -> None:
        """Let what was put be done, then end the thread, and see it ended (unless it is the caller's own)."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(END_SECONDS)


def _run_jobs(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # its tensors go now, not with the next job


def _fill_with_nan(tensor: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()):
        if tensor.is_contiguous():
            call_without_grad(lambda: tensor.view(-1).view(torch.uint8).fill_(255))


_live: weakref.WeakSet[StandinDevice] = weakref.WeakSet()


def _end_all() -> None:
    """A daemon thread that is inside torch when the interpreter goes away aborts the process."""
    for device in list(_live):
        device.close()


register("atexit.register", _end_all)
register_device("standin", StandinDevice)
