"""The CUDA runtime in host memory refuses what a card does; the races that it finds are in test_mistakes.py.

Marked ``gpu``, and skipped on a real one, which cannot tell: ``make test-fakegpu``.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.gpu.gpu_cases import ON_FAKE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_FAKE, reason="not on the runtime in host memory"),
]
MIB = 2**20


@pytest.fixture
def fake() -> Any:
    from tests.fakegpu import computing

    computing.races()
    return computing


def test_page_locked_memory_that_is_written_while_it_is_copied(fake: Any) -> None:
    host, card = torch.ones(MIB).pin_memory(), torch.empty(MIB, device="cuda")
    card.copy_(host, non_blocking=True)
    host.fill_(2)
    assert "aten.fill_" in fake.races()[0] and card.sum().item() == 2 * MIB, "the copy took what came too late"


def test_tensors_of_two_devices(fake: Any) -> None:
    on_card = torch.ones(3, device="cuda")
    for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
        if other.device != on_card.device:
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                on_card + other
    assert (on_card + torch.tensor(1)).sum().item() == 6, "a number of the host may go along"
    # When torch gives memory of a device's first stream back, it waits for that of the current device.
    torch.cuda.synchronize("cuda:1")


def test_the_host_cannot_read_device_memory() -> None:
    code = "import ctypes, torch; print(ctypes.string_at(torch.empty(8, device='cuda').data_ptr(), 8))"
    died = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert died.returncode < 0, "a process that does this on a card dies of it"


def test_a_kernel_that_nobody_took_over_is_named() -> None:
    code = "import torch; torch.empty(8, device='cuda').fill_(0)"
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "FillFunctor" in died.stderr
