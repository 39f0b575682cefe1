"""Ctrl-C while work is given to a GPU, with no CUDA behind it: what was given is known before it takes effect."""

from __future__ import annotations

import signal
import threading
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemini import kernels
from gemini.memory.devices import cuda
from gemini.memory.devices.cuda import CudaDevice
from gemini.memory.devices.device import DONE


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = object.__new__(CudaDevice)
    made.lock, made.torch_device = threading.RLock(), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: "a stream")
    monkeypatch.setattr(cuda, "CudaEvent", lambda device, stream, what: (stream, what))
    return made


def interrupted(*_: Any) -> Any:
    signal.raise_signal(signal.SIGINT)
    return "sums"


def test_a_collective_that_was_launched_is_known_to_its_window(device: Any) -> None:
    memory = torch.zeros(4)
    window = SimpleNamespace(touched={}, let_follow=lambda stream: None)
    device._windows, device.beside = {cuda._storage(memory): window}, lambda stream: nullcontext()
    with pytest.raises(KeyboardInterrupt):
        device.launch(interrupted, "gather", memory, DONE)
    assert window.touched == {"gather": ("a stream", "a collective")}


def test_memory_that_the_host_adds_to_is_kept(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight: deque[Any] = deque()
    stream = SimpleNamespace(cuda_stream=0)
    device._copy_stream = lambda name, *, behind_computing: (stream, in_flight)
    monkeypatch.setattr(kernels, "land_by_host", interrupted)
    areas, into = [torch.zeros(4)], torch.zeros(4)
    with pytest.raises(KeyboardInterrupt):
        device._land_by_host(object(), areas, torch.zeros(4), into)
    assert [kept is memory for kept, memory in zip(in_flight[0][1], [*areas, into], strict=True)] == [True, True]
