"""Each of the engine's precautions on a GPU left out on purpose: training tells of it, by a race, a count or an error.

Marked ``gpu``, and skipped on a real one, which cannot tell: ``make test-fakegpu``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gemini
from gemini.memory.devices.cuda import CudaDevice
from gemini.memory.devices.cuda_windows import CudaEvent, LastUses
from gemini.memory.devices.device import DONE, make_device
from gemini.memory.devices.pages import host_bytes
from gemini.memory.devices.pinned import PinnedArena
from gemini.memory.movement import manager
from gemini.memory.movement.transfers import Transfers
from gemini.train.params.exposure import nan_of
from tests.fakegpu.test_counts import Blocks
from tests.gpu import gpu_cases
from tests.world import world_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_cases.ON_FAKE, reason="told by the runtime in host memory"),
]


def train(where: str, path: Path) -> tuple[list[str], Counter[str]]:
    """Races of some steps, and what they asked for."""
    from tests.fakegpu import computing

    make_device("cuda")  # the first one of a process tries its kernels, on numbers of three weights
    before = computing.counts()
    model = gpu_cases.wrap(Blocks(4), where, path)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    ids = torch.arange(32, device=model.device).view(2, 16)
    for _ in range(3):
        model(ids).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    world_of(model).settle()
    return computing.races(), Counter(computing.counts()) - Counter(before)


@pytest.mark.parametrize("where", ["all on the host", "updated through the gpu"])
def test_with_all_of_them_nothing_is_told(where: str, tmp_path: Path) -> None:
    races, counts = train(where, tmp_path)
    assert not races and counts["host to device pageable copies"] <= 1, "once, how many sums each gradient has"
    assert counts["device to host pageable bytes"] <= 8 * 3 * 32, "sums of the norm"


def _without_waiting_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaEvent, "wait_on_device", lambda event: None)
    # A copy that the host has seen to be over is in order for all that it launches then, and here one is at a second
    # look. On a card copies take longer than the host.
    monkeypatch.setattr(manager, "_forget_if_over", lambda chunk: None)


def _without_waiting_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaEvent, "wait", lambda event, timeout=0.0: None)
    monkeypatch.setattr(CudaEvent, "is_complete", lambda event: True)


def _without_the_order_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LastUses, "take", lambda uses, start, stop: [])


def _before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    of = CudaDevice._copy_stream
    monkeypatch.setattr(CudaDevice, "_copy_stream", lambda self, name, **_: of(self, name, behind_computing=False))


def _before_they_have_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfers, "end_of", lambda transfers, lane, of: DONE)


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        (_without_waiting_on_the_device, "all on the host"),
        (_without_waiting_on_the_host, "all on the host"),
        (_without_the_order_of_blocks, "all on the host"),
        (_before_it_is_computed, "all on the host"),
        (_before_they_have_landed, "all on the host"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_missing_order_is_a_race(
    mistake: Callable[[pytest.MonkeyPatch], None], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    races, _ = train(where, tmp_path)
    assert races


def test_memory_that_is_not_page_locked_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PinnedArena, "take", lambda arena, num_bytes: host_bytes(num_bytes))
    _, counts = train("all on the host", tmp_path)
    assert counts["host to device pageable bytes"] > 0 < counts["device to host pageable bytes"]


def test_what_computes_on_the_host_cannot_take_device_memory(tmp_path: Path) -> None:
    from tests.fakegpu import computing

    with pytest.raises(AssertionError, match="was given a host address"):
        computing.launch(0, "a kernel", [(torch.ones(8).data_ptr(), 32)], [])
    assert nan_of(torch.float32, torch.device("cuda")).is_cuda
