"""A GPU for machines without one, for tests and benchmarks.

The GPU has its own memory and byte budget, and copies that are not complete at once: they run on threads behind a clock
that tests control. Importing this module makes it the device that ``device="standin"`` names.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch

from gemini.interrupts import WHOLE, call_without_grad
from gemini.memory.devices.device import CpuDevice, Event, register_device
from gemini.memory.movement.transfers import Job, JobThread, Worker
from gemini.tiers import Tier


class _Copy(Job):
    """A copy under way. As of a GPU, one that failed says so in a GeminiError."""

    what = "a copy"
    wait = Event.wait


class _Stream(Worker):
    """The last reference to a device may go with a copy, for which its end does not wait: it ends as ever."""

    _end_here = JobThread._end_here


class StandinDevice(CpuDevice):
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
        self._streams: dict[str, _Stream] = {}

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
        gate, poison, job = self._gate, self._poison, _Copy(0.0)
        if poison and after is None:
            _fill_with_nan(into)

        def run() -> None:  # knows nothing of the device: a copy under way does not keep it alive
            gate(stream)
            if after is not None:
                after.wait()
                if poison:
                    _fill_with_nan(into)
            with torch.inference_mode(into.is_inference()):
                call_without_grad(into.copy_, source)

        job.run = run
        with WHOLE, self._lock:
            if stream not in self._streams:
                self._streams[stream] = _Stream(stream)
            self._streams[stream].put(job)
        return job

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)  # as a GPU's, its storage can be resized

    def free_bytes(self) -> int:
        return self._memory

    def synchronize(self) -> None:
        """Wait until every copy that was begun is over, whatever became of it."""
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.submit(lambda: None).wait_until_over()

    def close(self) -> None:
        close_gate = getattr(self._gate, "close", None)
        if close_gate is not None:
            close_gate()
        with self._lock:
            streams, self._streams = self._streams, {}
        for stream in streams.values():
            # What was begun is made first; but the last reference may go with a copy, and no thread waits for itself.
            if not stream.is_own_thread:
                stream.submit(lambda: None).wait_until_over()
            stream.close()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending() and hasattr(self, "_streams"):
            self.close()


def _fill_with_nan(tensor: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()):
        if tensor.is_contiguous():
            call_without_grad(lambda: tensor.view(-1).view(torch.uint8).fill_(255))


register_device("standin", StandinDevice)
