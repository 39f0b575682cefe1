"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import pytest

from gemini import kernels
from tests import kernel_settings


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = kernels.get_num_threads()
    yield
    kernel_settings.set_num_threads(before)
