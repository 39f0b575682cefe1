"""Measuring this machine, on sizes that prove nothing but that every figure is there, positive and explained."""

from __future__ import annotations

import datetime
import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from gemini.errors import StorageError
from gemini.machines import measure as measuring
from gemini.machines.measure import Sizes, measure, measure_gpu, measure_nvme
from gemini.memory import system
from gemini.planning.hardware import Figure, Hardware

TINY = Sizes(
    product=(8, 8, 8), stream_bytes=8192, adam_numel=1000, spill_bytes=200_000, repeats=3, ops=10,
    gpu_product=(8, 8, 8), gpu_bytes=8192,
)  # fmt: skip
HOST = {
    "cpu_bytes", "cpu_threads", "cpu_flops_bf16", "cpu_flops_fp32", "cpu_op_seconds", "dram_bandwidth", "update_cpu",
    "land_cpu", "torch_threads", "update_cpu_one", "update_cpu_compact",
}  # fmt: skip
DRIVE = {"nvme_bytes", "nvme_read", "nvme_write", "nvme_mixed"}


def test_every_figure_of_host_and_drive_is_there_with_when_and_how(tmp_path: Path) -> None:
    figures = dict(measure(tmp_path, TINY))
    assert set(figures) >= HOST | DRIVE
    hardware = Hardware("here", figures)  # positive, known figures
    assert Hardware.from_json(hardware.to_json()) == hardware
    today = datetime.date.today()
    for key, figure in figures.items():  # the simulator takes what begins with "measured" as reached, not as a peak
        assert figure.source.startswith(
            f"asked {today}, " if "bytes" in key or "threads" in key else f"measured {today}, "
        )
        assert "median of 3" in figure.source or figure.source.startswith("asked")
    assert str(tmp_path) in figures["nvme_read"].source
    assert figures["cpu_bytes"].value == system.memory_bytes()


def test_without_a_folder_no_drive_is_measured() -> None:
    assert not DRIVE & set(dict(measure(None, TINY)))


def test_computing_beside_updates_is_measured_where_they_have_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for spare in (0, 1):
        monkeypatch.setattr(measuring.kernels, "get_num_threads", lambda spare=spare: torch.get_num_threads() + spare)
        figures = dict(measure(None, TINY))
        assert ("cpu_contention" in figures) == bool(spare)
        assert figures["torch_threads"].value == torch.get_num_threads()
        if spare:
            assert figures["cpu_contention"].value >= 1
            assert "beside updates on 1 thread" in figures["cpu_contention"].source


def open_files(folder: Path) -> list[str]:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.lexists(link) and str(folder) in os.readlink(link)]


def test_nothing_is_in_the_folder_before_during_and_after(tmp_path: Path) -> None:
    running = measure_nvme(tmp_path, TINY)
    next(running)
    assert open_files(tmp_path), "this is the middle of it"
    assert list(tmp_path.iterdir()) == [], "the file has no name, so that no death can leave it behind"
    del running
    gc.collect()
    assert open_files(tmp_path) == []


def test_an_interrupt_in_a_transfer_gives_the_file_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []

    def interrupted(spill: object, *_: object) -> None:
        kept.append(spill)
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring.SpillFile, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(measure_nvme(tmp_path, TINY))
    assert kept and open_files(tmp_path) == [], "closed, though it is still referred to"
    assert list(tmp_path.iterdir()) == []


def test_the_file_takes_no_more_than_a_quarter_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    before = measuring.SpillFile.__init__

    def remember(self: object, directory: Path, num_bytes: int) -> None:
        made.append(num_bytes)
        before(self, directory, num_bytes)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring.SpillFile, "__init__", remember)
    monkeypatch.setattr(measuring, "free_bytes", lambda _: 40 * 2**20)
    for spill_bytes in (2**40, 200_000):
        list(measure_nvme(tmp_path, Sizes(spill_bytes=spill_bytes, spill_seconds=0.0)))
    most, least = made
    tile = 12 * measuring.TILE
    assert most == tile, "10 MiB would do, and one tile is the least that can be measured as an update has it"
    assert 0 < least <= 250_000


def test_a_folder_that_cannot_hold_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not an existing directory"):
        list(measure_nvme(tmp_path / "absent", TINY))


