"""Durable stores: a commit is what was trained, whatever the drive did since, and two runs do not share one."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from gemini.integrations.huggingface_save import committed_extra
from rich.console import Console

import gemini
from gemini.jobs.doctor import doctor
from gemini.jobs.settings import DoctorSettings
from gemini.memory import nvme
from gemini.memory.devices.pages import PAGE
from gemini.memory.durable import folder
from gemini.memory.durable.folder import StoreFolder
from gemini.memory.durable.slots import SlotFile
from gemini.memory.nvme import Extent
from gemini.train import engine
from gemini.train.checkpoint import write as checkpoint_write
from gemini.train.checkpoint.durable import StoreHome, open_store
from gemini.train.passes import hooks
from gemini.train.setup import build
from gemini.train.setup.adoption import Adoption
from gemini.train.update import worker as update_worker
from tests.crash_images import Judge, Log, content
from tests.train.helpers import adam, assert_same_snapshot, batch, failing, gpt2, make_config, snapshot, train
from tests.world import world_of


def durable(where: str, path: Path, states: str = "exact", drives: Sequence[Path] = ()) -> tuple[Any, Any]:
    """A model on a store, and its optimizer; ``drives``: further ones over which it is striped."""
    raw = gpt2(dropout=0.1)
    config = make_config(raw, where, path, slack=0 if states == "exact" else 1 << 17)
    paths = [path, *drives] if drives else path
    memory = gemini.MemoryBudget(**{**vars(config.memory), "nvme": "128MiB", "nvme_path": paths, "durable": True})
    model = gemini.GeminiDDP(raw, replace(config, memory=memory, states=states))
    return model, adam(model)


def end(model: Any) -> None:
    """As a killed process leaves it: nothing is committed."""
    world_of(model).close()


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("states", ["exact", "compact"])
@pytest.mark.parametrize(("where", "then"), [("disk", "disk"), ("half", "standin")])
def test_a_resumed_run_goes_on_from_the_last_commit(where: str, then: str, states: str, tmp_path: Path) -> None:
    """It had gone on training when it ended; the budgets of the next run are others."""
    model, optimizer = durable(where, tmp_path, states)
    torch.manual_seed(1)
    for position in range(3):
        train(model, optimizer, [position])
        gemini.save_checkpoint(tmp_path, model, optimizer, extra=position, wait=False)
    at_commit, expected = snapshot(model), train(model, optimizer, range(3, 5))
    trained = snapshot(model)
    end(model)
    model, optimizer = durable(then, tmp_path, states)
    for _ in range(2):
        assert gemini.load_checkpoint(tmp_path, model, optimizer) == 2
        assert_same_snapshot(snapshot(model), at_commit)
        assert train(model, optimizer, range(3, 5)) == expected
        assert_same_snapshot(snapshot(model), trained)
    gemini.save_checkpoint(tmp_path, model, optimizer, extra="on")
    world_of(model).check()
    end(model)


def test_a_commit_that_is_written_at_once_has_what_updates_in_flight_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no memory to write behind training: what lives in memory is written when its update is over."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise gemini.BudgetExceeded("no room")

    def slowly(*args: Any, **how: Any) -> Any:
        time.sleep(0.02)
        return tiles_of(*args, **how)

    tiles_of = update_worker.tiles_of
    monkeypatch.setattr(checkpoint_write, "_reserve", refuse)
    monkeypatch.setattr(update_worker, "tiles_of", slowly)
    model, optimizer = durable("ram", tmp_path)
    train(model, optimizer, range(3))
    with pytest.warns(UserWarning, match="while the training waits"):
        gemini.save_checkpoint(tmp_path, model, optimizer, wait=False)
    expected = snapshot(model)
    end(model)
    model, optimizer = durable("ram", tmp_path)
    gemini.load_checkpoint(tmp_path, model, optimizer)
    assert_same_snapshot(snapshot(model), expected)
    end(model)


def test_weights_are_exported_from_the_store(tmp_path: Path) -> None:
    """A param need not end with a page."""
    model, optimizer = durable("disk", tmp_path, "exact")
    train(model, optimizer, range(1))
    model.save_pretrained(tmp_path / "out")
    opened = type(gpt2()).from_pretrained(tmp_path / "out")
    for name, param in opened.named_parameters():
        assert torch.equal(param.float(), model.full_param(name).float()), name
    end(model)


def test_without_a_budget_for_it_the_store_is_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = durable("disk", tmp_path)
    train(model, optimizer, range(2))
    gemini.save_checkpoint(tmp_path, model, optimizer)
    expected = snapshot(model)
    raw = gpt2(dropout=0.1)
    other = gemini.GeminiDDP(raw, make_config(raw, "ram", tmp_path))
    with pytest.raises(gemini.StorageError, match="in use by another run"):
        durable("disk", tmp_path)
    end(model)
    gemini.load_checkpoint(tmp_path, other, adam(other))
    assert_same_snapshot(snapshot(other), expected)
    console = Console(record=True, width=300, file=io.StringIO())
    assert doctor(DoctorSettings(nvme_path=(tmp_path,)), console) == 0 and "commit 1, step 2" in console.export_text()
    os.truncate(tmp_path / "store-0001" / "slots-00000", 4096)
    assert doctor(DoctorSettings(nvme_path=(tmp_path,)), console) == 1 and "cut short" in console.export_text()


def said_of(store: Path) -> str:
    """By the doctor, of a store that is whole."""
    console = Console(record=True, width=300, file=io.StringIO())
    assert doctor(DoctorSettings(store=store), console) == 0
    return console.export_text()


def images(
    path: Path, num: int, where: str = "half", states: str = "exact", *, behind: bool = True, drives: int = 1,
    most: int | None = None,
) -> list[str]:  # fmt: skip
    """What is wrong with images of a run of four commits and one more step; no further where ``most`` are wrong."""
    store, *others = (path / "drives" / str(drive) for drive in range(drives))
    for directory in (store, *others):
        directory.mkdir(parents=True)
    model, optimizer = durable(where, store, states, others)
    train(model, optimizer, [0])
    gemini.save_checkpoint(store, model, optimizer, extra=0)
    log = Log(path / "drives")
    judge, rng, failures = Judge(log, "0"), random.Random(num), list[str]()
    with log.recording():
        judge.committed(store)
        for position in range(1, 4):
            train(model, optimizer, [position])
            commit = gemini.save_checkpoint(store, model, optimizer, extra=position, wait=not behind)
            if behind:  # another step begins
                model(**batch(position)).loss.backward()
                optimizer.zero_grad()
            commit.wait()
            judge.committed(store)
        train(model, optimizer, [4])
    end(model)
    for number in range(num):
        (path / f"image-{number}").mkdir()
        if (found := judge.failure(path / f"image-{number}", rng)) is not None:
            failures.append(found)
        shutil.rmtree(path / f"image-{number}")
        if len(failures) == most:
            break
    return failures


def test_every_image_of_a_crash_opens_at_a_commit(tmp_path: Path) -> None:
    assert images(tmp_path, 30) == []


def test_every_image_of_a_crash_of_several_drives_opens_at_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme, "STRIPE", 2 * PAGE)
    assert images(tmp_path, 30, drives=3) == []


def test_a_missing_barrier_of_one_of_several_drives_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "STRIPE", 2 * PAGE)

    def all_but_the_last(slots: SlotFile) -> None:
        for fd in slots._fds[:-1]:
            os.fdatasync(fd)

    with mock.patch.object(SlotFile, "sync", all_but_the_last):
        assert images(tmp_path, 30, drives=3)


def test_a_store_on_two_drives_is_resumed_with_the_same_ones_and_moved_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme, "STRIPE", 2 * PAGE)
    a, b, c = (tmp_path / name for name in "abc")
    for drive in (a, b, c):
        drive.mkdir()
    model, optimizer = durable("disk", a, drives=[b])
    train(model, optimizer, range(2))
    gemini.save_checkpoint(a, model, optimizer, extra="first")
    expected = snapshot(model)
    on_drives = {path.parent.relative_to(tmp_path).parts[0]: path.stat().st_blocks for path in tmp_path.rglob("slots-*")
                 if not path.is_symlink()}  # fmt: skip
    assert min(on_drives[name] for name in "ab") > 0.9 * max(on_drives[name] for name in "ab"), "equal shares"
    end(model)
    for drives, store in ([b], "store-0001"), ([c, b], "store-0002"), ([], "store-0003"):
        model, optimizer = durable("disk", a, drives=drives)
        assert gemini.load_checkpoint(a, model, optimizer) == "first"
        assert_same_snapshot(snapshot(model), expected)
        gemini.save_checkpoint(a, model, optimizer, extra="first")
        end(model)
        assert [path.name for path in folder.stores(a)] == [store], "what was there before is gone"
    assert not [*b.glob("*/*")] and not [*c.glob("*/*")], "also on the drives that are used no more"
    model, optimizer = durable("disk", a, drives=[b])
    gemini.save_checkpoint(a, model, optimizer)
    end(model)
    next(b.rglob("slots-*")).unlink()
    raw = gpt2(dropout=0.1)
    other = gemini.GeminiDDP(raw, make_config(raw, "ram", tmp_path))
    with pytest.raises(gemini.StorageError, match="slots-00000-1 cannot be read"):
        gemini.load_checkpoint(a, other, adam(other))


def test_a_missing_barrier_is_found(tmp_path: Path) -> None:
    with mock.patch.object(SlotFile, "sync", lambda self: None):
        assert images(tmp_path, 30)


def test_a_record_before_its_data_is_found(tmp_path: Path) -> None:
    flush, commit = StoreHome.flush, StoreFolder.commit
    given: list[Any] = []

    def late(self: StoreHome) -> None:  # all but the barrier; which comes behind the record
        with mock.patch.object(SlotFile, "sync", lambda self: given.append(self)):
            flush(self)

    def early(self: StoreFolder, record: folder.CommitRecord) -> None:
        commit(self, record)
        self.slots.sync()

    with mock.patch.object(StoreHome, "flush", late), mock.patch.object(StoreFolder, "commit", early):
        assert images(tmp_path, 1000, most=1)  # one of fifty shows it
    assert given


def test_the_plan_has_room_for_two_slots_and_says_what_a_commit_writes(tmp_path: Path) -> None:
    trace = gemini.trace(gpt2(), batch())
    planned = {
        durable: gemini.plan(
            trace, None, gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=tmp_path, durable=durable)
        )
        for durable in (False, True)
    }
    saved = gemini.Plan.from_json(planned[True].to_json())
    kept = sum(sum(saved.problem.durable_bytes(i).values()) for i in range(len(saved.layout.chunks)))
    on_nvme = {durable: plan.bytes_per_tier.get(gemini.Tier.NVME, 0) for durable, plan in planned.items()}
    assert kept > 0 and on_nvme == {False: 0, True: 2 * kept}  # everything lives in memory, which is written behind
    assert saved.committed_bytes == kept and "a commit to the durable store writes" in str(saved)
    assert "durable store" not in str(planned[False])


def test_a_store_needs_a_folder() -> None:
    with pytest.raises(ValueError, match=r"durable=True\) needs nvme_path"):
        gemini.MemoryBudget(durable=True)


def test_a_failed_commit_leaves_the_one_before(tmp_path: Path) -> None:
    model, optimizer = durable("disk", tmp_path)
    train(model, optimizer, [0])
    gemini.save_checkpoint(tmp_path, model, optimizer, extra="first")
    expected = snapshot(model)
    train(model, optimizer, [1])
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "pwrite", side_effect=full), pytest.raises(gemini.StorageError, match="No space left"):
        gemini.save_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(gemini.GeminiError, match="since a commit failed"):
        train(model, optimizer, [2, 3])
        snapshot(model)
    end(model)
    model, optimizer = durable("disk", tmp_path)
    assert gemini.load_checkpoint(tmp_path, model, optimizer) == "first"
    assert_same_snapshot(snapshot(model), expected)
    end(model)


def test_a_flipped_bit_is_found_before_anything_is_written(tmp_path: Path) -> None:
    """In any plane, by a model on the store itself; what is not committed may be anything."""
    model, optimizer = durable("half", tmp_path)
    for position in range(2):
        train(model, optimizer, [position])
        gemini.save_checkpoint(tmp_path, model, optimizer, extra=position)
    expected = snapshot(model)
    end(model)
    slots, rng = tmp_path / "store-0001" / "slots-00000", random.Random(4)
    planes = open_store(tmp_path).opened["slots-00000.safetensors"].slots
    model, optimizer = durable("half", tmp_path)
    for plane, (runs, offset, size) in planes.items():
        page = rng.randrange(size // 4096)
        committed = [slot for count, slot, _ in runs for _ in range(count)][page]
        at, bit = page * 4096 + rng.randrange(4096), 1 << rng.randrange(8)
        before = snapshot(model)
        flip(slots, offset + committed * size + at, bit)
        damaged = slots.read_bytes()
        kind, _, chunk = plane.partition("/")
        with pytest.raises(gemini.StorageError, match=f"damaged in the {kind} of chunk {chunk}, of {kind}/.*Check"):
            gemini.load_checkpoint(tmp_path, model, optimizer)
        assert slots.read_bytes() == damaged
        assert_same_snapshot(snapshot(model), before)
        flip(slots, offset + committed * size + at, bit)
        flip(slots, offset + (1 - committed) * size + at, bit)
        assert gemini.load_checkpoint(tmp_path, model, optimizer) == 1
        assert_same_snapshot(snapshot(model), expected)
    end(model)


def flip(path: Path, at: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


# ---- a drive that fails, is full, tears or loses what was written, and in the hands of others ------------------------


# A clear error or the step before, never a wrong number.


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

        def slot_write(file: SlotFile, extents: Any) -> Any:
            def asked() -> Iterator[Extent]:
                for source, offset in extents:
                    try:
                        refusing()
                    except OSError as e:
                        raise file.failed("write", 0, source.nbytes, offset, e) from e
                    yield Extent(source, offset)

            return begin_write(file, asked())

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


PARTS = [(build, "_make_chunk", 2), (engine, "Updates", 1), (Adoption, "_become_view", 2), (hooks, "attach", 1)]


@pytest.mark.parametrize("part", PARTS)
def test_a_wrap_that_breaks_off_lets_go_of_its_store(part: tuple[Any, str, int], tmp_path: Path) -> None:
    owner, name, number = part
    with failing(owner, name, number, MemoryError()), pytest.raises(MemoryError) as kept:
        durable("disk", tmp_path)
    model, _ = durable("disk", tmp_path)
    assert kept.value.__traceback__ is not None, "whoever keeps the error keeps all frames, and what they have"
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
    return max(found, key=lambda path: found[path] or folder.CommitRecord(0, None, b""))


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
    for path in (store / "store-0001").glob("record-*"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(gemini.StorageError, match="no commit"):
        open_store(store)


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


@pytest.mark.parametrize("version", [1, 99])
def test_a_store_of_another_format_is_refused_by_a_run_too(store: Path, version: int) -> None:
    """It neither goes on from it nor replaces it."""
    for path in (store / "store-0001").glob("record-*"):
        path.write_bytes(path.read_bytes()[:8] + version.to_bytes(4, "little") + path.read_bytes()[12:])
    with pytest.raises(gemini.StorageError, match=f"has version {version} of the format, this Gemini reads version 2"):
        durable("half", store)
    assert not (store / "store-0002").exists()


def test_two_runs_at_once_are_refused(store: Path) -> None:
    """The second one is another process; so is one that only loads it."""
    model, _ = durable("half", store)
    code = """
import sys
from pathlib import Path
import gemini
from gemini.integrations.huggingface_save import committed_extra
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
