"""The only module that loads gemini._C: the native library, if there is one, and I/O on its threads or Python's."""

from __future__ import annotations

import ctypes
import errno
import importlib
import itertools
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from gemini.interrupts import WHOLE

_INTERFACE = 10  # of the signatures in csrc/bindings.cpp, and of the bits


def load() -> tuple[Any, str | None]:
    """The native module, or None and why not."""
    if os.environ.get("GEMINI_NATIVE") == "0":
        return None, "GEMINI_NATIVE=0 is set"
    try:
        native = importlib.import_module("gemini._C")
    except ImportError as error:
        return None, f"gemini._C cannot be loaded ({error}); install with a C++ compiler and pybind11 to build it"
    if getattr(native, "INTERFACE", None) != _INTERFACE:
        return None, "gemini._C was built from another version of the sources; build it again"
    return native, None


native, why_not = load()

IO_THREADS = 4  # blocks under way at once; nvme_stream.py --sweep: 1 is slower, neither 2 nor 8 is better at all of it

_native_crc32 = getattr(native, "crc32", None)  # where the CPU can do it faster than zlib


def crc32(tensor: Tensor, crc: int = 0) -> int:
    """The CRC-32 of zlib over the bytes of a contiguous host tensor, going on from ``crc``. The GIL is released."""
    address, num_bytes = tensor.data_ptr(), tensor.nbytes
    fast = num_bytes // 16 * 16
    if _native_crc32 is not None and fast >= 64:
        crc = _native_crc32(address, fast, crc)
        address, num_bytes = address + fast, num_bytes - fast
    return zlib.crc32((ctypes.c_char * num_bytes).from_address(address), crc) if num_bytes else crc


class ThreadedIoQueue:
    """The native queue in Python: one thread takes all of a request, in the order of submission, urgent or not."""

    def __init__(self, num_threads: int = IO_THREADS) -> None:
        self._owner = os.getpid()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="gemini-io")
        self._tickets: dict[int, Future[None]] = {}
        self._next_ticket = itertools.count(1)
        self._closed = False

    def submit_read(self, fd: int, address: int, nbytes: int, offset: int, urgent: bool) -> int:
        return self._submit(False, fd, address, nbytes, offset)

    def submit_write(self, fd: int, address: int, nbytes: int, offset: int, urgent: bool) -> int:
        return self._submit(True, fd, address, nbytes, offset)

    def _submit(self, write: bool, fd: int, address: int, nbytes: int, offset: int) -> int:
        self._require_owner()
        if self._closed:
            raise ValueError("this IoQueue is closed")
        with WHOLE:
            ticket = next(self._next_ticket)
            request = self._pool.submit(_transfer, write, fd, address, nbytes, offset) if nbytes else _NOTHING
            self._tickets[ticket] = request
        return ticket

    def wait(self, ticket: int) -> None:
        request = self._find(ticket)
        wait([request])
        self._tickets.pop(ticket, None)  # not before: an interrupt leaves a ticket that can be waited for
        request.result()

    def done(self, ticket: int) -> bool:
        return self._find(ticket).done()

    def _find(self, ticket: int) -> Future[None]:
        self._require_owner()
        if ticket not in self._tickets:
            raise ValueError(f"ticket {ticket} is unknown or was already waited for")
        return self._tickets[ticket]

    def close(self) -> None:
        self._require_owner()
        self._closed = True
        self._pool.shutdown(wait=True)

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"this IoQueue belongs to process {self._owner}; its threads did not follow the fork: "
                "make a new one in the child"
            )


_NOTHING: Future[None] = Future()
_NOTHING.set_result(None)


def _transfer(write: bool, fd: int, address: int, nbytes: int, offset: int) -> None:
    what = f"{'write' if write else 'read'} of {nbytes} bytes at offset {offset} of file descriptor {fd}"
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    done = 0
    while done < nbytes:
        at = offset + done
        try:
            moved = (os.pwritev if write else os.preadv)(fd, [memory[done:]], at)
        except OSError as error:
            raise OSError(error.errno, f"{what}: {error.strerror}") from error
        if moved == 0:
            ended = f"the file ends at byte {min(at, os.fstat(fd).st_size)}, before the end of the request"
            raise OSError(errno.EIO, f"{what}: {'the device accepted no more bytes' if write else ended}")
        done += moved


_Queue: Any = ThreadedIoQueue if native is None else native.IoQueue


class IoQueue(_Queue):  # type: ignore[misc]
    """Reads and writes between memory and file descriptors, on blocking threads (``num_threads``, here as in C++).

    ``submit_read`` and ``submit_write`` take ``(fd, address, nbytes, offset, urgent)``, in bytes, and return a ticket.
    File and memory must live until ``wait`` has returned or raised for it. Requests start in the order of submission,
    and end in any order; in native code, which cuts them into blocks of 4 MiB, urgent ones come first. ``done`` says
    whether ``wait`` would return or raise at once. A ticket is good for one wait (else ValueError), which raises
    OSError with the errno of the first block that failed; a read beyond the end of the file is EIO. ``close`` completes
    what was submitted and ends the threads. In a forked child every call raises RuntimeError. Calls may come from
    several threads.
    """

    def __init__(self, num_threads: int = IO_THREADS) -> None:
        super().__init__(num_threads)
