"""Page-locked host memory: stretches that the CUDA driver knows and keeps in place, and the buffers cut out of them.

A GPU's copy engines reach host memory by themselves, and at full speed, only where its pages cannot move. Registering
is a call of the driver for every stretch, and one of 512 GiB is refused; so a model's buffers are registered before the
first of them is made, in stretches of at most ``LARGEST`` that end where a buffer does (a copy may not lie in two), and
a buffer costs no call (torch's own pinned allocator asks the driver for each, and rounds sizes up to powers of two).
The pages are made present before that, by many threads: the driver would do it with one, under a lock of the whole
machine. What does not fit gets a further stretch, which goes when it is empty. Where in a stretch is the business of an
:class:`Arena`. For :mod:`gemini.memory.devices.cuda`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from gemini.errors import human_bytes
from gemini.memory.devices.pages import HUGE_PAGE, PAGE, Pages, in_pages


class Arena:
    """Who has which range of ``size`` bytes, a whole number of pages: it knows no memory and no driver. Changed under
    the lock of its owner.

        used = the sum of what was taken, in pages,   used + free = size,   no two free ranges touch   (in tests)
    """

    def __init__(self, size: int):
        assert size > 0 and size % PAGE == 0, size
        self.size = size
        self.used = 0
        self.fresh = 0
        """From here on nothing was ever taken."""
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
        self.fresh = max(self.fresh, offset + size)
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


LARGEST = 64 * 2**30
"""Bytes that are registered in one call at most: 512.15 GiB were refused on an H200 (vllm, pull request 51081)."""

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context of the process


def check(error: object) -> None:
    """Raise what a call of the CUDA runtime returned; torch's names do not cover every number."""
    if int(error) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"CUDA error {int(error)}")  # type: ignore[call-overload]


class PinnedPages(Pages):
    """Host pages that the driver knows and keeps in place: huge ones where there are any, and not in a forked child."""

    def __init__(self, num_bytes: int):
        super().__init__(num_bytes)
        self._registered = False

    def register(self, node: int | None = None) -> None:
        """Pin the pages, all of them and now, if it can be on a NUMA ``node``.

        Raises:
            RuntimeError: if the driver refuses, or they are more than LARGEST; they are not pinned then.
            MemoryError: if the system has no more.
        """
        if self.num_bytes > LARGEST:
            raise RuntimeError(f"{human_bytes(self.num_bytes)} in one piece are more than drivers take")
        if node is not None:
            self.come_from((node,))
        self.touch()
        check(torch.cuda.cudart().cudaHostRegister(self.address, self.num_bytes, _PORTABLE))
        self._registered = True

    def unregister(self) -> None:
        if self._registered and os.getpid() == self._pid:
            self._registered = False
            check(torch.cuda.cudart().cudaHostUnregister(self.address))

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if _ending():
            return
        try:  # before the addresses go: the driver would hold what is no longer there
            if getattr(self, "_registered", False):
                self.unregister()
        finally:
            super().__del__()


