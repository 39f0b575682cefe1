"""``gemini demo``: the README's promise, with the real model and text and few steps; and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import Command


def test_several_processes_are_refused_once(
    gemini_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "report.json"))
    monkeypatch.setattr("gemini.cli.PATIENCE_S", 0)
    for rank, says in ((0, "`gemini demo` runs in one process, and 2 were started."), (1, "")):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        result = gemini_command("demo", "--out", tmp_path / "out")
        assert result.exit_code == 2 and says in " ".join(result.stderr.split())
        assert bool(result.stderr) == bool(says)


@pytest.mark.slow
def test_the_demo_keeps_its_promises(gemini_command: Command, tmp_path: Path) -> None:
    """Needs 2 GiB on the disk under the temporary folder."""
    out = tmp_path / "out"
    result = gemini_command.ok("demo", "--steps", 6, "--out", out)
    for words in (
        ": it fell",
        "cpu: stayed within its budget",
        "nvme: stayed within its budget",
        "here: the same bits",
    ):
        assert words in result.stdout
    assert len(result.stdout.splitlines()) <= 24, "one screen"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in out.iterdir()}
    assert not any(path.is_dir() for path in out.iterdir()), "neither checkpoints nor the folder of the spill file"
