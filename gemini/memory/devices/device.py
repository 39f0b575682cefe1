"""The computing device, as one small contract with two implementations: CPU, and CUDA.

The engine asks a device for *windows* (memory for gathered weights that comes and goes at a fixed place), for plain
*buffers* (homes of planes), and to *copy* between host and device on a stream, which gives an :class:`Event`. The CPU
device computes in host memory and copies at once; CUDA is in :mod:`gemini.memory.devices.cuda`. Others are made known
by name (:func:`register_device`). All waits are bounded, and a failed copy surfaces in whoever waits for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch

from gemini.errors import GeminiError
from gemini.interrupts import WHOLE, call_without_grad
from gemini.memory.devices.pages import FramePool, PageWindow, StorageWindow, Window, can_move_pages, host_bytes
from gemini.planning.planes import ADAM, RuleSpec
from gemini.tiers import Tier
from gemini.waiting import PROGRESS, Latch, await_latch


class Event:
    """The end of something that was begun, a copy or computing (``Device.mark``). May be asked from any thread."""

    what = "a copy"
    _done = Latch()
    _done.set()  # of those without a beginning: nobody waits for them
    error: BaseException | None = None

    def __init__(self) -> None:
        self._done = Latch()

    def is_complete(self) -> bool:
        """Whether it is over, well or not. Never blocks."""
        return self._done.is_set

    def wait(self) -> None:
        """Block the calling thread until it is over. GeminiError: it failed, or nothing has moved here for minutes."""
        if not self._done.is_set:
            await_latch(self._done, lambda: self.what)
        if self.error is not None:
            raise GeminiError(f"{self.what} failed: {self.error}") from self.error

    def wait_until_over(self) -> None:
        """:meth:`wait`, for who does not need to know how it ended."""
        try:
            self.wait()
        except Exception:
            if not self.is_complete():
                raise

    def wait_on_device(self) -> None:
        """Let what is given to the computing stream from now on come after this event. Called on the thread that
        computes. On CUDA it returns at once; a device that computes on the calling thread can only :meth:`wait`.
        """
        self.wait()

    def finish(self, error: BaseException | None = None) -> None:
        """End it, once. ``error``: what ``wait`` raises as the cause."""
        # Before it is set: whoever wakes up looks at it at once.
        self.error = error
        self._done.set()
        PROGRESS.count += 1


class AllOf(Event):
    """Several events as one: over with the last of them, and failed if any has."""

    def __init__(self, events: Sequence[Event]):
        super().__init__()
        self._events = events

    def is_complete(self) -> bool:
        return all(event.is_complete() for event in self._events)

    def wait(self) -> None:
        # First until all are over: an error that is raised early would leave copies in memory that is given back.
        for event in self._events:
            event.wait_until_over()
        for event in self._events:
            event.wait()

    def wait_on_device(self) -> None:
        failed: Exception | None = None
        for event in self._events:
            try:
                event.wait_on_device()
                # What is computed next must come after the others too: some may still write where this one failed.
            except Exception as e:
                failed = failed or e
        if failed is not None:
            raise failed


DONE = Event()
"""What was over before it was asked for."""
DONE.finish()


def copy_each(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, non_blocking: bool = False) -> None:
    """Copy the second tensor of each pair into the first."""
    for into, source in pairs:
        into.copy_(source, non_blocking=non_blocking)


class Device(ABC):
    """The processor that runs forward and backward. Any thread may copy and mark; windows are the training thread's."""

    name: str
    torch_device: torch.device
    tier: Tier
    frames: FramePool | None = None
    keeps_windows: bool = False
    """Whether memory that windows were given is theirs for good: nothing else can have it where they leave it free."""
    stream_number: Callable[[], int] = int
    """Gives a number of the calling thread's stream, where a device has several. In C: it is asked in every hook."""
    computing: Container[int] = (0,)
    """Numbers of streams that are known to compute: :meth:`computes_here` has nothing to do on them."""

    @abstractmethod
    def make_window(self, num_bytes: int) -> Window:
        """A window of whole pages, without memory behind it yet."""

    @abstractmethod
    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        """Zeroed memory on the device, as a uint8 tensor, for as long as the tensor lives."""

    def reserve_windows(self, num_bytes: int) -> None:  # noqa: B027 - pages of the host come one by one
        """Get memory for so many bytes of windows, if it can be in one piece, in place of what was got before."""

    def has_place(self, num_bytes: int) -> bool:
        """Whether what is free of the windows' own memory has so many bytes in one piece, or need not have them."""
        return True

    def move_windows_together(self, windows: Iterable[Window]) -> None:
        """Give these windows other places, one behind the other, so that what is free is in one piece. They have
        memory, no copy of it is under way, and nobody but the calling thread reads it.
        """
        # What was computed may still read the windows where they are.
        self.synchronize()
        # All of them are copied out before the first one goes, or there would be no piece long enough; through host
        # memory, since there is no room beside them.
        kept = [(window, window.bytes.to("cpu", copy=True)) for window in windows]
        # An interrupt in here would leave windows that are read without memory.
        with WHOLE:
            for window, _ in kept:
                # All go before any comes back: the free pieces become one.
                window.depopulate()
            for window, content in kept:
                window.populate()
                call_without_grad(window.bytes.copy_, content)

    def reserve_host(self, planes: Sequence[tuple[str, int]]) -> None:  # noqa: B027 - most copy from any memory alike
        """Host buffers of these names and bytes are made next, in this order: get ready what they are cut from."""

    def make_host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Page-aligned host memory of zeros that this device copies to and from at full speed."""
        return host_bytes(num_bytes)

    def make_kept_buffer(self, num_bytes: int) -> torch.Tensor:
        """Page-aligned host memory of zeros that the host alone works on: this device may copy it, but slowly."""
        return self.make_host_buffer(num_bytes)

    def copies_beside(self, memory: torch.Tensor) -> bool:
        """Whether copies to and from this host memory run beside the thread that begins them."""
        return True

    @abstractmethod
    def copy(
        self,
        into: torch.Tensor,
        source: torch.Tensor,
        stream: str,
        after: Event | None = None,
        *,
        behind_computing: bool = True,
        kept: bool = False,
    ) -> Event:
        """Start copying between host and device, from any thread. Streams ("fetch", "evict") run in order, independent
        of each other. Until the event is complete ``into`` is neither read nor written, and ``source`` not written.
        It begins when ``after`` is complete (and fails where that failed), and if ``behind_computing`` behind what the
        computing stream was given before. ``kept``: the caller lets go of neither before the event is complete, or its
        stream comes behind that. Then memory of a GPU is free as soon as he does, else behind all copies given before.
        """

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: str) -> Event:
        """:meth:`copy` for each (into, source), alike, contiguous, ``kept`` and in no window: the end of all. Where one
        cannot be begun, those before it are over when that is raised.
        """
        begun: list[Event] = []
        try:
            for into, source in pairs:
                begun.append(self.copy(into, source, stream, kept=True))
        except BaseException:
            AllOf(begun).wait_until_over()
            raise
        return AllOf(begun)

    def host_sums(self, areas: Sequence[torch.Tensor]) -> Callable[..., tuple[Event, Event, Any]] | None:
        """Lands gradients that the host has to add, through these areas of host memory, which nobody else uses.
        Called with one, its plane on the host, what rounding has lost there or None, the elements of a piece, and
        whether to add, it gives copies and calls of the host to the device, in order, and ``behind_computing`` or not:
        when the gradient may go, when it is there, and what then has its ``sums()``, or raises what went wrong. None
        where only a thread can wait for each copy.
        """
        return None

    def beside(self, name: str) -> AbstractContextManager[None]:
        """Give what the calling thread computes inside to a stream of that name, which ``mark()`` and
        ``Event.wait_on_device()`` inside are about. It is no computing stream for :meth:`copy`, nor for windows, which
        must not go before a computing stream has waited for what reads them there.
        """
        return nullcontext()

    def launch(self, call: Callable[[], None], stream: str, memory: torch.Tensor, after: Event) -> Event:
        """Let ``call`` give work on ``memory``, a window's, to a stream of that name (:meth:`beside`): the end of it.
        It begins behind ``after`` and behind the last use of the window's memory by others. From any thread.
        """
        after.wait()
        call()
        return DONE

    def computes_here(self) -> None:  # noqa: B027 - most devices compute on the calling thread
        """The calling thread's stream is one that computes: it is about to read a window."""

    def mark(self) -> Event:
        """Complete when everything that the computing stream was given so far is done."""
        return DONE

    def beside_bytes(self, rule: RuleSpec = ADAM) -> int:
        """Bytes of a declared budget that this process takes whatever it does: a context, kernels, workspaces."""
        return 0

    def fragments_percent(self) -> int:
        """The percentage of activations and gradients that torch's allocator loses to fragments."""
        return 0

    def begin_budget(  # noqa: B027 - host memory is paged
        self, budget: int | None, reserved: int, freed: int, *, limited: bool
    ) -> None:
        """A model is given ``budget`` bytes of this device (None: what it takes), of which ``reserved`` are needed at
        once (else BudgetExceeded); ``freed`` ones of tensors there are about to go. ``limited``: nothing of this
        process needs more.
        """

    def reserve_buffers(self, sizes: Iterable[int]) -> None:  # noqa: B027 - pages of the host come one by one
        """Buffers of these bytes are going to be made: get the memory for them in one piece, as far as that goes."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes of the device's memory that nobody holds now."""

    def memory_figures(self) -> dict[str, int]:
        """Bytes "allocated" and "reserved" there by torch, their peaks, and ("driver") of all processes."""
        return {}

    def reserved_beyond(self, known: int) -> int:
        """Bytes that torch's allocator has taken since the budget began, beyond the ``known`` ones, if one can say."""
        return 0

    def synchronize(self) -> None:  # noqa: B027 - most devices compute at once
        """Wait until everything the device was given to compute is done."""

    def close(self) -> None:  # noqa: B027 - most devices have nothing to end
        """Finish the copies that were begun, and end the streams; a later copy would begin them anew."""


