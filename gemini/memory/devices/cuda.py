"""One NVIDIA GPU behind the device contract: copy streams, CUDA events, registered host memory.

A copy stream of the contract is one CUDA stream, and no two share one, so that weights on their way in and gradients on
their way out run at the same time and wait for nothing of each other's. A copy comes after what the
computing streams were given before it, or only after the event that it is told to come after; by events and not by
waiting, so host code goes on at once. Who reads the copied bytes on the GPU lets the computing stream wait
(``Event.wait_on_device``), who reads them on the host waits itself.

Three things need care. Copies are asynchronous only from and to page-locked memory, so host buffers are cut out of
registered stretches (:mod:`gemini.memory.devices.pinned`). The caching allocator knows nothing of copy streams: windows
keep the order of their blocks themselves (:mod:`gemini.memory.devices.cuda_windows`, with the whole argument), and
other tensors are recorded on the stream of the copy. And the current device is a setting of each thread, so nothing
here relies on it: worker threads may call everything.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gemini import kernels
from gemini.errors import BudgetExceeded, GeminiError, human_bytes, warn
from gemini.interrupts import WHOLE, call_without_grad
from gemini.memory.devices.cuda_windows import SMALL, CopyStream, CudaEvent, CudaWindow, WindowMemory
from gemini.memory.devices.device import Device, Event, copy_each
from gemini.memory.devices.pages import PAGE, Window, host_bytes
from gemini.memory.devices.pinned import PinnedArena
from gemini.memory.system import memory_nodes, node_of_pci
from gemini.planning.planes import ADAM, RuleSpec
from gemini.planning.working import CUDA_CONTEXT, CUDA_KERNELS, allocator_bytes
from gemini.tiers import Tier

_STREAMS_OF_TORCH = 32
"""How many streams torch has for a device before it gives the first one again."""


class _OfThread(threading.local):
    is_beside = False  # whether the calling thread computes on a stream beside the computing one


class CudaDevice(Device):
    """One NVIDIA GPU. Any thread may call it; what it keeps is changed under its lock."""

    name = "cuda"
    tier = Tier.GPU

    def __init__(self, torch_device: torch.device):
        index = torch_device.index if torch_device.index is not None else _own_gpu()
        self.torch_device = torch.device("cuda", index)
        self.pinned = PinnedArena(self.torch_device, _node_of(self.torch_device))
        self._nodes = memory_nodes()
        # Reentrant: `copy` and `mark` ask for the computing streams under it.
        self.lock = threading.RLock()
        self._copying: dict[str, CopyStream] = {}
        self._beside: dict[str, torch.cuda.Stream] = {}
        self._own: set[int] = set()  # handles of the streams that were made here
        self._of_thread = _OfThread()
        # By storage: a copy finds the window whose memory it touches, to wait for the last use of it.
        self._windows: weakref.WeakValueDictionary[int, CudaWindow] = weakref.WeakValueDictionary()
        self.computing: dict[int, torch.cuda.Stream] = {}
        self._memory = WindowMemory(self)
        self._was_refused = False  # host memory, by the driver: it is told once
        self._before = 0  # bytes of tensors that were there before the model
        self._aside = allocator_bytes(ADAM)  # of the budget for what torch's allocator takes beside
        self.keeps_windows = self._memory.is_private

    # ---- memory -------------------------------------------------------------------------------------------------

    def make_window(self, num_bytes: int) -> Window:
        window = CudaWindow(num_bytes, self.torch_device, self._memory)
        self._windows[_storage(window.bytes)] = window
        return window

    def reserve_windows(self, num_bytes: int) -> None:
        self._memory.reserve(num_bytes)

    def has_place(self, num_bytes: int) -> bool:
        return self._memory.has_place(num_bytes)

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def reserve_buffers(self, sizes: Iterable[int]) -> None:
        large = sum(num_bytes for num_bytes in sizes if num_bytes > SMALL)
        if large and torch.cuda.memory_stats(self.torch_device).get("max_split_size", -1) <= 0:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):  # then each comes on its own, rounded to 2 MiB
                # Got and let go at once: the allocator keeps the segment, and cuts the buffers out of it.
                torch.empty(large, dtype=torch.uint8, device=self.torch_device)

    def beside_bytes(self, rule: RuleSpec = ADAM) -> int:
        said = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        own = sum(2**10 * int(size) * int(count) for size, count in said)
        self._aside = allocator_bytes(rule, torch.cuda.get_device_capability(self.torch_device), own)
        return min(_elsewhere(self.torch_device), CUDA_CONTEXT) + CUDA_KERNELS + self._aside

    def fragments_percent(self) -> int:
        if torch.cuda.get_allocator_backend() != "native":
            return 0  # the driver's, which maps memory page by page
        return 0 if torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"] else FRAGMENTS

    def begin_budget(self, budget: int | None, reserved: int, freed: int, *, limited: bool) -> None:
        if budget is not None:
            check_room(self.torch_device, budget, reserved, freed)
        limit(self, self.torch_device, budget if limited else None)
        self._before = max(torch.cuda.memory_allocated(self.torch_device) - freed, 0)

    def reserve_host(self, planes: Sequence[tuple[str, int]]) -> None:
        if mmap.PAGESIZE != PAGE:
            return
        sizes = [size for _, size in planes]
        count, why = self.pinned.reserve(sizes)
        if why is not None:
            took, left = human_bytes(sum(sizes[:count])), human_bytes(sum(sizes[count:]))
            self._tell_refusal(f"{why}: it took {took}, and not the {left} from {planes[count][0]} on")
        else:  # refusals there may have been, of stretches that it took in smaller ones
            _forget_error(self.torch_device)

    def make_kept_buffer(self, num_bytes: int) -> torch.Tensor:
        # Read and written by the threads of updates, wherever they run: all memory controllers share it.
        return host_bytes(num_bytes, self._nodes)

    def make_host_buffer(self, num_bytes: int) -> torch.Tensor:
        if mmap.PAGESIZE == PAGE:
            try:
                return self.pinned.take(num_bytes)
            except (RuntimeError, MemoryError) as e:
                self._tell_refusal(str(e))
        return super().make_host_buffer(num_bytes)

    def copies_beside(self, memory: torch.Tensor) -> bool:
        return memory.is_pinned()

    def _tell_refusal(self, why: str) -> None:
        # Before anything is launched: the next kernel would raise it as its own.
        _forget_error(self.torch_device)
        if not self._was_refused:
            self._was_refused = True
            warn(
                f"host memory cannot be registered with the CUDA driver ({why}): copies of what is refused are slower "
                "and wait for each other. Free host memory (under WSL2 at most half of it can be registered), or give "
                "a smaller cpu= budget"
            )

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free

    def memory_figures(self) -> dict[str, int]:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return {
            "allocated": torch.cuda.memory_allocated(self.torch_device),
            "allocated_peak": torch.cuda.max_memory_allocated(self.torch_device),
            "reserved": torch.cuda.memory_reserved(self.torch_device),
            "reserved_peak": torch.cuda.max_memory_reserved(self.torch_device),
            "driver": total - free,
        }

    def reserved_beyond(self, known: int) -> int:
        if sum(index == self.torch_device.index for index, _ in _limits.values()) > 1:
            return 0  # of another model there, whose bytes are not known here
        return max(torch.cuda.memory_reserved(self.torch_device) - self._before - self._aside - known, 0)

    # ---- order --------------------------------------------------------------------------------------------------

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
        if after is not None and not isinstance(after, CudaEvent):
            after.wait()  # of the host: nothing on the GPU could wait for it
        with self.lock, torch.cuda.device(self.torch_device):
            on, in_flight = self._copy_stream(stream, behind_computing=behind_computing)
            if isinstance(after, CudaEvent):
                after.hold_back(on)
            windows = [self._windows.get(_storage(tensor)) if tensor.is_cuda else None for tensor in (into, source)]
            for window in windows:
                if window is not None:
                    # Others may have used the block before this window: the copy comes after them.
                    window.let_follow(on)
            plain = into.dtype == source.dtype and into.is_contiguous() and source.is_contiguous()
            # A copy that nothing tells of would work on memory which others get: Ctrl-C waits for the notes.
            with WHOLE:
                with torch.cuda.stream(on):
                    # Not plain: torch goes through copies of its own.
                    call_without_grad(into.copy_, source, non_blocking=plain)
                event = CudaEvent(self.torch_device, on, "a copy")
                for tensor, window in zip((into, source), windows, strict=True):
                    # The memory is not given to others while the copy works on it. For windows not by
                    # ``record_stream``, which frees a block behind everything that the stream was given until then, the
                    # copies far ahead too.
                    if window is not None:
                        window.touched[stream] = event
                    elif tensor.is_cuda and not kept:
                        tensor.record_stream(on)
                # The engines use host memory after this returns; nothing but these references keeps it there.
                in_flight.append((event, [tensor for tensor in (into, source) if not tensor.is_cuda]))
        return event

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: str) -> Event:
        with self.lock, torch.cuda.device(self.torch_device), WHOLE:  # as in `copy`
            on, in_flight = self._copy_stream(stream, behind_computing=True)
            with torch.cuda.stream(on):
                try:
                    call_without_grad(copy_each, pairs, non_blocking=True)
                except BaseException:
                    # Some are under way, and who gave the pairs lets go of them.
                    CudaEvent(self.torch_device, on, "a copy").wait_until_over()
                    raise
            event = CudaEvent(self.torch_device, on, "a copy")
            in_flight.append((event, [tensor for pair in pairs for tensor in pair if not tensor.is_cuda]))
        return event

    def _copy_stream(self, name: str, *, behind_computing: bool) -> CopyStream:
        """The copy stream of that name, behind what was given to compute before or not. Under the lock."""
        if name not in self._copying:
            self._copying[name] = CopyStream(self.new_stream(), deque())
        on, in_flight = self._copying[name]
        # References to what was copied go here, and not when copies end: nobody is told of that.
        while in_flight and in_flight[0][0].is_complete():
            in_flight.popleft()
        # What is copied out may still be computed, and what is copied over may still be read.
        if behind_computing:
            for computing in self.computing_streams():
                on.wait_event(computing.record_event())
        return self._copying[name]

    def host_sums(self, areas: Sequence[torch.Tensor]) -> Callable[..., tuple[Event, Event, Any]] | None:
        with self.lock, torch.cuda.device(self.torch_device):
            self._copy_stream("sum", behind_computing=True)  # the context is this thread's from here on
            # A copy to memory that is not registered would be waited for where it is begun.
            through = kernels.host_sums(areas) if all(map(self.copies_beside, areas)) else None
        return None if through is None else partial(self._land_by_host, through, areas)

    def _land_by_host(
        self,
        through: Any,
        areas: Sequence[torch.Tensor],
        source: torch.Tensor,
        *how: Any,
        behind_computing: bool = True,
    ) -> tuple[Event, Event, Any]:
        with self.lock, torch.cuda.device(self.torch_device), WHOLE:  # as in `copy`
            leaving, _ = self._copy_stream("evict", behind_computing=behind_computing)
            adding, in_flight = self._copy_stream("sum", behind_computing=False)
            try:
                sums = kernels.land_by_host(through, leaving.cuda_stream, adding.cuda_stream, source, *how)
            except BaseException:
                # What it was given before is under way, in memory that the caller may let go of now.
                self.synchronize()
                raise
            landed = CudaEvent(self.torch_device, adding, "a sum of gradients")
            in_flight.append((landed, [*areas, *(memory for memory in how if isinstance(memory, torch.Tensor))]))
            return CudaEvent(self.torch_device, leaving, "a copy"), landed, sums

    def mark(self) -> Event:
        with self.lock, torch.cuda.device(self.torch_device):
            # So that this thread's stream is known: windows that go later are behind it.
            self.computing_streams()
            return CudaEvent(self.torch_device, torch.cuda.current_stream(self.torch_device), "the computation")

    def stream_number(self) -> int:
        return torch.cuda.current_stream(self.torch_device).cuda_stream

    def computes_here(self) -> None:
        if self.stream_number() not in self.computing:  # known ones stay known, so this needs no lock
            self.computing_streams()

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        with self.lock, torch.cuda.device(self.torch_device):
            if name not in self._beside:
                self._beside[name] = self.new_stream()
            # One stream for each name, for all threads: work of one name is in order.
            stream = self._beside[name]
        # For as long as this thread is inside: its current stream must not be taken for a computing one.
        before, self._of_thread.is_beside = self._of_thread.is_beside, True
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self._of_thread.is_beside = before

    def launch(self, call: Callable[[], None], stream: str, memory: torch.Tensor, after: Event) -> Event:
        with self.beside(stream), WHOLE:  # as in `copy`
            after.wait_on_device()
            on = torch.cuda.current_stream(self.torch_device)
            with self.lock:
                window = self._windows.get(_storage(memory))
                if window is not None:
                    window.let_follow(on)
            call()  # not under the lock: it may wait for other processes
            with self.lock:
                event = CudaEvent(self.torch_device, on, "a collective")
                if window is not None:
                    window.touched[stream] = event
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        # First, and whatever fails below: the limit of the allocator is the process's.
        if _limits.pop(self, None) is not None:
            _apply(self.torch_device)
        with self.lock:
            copying, self._copying = self._copying, {}
        try:
            if copying or self.computing:
                self.synchronize()  # computing too: windows may have gone without giving their blocks back in order
        finally:
            for streams in copying.values():
                # Behind the wait above: these references are all that keeps host memory of copies.
                streams.in_flight.clear()
            # Last: no copy may be under way in memory that the driver is told to forget.
            self.pinned.close()

    def computing_streams(self) -> list[torch.cuda.Stream]:
        """The streams on which this device was ever seen to compute: the calling thread's, and those before."""
        with self.lock:
            if not self._of_thread.is_beside:
                stream = torch.cuda.current_stream(self.torch_device)
                # Kept for good: a stream that has computed once may still have work that reads a window.
                self.computing.setdefault(stream.cuda_stream, stream)
            return list(self.computing.values())

    def new_stream(self) -> torch.cuda.Stream:
        """One that nothing of this device runs on: torch hands out a few dozen in turn, and then the first again."""
        with self.lock:
            taken = self._own | set(self.computing)
            stream = torch.cuda.Stream(self.torch_device)
            # Once around all that torch has; then two share one, which costs time and no correctness.
            for _ in range(_STREAMS_OF_TORCH):
                if stream.cuda_stream not in taken:
                    break
                stream = torch.cuda.Stream(self.torch_device)
            self._own.add(stream.cuda_stream)
            return stream


