"""Fixtures of the tests of a GPU's order: a runtime that says what was asked of it, and a device on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_runtime import Runtime

from gemini.memory.devices.cuda import CudaDevice


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime(monkeypatch)


@pytest.fixture
def device(runtime: Runtime) -> Iterator[CudaDevice]:
    made = CudaDevice(torch.device("cuda", 1))
    yield made
    made.close()
