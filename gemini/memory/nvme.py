"""Tiers that keep files: one preallocated, nameless spill file per tier and process, read and written in whole pages.
No death of the process leaves it behind (``O_TMPFILE``, or unlinked at once), a full disk is an error at construction,
not in the middle of a step, and every failure is a :class:`StorageError` that says what to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from gemini.errors import StorageError, human_bytes, warn
from gemini.interrupts import WHOLE
from gemini.kernels import IO_THREADS, IoQueue
from gemini.memory.devices.device import Event
from gemini.memory.devices.pages import PAGE, host_bytes, in_pages
from gemini.tiers import DRIVE, Tier

STRIPE = 4 * 2**20
"""Bytes that lie on one drive before the next one has its turn: a block of the queue that reads and writes."""

_ZEROS = 2**20
"""Bytes at once with which a slot that was used before is overwritten."""


@dataclass(frozen=True)
class DirectoryProbe:
    """The things that a directory offers a spill file."""

    directory: Path
    direct: bool
    nameless: bool
    free_bytes: int

    def __str__(self) -> str:
        direct = "O_DIRECT" if self.direct else "no O_DIRECT: reads and writes go through the page cache"
        nameless = "O_TMPFILE" if self.nameless else "no O_TMPFILE: created and unlinked at once"
        return f"{self.directory}: {human_bytes(self.free_bytes)} free, {direct}, {nameless}"


def probe(directory: str | Path, tier: Tier = DRIVE) -> DirectoryProbe:
    """Try a spill file of one page in ``directory``; StorageError if it is missing, or cannot be written."""
    directory = Path(os.path.expanduser(directory))
    fd, direct, nameless = _open(directory, tier)
    os.close(fd)
    return DirectoryProbe(directory, direct, nameless, free_bytes(directory))


class Extent(NamedTuple):
    """Page-aligned, contiguous host memory, and the place in a file that it is read from, or written to."""

    tensor: torch.Tensor
    offset: int


class _Piece(NamedTuple):
    """A request to the queue: its ticket, the memory that it keeps, and where it is in the file of which drive."""

    ticket: int
    memory: torch.Tensor
    drive: int
    num_bytes: int
    offset: int


class FileTransfer(Event):
    """Reads or writes under way, and their memory. The first thread that waits takes the tickets, others the lock."""

    def __init__(self, spill: SpillFile, queue: IoQueue, what: str):
        # No latch, as other events have: the queue knows what is over.
        self._spill, self._queue, self._what = spill, queue, what
        self.under_way: list[_Piece] = []
        """What has begun; it grows until the transfer is handed out."""
        self._lock = threading.Lock()

    def is_complete(self) -> bool:
        # Never blocks: whoever has the lock may be waiting for the disk.
        if not self._lock.acquire(blocking=False):
            return not self.under_way  # somebody waits, and so has the tickets
        try:
            return all(self._queue.done(piece.ticket) for piece in self.under_way)
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Block until the disk is done; StorageError if one of them failed: the first that did."""
        self.wait_until_over()
        if self.error is not None:
            raise self.error

    def wait_until_over(self) -> None:
        """:meth:`wait` for who does not need to know how it ended."""
        with self._lock:
            while self.under_way:
                piece = self.under_way[0]
                try:
                    self._queue.wait(piece.ticket)
                except (OSError, RuntimeError) as e:
                    if self.error is None:
                        self.error = self._spill.failed(self._what, piece.drive, piece.num_bytes, piece.offset, e)
                except ValueError:
                    # The ticket was used up by a wait that an interrupt ended when it was over.
                    pass
                # The disk is done with it: now its memory may go. Not after an interrupt, which may have come before
                # the wait: the disk still has the memory.
                del self.under_way[0]

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Nobody waits for it, but the disk may still have the memory, which goes with this object.
        if getattr(self, "under_way", None) and not _ending():
            with contextlib.suppress(Exception):
                self.wait()


