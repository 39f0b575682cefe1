"""Host memory that torch can see and the engine can move: page-aligned anonymous mappings; and windows.

*Windows* are memory for gathered weights that comes and goes at a fixed place, because autograd keeps views of it.
Devices make them, the manager puts memory behind them. On a GPU a window is a resizable storage over the caching
allocator.

On the CPU autograd saves *views* of weights, so evicted weights must come back at the same address. ``Pages`` is a
range of addresses that is reserved once; ``Pages.move_to`` moves its *physical* pages under another range by ``mremap``
(14 us for 64 MiB, no page faults afterwards), so one frame of memory serves many chunks in turn. Where the kernel lacks
that (Linux before 5.7, pages of another size) ``can_move_pages()`` is False and resizable torch storages are used
instead. Only Python and libc here, so that it works without a compiler.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch

from gemini.errors import GeminiError

PAGE = 4096
HUGE_PAGE = 2 * 2**20

_PROT_READ_WRITE = 0x1 | 0x2
_MAP_PRIVATE_ANONYMOUS = 0x02 | 0x20
_MAP_NORESERVE = 0x4000
_MREMAP_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 4, 10, 14, 23
_PREFERRED, _INTERLEAVE = 1, 3  # policies of mbind
_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())  # its number: libc has no such function

_TOUCHED_AT_ONCE = 256 * 2**20
_MOST_TOUCHING = 16  # threads: the system's lock of an address space keeps more from going faster

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_MAP_FAILED = ctypes.c_void_p(-1).value


def in_pages(num_bytes: int) -> int:
    """The bytes of the whole pages that hold ``num_bytes``."""
    return -(-num_bytes // PAGE) * PAGE


class Pages:
    """A range of ``num_bytes`` addresses, 2 MiB aligned; physical memory comes with the first touch. It lives as long
    as any tensor over it (torch keeps the exported buffer, the buffer keeps this object), so no tensor is left on
    unmapped memory. A forked child does not have the pages (``MADV_DONTFORK``) and never unmaps.
    """

    def __init__(self, num_bytes: int):
        assert num_bytes > 0 and num_bytes % PAGE == 0, num_bytes
        self.num_bytes = num_bytes
        self._pid = os.getpid()
        # One huge page more, so that an aligned range lies in it wherever the system puts it.
        self._mapped = num_bytes + HUGE_PAGE
        base = _libc.mmap(None, self._mapped, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        if base is None or base == _MAP_FAILED:
            raise MemoryError(f"the system refused to reserve {num_bytes} bytes of addresses: {_errno_text()}")
        self._base: int = base
        self.address = -(-base // HUGE_PAGE) * HUGE_PAGE
        # Advice may be refused (no huge pages on this kernel): it costs speed, nothing else.
        _libc.madvise(self.address, num_bytes, _MADV_HUGEPAGE)
        # A child that shared them would have every page copied at the next write, of either process.
        _libc.madvise(base, self._mapped, _MADV_DONTFORK)

    def tensor(self) -> torch.Tensor:
        """The bytes as a 1-D uint8 tensor (no copy)."""
        buffer = (ctypes.c_char * self.num_bytes).from_address(self.address)
        # What keeps the addresses: torch holds the buffer, the buffer holds this object.
        buffer.owner = self  # type: ignore[attr-defined]
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def touch(self) -> None:
        """Make every page of a fresh range present, by several threads: one takes 0.3 s a GiB. MemoryError: no more."""
        starts = range(0, self.num_bytes, _TOUCHED_AT_ONCE)
        if len(starts) == 1:  # in the middle of a step too: no thread is begun for it
            self._touch_from(0)
            return
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_TOUCHING)) as pool:
            list(pool.map(self._touch_from, starts))

    def _touch_from(self, start: int) -> None:
        address, size = self.address + start, min(_TOUCHED_AT_ONCE, self.num_bytes - start)
        if _libc.madvise(address, size, _MADV_POPULATE_WRITE) != 0:
            if ctypes.get_errno() != errno.EINVAL:
                raise MemoryError(f"no memory for {size} bytes of pages: {_errno_text()}")
            ctypes.memset(address, 0, size)  # Linux before 5.14; ctypes lets other threads run

    def come_from(self, nodes: Collection[int]) -> bool:
        """Let pages come from these NUMA nodes in turn, or from one while it has any; whether the system does that."""
        words = [0] * (max(nodes) // 64 + 1)
        for node in nodes:
            words[node // 64] |= 1 << node % 64
        mask = (ctypes.c_ulong * len(words))(*words)
        # Bits and one: the system reads one less than it is told. Refused (a container may): pages come as they would.
        return _MBIND is not None and 0 == _libc.syscall(
            ctypes.c_long(_MBIND),
            ctypes.c_void_p(self.address),
            ctypes.c_ulong(self.num_bytes),
            ctypes.c_int(_INTERLEAVE if len(nodes) > 1 else _PREFERRED),
            mask,
            ctypes.c_ulong(64 * len(words) + 1),
            ctypes.c_uint(0),
        )

    def discard(self) -> None:
        """Give the physical pages back to the system; the range reads as zeros afterwards."""
        _libc.madvise(self.address, self.num_bytes, _MADV_DONTNEED)

    def move_to(self, other: Pages) -> None:
        """Put this range's pages and their content under ``other``, whose own go. OSError: both are as before."""
        assert other.num_bytes == self.num_bytes
        # DONTUNMAP: the range here stays reserved, without pages, for the way back.
        moved = _libc.mremap(
            self.address, self.num_bytes, self.num_bytes, _MREMAP_MAYMOVE_FIXED_DONTUNMAP, other.address
        )
        if moved != other.address:
            raise OSError(ctypes.get_errno(), f"mremap of {self.num_bytes} bytes failed: {_errno_text()}")

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the interpreter the system takes everything back, and the modules used here may be gone.
        if not _ending() and getattr(self, "_base", None) and os.getpid() == self._pid:
            _libc.munmap(self._base, self._mapped)


