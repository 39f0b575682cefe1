"""The numeric kernels and raw I/O under the memory manager and the optimizer: native where it can be, torch elsewhere.

Every function checks its tensors, then runs C++ (CPU tensors, native library present), a CUDA kernel (NVRTC present) or
the same function of gemini.kernels.reference: neither instruction set, nor threads, nor device change a bit. Tensors
are flat (1-D, contiguous); writes pass autograd and version counters by. GEMINI_NATIVE=0 runs the reference alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from gemini.errors import counted, warn
from gemini.kernels import reference
from gemini.kernels.arrays import (
    BFLOAT16,
    FLOAT32,
    GRAD,
    RESIDUAL,
    Arrays,
    Segment,
    check,
    check_update,
    kernel_and_scalars,
    with_scale,
)
from gemini.kernels.cuda import (  # noqa: F401
    ClipFactor,
    CudaKernels,
    DeviceSums,
    Sums,
    clip_coefficient,
    nonfinite_flag,
    resolve,
)
from gemini.kernels.native import IO_THREADS, IoQueue, crc32  # noqa: F401
from gemini.kernels.native import native as _native
from gemini.kernels.native import why_not as _why_not
from gemini.kernels.nvrtc import Driver, compiler
from gemini.kernels.reference import NORM_BLOCK, NORM_LANES, NORM_TILE, total  # noqa: F401
from gemini.planning.planes import RuleSpec
from gemini.planning.rules import BLOCK as COMPACT_BLOCK

_num_threads = len(os.sched_getaffinity(0))  # CPUs that this process may run on
_isas: dict[str, Any] = {"reference": None}  # name -> what the native functions take; slowest first
if _native is not None:
    _isas |= {name: isa for name, isa in _native.Isa.__members__.items() if _native.runs_here(isa)}
    _native.set_num_threads(_num_threads)
_isa_name = list(_isas)[-1]
_isa: Any = _isas[_isa_name]
_only_reference = False  # whether tests ask for it, of CUDA tensors too (tests/kernel_settings.py)

_dtypes: dict[torch.dtype, Any] = (
    {} if _native is None else dict(zip(GRAD, (_native.Dtype.f32, _native.Dtype.bf16, _native.Dtype.f16), strict=True))
)

_cuda: CudaKernels | None = None if os.environ.get("GEMINI_NATIVE") == "0" else CudaKernels(Driver())

# ---- what is here ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelReport:
    """The kernels of this process: of CPU tensors `isa` out of those that can run here. `reason` says why
    there is no native library, `why_not_cuda` why CUDA tensors run the torch reference; else None.
    """

    native: bool
    reason: str | None
    isa: str
    isas: tuple[str, ...]
    num_threads: int
    cuda: str | None
    why_not_cuda: str | None

    def __str__(self) -> str:
        threads = counted(self.num_threads, "thread")
        on_cuda = (
            f"; on CUDA: {self.cuda or f'torch reference, {self.why_not_cuda}'}" if torch.cuda.is_available() else ""
        )
        if not self.native:
            return f"kernels: torch reference only, {self.reason}{on_cuda}"
        return f"kernels: native, {self.isa} (of {', '.join(self.isas)}), {threads}{on_cuda}"


def capabilities() -> KernelReport:
    """The kernels that run here and now, on CUDA tensors those of the current device."""
    there = torch.cuda.is_available()
    refusal = why_not_cuda(torch.device("cuda", torch.cuda.current_device())) if there else "there is no CUDA device"
    cuda = None if refusal else f"compiled by NVRTC {compiler().version}"
    return KernelReport(_native is not None, _why_not, _isa_name, tuple(_isas), get_num_threads(), cuda, refusal)


@cache
def why_not_cuda(device: torch.device) -> str | None:
    """Why CUDA tensors of this device are left to torch, or None: two small kernels are compiled, run and looked at,
    once for each device. Where the answer is not None it warns.
    """
    if _cuda is None:
        return "GEMINI_NATIVE=0 is set"
    try:
        master = torch.tensor([1.001, -math.inf, 1e-42], device=device)
        hi, lo = torch.empty(3, dtype=torch.bfloat16, device=device), torch.empty(3, dtype=torch.int16, device=device)
        back = torch.empty_like(master)
        _cuda.split_master(master, hi, lo)
        _cuda.join_master(hi, lo, back)
        found, wanted = back.tolist(), master.tolist()
        if found == wanted:
            return None
        refusal = f"a kernel made {found} of {wanted}"
    except torch.OutOfMemoryError:
        raise  # others have all of it now: asked again, the card may have room
    except (RuntimeError, OSError) as e:  # no compiler, a card or a driver that does not take its code, no driver
        refusal = str(e)
    warn(
        f"Gemini's CUDA kernels cannot be used on {device} ({refusal}): gradients and updates there go through torch, "
        "with the same bits, more memory and waits of the host. `gemini doctor` says the same"
    )
    return refusal


def get_num_threads() -> int:
    """How many threads share one call of a native kernel."""
    return _num_threads if _native is None else _native.num_threads()


def limit_threads(n: int | None) -> None:
    """Sets how many threads at most share the native kernels which the calling thread calls, the caller counted; None
    is no limit of its own, as every thread begins. The reference takes torch's threads.
    """
    if n is not None and n < 1:
        raise ValueError(f"there must be at least 1 thread, not {n}; None takes the limit away")
    if _native is not None:
        _native.limit_threads(n or 0)


def flush_mode() -> int:
    """How the calling thread treats subnormal numbers (0 keeps them), for `set_flush_mode`: a new thread may differ."""
    return reference.flush_mode() if _native is None else _native.flush_mode()


def set_flush_mode(mode: int) -> None:
    """Gives the calling thread a mode that `flush_mode` returned in another one."""
    (reference if _native is None else _native).set_flush_mode(mode)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _cuda_for(tensor: Tensor) -> CudaKernels | None:
    """The CUDA kernels, if they take it; `_only_reference` and what stands in `why_not_cuda` leave it to torch."""
    return _cuda if tensor.is_cuda and not _only_reference and why_not_cuda(tensor.device) is None else None


@lru_cache(maxsize=256)
def _native_scalars(scalars: tuple[Any, ...]) -> Any:
    return _native.Scalars(*kernel_and_scalars(scalars))


def update(
    arrays: Arrays,
    spec: RuleSpec,
    segments: Sequence[Segment],
    grad_scale: Tensor | None = None,
    stop: Tensor | None = None,
) -> bool:
    """Updates parts of the arrays in place, each by the kernel of csrc/rules.h that its scalars name; on CUDA in one
    launch. Returns False where there is no native code for these tensors: then nothing was done, and the torch lines of
    the rule say what is to be done. Raises ValueError for what makes no sense.

    `spec` says which planes the rule has: fp32 states beside weights in fp32 (`residual` is None) or in bf16 with an
    int16 `residual`, the split master; or compact ones, which are codes and scales beside bf16 weights and an int8
    `residual`. A weight of the split master that becomes NaN is stored canonically (0x7FC0, 0).

    `segments` ascend and do not overlap, and with compact states they begin at multiples of COMPACT_BLOCK. `grad_scale`
    (fp32, one element on the device of the arrays) takes the place of the one of every segment; with `stop` (int32, one
    element there) nothing is updated if it is not 0. Both are read when their turn comes.
    """
    at = check_update(arrays, spec, segments, grad_scale, stop)
    weights, grad, is_compact = arrays.weights, arrays.grad, spec.exact is not None
    if cuda := _cuda_for(weights):
        cuda.update(arrays, at, is_compact, segments, grad_scale, stop)
        return True
    if _isa is None or not weights.is_cpu:
        return False
    if stop is not None and int(stop) != 0:
        return True
    if grad_scale is not None:
        segments = with_scale(segments, grad_scale)
    dtype, state_bytes, residual_bytes = _dtypes[grad.dtype], 1 if is_compact else 4, 1 if is_compact else 2
    for segment in segments:
        begin = segment.begin
        into = at.weights + begin * weights.itemsize
        residual = at.residual and at.residual + begin * residual_bytes
        states = [address + begin * state_bytes for address in at.states]
        size, scalars = segment.end - begin, _native_scalars(segment.scalars)
        given = at.grad + begin * grad.itemsize
        if is_compact:
            scales = [address + begin // COMPACT_BLOCK for address in at.scales]
            _native.update_compact(_isa, into, residual, states, scales, given, dtype, size, scalars, segment.dither)
        else:
            _native.update(_isa, into, residual, states, given, dtype, size, scalars)
    return True


def clip_factor(many: Sequence[Sums], max_norm: float) -> ClipFactor | None:
    """The factor of clipping gradients with these sums (in the order in which the host would add them) to `max_norm`,
    found where they are: nothing waits. None if some are on the host already, or not all on one device.
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