class CpuDevice(Device):
    """Forward and backward run on the CPU: what is in host memory is used in place, and copies are made at once."""

    name = "cpu"
    tier = Tier.CPU
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.frames = FramePool() if can_move_pages() else None

    def make_window(self, num_bytes: int) -> Window:
        frames = self.frames
        return StorageWindow(num_bytes, self.torch_device) if frames is None else PageWindow(num_bytes, frames)

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        return host_bytes(num_bytes)

    def copy(
        self,
        into: torch.Tensor,
        source: torch.Tensor,
        stream: str,
        after: Event | None = None,
        *,
        behind_computing: bool = True,
        kept: bool = False,
    ) -> Event:
        if after is not None:
            # On the calling thread: the copy is made here and now.
            after.wait()
        into.copy_(source)
        return DONE

    def free_bytes(self) -> int:
        return psutil.virtual_memory().available


_registered: dict[Any, type[Device]] = {}


def register_device(name: str, kind: type[Device]) -> None:
    """``device=name`` is a device of that class, from here on."""
    _registered[name] = kind


def torch_device_of(device: Any) -> torch.device:
    """The torch device that a config's ``device=`` computes on; torch raises RuntimeError for a name that is none."""
    return torch.device(getattr(_registered.get(device, device), "torch_device", device))


