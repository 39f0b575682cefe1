"""The numeric kernels and raw I/O under the memory manager and the optimizer: native where it can be, torch elsewhere.

Every function checks its tensors, then runs C++ (CPU tensors, native library
present) or the same function of gemini.kernels_reference, with the same bits either way: neither instruction set, nor
threads, nor device change a result. Tensors are flat (1-D, contiguous); native writes do not pass through autograd and
leave version counters alone. Set GEMINI_NATIVE=0 to run without the native library.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gemini import kernels_reference as reference
from gemini.kernels_checks import (
    BFLOAT16,
    CODES,
    FLOAT32,
    GRAD,
    INT8,
    RESIDUAL,
    check,
    check_one,
    check_scales,
    check_segments,
    update_args,
)  # fmt: skip
from gemini.kernels_compact import BLOCK as COMPACT_BLOCK
from gemini.kernels_cuda import CudaKernels
from gemini.kernels_io import IoQueue, crc32
from gemini.kernels_native import native as _native
from gemini.kernels_native import why_not as _why_not
from gemini.kernels_reference import (
    IO_THREADS,
    NORM_BLOCK,
    NORM_LANES,
    NORM_TILE,
    AdamHyper,
    CompactSegment,
    Segment,
    total,
)  # fmt: skip
from gemini.kernels_sums import ClipFactor, DeviceSums, Sums, clip_coefficient, nonfinite_flag, resolve

__all__ = [
    "COMPACT_BLOCK",
    "IO_THREADS",
    "NORM_BLOCK",
    "NORM_LANES",
    "NORM_TILE",
    "AdamHyper",
    "ClipFactor",
    "CompactSegment",
    "DeviceSums",
    "IoQueue",
    "KernelReport",
    "Segment",
    "Sums",
    "accumulate_grad",
    "adam_update",
    "adam_update_segments",
    "capabilities",
    "clip_coefficient",
    "clip_factor",
    "copy_grad",
    "crc32",
    "flush_mode",
    "get_num_threads",
    "join_master",
    "leaves_sums_there",
    "limit_threads",
    "new_flag",
    "nonfinite_flag",
    "resolve",
    "set_flush_mode",
    "set_num_threads",
    "split_master",
    "sum_grad24",
    "sum_squares",
    "total",
    "totals",
    "update_compact",
    "update_segments",
    "use_isa",
]


def _num_cpus() -> int:
    """CPUs this process may run on, which on a shared machine are fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_isas: dict[str, Any] = {"reference": None}  # name -> what the native functions take; slowest first
if _native is not None:
    _isas |= {name: isa for name, isa in _native.Isa.__members__.items() if _native.runs_here(isa)}
    _native.set_num_threads(_num_cpus())
_isa_name = list(_isas)[-1]
_isa: Any = _isas[_isa_name]
_num_threads = _num_cpus()

_dtypes: dict[torch.dtype, Any] = (
    {} if _native is None else dict(zip(GRAD, (_native.Dtype.f32, _native.Dtype.bf16, _native.Dtype.f16), strict=True))
)

_cuda = CudaKernels(_native, _dtypes) if getattr(_native, "HAS_CUDA", False) else None

# ---- what is here ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelReport:
    """What runs the kernels in this process. `reason` says why there is no native library, if there is none.

    `isa` is in use for CPU tensors, `isas` are those that can run here; `cuda` says whether the library holds CUDA
    kernels (CUDA tensors run the torch reference where it does not, with the same bits).
    """

    native: bool
    reason: str | None
    isa: str
    isas: tuple[str, ...]
    num_threads: int
    cuda: bool

    def __str__(self) -> str:
        threads = f"{self.num_threads} thread{'s' if self.num_threads != 1 else ''}"
        if not self.native:
            return f"kernels: torch reference only, {self.reason}"
        on_cuda = f"; on CUDA: {'native' if self.cuda else 'torch reference'}" if torch.cuda.is_available() else ""
        return f"kernels: native, {self.isa} (of {', '.join(self.isas)}), {threads}{on_cuda}"


def capabilities() -> KernelReport:
    """What runs the kernels here and now."""
    return KernelReport(_native is not None, _why_not, _isa_name, tuple(_isas), get_num_threads(), _cuda is not None)


