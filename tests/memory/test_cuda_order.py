"""What the CUDA device asks of the CUDA runtime, and in which order, against a runtime that only writes it down.

This says nothing about a card (``tests/gpu`` does, on one). It holds what can be held without: which stream waits for
which event before a copy, what is recorded for the caching allocator, what is registered and given back.
"""

from __future__ import annotations

import gc
import threading
import warnings
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gemini.errors import GeminiError
from gemini.memory import cuda
from gemini.memory.cuda import CudaDevice
from gemini.memory.device import Event


class Runtime:
    """Streams, events and registered memory, as names and lines."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.lines: list[str] = []
        self.finished: set[str] = set()
        self.registered: dict[int, int] = {}
        self.refusal = 0
        self.error: str | None = None
        self.num_streams = 0
        self.num_events = 0
        runtime = self
        chosen = threading.local()

        class Stream:
            def __init__(self, device: Any = None, name: str | None = None):
                runtime.num_streams += 1
                self.name = name or f"lane {runtime.num_streams}"
                self.cuda_stream = runtime.num_streams

            def wait_event(self, event: Moment) -> None:
                runtime.lines.append(f"{self.name} waits for {event.name}")

            def record_event(self) -> Moment:
                event = Moment()
                event.record(self)
                return event

            def synchronize(self) -> None:
                runtime.lines.append(f"the host waits for {self.name}")

        class Moment:
            name = ""

            def record(self, stream: Stream) -> None:
                runtime.num_events += 1
                self.name = f"event {runtime.num_events} of {stream.name}"

            def query(self) -> bool:
                if runtime.error is not None:
                    raise RuntimeError(runtime.error)
                return self.name in runtime.finished

        @contextmanager
        def stream(to: Stream) -> Any:
            before = current()
            chosen.stream = to
            yield
            chosen.stream = before

        @contextmanager
        def device(which: Any) -> Any:
            assert which == torch.device("cuda", 1)
            yield

        default = Stream(name="default")

        def current(device: Any = None) -> Stream:
            return getattr(chosen, "stream", default)

        class Cudart:
            def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
                if runtime.refusal:
                    return runtime.refusal
                assert address not in runtime.registered
                runtime.registered[address] = num_bytes
                return 0

            def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
                return 0 if runtime.registered.pop(address, None) else 713

        self.Stream, self.stream, self.current = Stream, stream, current
        for name, value in {
            "Stream": Stream, "Event": Moment, "stream": stream, "device": device, "current_stream": current,
            "cudart": Cudart,
        }.items():  # fmt: skip
            patch.setattr(torch.cuda, name, value)
        patch.setattr(cuda, "_forget_error", lambda device: self.lines.append("the last error is forgotten"))

    def said(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


class Tensor:
    """As much of a tensor as a copy needs."""

    dtype = torch.uint8

    def __init__(self, runtime: Runtime, name: str, kind: str, storage: int = 0):
        self.runtime, self.name, self.storage = runtime, name, storage or id(self)
        self.device, self.is_cuda = torch.device(kind), kind == "cuda"

    def is_contiguous(self) -> bool:
        return True

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.runtime.lines.append(f"{self.runtime.current().name} copies {source.name} into {self.name}")

    def record_stream(self, stream: Any) -> None:
        self.runtime.lines.append(f"{self.name} recorded on {stream.name}")

    def untyped_storage(self) -> Any:
        return type("Storage", (), {"_cdata": self.storage})


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime(monkeypatch)


@pytest.fixture
def device(runtime: Runtime) -> CudaDevice:
    return CudaDevice(torch.device("cuda", 1))


@pytest.fixture
def tensors(runtime: Runtime) -> tuple[Any, Any]:
    return Tensor(runtime, "host", "cpu"), Tensor(runtime, "card", "cuda")


def test_a_copy_comes_after_the_computation_on_a_stream_of_its_lane(
    runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]
) -> None:
    host, card = tensors
    device.copy(card, host, "fetch")
    device.copy(host, card, "evict")
    assert runtime.said() == [
        "lane 2 waits for event 1 of default",
        "lane 2 copies host into card",
        "card recorded on lane 2",
        "lane 3 waits for event 3 of default",
        "lane 3 copies card into host",
        "card recorded on lane 3",
    ]


def test_directions_of_one_lane_are_in_order(runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]) -> None:
    host, card = tensors
    device.copy(card, host, "fetch")
    runtime.said()
    device.copy(host, card, "fetch")  # the other way: another stream, behind the first copy
    assert runtime.said()[:3] == [
        "lane 3 waits for event 3 of default", "lane 3 waits for event 2 of lane 2", "lane 3 copies card into host",
    ]  # fmt: skip
    device.copy(host, card, "fetch")
    assert runtime.said()[1] == "lane 3 copies card into host", "the same stream: in order by itself"


def test_after_an_event_of_the_device_the_lane_waits_and_the_host_does_not(
    runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]
) -> None:
    host, card = tensors
    mark = device.mark()
    assert not mark.is_complete()
    device.copy(card, host, "fetch", after=mark)
    assert runtime.said()[:2] == ["lane 2 waits for event 2 of default", "lane 2 waits for event 1 of default"]
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


def test_work_that_comes_after_an_event(runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]) -> None:
    host, card = tensors
    event = device.copy(card, host, "fetch")
    runtime.said()
    event.wait_on_device()
    assert runtime.said() == ["default waits for event 2 of lane 2"]
    with pytest.raises(GeminiError, match=r"a copy did not complete within 0 s: its lane is stuck"):
        event.wait(0.01)
    runtime.finished.add("event 2 of lane 2")
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
    streams = device._lanes["fetch"]
    assert streams.in_flight[0][2] is host and len(streams.in_flight) == 1
    other = Tensor(runtime, "other", "cpu")
    device.copy(card, other, "fetch")  # type: ignore[arg-type]
    assert len(streams.in_flight) == 2
    runtime.finished.add("event 2 of lane 2")
    device.copy(card, other, "fetch")  # type: ignore[arg-type]
    assert [kept[2] for kept in streams.in_flight] == [other, other]


def test_a_window_gives_its_block_back_behind_the_copies_into_it(
    runtime: Runtime, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # a storage of the host in place of the card's
        patch.setattr(device, "torch_device", torch.device("cpu"))
        window = device.make_window(4096)
    window.populate()
    card = Tensor(runtime, "window", "cuda", storage=window.bytes.untyped_storage()._cdata)
    device.copy(card, Tensor(runtime, "host", "cpu"), "fetch")  # type: ignore[arg-type]
    assert "window recorded on lane 2" not in runtime.said()
    window.depopulate()
    assert runtime.said() == ["default waits for event 2 of lane 2"]
    window.populate()
    window.depopulate()
    assert runtime.said() == [], "that copy is past"


def test_a_worker_s_copy_waits_for_the_stream_that_a_window_is_from(
    runtime: Runtime, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was computed there last may still read the block that the window has now."""
    with monkeypatch.context() as patch:
        patch.setattr(device, "torch_device", torch.device("cpu"))
        window = device.make_window(4096)
    with runtime.stream(runtime.Stream(name="the program's")):
        window.populate()
    card = Tensor(runtime, "window", "cuda", storage=window.bytes.untyped_storage()._cdata)
    worker = threading.Thread(target=device.copy, args=(card, Tensor(runtime, "host", "cpu"), "fetch"))
    worker.start()
    worker.join()
    lines = runtime.said()
    waits = [line for line in lines if "waits for" in line and "the program's" in line]
    assert waits and lines.index(waits[0]) < next(i for i, line in enumerate(lines) if "copies host" in line)


