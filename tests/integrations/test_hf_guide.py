"""The guide's code runs as it stands, one block after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tests.integrations.trainer_cases  # noqa: F401  its settings: quiet, and quick garbage collection

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "trainer.md"


def test_the_code_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 6
    exec(compile("\n".join(blocks), str(GUIDE), "exec"), {"__name__": "guide"})
    assert {"run", "model", "state"} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "run" / "checkpoint-4" / "gemini").is_dir()
