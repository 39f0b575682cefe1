"""A stand-in GPU that is as unruly as a real one: copies in any order, windows in pieces of one stretch of addresses.

The stand-in itself is a :class:`StandinDevice`. A :class:`RandomClock` at its gate delays its copies; a
:class:`PieceDevice` cuts windows out of one stretch, so that what is free may be too short wherever it is.
"""

from __future__ import annotations

import random
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable

from gemini.interrupts import WHOLE
from gemini.memory.devices.pages import PAGE, FramePool, PageWindow, Window, in_pages
from tests.standin_device import StandinDevice


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


class PieceDevice(StandinDevice):
    """A stand-in whose windows are cut out of one stretch of addresses, as on a GPU."""

    def __init__(self, memory: int = 2**30, gate: Callable[[str], None] | None = None, *, poison: bool = False):
        super().__init__(memory, gate, poison=poison)
        self.pieces = Pieces()
        self.frames = None

    def make_window(self, num_bytes: int) -> Window:
        return PieceWindow(num_bytes, self.pieces)

    def reserve_windows(self, num_bytes: int) -> None:
        self.pieces.reserve(num_bytes)

    def has_place(self, num_bytes: int) -> bool:
        return self.pieces.has_place(num_bytes)

    def move_windows_together(self, windows: Iterable[Window]) -> None:
        super().move_windows_together(windows)
        self.pieces.num_moves += 1


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
