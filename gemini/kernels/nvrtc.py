"""The CUDA kernels of csrc/cuda, compiled by NVRTC, which comes with torch, for the card that is there: without nvcc.
Each is compiled when first launched, and kept as a file with a checksum (``GEMINI_CACHE``, else ``~/.cache/gemini``)
whose name says text, kernel, architecture and compiler. What cannot be read or written is compiled again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gemini.errors import StorageError
from gemini.replacing import atomic_write

THREADS = 256  # of a block: kThreads in csrc/cuda/update_body.cuh

# The kernels' arithmetic is written in intrinsics that are never contracted; the options say the same to the rest.
OPTIONS = ("--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")

_SPACE = "gemini::cuda::"


# ---- the text --------------------------------------------------------------------------------------------------------


def sources() -> Path:
    """The folder of the kernels' text: beside this file where Gemini is installed, else in the checkout."""
    installed = Path(__file__).parent / "csrc"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "csrc"


@cache
def text() -> str:
    """All kernels in one text without includes: NVRTC has no headers."""
    found = {"isa.h"}  # the prelude says what device code needs of it

    def lines(path: Path) -> Iterator[str]:
        for line in path.read_text().splitlines():
            if match := re.fullmatch(r'#include "(.+)"', line):
                included = path.parent / match[1]
                if included.name not in found:
                    found.add(included.name)
                    yield from lines(included)
            elif not re.match(r"#include <|#pragma once", line):
                yield line

    folder = sources() / "cuda"
    return "\n".join(line for name in ("prelude.cuh", "update.cu", "grad.cu") for line in lines(folder / name))


# ---- the compiler ----------------------------------------------------------------------------------------------------


class Compiler:
    """NVRTC: ``library``, or the one that torch brings. Raises RuntimeError if that is not there."""

    def __init__(self, library: ctypes.CDLL | None = None):
        self._library = library or _load_nvrtc()
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        known = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(known))
        self.architectures = tuple(known)
        """Those that it can compile for, as 10 * major + minor of a compute capability."""

    def target(self, capability: tuple[int, int]) -> str:
        """Machine code for a card that is known, else text that newer drivers compile. RuntimeError for older cards."""
        wanted = 10 * capability[0] + capability[1]
        older = [known for known in self.architectures if known <= wanted]
        if not older:
            raise RuntimeError(
                f"NVRTC {self.version} compiles for compute capability {min(self.architectures) / 10} and later, and "
                f"this card has {capability[0]}.{capability[1]}"
            )
        return f"sm_{wanted}" if wanted in older else f"compute_{max(older)}"

    def compile(self, kernel: str, target: str) -> tuple[str, bytes]:
        """The symbol and the code of one kernel, named with its template arguments. RuntimeError: what NVRTC said."""
        program, name = ctypes.c_void_p(), f"&{_SPACE}{kernel}".encode()
        library, source = self._library, text().encode()
        self._check(library.nvrtcCreateProgram(ctypes.byref(program), source, b"gemini.cu", 0, None, None))
        try:
            self._check(library.nvrtcAddNameExpression(program, name))
            options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture={target}")]
            failed = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
            if failed:
                said = self._taken(program, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)
                raise RuntimeError(f"NVRTC {self.version} cannot compile {kernel}: {said.decode(errors='replace')}")
            symbol = ctypes.c_char_p()
            self._check(library.nvrtcGetLoweredName(program, name, ctypes.byref(symbol)))
            assert symbol.value is not None
            kind = "CUBIN" if target.startswith("sm_") else "PTX"
            code = self._taken(program, getattr(library, f"nvrtcGet{kind}Size"), getattr(library, f"nvrtcGet{kind}"))
            return symbol.value.decode(), code
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _taken(self, program: ctypes.c_void_p, size_of: Callable[..., int], get: Callable[..., int]) -> bytes:
        size = ctypes.c_size_t()
        self._check(size_of(program, ctypes.byref(size)))
        into = ctypes.create_string_buffer(size.value)
        self._check(get(program, into))
        return into.raw

    def _check(self, error: int) -> None:
        if error:
            raise RuntimeError(f"NVRTC: {self._library.nvrtcGetErrorString(error).decode()}")


@cache
def compiler() -> Compiler:
    """The compiler of this process. Raises RuntimeError if there is none."""
    return Compiler()


