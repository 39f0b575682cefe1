"""What the CUDA device asks of the CUDA runtime, and in which order, against a runtime that only writes it down.

This says nothing about a card (``tests/gpu`` does, on one). It holds what can be held without: which stream waits for
which event before a copy, what is recorded for the caching allocator, what is registered and given back. Windows and
their blocks are in ``test_cuda_windows.py``.
"""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

import pytest
import torch
from cuda_runtime import Runtime, Tensor

from gemini import waiting
from gemini.errors import GeminiError
from gemini.memory.devices import cuda, cuda_windows
from gemini.memory.devices.cuda import CudaDevice
from gemini.memory.devices.device import Event
from gemini.waiting import Latch, await_latch


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What never ends is given up in an instant."""
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.005)
    monkeypatch.setattr(waiting, "TELL_LOOKS", 4)
    monkeypatch.setattr(waiting, "GIVE_UP_LOOKS", 12)
    monkeypatch.setattr(waiting, "GIVE_UP_DEVICE_LOOKS", 12)


@pytest.fixture
def tensors(runtime: Runtime) -> tuple[Any, Any]:
    return Tensor(runtime, "host", "cpu"), Tensor(runtime, "card", "cuda")


def test_a_copy_comes_after_the_computation_on_a_stream_of_its_own(
    runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]
) -> None:
    host, card = tensors
    device.copy(card, host, "fetch")
    device.copy(host, card, "evict")
    assert runtime.said() == [
        "stream 2 waits for event 1 of default",
        "stream 2 copies host into card",
        "card recorded on stream 2",
        "stream 3 waits for event 3 of default",
        "stream 3 copies card into host",
        "card recorded on stream 3",
    ]


def test_directions_of_one_stream_are_in_order(runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]) -> None:
    host, card = tensors
    device.copy(card, host, "fetch")
    runtime.said()
    device.copy(host, card, "fetch")  # the other way: another stream, behind the first copy
    assert runtime.said()[:3] == [
        "stream 3 waits for event 3 of default", "stream 3 waits for event 2 of stream 2",
        "stream 3 copies card into host",
    ]  # fmt: skip
    device.copy(host, card, "fetch")
    assert runtime.said()[1] == "stream 3 copies card into host", "the same stream: in order by itself"


def test_after_an_event_of_the_device_the_stream_waits_and_the_host_does_not(
    runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]
) -> None:
    host, card = tensors
    mark = device.mark()
    assert not mark.is_complete()
    device.copy(card, host, "fetch", after=mark)
    assert runtime.said()[:2] == ["stream 2 waits for event 2 of default", "stream 2 waits for event 1 of default"]
    failed = Event()
    failed.finish(OSError("gone"))
    with pytest.raises(GeminiError, match="gone"):
        device.copy(card, host, "fetch", after=failed)
    assert runtime.said() == [], "nothing was begun"


def test_a_worker_s_copy_waits_for_the_stream_that_computes(
    runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]
) -> None:
    """Training runs on a stream of the user's; in a worker thread the default one is current."""
    host, card = tensors
    with runtime.stream(runtime.Stream(name="the user's")):
        device.mark()
    worker = threading.Thread(target=lambda: device.copy(card, host, "fetch"))
    worker.start()
    worker.join()
    waits = [line for line in runtime.said() if "waits" in line]
    assert len(waits) == 2 and "of the user's" in waits[0] and "of default" in waits[1]


@pytest.mark.usefixtures("quick_looks")
def test_work_that_comes_after_an_event(runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]) -> None:
    host, card = tensors
    event = device.copy(card, host, "fetch")
    runtime.said()
    event.wait_on_device()
    assert runtime.said() == ["default waits for event 2 of stream 2"]
    with pytest.raises(GeminiError, match="nothing has moved .* while waiting for a copy"):
        event.wait()
    runtime.finished.add("event 2 of stream 2")
    event.wait()
    runtime.error = "CUDA error: an illegal memory access was encountered"
    assert event.is_complete()
    with pytest.raises(GeminiError, match="a copy failed: CUDA error: an illegal memory access"):
        event.wait()
    with pytest.raises(GeminiError, match="the computation failed"):
        device.mark().wait()


def test_tensors_are_kept_until_their_copy_is_over(runtime: Runtime, device: CudaDevice) -> None:
    host, card = Tensor(runtime, "host", "cpu"), Tensor(runtime, "card", "cuda")
    device.copy(card, host, "fetch")  # type: ignore[arg-type]
    streams = device._copying["fetch"]
    assert streams.in_flight[0][1][0] is host and len(streams.in_flight) == 1
    other = Tensor(runtime, "other", "cpu")
    device.copy(card, other, "fetch")  # type: ignore[arg-type]
    assert len(streams.in_flight) == 2
    runtime.finished.add("event 2 of stream 2")
    device.copy(card, other, "fetch")  # type: ignore[arg-type]
    assert [kept for _, kept in streams.in_flight] == [[other], [other]]


