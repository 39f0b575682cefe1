"""What computes on the devices of ``cudart.cpp``: torch's CPU kernels, on an alias of the device's memory.

A dispatch mode stands where CUDA's kernels would be launched. Each operation on CUDA tensors comes behind all that its
stream was given, tells the runtime what it reads and writes, and refuses what CUDA refuses: tensors of two devices.
Everything else is torch's own CUDA code: the allocator, streams, events, copies, autograd's device threads.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gemini.memory.devices.cuda_windows import CudaEvent

_runtime = ctypes.PyDLL(None)
_runtime.fake_alias.restype = ctypes.c_void_p
_runtime.fake_alias.argtypes = [ctypes.c_void_p]
_runtime.fake_device_of.argtypes = [ctypes.c_void_p]
_runtime.fake_launch.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_runtime.fake_use.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
_runtime.fake_host_use.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
_runtime.fake_memory.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_int]
_runtime.fake_memory.restype = ctypes.c_uint64
_runtime.fake_refuse_after.argtypes = [ctypes.c_uint64]
_runtime.fake_seed.argtypes = [ctypes.c_uint64]
_runtime.fake_waited.argtypes = [ctypes.c_void_p]
_runtime.fake_history.argtypes = [ctypes.c_char_p, ctypes.c_int]
_runtime.fake_next_launch.argtypes = [ctypes.c_double]
_runtime.fake_next_launch.restype = None

aten = torch.ops.aten
_AS_TORCH_DOES = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten._unsafe_view.default, aten.detach.default, aten.lift_fresh.default,
    aten.resize_.default, aten.resize_as_.default, aten.record_stream.default, aten._local_scalar_dense.default,
    aten.is_pinned.default, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor, aten.set_.source_Storage,
    aten.set_.default, aten.is_same_size.default, aten._has_compatible_shallow_copy_type.default,
    torch.ops.prim.device.default,
}  # fmt: skip
"""What launches no kernel: memory, sizes, and the one number that ``item()`` copies."""
_TAKE_INDICES_OF_THE_HOST = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


# ---- the runtime -----------------------------------------------------------------------------------------------------


def races() -> list[str]:
    """What was told since the last time."""
    told, text = [], ctypes.create_string_buffer(500)
    while _runtime.fake_race(text, len(text)):
        told.append(text.value.decode())
    return told


def counts() -> dict[str, int]:
    """How often each thing was done since the process began: launches, waits, copies and their bytes by direction."""
    text = ctypes.create_string_buffer(1 << 18)
    _runtime.fake_counts(text, len(text))
    return {
        name: int(number) for name, _, number in (line.rpartition("=") for line in text.value.decode().splitlines())
    }


class Work(NamedTuple):
    """A copy or a launch: what it is, its bytes (of a copy), and by stream how much it comes after, itself included."""

    what: str
    num_bytes: int
    stream: int
    clock: tuple[int, ...]

    def comes_after(self, other: Work) -> bool:
        """Whether something makes it wait for that: a stream, an event, or the thread that gave it."""
        return len(self.clock) > other.stream and self.clock[other.stream] >= other.clock[other.stream]


@contextmanager
def history(path: Path) -> Iterator[list[Work]]:
    """What streams are given inside, in the order in which the host gives it. Of waits between threads of Python, which
    no runtime sees, nothing is told.
    """
    told: list[Work] = []
    wait = CudaEvent.wait

    def waits(event: CudaEvent, *timeout: float) -> None:
        wait(event, *timeout)
        _runtime.fake_waited(event._event.cuda_event)

    CudaEvent.wait = waits  # type: ignore[method-assign]
    assert _runtime.fake_history(str(path).encode(), 1) == 0
    try:
        yield told
    finally:
        CudaEvent.wait = wait  # type: ignore[method-assign]
        assert _runtime.fake_history(str(path).encode(), 0) == 0
        for line in path.read_text().splitlines():
            what, *numbers = line.split("\t")
            num_bytes, stream, *clock = map(int, numbers)
            told.append(Work(what, num_bytes, stream, tuple(clock)))


def peak(device: int = 0, *, restart: bool = False) -> int:
    """The most bytes of a device that were taken at once, contexts included, since the last restart of the count."""
    return _runtime.fake_memory(device, 0, int(restart))


def set_memory(num_bytes: int, device: int = 0) -> None:
    """From now on a device has so many bytes."""
    _runtime.fake_memory(device, num_bytes, 0)


def refuse_after(calls: int | None) -> None:
    """The driver gives memory so many times more, then none; None: as long as there is some."""
    _runtime.fake_refuse_after(2**64 - 1 if calls is None else calls)


def draw_from(seed: int) -> None:
    """How early work of streams is done from now on; 0: as late as it may be."""
    _runtime.fake_seed(seed)


seconds_of: Callable[[str, Sequence[int]], float] | None = None
"""What a kernel takes, by its name and the bytes of each thing that it uses, where somebody asks for times."""


def launch(stream: int, name: str, reads: Sequence[tuple[int, int]], writes: Sequence[tuple[int, int]]) -> None:
    """The calling thread is about to do what a kernel would: addresses on a device, and bytes from there on."""
    if seconds_of is not None:
        _runtime.fake_next_launch(seconds_of(name, [num_bytes for _, num_bytes in (*reads, *writes)]))
    if error := _runtime.fake_launch(stream, name.encode()):
        raise RuntimeError(f"CUDA error: an earlier call was refused with {error}")
    for number, ranges in enumerate((reads, writes)):
        for address, num_bytes in ranges:
            assert not address or on_device(address), f"{name} was given a host address"
            _runtime.fake_use(stream, address, num_bytes if address else 0, number, name.encode())


def on_device(address: int) -> bool:
    return _runtime.fake_device_of(address) >= 0


def alias(address: int) -> int:
    """Where the host finds what is at an address of a device."""
    return _runtime.fake_alias(address) or 0


def host_uses(tensor: Tensor, name: str, *, writes: bool) -> None:
    """Somebody on the host uses a tensor that copies may be using."""
    if not tensor.is_cuda:
        _runtime.fake_host_use(tensor.data_ptr(), _extent(tensor), int(writes), name.encode())


def stream_uses(stream: int, tensor: Tensor, name: str, *, writes: bool) -> None:
    """What a stream was given last uses a tensor of the host."""
    _runtime.fake_use(stream, tensor.data_ptr(), _extent(tensor), int(writes), name.encode())


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def seen_by_host(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of a CUDA tensor."""
    storage = tensor.untyped_storage()
    if not storage.nbytes() or not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_char * storage.nbytes()).from_address(alias(storage.data_ptr()))
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


