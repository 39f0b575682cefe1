"""Devices under one contract: windows at a fixed place, copies whose events may be incomplete, bounded waits."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from memory_cases import PAGE, make_net, masters, run_python, same, train_step, wrap

import gemini
from benchmarks._progress import PATIENCE
from gemini import waiting
from gemini.errors import GeminiError
from gemini.memory.devices import device as devices
from gemini.memory.devices.device import CpuDevice, Device, Event, make_device
from gemini.memory.devices.pages import PageWindow, StorageWindow
from gemini.tiers import Tier
from tests.standin_device import StandinDevice
from tests.standins import RandomClock
from tests.world import world_of


class Gate:
    """The clock of a stand-in's streams: copies stop at it until it is opened."""

    def __init__(self) -> None:
        self.opened = {"fetch": threading.Event(), "evict": threading.Event()}
        self.order: list[str] = []

    def __call__(self, stream: str) -> None:
        assert self.opened[stream].wait(PATIENCE)
        self.order.append(stream)


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
    there, host = device.make_buffer(3 * PAGE), device.make_host_buffer(3 * PAGE)
    assert not there.any() and not host.any()
    assert host.data_ptr() % PAGE == 0
    # No drive reads into a GPU's memory; its storage can be resized instead, which pages of the host cannot be.
    assert there.data_ptr() % (PAGE if device.tier is Tier.CPU else 64) == 0
    if device.tier is Tier.GPU:
        there.untyped_storage().resize_(0)


def test_copies_arrive_and_their_events_say_so(device: Device) -> None:
    source, into = torch.arange(1000.0), torch.zeros(1000)
    event = device.copy(into, source, "fetch")
    event.wait()
    assert event.is_complete() and torch.equal(source, into)
    event.wait()  # as often as one likes


def test_a_failing_copy_surfaces_in_wait_and_the_stream_lives_on(device: Device) -> None:
    with pytest.raises((GeminiError, RuntimeError)):
        device.copy(torch.zeros(3), torch.zeros(4), "fetch").wait()
    into = torch.zeros(3)
    device.copy(into, torch.ones(3), "fetch").wait()
    assert into.tolist() == [1, 1, 1]


def test_work_on_the_device_comes_after_an_event(device: Device) -> None:
    source, into = torch.arange(1000.0), torch.zeros(1000)
    device.copy(into, source, "fetch").wait_on_device()
    assert torch.equal(into * 2, source * 2)
    with pytest.raises((GeminiError, RuntimeError)):
        device.copy(torch.zeros(3), torch.zeros(4), "fetch").wait_on_device()


def test_a_mark_completes_with_what_was_computed(device: Device) -> None:
    computed = torch.ones(1000).cumsum(0)
    mark = device.mark()
    mark.wait()
    assert mark.is_complete() and computed[-1] == 1000
    mark.wait_on_device()


def test_a_copy_comes_after_another_event(device: Device) -> None:
    first, second, event = torch.zeros(1), torch.zeros(1), Event()
    threading.Timer(0.05, lambda: (first.fill_(7), event.finish())).start()
    device.copy(second, first, "evict", after=event).wait()
    assert second.item() == 7
    after = device.copy(first, torch.full((1,), 8.0), "fetch")
    device.copy(second, first, "evict", after=after).wait()
    assert second.item() == 8


def test_a_copy_after_something_that_failed_fails(device: Device) -> None:
    into, failed = torch.zeros(1), Event()
    failed.finish(OSError(28, "no space left"))
    with pytest.raises(GeminiError, match="no space left"):
        device.copy(into, torch.ones(1), "evict", after=failed).wait()
    assert into.item() == 0
    device.copy(into, torch.ones(1), "evict").wait()
    assert into.item() == 1, "the stream lives on"


