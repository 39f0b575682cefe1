"""Who has which range of one long stretch of memory, in integers: the book behind the page-locked host arena.

Registering memory with a driver is slow and wants few calls, so it is done once, for a stretch that holds all the
planes and the staging of a model, and buffers are cut out of it. An :class:`Arena` says where; it knows no memory and
no driver (:mod:`gemini.memory.devices.pinned` does). A buffer is put into a free range of just its size if there is
one, so that those of one size class follow each other in the same places and cut nothing up; else into the first range
that is long enough. What comes back is joined with its free neighbours at once. Sizes are rounded up to whole pages and
to nothing else.

    used = the sum of what was taken,   used + free = size,   no two free ranges touch            (checked in tests)
"""

from __future__ import annotations

from bisect import bisect_left

from gemini.memory.devices.pages import PAGE


class Arena:
    """``size`` bytes, a whole number of pages, of which ranges are taken and given back."""

    def __init__(self, size: int):
        assert size > 0 and size % PAGE == 0, size
        self.size = size
        self.used = 0
        """Bytes that are taken, in whole pages."""
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
        number = next((number for number in long_enough if self._free[number][1] == size), long_enough[0])
        offset, free = self._free.pop(number)
        if free > size:
            self._free.insert(number, (offset + size, free - size))
        self._taken[offset] = size
        self.used += size
        self.fresh = max(self.fresh, offset + size)
        return offset

    def give_back(self, offset: int) -> None:
        """What was taken at ``offset`` is free again."""
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


def in_pages(num_bytes: int) -> int:
    """The bytes of the whole pages that hold ``num_bytes``."""
    return -(-num_bytes // PAGE) * PAGE