def copy_grad(dst: Tensor, src: Tensor) -> Sums:
    """dst = src, in one pass with the norm: returns the sums of squares of dst, one per NORM_TILE elements.

    `src` is fp32, bf16 or fp16, `dst` of its dtype or fp32; they must not overlap. A non-finite element makes its
    tile's sum non-finite. Sums of a CUDA kernel stay on the device until `resolve` or `totals` asks for them.
    """
    accepted = (src.dtype, torch.float32) if src.dtype != torch.float32 else FLOAT32
    d, s = check("copy_grad", (("dst", dst, accepted), ("src", src, GRAD)))
    if cuda := _cuda_for(dst):
        return cuda.copy_grad(dst, src)
    if _isa is not None and dst.is_cpu:
        return _native.copy_grad(_isa, d, _dtypes[dst.dtype], s, _dtypes[src.dtype], dst.numel())
    return list(reference.copy_grad(dst, src))


def accumulate_grad(acc: Tensor, src: Tensor, rounded: Tensor | None = None) -> Sums:
    """acc (fp32) += src, in one pass with the norm: returns the sums of squares of the new acc, as copy_grad does. With
    `rounded` (bf16) that becomes the new acc as well, rounded half to even, and the sums are those of `rounded`.
    """
    a, s = check("accumulate_grad", (("acc", acc, FLOAT32), ("src", src, GRAD)))
    if rounded is not None:
        (r,) = check("accumulate_grad", (("rounded", rounded, BFLOAT16),), acc.numel(), acc.device)
    if cuda := _cuda_for(acc):
        sums = cuda.accumulate_grad(acc, src)
        return sums if rounded is None else cuda.copy_grad(rounded, acc.bfloat16())
    if _isa is not None and acc.is_cpu:
        if rounded is not None:
            return _native.accumulate_rounded(_isa, a, r, s, _dtypes[src.dtype], acc.numel())
        return _native.accumulate_grad(_isa, a, s, _dtypes[src.dtype], acc.numel())
    return list(reference.accumulate_grad(acc, src, rounded))


