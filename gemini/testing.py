"""What tests and benchmarks need and no user: a GPU for machines without one.

The GPU has its own memory and byte budget, and copies that are not complete at once: they run on threads behind a clock
that tests control. Importing this module, which nothing of the product does, makes it the device that
``device="standin"`` names.
"""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections.abc import Callable

import torch

from gemini.interrupts import WHOLE, call_without_grad
from gemini.memory.devices.device import Event, HostMemoryDevice, register_device
from gemini.patches import register
from gemini.tiers import Tier

END_SECONDS = 10.0
"""How long the end of a device waits for each of its streams."""


class StandinDevice(HostMemoryDevice):
    """A GPU for machines without one: its own tier and budget, computed on by the CPU, with copies that take time.
    ``memory``: bytes it pretends to have when no ``gpu=`` budget is given. ``gate``: called on the stream's thread
    before each copy is made, with the stream's name; it may block (a test's clock), and is closed with the device if
    it has a ``close``. ``poison``: fill what a copy will overwrite with 0xFF (NaN, in every float) as soon as the copy
    may begin, so that one who reads it before the copy is complete is found out whatever was there before.
    """

    name = "standin"
    tier = Tier.GPU
    keeps_windows = True

    def __init__(self, memory: int = 2**30, gate: Callable[[str], None] | None = None, *, poison: bool = False):
        super().__init__()
        self._memory = memory
        self._gate = gate or (lambda stream: None)
        self._poison = poison
        self._lock = threading.Lock()
        self._streams: dict[str, _CopyStream] = {}
        _live.add(self)

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
        event, gate, poison, ends = Event(), self._gate, self._poison, [into, source]
        if poison and after is None:
            _fill_with_nan(into)

        def run() -> None:  # knows nothing of the device: a copy under way does not keep it alive
            try:
                gate(stream)
                if after is not None:
                    after.wait()
                    if poison:
                        _fill_with_nan(ends[0])
                with torch.inference_mode(ends[0].is_inference()):
                    call_without_grad(ends[0].copy_, ends[1])
                ends.clear()  # before it is over: then their memory is their owners' alone
            except BaseException as e:  # surfaces in wait(): a stream never dies
                event.finish(e)
            else:
                event.finish()

        with WHOLE, self._lock:
            if stream not in self._streams:
                self._streams[stream] = _CopyStream(stream)
            self._streams[stream].put(run)
        return event

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)  # as a GPU's, its storage can be resized

    def free_bytes(self) -> int:
        return self._memory

    def close(self) -> None:
        close_gate = getattr(self._gate, "close", None)
        if close_gate is not None:
            close_gate()
        with self._lock:
            streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending() and hasattr(self, "_streams"):
            self.close()


class _CopyStream:
    """A thread that runs jobs in order. The thread knows only the queue, so an abandoned stream can be ended."""

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name=f"gemini-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def end(self) -> None:
        """Let what was put be done, then end the thread, and see it ended (unless it is the caller's own)."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(END_SECONDS)


def _run_jobs(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # its tensors go now, not with the next job


def _fill_with_nan(tensor: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()):
        if tensor.is_contiguous():
            call_without_grad(lambda: tensor.view(-1).view(torch.uint8).fill_(255))


_live: weakref.WeakSet[StandinDevice] = weakref.WeakSet()


def _end_all() -> None:
    """A daemon thread that is inside torch when the interpreter goes away aborts the process."""
    for device in list(_live):
        device.close()


register("atexit.register", _end_all)
register_device("standin", StandinDevice)