def _errno_text() -> str:
    return os.strerror(ctypes.get_errno())


@lru_cache(maxsize=1)
def can_move_pages() -> bool:
    """Whether physical pages can be moved under a fixed address here (tried once, on one page)."""
    if mmap.PAGESIZE != PAGE:
        return False
    here, there = Pages(PAGE), Pages(PAGE)
    # With content: the call must have moved the page, and not only have returned.
    here.tensor()[0] = 7
    try:
        here.move_to(there)
    except OSError:
        return False
    return bool(there.tensor()[0] == 7)


def host_bytes(num_bytes: int, nodes: Collection[int] = ()) -> torch.Tensor:
    """Zeroed page-aligned host memory as a uint8 tensor; pages come with the first touch, from ``nodes`` in turn."""
    if mmap.PAGESIZE == PAGE:
        pages = Pages(num_bytes)
        if len(nodes) > 1:
            pages.come_from(nodes)
        return pages.tensor()
    return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")


class Window(ABC):
    """Memory at a fixed place whose bytes come and go; ``bytes`` stays the same tensor throughout."""

    bytes: torch.Tensor
    num_bytes: int

    def face(self) -> torch.Tensor:
        """The bytes for those who read them: a storage of its own if possible, in which no copy under way counts."""
        return self.bytes

    @abstractmethod
    def populate(self) -> None:
        """Put memory behind ``bytes``; its content is undefined."""

    @abstractmethod
    def depopulate(self) -> bool:
        """Take the memory away: True if it waits in the device's frame pool, False if it went back to the system."""

    @abstractmethod
    def discard(self) -> None:
        """Give what memory there may be back to the system, whether the window was populated or not."""


class StorageWindow(Window):
    """A resizable torch storage: the caching allocator behind it makes this cheap on CUDA."""

    def __init__(self, num_bytes: int, device: torch.device):
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        # Kept apart: the storage that is empty now has no size.
        self.num_bytes = num_bytes
        self.depopulate()

    def populate(self) -> None:
        self.bytes.untyped_storage().resize_(self.num_bytes)

    def depopulate(self) -> bool:
        self.bytes.untyped_storage().resize_(0)
        return False

    def discard(self) -> None:
        self.depopulate()


class PageWindow(Window):
    """Host addresses under which physical pages are moved; pages that left wait in the device's frame pool."""

    def __init__(self, num_bytes: int, frames: FramePool):
        self.pages = Pages(num_bytes)
        self.bytes, self.num_bytes = self.pages.tensor(), num_bytes
        self._frames = frames

    def face(self) -> torch.Tensor:
        # A storage of its own over the same addresses: copies under way refer to `bytes`, modules to this.
        return self.pages.tensor()

    def populate(self) -> None:
        try:
            self._frames.take(self.pages)
        except OSError as e:
            raise GeminiError(
                f"the system refused to move memory to a window ({e}). If the limit of mappings was reached, raise "
                "vm.max_map_count or GeminiConfig(max_chunk=...)"
            ) from e

    def depopulate(self) -> bool:
        try:
            self._frames.park(self.pages)
        except OSError:  # then the next window of this size starts with fresh pages
            self.pages.discard()
            return False
        return True

    def discard(self) -> None:
        self.pages.discard()


class FramePool:
    """Physical memory of evicted windows, by size, for the next one without page faults. The training thread's."""

    def __init__(self) -> None:
        self._parked: dict[int, list[Pages]] = {}  # by size: ranges that have physical pages
        self._shells: dict[int, list[Pages]] = {}  # by size: ranges of addresses that have none
        self.parked_bytes = 0

    def has(self, num_bytes: int) -> bool:
        """Whether a frame of that size is parked."""
        return bool(self._parked.get(num_bytes))

    def take(self, into: Pages) -> None:
        """Move a parked frame under ``into``; without one, pages come from the system at the first touch."""
        frames = self._parked.get(into.num_bytes)
        if frames:
            frame = frames[-1]
            # Before it is off the list: if the kernel refuses, the frame is still parked, and the books are right.
            frame.move_to(into)
            frames.pop()
            self.parked_bytes -= into.num_bytes
            # Its addresses are kept for the next eviction: reserving a range is a call of the system.
            self._shells.setdefault(into.num_bytes, []).append(frame)

    def park(self, pages: Pages) -> None:
        """Move the pages of an evicted window into the pool."""
        shells = self._shells.get(pages.num_bytes)
        shell = shells[-1] if shells else Pages(pages.num_bytes)
        # As in `take`: the lists change when the pages have moved.
        pages.move_to(shell)
        if shells:
            shells.pop()
        self._parked.setdefault(pages.num_bytes, []).append(shell)
        self.parked_bytes += pages.num_bytes

    def trim(self) -> int:
        """Give every parked frame back to the system: the bytes given back."""
        freed, self.parked_bytes = self.parked_bytes, 0
        for num_bytes, frames in self._parked.items():
            for frame in frames:
                frame.discard()
            self._shells.setdefault(num_bytes, []).extend(frames)
            frames.clear()
        return freed