class SpillFile:
    """Slots of a nameless file, or of one on each of several drives over which all bytes are striped, ``STRIPE`` at a
    time. All offsets and sizes are whole pages; buffers are page-aligned tensors. StorageError if a directory cannot be
    used, or a disk cannot hold its share of ``num_bytes``, which are allocated at once.
    """

    def __init__(self, directories: str | Path | Sequence[str | Path], num_bytes: int, tier: Tier = DRIVE):
        several = [directories] if isinstance(directories, (str, Path)) else directories
        self._directories, self.tier = [Path(directory) for directory in several], tier
        self.directory = self._directories[0]
        self.num_bytes = 0
        self.direct = True
        """Whether all of it has O_DIRECT."""
        self._fds: list[int] = []
        # A forked child has the same descriptors and must not end what the parent works with.
        self._pid = os.getpid()
        self._used = 0  # bytes: where the next new slot begins
        self._given_back: dict[int, list[int]] = {}  # by size: the offsets that are free
        self._queue: IoQueue | None = None
        self._lock = threading.Lock()
        try:
            for number, directory in enumerate(self._directories):
                fd, direct = self._open(number)
                self._fds.append(fd)
                self.direct &= direct
                if not direct:
                    warn(f"{directory}: no O_DIRECT here, spilling goes through the page cache")
            self._extend(num_bytes)
        except StorageError:
            self.close()
            raise

    def allocate(self, num_bytes: int) -> int:
        """The offset of a slot that reads as zeros: preallocated, given back before, or at a new end of the file.
        StorageError if the disk is full, or cannot be written. Called by the training thread alone.
        """
        # Whole pages: O_DIRECT takes nothing else.
        size = in_pages(num_bytes)
        if self._given_back.get(size):
            # It stays in the list until it is overwritten: after an error it is there for the next one.
            offset = self._given_back[size][-1]
            zeros = host_bytes(min(size, _ZEROS))
            for start in range(0, size, _ZEROS):
                self.write(zeros[: size - start], offset + start)
            return self._given_back[size].pop()
        offset, end = self._used, self._used + size
        if end > self.num_bytes:
            self._extend(end)
        self._used = end
        return offset

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Let a slot of the same size be allocated there again. No transfer there may be under way."""
        self._given_back.setdefault(in_pages(num_bytes), []).append(offset)

    def _open(self, number: int) -> tuple[int, bool]:
        """The descriptor of the file on a drive, and whether it has O_DIRECT."""
        return _open(self._directories[number], self.tier)[:2]

    def _extend(self, end: int) -> None:
        for number, (fd, directory) in enumerate(zip(self._fds, self._directories, strict=True)):
            start, stop = (striped_bytes(size, number, len(self._fds)) for size in (self.num_bytes, end))
            try:
                if stop > start:
                    # Now and not when it is written: a full disk would be found in the middle of a step.
                    os.posix_fallocate(fd, start, stop - start)
            except OSError as e:
                raise StorageError(
                    f"cannot allocate {human_bytes(stop - start)} in {directory} ({human_bytes(free_bytes(directory))}"
                    f" free): {e.strerror}. Give another {self.tier.value}_path= or a smaller {self.tier.value}= budget"
                ) from e
        self.num_bytes = end

    def begin_read(self, extents: Iterable[Extent], *, urgent: bool = False) -> Event:
        """Start to fill memory from the file, all extents in one transfer; if one is refused, none is under way.
        ``urgent``: before other requests that have not been started, where the queue is native.
        """
        return self._begin("read", extents, urgent)

    def begin_write(self, extents: Iterable[Extent]) -> Event:
        """Start to write memory, all extents in one transfer, each asked for when the one before it has been begun."""
        return self._begin("write", extents, False)

    def read(self, into: torch.Tensor, offset: int) -> None:
        """Fill ``into`` from ``offset``, before other requests: somebody waits for it."""
        self.begin_read([Extent(into, offset)], urgent=True).wait()

    def write(self, source: torch.Tensor, offset: int) -> None:
        """Write ``source`` at ``offset``."""
        self.begin_write([Extent(source, offset)]).wait()

    def close(self) -> None:
        """Give the disk space back."""
        is_own = os.getpid() == self._pid
        if is_own and self._queue is not None:
            # The queue first: it uses the descriptors, whose numbers the next open files get. An interrupt of this wait
            # leaves them to the next call.
            self._queue.close()
        fds, self._fds = self._fds, [-1] * len(self._fds)
        for fd in fds:
            if is_own and fd >= 0:
                os.close(fd)

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending() and any(fd >= 0 for fd in getattr(self, "_fds", ())):  # at the end the system closes it
            self.close()

    @property
    def queue(self) -> IoQueue:
        """The queue of this file's requests, which begins its threads with the first one."""
        if self._queue is None:
            with self._lock:  # used from several threads
                # Looked at again under the lock: two threads may have seen None.
                self._queue = self._queue or IoQueue(IO_THREADS * len(self._fds))
        return self._queue

    def failed(self, what: str, drive: int, num_bytes: int, offset: int, cause: Exception) -> StorageError:
        """The error to raise for a failed transfer."""
        error = StorageError(
            f"could not {what} {human_bytes(num_bytes)} at {offset} of the spill file in {self._directories[drive]}: "
            f"{cause}. Check the disk; training can be resumed from the last checkpoint"
        )
        error.__cause__ = cause
        return error

    def _begin(self, what: str, extents: Iterable[Extent], urgent: bool) -> FileTransfer:
        queue = self._queue or self.queue
        submit, transfer = queue.submit_read if what == "read" else queue.submit_write, FileTransfer(self, queue, what)
        try:
            with WHOLE:  # until the transfer has its ticket, nothing keeps memory that the disk is given
                for tensor, offset in extents:
                    num_bytes, address = tensor.nbytes, tensor.data_ptr()
                    # O_DIRECT would refuse it with an error that says nothing of why.
                    assert tensor.is_contiguous() and address % PAGE == 0 and offset % PAGE == 0, "unaligned transfer"
                    assert num_bytes % PAGE == 0 and offset + num_bytes <= self.num_bytes, (offset, num_bytes)
                    for drive, at, start, size in stripes(offset, num_bytes, len(self._fds)):
                        try:
                            ticket = submit(self._fds[drive], address + start, size, at, urgent)
                        except (OSError, RuntimeError) as e:  # RuntimeError: a forked child uses its parent's queue
                            raise self.failed(what, drive, size, at, e) from e
                        transfer.under_way.append(_Piece(ticket, tensor, drive, size, at))
        except BaseException:
            # Whoever asked gives this memory to others when it raises.
            transfer.wait_until_over()
            raise
        return transfer


