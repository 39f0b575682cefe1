"""The spill file: direct or said aloud, preallocated, nameless through every death, and each failure a clear error."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from memory_cases import PAGE, ROOT, run_python

from gemini import kernels
from gemini.errors import StorageError
from gemini.kernels import native as kernels_io
from gemini.memory import nvme
from gemini.memory.devices.pages import host_bytes
from gemini.memory.nvme import Extent, SpillFile, probe

MIB = 2**20


def noise(num_bytes: int, seed: int = 0) -> torch.Tensor:
    tensor = host_bytes(num_bytes)
    return tensor.copy_(
        torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    )


def on_disk(spill: SpillFile) -> int:
    return os.fstat(spill._fds[0]).st_blocks * 512


@pytest.fixture(params=["O_TMPFILE", "unlinked"])
def naming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "unlinked":

        def refuse(directory: Path, flag: int) -> int:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")

        monkeypatch.setattr(nvme, "_open_nameless", refuse)
    return request.param


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB, where this user may mount one."""
    target = tmp_path / "disk"
    target.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(target), b"tmpfs", 0, b"size=16m") != 0:
        pytest.skip(f"a small disk cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    yield target
    assert libc.umount2(os.fsencode(target), 2) == 0


# ---- what it promises ------------------------------------------------------------------------------------------------


def test_round_trip_and_probe(tmp_path: Path, naming: str) -> None:
    spill = SpillFile(tmp_path, 64 * PAGE)
    first, second = spill.allocate(3 * PAGE), spill.allocate(61 * PAGE)
    assert (first, second) == (0, 3 * PAGE)
    back = host_bytes(61 * PAGE)
    spill.read(back, second)
    assert int(back.count_nonzero()) == 0, "preallocated slots read as zeros"
    data = noise(61 * PAGE)
    spill.write(data, second)
    spill.read(back, second)
    assert torch.equal(back, data)
    part = host_bytes(PAGE)
    spill.read(part, second + 17 * PAGE)
    assert torch.equal(part, data[17 * PAGE : 18 * PAGE])
    found = probe(tmp_path)
    assert found.direct == spill.direct and found.nameless == (naming == "O_TMPFILE") and found.free_bytes > 0
    assert str(tmp_path) in str(found) and "free" in str(found)
    spill.close()


def test_direct_or_said_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, naming: str) -> None:
    import fcntl

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spill = SpillFile(tmp_path, PAGE)
    has_flag = bool(fcntl.fcntl(spill._fds[0], fcntl.F_GETFL) & os.O_DIRECT)
    assert spill.direct == has_flag
    assert bool(caught) == (not spill.direct)
    spill.close()
    for how in ("refused at open", "refused at the first transfer"):
        with monkeypatch.context() as patch:
            if how == "refused at open":
                patch.setattr(nvme.os, "O_DIRECT", 0)
            else:
                patch.setattr(nvme, "_direct_works", lambda fd: False)
            with pytest.warns(UserWarning, match=r"no O_DIRECT.*page cache"):
                spill = SpillFile(tmp_path, 4 * PAGE)
            assert not spill.direct and not probe(tmp_path).direct
        data, back = noise(4 * PAGE), host_bytes(4 * PAGE)
        spill.write(data, 0)
        spill.read(back, 0)
        assert torch.equal(data, back)
        spill.close()


def test_preallocated_to_the_byte(tmp_path: Path, naming: str) -> None:
    spill = SpillFile(tmp_path, 8 * MIB)
    assert os.fstat(spill._fds[0]).st_size == 8 * MIB
    assert 8 * MIB <= on_disk(spill) <= 8 * MIB + 64 * 1024
    spill.allocate(8 * MIB)
    offset = spill.allocate(MIB)  # grows: allocated at once as well
    assert offset == 8 * MIB and 9 * MIB <= on_disk(spill) <= 9 * MIB + 64 * 1024
    spill.close()