def test_copies_may_be_asked_for_from_many_threads(device: Device) -> None:
    results = torch.zeros(8, 50)

    def work(number: int) -> None:
        for turn in range(50):
            source = torch.full((1,), float(number * 50 + turn))
            device.copy(results[number, turn : turn + 1], source, ("fetch", "evict")[turn % 2]).wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert torch.equal(results.flatten(), torch.arange(400.0))


def test_closing_finishes_what_was_begun_and_may_be_followed_by_more(device: Device) -> None:
    into = torch.zeros(40)
    events = [device.copy(into[n : n + 1], torch.ones(1), "fetch") for n in range(40)]
    device.close()
    assert all(event.is_complete() for event in events) and into.sum() == 40
    device.close()
    device.copy(into, torch.zeros(40), "fetch").wait()
    assert into.sum() == 0


# ---- the stand-in's clock --------------------------------------------------------------------------------------------


def test_a_stream_is_in_order_and_streams_are_independent() -> None:
    gate = Gate()
    device = StandinDevice(gate=gate)
    cell, other = torch.zeros(1), torch.zeros(1)
    fetches = [device.copy(cell, torch.tensor([float(n)]), "fetch") for n in range(20)]
    gate.opened["evict"].set()
    device.copy(other, torch.ones(1), "evict").wait()
    assert other.item() == 1 and not any(event.is_complete() for event in fetches)
    gate.opened["fetch"].set()
    fetches[-1].wait()
    assert all(event.is_complete() for event in fetches), "what was asked first is over when the last one is"
    assert cell.item() == 19
    device.close()


def test_a_stuck_stream_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.001)
    gate = Gate()
    device = StandinDevice(gate=gate)
    event = device.copy(torch.zeros(1), torch.ones(1), "fetch")
    began = time.monotonic()
    with pytest.raises(GeminiError, match="nothing has moved"), pytest.warns(UserWarning, match="nothing has moved"):
        event.wait()
    assert time.monotonic() - began < 60
    gate.opened["fetch"].set()
    device.close()


def streams() -> int:
    return sum(thread.name.startswith("gemini-") for thread in threading.enumerate())


def test_a_stream_ends_with_its_device() -> None:
    gc.collect()
    before = streams()
    device = StandinDevice()
    device.copy(torch.zeros(1), torch.ones(1), "fetch").wait()
    assert streams() == before + 1
    del device
    gc.collect()
    assert streams() == before


def test_a_device_may_be_let_go_on_its_own_stream() -> None:
    """The last reference goes with a job of the stream itself: it can neither wait for itself nor be left behind."""
    gc.collect()
    before, held, gone = streams(), [], threading.Event()
    go = threading.Event()

    def gate(stream: str) -> None:
        assert go.wait(PATIENCE)
        held.clear()
        gone.set()

    device = StandinDevice(gate=gate)
    weakref.finalize(device, lambda: ended_by.append(threading.current_thread().name))
    ended_by: list[str] = []
    held.append(device)
    event = device.copy(torch.zeros(1), torch.ones(1), "fetch")
    del device
    go.set()
    event.wait()
    assert gone.is_set() and ended_by == ["gemini-fetch"]
    deadline = time.monotonic() + 10
    while streams() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert streams() == before


@pytest.mark.slow
def test_the_interpreter_ends_while_streams_are_busy() -> None:
    """Big copies and held ones under way on a dozen streams, nothing closed by hand: the program ends in order."""
    program = """
from tests.standin_device import StandinDevice
from tests.standins import RandomClock
big, events = torch.ones(2_000_000), []
devices = [StandinDevice(gate=RandomClock(seed, longest=0.02)) for seed in range(6)]
for device in devices:
    for stream in ("fetch", "evict") * 20:
        events.append(device.copy(torch.empty_like(big), big, stream))
print("the end", flush=True)
"""
    ended = run_python(program)
    assert ended.returncode == 0 and ended.stdout == "the end\n" and not ended.stderr, ended


