"""The CUDA face of gemini.kernels without a GPU: kernels that run on the host, and memory that the host may not read.

``EmulatedKernels`` is ``CudaKernels`` over a launcher that runs the bodies of the CUDA kernels thread after thread
(emulated_device.cpp), so that everything of Python that a GPU would run runs here, with its bits. What a
kernel leaves in device memory for the host (sums of squares, flags) is of a class that refuses every read before
``fetch`` has brought it, and ``fetch`` counts: how often a step waits for the device is a number. ``EmulatedGpu`` is
the stand-in device that knows which memory is the host's: what is not is worked on by those kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gemini import kernels
from gemini.kernels.cuda import CudaKernels
from tests.standin_device import StandinDevice

_ROOT = Path(__file__).resolve().parents[2]
# To compile takes longer than to run, and the bits are those of every level.
_FLAGS = ["-std=c++17", "-Og", "-ffp-contract=off", "-Wno-unknown-pragmas", "-shared", "-fPIC"]


@cache
def library() -> ctypes.CDLL:
    """The bodies, compiled once for all processes that find the same sources; needs g++."""
    source = Path(__file__).parent / "emulated_device.cpp"
    sources = [source, *sorted(path for path in (_ROOT / "csrc").rglob("*") if path.is_file())]
    texts = [repr(_FLAGS).encode(), *(path.read_bytes() for path in sources)]
    built = Path(tempfile.gettempdir(), f"gemini-{os.getuid()}-{hashlib.sha256(b''.join(texts)).hexdigest()[:16]}.so")
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            made = Path(folder) / "device.so"
            subprocess.run(["g++", *_FLAGS, str(source), "-o", str(made)], check=True, cwd=_ROOT)
            made.replace(built)
    return ctypes.CDLL(str(built))


class EmulatedLauncher:
    """Runs a kernel on host addresses, from the arguments that the driver would be given."""

    def __init__(self) -> None:
        self._library = library()
        self._library.run.restype = ctypes.c_char_p
        self.launches: Counter[str] = Counter()
        """By the function of gemini.kernels."""
        self.segments: list[int] = []
        """Of each update that is not compact."""

    def launch(self, device: int, stream: int, kernel: str, blocks: int, *arguments: Any) -> None:
        self.launches[function_of(kernel)] += 1
        if kernel.startswith("update_kernel"):
            self.segments.append(launch_in(arguments[0]).count)
        places = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        wrong = self._library.run(kernel.encode(), ctypes.c_int64(blocks), places)
        assert wrong is None, (kernel, wrong)


class ArraysThere(ctypes.Structure):
    """Arrays of csrc/rules.h."""

    _fields_ = (
        ("weights", ctypes.c_void_p), ("residual", ctypes.c_void_p), ("grad", ctypes.c_void_p),
        ("num_states", ctypes.c_int), ("states", ctypes.c_void_p * 4), ("scales", ctypes.c_void_p * 4),
    )  # fmt: skip


@cache
def launch_type(num_scalars: int) -> type[Any]:
    """Launch of csrc/cuda/update_body.cuh, of a rule with so many scalars."""

    class Part(ctypes.Structure):
        _fields_ = (("begin", ctypes.c_int64), ("end", ctypes.c_int64), ("rule", ctypes.c_float * num_scalars))

    class Launch(ctypes.Structure):
        _fields_ = (
            ("arrays", ArraysThere), ("grad_scale", ctypes.c_void_p), ("stop", ctypes.c_void_p),
            ("count", ctypes.c_int), ("segments", Part * 44), ("dithers", ctypes.c_uint32 * 44),
            ("first_block", ctypes.c_int64 * 45),
        )  # fmt: skip

    return Launch


def launch_in(argument: Any) -> Any:
    """The argument of an update, as a struct of its own."""
    found = next(launch_type(n) for n in range(1, 16) if ctypes.sizeof(launch_type(n)) == ctypes.sizeof(argument))
    return found.from_buffer_copy(argument)


_FUNCTIONS = {
    "update": "update", "compact": "update_compact", "split": "split_master", "join": "join_master",
    "clip": "clip_factor", "read": "sum_squares", "copy": "copy_grad", "widen": "copy_grad",
    "accumulate": "accumulate_grad", "first24": "sum_grad24", "add24": "sum_grad24",
}  # fmt: skip


def doing(kernel: str) -> str:
    """What a kernel does: its name, or of a gradient's kernel the first of its template arguments."""
    found = re.match(r"grad_kernel<gemini::cuda::Doing::(\w+)", kernel)
    return found[1] if found else kernel.partition("_kernel")[0]


def function_of(kernel: str) -> str:
    """The function of gemini.kernels that launches it."""
    return _FUNCTIONS[doing(kernel)]


_READS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__bool__,
    torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.__repr__, torch.equal,
    torch.Tensor.equal, torch.Tensor.nonzero, torch.nonzero, torch.Tensor.is_nonzero, torch.allclose,
}  # fmt: skip


class OnDevice(torch.Tensor):
    """Memory of the device: what torch computes from it stays there, and the host cannot look at it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise AssertionError(f"the host read device memory ({func.__name__}) without waiting for it")
        return super().__torch_function__(func, types, args, kwargs or {})


class EmulatedKernels(CudaKernels):
    """Also counts: ``num_fetched`` are the tensors that each wait of the host brought."""

    def __init__(self) -> None:
        self.module = EmulatedLauncher()
        super().__init__(self.module)
        self.num_fetched: list[int] = []

    @property
    def num_fetches(self) -> int:
        return len(self.num_fetched)

    def stream(self, device: torch.device) -> None:
        return None

    def make_tiles(self, tensor: Tensor) -> Tensor:
        return super().make_tiles(tensor).as_subclass(OnDevice)

    def clip_factor(self, many: Sequence[Sequence[Tensor]], max_norm: float) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C.DisableTorchFunctionSubclass():  # the norm is the program's, who may wait for it
            norm, factor, nonfinite = super().clip_factor(many, max_norm)
        return norm.as_subclass(Tensor), factor.as_subclass(OnDevice), nonfinite.as_subclass(OnDevice)

    def fetch(self, tensors: Sequence[Tensor]) -> list[float]:
        self.num_fetched.append(len(tensors))
        with torch._C.DisableTorchFunctionSubclass():
            return super().fetch(tensors)


class EmulatedGpu(StandinDevice):
    """The stand-in, which knows the host's memory from its own."""

    def __init__(self, **how: Any):
        super().__init__(**how)
        self._of_host: list[tuple[int, int]] = []

    def make_host_buffer(self, num_bytes: int) -> Tensor:
        buffer = super().make_host_buffer(num_bytes)
        self._of_host.append((buffer.data_ptr(), buffer.data_ptr() + num_bytes))
        return buffer

    def holds(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return not any(begin <= address < end for begin, end in self._of_host)


def emulate(monkeypatch: pytest.MonkeyPatch, gpu: EmulatedGpu | None = None) -> EmulatedKernels:
    """From now on tensors of ``gpu`` (without one: all tensors) are worked on by the bodies of the CUDA kernels."""
    emulated = EmulatedKernels()
    monkeypatch.setattr(kernels, "_cuda_for", lambda tensor: emulated if gpu is None or gpu.holds(tensor) else None)
    return emulated
