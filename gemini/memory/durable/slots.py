"""A file with two slots for every plane: one holds what was committed last, the other one takes what is written.

Page by page a plane has a *committed* slot, which nothing overwrites, and one where its content is *now*. A write goes
to the slot that is not committed, wherever its content was before; once a commit record that says where everything is
now has reached the drive (:mod:`gemini.memory.durable.folder`), that is what is committed, and the other slot is free.
So the bytes that training writes anyway are a checkpoint, and no page of it is ever half of one step and half of
another. A page that nobody has written reads as zeros.

What is written is summed (CRC-32) where it passes through memory, one sum for what is written at once into one slot.
Records have the sums, so that what a drive changes later is found before it is used.

    write -> the slot that is not committed;  commit: committed = now;  a killed run: now = committed

An update may be *tentative*: until it is known whether it counts, what it has overtaken stays as well, and writes go to
the slot that holds neither. So it can be undone by saying where the content was. That needs a slot to write to: the
content must be what was committed, as it is behind every commit, or nothing was committed yet.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from gemini.errors import StorageError, of_storage
from gemini.kernels import crc32
from gemini.memory.devices.device import Event
from gemini.memory.devices.pages import PAGE, host_bytes
from gemini.memory.nvme import Extent, SpillFile, probe

ZEROS = 2
"""In place of a slot's number: never written, all zeros."""

SUMMED_PAGES = 1024
"""Pages that are read at once to be summed."""

Runs = list[tuple[int, int, int]]
"""Runs of a plane's pages: how many, in which slot, and their CRC-32 (0 of zeros)."""


