"""The tests of the pages reach the extension that builds them, and leave no state of a framework behind."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "_ext"))


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """A page may start a process group (Lightning does) or make an Accelerator; the next one is to begin without."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    if dist.is_initialized():
        dist.destroy_process_group()
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
