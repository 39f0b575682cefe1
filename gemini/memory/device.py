"""The computing device, as one small contract with three implementations: CPU, CUDA, and a stand-in for tests.

The engine asks a device for *windows* (memory for gathered weights that comes and goes at a fixed place, because
autograd keeps views of it), for plain *buffers* (homes of planes), and to *copy* between host and device on a lane,
which gives an :class:`Event`. The CPU device computes in host memory and copies at once. The stand-in has its "own"
memory and byte budget on a machine without a GPU; its copies run on a thread behind a clock that tests control, so that
an event can be *not yet complete*. All waits are bounded, and a failed copy surfaces in whoever waits for it.
"""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import psutil
import torch

from gemini.errors import GeminiError
from gemini.memory.pages import Pages, can_move_pages, host_bytes
from gemini.tiers import Tier

WAIT_SECONDS = 120.0
"""How long anything waits for a copy before it says that the copy is stuck."""


class Event:
    """The end of a copy. ``wait`` raises what the copy raised."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def is_complete(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float = WAIT_SECONDS) -> None:
        """Block until the copy is over.

        Raises:
            GeminiError: if the copy failed, or did not end in ``timeout`` seconds.
        """
        if not self._done.wait(timeout):
            raise GeminiError(f"a copy did not complete within {timeout:.0f} s: its lane is stuck")
        if self._error is not None:
            raise GeminiError(f"a copy failed: {self._error}") from self._error

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._done.set()


DONE = Event()
"""What was over before it was asked for."""
DONE.finish()


class Window(ABC):
    """Memory at a fixed place whose bytes come and go; ``bytes`` stays the same tensor throughout."""

    bytes: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.bytes.numel()

    @abstractmethod
    def populate(self) -> None:
        """Put memory behind ``bytes``; its content is undefined."""

    @abstractmethod
    def depopulate(self) -> bool:
        """Take the memory away; reading ``bytes`` afterwards is an error of the engine.

        True if it waits in the device's frame pool, False if it went back to the system.
        """


class StorageWindow(Window):
    """A resizable torch storage: the caching allocator behind it makes this cheap on CUDA."""

    def __init__(self, num_bytes: int, device: torch.device):
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._size = num_bytes
        self.depopulate()

    @property
    def num_bytes(self) -> int:
        return self._size

    def populate(self) -> None:
        self.bytes.untyped_storage().resize_(self._size)

    def depopulate(self) -> bool:
        self.bytes.untyped_storage().resize_(0)
        return False


class PageWindow(Window):
    """Host addresses under which physical pages are moved; pages that left wait in the device's frame pool."""

    def __init__(self, num_bytes: int, frames: FramePool):
        self.pages = Pages(num_bytes)
        self.bytes = self.pages.tensor()
        self._frames = frames

    def populate(self) -> None:
        try:
            self._frames.take(self.pages)
        except OSError as e:
            raise GeminiError(
                f"the system refused to move memory to a window ({e}). If the limit of mappings was reached, raise "
                "vm.max_map_count or GeminiConfig(max_chunk=...)"
            ) from e

    def depopulate(self) -> bool:
        try:
            self._frames.park(self.pages)
        except OSError:  # then the next window of this size starts with fresh pages
            self.pages.discard()
            return False
        return True


class FramePool:
    """Physical memory of evicted windows, by size, ready for the next window of that size without page faults."""

    def __init__(self) -> None:
        self._parked: dict[int, list[Pages]] = {}
        self._shells: dict[int, list[Pages]] = {}
        self.parked_bytes = 0

    def has(self, num_bytes: int) -> bool:
        return bool(self._parked.get(num_bytes))

    def take(self, into: Pages) -> None:
        """Move a parked frame under ``into``; without one, pages come from the system at the first touch."""
        frames = self._parked.get(into.num_bytes)
        if frames:
            frame = frames[-1]
            frame.move_to(into)
            frames.pop()
            self.parked_bytes -= into.num_bytes
            self._shells.setdefault(into.num_bytes, []).append(frame)

    def park(self, pages: Pages) -> None:
        shells = self._shells.get(pages.num_bytes)
        shell = shells[-1] if shells else Pages(pages.num_bytes)
        pages.move_to(shell)
        if shells:
            shells.pop()
        self._parked.setdefault(pages.num_bytes, []).append(shell)
        self.parked_bytes += pages.num_bytes

    def trim(self) -> int:
        """Give every parked frame back to the system: the bytes given back."""
        freed, self.parked_bytes = self.parked_bytes, 0
        for num_bytes, frames in self._parked.items():
            for frame in frames:
                frame.discard()
            self._shells.setdefault(num_bytes, []).extend(frames)
            frames.clear()
        return freed