def load(path: Path) -> ctypes.CDLL:
    """The library at a path, or of a bare name where the system finds it. Raises OSError if it cannot be loaded."""
    # NVRTC opens it by its bare name when it compiles, and finds what is loaded already.
    for beside in path.parent.glob("libnvrtc-builtins*.so*") if path.is_absolute() else ():
        ctypes.CDLL(str(beside))
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _load_nvrtc() -> ctypes.CDLL:
    """The library of torch's own CUDA release: by its name where the system knows it, else beside torch."""
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is not built for CUDA")
    major = torch.version.cuda.partition(".")[0]
    packages = Path(torch.__file__).parents[1]
    places = [packages.glob(f"nvidia/*/lib/libnvrtc.so.{major}"), packages.glob("torch/lib/libnvrtc-*.so.*")]
    for path in (Path(f"libnvrtc.so.{major}"), *(path for place in places for path in sorted(place))):
        with contextlib.suppress(OSError):
            return load(path)
    raise RuntimeError(
        f"libnvrtc.so.{major} is not there, neither in {packages} nor on the system's path: "
        f"`pip install nvidia-cuda-nvrtc` (for CUDA {major}) brings it"
    )


# ---- what was compiled before ----------------------------------------------------------------------------------------


def code_of(kernel: str, capability: tuple[int, int]) -> tuple[str, bytes]:
    """The symbol and the code of a kernel for a card, compiled now if it was not before. Raises RuntimeError."""
    made_by = compiler()
    target = made_by.target(capability)
    key = "\0".join((text(), kernel, target, made_by.version, *OPTIONS))
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemini"
    folder = Path(os.environ.get("GEMINI_CACHE") or usual).expanduser() / "kernels"
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.{target}"
    found = _read(path)
    if found is None:
        found = made_by.compile(kernel, target)
        _write(path, *found)
    return found


def _read(path: Path) -> tuple[str, bytes] | None:
    with contextlib.suppress(OSError, ValueError):
        digest, symbol, code = path.read_bytes().split(b"\n", 2)
        # A file that a crash of the machine cut short, or somebody wrote into, is compiled again.
        if hashlib.sha256(symbol + b"\n" + code).hexdigest().encode() == digest:
            return symbol.decode(), code
    return None


def _write(path: Path, symbol: str, code: bytes) -> None:
    """Put a file into place whole: other processes read and write the same ones."""
    body = symbol.encode() + b"\n" + code
    # A full disk, a home that cannot be written: compiled again next time.
    with contextlib.suppress(OSError, StorageError), atomic_write(path) as draft:
        draft.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


# ---- the driver ------------------------------------------------------------------------------------------------------


class Driver:
    """Loads kernels on devices and launches them, by the CUDA driver that torch uses. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: Any = None
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._functions: dict[tuple[int, str], ctypes.c_void_p] = {}

    def launch(self, device: int, stream: int, kernel: str, blocks: int, *arguments: Any) -> None:
        """Enqueue a kernel of THREADS threads a block; nothing waits, but the first launch of a kernel compiles it.
        ``arguments``: values of ctypes, of just the types that the kernel takes. RuntimeError as the driver says it.
        """
        function = self._functions.get((device, kernel)) or self._load(device, kernel)
        places = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        with self._on(device):
            started = self._library.cuLaunchKernel(
                function, blocks, 1, 1, THREADS, 1, 1, 0, ctypes.c_void_p(stream or None), places, None
            )
            self._check(started, f"starting {kernel}")

    def _load(self, device: int, kernel: str) -> ctypes.c_void_p:
        with self._lock:
            if (device, kernel) in self._functions:
                return self._functions[device, kernel]
            if self._library is None:
                self._library = ctypes.CDLL("libcuda.so.1")
            if device not in self._contexts:
                # The context that torch works in. It is never let go: kernels live in it as long as the process does.
                torch.cuda.init()
                context = ctypes.c_void_p()
                number = ctypes.c_int()
                self._check(self._library.cuDeviceGet(ctypes.byref(number), device), "asking for the device")
                retained = self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
                self._check(retained, "asking for its context")
                self._contexts[device] = context
            symbol, code = code_of(kernel, torch.cuda.get_device_capability(device))
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            with self._on(device):
                self._check(self._library.cuModuleLoadData(ctypes.byref(module), code), f"loading {kernel}")
                found = self._library.cuModuleGetFunction(ctypes.byref(function), module, symbol.encode())
                self._check(found, f"looking for {kernel}")
            self._functions[device, kernel] = function
            return function

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """The current context is a setting of each thread; what it was comes back."""
        wanted, before = self._contexts[device], ctypes.c_void_p()
        self._library.cuCtxGetCurrent(ctypes.byref(before))
        if before.value == wanted.value:
            yield
            return
        self._check(self._library.cuCtxSetCurrent(wanted), "choosing the device")
        try:
            yield
        finally:
            self._library.cuCtxSetCurrent(before)

    def _check(self, error: int, doing: str) -> None:
        if error:
            told = ctypes.c_char_p()
            self._library.cuGetErrorString(error, ctypes.byref(told))
            raise RuntimeError(f"{doing}: {(told.value or str(error).encode()).decode()}")
