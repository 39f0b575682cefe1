"""Fixtures of the tests of a GPU's order: a runtime that says what was asked of it, and a device on it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from cuda_runtime import Runtime

from gemini.memory.devices.cuda import CudaDevice
from gemini.memory.devices.pinned import PinnedPages


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    yield Runtime(monkeypatch)
    # What outlives the test has no runtime that could forget it.
    for pages in gc.get_objects():
        if isinstance(pages, PinnedPages):
            pages._registered = False


@pytest.fixture
def device(runtime: Runtime) -> Iterator[CudaDevice]:
    made = CudaDevice(torch.device("cuda", 1))
    yield made
    made.close()
