"""Windows: memory for gathered weights that comes and goes at a fixed place, because autograd keeps views of it.

On a GPU a window is a resizable storage over the caching allocator. In host memory its physical pages are moved under
a fixed address; those of evicted windows wait in the device's frame pool for the next window of their size. Devices
make windows (:mod:`gemini.memory.devices.device`), the manager puts memory behind them and takes it away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from gemini.errors import GeminiError
from gemini.memory.devices.pages import Pages


class Window(ABC):
    """Memory at a fixed place whose bytes come and go; ``bytes`` stays the same tensor throughout."""

    bytes: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.bytes.numel()

    def face(self) -> torch.Tensor:
        """The bytes as a tensor for those who read them: over a storage of its own where that is possible, so that
        counting who refers to it does not count copies under way.
        """
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
        self._size = num_bytes
        # The size is kept apart: the storage that is empty now has none.
        self.depopulate()

    @property
    def num_bytes(self) -> int:
        return self._size

    def populate(self) -> None:
        self.bytes.untyped_storage().resize_(self._size)

    def depopulate(self) -> bool:
        self.bytes.untyped_storage().resize_(0)
        return False

    def discard(self) -> None:
        self.depopulate()


class PageWindow(Window):
    """Host addresses under which physical pages are moved; pages that left wait in the device's frame pool."""

    def __init__(self, num_bytes: int, frames: FramePool):
        self.pages = Pages(num_bytes)
        self.bytes = self.pages.tensor()
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
    """Physical memory of evicted windows, by size, ready for the next window of that size without page faults. Changed
    by the training thread alone.
    """

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
