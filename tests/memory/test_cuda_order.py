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
from gemini.ledger import Ledger
from gemini.memory.devices import cuda, cuda_windows
from gemini.memory.devices.cuda import CudaDevice
from gemini.memory.devices.device import Event
from gemini.memory.devices.pages import Pages
from gemini.memory.movement.mover import Staging
from gemini.planning.planes import ADAM
from gemini.planning.working import staging_bytes
from gemini.tiers import Tier
from gemini.waiting import Latch, await_latch
from tests.invariants import bytes_behind


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


def test_planes_are_registered_once_and_cut_up(runtime: Runtime, device: CudaDevice) -> None:
    device.reserve_host([("a", 8192), ("b", 4095), ("c", 8192)])
    [(base, size)] = runtime.registered.items()
    assert size == 5 * 4096 and base % 2**21 == 0
    first, second = device.make_host_buffer(8192), device.make_host_buffer(4095)
    assert (first.data_ptr(), second.data_ptr()) == (base, base + 8192)
    assert int(first.count_nonzero()) == int(second.count_nonzero()) == 0 and second.numel() == 4095
    third = device.make_host_buffer(8192)
    assert third.data_ptr() == base + 3 * 4096
    first.fill_(7)
    view = first[4096:].view(torch.int32)
    del first
    gc.collect()
    other = device.make_host_buffer(8192)
    assert other.data_ptr() not in range(base, base + size), "a view is as good"
    assert runtime.registered[other.data_ptr()] == 8192, "what has no place is registered by itself"
    del view, other
    gc.collect()
    assert list(runtime.registered) == [base], "and no longer than it is there"
    again = device.make_host_buffer(8192)
    assert again.data_ptr() == base and int(again.count_nonzero()) == 0, "what was left in it is gone"


def test_memory_outlives_its_device(runtime: Runtime, device: CudaDevice) -> None:
    made = CudaDevice(torch.device("cuda", 1))
    made.reserve_host([("a", 4096), ("b", 4096), ("c", 8192)])
    kept, late = made.make_host_buffer(4096), made.make_host_buffer(3 * 4096)
    made.close()
    del made
    gc.collect()
    assert late.fill_(4).unique().tolist() == [4] and kept.fill_(3).unique().tolist() == [3]
    assert len(runtime.registered) == 2
    del late, kept
    gc.collect()
    assert not runtime.registered, "unregistered before the addresses went"


def test_a_closed_device_keeps_no_memory_that_nobody_has(runtime: Runtime, device: CudaDevice) -> None:
    device.reserve_host([("a", 4096), ("b", 8192)])
    kept, gone = device.make_host_buffer(4096), device.make_host_buffer(8192)
    del gone
    device.close()
    assert len(runtime.registered) == 1 and kept.fill_(3).unique().tolist() == [3]
    del kept
    assert not runtime.registered, "the device is still there"