@contextmanager
def use_isa(name: str | None) -> Iterator[None]:
    """Runs the kernels of the whole process with one instruction set; None is the best one. For tests and benchmarks.

    Raises ValueError for a name that is unknown or cannot run here.
    """
    global _isa, _isa_name
    chosen = list(_isas)[-1] if name is None else name
    if chosen not in _isas:
        raise ValueError(f"instruction set {chosen!r} cannot run here; there are {', '.join(_isas)}")
    before = _isa_name
    _isa_name, _isa = chosen, _isas[chosen]
    try:
        yield
    finally:
        _isa_name, _isa = before, _isas[before]


def set_num_threads(n: int) -> None:
    """Sets how many threads share one call of a native kernel, the caller counted (at first: the CPUs of the process).

    Torch's own threads are left alone, and results do not depend on it.
    """
    global _num_threads
    if n < 1:
        raise ValueError(f"there must be at least 1 thread, not {n}")
    _num_threads = n
    if _native is not None:
        _native.set_num_threads(n)


def get_num_threads() -> int:
    """How many threads share one call of a native kernel."""
    return _num_threads if _native is None else _native.num_threads()


def limit_threads(n: int | None) -> None:
    """Sets how many threads at most share the native kernels which the calling thread calls, the caller counted.

    Of the calling thread only, and of those it starts none: a worker that updates in the background leaves the other
    cores to who computes. Never more than `get_num_threads()`; 1 runs every kernel in the calling thread; None is no
    limit of its own, as every thread begins. Results do not depend on it. Without the native library nothing happens:
    the reference takes torch's threads. Raises ValueError for n below 1.
    """
    if n is not None and n < 1:
        raise ValueError(f"there must be at least 1 thread, not {n}; None takes the limit away")
    if _native is not None:
        _native.limit_threads(n or 0)


def flush_mode() -> int:
    """How the calling thread treats subnormal numbers: 0 keeps them, anything else is for `set_flush_mode`.

    It is the flush-to-zero and denormals-are-zero bits of the processor, which `torch.set_flush_denormal` sets for one
    thread. A new thread may begin with another mode than the thread that hands it work, and then with other bits.
    """
    return reference.flush_mode() if _native is None else _native.flush_mode()


def set_flush_mode(mode: int) -> None:
    """Gives the calling thread a mode that `flush_mode` returned in another one."""
    (reference if _native is None else _native).set_flush_mode(mode)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _cuda_for(tensor: Tensor) -> CudaKernels | None:
    """The native CUDA kernels, if they take it; `use_isa("reference")` and a library without them leave it to torch."""
    return _cuda if _isa is not None and tensor.is_cuda else None


@lru_cache(maxsize=256)
def _native_scalars(kernel: str, scalars: tuple[float, ...]) -> Any:
    return _native.Scalars(kernel, scalars)


def adam_update(
    weights: Tensor, residual: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, hyper: AdamHyper
) -> None:
    """One Adam or AdamW update, in place; the formula stands in csrc/rules.h and gemini/kernels_reference.py.

    `weights` is fp32 with `residual` None, or bf16 with an int16 `residual`: the split master, whose two halves are
    together exactly the fp32 weight. `exp_avg` and `exp_avg_sq` are fp32; `grad` is fp32, bf16 or fp16 with either
    kind of weights, and is only read. All are 1-D, contiguous, of n elements, on one device. A weight of the split
    master that becomes NaN is stored canonically (0x7FC0, 0). Raises ValueError for anything else.
    """
    states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    w, m, v, g, *r = check("adam_update", update_args(weights, residual, states, grad))
    if cuda := _cuda_for(weights):
        cuda.update(weights, residual, [exp_avg, exp_avg_sq], grad, [Segment(0, weights.numel(), hyper)])
    elif _isa is not None and weights.is_cpu:
        scalars = _native_scalars(*reference.kernel_and_scalars(hyper))
        n = weights.numel()
        _native.update(_isa, w, r[0] if r else 0, [m, v], g, _dtypes[grad.dtype], n, scalars)
    else:
        reference.adam_update(weights, residual, exp_avg, exp_avg_sq, grad, hyper)


