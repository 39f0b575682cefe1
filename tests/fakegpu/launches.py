"""Gemini's own CUDA kernels on the devices of ``cudart.cpp``: their bodies, run on the host, in the order of streams.

Each is compiled by NVRTC for the card that the runtime says it is, loaded and launched by the driver's functions in
``libcuda.c``; in place of that code runs the same text, compiled for the host, on the arguments that were launched.

Those of the host are watched too: a native kernel that works on page-locked memory comes after the copies of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from gemini import kernels
from gemini.kernels import COMPACT_BLOCK, NORM_BLOCK, NORM_TILE, Arrays, nvrtc
from gemini.kernels.cuda import CudaKernels
from gemini.memory.devices.cuda import CudaDevice
from gemini.train import engine
from tests.fakegpu.computing import Computing, alias, host_uses, launch, stream_uses
from tests.native.emulated_cuda import doing, function_of, launch_in, library

_HOST = {
    "update": ("weights", "residual", "states"),
    "copy_grad": ("dst",), "accumulate_grad": ("acc",), "sum_grad24": ("hi", "lo"), "sum_squares": (),
    "split_master": ("hi", "lo"), "join_master": ("out",),
}  # fmt: skip
"""The kernels there are, and which of their tensors they write."""

_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
"""Of an element, by its format."""

Range = tuple[int, int]
"""An address and the bytes from there on."""


class FakeDriver(nvrtc.Driver):
    """The driver, which says of each launch what of the device's memory it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self._library = ctypes.CDLL("libcuda.so.1")
        self._names: dict[bytes, bytes] = {}
        self._bodies = library()
        self._bodies.run.restype = ctypes.c_char_p
        self._bodies.run.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p]
        # Held here: the driver has nothing but its address.
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p)(self._run)
        self._library.fake_kernels(self._callback)

    def launch(self, device: int, stream: int, kernel: str, blocks: int, *arguments: Any) -> None:
        reads, writes = _used(kernel, arguments)
        launch(stream, function_of(kernel), reads, writes)
        super().launch(device, stream, kernel, blocks, *map(_aliased, arguments))

    def _load(self, device: int, kernel: str) -> ctypes.c_void_p:
        function = super()._load(device, kernel)
        symbol = ctypes.cast(function, ctypes.c_char_p).value
        assert symbol is not None
        self._names[symbol] = kernel.encode()
        return function

    def _run(self, symbol: bytes, blocks: int, arguments: int) -> int:
        wrong = self._bodies.run(self._names[symbol], blocks, arguments)
        return 0 if wrong is None else 1  # cudaErrorInvalidValue


def _used(kernel: str, arguments: Sequence[Any]) -> tuple[list[Range], list[Range]]:
    """What a launch reads and what it writes."""
    grad = next((size for name, size in _BYTES.items() if f"Dtype::{name}" in kernel), 0)
    name = doing(kernel)
    if name in ("update", "compact"):
        return _used_by_update(arguments[0], grad, is_compact=name == "compact")
    if name == "clip":
        (tiles, ends, count, _, totals), places = (argument.value for argument in arguments[:5]), arguments[5]
        num_tiles = ctypes.c_int64.from_address(alias(ends) + 8 * (count - 1)).value
        written = zip((totals, *places), (8 * (count + 1), 8, 4, 4), strict=True)  # norm, factor, nonfinite
        return [(tiles, 8 * num_tiles), (ends, 8 * count)], [*written]
    if name in ("split", "join"):
        first, second, third, n = (argument.value for argument in arguments)
        if name == "split":
            return [(first, 4 * n)], [(second, 2 * n), (third, 2 * n)]
        return [(first, 2 * n), (second, 2 * n)], [(third, 4 * n)]
    dst, lo, src, n = (argument.value or 0 for argument in arguments[:4])
    blocks, tiles, arrived, nonfinite = arguments[4]
    size = {"copy": grad, "first24": 2, "add24": 2}.get(name, 4)
    written = [(dst, size * n), (lo, n)]
    read = [(src, grad * n), *(written if name in ("accumulate", "add24") else [])]
    left = [(blocks, 8 * -(-n // NORM_BLOCK)), (tiles, 8 * -(-n // NORM_TILE)), (arrived, 4), (nonfinite, 4)]
    return read, [*written, *left]


def _used_by_update(given: Any, grad: int, *, is_compact: bool) -> tuple[list[Range], list[Range]]:
    given = launch_in(given)
    begin, end = given.segments[0].begin, given.segments[given.count - 1].end
    at, states = given.arrays, given.arrays.num_states

    def used(address: int | None, size: int) -> Range:
        return (address + begin * size, (end - begin) * size) if address else (0, 0)

    written = [used(at.weights, 2 if at.residual else 4), used(at.residual, 1 if is_compact else 2)]
    written += [used(state, 1 if is_compact else 4) for state in at.states[:states]]
    if is_compact:
        blocks = -(-(end - begin) // COMPACT_BLOCK)
        written += [(scale + begin // COMPACT_BLOCK, blocks) for scale in at.scales[:states]]
    return [used(at.grad, grad), (given.grad_scale or 0, 4), (given.stop or 0, 4)], written


def _aliased(argument: Any) -> Any:
    """The same with addresses that the host can touch."""
    if isinstance(argument, ctypes.c_void_p):
        return ctypes.c_void_p(argument.value and alias(argument.value))
    if not isinstance(argument, ctypes.Array):
        return argument
    if argument._type_ is ctypes.c_void_p:
        return type(argument)(*(address and alias(address) for address in argument))
    own = launch_in(argument)
    arrays = own.arrays
    for name in ("weights", "residual", "grad"):
        setattr(arrays, name, _aliased(ctypes.c_void_p(getattr(arrays, name))).value)
    arrays.states, arrays.scales = _aliased(arrays.states), _aliased(arrays.scales)
    own.grad_scale, own.stop = (_aliased(ctypes.c_void_p(one)).value for one in (own.grad_scale, own.stop))
    return own


def _watched(name: str, kernel: Callable[..., Any], written: Sequence[str]) -> Callable[..., Any]:
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]

    @wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        arrays: Arrays | None = given.pop("arrays", None)
        for argument, value in {**given, **({} if arrays is None else arrays._asdict())}.items():
            for tensor in value.values() if isinstance(value, Mapping) else (value,):
                if hasattr(tensor, "is_cuda"):
                    host_uses(tensor, name, writes=argument in written)
        return kernel(*args, **kwargs)

    return run


def install() -> None:
    """From now on Gemini's kernels run on CUDA tensors, and the end of a model, which is without modes, keeps ours."""
    kernels._cuda = CudaKernels(FakeDriver())
    for name, written in _HOST.items():
        setattr(kernels, name, _watched(name, getattr(kernels, name), written))
    land = CudaDevice._land_by_host

    def told_land(
        device: CudaDevice, through: Any, areas: Any, source: Any, into: Any, lost: Any, *how: Any, **also: Any
    ) -> Any:
        told = land(device, through, areas, source, into, lost, *how, **also)
        for plane in (into, lost):  # by calls of the host, of which the runtime sees no more than when they come
            if plane is not None:
                stream_uses(device._copying["sum"].stream.cuda_stream, plane, "a sum of the host", writes=True)
        return told

    CudaDevice._land_by_host = told_land  # type: ignore[method-assign]
    without_modes = engine._disable_current_modes

    @contextmanager
    def only_computing() -> Iterator[None]:
        with without_modes(), Computing():
            yield

    engine._disable_current_modes = only_computing  # type: ignore[assignment]