def test_without_registered_memory_it_goes_on_and_says_so_once(runtime: Runtime, device: CudaDevice) -> None:
    runtime.refusal = 2
    with pytest.warns(UserWarning, match=r"cannot be registered with the CUDA driver \(CUDA error 2\).*cpu= budget"):
        buffer = device.make_host_buffer(8192)
    assert int(buffer.count_nonzero()) == 0 and runtime.said() == ["the last error is forgotten"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.make_host_buffer(8192)
        device.reserve_host([("a", 8192)])
    device.close()


GIB = 2**30


@pytest.fixture
def addresses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page is touched: memory of a size that this machine does not have."""
    monkeypatch.setattr(Pages, "touch", lambda pages: None)


def test_921_gib_are_registered_in_pieces_that_hold_whole_planes(
    runtime: Runtime, device: CudaDevice, addresses_alone: None
) -> None:
    planes = [(f"weights of chunk {number}", 9 * GIB) for number in range(102)]
    device.reserve_host(planes)  # the runtime refuses more than 64 in one call
    assert [size // GIB for size in runtime.registered.values()] == [*[63] * 14, 36]
    buffers = [device.make_host_buffer(num_bytes) for _, num_bytes in planes]
    assert len(runtime.registered) == 15, "every plane found a place"
    for buffer in buffers:
        start, stop = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        whole = [start >= base and stop <= base + size for base, size in runtime.registered.items()]
        assert sum(whole) == 1, "in one piece, or a copy would fail"


def test_a_refusal_in_the_middle_keeps_what_there_is_and_says_from_which_plane_on(
    runtime: Runtime, device: CudaDevice, addresses_alone: None
) -> None:
    runtime.most_registered = 100 * GIB
    planes = [(f"{kind} of chunk {number}", 8 * GIB) for number in range(10) for kind in ("weights", "grad")]
    with pytest.warns(UserWarning, match="it took 96 GiB, and not the 64 GiB from weights of chunk 6 on"):
        device.reserve_host(planes)
    assert runtime.said() == ["the last error is forgotten"]
    buffers = [device.make_host_buffer(num_bytes) for _, num_bytes in planes]
    ranges = [(base, base + size) for base, size in runtime.registered.items()]
    inside = [any(first <= buffer.data_ptr() < last for first, last in ranges) for buffer in buffers]
    assert inside == [True] * 12 + [False] * 8 and sum(runtime.registered.values()) == 96 * GIB
    staged = device.make_host_buffer(GIB)
    assert staged.data_ptr() in runtime.registered, "what is smaller may still be taken"


def test_what_was_refused_is_not_asked_for_again(
    runtime: Runtime, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time all of its pages would be touched first."""
    touched = list[int]()
    monkeypatch.setattr(Pages, "touch", lambda pages: touched.append(pages.num_bytes))
    runtime.most_registered = 3 * 8192
    with pytest.warns(UserWarning, match="CUDA error 2.*it took 16 KiB, and not the 16 KiB from c on"):
        device.reserve_host([("a", 8192), ("b", 8192), ("c", 12288), ("d", 4096)])
    assert touched == [32768, 8192, 8192, 12288]
    buffers = [device.make_host_buffer(size) for size in (8192, 8192, 12288, 16384)]
    assert touched[4:] == []
    buffers.append(device.make_host_buffer(4096))
    assert touched[4:] == [4096] and len(runtime.registered) == 3, "less may be taken"


def test_staging_is_registered_when_it_is_reserved(runtime: Runtime, device: CudaDevice) -> None:
    """And not in the first step, whose copies would wait for the driver."""
    one = staging_bytes(4096)
    ledger = Ledger({Tier.CPU: 8 * one, Tier.GPU: 0})
    ledger.reserve(Tier.CPU, 2 * one, "staging")
    staging = Staging(device, 4096, ledger, 4096, ADAM)
    assert [*runtime.registered.values()] == [one]
    sets = [*staging.take_slots(1), *staging.take_slots(1)]
    assert len(sets) == 1, "there is one for a worker"
    assert [*runtime.registered.values()] == [one] * 2
    staging.own.scratch(0, torch.float32, 4096)
    assert len(runtime.registered) == 2


def test_a_buffer_that_is_larger_than_drivers_take_goes_without(
    runtime: Runtime, device: CudaDevice, addresses_alone: None
) -> None:
    with pytest.warns(UserWarning, match="65 GiB in one piece are more than drivers take"):
        device.make_host_buffer(65 * GIB)
    assert not runtime.registered


def test_what_the_host_alone_works_on_is_not_registered(runtime: Runtime, device: CudaDevice) -> None:
    assert int(device.make_kept_buffer(8192).count_nonzero()) == 0 and not runtime.registered


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
        used.add(device._copying[name].stream.cuda_stream)
    assert len(used) == 5 and runtime.current().cuda_stream not in used


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
    assert bytes_behind(device, [at(1000), at(1612)]) == 1500
    assert bytes_behind(device, [at(1000), at(1000)]) == 500, "views of one block"
    assert bytes_behind(device, [at(1512)]) == 0, "nobody has that one"
    assert bytes_behind(device, [at(5000)]) == 0, "another GPU's"
    assert bytes_behind(device, [at(1000, is_cuda=False)]) == 0 and bytes_behind(device, []) == 0


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
