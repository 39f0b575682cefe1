"""Memory of processes, as the system counts it: read, sampled, limited, and given back."""

import ctypes
import gc
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
"""Variables with which freed blocks of a MiB and more go back to the system: else glibc keeps up to 64 MiB of them,
nobody's memory, and more or less of it from run to run."""


def status(pid: int | str = "self") -> dict[str, int]:
    """Bytes of RssAnon, VmRSS and VmHWM (the peak of VmRSS); nothing of a process that has ended."""
    with open(f"/proc/{pid}/status") as file:
        lines = [line.split() for line in file if line.startswith(("RssAnon", "VmRSS", "VmHWM"))]
    return {name[:-1]: int(kib) * 1024 for name, kib, _ in lines}


def forget_peak() -> bool:
    """Let VmHWM of this process begin anew at what is resident now; False where the system does not offer it."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def trim() -> None:
    """Give freed heap memory back: what glibc keeps for later is nobody's, and would hide what is really held."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def available_bytes() -> int:
    """Of the machine, without swapping."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def free_disk(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def spill_bytes(pid: int) -> int:
    """Bytes on disk of the deleted (nameless) regular files that the process holds open."""
    total = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if os.readlink(path).endswith("(deleted)"):
                total += os.stat(path).st_blocks * 512
        except OSError:
            pass
    return total


class Peaks:
    """The most anonymous memory that each of some processes was seen with since :meth:`begin`."""

    INTERVAL = 0.004
    """Seconds between two looks."""

    def __init__(self) -> None:
        self.anon: dict[int, int] = {}

    def begin(self, pids: Iterable[int]) -> None:
        self.anon = dict.fromkeys(pids, 0)

    def look(self) -> None:
        for pid, peak in self.anon.items():
            try:
                self.anon[pid] = max(peak, status(pid).get("RssAnon", 0))
            except OSError:
                pass  # it has ended, which whoever waits for it finds out


class Cage:
    """A memory cgroup with a hard limit, v1 or v2. Raises OSError where none can be made."""

    def __init__(self, limit: int):
        v1 = Path("/sys/fs/cgroup/memory")
        base = v1 if v1.is_dir() else Path("/sys/fs/cgroup")
        self.path = base / f"gemini-cage-{os.getpid()}"
        names = ("memory.limit_in_bytes", "memory.max_usage_in_bytes") if v1.is_dir() else ("memory.max", "memory.peak")
        self._limit, self._peak = names
        self.path.mkdir()
        try:
            (self.path / self._limit).write_text(str(limit))
            self.limit = int((self.path / self._limit).read_text())
        except OSError:
            self.path.rmdir()
            raise
        for name in ("memory.swap.max", "memory.memsw.limit_in_bytes"):  # no way out over swap
            try:
                (self.path / name).write_text("0" if name == "memory.swap.max" else str(self.limit))
            except OSError:
                pass

    def prefix(self) -> list[str]:
        """Of a command: it runs inside from its first instruction on."""
        return ["sh", "-c", f'echo $$ > "{self.path}/cgroup.procs" && exec "$@"', "sh"]

    def peak(self) -> int:
        """The most that was ever charged: anonymous memory, page cache, and what the kernel holds for the process."""
        return int((self.path / self._peak).read_text())

    def close(self) -> None:
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)
