"""A second backward turns retained gradients into fp32 sums: where they fit, and never in the room that steps need."""

from __future__ import annotations

from pathlib import Path

import pytest

import gemini
from tests.train.helpers import batch, llama


@pytest.mark.parametrize("nvme", ["64MiB", None])
def test_sums_leave_the_working_set_free(nvme: str | None, tmp_path: Path) -> None:
    """Every budget from the least on: it runs, or the second backward is refused as a whole; never in the middle."""
    ran = refused = 0
    for kib in range(340, 900, 24) if nvme else range(900, 2000, 40):
        memory = gemini.MemoryBudget(cpu=f"{kib}KiB", nvme=nvme, nvme_path=None if nvme is None else tmp_path)
        try:
            model = gemini.GeminiDDP(llama(), gemini.GeminiConfig(device="cpu", memory=memory))
        except gemini.BudgetExceeded:
            continue
        optimizer = gemini.HybridAdam(model.parameters())
        for _ in range(2):
            model(**batch()).loss.backward()
            try:
                model(**batch()).loss.backward()
                ran += 1
            except gemini.BudgetExceeded as e:
                assert "a second backward before optimizer.step() needs fp32 sums" in str(e)
                refused += 1
                break
            model.clip_grad_norm_(1.0)
            optimizer.step()
        model._gemini_engine.check_invariants()
    assert ran and (refused == 0 if nvme else refused > 0)
