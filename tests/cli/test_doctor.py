"""``gemini doctor`` answers for every part of the machine, and fails only where asked about something unusable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Gemini = Callable[..., Any]


def test_doctor_speaks_of_every_part(gemini_command: Gemini) -> None:
    result = gemini_command("doctor")
    assert result.exit_code == 0, result.output
    for title in ("Versions", "CPU", "Native kernels", "Memory", "GPU", "NVMe"):
        assert f"\n{title}\n" in f"\n{result.stdout}"
    assert f"torch {torch.__version__}" in result.stdout
    assert f"{torch.get_num_threads()} threads" in result.stdout
    assert "available of" in result.stdout


def test_doctor_tries_a_folder(gemini_command: Gemini, tmp_path: Path) -> None:
    result = gemini_command("doctor", "--nvme-path", tmp_path)
    assert result.exit_code == 0, result.output
    said = result.stdout.split("NVMe\n")[1]
    assert str(tmp_path) in said and "free" in said and "O_DIRECT" in said
    assert list(tmp_path.iterdir()) == [], "the trial must leave nothing behind"


def test_doctor_fails_for_a_folder_that_is_not_there(gemini_command: Gemini, tmp_path: Path) -> None:
    result = gemini_command("doctor", "--nvme-path", tmp_path / "absent")
    assert result.exit_code == 1
    assert str(tmp_path / "absent") in result.stdout.split("NVMe\n")[1]
