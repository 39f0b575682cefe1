"""What the system says of the host: its memory, less what a control group takes away, and its caches."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")
_CACHES = Path("/sys/devices/system/cpu")
_PCI = Path("/sys/bus/pci/devices")


def memory_bytes() -> int:
    """Bytes of memory that this process can have at most: those of the machine, or of its control group."""
    return memory_limit() or psutil.virtual_memory().total


def available_bytes() -> int:
    """Bytes that this process can still take: what the machine has free, less what its control group does not allow."""
    free, limit = psutil.virtual_memory().available, memory_limit()
    return free if limit is None else max(0, min(free, limit - psutil.Process().memory_info().rss))


def memory_limit(process: Path = Path("/proc/self/cgroup"), groups: Path = _GROUPS) -> int | None:
    """The lowest memory limit of the control groups that this process is in, in bytes; None without one."""
    # The machine's memory among them: a limit that is larger is none (version 1 writes a huge number for "max").
    limits = [psutil.virtual_memory().total]
    for file in _limit_files(process, groups):
        with contextlib.suppress(OSError, ValueError):  # no such file, or the word "max"
            limits.append(int(file.read_text()))
    return min(limits) if min(limits) < limits[0] else None


def _limit_files(process: Path, groups: Path) -> Iterator[Path]:
    """The files of limits of the process's own group and of all above it; a container's may be mounted as the root."""
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, name = line.split(":", 2)
        # Version 2 of control groups has one hierarchy, with the number 0 and without names of controllers.
        if number == "0":
            root, file = groups, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / name.lstrip("/")
        # A limit of any group above holds for this one as well.
        for folder in (group, *group.parents):
            yield folder / file
            if folder == root:
                break


def cache_bytes(cpus: Path = _CACHES) -> int:
    """Bytes of the largest level of cache, all of that level together; 0 where the system does not say."""
    levels: dict[int, dict[str, int]] = {}
    for folder in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, shared_by = int((folder / "level").read_text()), (folder / "shared_cpu_list").read_text()
            size = (folder / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if size.endswith("K"):
            # By the list of processors that share it: each describes the same cache once more, which must count once.
            levels.setdefault(level, {})[shared_by] = int(size[:-1]) * 1024
    return sum(levels[max(levels)].values()) if levels else 0


@cache  # every update of a chunk asks, and each processor is a file to be read
def num_cores(cpus: Path = _CACHES) -> int:
    """Cores that this process may run on. Processors that share one count once, where the system says which do."""
    cores = set()
    for number in os.sched_getaffinity(0):
        try:
            cores.add((cpus / f"cpu{number}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(number))
    return len(cores)


def memory_nodes(process: Path = Path("/proc/self/status")) -> tuple[int, ...]:
    """The NUMA nodes whose memory this process may have; none where the system does not say."""
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return ()
    listed = next((line.split()[1] for line in lines if line.startswith("Mems_allowed_list:")), "")
    bounds = [part.partition("-") for part in listed.split(",") if part]
    return tuple(node for first, _, last in bounds for node in range(int(first), int(last or first) + 1))


def node_of_pci(address: str, devices: Path = _PCI) -> int | None:
    """The NUMA node that a card is at, by its address on the bus ("0000:41:00.0"); None where the system names none."""
    try:
        node = int((devices / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