def test_a_large_spread_is_said_and_a_small_one_is_not() -> None:
    def figure(*seconds: float) -> Figure:
        return measuring.measured("h2d", list(seconds), "somehow", lambda s: 1e9 / s)

    assert figure(1.0, 1.02, 1.01).source.endswith("somehow, median of 3")
    spread = figure(1.0, 2.0, 4.0)
    assert spread.value == 0.5e9
    assert spread.source.endswith("median of 3, from 250 MB/s to 1 GB/s")


def test_the_figures_of_a_gpu_with_the_cpu_in_its_place() -> None:
    """The code of the GPU's figures runs; their values are the CPU's, and no GPU is counted."""
    figures = {}
    for key, figure in measure_gpu(torch.device("cpu"), TINY):
        figures[key] = figure
        assert not torch.backends.cuda.matmul.allow_fp16_accumulation, "it is on while it is measured alone"
    products = {f"gpu_flops_{kind}" for kind in ("bf16", "fp32", "fp16_accumulation")}
    link = {"h2d", "d2h", "link_mixed", "copy_seconds"}
    assert set(figures) == {*products, *link, "gpu_bandwidth", "update_gpu", "gpu_op_seconds"}
    assert Hardware("stand-in", figures)


def test_a_gpu_that_is_not_the_current_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, device = list[Any](), torch.device("cuda", 1)
    card = SimpleNamespace(name="a card", total_memory=2**30, multi_processor_count=1, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(measuring, "_product", lambda *_: lambda: None)
    figures = measure_gpu(device, TINY)
    assert [next(figures)[0] for _ in range(4)] == ["num_gpus", "gpu_bytes", "gpu_sms", "gpu_flops_bf16"]
    assert waited and set(waited) == {device}


def test_buffers_are_larger_than_the_caches_but_leave_the_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "cache_bytes", lambda: 512 * 2**20)
    monkeypatch.setattr(measuring, "memory_bytes", lambda: 2**40)
    assert measuring._beyond_caches(256 * 2**20) == 2 * 2**30
    monkeypatch.setattr(measuring, "memory_bytes", lambda: 2**30)
    assert measuring._beyond_caches(256 * 2**20) == 2**27


# ---- what the system says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, files, expected",
    [
        ("0::/job/step", {"memory.max": "max", "job/memory.max": "4096", "job/step/memory.max": "8192"}, 4096),
        ("0::/job", {"memory.max": "max", "job/memory.max": "max"}, None),
        ("0::/elsewhere", {"memory.max": "12288"}, 12288),
        ("9:cpu:/x\n4:memory,hugetlb:/box", {"memory/box/memory.limit_in_bytes": "4096"}, 4096),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("", {"memory.max": "4096"}, None),
    ],
)
def test_the_limit_of_a_control_group(tmp_path: Path, line: str, files: dict[str, str], expected: int | None) -> None:
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    (tmp_path / "cgroup").write_text(line + "\n" if line else "")
    assert system.memory_limit(tmp_path / "cgroup", tmp_path / "groups") == expected


def test_caches_that_are_shared_count_once(tmp_path: Path) -> None:
    for cpu in range(4):
        for index, (level, size, shared) in enumerate([(1, "32K", str(cpu)), (3, "1024K", f"{cpu // 2 * 2}-")]):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(text + "\n")
    assert system.cache_bytes(tmp_path) == 2 * 2**20
    assert system.cache_bytes(tmp_path / "nowhere") == 0


def test_processors_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    for number in range(8):
        (tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        siblings = f"{number % 4},{number % 4 + 4}\n"
        (tmp_path / f"cpu{number}" / "topology" / "thread_siblings_list").write_text(siblings)
    assert system.num_cores(tmp_path) == 4
    assert system.num_cores(tmp_path / "nowhere") == 6


def test_what_a_control_group_does_not_allow_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = system.available_bytes()
    assert 0 < free <= psutil.virtual_memory().total
    resident = psutil.Process().memory_info().rss
    monkeypatch.setattr(system, "memory_limit", lambda: resident + 2**20)
    assert system.available_bytes() <= 2**21, "the group's rest, whatever the machine has"
    monkeypatch.setattr(system, "memory_limit", lambda: 1)
    assert system.available_bytes() == 0
