"""The table of wrong uses of the library: each is refused with a sentence that says what is wrong and what to do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks._progress import run
from benchmarks.wrong_library_uses import USES, told

ROOT = Path(__file__).resolve().parents[2]
ALONE = """
import torch, gemini
memory = gemini.MemoryBudget(cpu="1MiB")
model = gemini.GeminiDDP(torch.nn.Linear(4, 4), gemini.GeminiConfig(memory=memory, device="cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
try:
    optimizer.step()
except gemini.GeminiError as e:
    print(e)
"""


@pytest.mark.parametrize("name", USES)
def test_a_wrong_use_is_refused_and_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    use, word = USES[name]
    kind, words = told(use)
    assert kind, f"not refused: {words}"
    assert word in words, words


def test_torchs_optimizer_is_refused_where_ours_was_never_looked_at(tmp_path: Path) -> None:
    result = run([sys.executable, "-c", ALONE], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert "SGD cannot update 'weight'" in result.stdout, result.stdout + result.stderr
