"""What a program, a driver or a system may do on the way: the bits stay those of the first run, and no race is told."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import gemini
from gemini.memory.devices.pinned import PinnedArena, PinnedPages
from tests.fakegpu.test_counts import Blocks
from tests.gpu import gpu_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_cases.ON_FAKE, reason="told by the runtime in host memory"),
]
Told = tuple[list[float], dict[str, torch.Tensor]]


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(16) * (index + 2)).remainder(96)


def train(
    where: str, path: Path, rows: Iterable[torch.Tensor] | None = None, prepare: Callable[[Any], object] = id
) -> Told:
    """Losses and weights of an epoch over :class:`Rows`, batches moved as people move them."""
    model = gpu_cases.wrap(Blocks(4), where, path)
    prepare(model)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    losses = []
    for ids in DataLoader(Rows(), batch_size=2) if rows is None else rows:
        loss = model(ids.to(model.device, non_blocking=True))
        loss.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: model.full_param(name).cpu() for name, _ in model.named_parameters()}


def assert_same(told: Told, wanted: Told) -> None:
    assert told[0] == wanted[0] and len(told[0]) == 4
    for name, weight in wanted[1].items():
        assert torch.equal(told[1][name], weight), name


@pytest.mark.parametrize("pinned", [False, True])
def test_forked_data_loaders(pinned: bool, tmp_path: Path) -> None:
    """Workers are forked while the model's threads live and the device has a context."""
    wanted = train("mixed", tmp_path)
    loader = DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork", pin_memory=pinned)
    assert_same(train("mixed", tmp_path, loader), wanted)


@pytest.mark.parametrize("where", ["all on the host", "mixed"])
@pytest.mark.parametrize("allowed", [0, 1, 3, 10**9])
def test_page_locking_that_is_refused(
    allowed: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From some call on: told once, and what cannot be locked is pageable. Every buffer is a stretch of its own."""
    wanted = train(where, tmp_path)
    register, sizes = PinnedPages.register, list[int]()

    def registered(pages: PinnedPages, node: int | None) -> None:
        sizes.append(pages.num_bytes)
        if len(sizes) > allowed:
            raise RuntimeError("CUDA error 2")
        register(pages, node)

    monkeypatch.setattr(PinnedPages, "register", registered)
    monkeypatch.setattr(PinnedArena, "reserve", lambda arena, sizes: (len(sizes), None))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert_same(train(where, tmp_path), wanted)
    # What is as large as something that was refused is not asked for again.
    assert len(sizes) > (5 if allowed > 5 else allowed), "weights, gradients and staging: states are not registered"
    assert ["cannot be registered" in str(one.message) for one in said] == [True] * (allowed < len(sizes))


def test_backward_runs_on_threads_of_autograd(tmp_path: Path) -> None:
    """There too the current device is the model's own, whichever it is."""
    met: list[tuple[int, int]] = []

    def watch(model: Any) -> None:
        for param in model.parameters():
            param.register_hook(lambda grad: met.append((threading.get_ident(), torch.cuda.current_device())))

    wanted = train("mixed", tmp_path)
    assert_same(train("mixed", tmp_path, prepare=watch), wanted)
    assert {device for _, device in met} == {torch.cuda.current_device()}
    assert threading.get_ident() not in {thread for thread, _ in met}
