"""Durable stores: a commit is what was trained, whatever the drive did since, and two runs do not share one."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console

import gemini
from gemini.jobs.doctor import doctor
from gemini.memory.durable import records
from gemini.memory.durable.folder import StoreFolder
from gemini.memory.durable.slots import SlotFile
from gemini.train.checkpoint import saver
from gemini.train.checkpoint.commit import Commit
from gemini.train.checkpoint.stored import open_store
from gemini.train.update import worker as update_worker
from tests.crash_images import Judge, Log
from tests.train.helpers import adam, assert_same_snapshot, batch, gpt2, make_config, snapshot, train
from tests.world import world_of


def durable(where: str, path: Path, states: str = "exact") -> tuple[Any, Any]:
    """A model on a store, and its optimizer."""
    raw = gpt2(dropout=0.1)
    config = make_config(raw, where, path, slack=0 if states == "exact" else 1 << 17)
    memory = gemini.MemoryBudget(**{**vars(config.memory), "nvme": "128MiB", "nvme_path": path, "durable": True})
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
    monkeypatch.setattr(saver, "_reserve", refuse)
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
    assert doctor(console, nvme_path=tmp_path) == 0 and "last: commit 1, step 2" in console.export_text()
    _cut_slots(tmp_path / "store-0001")
    assert doctor(console, nvme_path=tmp_path) == 1 and "cut short" in console.export_text()


def said_of(store: Path) -> str:
    """By the doctor, of a store that is whole."""
    console = Console(record=True, width=300, file=io.StringIO())
    assert doctor(console, store=store) == 0
    return console.export_text()


def images(path: Path, num: int, where: str = "half", states: str = "exact", *, behind: bool = True) -> list[str]:
    """What is wrong with images of a run of four commits and one more step."""
    store = path / "store"
    store.mkdir(parents=True)
    model, optimizer = durable(where, store, states)
    train(model, optimizer, [0])
    gemini.save_checkpoint(store, model, optimizer, extra=0)
    log = Log(store)
    judge, rng, failures = Judge(log), random.Random(num), list[str]()
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
    return failures


def test_every_image_of_a_crash_opens_at_a_commit(tmp_path: Path) -> None:
    assert images(tmp_path, 30) == []


def test_a_missing_barrier_is_found(tmp_path: Path) -> None:
    with mock.patch.object(SlotFile, "sync", lambda self: None):
        assert images(tmp_path, 30)


def test_a_record_before_its_data_is_found(tmp_path: Path) -> None:
    bring, commit = Commit._bring, StoreFolder.commit
    given: list[Any] = []

    def late(self: Commit, *args: Any) -> Any:  # all but the barrier; which comes behind the record
        with mock.patch.object(SlotFile, "sync", lambda self: given.append(self)):
            return bring(self, *args)

    def early(self: StoreFolder, *args: Any) -> int:
        num_bytes = commit(self, *args)
        self.slots.sync()
        return num_bytes

    with mock.patch.object(Commit, "_bring", late), mock.patch.object(StoreFolder, "commit", early):
        assert images(tmp_path, 30)
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


def _cut_record(store: Path) -> None:
    for path in store.glob("record-*"):
        path.write_bytes(path.read_bytes()[:100])


def _newer(store: Path) -> None:
    for path in store.glob("record-*"):
        path.write_bytes(path.read_bytes()[:8] + b"\3\0\0\0" + path.read_bytes()[12:])


def _cut_slots(store: Path) -> None:
    os.truncate(store / "slots-00000", 4096)


def _no_layout(store: Path) -> None:
    next(store.glob("layout-*")).unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [(_cut_record, "no commit"), (_newer, "version 3"), (_cut_slots, "cut short"), (_no_layout, "missing or damaged")],
)
def test_a_damaged_store_is_refused(damage: Any, says: str, tmp_path: Path) -> None:
    model, optimizer = durable("disk", tmp_path)
    gemini.save_checkpoint(tmp_path, model, optimizer)
    end(model)
    damage(tmp_path / "store-0001")
    raw = gpt2(dropout=0.1)
    other = gemini.GeminiDDP(raw, make_config(raw, "ram", tmp_path))
    before = snapshot(other)
    with pytest.raises(gemini.StorageError, match=says):
        gemini.load_checkpoint(tmp_path, other, adam(other))
    assert_same_snapshot(snapshot(other), before)


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


def test_a_store_of_the_format_before_is_resumed_and_gets_sums(tmp_path: Path) -> None:
    model, optimizer = durable("half", tmp_path)
    train(model, optimizer, [0])
    gemini.save_checkpoint(tmp_path, model, optimizer, extra=0)
    expected = snapshot(model)
    end(model)
    path = next((tmp_path / "store-0001").glob("record-*"))
    record = records.read(path)
    assert record is not None and record.version == 2
    record.text["runs"] = {name: [run[:2] for run in runs] for name, runs in record.text["runs"].items()}
    with mock.patch.object(records, "VERSION", 1):
        records.write(path, record)
    assert "format version 1" in said_of(tmp_path)
    model, optimizer = durable("half", tmp_path)
    assert gemini.load_checkpoint(tmp_path, model, optimizer) == 0
    assert_same_snapshot(snapshot(model), expected)
    gemini.save_checkpoint(tmp_path, model, optimizer, extra=1)
    end(model)
    runs = open_store(tmp_path).opened["slots-00000.safetensors"].slots
    assert all(crc is not None for found, _, _ in runs.values() for _, _, crc in found)


def test_a_torn_record_gives_the_step_before(tmp_path: Path) -> None:
    model, optimizer = durable("disk", tmp_path)
    for position in range(2):
        train(model, optimizer, [position])
        gemini.save_checkpoint(tmp_path, model, optimizer, extra=position)
    end(model)
    newest = max((tmp_path / "store-0001").glob("record-*"), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(newest.read_bytes())
    data[200] ^= 1
    newest.write_bytes(data)
    model, optimizer = durable("disk", tmp_path)
    assert gemini.load_checkpoint(tmp_path, model, optimizer) == 0
    end(model)


def test_a_store_of_another_model_is_refused(tmp_path: Path) -> None:
    model, optimizer = durable("disk", tmp_path)
    gemini.save_checkpoint(tmp_path, model, optimizer)
    end(model)
    raw = gpt2(layers=1)
    other = gemini.GeminiDDP(raw, make_config(raw, "ram", tmp_path))
    with pytest.raises(gemini.PlanMismatch):
        gemini.load_checkpoint(tmp_path, other, adam(other))
