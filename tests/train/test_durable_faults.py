"""A durable store on a drive that fails, is full, tears or loses what was written, and in the hands of others.

A clear error or the step before, never a wrong number.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import gemini
from gemini.memory.durable import folder
from gemini.memory.durable.slots import SlotFile
from gemini.train.checkpoint.durable import committed_extra, open_store
from tests.crash_images import content
from tests.train.helpers import adam, assert_same_snapshot, gpt2, make_config, snapshot, train
from tests.train.test_durable import durable, end

ROOT = Path(__file__).resolve().parents[2]


class Failing:
    """At the call with a number, counted over all by which a store is written, the drive says no; a full one from there
    on.
    """

    def __init__(self, at: int, code: int):
        self.calls, self.at, self.code = 0, at, code

    def _refusing(self, call: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.at + 1 or (self.calls > self.at and self.code == errno.ENOSPC):
                raise OSError(self.code, os.strerror(self.code))
            return call(*args, **kwargs)

        return called

    @contextmanager
    def drive(self) -> Iterator[None]:
        begin_write, refusing = SlotFile.begin_write, self._refusing(lambda: None)

        def slot_write(file: SlotFile, source: Any, offset: int) -> Any:
            try:
                refusing()
            except OSError as e:
                raise file.failed("write", source.nbytes, offset, e) from e
            return begin_write(file, source, offset)

        with (
            mock.patch.object(SlotFile, "begin_write", slot_write),
            mock.patch.object(os, "pwrite", self._refusing(os.pwrite)),
            mock.patch.object(os, "fdatasync", self._refusing(os.fdatasync)),
            mock.patch.object(os, "fsync", self._refusing(os.fsync)),
        ):
            yield


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_drive_that_fails_or_is_full_at_any_call_of_a_commit(
    code: int, tmp_path: Path, summary: Callable[[str], None]
) -> None:
    """The error says why; the next run goes on from the commit before, or from this one if its record is there."""
    at, found = 0, []
    while not found or found[-1] != "no error":
        store = tmp_path / str(at)
        store.mkdir()
        model, optimizer = durable("half", store)
        saved = {}
        for name in ("first", "second"):
            train(model, optimizer, [0])
            saved[name] = snapshot(model)
            if name == "first":
                gemini.save_checkpoint(store, model, optimizer, extra=name)
        failing = Failing(at, code)
        try:
            with failing.drive():
                gemini.save_checkpoint(store, model, optimizer, extra="second")
            assert failing.calls <= at, "it failed, and nobody was told"
            found.append("no error")
        except gemini.StorageError as e:
            assert os.strerror(code) in str(e)
            found.append("an error")
        end(model)
        model, optimizer = durable("half", store)
        name = gemini.load_checkpoint(store, model, optimizer)
        assert_same_snapshot(snapshot(model), saved[name])
        found[-1] = f"{name} after an error" if found[-1] == "an error" else found[-1]
        assert name == "second" or found[-1] != "no error"
        end(model)
        shutil.rmtree(store)
        at += 1
    assert {"first after an error", "second after an error", "no error"} == {*found}
    summary(f"a commit to a durable store failed at each of its {at - 1} calls to the drive")


def test_a_drive_that_cannot_hold_two_slots_is_said_when_the_model_is_wrapped(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    says = pytest.raises(gemini.StorageError, match="cannot allocate .* No space left on device")
    with mock.patch.object(os, "posix_fallocate", side_effect=full), says:
        durable("disk", tmp_path)
    model, _ = durable("disk", tmp_path)  # the lock was let go
    end(model)


@pytest.fixture(scope="module")
def two_commits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A store, and what its two commits hold."""
    store = tmp_path_factory.mktemp("two_commits")
    model, optimizer = durable("half", store)
    held = {}
    for position in range(2):
        train(model, optimizer, [position])
        gemini.save_checkpoint(store, model, optimizer, extra=position)
        number, bits = content(store)
        held[number] = bits
    end(model)
    return store, held


