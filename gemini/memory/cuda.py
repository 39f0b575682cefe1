"""One NVIDIA GPU behind the device contract: streams for lanes, CUDA events, registered host memory.

Each lane has a stream for each direction. A copy comes after what the computing streams were given before it, by
events and not by waiting, so host code goes on at once; who reads the copied bytes on the GPU lets the computing stream
wait (``Event.wait_on_device``), who reads them on the host waits itself. Three things need care. Copies are
asynchronous only from and to page-locked memory, so host buffers are registered with the driver, page-aligned as they
are (torch's own pinned allocator rounds sizes up to powers of two). The caching allocator orders the reuse of a block
on the stream that it was allocated for and knows nothing of lanes, so windows wait for copies that touch them before
they give their block back, and other tensors are recorded on the lane's stream. And the current device is a setting of
each thread, so nothing here relies on it: worker threads may call everything.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable

import torch

from gemini.errors import GeminiError
from gemini.memory.device import WAIT_SECONDS, Device, Event
from gemini.memory.pages import PAGE, Pages
from gemini.memory.windows import StorageWindow, Window
from gemini.tiers import Tier

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context of the process


class CudaEvent(Event):
    """A point in a stream. CUDA's own wait has no limit, so the host asks again and again, ever less often."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, what: str):
        self.what = what
        self._device = device
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def is_complete(self) -> bool:
        try:
            return self._event.query()
        except RuntimeError:  # over, though not well: wait() says how
            return True

    def wait(self, timeout: float = WAIT_SECONDS) -> None:
        until, pause = time.monotonic() + timeout, 0.0
        try:
            while not self._event.query():
                if time.monotonic() > until:
                    raise GeminiError(f"{self.what} did not complete within {timeout:.0f} s: its lane is stuck")
                time.sleep(pause)
                pause = min(pause + 10e-6, 1e-3)
        except GeminiError:
            raise
        except RuntimeError as e:  # an error of the GPU, of this work or of any before it
            raise GeminiError(f"{self.what} failed: {e}") from e

    def wait_on_device(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """Let what ``stream`` is given from now on come after this event."""
        stream.wait_event(self._event)

    def finish(self, error: BaseException | None = None) -> None:
        raise AssertionError("the GPU says when its work is over")


class CudaWindow(StorageWindow):
    """A resizable storage that gives its block back only behind the copies that read or write it."""

    def __init__(self, num_bytes: int, device: CudaDevice):
        self._owner = weakref.ref(device)
        self._stream: torch.cuda.Stream | None = None
        self.touched: dict[str, CudaEvent] = {}
        """The last copy of each lane that reads or writes this memory."""
        super().__init__(num_bytes, device.torch_device)

    def populate(self) -> None:
        self._stream = torch.cuda.current_stream(self.bytes.device)  # whose block it is, for the caching allocator
        device = self._owner()
        if device is not None:
            device.computes_on(self._stream)
        super().populate()

    def depopulate(self) -> bool:
        touched, self.touched = self.touched, {}
        if self._stream is not None:
            for event in touched.values():
                event.hold_back(self._stream)
            device = self._owner()
            if device is not None:
                device.outlive_streams(self.bytes, self._stream)
            self._stream = None
        return super().depopulate()


class PinnedPages(Pages):
    """Host pages that the driver knows and keeps in place, so that the GPU's copy engines reach them by themselves."""

    def __init__(self, num_bytes: int):
        super().__init__(num_bytes)
        self._registered = False

    def register(self) -> None:
        """Pin the pages, all of them and now.

        Raises:
            RuntimeError: if the driver refuses (a limit on locked memory, or too little of it); they are as before.
        """
        _check(torch.cuda.cudart().cudaHostRegister(self.address, self.num_bytes, _PORTABLE))
        self._registered = True

    def unregister(self) -> None:
        if self._registered and os.getpid() == self._pid:
            self._registered = False
            _check(torch.cuda.cudart().cudaHostUnregister(self.address))

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if _ending():
            return
        try:  # before the addresses go: the driver would hold what is no longer there
            if getattr(self, "_registered", False):
                self.unregister()
        finally:
            super().__del__()


class _CopyStreams:
    """The streams of one lane. Its copies are in order, also where they turn from one direction to the other."""

    def __init__(self) -> None:
        self.by_direction: dict[str, torch.cuda.Stream] = {}
        self.last: tuple[str, CudaEvent] | None = None
        self.in_flight: deque[tuple[CudaEvent, torch.Tensor, torch.Tensor]] = deque()

    def let_go(self) -> None:
        """Drop the references to tensors whose copies are over."""
        while self.in_flight and self.in_flight[0][0].is_complete():
            self.in_flight.popleft()


class CudaDevice(Device):
    """One NVIDIA GPU."""

    name = "cuda"
    tier = Tier.GPU

    def __init__(self, torch_device: torch.device):
        index = torch_device.index if torch_device.index is not None else _own_gpu()
        self.torch_device = torch.device("cuda", index)
        self._lock = threading.RLock()
        self._lanes: dict[str, _CopyStreams] = {}
        self._windows: weakref.WeakValueDictionary[int, CudaWindow] = weakref.WeakValueDictionary()
        self._computing: dict[int, torch.cuda.Stream] = {}
        self._pinned: weakref.WeakSet[PinnedPages] = weakref.WeakSet()
        self._can_pin = sys.platform == "linux" and mmap.PAGESIZE == PAGE

    def make_window(self, num_bytes: int) -> Window:
        window = CudaWindow(num_bytes, self)
        self._windows[_storage(window.bytes)] = window
        return window

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def make_host_buffer(self, num_bytes: int) -> torch.Tensor:
        if not self._can_pin:
            return super().make_host_buffer(num_bytes)
        pages = PinnedPages(num_bytes)
        try:
            with torch.cuda.device(self.torch_device):
                pages.register()
        except RuntimeError as e:
            self._can_pin = False
            _forget_error(self.torch_device)
            warnings.warn(
                f"host memory cannot be registered with the CUDA driver ({e}): copies are slower and wait for each "
                "other. Raise the limit of locked memory (ulimit -l), or give a smaller cpu= budget",
                stacklevel=2,
            )
        else:
            self._pinned.add(pages)
        return pages.tensor()

    def copy(
        self,
        into: torch.Tensor,
        source: torch.Tensor,
        lane: str,
        after: Event | None = None,
        *,
        behind_computing: bool = True,
    ) -> Event:
        if after is not None and not isinstance(after, CudaEvent):
            after.wait()  # of the host: nothing on the GPU could wait for it
        direction = f"{source.device.type} to {into.device.type}"
        with self._lock, torch.cuda.device(self.torch_device):
            streams = self._lanes.setdefault(lane, _CopyStreams())
            streams.let_go()
            if direction not in streams.by_direction:
                streams.by_direction[direction] = torch.cuda.Stream(self.torch_device)
            stream = streams.by_direction[direction]
            for computing in self._computing_streams():
                stream.wait_event(computing.record_event())
            if isinstance(after, CudaEvent):
                after.hold_back(stream)
            if streams.last is not None and streams.last[0] != direction:
                streams.last[1].hold_back(stream)
            plain = into.dtype == source.dtype and into.is_contiguous() and source.is_contiguous()
            with torch.cuda.stream(stream), torch.no_grad():
                into.copy_(source, non_blocking=plain)  # else torch goes through copies of its own
            event = CudaEvent(self.torch_device, stream, "a copy")
            streams.last = (direction, event)
            for tensor in (into, source):
                if tensor.is_cuda:
                    self._keep_for(tensor, stream, lane, event)
            # The engines read and write host memory after this returns; nothing but these references keeps it there.
            streams.in_flight.append((event, _host_side(into), _host_side(source)))
        return event

    def mark(self) -> Event:
        with self._lock, torch.cuda.device(self.torch_device):
            self._computing_streams()
            return CudaEvent(self.torch_device, torch.cuda.current_stream(self.torch_device), "the computation")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free

    def close(self) -> None:
        with self._lock:
            lanes, self._lanes = self._lanes, {}
        with torch.cuda.device(self.torch_device):
            for streams in lanes.values():
                for stream in streams.by_direction.values():
                    stream.synchronize()
                streams.in_flight.clear()
            for pages in list(self._pinned):
                pages.unregister()
        self._pinned.clear()

    def outlive_streams(self, tensor: torch.Tensor, own: torch.cuda.Stream) -> None:
        """The block behind ``tensor`` is about to be freed: not before all computing streams are done with it.

        The caching allocator sees to it for ``own``, the stream of the allocation: in most programs the only one.
        """
        with self._lock:
            for stream in self._computing.values():
                if stream.cuda_stream != own.cuda_stream:
                    tensor.record_stream(stream)

    def _computing_streams(self) -> list[torch.cuda.Stream]:
        """The streams on which this device was ever seen to compute: the calling thread's, and those before.

        A worker thread's current stream is the default one, whichever the training thread chose for itself.
        """
        self.computes_on(torch.cuda.current_stream(self.torch_device))
        return list(self._computing.values())

    def computes_on(self, stream: torch.cuda.Stream) -> None:
        """Know of a stream on which something may still be under way: copies, of any thread, come behind it."""
        with self._lock:
            self._computing.setdefault(stream.cuda_stream, stream)

    def _keep_for(self, tensor: torch.Tensor, stream: torch.cuda.Stream, lane: str, event: CudaEvent) -> None:
        """See that the memory of a tensor on the GPU is not given to others while the lane works on it.

        Not by ``record_stream`` for windows: it frees a block behind everything the lane was given until then, so a
        lane that works far ahead would keep blocks that the ledger takes for free.
        """
        window = self._windows.get(_storage(tensor))
        if window is not None:
            window.touched[lane] = event
        else:
            tensor.record_stream(stream)


def _check(error: object) -> None:
    """Raise what a call of the CUDA runtime returned; torch's names do not cover every number."""
    if int(error) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"CUDA error {int(error)}")  # type: ignore[call-overload]


def _forget_error(device: torch.device) -> None:
    """A refused call stays the runtime's "last error", which torch's next kernel launch, whichever, would raise."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


def _storage(tensor: torch.Tensor) -> int:
    """The identity of the memory that views share, also while there is none."""
    return tensor.untyped_storage()._cdata


def _host_side(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if not tensor.is_cuda else torch.empty(0, device="cpu")


def _own_gpu() -> int:
    """The GPU of this process: as torchrun counts processes on a machine, unless the program chose another already."""
    current, local = torch.cuda.current_device(), int(os.environ.get("LOCAL_RANK", 0))
    return local if current == 0 and local < torch.cuda.device_count() else current
