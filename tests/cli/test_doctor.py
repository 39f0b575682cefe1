"""``gemini doctor`` answers for every part of the machine, and fails only where asked about something unusable; of a
durable store it says what is in it and what is broken, to a stranger, and changes nothing.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.jobs import doctor
from gemini.machines.measure import Sizes
from gemini.planning.hardware import load_hardware
from gemini.train.checkpoint.durable import SlotReader
from tests.cli.commands import Command
from tests.train.helpers import train
from tests.train.test_durable import durable, end


def test_doctor_speaks_of_every_part(gemini_command: Command) -> None:
    result = gemini_command.ok("doctor")
    for title in ("Versions", "CPU", "Native kernels", "Memory", "GPU", "NVMe"):
        assert f"\n{title}\n" in f"\n{result.stdout}"
    assert f"torch {torch.__version__}" in result.stdout
    assert f"{torch.get_num_threads()} threads" in result.stdout
    assert "available of" in result.stdout
    assert "Errno" not in result.stdout and ("on CUDA" in result.stdout) == torch.cuda.is_available()
    for name in ("trl", "datasets", "bitsandbytes"):
        assert re.search(rf"{name}( \d|,|$)", result.stdout, re.M), "with its version, or as not installed"


def test_a_gpu_that_others_have_all_of_is_a_problem_in_words(
    gemini_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("gemini.jobs.doctor.prefer_expandable_segments", lambda: "as it is")
    for name in ("current_device", "mem_get_info"):  # the first one makes a context
        monkeypatch.setattr(f"torch.cuda.{name}", full)
    result = gemini_command.ok("doctor")
    assert result.stdout.count("Problems\n  CUDA out of memory") == 2 and "\nNVMe\n" in result.stdout


def test_doctor_says_how_states_lie_in_several_nodes(gemini_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemini.jobs.doctor.memory_nodes", lambda: (0, 1))
    assert "of 2 NUMA nodes: states are spread over them" in " ".join(gemini_command.ok("doctor").stdout.split())


def test_doctor_tries_a_folder(gemini_command: Command, tmp_path: Path) -> None:
    result = gemini_command.ok("doctor", "--nvme-path", tmp_path)
    said = result.stdout.split("NVMe\n")[1]
    assert str(tmp_path) in said and "free" in said and "O_DIRECT" in said
    assert list(tmp_path.iterdir()) == [], "the trial must leave nothing behind"


def test_doctor_fails_for_a_folder_that_is_not_there(gemini_command: Command, tmp_path: Path) -> None:
    result = gemini_command("doctor", "--nvme-path", tmp_path / "absent")
    assert result.exit_code == 1
    assert str(tmp_path / "absent") in result.stdout.split("NVMe\n")[1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures on next to nothing."""
    tiny = Sizes(product=(8, 8, 8), stream_bytes=8192, adam_numel=1000, spill_bytes=200_000, repeats=3, ops=10)
    monkeypatch.setattr("gemini.machines.measure.Sizes", lambda: tiny)


def test_doctor_measures_and_writes_a_machine(gemini_command: Command, tmp_path: Path, quick: None) -> None:
    folder, file = tmp_path / "drive", tmp_path / "mine.json"
    folder.mkdir()
    result = gemini_command.ok("doctor", "--measure", "--nvme-path", folder, "--json", file)
    table = result.stdout.split("Measured\n")[1]
    hardware = load_hardware(file)
    for key in hardware.figures:
        assert f"\n  {key} " in f"\n{table}", key
    assert {"cpu_bytes", "dram_bandwidth", "update_cpu", "nvme_read"} <= set(hardware.figures)
    assert f"written to {file}" in table and list(folder.iterdir()) == []


def test_doctor_says_what_was_not_measured(gemini_command: Command, quick: None) -> None:
    result = gemini_command.ok("doctor", "--measure")
    assert "the drive was not measured: add --nvme-path FOLDER" in result.stdout
    assert "nvme_read" not in result.stdout