def adam_update_segments(
    weights: Tensor, residual: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor,
    segments: Sequence[Segment], grad_scale: Tensor | None = None, stop: Tensor | None = None,
) -> None:  # fmt: skip
    """`adam_update` of parts of the arrays, each in its own way: one launch on CUDA, where nothing waits.

    `segments` ascend and do not overlap; what lies between them is not touched. `grad_scale` (fp32, one element on the
    device of the arrays) takes the place of the one of every segment; with `stop` (int32, one element there, as of
    `new_flag`) nothing is updated if it is not 0. Both are read when their turn comes: on CUDA by the kernel, behind
    what was enqueued before it (by the host where torch stands in for it). Raises ValueError for anything else.
    """
    op = "adam_update_segments"
    check(op, update_args(weights, residual, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, grad))
    check_segments(op, segments, weights.numel())
    check_one(op, "grad_scale", grad_scale, torch.float32, weights)
    check_one(op, "stop", stop, torch.int32, weights)
    if cuda := _cuda_for(weights):
        cuda.update(weights, residual, [exp_avg, exp_avg_sq], grad, segments, grad_scale, stop)
        return
    if stop is not None and int(stop) != 0:
        return
    scale = None if grad_scale is None else float(grad_scale)
    for begin, end, hyper in segments:
        part = slice(begin, end)
        lower = None if residual is None else residual[part]
        own = hyper if scale is None else replace(hyper, grad_scale=scale)
        adam_update(weights[part], lower, exp_avg[part], exp_avg_sq[part], grad[part], own)


def update_segments(
    weights: Tensor, residual: Tensor | None, states: Mapping[str, Tensor], grad: Tensor,
    segments: Sequence[Segment], grad_scale: Tensor | None = None, stop: Tensor | None = None,
) -> bool:  # fmt: skip
    """The same by the native kernel of another rule, which the scalars of the segments name; `states` are fp32, in the
    order of the rule. False where there is no native code for these tensors (on the CPU: none takes `grad_scale`): then
    nothing was done.
    """
    op = "update_segments"
    w, *others = check(op, update_args(weights, residual, states, grad))
    check_segments(op, segments, weights.numel())
    check_one(op, "grad_scale", grad_scale, torch.float32, weights)
    check_one(op, "stop", stop, torch.int32, weights)
    if cuda := _cuda_for(weights):
        cuda.update(weights, residual, [*states.values()], grad, segments, grad_scale, stop)
        return True
    if _isa is None or not weights.is_cpu or grad_scale is not None:
        return False
    if stop is not None and int(stop) != 0:
        return True
    of_states, g, r = others[: len(states)], others[len(states)], 0 if residual is None else others[-1]
    for begin, end, scalars in segments:
        lower = r and r + 2 * begin
        own = [address + 4 * begin for address in of_states]
        native = _native_scalars(*reference.kernel_and_scalars(scalars))
        _native.update(
            _isa, w + begin * weights.itemsize, lower, own, g + begin * grad.itemsize, _dtypes[grad.dtype], end - begin,
            native,
        )  # fmt: skip
    return True