def stripes(offset: int, num_bytes: int, drives: int) -> Iterator[tuple[int, int, int, int]]:
    """Divide bytes of a file: the number of the drive, where in its file, where among them, and how many."""
    done = 0
    while done < num_bytes:
        stripe, inside = divmod(offset + done, STRIPE)
        size = num_bytes - done if drives == 1 else min(STRIPE - inside, num_bytes - done)
        yield stripe % drives, stripe // drives * STRIPE + inside, done, size
        done += size


def striped_bytes(num_bytes: int, number: int, drives: int) -> int:
    """How many of the first bytes of a striped file lie on a drive."""
    rounds, rest = divmod(num_bytes, STRIPE * drives)
    return rounds * STRIPE + min(max(rest - number * STRIPE, 0), STRIPE)


def _open(directory: Path, tier: Tier) -> tuple[int, bool, bool]:
    """A nameless file in ``directory``: (descriptor, has O_DIRECT, came by O_TMPFILE)."""
    if not directory.is_dir():
        raise StorageError(f"{tier.value}_path {directory} is not an existing directory; create it or give another one")
    reason = ""
    # Best first: without a name and past the page cache.
    for opened_by, flag in product((_open_nameless, _open_unlinked), (os.O_DIRECT, 0)):
        try:
            fd = opened_by(directory, flag)
        except OSError as e:
            if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise StorageError(f"{tier.value}_path {directory} cannot be written: {e.strerror}") from e
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageError(f"{tier.value}_path {directory} is full: {e.strerror}") from e
            reason = f": {e.strerror}"
            continue
        if not flag or _direct_works(fd):
            return fd, bool(flag), opened_by is _open_nameless
        os.close(fd)
    raise StorageError(
        f"{tier.value}_path {directory} cannot be written{reason}. Give a directory of a file system that ordinary "
        "files can be made in"
    )


def _open_nameless(directory: Path, flag: int) -> int:
    """A descriptor of a file that never has a name."""
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | flag, 0o600)


def _open_unlinked(directory: Path, flag: int) -> int:
    """A descriptor of a file whose name is gone again, where the system knows no nameless ones."""
    fd, name = tempfile.mkstemp(prefix=".gemini-", dir=directory)
    try:
        # A second descriptor with the flag, before the name goes: `mkstemp` has no O_DIRECT.
        direct = os.open(name, os.O_RDWR | flag) if flag else os.dup(fd)
    finally:
        os.close(fd)
        # At once: from here on no death of the process leaves the file behind.
        os.unlink(name)
    return direct


def _direct_works(fd: int) -> bool:
    """Some file systems accept the flag and refuse the transfer: write and read back one page."""
    page = host_bytes(PAGE)
    page[:] = 5
    view = (ctypes.c_char * PAGE).from_address(page.data_ptr())
    try:
        return os.pwrite(fd, memoryview(view), 0) == PAGE and os.preadv(fd, [memoryview(view)], 0) == PAGE
    except OSError:
        return False
    finally:
        # The page that was tried must read as zeros, as all of a new file.
        os.ftruncate(fd, 0)


def striped_free_bytes(directories: Sequence[Path]) -> int:
    """Bytes that can still be written, in equal shares, in directories of which some may be on one drive."""
    devices = {directory: os.stat(directory).st_dev for directory in directories}
    shares = Counter(devices.values())
    return len(directories) * min(free_bytes(directory) // shares[devices[directory]] for directory in directories)


def free_bytes(directory: Path) -> int:
    """Bytes that this user can still write in a directory."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize
