"""Windows of the stand-in device cut out of one stretch of addresses, as on a GPU: what is free may be in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from gemini.memory.devices.arena import Arena
from gemini.memory.devices.pages import PAGE
from gemini.memory.devices.windows import FramePool, PageWindow, Window


class Pieces:
    """The stretch. A window that takes memory where it has no place is an error: room was made for too few bytes."""

    def __init__(self) -> None:
        self.num_moves = 0
        """How often windows were moved together."""
        self._arena: Arena | None = None

    def reserve(self, num_bytes: int) -> None:
        """Make it as many pages long as so many bytes are."""
        pages = num_bytes // PAGE
        self._arena = Arena(pages * PAGE) if pages > 0 else None

    def has_place(self, num_bytes: int) -> bool:
        """As :meth:`gemini.memory.devices.device.Device.has_place`."""
        if self._arena is None:
            return True
        longest = max((size for _, size in self._arena.free), default=0)
        return longest >= num_bytes or self._arena.used + num_bytes > self._arena.size

    def take(self, num_bytes: int) -> int | None:
        """The address of a block; None for one from elsewhere."""
        assert self.has_place(num_bytes), f"no piece of {num_bytes} bytes is free"
        return None if self._arena is None else self._arena.take(num_bytes)

    def give_back(self, address: int | None) -> None:
        """A block is free again."""
        if address is not None:
            assert self._arena is not None
            self._arena.give_back(address)

    def move_together(self, windows: Sequence[Window]) -> None:
        """As :meth:`gemini.memory.devices.device.Device.move_windows_together`."""
        self.num_moves += 1
        kept = [(window, window.bytes.clone()) for window in windows]
        for window, _ in kept:
            window.depopulate()
        for window, content in kept:
            window.populate()
            window.bytes.copy_(content)


class PieceWindow(PageWindow):
    """Host pages with an address in the stretch."""

    def __init__(self, num_bytes: int, pieces: Pieces):
        super().__init__(num_bytes, FramePool())
        self._pieces = pieces
        self._address: int | None = None

    def populate(self) -> None:
        self._address = self._pieces.take(self.num_bytes)
        super().populate()

    def depopulate(self) -> bool:
        self.discard()
        return False

    def discard(self) -> None:
        self._pieces.give_back(self._address)
        self._address = None
        super().discard()
