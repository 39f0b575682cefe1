"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import pytest

from gemini import kernels


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = kernels.get_num_threads()
    yield
    kernels.set_num_threads(before)
