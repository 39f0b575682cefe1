"""``gemini doctor`` answers for every part of the machine, and fails only where asked about something unusable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gemini.machines.measure import Sizes
from gemini.planning.hardware import load_hardware
from tests.cli.commands import Command


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