def test_a_copy_that_is_stuck_is_said_to_be(runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]) -> None:
    with pytest.raises(GeminiError, match=r"^a copy did not complete within 0 s"):
        device.copy(*tensors, "evict").wait(0.0)


def test_host_memory_is_registered_and_given_back(runtime: Runtime, device: CudaDevice) -> None:
    first, second = device.make_host_buffer(8192), device.make_host_buffer(4096)
    assert runtime.registered == {first.data_ptr(): 8192, second.data_ptr(): 4096}
    assert int(first.count_nonzero()) == 0
    view = first[4096:].view(torch.int32)
    del first
    gc.collect()
    assert len(runtime.registered) == 2, "a view is as good"
    del view
    gc.collect()
    assert list(runtime.registered) == [second.data_ptr()]
    device.close()
    assert not runtime.registered
    second.fill_(1)  # still memory
    del second
    gc.collect()


def test_without_registered_memory_it_goes_on_and_says_so_once(runtime: Runtime, device: CudaDevice) -> None:
    runtime.refusal = 2
    with pytest.warns(UserWarning, match=r"cannot be registered with the CUDA driver \(CUDA error 2\).*ulimit -l"):
        buffer = device.make_host_buffer(8192)
    assert int(buffer.count_nonzero()) == 0 and runtime.said() == ["the last error is forgotten"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.make_host_buffer(8192)
    device.close()


def test_the_end_waits_for_the_lanes(runtime: Runtime, device: CudaDevice, tensors: tuple[Any, Any]) -> None:
    host, card = tensors
    device.copy(card, host, "fetch")
    device.copy(host, card, "evict")
    runtime.said()
    device.close()
    assert runtime.said() == ["the host waits for lane 2", "the host waits for lane 3"]
    device.close()
    assert runtime.said() == []