@pytest.mark.usefixtures("quick_looks")
def test_a_copy_that_is_stuck_is_said_to_be(runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]) -> None:
    copying = device.copy(*tensors, "evict")
    with (
        pytest.warns(UserWarning, match="nothing has moved .* while waiting for a copy"),
        pytest.raises(GeminiError, match="nothing has moved .* while waiting for a copy"),
    ):
        copying.wait()


@pytest.mark.usefixtures("quick_looks")
def test_who_waits_for_a_gpu_lets_others_wait(
    runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel may take minutes: who waits for a worker that waits for it does not give up."""
    monkeypatch.setattr(waiting, "GIVE_UP_DEVICE_LOOKS", 10_000)
    copying, latch = device.copy(*tensors, "evict"), Latch()
    worker = threading.Thread(target=lambda: (copying.wait(), latch.set()))
    worker.start()
    timer = threading.Timer(0.5, lambda: runtime.finished.add("event 2 of stream 2"))
    timer.start()
    await_latch(latch, lambda: "a worker")  # which alone would give up after 0.06 s
    worker.join()


def test_host_buffers_are_registered_until_they_go(runtime: Runtime, device: CudaDevice) -> None:
    first, second = device.make_host_buffer(8192), device.make_host_buffer(4095)
    assert runtime.registered == {first.data_ptr(): 8192, second.data_ptr(): 4096} and second.numel() == 4095
    assert int(first.count_nonzero()) == int(second.count_nonzero()) == 0
    view = first[4096:].view(torch.int32)
    del first, second
    gc.collect()
    assert list(runtime.registered.values()) == [8192], "a view is as good"
    del view
    gc.collect()
    assert not runtime.registered


def test_host_memory_outlives_its_device(runtime: Runtime, device: CudaDevice) -> None:
    kept = device.make_host_buffer(4096)
    device.close()
    assert kept.fill_(3).unique().tolist() == [3] and len(runtime.registered) == 1
    del kept
    gc.collect()
    assert not runtime.registered, "unregistered before the addresses went"


def test_without_registered_memory_it_goes_on_and_says_so_once(runtime: Runtime, device: CudaDevice) -> None:
    runtime.refusal = 2
    with pytest.warns(UserWarning, match=r"8 KiB .*be registered with the CUDA driver \(CUDA error 2\).*cpu= budget"):
        buffer = device.make_host_buffer(8192)
    assert int(buffer.count_nonzero()) == 0 and runtime.said() == ["the last error is forgotten"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.make_host_buffer(8192)
    device.close()


def test_what_is_refused_is_pageable_and_what_fits_is_not(runtime: Runtime, device: CudaDevice) -> None:
    runtime.most_registered = 3 * 8192
    with pytest.warns(UserWarning, match="cannot be registered"):
        buffers = [device.make_host_buffer(size) for size in (8192, 8192, 16384, 4096)]
    assert [buffer.data_ptr() in runtime.registered for buffer in buffers] == [True, True, False, True]
    assert runtime.said() == ["the last error is forgotten"]


def test_the_end_waits_for_everything(runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]) -> None:
    host, card = tensors
    device.copy(card, host, "fetch")
    runtime.said()
    device.close()
    assert runtime.said() == ["the host waits for everything"]


def test_a_copy_that_is_not_behind_computing(runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]) -> None:
    host, card = tensors
    mark = device.mark()
    device.copy(card, host, "fetch", behind_computing=False)
    assert runtime.said() == ["stream 2 copies host into card", "card recorded on stream 2"]
    device.copy(card, host, "fetch", after=mark, behind_computing=False)
    assert runtime.said()[0] == "stream 2 waits for event 1 of default"


def test_what_is_computed_beside(runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]) -> None:
    host, card = tensors
    arrived = device.copy(card, host, "fetch")
    runtime.said()
    with device.beside("adam"):
        stream = runtime.current().name
        arrived.wait_on_device()
        device.copy(host, card, "evict", after=device.mark(), behind_computing=False)
        device.copy(host, card, "evict")
    waits = [line for line in runtime.said() if "waits" in line]
    assert waits == [
        f"{stream} waits for event 2 of stream 2",
        f"stream 4 waits for event 3 of {stream}",
        "stream 4 waits for event 5 of default",
    ], "its stream is none that others' copies wait for"
    assert runtime.current().name == "default"
    with device.beside("adam"):
        assert runtime.current().name == stream, "one stream for each name"
    with device.beside("another"):
        assert runtime.current().name != stream
    with pytest.raises(KeyError), device.beside("adam"):
        raise KeyError
    device.mark()
    assert runtime.current().name == "default"


def test_copy_streams_share_no_cuda_stream_though_torch_hands_them_out_in_turn(
    runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]
) -> None:
    host, card = tensors
    runtime.streams_there_are = 32
    used = set()
    for name in ("fetch", "evict", "store", "offload", "restore"):
        for into, source in ((card, host), (host, card)):
            for _ in range(5):
                device.copy(into, source, name)
            for _ in range(31):  # somebody else's: the next one would be the last one again
                runtime.Stream()
        used |= {stream.cuda_stream for stream in device._copying[name].by_direction.values()}
    assert len(used) == 10 and runtime.current().cuda_stream not in used


def test_grads_out_and_weights_in_wait_for_nothing_of_each_other_s(
    runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]
) -> None:
    host, card = tensors
    for _ in range(3):
        device.copy(card, host, "fetch", behind_computing=False)
        device.copy(host, card, "evict", behind_computing=False)
    assert not [line for line in runtime.said() if "waits" in line]


class Clock:
    """Seconds that pass while somebody sleeps, and a little with every question."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_sleeps = self.num_yields = 0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.num_sleeps += seconds > 0
        self.num_yields += seconds == 0
        self.now += seconds + (50e-6 if seconds else 1e-6)  # being woken up takes that long


@pytest.mark.parametrize("seconds", [5e-6, 40e-6, 200e-6, 1e-3, 10e-3, 0.5])
def test_a_wait_sees_the_end_soon(
    runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    clock = Clock()
    monkeypatch.setattr(cuda_windows, "time", clock)
    event = device.copy(*tensors, "fetch")
    over = clock.now + seconds
    monkeypatch.setattr(event._event, "query", lambda: clock.now >= over)
    event.wait()
    assert 0 <= clock.now - over <= 155e-6
    assert clock.num_sleeps <= seconds / 70e-6 + 1 and clock.num_yields < 30, "it leaves the processor to others"
    if seconds < 50e-6:
        assert clock.num_sleeps == 0 and clock.now - over <= 5e-6


def test_figures_of_the_allocator_and_of_the_driver(runtime: Runtime, device: CudaDevice) -> None:
    runtime.figures |= {"memory_allocated": 10, "max_memory_allocated": 30, "memory_reserved": 20}
    runtime.figures["max_memory_reserved"] = 35
    assert device.memory_figures() == {
        "allocated": 10, "allocated_peak": 30, "reserved": 20, "reserved_peak": 35, "driver": 40,
    }  # fmt: skip


def test_the_bytes_behind_tensors_are_the_allocator_s(runtime: Runtime, device: CudaDevice) -> None:
    def block(size: int, asked: int, state: str = "active_allocated") -> dict[str, Any]:
        return {"size": size, "requested_size": asked, "state": state}

    def at(address: int, is_cuda: bool = True) -> Any:
        storage = type("Storage", (), {"data_ptr": lambda self: address})()
        return type("Tensor", (), {"is_cuda": is_cuda, "untyped_storage": lambda self: storage})()

    runtime.segments = [
        {"device": 1, "address": 1000, "blocks": [block(512, 500), block(100, 100, "inactive"), block(1024, 1000)]},
        {"device": 0, "address": 5000, "blocks": [block(64, 64)]},
    ]
    assert device.bytes_behind([at(1000), at(1612)]) == 1500
    assert device.bytes_behind([at(1000), at(1000)]) == 500, "views of one block"
    assert device.bytes_behind([at(1512)]) == 0, "nobody has that one"
    assert device.bytes_behind([at(5000)]) == 0, "another GPU's"
    assert device.bytes_behind([at(1000, is_cuda=False)]) == 0 and device.bytes_behind([]) == 0


@pytest.mark.parametrize(
    ("local_rank", "current", "count", "own"), [(None, 0, 2, 0), (1, 0, 2, 1), (1, 1, 2, 1), (1, 2, 4, 2), (3, 0, 1, 0)]
)
def test_the_gpu_of_a_process_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch, local_rank: int | None, current: int, count: int, own: int
) -> None:
    """A GPU that the program chose stays; else torchrun's, and the program's ``batch.to("cuda")`` goes there too."""
    chosen = [current]
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert cuda._own_gpu() == own == chosen[-1]