# ---- operations ------------------------------------------------------------------------------------------------------


class Computing(TorchDispatchMode):
    """Active in every thread once :func:`install` was called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # there autograd does not take composite operations apart
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        wanted = kwargs.get("device")
        makes = wanted is not None and torch.device(wanted).type == "cuda"
        if not makes and not any(tensor.is_cuda for tensor in tensors):
            if not func.is_view and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
                self._told_of_host(func, args, kwargs)
            return func(*args, **kwargs)
        if func in _AS_TORCH_DOES or func.is_view:
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is aten._to_copy.default:
            return self._to_copy(*args, **kwargs)
        return self._launch(func, args, kwargs, self._device_of(func, tensors, wanted))

    def _told_of_host(self, func: Any, args: Any, kwargs: Any) -> None:
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.layout is torch.strided:
                    host_uses(tensor, str(func), writes=_is_written(argument))

    def _device_of(self, func: Any, tensors: list[Tensor], wanted: Any) -> torch.device:
        devices = {tensor.device for tensor in tensors if tensor.is_cuda or tensor.dim() > 0}
        if func in _TAKE_INDICES_OF_THE_HOST:
            devices.discard(torch.device("cpu"))
        if len(devices) > 1:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func} got tensors on "
                f"{' and '.join(sorted(map(str, devices)))}"
            )
        device = torch.device(wanted) if wanted is not None else next(t.device for t in tensors if t.is_cuda)
        return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device

    def _launch(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """A kernel: torch's of the CPU, on aliases, where the stream of the calling thread has come to."""
        stream = torch.cuda.current_stream(device).cuda_stream
        written = {
            id(tensor)
            for number, argument in enumerate(func._schema.arguments)
            if _is_written(argument)
            for tensor in tree_flatten(args[number] if number < len(args) else kwargs.get(argument.name))[0]
        }
        flat, shape = tree_flatten((args, kwargs))
        given = {}  # by the identity of an alias: the tensor
        for number, value in enumerate(flat):
            if isinstance(value, Tensor) and value.is_cuda:
                flat[number] = seen_by_host(value)
                given[id(flat[number])] = value
            elif isinstance(value, torch.device):
                flat[number] = torch.device("cpu")
            elif isinstance(value, torch.Generator) and value.device.type == "cuda":
                flat[number] = None
        used = [(tensor.data_ptr(), _extent(tensor), id(tensor) in written) for tensor in given.values()]
        with torch.cuda.device(device):
            launch(stream, str(func), [u[:2] for u in used if not u[2]], [u[:2] for u in used if u[2]])
            args, kwargs = tree_unflatten(flat, shape)
            if func is aten.histc.default and not args[0].is_floating_point():  # which CUDA's alone takes
                result = func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
            else:
                result = func(*args, **kwargs)

            def on_card(value: Any) -> Any:
                if not isinstance(value, Tensor):
                    return value
                if id(value) in given:
                    return given[id(value)]
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
                if made.numel():
                    _runtime.fake_use(stream, made.data_ptr(), _extent(made), 1, str(func).encode())
                    seen_by_host(made).copy_(value)
                return made

            return tree_map(on_card, result)

    def _copy(self, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if into.device != source.device:
            if into.dtype == source.dtype and into.shape == source.shape and _same_dense(into, source):
                host_uses(into, "a copy", writes=False)
                return into.copy_(source, non_blocking)
            plain = self._to_copy(source, dtype=into.dtype).expand(into.shape).contiguous()  # as torch does, one by one
            with self:
                there = plain.to(into.device, non_blocking=non_blocking)
                return into.copy_(there)
        return self._launch(aten.copy_.default, (into, source), {}, into.device)

    def _to_copy(self, source: Tensor, *, non_blocking: bool = False, **how: Any) -> Tensor:
        layout = {"memory_format": how.pop("memory_format", None) or torch.preserve_format}
        with self:
            made = torch.empty_like(
                source, **{name: value for name, value in how.items() if value is not None}, **layout
            )
            return made.copy_(source, non_blocking)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _same_dense(a: Tensor, b: Tensor) -> bool:
    """Whether a copy of bytes copies the elements."""
    return (a.is_contiguous() and b.is_contiguous()) or (
        a.stride() == b.stride() and aten.is_non_overlapping_and_dense(a)
    )


def install() -> None:
    """From now on CUDA tensors are computed with, in this thread and in those that are started later."""
    for name in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)  # kernels that the CPU does not have
    torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel inside of aten.empty
    mode, run = Computing(), threading.Thread.run

    def run_computing(thread: threading.Thread) -> None:
        with mode:
            run(thread)

    threading.Thread.run = run_computing  # type: ignore[method-assign]
    mode.__enter__()
