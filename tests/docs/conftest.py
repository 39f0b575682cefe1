"""The tests of the pages reach the extension that builds them, and leave no state of a framework behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "_ext"))


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """A page may make an Accelerator; the next one may want another."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