class Device(ABC):
    """What the engine needs of the processor that runs forward and backward."""

    name: str
    torch_device: torch.device
    tier: Tier
    frames: FramePool | None = None

    @abstractmethod
    def make_window(self, num_bytes: int) -> Window:
        """A window of whole pages, without memory behind it yet."""

    @abstractmethod
    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        """Zeroed memory on the device, as a uint8 tensor, for as long as the tensor lives."""

    def make_host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Zeroed, page-aligned host memory that this device copies to and from at full speed."""
        return host_bytes(num_bytes)

    @abstractmethod
    def copy(self, into: torch.Tensor, source: torch.Tensor, lane: str) -> Event:
        """Start copying between host and device. Lanes ("fetch", "evict") run in order, independent of each other."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes of the device's memory that nobody holds now."""

    def synchronize(self) -> None:  # noqa: B027 - most devices compute at once
        """Wait until everything the device was given to compute is done."""

    def close(self) -> None:  # noqa: B027 - most devices have nothing to end
        """End the lanes."""


class _HostMemoryDevice(Device):
    """What the CPU and the stand-in share: windows of host pages."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.frames = FramePool() if can_move_pages() else None

    def make_window(self, num_bytes: int) -> Window:
        if self.frames is not None:
            return PageWindow(num_bytes, self.frames)
        return StorageWindow(num_bytes, self.torch_device)

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        return host_bytes(num_bytes)


class CpuDevice(_HostMemoryDevice):
    """Forward and backward run on the CPU: what is in host memory is used in place."""

    name = "cpu"
    tier = Tier.CPU

    def copy(self, into: torch.Tensor, source: torch.Tensor, lane: str) -> Event:
        event = Event()
        into.copy_(source)
        event.finish()
        return event

    def free_bytes(self) -> int:
        return psutil.virtual_memory().available


class StandinDevice(_HostMemoryDevice):
    """A GPU for machines without one: its own tier and budget, computed on by the CPU, with copies that take time.

    Args:
        memory: bytes it pretends to have when no ``gpu=`` budget is given.
        gate: called on the lane's thread before each copy is made, with the lane's name; it may block (a test's clock).
    """

    name = "standin"
    tier = Tier.GPU

    def __init__(self, memory: int = 2**30, gate: Callable[[str], None] | None = None):
        super().__init__()
        self._memory = memory
        self._gate = gate or (lambda lane: None)
        self._lanes: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}

    def copy(self, into: torch.Tensor, source: torch.Tensor, lane: str) -> Event:
        event = Event()

        def run() -> None:
            try:
                self._gate(lane)
                into.copy_(source)
            except BaseException as e:  # surfaces in wait(): a lane never dies
                event.finish(e)
            else:
                event.finish()

        if lane not in self._lanes:
            self._lanes[lane] = queue.SimpleQueue()
            threading.Thread(target=_run_lane, args=(self._lanes[lane],), name=f"gemini-{lane}", daemon=True).start()
        self._lanes[lane].put(run)
        return event

    def free_bytes(self) -> int:
        return self._memory

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.put(None)
        self._lanes.clear()

    def __del__(self) -> None:
        self.close()


def _run_lane(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Module level, so that a lane's thread does not keep its device alive."""
    while (job := jobs.get()) is not None:
        job()
        del job


class CudaDevice(Device):
    """One NVIDIA GPU: the caching allocator behind windows, copies on the current stream, waited for by the host.

    Plain on purpose: streams per lane and the pinned arena come with the overlapped engine.
    """

    name = "cuda"
    tier = Tier.GPU

    def __init__(self, torch_device: torch.device):
        index = torch_device.index if torch_device.index is not None else _own_gpu()
        self.torch_device = torch.device("cuda", index)

    def make_window(self, num_bytes: int) -> Window:
        return StorageWindow(num_bytes, self.torch_device)

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def copy(self, into: torch.Tensor, source: torch.Tensor, lane: str) -> Event:
        event = Event()
        into.copy_(source)
        torch.cuda.current_stream(self.torch_device).synchronize()
        event.finish()
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free


def _own_gpu() -> int:
    """The GPU of this process: as torchrun counts processes on a machine, unless the program chose another already."""
    current, local = torch.cuda.current_device(), int(os.environ.get("LOCAL_RANK", 0))
    return local if current == 0 and local < torch.cuda.device_count() else current


def make_device(name: str | torch.device | Device | None) -> Device:
    """The device for a config's ``device=``: None means "cuda" if there is one, else "cpu".

    Raises:
        ValueError: for a device that does not exist here.
    """
    if isinstance(name, Device):
        return name
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "standin":
        return StandinDevice()
    try:
        wanted = torch.device(name)
    except (RuntimeError, TypeError) as e:
        raise ValueError(f"device={name!r} is not a device; use 'cuda', 'cuda:N', 'cpu' or None") from e
    if wanted.type == "cpu":
        return CpuDevice()
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={name!r} was asked for, but torch sees no CUDA device; use device=None or 'cpu'")
        return CudaDevice(wanted)
    raise ValueError(f"device={name!r} is not supported; use 'cuda', 'cuda:N', 'cpu' or None")
