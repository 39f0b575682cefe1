"""The I/O queue, native and in Python: whole transfers, errors that say what happened, an orderly end."""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks._progress import join
from gemini.kernels import IoQueue
from gemini.kernels.native import ThreadedIoQueue
from tests.native.native_cases import NATIVE_ISAS

BLOCK = 4 << 20
KINDS = [pytest.param(ThreadedIoQueue, id="python"), *([pytest.param(IoQueue, id="native")] if NATIVE_ISAS else [])]


@pytest.fixture(params=KINDS)
def queue(request: pytest.FixtureRequest) -> Iterator[IoQueue]:
    with contextlib.closing(request.param(3)) as made:
        yield made


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def read_now(queue: IoQueue, *request: int, urgent: bool = False) -> None:
    queue.wait(queue.submit_read(*request, urgent))


def write_now(queue: IoQueue, *request: int, urgent: bool = False) -> None:
    queue.wait(queue.submit_write(*request, urgent))


def noise(num_bytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 12_345])
@pytest.mark.parametrize("offset", [0, 8192, 12_345])
def test_round_trip(queue: IoQueue, fd: int, num_bytes: int, offset: int) -> None:
    written, read = noise(num_bytes), torch.zeros(num_bytes, dtype=torch.uint8)
    write_now(queue, fd, written.data_ptr(), num_bytes, offset)
    assert os.fstat(fd).st_size == (offset + num_bytes if num_bytes else 0)
    read_now(queue, fd, read.data_ptr(), num_bytes, offset)
    assert torch.equal(written, read)


def test_many_requests_waited_for_in_any_order(queue: IoQueue, fd: int) -> None:
    parts = [noise(100_000 + number, seed=number) for number in range(20)]
    offsets = [number * 200_000 for number in range(20)]
    tickets = [
        queue.submit_write(fd, part.data_ptr(), part.numel(), offset, False)
        for part, offset in zip(parts, offsets, strict=True)
    ]
    assert len(set(tickets)) == 20
    for ticket in reversed(tickets):
        queue.wait(ticket)
    back = [torch.zeros_like(part) for part in parts]
    tickets = [
        queue.submit_read(fd, part.data_ptr(), part.numel(), offset, False)
        for part, offset in zip(back, offsets, strict=True)
    ]
    for ticket in tickets[1::2] + tickets[::2]:
        queue.wait(ticket)
    assert all(torch.equal(a, b) for a, b in zip(parts, back, strict=True))


def test_direct_io(queue: IoQueue, tmp_path: Path) -> None:
    try:
        fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except (OSError, AttributeError):
        pytest.skip("no O_DIRECT on this file system")
    try:
        memory = torch.zeros(2 * BLOCK + 3 * 4096, dtype=torch.uint8)
        aligned = memory[-memory.data_ptr() % 4096 :][: 2 * BLOCK + 8192]
        aligned.copy_(noise(aligned.numel()))
        write_now(queue, fd, aligned.data_ptr(), aligned.numel(), 4096)
        expected = aligned.clone()
        aligned.zero_()
        read_now(queue, fd, aligned.data_ptr(), aligned.numel(), 4096)
        assert torch.equal(aligned, expected)
        # The end of the file off any boundary.
        os.ftruncate(fd, 4096 + 100)
        with pytest.raises(OSError, match="the file ends at byte 4196") as caught:
            read_now(queue, fd, aligned.data_ptr(), 8192, 4096)
        assert caught.value.errno == errno.EIO
    finally:
        os.close(fd)


@pytest.mark.parametrize("num_bytes", [100, 2 * BLOCK])
def test_short_read_says_where_the_file_ends(queue: IoQueue, fd: int, num_bytes: int) -> None:
    os.write(fd, bytes(50))
    memory = torch.ones(num_bytes, dtype=torch.uint8)
    wanted = f"read of {num_bytes} bytes at offset 10 .* the file ends at byte 50" if num_bytes == 100 else "ends at"
    with pytest.raises(OSError, match=wanted) as caught:
        read_now(queue, fd, memory.data_ptr(), num_bytes, 10)
    assert caught.value.errno == errno.EIO


def test_bad_descriptor(queue: IoQueue, fd: int, tmp_path: Path) -> None:
    memory = torch.zeros(3 * BLOCK, dtype=torch.uint8)
    gone = os.dup(fd)
    os.close(gone)
    for call in (read_now, write_now):
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            call(queue, gone, memory.data_ptr(), memory.numel(), 0)
        assert caught.value.errno == errno.EBADF
    write_now(queue, fd, memory.data_ptr(), 10, 0)  # the queue lives on
    read_only = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(OSError) as caught:
        write_now(queue, read_only, memory.data_ptr(), 10, 0)
    assert caught.value.errno == errno.EBADF
    os.close(read_only)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_disk(queue: IoQueue) -> None:
    memory = torch.zeros(3 * BLOCK, dtype=torch.uint8)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            write_now(queue, full, memory.data_ptr(), memory.numel(), 0)
        assert caught.value.errno == errno.ENOSPC
    finally:
        os.close(full)