@pytest.fixture
def store(two_commits: tuple[Path, dict[int, str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_commits[0], tmp_path / "store"))


def newest_record(store: Path) -> Path:
    found = {path: folder.read_record(path) for path in (store / "store-0001").glob("record-*")}
    return max(found, key=lambda path: found[path] or folder.Record(0, None, b""))


def test_a_record_that_is_cut_off_or_torn_anywhere_gives_the_commit_before(
    two_commits: tuple[Path, dict[int, str]], store: Path
) -> None:
    path, rng = newest_record(store), random.Random(1)
    whole = path.read_bytes()
    assert content(store) == (2, two_commits[1][2])
    before = two_commits[1][1]
    cuts = [*range(0, 64), *(rng.randrange(len(whole)) for _ in range(60)), len(whole) - 1]
    torn = [whole[:at] for at in cuts]
    for _ in range(60):
        data = bytearray(whole)
        data[rng.randrange(16, len(whole))] ^= 1 << rng.randrange(8)
        torn.append(bytes(data))
    for data in torn:
        path.write_bytes(data)
        assert content(store) == (1, before)


def test_a_store_that_is_cut_off_anywhere_is_refused(store: Path) -> None:
    """Whichever file it is that lost its end; the record is the test above."""
    rng = random.Random(2)
    for kind in ("slots", "layout"):
        path = next((store / "store-0001").glob(f"{kind}-*"))
        whole = path.read_bytes()
        for at in (0, 1, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(20))):
            path.write_bytes(whole[:at])
            with pytest.raises(gemini.StorageError, match="is cut short|is missing or damaged"):
                open_store(store)
        path.write_bytes(whole)
    assert open_store(store).commit.sequence == 2


def test_a_model_of_another_kind_leaves_a_store_whole(store: Path) -> None:
    """It is wrapped on the store itself, where it begins one of its own, and ends without a commit."""
    raw = gpt2(layers=1)
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="128MiB", nvme_path=store, durable=True)
    other = gemini.GeminiDDP(raw, gemini.GeminiConfig(memory=memory, device="cpu"))
    with pytest.raises(gemini.PlanMismatch, match="was saved for another model"):
        gemini.load_checkpoint(store, other, adam(other))
    assert (store / "store-0002").is_dir()
    end(other)
    assert committed_extra(store) == 1
    model, optimizer = durable("half", store)
    assert gemini.load_checkpoint(store, model, optimizer) == 1
    end(model)


def test_a_store_of_a_newer_format_is_refused_by_a_run_too(store: Path) -> None:
    """It neither goes on from it nor replaces it."""
    for path in (store / "store-0001").glob("record-*"):
        path.write_bytes(path.read_bytes()[:8] + b"\x63\0\0\0" + path.read_bytes()[12:])
    with pytest.raises(gemini.StorageError, match="has version 99 of the format, this Gemini reads version 2"):
        durable("half", store)
    assert not (store / "store-0002").exists()


def test_two_runs_at_once_are_refused(store: Path) -> None:
    """The second one is another process; so is one that only loads it."""
    model, _ = durable("half", store)
    code = """
import sys
from pathlib import Path
import gemini
from gemini.train.checkpoint.durable import committed_extra
from tests.train.test_durable import durable
for use in (lambda path: durable("half", path), committed_extra):
    try:
        use(Path(sys.argv[1]))
    except gemini.StorageError as e:
        print(e)
"""
    said = subprocess.run([sys.executable, "-c", code, store], capture_output=True, text=True, cwd=ROOT, timeout=120)
    lines = said.stdout.splitlines()
    assert len(lines) == 2, said
    assert all("is in use by another run" in line and f"process {os.getpid()} on " in line for line in lines)
    end(model)
    raw = gpt2(dropout=0.1)
    reader = gemini.GeminiDDP(raw, make_config(raw, "ram", store))
    assert gemini.load_checkpoint(store, reader, adam(reader)) == 1
