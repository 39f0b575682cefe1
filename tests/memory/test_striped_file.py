"""A file that is striped over several drives: what is read is what was written, each has its share, and a drive that
fails says so.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import gemini
from gemini.memory import nvme
from gemini.memory.devices.pages import PAGE, host_bytes
from gemini.memory.nvme import Extent, SpillFile, striped_bytes, striped_free_bytes, stripes
from tests.train.helpers import adam, assert_same_snapshot, gpt2, make_config, snapshot, train
from tests.world import world_of

PAGES = 200


@pytest.fixture
def drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(nvme, "STRIPE", 3 * PAGE)
    found = [tmp_path / str(number) for number in range(3)]
    for drive in found:
        drive.mkdir()
    return found


@pytest.mark.parametrize("seed", range(4))
def test_what_is_read_is_what_was_written(seed: int, drives: list[Path]) -> None:
    rng, expected = random.Random(seed), bytearray(PAGES * PAGE)
    file = SpillFile(drives, PAGES * PAGE)
    start = file.allocate(PAGES * PAGE)
    under_way: list[tuple[Any, Any, int, int]] = []
    for _ in range(40):
        first = rng.randrange(PAGES)
        size = rng.randint(1, PAGES - first) * PAGE
        memory = host_bytes(size)
        if rng.random() < 0.5:
            data = rng.randbytes(size)
            memory.numpy()[:] = memoryview(data)
            file.write(memory, start + first * PAGE)
            expected[first * PAGE : first * PAGE + size] = data
        else:
            under_way.append(
                (file.begin_read([Extent(memory, start + first * PAGE)], urgent=True), memory, first, size)
            )
            event, *_ = under_way[-1]
            event.wait()
            assert event.is_complete() and memory.numpy().tobytes() == expected[first * PAGE : first * PAGE + size]
    again = host_bytes(PAGES * PAGE)
    file.read(again, start)
    assert again.numpy().tobytes() == bytes(expected)
    file.close()


def test_every_byte_has_one_place_and_drives_have_equal_shares(drives: list[Path]) -> None:
    for num_bytes in (0, PAGE, 3 * PAGE, 10 * PAGE, 27 * PAGE, 28 * PAGE):
        found = list(stripes(0, num_bytes, 3))
        assert sum(size for *_, size in found) == num_bytes
        for number in range(3):
            own = [(at, size) for drive, at, _, size in found if drive == number]
            assert sum(size for _, size in own) == striped_bytes(num_bytes, number, 3)
            end = 0
            for at, size in own:
                assert at == end, "one behind the other"
                end += size
    file = SpillFile(drives, 100 * PAGE)
    taken = [os.fstat(fd).st_size // PAGE for fd in file._fds]
    assert taken == [34, 33, 33], "all is allocated at once"
    file.allocate(100 * PAGE)
    file.allocate(9 * PAGE)
    assert [os.fstat(fd).st_size // PAGE for fd in file._fds] == [37, 36, 36]
    file.close()


def test_a_drive_that_fails_is_named(drives: list[Path]) -> None:
    file = SpillFile(drives, 30 * PAGE)
    os.ftruncate(file._fds[1], 0)
    with pytest.raises(gemini.StorageError, match=f"could not read .* of the spill file in {drives[1]}"):
        file.read(host_bytes(30 * PAGE), 0)
    file.close()


def test_a_full_drive_is_named_and_nothing_stays(drives: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = os.posix_fallocate

    def full(fd: int, start: int, num_bytes: int) -> None:
        # A file that has no name yet lies where its directory is.
        if str(drives[2]) in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        allocate(fd, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(gemini.StorageError, match=f"cannot allocate .* in {drives[2]}"):
        SpillFile(drives, 30 * PAGE)


class Stat(NamedTuple):
    st_dev: int


def test_free_bytes_are_equal_shares_of_the_poorest_drive(drives: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    free = dict(zip(drives, (100, 40, 100), strict=True))
    device = dict(zip(drives, (1, 2, 1), strict=True))
    monkeypatch.setattr(nvme, "free_bytes", free.__getitem__)
    monkeypatch.setattr(nvme.os, "stat", lambda path: Stat(device[path]))
    assert striped_free_bytes(drives) == 3 * 40
    free[drives[1]] = 90
    assert striped_free_bytes(drives) == 3 * 50, "two are directories of one drive"


def test_a_model_on_two_drives_has_the_bits_of_one_on_one(drives: list[Path]) -> None:
    found = []
    for paths in (drives[:1], drives[:2]):
        raw = gpt2(dropout=0.1)
        config = make_config(raw, "disk", drives[0])
        memory = gemini.MemoryBudget(**{**vars(config.memory), "nvme_path": paths})
        model = gemini.GeminiDDP(raw, gemini.GeminiConfig(**{**vars(config), "memory": memory}))
        optimizer = adam(model)
        losses = train(model, optimizer, range(3))
        report = model.memory_report()
        found.append((losses, snapshot(model), {tier: report[tier] for tier in ("cpu", "nvme")}))
        world_of(model).check()
        gemini.save_checkpoint(drives[2] / f"saved-{len(paths)}", model, optimizer)
        world_of(model).close()
    (losses, weights, report), (other_losses, other_weights, other_report) = found
    assert losses == other_losses and report == other_report
    assert_same_snapshot(weights, other_weights)


@pytest.mark.parametrize(
    ("paths", "says"),
    [([], "names no directory"), (["a", ""], "names no directory"), (["a", "b", "a"], "names a twice")],
)
def test_wrong_lists_are_refused_where_they_are_written(paths: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        gemini.MemoryBudget(nvme_path=paths)


@pytest.mark.parametrize("path", [5, ["a", None], {"a"}])
def test_what_is_no_path_is_refused_by_its_field(path: Any) -> None:
    with pytest.raises(TypeError, match=r"nvme_path=\) is a path or a list of paths"):
        gemini.MemoryBudget(nvme_path=path)