class SlotPair:
    """The two slots of one plane. Written by one thread at a time; sums have a lock: several threads look at them."""

    def __init__(self, file: SlotFile, offset: int, num_bytes: int):
        self.file, self._offset, self.num_bytes = file, offset, num_bytes
        # A byte for each page: the number of its slot, or `ZEROS`.
        self._committed = bytes([ZEROS]) * (num_bytes // PAGE)
        self._now = bytearray(self._committed)
        self._sums: tuple[dict[int, tuple[int, int]], ...] = ({}, {})
        """By slot: from a page on, how many were written at once, and their CRC-32. Pages in none are not summed."""
        self._lock = threading.Lock()
        self._before: bytes | None = None
        """Where everything was when writes became tentative; None while they are not."""

    def write(self, source: torch.Tensor, start: int) -> None:
        """Write ``source`` at byte ``start`` of the plane."""
        self.file.begin_write(self.to_write(source, start)).wait()

    def to_read(self, into: torch.Tensor, start: int) -> Iterator[Extent]:
        """The extents to read so that ``into`` is what lies from byte ``start`` of the plane on."""
        for first, last, slot, at in self._parts(self._now, start, into.nbytes):
            part = _cut(into, first, last)
            if slot == ZEROS:
                part.zero_()  # pages that were never written have no place in the file
            else:
                yield Extent(part, at)

    def to_write(self, source: torch.Tensor, start: int) -> Iterator[Extent]:
        """The extents to write so that ``source`` lies at byte ``start`` of the plane: they overwrite nothing that is
        committed. Each has been begun when the next one is asked for.
        """
        # Cut where the slots differ: one write goes to one slot.
        for first, last, committed, before in self._occupied(start, source.nbytes):
            slot, part = 1 if 0 in (committed, before) else 0, _cut(source, first, last)
            yield Extent(part, self._place(slot, start + first))
            page, count = (start + first) // PAGE, (last - first) // PAGE
            # Before the write is over: who reads it waits for the update that wrote it.
            self._now[page : page + count] = bytes([slot]) * count
            # While it is being written: summing costs no time of its own.
            self._keep_sum(slot, page, count, crc32(part))

    def _occupied(self, start: int, num_bytes: int) -> list[tuple[int, int, int, int]]:
        """Ranges within ``[0, num_bytes)``, with the slot that is committed and the one that can be gone back to."""
        before = self._before
        parts = [part[:3] for part in self._parts(self._committed, start, num_bytes)]
        if before is None:
            return [(first, last, slot, slot) for first, last, slot in parts]
        return [
            (first + begin, first + end, slot, old)
            for first, last, slot in parts
            for begin, end, old, _ in self._parts(before, start + first, last - first)
        ]

    def runs(self) -> Runs:
        """The places where everything is now, when all writes are over. What has no sum is read back (StorageError)."""
        return [
            (count, slot, crc)
            for begin, end, slot in _runs(self._now, 0, len(self._now))
            for count, crc in ([(end - begin, 0)] if slot == ZEROS else self._summed(slot, begin, end))
        ]

    def _summed(self, slot: int, page: int, end: int) -> Iterator[tuple[int, int]]:
        """Pages ``[page, end)`` of a slot as they were written: how many, and their CRC-32."""
        with self._lock:
            # A copy: reading back takes long, and writes need the lock.
            sums = dict(self._sums[slot])
        known = [first for first in sorted(sums) if page <= first and first + sums[first][0] <= end]
        for first in [*known, end]:
            while page < first:  # only a part of what was written at once is still there
                count = min(first - page, SUMMED_PAGES)
                back = host_bytes(count * PAGE)
                self.file.read(back, self._place(slot, page * PAGE))
                self._keep_sum(slot, page, count, crc := crc32(back))
                yield count, crc
                page += count
            if first < end:
                yield sums[first]
                page += sums[first][0]

    def _keep_sum(self, slot: int, page: int, count: int, crc: int) -> None:
        """The sum of pages that replace what was there."""
        with self._lock:
            sums = self._sums[slot]
            # The same range as before is the usual case, and needs no search for what it overlaps.
            if page not in sums or sums[page][0] != count:
                for first in [first for first, (n, _) in sums.items() if first < page + count and page < first + n]:
                    del sums[first]
            sums[page] = count, crc

    def commit(self, runs: Runs) -> None:
        """The records of all ranks are on the drive, and say ``runs``: the slots before may be overwritten."""
        self._committed = pages_of(runs)

    def take_committed(self, runs: Runs) -> None:
        """Say what an earlier run has committed. What is there now stays what it is: zeros, if nothing was written."""
        self._committed = pages_of(runs)
        page = 0
        for count, slot, crc in runs:
            if slot != ZEROS:
                self._keep_sum(slot, page, count, crc)
            page += count

    @property
    def can_be_tentative(self) -> bool:
        """Whether every page has a slot that holds neither what was committed nor what is there now."""
        return self._now == self._committed or all(
            ZEROS in (slot, now) or slot == now
            for first, last, slot in _runs(self._committed, 0, len(self._committed))
            for _, _, now in _runs(self._now, first, last)
        )

    def begin_tentative(self) -> None:
        """Make writes tentative: what is written from now on can be undone. Only where it :attr:`can_be_tentative`."""
        self._before = bytes(self._now)

    def keep(self) -> None:
        """Let count what was written since writes became tentative."""
        self._before = None

    def undo(self) -> None:
        """The content is what it was when writes became tentative, if they did. No write is under way."""
        if self._before is not None:
            self._now[:] = self._before
            self._before = None

    def _place(self, slot: int, start: int) -> int:
        """The offset in the file of byte ``start`` of a slot."""
        return self._offset + slot * self.num_bytes + start

    def _parts(self, pages: bytes | bytearray, start: int, num_bytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Ranges within ``[0, num_bytes)`` that lie in one slot: with the slot, and their place in the file."""
        assert start % PAGE == 0 and num_bytes % PAGE == 0, (start, num_bytes)
        first = start // PAGE
        for begin, end, slot in _runs(pages, first, first + num_bytes // PAGE):
            yield (begin - first) * PAGE, (end - first) * PAGE, slot, self._place(slot % ZEROS, begin * PAGE)


class SlotFile(SpillFile):
    """The slots of one rank, in a file with a name, or striped over several on a drive each. ``paths``: made if they
    are not there; those that are must be of the same sizes, their content is kept. ``sizes``: bytes of planes, by name.
    """

    def __init__(self, paths: Sequence[Path], sizes: Mapping[str, int]):
        self.paths = paths
        super().__init__([path.parent for path in paths], 2 * sum(sizes.values()))
        self.pairs = {name: SlotPair(self, self.allocate(2 * size), size) for name, size in sizes.items()}
        self._refusal: BaseException | None = None

    def _open(self, number: int) -> tuple[int, bool]:
        path = self.paths[number]
        direct = probe(path.parent).direct
        with of_storage(f"{path} cannot be opened"):
            return os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600), direct

    def sync(self) -> None:
        """Every write that is over has reached its drive when this returns; StorageError if a drive says otherwise."""
        for drive, fd in enumerate(self._fds):
            try:
                os.fdatasync(fd)
            except OSError as e:
                raise self.failed("write out", drive, self.num_bytes, 0, e) from e

    def refuse_writes(self, why: BaseException) -> None:
        """A commit record may be on the drive or not: what it and the one before it name must both stay. Never taken
        back: a new run decides which of the two it finds.
        """
        self._refusal = why

    def begin_write(self, extents: Iterable[Extent]) -> Event:
        if self._refusal is not None:
            raise StorageError(
                f"{self.directory}: nothing can be written since a commit failed ({self._refusal}). Start the "
                "program again and load the store: it goes on from its last commit"
            ) from self._refusal
        return super().begin_write(extents)


def slot_name(kind: str, index: int) -> str:
    """The name of the slots of a plane of a chunk."""
    return f"{kind}/{index}"


def pages_of(runs: Runs) -> bytes:
    """Runs as pages."""
    return b"".join(bytes([slot]) * count for count, slot, _ in runs)


def _runs(pages: bytes | bytearray, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of pages that say the same. Long ones cost no loop."""
    while first < last:
        slot = pages[first]
        # What is read or written at once was so before, as a rule, and is one range.
        if pages.count(slot, first, last) == last - first:
            yield first, last, slot
            return
        ends = [pages.find(bytes([other]), first, last) for other in (0, 1, ZEROS) if other != slot]
        end = min((end for end in ends if end >= 0), default=last)
        yield first, end, slot
        first = end


def _cut(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Bytes of a tensor, itself where that is all of it."""
    if (first, last) == (0, tensor.nbytes):
        return tensor
    size = tensor.dtype.itemsize
    return tensor.view(-1)[first // size : last // size]