def test_slots_given_back_are_used_again(tmp_path: Path) -> None:
    spill = SpillFile(tmp_path, 4 * PAGE)
    a, b = spill.allocate(2 * PAGE), spill.allocate(2 * PAGE)
    spill.give_back(a, 2 * PAGE)
    assert spill.allocate(PAGE) == 4 * PAGE, "another size does not take it"
    assert spill.allocate(2 * PAGE) == a
    assert spill.allocate(2 * PAGE) not in (a, b)
    spill.close()


def test_it_has_no_name_and_gives_the_space_back(tmp_path: Path, naming: str) -> None:
    spill = SpillFile(tmp_path, 4 * MIB)
    spill.write(noise(MIB), 0)
    assert list(tmp_path.iterdir()) == []
    descriptors = len(os.listdir("/proc/self/fd"))
    spill.close()
    spill.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    del spill
    assert list(tmp_path.iterdir()) == []


def test_two_runs_in_one_directory(tmp_path: Path, naming: str) -> None:
    one, two = SpillFile(tmp_path, MIB), SpillFile(tmp_path, MIB)
    a, b, back = noise(MIB, 1), noise(MIB, 2), host_bytes(MIB)
    one.write(a, 0)
    two.write(b, 0)
    one.read(back, 0)
    assert torch.equal(back, a)
    one.close()
    two.read(back, 0)
    assert torch.equal(back, b)
    two.close()


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("nameless", [True, False])
def test_no_death_leaves_it_behind(tmp_path: Path, nameless: bool) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import time
from gemini.memory import nvme
if not {nameless}:
    def refuse(directory, flag): raise OSError(95, "no O_TMPFILE")
    nvme._open_nameless = refuse
