"""Reads and writes between memory and files, on threads, native where it can be: part of the face of gemini.kernels."""

from __future__ import annotations

import ctypes
import zlib
from types import TracebackType

from torch import Tensor

from gemini.kernels_native import native
from gemini.kernels_reference import IO_THREADS, ThreadedIoQueue

_native_crc32 = getattr(native, "crc32", None)  # where the CPU can do it faster than zlib


def crc32(tensor: Tensor, crc: int = 0) -> int:
    """The CRC-32 of zlib over the bytes of a contiguous host tensor, going on from ``crc``. The GIL is released."""
    address, num_bytes = tensor.data_ptr(), tensor.nbytes
    fast = num_bytes // 16 * 16
    if _native_crc32 is not None and fast >= 64:
        crc = _native_crc32(address, fast, crc)
        address, num_bytes = address + fast, num_bytes - fast
    return zlib.crc32((ctypes.c_char * num_bytes).from_address(address), crc) if num_bytes else crc


class IoQueue:
    """Reads and writes between memory and file descriptors, on `num_threads` blocking threads.

    Addresses, sizes and offsets are in bytes; what O_DIRECT asks of their alignment is the caller's business, and
    blocks are cut at multiples of 4 MiB from the start of a request. File and memory must live until `wait` has
    returned or raised for the ticket; only then is the memory free of the threads. Requests start in the order of
    submission, and end in any order. Urgent ones come first: their blocks go before every block of the others that is
    not yet being transferred, in the order of submission among themselves. A queue belongs to the process that made
    it: in a forked child every call raises RuntimeError. Calls may come from several threads.
    """

    def __init__(self, num_threads: int = IO_THREADS) -> None:
        self._queue = ThreadedIoQueue(num_threads) if native is None else native.IoQueue(num_threads)

    def submit_read(self, fd: int, address: int, nbytes: int, offset: int, urgent: bool = False) -> int:
        """Starts reading `nbytes` at `offset` of the file into memory at `address`; returns the ticket to wait for."""
        _check_range(nbytes, offset)
        return self._queue.submit_read(fd, address, nbytes, offset, urgent)

    def submit_write(self, fd: int, address: int, nbytes: int, offset: int, urgent: bool = False) -> int:
        """Starts writing `nbytes` from memory at `address` to `offset` of the file; returns the ticket to wait for."""
        _check_range(nbytes, offset)
        return self._queue.submit_write(fd, address, nbytes, offset, urgent)

    def done(self, ticket: int) -> bool:
        """Whether `wait` would return or raise at once. The ticket stays good for its one wait (else ValueError)."""
        return self._queue.done(ticket)

    def wait(self, ticket: int) -> None:
        """Waits for a request to end, with the GIL released. A ticket is good for one wait (else ValueError).

        Raises OSError with the errno of the first block that failed; a read beyond the end of the file is EIO with a
        text that says so.
        """
        self._queue.wait(ticket)

    def read(self, fd: int, address: int, nbytes: int, offset: int, urgent: bool = False) -> None:
        """submit_read and wait."""
        self.wait(self.submit_read(fd, address, nbytes, offset, urgent))

    def write(self, fd: int, address: int, nbytes: int, offset: int, urgent: bool = False) -> None:
        """submit_write and wait."""
        self.wait(self.submit_write(fd, address, nbytes, offset, urgent))

    def close(self) -> None:
        """Completes what was submitted and ends the threads. Idempotent; tickets may still be waited for."""
        self._queue.close()

    def __enter__(self) -> IoQueue:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _check_range(nbytes: int, offset: int) -> None:
    if nbytes < 0 or offset < 0:
        raise ValueError(f"nbytes and offset must be 0 or more, not {nbytes} and {offset}")