def sum_grad24(hi: Tensor, lo: Tensor, src: Tensor, *, adding: bool) -> Sums:
    """A sum of gradients in 24 bits: bf16 `hi`, and in int8 `lo` what rounding to it has lost, which the next sum gets.
    They become their sum with `src`, without `adding` `src` itself, rounded half to even; halves are those of
    `split_master`. Returns the sums of squares of hi, as copy_grad does.
    """
    h, w, s = check("sum_grad24", (("hi", hi, BFLOAT16), ("lo", lo, (torch.int8,)), ("src", src, GRAD)))
    if cuda := _cuda_for(hi):
        return cuda.sum_grad24(hi, lo, src, adding)
    if _isa is not None and hi.is_cpu:
        return _native.sum_grad24(_isa, h, w, s, _dtypes[src.dtype], hi.numel(), adding)  # type: ignore[no-any-return]
    return list(reference.sum_grad24(hi, lo, src, adding))


def host_sums(areas: Sequence[Tensor]) -> Any:
    """For `land_by_host`, through these areas of page-locked memory of one size; None without native code or driver."""
    try:
        return _native.HostSums([area.data_ptr() for area in areas], areas[0].nbytes)
    except (AttributeError, RuntimeError):
        return None


def land_by_host(
    through: Any, copying: int, adding: int, src: Tensor, dst: Tensor, lo: Tensor | None, piece: int, is_added: bool
) -> Any:
    """Give a stream that copies and one that calls the host all of `copy_grad`, `accumulate_grad` or (with `lo`)
    `sum_grad24`, `piece` elements at a time. Memory stays until the second has come so far; then `sums()` of the result
    has the sums, or raises what went wrong. RuntimeError if CUDA refuses: what it was given before is under way.
    """
    isa = _isas["scalar"] if _isa is None else _isa  # CUDA can call no reference; the bits are the same
    at = copying, adding, src.data_ptr(), _dtypes[src.dtype], src.numel(), piece, dst.data_ptr(), _dtypes[dst.dtype]
    return through.land(isa, *at, 0 if lo is None else lo.data_ptr(), is_added)


def sum_squares(src: Tensor) -> Sums:
    """The sums of squares of an fp32, bf16 or fp16 tensor: one float per NORM_TILE elements, none if it is empty.

    fp64 over a fixed tree, the same bits on every device: blocks of NORM_BLOCK elements from the tensor's start, in
    each NORM_LANES lanes that add every NORM_LANES-th square in order; lanes are added pairwise (16 apart, 8, 4, 2, 1),
    blocks in order inside a tile. Add the tiles with `total`, or `totals` where they may be on a device.
    """
    return sums_of([src])[0]


def sums_of(many: Sequence[Tensor]) -> list[Sums]:
    """`sum_squares` of each of these, which are on one device."""
    found, cuda = list[Sums](), _cuda_for(many[0]) if many else None
    for src in many:
        # Gradients that leave a device come through here: what is as it should be is found so at one look.
        if not (src.dtype in GRAD and src.dim() == 1 and src.is_contiguous()):
            check("sum_squares", (("src", src, GRAD),))
        if cuda is None and _isa is not None and src.is_cpu:
            found.append(_native.sum_squares(_isa, src.data_ptr(), _dtypes[src.dtype], src.numel()))
        else:
            found.append(cuda.sum_squares(src) if cuda else list(reference.sum_squares(src)))
    return found


def split_master(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Splits fp32 `master` into bf16 `hi` (rounded half away from zero) and int16 `lo`, exactly: bits(master) =
    (bits(hi) << 16) + lo, modulo 2^32; a NaN becomes (0x7FC0, 0). With an int8 `lo`, its upper byte, what is split is
    the master rounded to 24 bits (half to even).
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