def _runs(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Cut into runs whose sums are at most LARGEST; what alone is larger is a run of its own."""
    run: list[int] = []
    for size in sizes:
        if run and sum(run) + size > LARGEST:
            yield run
            run = []
        run.append(size)
    if run:
        yield run


class _Stretch(NamedTuple):
    """A stretch of registered pages and the book of it. ``stays``: also while nothing is in it."""

    pages: PinnedPages
    arena: Arena
    stays: bool


class _Range:
    """A hold of a buffer: the pages stay as long as it does, and its range is free when it goes."""

    def __init__(self, owner: PinnedArena, stretch: _Stretch, offset: int):
        # Weakly: a buffer that outlives its device must not keep the device.
        self._owner = weakref.ref(owner)
        self._stretch, self._offset = stretch, offset

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        owner = None if _ending() else self._owner()
        if owner is not None:
            owner._give_back(self._stretch, self._offset)


class PinnedArena:
    """All page-locked memory of one device. Any thread may ask; buffers may go on any, also inside a collection."""

    def __init__(self, device: torch.device, node: int | None = None):
        self._device, self._node = device, node
        # Changed under the lock; the first ones are those that were reserved.
        self._stretches: list[_Stretch] = []
        self._lock = threading.Lock()
        # Filled by finalizers, which take no lock: the thread they run on may have it.
        self._returned: deque[tuple[_Stretch, int]] = deque()

    def reserve(self, sizes: Sequence[int]) -> int:
        """Register now what buffers of these sizes need, which are taken in this order. Returns how many of them have
        registered memory: where the driver refuses a stretch, halves of it are tried, down to single buffers, and what
        comes behind the first refusal of one stays without.

        Raises:
            RuntimeError, MemoryError: if not even the first could be had; nothing has changed.
        """
        # What is left to do, last first: runs of sizes that fit a stretch.
        runs = list(_runs([in_pages(size) for size in sizes]))[::-1]
        done: list[_Stretch] = []
        count = 0
        with self._lock:
            while runs:
                run = runs.pop()
                try:
                    done.append(self._register(sum(run), stays=True))
                except (RuntimeError, MemoryError):
                    if len(run) > 1:
                        runs += [run[len(run) // 2 :], run[: len(run) // 2]]
                        continue
                    if not done:
                        raise
                    break
                count += len(run)
            self._stretches[:0] = done
        return count

    def take(self, num_bytes: int, *, grow: bool = True, zeroed: bool = True) -> torch.Tensor | None:
        """A page-aligned buffer as a uint8 tensor. ``grow``: register more if it does not fit; else None then."""
        # Outside of the lock, which it takes without waiting: inside it would never get it.
        self._note_returned()
        with self._lock:
            for stretch in self._stretches:
                buffer = self._cut(stretch, num_bytes, zeroed)
                if buffer is not None:
                    return buffer
            if not grow:
                return None
            self._stretches.append(self._register(-(-num_bytes // HUGE_PAGE) * HUGE_PAGE, stays=False))
            return self._cut(self._stretches[-1], num_bytes, zeroed)

    def close(self) -> None:
        """Let the driver forget all of it. Buffers stay what they are, pageable from now on."""
        with self._lock:
            stretches, self._stretches = self._stretches, []
        # Outside of the lock: unregistering waits for the driver.
        for stretch in stretches:
            stretch.pages.unregister()

    def _register(self, num_bytes: int, *, stays: bool) -> _Stretch:
        stretch = _Stretch(PinnedPages(num_bytes), Arena(num_bytes), stays)
        with torch.cuda.device(self._device):
            stretch.pages.register(self._node)
        return stretch

    def _cut(self, stretch: _Stretch, num_bytes: int, zeroed: bool) -> torch.Tensor | None:
        # Of before: `take` moves it.
        fresh = stretch.arena.fresh
        offset = stretch.arena.take(num_bytes)
        if offset is None:
            return None
        memory = (ctypes.c_char * num_bytes).from_address(stretch.pages.address + offset)
        # As with `Pages`: torch holds the buffer, and the buffer this.
        memory.owner = _Range(self, stretch, offset)  # type: ignore[attr-defined]
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        if zeroed and offset < fresh:  # somebody had it before; the rest is as the system gave it
            buffer[: fresh - offset].zero_()
        return buffer

    def _give_back(self, stretch: _Stretch, offset: int) -> None:
        """May come from a collection in the middle of anything, on the very thread that has the lock."""
        self._returned.append((stretch, offset))
        self._note_returned()

    def _note_returned(self) -> None:
        """Note what came back if the lock is free; else the next one who takes it does."""
        while self._returned and self._lock.acquire(blocking=False):
            gone = []
            try:
                while self._returned:
                    stretch, offset = self._returned.popleft()
                    stretch.arena.give_back(offset)
                    # One that `close` has taken out of the list is unregistered there.
                    if stretch.arena.used == 0 and not stretch.stays and stretch in self._stretches:
                        self._stretches.remove(stretch)
                        gone.append(stretch)
            finally:
                self._lock.release()
            # Outside of the lock: a call of the driver, for which other threads need not wait.
            for stretch in gone:
                stretch.pages.unregister()
