"""A CUDA runtime that runs nothing and writes everything down: what is asked of it, in which order, what that means.

Besides the lines it keeps what *happens before* what: every stream is a chain, an event carries the chain's past to
whoever waits for it. Memory is ranges of addresses from an allocator of a few lines, so that blocks are reused, cut and
joined; each use of a range is held against all uses by others before it (:meth:`Runtime.use`).
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from gemini.memory.devices import cuda
from gemini.memory.devices.cuda import CudaDevice
from gemini.memory.devices.cuda_windows import CudaWindow
from tests.standins import Arena

GPU = 1
"""The number of the GPU."""


class Use(NamedTuple):
    """A use of a range of memory by one of its owners."""

    number: int
    start: int
    stop: int
    owner: object
    what: str


class Runtime:
    """Streams, events and memory, as names, lines and pasts."""

    def __init__(self, patch: pytest.MonkeyPatch, memory: int = 64 * 4096):
        self.lines: list[str] = []
        self.finished: set[str] = set()
        self.registered: dict[int, int] = {}
        self.refusal = 0
        self.most_registered = 2**50
        self.error: str | None = None
        self.num_streams = 0
        self.num_events = 0
        self.num_queries = 0
        self.arena = Arena(memory)
        self.refused_allocations = 0
        self.emptied = 0
        self.pools: list[object] = []
        self.in_pool: object | None = None
        self.in_device = False
        self.backend = "native"
        self.max_split_size = -1
        self.streams_there_are = 10_000
        self.figures = {"memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0}
        self.figures["max_memory_reserved"] = 0
        self.segments: list[dict[str, Any]] = []
        self.blocks: dict[int, int] = {}
        """By address, the bytes that were asked for."""
        self.pasts: dict[int, set[int]] = {}
        self.past_of_all: set[int] = set()
        """What the host has seen to be over: everything that it gives from then on comes after."""
        self.events: list[str] = []
        self.uses: list[Use] = []
        self._lock = threading.Lock()
        runtime = self
        chosen = threading.local()

        class Stream:
            def __init__(self, device: Any = None, name: str | None = None):
                runtime.num_streams += 1
                self.cuda_stream = (runtime.num_streams - 1) % runtime.streams_there_are + 1
                self.name = name or f"stream {self.cuda_stream}"

            @property
            def past(self) -> set[int]:
                return runtime.pasts.setdefault(self.cuda_stream, set())

            def wait_event(self, event: Moment) -> None:
                runtime.lines.append(f"{self.name} waits for {event.name}")
                self.past.update(event.past)

            def record_event(self) -> Moment:
                event = Moment()
                event.record(self)
                return event

        class Moment:
            name = ""

            def record(self, stream: Stream) -> None:
                runtime.num_events += 1
                self.name = f"event {runtime.num_events} of {stream.name}"
                runtime.events.append(self.name)
                self.past = frozenset(stream.past)

            def query(self) -> bool:
                runtime.num_queries += 1
                if runtime.error is not None:
                    raise RuntimeError(runtime.error)
                if self.name not in runtime.finished:
                    return False
                runtime.past_of_all.update(self.past)
                return True

        @contextmanager
        def stream(to: Stream) -> Any:
            before = current()
            chosen.stream = to
            try:
                yield
            finally:
                chosen.stream = before

        @contextmanager
        def device(which: Any) -> Any:
            assert which == torch.device("cuda", GPU)
            before, self.in_device = self.in_device, True
            try:
                yield
            finally:
                self.in_device = before

        default = Stream(name="default")

        def current(device: Any = None) -> Stream:
            return getattr(chosen, "stream", default)

        def make_pool() -> object:
            self.pools.append(object())
            return self.pools[-1]

        @contextmanager
        def use_pool(pool: object, device: Any) -> Any:
            assert self.in_pool is None, "the allocator refuses two at once"
            self.in_pool = pool
            try:
                yield
            finally:
                self.in_pool = None

        class Cudart:
            def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
                assert num_bytes <= 2**36, "more than drivers take in one call"
                if runtime.refusal or sum(runtime.registered.values()) + num_bytes > runtime.most_registered:
                    return runtime.refusal or 2
                assert address not in runtime.registered
                runtime.registered[address] = num_bytes
                return 0

            def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
                assert runtime.in_device, "a context of the first GPU"
                return 0 if runtime.registered.pop(address, None) else 713

        def empty_cache() -> None:
            self.emptied += 1

        self.Stream, self.stream, self.current = Stream, stream, current
        for name, value in {
            "Stream": Stream, "Event": Moment, "stream": stream, "device": device, "current_stream": current,
            "cudart": Cudart, "MemPool": make_pool, "use_mem_pool": use_pool, "empty_cache": empty_cache,
            "get_allocator_backend": lambda: self.backend, "memory_snapshot": self.snapshot,
            "mem_get_info": lambda device: (60, 100),
            "memory_stats": lambda device: {"max_split_size": self.max_split_size},
            "synchronize": lambda device: self.lines.append("the host waits for everything"),
            **{name: (lambda device, name=name: self.figures[name]) for name in self.figures},
        }.items():  # fmt: skip
            patch.setattr(torch.cuda, name, value)
        patch.setattr(cuda, "_forget_error", lambda device: self.lines.append("the last error is forgotten"))

    def said(self) -> list[str]:
        """The lines since the last time."""
        lines, self.lines = self.lines, []
        return lines

    def snapshot(self) -> list[dict[str, Any]]:
        """As torch tells it: segments with their blocks."""
        return self.segments or [
            {
                "device": GPU,
                "address": address,
                "blocks": [{"size": size, "requested_size": size, "state": "active_allocated"}],
            }
            for address, size in self.blocks.items()
        ]

    def use(self, start: int, num_bytes: int, owner: object, what: str) -> int:
        """Something on the current stream uses ``[start, start + num_bytes)``: its number.

        Fails unless every use of any of it by another owner happens before.
        """
        past, stop = self.current().past, start + num_bytes
        with self._lock:
            before = past | self.past_of_all
            for other in self.uses:
                if other.owner is not owner and other.start < stop and start < other.stop:
                    assert other.number in before, f"{what} may come before {other.what}, whose memory it was"
            number = len(self.uses) + 1
            self.uses.append(Use(number, start, stop, owner, what))
            past.add(number)
        return number

    def is_behind(self, number: int) -> bool:
        """Whether what the current stream is given next comes after a use."""
        return number in self.current().past | self.past_of_all


class Tensor:
    """As much of a tensor as a copy needs. ``of``: the window whose memory it is."""

    def __init__(
        self, runtime: Runtime, name: str, kind: str, of: Bytes | None = None, dtype: torch.dtype = torch.uint8
    ):
        self.runtime, self.name, self.of, self.dtype = runtime, name, of, dtype
        self.device, self.is_cuda = torch.device(kind), kind == "cuda"

    def is_contiguous(self) -> bool:
        return True

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        what = f"{getattr(source, 'name', 'host memory')} into {self.name}"
        self.runtime.lines.append(f"{self.runtime.current().name} copies {what}")
        for tensor, does in ((self, "the copy of"), (source, "who reads for the copy of")):
            if getattr(tensor, "of", None) is not None:
                tensor.of.use(f"{does} {what}")

    def record_stream(self, stream: Any) -> None:
        self.runtime.lines.append(f"{self.name} recorded on {stream.name}")

    def untyped_storage(self) -> Any:
        return type("Storage", (), {"_cdata": id(self)}) if self.of is None else self.of


class Bytes:
    """A window's bytes and their storage in one, with memory from the runtime's allocator."""

    is_cuda = True

    def __init__(self, runtime: Runtime, name: str, real: torch.Tensor):
        self.runtime, self.name, self._real = runtime, name, real
        self._cdata = real.untyped_storage()._cdata
        self._offset: int | None = None
        self._size = 0
        self.owner = object()

    def untyped_storage(self) -> Bytes:
        return self

    def view(self, dtype: torch.dtype) -> Tensor:
        return Tensor(self.runtime, self.name, "cuda", of=self, dtype=dtype)

    def resize_(self, num_bytes: int) -> None:
        if num_bytes == 0:
            if self._offset is not None:
                del self.runtime.blocks[self.data_ptr()]
                self.runtime.arena.give_back(self._offset)
            self._offset = None
            return
        assert self.runtime.in_pool is not None or self.runtime.backend != "native", "not of the windows' pool"
        if self.runtime.refused_allocations:
            self.runtime.refused_allocations -= 1
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        self._offset, self._size = self.runtime.arena.take(num_bytes), num_bytes
        assert self._offset is not None, "the test asks for more than there is"
        self.runtime.blocks[self.data_ptr()] = num_bytes
        self.owner = object()  # another one each time

    def data_ptr(self) -> int:
        return 0 if self._offset is None else 2**20 + self._offset

    def use(self, what: str) -> int:
        """Something on the current stream reads or writes all of it; what computes must come after what was copied."""
        assert self._offset is not None, f"{what}: {self.name} has no memory"
        if "computing" in what:
            arrived = [use for use in self.runtime.uses if use.owner is self.owner and use.what.startswith("the copy")]
            assert all(self.runtime.is_behind(use.number) for use in arrived), f"{what} may come before its weights"
        return self.runtime.use(self.data_ptr(), self._size, self.owner, what)


def make_window(runtime: Runtime, device: CudaDevice, name: str, num_bytes: int) -> CudaWindow:
    """A window of the device whose memory is the runtime's."""
    gpu, device.torch_device = device.torch_device, torch.device("cpu")
    try:
        window = CudaDevice.make_window(device, num_bytes)
    finally:
        device.torch_device = gpu
    assert isinstance(window, CudaWindow)
    window.bytes = Bytes(runtime, name, window.bytes)  # type: ignore[assignment]
    return window


def bytes_of(window: CudaWindow) -> Bytes:
    assert isinstance(window.bytes, Bytes)
    return window.bytes


def on_card(window: CudaWindow) -> Any:
    """The whole window as what is copied."""
    return Tensor(bytes_of(window).runtime, bytes_of(window).name, "cuda", of=bytes_of(window))
