"""Windows of the stand-in device cut out of one stretch of addresses, as on a GPU: what is free may be in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from gemini.memory.devices.pinned import Arena
from gemini.memory.devices.windows import FramePool, PageWindow, Window


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