spill = nvme.SpillFile(sys.argv[1], 64 * 2**20)
print("ready", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        while_alive = list(tmp_path.iterdir())
        child.send_signal(signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
    assert while_alive == [] and list(tmp_path.iterdir()) == []


def test_the_space_of_the_dead_is_free_again(small_disk: Path) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import time, warnings
warnings.simplefilter("ignore")
from gemini.memory.nvme import SpillFile
spill = SpillFile(sys.argv[1], 12 * 2**20)
print("ready", flush=True)
time.sleep(60)
"""

    def free() -> int:
        stat = os.statvfs(small_disk)
        return stat.f_bavail * stat.f_frsize

    with subprocess.Popen([sys.executable, "-c", program, str(small_disk)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert free() <= 4 * MIB, "taken at construction, not in the middle of a step"
        child.kill()
        child.wait(10)
    deadline = time.monotonic() + 5
    while free() < 15 * MIB and time.monotonic() < deadline:
        time.sleep(0.01)
    assert free() >= 15 * MIB


def test_an_interrupt_of_its_end_leaves_it_to_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spill = SpillFile(tmp_path, PAGE)
    spill.write(noise(PAGE), 0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(spill.queue), "close", Mock(side_effect=KeyboardInterrupt))
        spill.close()
    [fd] = spill._fds
    assert fd >= 0
    spill.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_forked_child_neither_ends_nor_hangs_it(tmp_path: Path) -> None:
    done = run_python(
        """
import gc, os, torch
from gemini.memory.nvme import SpillFile
from gemini.memory.devices.pages import host_bytes
spill = SpillFile(sys.argv[1], 2**20)
data = host_bytes(2**20); data[:] = 7
spill.write(data, 0)                   # its I/O threads run
for end in ("close", "delete", "exit", "read"):
    child = os.fork()
    if child == 0:
        if end == "close":
            spill.close()
        elif end == "delete":
            del spill; gc.collect()
        elif end == "read":
            try:
                spill.read(host_bytes(2**20), 0)
            except RuntimeError as error:
                os._exit(0 if "process" in str(error) else 4)
            os._exit(5)
        sys.exit(0)                    # with finalizers, as careless programs end
    assert os.waitpid(child, 0)[1] == 0, end
back = host_bytes(2**20)
spill.read(back, 0)
assert torch.equal(back, data)
spill.close()
print("whole")
""",
        tmp_path,
    )
    assert done.stdout.split() == ["whole"], done.stderr


# ---- what can go wrong -----------------------------------------------------------------------------------------------


def test_bad_directories(tmp_path: Path) -> None:
    a_file = tmp_path / "file"
    a_file.write_text("x")
    for wrong in (tmp_path / "missing", a_file, a_file / "below"):
        for call in (lambda wrong=wrong: SpillFile(wrong, PAGE), lambda wrong=wrong: probe(wrong)):
            with pytest.raises(StorageError, match="not an existing directory") as caught:
                call()
            assert str(wrong) in str(caught.value), "the error names the path"
    assert a_file.read_text() == "x"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(directory: Path, flag: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(nvme, "_open_nameless", refuse)
    monkeypatch.setattr(nvme, "_open_unlinked", refuse)
    with pytest.raises(StorageError, match="cannot be written"):
        SpillFile(tmp_path, PAGE)


def test_a_read_only_directory() -> None:
    if not os.path.isdir("/proc/1") or not os.path.isdir("/sys/kernel"):
        pytest.skip("no /sys")
    with pytest.raises(StorageError, match="/sys/kernel"):
        SpillFile("/sys/kernel", PAGE)


def test_a_full_disk_at_construction(small_disk: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(StorageError, match=r"cannot allocate 64 MiB.*free.*No space left.*nvme") as caught:
            SpillFile(small_disk, 64 * MIB)
        assert isinstance(caught.value.__cause__, OSError)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        spill = SpillFile(small_disk, 8 * MIB)  # what was begun was given back
        spill.allocate(8 * MIB)
        with pytest.raises(StorageError, match="cannot allocate"):
            spill.allocate(32 * MIB)
        data, back = noise(8 * MIB), host_bytes(8 * MIB)
        spill.write(data, 0)
        spill.read(back, 0)
        assert torch.equal(data, back), "a refused growth changes nothing"
        assert spill.num_bytes == 8 * MIB
        assert spill.allocate(2 * MIB) == 8 * MIB, "and a smaller one still fits"
        spill.close()


def test_a_full_disk_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(nvme.os, "posix_fallocate", full)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match="No space left"):
        SpillFile(tmp_path, PAGE)
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("what", ["read", "write"])
def test_an_io_error_names_file_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    spill = SpillFile(tmp_path, 4 * PAGE)

    def fail(self: object, *args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(kernels.IoQueue, f"submit_{what}", fail)
        with pytest.raises(StorageError) as caught:
            getattr(spill, what)(host_bytes(2 * PAGE), PAGE)
    text = str(caught.value)
    assert what in text and str(tmp_path) in text and "8 KiB" in text and "4096" in text and "Input/output" in text
    assert "checkpoint" in text and isinstance(caught.value.__cause__, OSError)
    getattr(spill, what)(host_bytes(2 * PAGE), PAGE)
    spill.close()


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    spill = SpillFile(tmp_path, 4 * PAGE)
    os.ftruncate(spill._fds[0], 2 * PAGE)
    with pytest.raises(StorageError, match="the file ends at byte 8192"):
        spill.read(host_bytes(4 * PAGE), 0)
    spill.close()


@pytest.mark.parametrize("piece", [1, 100, PAGE - 1, PAGE, 3 * PAGE + 5])
def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """The system may move less than was asked for. (With the queue in Python, whose calls can be cut short.)"""
    read, write, calls = os.preadv, os.pwritev, []

    def short_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append("read")
        return read(fd, [memoryview(buffers[0]).cast("B")[:piece]], offset)

    def short_write(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append("write")
        return write(fd, [memoryview(buffers[0]).cast("B")[:piece]], offset)

    monkeypatch.setattr(nvme, "IoQueue", kernels_io.ThreadedIoQueue)
    monkeypatch.setattr(nvme.os, "O_DIRECT", 0)  # with it the kernel itself refuses odd pieces
    with pytest.warns(UserWarning, match="no O_DIRECT"):
        spill = SpillFile(tmp_path, 8 * PAGE)
    monkeypatch.setattr(kernels_io.os, "preadv", short_read)
    monkeypatch.setattr(kernels_io.os, "pwritev", short_write)
    data, back = noise(8 * PAGE), host_bytes(8 * PAGE)
    spill.write(data, 0)
    spill.read(back, 0)
    assert torch.equal(data, back)
    assert {"read", "write"} == set(calls) and len(calls) >= 2 * (8 * PAGE // piece)
    spill.close()


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupted_wait_leaves_the_memory_to_the_disk(
    before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come before the wait began, or when it was over: only then is the memory free."""
    spill = SpillFile(tmp_path, 16 * PAGE)
    content = noise(16 * PAGE)
    spill.write(content, 0)
    into = host_bytes(16 * PAGE)
    transfer, wait = spill.begin_read([Extent(into, 0)]), spill.queue.wait

    def interrupted(ticket: int) -> None:
        if not before:
            wait(ticket)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(spill.queue, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()
    assert len(transfer.under_way) == 1, "nothing else keeps it"
    transfer.wait()
    assert transfer.is_complete() and torch.equal(into, content)
    spill.close()


def test_several_extents_are_one_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over with the last of them. Where one is refused none is under way, and where several fail the first is told."""
    spill = SpillFile(tmp_path, 4 * PAGE)
    parts, back = noise(4 * PAGE).view(4, -1), host_bytes(4 * PAGE).view(4, -1)
    spill.begin_write(Extent(part, number * PAGE) for number, part in enumerate(parts)).wait()
    extents = [Extent(part, number * PAGE) for number, part in enumerate(back)]
    transfer = spill.begin_read(extents)
    transfer.wait()
    assert transfer.is_complete() and torch.equal(back, parts)

    asked, submit, wait = list[int](), spill.queue.submit_write, spill.queue.wait
    waited = list[int]()

    def refuses_the_third(*where: int) -> int:
        if len(asked) == 3:
            raise OSError(errno.EIO, "Input/output error")
        return submit(*where)

    def in_turn() -> Iterator[Extent]:
        for extent in extents:
            asked.append(extent.offset)
            yield extent

    with monkeypatch.context() as patch:
        patch.setattr(spill.queue, "submit_write", refuses_the_third)
        patch.setattr(spill.queue, "wait", lambda ticket: (waited.append(ticket), wait(ticket)))
        # The error keeps its frames, and so what was begun: nobody waits for that but who raised it.
        with pytest.raises(StorageError, match=f"could not write .* at {2 * PAGE} ") as refused:
            spill.begin_write(in_turn())
    assert asked == [0, PAGE, 2 * PAGE] and len(waited) == 2 and refused.tb is not None

    def fails(ticket: int) -> None:
        waited.append(ticket)
        wait(ticket)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(spill.queue, "wait", fails)
    transfer = spill.begin_read(extents[1:])
    with pytest.raises(StorageError, match=f"could not read .* at {PAGE} "):
        transfer.wait()
    assert len(waited) == 5 and transfer.is_complete()
    spill.close()


def test_a_transfer_may_be_asked_for_while_another_thread_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = SpillFile(tmp_path, 16 * PAGE)
    transfer, wait = spill.begin_read([Extent(host_bytes(16 * PAGE), 0)]), spill.queue.wait
    taken, go = threading.Event(), threading.Event()

    def slow(ticket: int) -> None:
        wait(ticket)
        taken.set()
        assert go.wait(30)

    monkeypatch.setattr(spill.queue, "wait", slow)
    waiting = threading.Thread(target=transfer.wait)
    waiting.start()
    assert taken.wait(30) and not transfer.is_complete(), "its ticket is gone, and it is not over"
    go.set()
    waiting.join(30)
    assert transfer.is_complete()
    spill.close()
