"""The simulator and the engine, by one clock: a few of the steps of ``benchmarks/clocked.py``, with fewer layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clocked_steps import CASES, Case, clocked


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[7]], ids=str)
def test_a_step_takes_what_the_simulator_says(case: Case, tmp_path: Path, summary: Any) -> None:
    """Of those with updates inside backward too, all of which was launched long before: they begin where gradients are
    there, though the one that is read first has the gradient that comes last.
    """
    told = clocked(case._replace(layers=3), tmp_path)
    summary(f"{case}, 3 layers: {told.predicted:.3f} s predicted, {told.clocked:.3f} s clocked")
    assert told.predicted == pytest.approx(told.clocked, rel=0.05)
    assert told.blocked == 0 and told.landed >= 0.9