_CONFS = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
_GROWING = "expandable_segments:True"

FRAGMENTS = 15
"""Percent that segments of fixed sizes lose: on average of eight language models (GMLake, ASPLOS 2024)."""


def prefer_expandable_segments() -> str:
    """Have torch grow segments from now on (no fragments; it asks at each allocation, so CUDA may be in use already),
    unless the program has set its allocator up: what became of it, in words.
    """
    said = next((f"{name}={os.environ[name]}" for name in _CONFS if name in os.environ), None)
    if said is None and (backend := torch.cuda.get_allocator_backend()) != "native":
        said = f"{backend}, which the program has taken"
    # How it was last told while it ran: the call below would put that back to what it is by default.
    said = said or torch.cuda.memory._snapshot()["allocator_settings"][_CONFS[0]]
    if not said:
        torch._C._accelerator_setAllocatorSettings(_GROWING)
    return said or f"{_GROWING}, which Gemini sets"


def check_card(device: torch.device) -> None:
    """Try the card now, not in the first backward. GeminiError: torch has no code for it, or its driver takes none."""
    try:
        torch.zeros(1, device=device).add_(1).tolist()
    except torch.OutOfMemoryError:
        raise  # others have all of it
    except RuntimeError as e:
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise GeminiError(
            f"{device} ({name}, compute capability {major}.{minor}) does not run what torch {torch.__version__} gives "
            f"it: {str(e).partition(chr(10))[0]}. This build has code for {', '.join(torch.cuda.get_arch_list())}: "
            "install one for this card and its driver, or use device='cpu'"
        ) from e
    # Warns, once, if our own kernels do not run there.
    kernels.why_not_cuda(device)