def update_compact(
    weights: Tensor, residual: Tensor, codes: Mapping[str, Tensor], scales: Mapping[str, Tensor], grad: Tensor,
    segments: Sequence[CompactSegment], grad_scale: Tensor | None = None, stop: Tensor | None = None,
) -> bool:  # fmt: skip
    """The same of compact states: `residual` is int8, each state codes (int8, or uint8 of averages of squares) and its
    scales, in the order of the rule. Segments begin at multiples of COMPACT_BLOCK. False where there is no native code.
    """
    op = "update_compact"
    args = [("weights", weights, BFLOAT16), *((name, state, CODES) for name, state in codes.items())]
    w, *of_states, g, r = check(op, (*args, ("grad", grad, GRAD), ("residual", residual, INT8)))
    of_scales = check_scales(op, scales, weights, COMPACT_BLOCK)
    check_segments(op, segments, weights.numel())
    check_one(op, "grad_scale", grad_scale, torch.float32, weights)
    check_one(op, "stop", stop, torch.int32, weights)
    if any(begin % COMPACT_BLOCK for begin, *_ in segments):
        raise ValueError(f"{op}: segments begin at multiples of {COMPACT_BLOCK} elements")
    if cuda := _cuda_for(weights):
        cuda.update_compact(weights, residual, [*codes.values()], [*scales.values()], grad, segments, grad_scale, stop)
        return True
    if _isa is None or not weights.is_cpu or grad_scale is not None:
        return False
    if stop is not None and int(stop) != 0:
        return True
    for begin, end, hyper, dither in segments:
        native = _native_scalars(*reference.kernel_and_scalars(hyper))
        _native.update_compact(
            _isa, w + 2 * begin, r + begin, [address + begin for address in of_states],
            [address + begin // COMPACT_BLOCK for address in of_scales], g + begin * grad.itemsize, _dtypes[grad.dtype],
            end - begin, native, dither,
        )  # fmt: skip
    return True


def new_flag(beside: Tensor) -> Tensor:
    """An int32 that is 0, on the device of `beside`: for `sum_squares` to set, and to stop `adam_update_segments`."""
    cuda = _cuda_for(beside)
    return torch.zeros(1, dtype=torch.int32, device=beside.device) if cuda is None else cuda.new_flag(beside.device)


def clip_factor(many: Sequence[Sums], max_norm: float) -> ClipFactor | None:
    """What clipping gradients with these sums to `max_norm` takes, found where the sums are: nothing waits.

    `many` holds the sums of each gradient, in the order in which the host would add them. None if some are on the host
    already, or not all on one device: then it is for the host to look.
    """
    parts = [[part for part in sums if isinstance(part, DeviceSums) and not part.is_here] for sums in many]
    if sum(map(len, parts)) != sum(map(len, many)) or len({part.device for own in parts for part in own}) != 1:
        return None
    tiles = [[part.on_device() for part in own] for own in parts]
    cuda = _cuda_for(next(tile for own in tiles for tile in own))
    return None if cuda is None else ClipFactor(many, max_norm, *cuda.clip_factor(tiles, max_norm))


def leaves_sums_there(tensor: Tensor) -> bool:
    """Whether `copy_grad`, `accumulate_grad` and `sum_squares` leave the sums of such a tensor on its device."""
    return _cuda_for(tensor) is not None


def totals(many: Sequence[Sums]) -> list[float]:
    """`total` of each, after one `resolve` of all."""
    if DeviceSums not in {type(part) for sums in many for part in sums}:  # as those of every kernel on the CPU
        return [total(sums) for sums in many]  # type: ignore[arg-type]
    return [total(numbers) for numbers in resolve(many)]


def _check_two(op: str, into: tuple[str, Tensor, tuple[torch.dtype, ...]], source: Tensor) -> tuple[int, int]:
    """`check` of two, as quickly as can be: every gradient of every step comes through here."""
    _, first, accepted = into
    n = first.numel()
    if (
        first.dtype in accepted
        and source.dtype in GRAD
        and first.dim() == source.dim() == 1
        and source.numel() == n
        and first.is_contiguous()
        and source.is_contiguous()
        and first.device == source.device
    ):
        a, b = first.data_ptr(), source.data_ptr()
        if a + n * first.itemsize <= b or b + n * source.itemsize <= a:
            return a, b
    a, b = check(op, (into, ("src", source, GRAD)))  # which says what is wrong, or that they are empty
    return a, b


def copy_grad(dst: Tensor, src: Tensor) -> Sums:
    """dst = src, in one pass with the norm: returns the sums of squares of dst, one per NORM_TILE elements.

    `src` is fp32, bf16 or fp16, at any address; `dst` is of its dtype or fp32. Both 1-D, contiguous, n elements, on
    one device, without overlap; anything else is a ValueError. A non-finite element makes its tile's sum non-finite.
    Sums of a CUDA kernel stay on the device until `resolve` or `totals` asks for them; others are numbers.
    """
    accepted = (src.dtype, torch.float32) if src.dtype != torch.float32 else FLOAT32
    d, s = _check_two("copy_grad", ("dst", dst, accepted), src)
    if cuda := _cuda_for(dst):
        places = cuda.places(dst)
        cuda.copy_grad(dst, src, places)
        return cuda.left_in(places)
    if _isa is not None and dst.is_cpu:
        return _native.copy_grad(_isa, d, _dtypes[dst.dtype], s, _dtypes[src.dtype], dst.numel())
    return list(reference.copy_grad(dst, src))


def accumulate_grad(acc: Tensor, src: Tensor) -> Sums:
    """acc (fp32) += src, in one pass with the norm: returns the sums of squares of the new acc, as copy_grad does."""
    a, s = _check_two("accumulate_grad", ("acc", acc, FLOAT32), src)
    if cuda := _cuda_for(acc):
        places = cuda.places(acc)
        cuda.accumulate_grad(acc, src, places)
        return cuda.left_in(places)
    if _isa is not None and acc.is_cpu:
        return _native.accumulate_grad(_isa, a, s, _dtypes[src.dtype], acc.numel())
    return list(reference.accumulate_grad(acc, src))


def sum_grad24(hi: Tensor, lo: Tensor, src: Tensor, *, adding: bool) -> Sums:
    """A sum of gradients in 24 bits: bf16 `hi`, and in int8 `lo` what rounding to it has lost, which the next sum gets.

    The 24 bits become their sum with `src` (fp32, bf16 or fp16), without `adding` `src` itself, rounded half to even;
    halves are those of `split_master`. Returns the sums of squares of hi, as copy_grad does; ValueError as there.
    """
    h, w, s = check("sum_grad24", (("hi", hi, BFLOAT16), ("lo", lo, INT8), ("src", src, GRAD)))
    if cuda := _cuda_for(hi):
        places = cuda.places(hi)
        cuda.sum_grad24(hi, lo, src, adding, places)
        return cuda.left_in(places)
    if _isa is not None and hi.is_cpu:
        return _native.sum_grad24(_isa, h, w, s, _dtypes[src.dtype], hi.numel(), adding)  # type: ignore[no-any-return]
    return list(reference.sum_grad24(hi, lo, src, adding))


def sum_squares(src: Tensor, nonfinite: Tensor | None = None) -> Sums:
    """The sums of squares of an fp32, bf16 or fp16 tensor: one float per NORM_TILE elements, none if it is empty.

    fp64 over a fixed tree, the same bits on every device: blocks of NORM_BLOCK elements from the tensor's start, in
    each NORM_LANES lanes that add every NORM_LANES-th square in order; lanes are added pairwise (16 apart, 8, 4, 2, 1),
    blocks in order inside a tile. Add the tiles with `total`, or `totals` where they may be on a device as those of
    `copy_grad`. `nonfinite` (as of `new_flag`) becomes 1 if a sum is not finite, else it is left alone.
    """
    (s,) = check("sum_squares", (("src", src, GRAD),))
    check_one("sum_squares", "nonfinite", nonfinite, torch.int32, src)
    if cuda := _cuda_for(src):
        places = cuda.places(src, nonfinite)
        cuda.sum_squares(src, places)
        return cuda.left_in(places)
    if _isa is not None and src.is_cpu:
        sums = _native.sum_squares(_isa, s, _dtypes[src.dtype], src.numel())
    else:
        sums = list(reference.sum_squares(src))
    if nonfinite is not None and not all(map(math.isfinite, sums)):
        nonfinite.fill_(1)
    return sums


def split_master(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Splits fp32 `master` into bf16 `hi` (rounded half away from zero) and int16 `lo`, exactly.

    bits(master) = (bits(hi) << 16) + lo, modulo 2^32; a NaN becomes (0x7FC0, 0). ValueError as in adam_update. With an
    int8 `lo`, its upper byte, what is split is the master rounded to 24 bits (half to even).
    """
    m, h, w = check("split_master", (("master", master, FLOAT32), ("hi", hi, BFLOAT16), ("lo", lo, RESIDUAL)))
    is_exact = lo.dtype is torch.int16
    if (cuda := _cuda_for(master)) and is_exact:
        cuda.split_master(master, hi, lo)
    elif _isa is not None and master.is_cpu:
        (_native.split_master if is_exact else _native.split_master24)(_isa, m, h, w, master.numel())
    else:
        reference.split_master(master, hi, lo)


def join_master(hi: Tensor, lo: Tensor, out: Tensor) -> None:
    """The exact inverse of split_master: fp32 `out` from bf16 `hi` and int16 (or int8) `lo`."""
    h, w, o = check("join_master", (("hi", hi, BFLOAT16), ("lo", lo, RESIDUAL), ("out", out, FLOAT32)))
    is_exact = lo.dtype is torch.int16
    if (cuda := _cuda_for(out)) and is_exact:
        cuda.join_master(hi, lo, out)
    elif _isa is not None and out.is_cpu:
        (_native.join_master if is_exact else _native.join_master24)(_isa, h, w, o, out.numel())
    else:
        reference.join_master(hi, lo, out)