@pytest.mark.parametrize("load, said", [(0.1, False), (64.0, True)])
def test_doctor_says_that_others_were_at_work(
    gemini_command: Command, quick: None, monkeypatch: pytest.MonkeyPatch, load: float, said: bool
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("gemini.kernels.get_num_threads", lambda: 16)
    result = gemini_command("doctor", "--measure")
    assert ("the machine was busy, a load of 64.0 on 16 cores" in result.stdout) == said


def test_doctor_does_not_measure_on_a_drive_that_cannot_be_used(gemini_command: Command, tmp_path: Path) -> None:
    result = gemini_command("doctor", "--measure", "--nvme-path", tmp_path / "absent")
    assert result.exit_code == 1 and "Measured" not in result.stdout


# ---- in a durable store ----------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two commits, of steps 1 and 3."""
    path = tmp_path / "store"
    path.mkdir()
    model, optimizer = durable("disk", path)
    train(model, optimizer, [0])
    gemini.save_checkpoint(path, model, optimizer)
    train(model, optimizer, [1, 2])
    gemini.save_checkpoint(path, model, optimizer, extra={"global_step": 3, "run": "/runs/a", "files": {}})
    end(model)
    return path


def files_of(store: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in store.rglob("*") if path.is_file()}


def test_a_stranger_reads_what_is_in_a_store(gemini_command: Command, store: Path) -> None:
    (store / "LOCK-00000").unlink()
    before = files_of(store)
    result = gemini_command.ok("doctor", store)
    assert files_of(store) == before
    said = result.stdout
    for words in (
        "in use by nobody",
        "commit 2, step 3, 0:00:0",
        " ago, of 1 rank; for any number of ranks\n",
        "28 params, 30.6 k elements, bf16, rule Adam\n",
        "1.641 MiB on the drive, each state twice\n",
        "of a Trainer, step 3 of the run in /runs/a:",
        f"gemini sft --resume_from_checkpoint {store}",
        "reading 840 KiB",
        "all of it is what was written",
    ):
        assert words in said, words
    assert "Problems" not in said and "Versions" not in said


def test_a_store_in_use_says_by_whom(gemini_command: Command, tmp_path: Path) -> None:
    model, optimizer = durable("disk", tmp_path)
    none = gemini_command("doctor", tmp_path)
    assert none.exit_code == 1 and "has no commit" in none.stdout
    gemini.save_checkpoint(tmp_path, model, optimizer)
    result = gemini_command.ok("doctor", tmp_path)
    assert f"in use by process {os.getpid()} on " in result.stdout
    with pytest.raises(gemini.StorageError, match=f"in use by another run.*process {os.getpid()} on "):
        durable("disk", tmp_path)
    gemini.save_checkpoint(tmp_path, model, optimizer)  # the lock is still its own
    end(model)


def test_what_a_run_overwrites_meanwhile_is_no_damage(
    gemini_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has read the records of one commit when the run makes two more."""
    model, optimizer = durable("disk", tmp_path)
    gemini.save_checkpoint(tmp_path, model, optimizer)
    told = SlotReader.damage

    def late(reader: Any) -> list[str]:
        for _ in range(2):
            train(model, optimizer, [0])
            gemini.save_checkpoint(tmp_path, model, optimizer)
        return [*told(reader)]

    monkeypatch.setattr("gemini.train.checkpoint.durable.SlotReader.damage", late)
    result = gemini_command.ok("doctor", tmp_path)
    assert "the run has overwritten it since" in result.stdout
    end(model)


def test_a_store_that_a_run_removes_meanwhile_is_told_of_to_the_end(store: Path) -> None:
    lines = doctor._store(store)
    said = [next(lines)]
    shutil.rmtree(store / "store-0001")
    with pytest.raises(gemini.GeminiError):  # in words: what was read is gone
        for line in lines:
            said.append(line)
    assert any("commit 2, step 3, 0:00:0" in line for line in said)


def _tear(store: Path) -> None:
    newest = max((store / "store-0001").glob("record-*"), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:-1])


def _newer(store: Path) -> None:
    for path in (store / "store-0001").glob("record-*"):
        path.write_bytes(path.read_bytes()[:8] + b"\x63\0\0\0" + path.read_bytes()[12:])


def _cut(store: Path) -> None:
    os.truncate(store / "store-0001" / "slots-00000", 4096)


def _flip(store: Path) -> None:
    with open(store / "store-0001" / "slots-00000", "r+b") as file:
        data = bytearray(file.read())
        file.seek(0)
        file.write(bytes(255 - byte for byte in data))  # of both slots: one of them is committed


def _no_records(store: Path) -> None:
    for path in (store / "store-0001").glob("record-*"):
        path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "code", "says"),
    [
        (_tear, 0, "\n  commit 1, step 1"),
        (_newer, 1, "load the store with the Gemini that wrote it"),
        (_cut, 1, "is cut short"),
        (_flip, 1, "is damaged in the exp_avg of chunk 0, of exp_avg/"),
        (_no_records, 1, "Start anew, or load a checkpoint"),
    ],
)
def test_a_broken_store_says_what_to_do(
    damage: Any, code: int, says: str, gemini_command: Command, store: Path
) -> None:
    damage(store)
    result = gemini_command("doctor", store)
    assert result.exit_code == code and says in result.stdout, result.output
    assert ("Problems" in result.stdout) == bool(code)


def test_what_is_no_store_is_said_to_be_none(gemini_command: Command, tmp_path: Path) -> None:
    for path, why in ((tmp_path, "has no folder store-0001"), (tmp_path / "absent", "No such file or directory")):
        result = gemini_command("doctor", path)
        assert result.exit_code == 1 and why in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_another_model_began_beside_it_is_said(gemini_command: Command, store: Path) -> None:
    (store / "store-0002").mkdir()
    result = gemini_command.ok("doctor", store)
    assert "store-0001 beside store-0002" in result.stdout and "commit 2, step 3" in result.stdout
