"""The CUDA runtime in host memory finds the mistakes that it is there for, each made here on purpose.

Marked ``gpu``, and skipped on a real one, which cannot tell: ``make test-fakegpu``.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from gemini.memory.devices.cuda import CudaDevice
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


@pytest.fixture
def device() -> Any:
    made = CudaDevice(torch.device("cuda"))
    yield made
    made.close()


def test_a_missing_wait_of_a_stream(fake: Any) -> None:
    host, card = torch.ones(MIB).pin_memory(), torch.empty(MIB, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        card.copy_(host, non_blocking=True)
    early = card.sum()
    [race] = fake.races()
    assert "aten.sum" in race and "a copy, host to device" in race and bool(early.isnan()), (
        "it was as late as it may be"
    )
    torch.cuda.current_stream().wait_stream(side)
    assert card.sum().item() == MIB and not fake.races()


def test_a_missing_wait_of_the_host(fake: Any) -> None:
    host, card = torch.zeros(MIB).pin_memory(), torch.ones(MIB, device="cuda")
    host.copy_(card, non_blocking=True)
    assert host.sum() == 0
    [race] = fake.races()
    assert "on the host" in race
    torch.cuda.current_stream().synchronize()
    assert host.sum() == MIB and not fake.races()


def test_page_locked_memory_that_is_written_while_it_is_copied(fake: Any) -> None:
    host, card = torch.ones(MIB).pin_memory(), torch.empty(MIB, device="cuda")
    card.copy_(host, non_blocking=True)
    host.fill_(2)
    assert "aten.fill_" in fake.races()[0] and card.sum().item() == 2 * MIB, "the copy took what came too late"


def test_a_block_that_goes_while_another_stream_uses_it(fake: Any) -> None:
    host, side = torch.empty(MIB).pin_memory(), torch.cuda.Stream()
    for recorded in (True, False):
        card = torch.ones(MIB, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(card, non_blocking=True)
        if recorded:
            card.record_stream(side)
        del card
        torch.full((MIB,), 3.0, device="cuda")
        assert bool(fake.races()) is not recorded


def test_windows_of_gemini_do_without_recording(fake: Any, device: CudaDevice) -> None:
    """The same, through the device: nothing is told, unless its events are left out."""
    source, host = torch.ones(MIB, dtype=torch.uint8, device="cuda"), torch.empty(MIB, dtype=torch.uint8).pin_memory()
    window = device.make_window(MIB)
    for _ in range(3):
        window.populate()
        device.copy(window.bytes, host, "fetch").wait_on_device()
        source.copy_(window.bytes)
        window.depopulate()
    assert not fake.races()
    window.populate()
    device.copy(window.bytes, host, "fetch")
    source.copy_(window.bytes)
    assert fake.races()


def test_tensors_of_two_devices(fake: Any) -> None:
    on_card = torch.ones(3, device="cuda")
    for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
        if other.device != on_card.device:
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                on_card + other
    assert (on_card + torch.tensor(1)).sum().item() == 6, "a number of the host may go along"


def test_copies_from_memory_that_is_not_page_locked_are_counted(fake: Any) -> None:
    before = fake.counts()
    torch.empty(MIB, device="cuda").copy_(torch.ones(MIB), non_blocking=True)
    torch.ones(MIB, device="cuda").cpu()
    after = fake.counts()
    for name, number in {"host to device pageable bytes": 4 * MIB, "device to host pageable bytes": 4 * MIB,
                         "pageable waits": 1}.items():  # fmt: skip
        assert after[name] - before.get(name, 0) == number


def test_the_host_cannot_read_device_memory() -> None:
    code = "import ctypes, torch; print(ctypes.string_at(torch.empty(8, device='cuda').data_ptr(), 8))"
    died = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert died.returncode < 0, "a process that does this on a card dies of it"


def test_a_device_that_is_full_and_one_that_refuses(fake: Any) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free + MIB, dtype=torch.uint8, device="cuda")
    fake.refuse_after(0)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        fake.refuse_after(None)
    torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")


def test_a_kernel_that_nobody_took_over_is_named() -> None:
    code = "import torch; torch.empty(8, device='cuda').fill_(0)"
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "FillFunctor" in died.stderr