def _why_no_cuda() -> str:
    """Torch's own words, as of a driver that is older than it needs."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as e:
        return f" ({str(e).partition(chr(10))[0]})"
    return ""


def make_device(name: str | torch.device | Device | None) -> Device:
    """For a config's ``device=`` (None: "cuda", else "cpu"). ValueError: not there; GeminiError: it does not run."""
    if isinstance(name, Device):
        return name
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name in _registered:
        return _registered[name]()
    try:
        wanted = torch.device(name)
    except (RuntimeError, TypeError) as e:
        raise ValueError(f"device={name!r} is not a device; use 'cuda', 'cuda:N', 'cpu' or None") from e
    if wanted.type == "cpu":
        return CpuDevice()
    if wanted.type == "cuda":
        from gemini.memory.devices.cuda import CudaDevice, check_card, prefer_expandable_segments

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (wanted.index or 0) >= count:
            seen = f"{count} of them" if count else f"no CUDA device{_why_no_cuda()}"
            raise ValueError(f"device={name!r} was asked for, but torch sees {seen}; use device=None or 'cpu'")
        made = CudaDevice(wanted)
        prefer_expandable_segments()
        check_card(made.torch_device)
        return made
    raise ValueError(f"device={name!r} is not supported; use 'cuda', 'cuda:N', 'cpu' or None")