@pytest.fixture(params=KINDS)
def single(request: pytest.FixtureRequest) -> Iterator[IoQueue]:
    """A queue of one thread: what it does, it does in one order."""
    with contextlib.closing(request.param(1)) as made:
        yield made


@pytest.mark.skipif(not NATIVE_ISAS, reason="the native library is not built")
def test_urgent_requests_overtake_what_has_not_started(tmp_path: Path) -> None:
    single = IoQueue(1)
    # A file that appends whatever the offset: its content is the order of the writes.
    stream = torch.full((8 * BLOCK,), ord("."), dtype=torch.uint8)
    parts = (
        [BLOCK] * 8 if isinstance(single, ThreadedIoQueue) else [8 * BLOCK]
    )  # only native code cuts a request into blocks
    letters = {letter: torch.tensor([ord(letter)], dtype=torch.uint8) for letter in "abuv"}
    for attempt in range(20):
        log = os.open(tmp_path / f"log{attempt}", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            tickets = [single.submit_write(log, stream.data_ptr(), num_bytes, 0, False) for num_bytes in parts]
            for letter in "aubv":
                urgent = letter in "uv"
                tickets.append(single.submit_write(log, letters[letter].data_ptr(), 1, 0, urgent))
            in_time = not single.done(tickets[len(parts) - 1])
            for ticket in tickets:
                single.wait(ticket)
            content = os.pread(log, os.fstat(log).st_size, 0)
        finally:
            os.close(log)
        if in_time and content.find(b"u") < content.rfind(b"."):
            break  # else this thread was held up, and the stream was over before the urgent ones came
    else:
        pytest.fail("in 20 attempts no urgent write overtook a stream of 8 blocks")
    assert content.replace(b".", b"") == b"uvab"
    assert content.count(b".") == stream.numel() and content.find(b"u") % BLOCK == 0


def test_done_says_whether_wait_would_return_at_once(single: IoQueue, fd: int) -> None:
    stream, part = noise(8 * BLOCK), noise(10)
    for _ in range(20):
        first = single.submit_write(fd, stream.data_ptr(), stream.numel(), 0, False)
        second = single.submit_write(fd, part.data_ptr(), 10, 0, False)
        before = single.done(second), single.done(first)
        single.wait(second)
        assert single.done(first) and single.done(first)  # one thread: the first is over
        single.wait(first)
        if before == (False, False):
            break
    else:
        pytest.fail("two requests of 33 MB were never seen under way")
    for ticket in (first, second, 999_999):
        with pytest.raises(ValueError, match="unknown or was already waited for"):
            single.done(ticket)
    failing = single.submit_read(fd, part.data_ptr(), 10, 100 * BLOCK, True)
    nothing = single.submit_read(fd, 0, 0, 0, False)
    assert single.done(nothing)
    single.close()
    assert single.done(failing)
    with pytest.raises(OSError, match="the file ends"):
        single.wait(failing)


def test_tickets_are_good_for_one_wait(queue: IoQueue, fd: int) -> None:
    memory = torch.zeros(10, dtype=torch.uint8)
    ticket = queue.submit_write(fd, memory.data_ptr(), 10, 0, False)
    queue.wait(ticket)
    for unknown in (ticket, 999_999):
        with pytest.raises(ValueError, match="unknown or was already waited for"):
            queue.wait(unknown)


def test_close_completes_what_was_submitted(queue: IoQueue, fd: int) -> None:
    part = noise(3 * BLOCK)
    tickets = [
        queue.submit_write(fd, part.data_ptr(), part.numel(), number * part.numel(), False) for number in range(3)
    ]
    queue.close()
    queue.close()
    assert os.fstat(fd).st_size == 3 * part.numel()
    for ticket in tickets:
        queue.wait(ticket)
    with pytest.raises(ValueError, match="closed"):
        queue.submit_write(fd, part.data_ptr(), 1, 0, False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_queue_needs_a_thread(kind: type[IoQueue]) -> None:
    with pytest.raises(ValueError, match="at least 1 thread|must be greater than 0"):
        kind(0)


def test_calls_from_many_threads(queue: IoQueue, fd: int) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            mine, back = noise(300_000, seed=number), torch.zeros(300_000, dtype=torch.uint8)
            for turn in range(10):
                offset = (number * 10 + turn) * 300_000
                write_now(queue, fd, mine.data_ptr(), 300_000, offset)
                read_now(queue, fd, back.data_ptr(), 300_000, offset)
                assert torch.equal(mine, back)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert not failures