def test_what_is_read_before_it_arrived_is_nan() -> None:
    gate = Gate()
    device = StandinDevice(gate=gate, poison=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        gate.opened["fetch"].clear()
        into = torch.zeros(5, dtype=dtype)
        event = device.copy(into[1:4], torch.ones(3, dtype=dtype), "fetch")
        assert into.isnan().tolist() == [False, True, True, True, False]
        gate.opened["fetch"].set()
        event.wait()
        assert into.tolist() == [0, 1, 1, 1, 0]
    before = Event()
    event = device.copy(into[1:4], torch.ones(3, dtype=dtype), "fetch", after=before)
    assert into.tolist() == [0, 1, 1, 1, 0], "it may still be read until the copy may begin"
    before.finish()
    event.wait()
    device.close()


# ---- the random clock ------------------------------------------------------------------------------------------------


def held_by(clock: RandomClock, asked: dict[str, int]) -> list[str]:
    threads = [
        threading.Thread(target=lambda stream=stream, n=n: [clock(stream) for _ in range(n)])
        for stream, n in asked.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return clock.order


def test_copies_of_other_streams_overtake() -> None:
    orders = [held_by(RandomClock(seed), {"fetch": 20, "evict": 20}) for seed in range(8)]
    assert all(order.count("fetch") == order.count("evict") == 20 for order in orders)
    assert len({tuple(order) for order in orders}) > 4, "hardly any two are alike"
    turns = [sum(a != b for a, b in zip(order, order[1:], strict=False)) for order in orders]
    assert max(turns) > 5, turns


def test_a_fate_is_drawn_from_the_seed_for_each_stream() -> None:
    def fates(seed: int, stream: str, beside: int = 0) -> list[tuple[float, int]]:
        clock, drawn = RandomClock(seed, longest=0.5), []
        for _ in range(100):
            drawn.append(clock.draw(stream))
            for _ in range(beside):
                clock.draw("another")
        return drawn

    assert fates(3, "fetch") == fates(3, "fetch", beside=2), "whatever the other streams do"
    assert len({str(fates(seed, stream)) for seed in (3, 4) for stream in ("fetch", "evict")}) == 4
    seconds, others = zip(*fates(3, "fetch"), strict=True)
    assert min(seconds) == 0 and max(seconds) == 0.5 and set(others) == {0, 1, 2, 3}


def test_a_closed_clock_holds_nothing() -> None:
    clock = RandomClock(1, longest=600.0)
    device = StandinDevice(gate=clock)
    into = torch.zeros(30)
    events = [device.copy(into[n : n + 1], torch.ones(1), "fetch") for n in range(30)]
    device.close()
    assert all(event.is_complete() for event in events) and into.sum() == 30
    assert clock.order == ["fetch"] * 30


def test_a_copy_that_fails_in_training_is_a_clear_error() -> None:
    broken = threading.Event()

    def gate(stream: str) -> None:
        if broken.is_set():
            raise OSError(5, "the GPU fell off the bus")

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
    world_of(model).check()
    train_step(model, optimizer, 1)
    world_of(model).check()


# ---- where pages cannot be moved -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
def test_resizing_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, precision: str) -> None:
    """Without mremap a window is a resizable storage: slower, the same bits, the same accounting."""

    def run(kind: type) -> tuple[dict[str, torch.Tensor], int]:
        model, optimizer = wrap(make_net(), tmp_path, precision=precision, cpu="500KiB")
        world = world_of(model)
        assert all(isinstance(c.window, kind) for c in world.chunks)
        for step in range(3):
            train_step(model, optimizer, step)
            world.check()
        return masters(model), world.num_gathers

    monkeypatch.setattr("gemini.planning.working.TILE", 4096)
    by_pages, gathers = run(PageWindow)
    monkeypatch.setattr(devices, "can_move_pages", lambda: False)
    by_storage, _ = run(StorageWindow)
    assert gathers > 0 and same(by_pages, by_storage)


# ---- choosing one ----------------------------------------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="device='cuda:2' was asked for, but torch sees 2 of them"):
        make_device("cuda:2")


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
