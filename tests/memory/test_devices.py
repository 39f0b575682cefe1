"""Devices under one contract: windows at a fixed place, copies whose events may be incomplete, bounded waits."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from memory_cases import PAGE, make_net, masters, same, train_step, wrap

import gemini
from gemini.errors import GeminiError
from gemini.memory import device as devices
from gemini.memory.device import CpuDevice, Device, Event, PageWindow, StandinDevice, StorageWindow, make_device
from gemini.tiers import Tier


class Gate:
    """The clock of a stand-in's lanes: copies stop at it until it is opened."""

    def __init__(self) -> None:
        self.opened = {"fetch": threading.Event(), "evict": threading.Event()}
        self.order: list[str] = []

    def __call__(self, lane: str) -> None:
        assert self.opened[lane].wait(30)
        self.order.append(lane)


@pytest.fixture(params=["cpu", "cpu, resizing", "standin", "standin, resizing"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    if "resizing" in request.param:
        monkeypatch.setattr(devices, "can_move_pages", lambda: False)
    made = make_device(request.param.split(",")[0])
    yield made
    made.close()


# ---- the contract, for every device ----------------------------------------------------------------------------------


def test_a_window_comes_and_goes_at_its_place(device: Device) -> None:
    window = device.make_window(6 * PAGE)
    assert window.num_bytes == 6 * PAGE
    view: torch.Tensor | None = None
    for turn in range(3):
        window.populate()
        assert window.bytes.numel() == 6 * PAGE
        if view is None:  # as autograd keeps one from forward to backward
            view = window.bytes.view(torch.float32)[100:400].view(20, 15).t()
        window.bytes.view(torch.float32).fill_(turn)
        assert view.unique().tolist() == [turn]
        window.depopulate()
        assert window.num_bytes == 6 * PAGE


def test_windows_of_one_size_do_not_share_memory(device: Device) -> None:
    windows = [device.make_window(2 * PAGE) for _ in range(4)]
    for number, window in enumerate(windows):
        window.populate()
        window.bytes.fill_(number)
    assert [window.bytes.unique().tolist() for window in windows] == [[0], [1], [2], [3]]
    for window in windows[1:3]:
        window.depopulate()
    windows[2].populate()
    windows[2].bytes.fill_(9)
    assert windows[0].bytes.unique().tolist() == [0] and windows[3].bytes.unique().tolist() == [3]


def test_buffers_are_zero_and_on_pages(device: Device) -> None:
    for buffer in (device.make_buffer(3 * PAGE), device.make_host_buffer(3 * PAGE)):
        assert buffer.data_ptr() % PAGE == 0 and int(buffer.count_nonzero()) == 0


def test_copies_arrive_and_their_events_say_so(device: Device) -> None:
    source, into = torch.arange(1000.0), torch.zeros(1000)
    event = device.copy(into, source, "fetch")
    event.wait()
    assert event.is_complete() and torch.equal(source, into)
    event.wait()  # as often as one likes


def test_a_failing_copy_surfaces_in_wait_and_the_lane_lives_on(device: Device) -> None:
    with pytest.raises((GeminiError, RuntimeError)):
        device.copy(torch.zeros(3), torch.zeros(4), "fetch").wait()
    into = torch.zeros(3)
    device.copy(into, torch.ones(3), "fetch").wait()
    assert into.tolist() == [1, 1, 1]


def test_free_bytes_is_a_size(device: Device) -> None:
    assert device.free_bytes() > 2**20


# ---- the stand-in's clock --------------------------------------------------------------------------------------------


def test_events_are_incomplete_until_the_gate_opens() -> None:
    gate = Gate()
    device = StandinDevice(gate=gate)
    into = torch.zeros(4)
    event = device.copy(into, torch.ones(4), "fetch")
    time.sleep(0.05)
    assert not event.is_complete() and into.tolist() == [0] * 4
    gate.opened["fetch"].set()
    event.wait(10)
    assert event.is_complete() and into.tolist() == [1] * 4
    device.close()


def test_a_lane_is_in_order_and_lanes_are_independent() -> None:
    gate = Gate()
    device = StandinDevice(gate=gate)
    cell, other = torch.zeros(1), torch.zeros(1)
    fetches = [device.copy(cell, torch.tensor([float(n)]), "fetch") for n in range(20)]
    gate.opened["evict"].set()
    device.copy(other, torch.ones(1), "evict").wait(10)
    assert other.item() == 1 and not any(event.is_complete() for event in fetches)
    gate.opened["fetch"].set()
    fetches[-1].wait(10)
    assert all(event.is_complete() for event in fetches), "what was asked first is over when the last one is"
    assert cell.item() == 19
    device.close()


def test_a_failing_copy_names_its_cause() -> None:
    def gate(lane: str) -> None:
        raise OSError(5, "the card fell off the bus")

    device = StandinDevice(gate=gate)
    event = device.copy(torch.zeros(1), torch.ones(1), "fetch")
    with pytest.raises(GeminiError, match="the card fell off the bus") as caught:
        event.wait(10)
    assert isinstance(caught.value.__cause__, OSError)
    assert event.is_complete(), "over, though not well"
    device.close()


def test_a_stuck_lane_is_an_error_not_a_hang() -> None:
    gate = Gate()
    device = StandinDevice(gate=gate)
    event = device.copy(torch.zeros(1), torch.ones(1), "fetch")
    began = time.monotonic()
    with pytest.raises(GeminiError, match="stuck"):
        event.wait(0.1)
    assert time.monotonic() - began < 5
    gate.opened["fetch"].set()
    device.close()


def test_a_lane_ends_with_its_device() -> None:
    def lanes() -> int:
        return sum(thread.name.startswith("gemini-") for thread in threading.enumerate())

    gc.collect()
    before = lanes()
    device = StandinDevice()
    device.copy(torch.zeros(1), torch.ones(1), "fetch").wait()
    assert lanes() == before + 1
    del device
    gc.collect()
    deadline = time.monotonic() + 10
    while lanes() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lanes() == before


def test_an_event_that_never_ends_is_bounded() -> None:
    with pytest.raises(GeminiError, match="did not complete"):
        Event().wait(0.05)


def test_training_waits_for_slow_copies() -> None:
    """Copies that take their time, in an order the seed chooses, change nothing in the bits."""

    def run(gate) -> dict[str, torch.Tensor]:
        device = StandinDevice(gate=gate)
        memory = gemini.MemoryBudget(gpu="1MiB", cpu="64MiB")
        model = gemini.GeminiDDP(make_net(), gemini.GeminiConfig(memory=memory, device=device))
        optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
        for step in range(2):
            train_step(model, optimizer, step)
            model._gemini_engine.check_invariants()
        return masters(model)

    seed = iter(torch.rand(10_000, generator=torch.Generator().manual_seed(0)).tolist())
    assert same(run(None), run(lambda lane: time.sleep(next(seed) * 0.002)))


def test_a_copy_that_fails_in_training_is_a_clear_error() -> None:
    broken = threading.Event()

    def gate(lane: str) -> None:
        if broken.is_set():
            raise OSError(5, "the card fell off the bus")

    memory = gemini.MemoryBudget(gpu="48KiB", cpu="64MiB")
    placement = gemini.StaticPlacement(weights_on_gpu=0.0)
    config = gemini.GeminiConfig(memory=memory, device=StandinDevice(gate=gate), placement=placement)
    model = gemini.GeminiDDP(make_net(), config)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    train_step(model, optimizer, 0)
    broken.set()
    with pytest.raises(GeminiError, match="fell off the bus"):
        train_step(model, optimizer, 1)
    broken.clear()
    optimizer.zero_grad()
    model._gemini_engine.check_invariants()
    train_step(model, optimizer, 1)
    model._gemini_engine.check_invariants()


# ---- where pages cannot be moved -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
def test_resizing_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, precision: str) -> None:
    """Without mremap a window is a resizable storage: slower, the same bits, the same accounting."""

    def run(kind: type) -> tuple[dict[str, torch.Tensor], int]:
        model, optimizer = wrap(make_net(), tmp_path, precision=precision, cpu="500KiB")
        engine = model._gemini_engine
        assert all(isinstance(c.window, kind) for c in engine.chunks)
        for step in range(3):
            train_step(model, optimizer, step)
            engine.check_invariants()
        return masters(model), engine.manager.num_gathers

    monkeypatch.setattr("gemini.planning.working.TILE", 4096)
    by_pages, gathers = run(PageWindow)
    monkeypatch.setattr(devices, "can_move_pages", lambda: False)
    by_storage, _ = run(StorageWindow)
    assert gathers > 0 and same(by_pages, by_storage)


# ---- choosing one ----------------------------------------------------------------------------------------------------


def test_make_device() -> None:
    assert isinstance(make_device("cpu"), CpuDevice) and make_device("cpu").tier is Tier.CPU
    assert isinstance(make_device("standin"), StandinDevice) and make_device("standin").tier is Tier.GPU
    mine = StandinDevice(memory=5)
    assert make_device(mine) is mine and mine.free_bytes() == 5
    for wrong, message in (("gpu0", "not a device"), ("meta", "not supported"), (7.5, "not a device")):
        with pytest.raises(ValueError, match=message):
            make_device(wrong)
    if not torch.cuda.is_available():
        assert isinstance(make_device(None), CpuDevice)
        with pytest.raises(ValueError, match="sees no CUDA device"):
            make_device("cuda")
