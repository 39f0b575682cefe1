"""Page-locked host memory: stretches that the CUDA driver knows and keeps in place, and the buffers cut out of them.

A GPU's copy engines reach host memory by themselves, and at full speed, only where its pages cannot move. Registering
is a call of the driver for every stretch, and one of 512 GiB is refused; so a model's planes are registered before the
first of them is made, in stretches of at most ``LARGEST`` that end where a plane does (a copy may not lie in two).
Other buffers are stretches of their own. (torch's own pinned allocator rounds sizes up to powers of two.) The pages are
made present before that, by many threads: the driver would do it with one, under a lock of the whole machine. For
:mod:`gemini.memory.devices.cuda`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from gemini.errors import human_bytes
from gemini.memory.devices.pages import Pages, in_pages

LARGEST = 64 * 2**30
"""Bytes that are registered in one call at most: 512.15 GiB were refused on an H200 (vllm, pull request 51081)."""

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context of the process


def check(error: object) -> None:
    """Raise what a call of the CUDA runtime returned; torch's names do not cover every number."""
    if int(error) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"CUDA error {int(error)}")  # type: ignore[call-overload]


class PinnedPages(Pages):
    """Host pages that the driver knows and keeps in place. They may go on any thread, also inside a collection."""

    device: torch.device
    _registered = False

    def register(self, node: int | None = None) -> None:
        """Pin the pages, all of them and now, if it can be on a NUMA ``node``. RuntimeError if the driver refuses, or
        they are more than LARGEST, MemoryError if the system has no more; they are not pinned then.
        """
        if self.num_bytes > LARGEST:
            raise RuntimeError(f"{human_bytes(self.num_bytes)} in one piece are more than drivers take")
        if node is not None:
            self.come_from((node,))
        self.touch()
        with torch.cuda.device(self.device):
            check(torch.cuda.cudart().cudaHostRegister(self.address, self.num_bytes, _PORTABLE))
        self._registered = True

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if _ending():
            return
        try:  # before the addresses go: the driver would hold what is no longer there
            if self._registered and os.getpid() == self._pid:
                self._registered = False
                with torch.cuda.device(self.device):  # threads begin with the first GPU: no context is made there
                    check(torch.cuda.cudart().cudaHostUnregister(self.address))
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


class _Place(NamedTuple):
    """A place for a plane in a stretch. ``is_fresh``: nobody had it yet, so it reads as zeros."""

    pages: PinnedPages
    offset: int
    is_fresh: bool


class _Hold:
    """A buffer's hold of its place, which is free when it goes; the pages stay as long as either."""

    def __init__(self, place: _Place, free: deque[_Place]):
        self._place, self._free = place, free

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending():
            self._free.append(self._place._replace(is_fresh=False))


class PinnedArena:
    """All page-locked memory of one device. Any thread may ask; buffers may go on any, also inside a collection: there
    is no lock, places come and go by single calls of a deque.
    """

    def __init__(self, device: torch.device, node: int | None = None):
        self._device, self._node = device, node
        self._free: dict[int, deque[_Place]] = {}
        """Places of planes, by their size in whole pages."""
        self._refused = sys.maxsize
        """Bytes that the driver has refused: as many are not asked for again, and their pages not touched for it."""

    def reserve(self, sizes: Sequence[int]) -> tuple[int, Exception | None]:
        """Register now what planes of these sizes need, in this order: how many of them have registered memory, and why
        not all. Where the driver refuses a stretch its planes are tried one by one, up to the first that is refused.
        """
        count = 0
        for run in _runs([in_pages(size) for size in sizes]):
            for part in (run, *([size] for size in run)):
                try:
                    pages = self._register(sum(part))
                except (RuntimeError, MemoryError) as e:
                    if len(part) == 1:
                        return count, e
                    continue
                offset = 0
                for size in part:
                    self._free.setdefault(size, deque()).append(_Place(pages, offset, is_fresh=True))
                    offset += size
                count += len(part)
                if part is run:
                    break
        return count, None

    def take(self, num_bytes: int) -> torch.Tensor:
        """A page-aligned uint8 buffer of zeros; RuntimeError or MemoryError if its memory cannot be registered."""
        size = in_pages(num_bytes)
        try:
            place = (free := self._free[size]).popleft()
        except LookupError:
            return self._register(size).tensor()[:num_bytes]
        memory = (ctypes.c_char * num_bytes).from_address(place.pages.address + place.offset)
        # As with `Pages`: torch holds the buffer, and the buffer this.
        memory.owner = _Hold(place, free)  # type: ignore[attr-defined]
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        return buffer if place.is_fresh else buffer.zero_()

    def close(self) -> None:
        """Let go of the places that nobody has: of a device in a cycle they would stay until the garbage collector."""
        self._free.clear()

    def _register(self, num_bytes: int) -> PinnedPages:
        if num_bytes >= self._refused:
            raise RuntimeError(f"it has refused {human_bytes(self._refused)} before")
        pages = PinnedPages(num_bytes)
        pages.device = self._device
        try:
            pages.register(self._node)
        except RuntimeError:
            self._refused = min(num_bytes, self._refused)
            raise
        return pages
