"""The device that a benchmark measures: a GPU, or the stand-in on which every script can be tried without one.

All that is CUDA's own in these benchmarks is behind :class:`Card`, so that a run on the stand-in (``--device standin``)
executes everything but the few lines here. Times on a GPU are CUDA events on the current stream.
"""

import gc
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the stand-in is among the tests

import psutil
import torch

import tests.standin_device  # noqa: E402, F401 - "standin" is a device then
from gemini.memory.devices.cuda import prefer_expandable_segments  # noqa: E402
from gemini.memory.devices.device import make_device  # noqa: E402

HOST_SHARE = 0.86
"""Of host memory, what budgets may take if nobody says otherwise: the rest is for the interpreter, CUDA and caches."""


class Card:
    """``device`` is for ``GeminiConfig(device=)``, ``torch`` for tensors of forward."""

    def __init__(self, device: str = "cuda"):
        self.device = device
        self.real = device == "cuda"
        self.torch = "cuda" if self.real else "cpu"
        if self.real and not torch.cuda.is_available():
            raise SystemExit("torch sees no CUDA device; --device standin tries the script without one")
        if self.real:
            prefer_expandable_segments()  # for what runs without Gemini too

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.real else "the stand-in device"

    @property
    def slug(self) -> str:
        """``h200``"""
        words = re.findall(r"[a-z0-9]+", self.name.lower()) if self.real else ["standin"]
        return next((word for word in words if re.fullmatch(r"[a-z]+\d+\w*", word)), "-".join(words))

    @property
    def total_bytes(self) -> int:
        return torch.cuda.get_device_properties(0).total_memory if self.real else 2**30

    @property
    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0] if self.real else 2**30

    @property
    def beside_bytes(self) -> int:
        """Bytes of a GPU budget that nothing managed can have: the context, kernels and workspaces."""
        return make_device(self.device).beside_bytes()

    @property
    def tiny_budget(self) -> int:
        """Of a trial on this device: windows of a few pages, and on a GPU room beside them."""
        return self.beside_bytes + (2**27 if self.real else 2**20)

    def synchronize(self) -> None:
        if self.real:
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Collect garbage, give back what torch's allocator keeps, and count peaks from here."""
        gc.collect()
        if self.real:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, int]:
        """Bytes that torch handed out and kept at most since :meth:`forget`; nothing on the stand-in."""
        if not self.real:
            return {}
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}

    # ---- time -------------------------------------------------------------------------------------------------------

    def stamp(self) -> Any:
        """A moment in the current stream (on the stand-in, of the clock)."""
        if not self.real:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two stamps; waits for the second."""
        if not self.real:
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def time(self, run: Callable[[], object]) -> float:
        """Seconds of what ``run`` gives the device, which has nothing else to do."""
        self.synchronize()
        begin = self.stamp()
        run()
        return self.seconds(begin, self.stamp())


def host_budget(said: int | None) -> int:
    """Bytes of host memory for the budgets, as said or as a share of what there is."""
    return int(psutil.virtual_memory().total * HOST_SHARE) if said is None else said
