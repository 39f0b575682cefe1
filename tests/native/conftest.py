"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gemini import kernels


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = kernels.get_num_threads()
    yield
    kernels.set_num_threads(before)


@pytest.fixture(autouse=True)
def torch_on_one_thread() -> Iterator[None]:
    """The reference of small tensors gains nothing from torch's threads, and loses much where they must share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
