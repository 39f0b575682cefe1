"""pytest on the CUDA runtime of ``cudart.cpp`` (``make test-fakegpu``): a test in which two uses of memory race fails.

``LOCAL_RANK`` says which device is the process's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.fakegpu import computing, launches

computing.install()
launches.install()
torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    computing.races()
    yield
    told = computing.races()
    if told:
        pytest.fail(f"{len(told)} races, the first ones:\n" + "\n".join(told[:5]))