def _node_of(device: torch.device) -> int | None:
    """The NUMA node that the card is at, if there are several."""
    if len(memory_nodes()) < 2:
        return None
    card: Any = torch.cuda.get_device_properties(device)  # torch's own description lacks some of its names
    return node_of_pci(f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0")


def _forget_error(device: torch.device) -> None:
    """A refused call stays the runtime's "last error", which torch's next kernel launch, whichever, would raise."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


def _storage(tensor: torch.Tensor) -> int:
    """The identity of the memory that views share, also while there is none."""
    return tensor.untyped_storage()._cdata


def _own_gpu() -> int:
    """The GPU of this process: as torchrun counts processes on a machine, unless the program chose another already.
    Current from then on: ``batch.to("cuda")`` finds the model, and GPU 0 gets no context of every rank.
    """
    current, local = torch.cuda.current_device(), int(os.environ.get("LOCAL_RANK", 0))
    if current != 0 or local == 0 or local >= torch.cuda.device_count():
        return current
    torch.cuda.set_device(local)
    return local


# ---- the budget against what the driver says -------------------------------------------------------------------------

# ``gpu=`` is the whole of what the process may take. Not all of it is handed out by torch's allocator: a CUDA context
# and the kernels in it are the driver's, so the ledger holds them ("context") before anything else. What the allocator
# takes beyond what it hands out (whole segments, fragments) has no holder; that it stays inside the budget is torch's
# own limit for the process, at which it gives back what it has cached before it asks for more.
#
#     context + kernels + reserved by torch <= gpu=
#
# Plans leave room for the same (:func:`gemini.planning.working.beside_bytes`).

# By owner: the number of its device, and the bytes that the allocator may reserve for it; None: as many as there are.
_limits: weakref.WeakKeyDictionary[object, tuple[int, int | None]] = weakref.WeakKeyDictionary()


def _elsewhere(device: torch.device) -> int:
    """Bytes in use on a device that this process's torch allocator has not reserved: contexts, and other programs."""
    free, total = torch.cuda.mem_get_info(device)
    return max(total - free - torch.cuda.memory_reserved(device), 0)


def check_room(device: torch.device, budget: int, reserved: int, freed: int) -> None:
    """Compare a budget with what there is, where ``freed`` bytes of tensors are about to go: a warning if it can never
    be had in full, BudgetExceeded if there are less than ``reserved``, which are needed at once.
    """
    free, total = torch.cuda.mem_get_info(device)
    allocated, kept = torch.cuda.memory_allocated(device) - freed, torch.cuda.memory_reserved(device)
    has = free + kept - allocated + min(_elsewhere(device), CUDA_CONTEXT + CUDA_KERNELS)
    if has >= budget:
        return
    others = max(_elsewhere(device) - CUDA_CONTEXT, 0)
    holders = []
    if allocated > 0:
        holders.append(f"tensors of this program that are not managed hold {human_bytes(allocated)}")
    if others:
        holders.append(f"other programs hold {human_bytes(others)} or more (nvidia-smi names them)")
    told = (
        f"the gpu budget is {human_bytes(budget)}, but {human_bytes(has)} of the {human_bytes(total)} of {device} "
        f"can be had: {' and '.join(holders) or 'it is no larger'}"
    )
    if has < reserved:
        raise BudgetExceeded(f"{told}. {human_bytes(reserved)} are needed at once: free some, or lower the gpu budget")
    warn(f"{told}. Lower the gpu budget to that, or free some")


def limit(owner: object, device: torch.device, budget: int | None) -> None:
    """Let the allocator reserve no more than its owners' budgets, and what there was before them, until they end."""
    assert device.index is not None
    # Cached segments count as reserved: left there, they would be in the way of the limit.
    torch.cuda.empty_cache()
    # What the program had before the first model is not the models'. Counted once: later owners would count the first
    # model's memory.
    is_first = all(index != device.index for other, (index, _) in _limits.items() if other is not owner)
    before = torch.cuda.memory_allocated(device) if is_first else 0
    is_new = owner not in _limits
    # What is in use there is this process's and not torch's up to the size of a context, as far as one can tell.
    beside = min(_elsewhere(device), CUDA_CONTEXT) + CUDA_KERNELS
    _limits[owner] = device.index, None if budget is None else before + budget - beside
    # An owner that is collected without `close` must not limit the process for ever.
    if is_new:
        weakref.finalize(owner, _apply, device).atexit = False
    _apply(device)


def _apply(device: torch.device) -> None:
    """Set the allocator's limit to the sum of what the owners may have; none if one of them needs no limit."""
    allowed = [num_bytes for index, num_bytes in _limits.values() if index == device.index]
    total = torch.cuda.get_device_properties(device).total_memory
    known = [num_bytes for num_bytes in allowed if num_bytes is not None]
    is_limited = bool(known) and len(known) == len(allowed)
    torch.cuda.set_per_process_memory_fraction(min(sum(known) / total, 1.0) if is_limited else 1.0, device)
