"""The numeric kernels in a few torch lines: the definition that every native kernel equals bit for bit.

Each function works on any device and any number of elements, in slabs, so that its temporaries stay small whatever the
size of the tensor. Arithmetic is plain IEEE fp32 in the order written here; scalars are computed in double and rounded
to fp32 once. The checks of arguments live in gemini.kernels, whose functions of the same names come here where there
is no native code for a tensor. The flush-to-zero mode and the IoQueue for installations without a compiler are here
too.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from gemini.interrupts import WHOLE, without_grad
from gemini.waiting import Latch

NORM_BLOCK, NORM_LANES, NORM_TILE = 4096, 32, 1 << 20

_SLAB = 4 * NORM_TILE  # elements per pass: bounds the temporaries (about 100 MB with fp64 squares)
_IO_BLOCK = 4 << 20
IO_THREADS = 4  # blocks under way at once; nvme_stream.py --sweep: 1 is slower, neither 2 nor 8 is better at all of it
_CANONICAL_NAN = 0x7FC00000


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """The hyperparameters of one Adam update of one tensor.

    `step` counts from 1 and includes this update. `decoupled` is AdamW (weights decay beside the update), otherwise
    Adam with L2 (weight decay is added to the gradient). The gradient is multiplied by `grad_scale` first (clipping
    and loss scaling). Raises ValueError for values for which the formula has no meaning.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        if not (self.lr >= 0 and self.eps >= 0 and self.weight_decay >= 0):
            raise ValueError(f"lr, eps and weight_decay must be 0 or more, not {self}")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"beta1 and beta2 must be in [0, 1), not {self}")
        if self.step < 1:
            raise ValueError(f"step counts from 1 and includes the update itself; it was {self.step}")


class Segment(NamedTuple):
    """Elements ``[begin, end)`` of the arrays of a chunk, and how they are updated: by Adam, or with the scalars of
    another rule (:func:`kernel_and_scalars`).
    """

    begin: int
    end: int
    hyper: Any


class CompactSegment(NamedTuple):
    """The same of compact states; ``dither`` begins the Weyl sequence of its elements, which begin with a block."""

    begin: int
    end: int
    hyper: Any
    dither: int


class Fp32Scalars(NamedTuple):
    """What the kernels multiply by: every number is representable in fp32. In the order of csrc/rules.h."""

    c1: float
    c2: float
    beta2: float
    decay: float
    wd: float
    neg_step: float
    inv_sqrt_bc2: float
    eps: float
    grad_scale: float
    decoupled: bool


@lru_cache(maxsize=256)
def fp32_scalars(hyper: AdamHyper) -> Fp32Scalars:
    """The scalars of an update, computed in double and rounded once; the same on every device and instruction set."""
    bias1 = 1.0 - hyper.beta1**hyper.step
    bias2 = 1.0 - hyper.beta2**hyper.step
    exact = (
        1.0 - hyper.beta1,
        1.0 - hyper.beta2,
        hyper.beta2,
        1.0 - hyper.lr * hyper.weight_decay,
        hyper.weight_decay,
        -(hyper.lr / bias1),
        1.0 / math.sqrt(bias2),
        hyper.eps,
        hyper.grad_scale,
    )
    return Fp32Scalars._make([*map(to_fp32, exact), hyper.decoupled])


def to_fp32(x: float) -> float:
    """The nearest fp32 number."""
    return ctypes.c_float(x).value


def kernel_and_scalars(scalars: Any) -> tuple[str, tuple[float, ...]]:
    """What the native code takes for an update: the name of a rule in csrc/rules.h, and the numbers of its struct.

    ``scalars``: an :class:`AdamHyper`, or a tuple of those numbers and, last, that name.
    """
    if isinstance(scalars, AdamHyper):
        *values, decoupled = fp32_scalars(scalars)
        return "adamw" if decoupled else "adam", tuple(values)
    return scalars[-1], scalars[:-1]


def _slabs(n: int) -> Iterator[slice]:
    return (slice(begin, min(begin + _SLAB, n)) for begin in range(0, n, _SLAB))


# ---- Adam ------------------------------------------------------------------------------------------------------------


@without_grad
def adam_update(
    weights: Tensor, residual: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, hyper: AdamHyper
) -> None:
    s = fp32_scalars(hyper)
    for part in _slabs(weights.numel()):
        m, v = exp_avg[part], exp_avg_sq[part]
        p = weights[part] if residual is None else _join(weights[part], residual[part])
        g = grad[part].float() * s.grad_scale
        if not s.decoupled:
            g = g + p * s.wd
        m.add_((g - m) * s.c1)
        v.mul_(s.beta2).add_((g * s.c2) * g)
        d = exact_sqrt(v) * s.inv_sqrt_bc2 + s.eps
        if s.decoupled:
            p.mul_(s.decay)
        p.add_((m * s.neg_step) / d)
        if residual is not None:
            _split(p, weights[part], residual[part])


def exact_sqrt(x: Tensor) -> Tensor:
    """The correctly rounded fp32 square root."""
    # Torch's own on CPU may be an ulp off, in fp32 (17 % of all numbers with torch 2.13 and MKL) and in fp64. From fp64
    # with an error under one ulp the second rounding is right: no root of an fp32 number is closer than 2^-51
    # (relative) to the middle between two fp32 numbers.
    return x.double().sqrt_().float()


# ---- split master ----------------------------------------------------------------------------------------------------


def _join(hi: Tensor, lo: Tensor) -> Tensor:
    if lo.dtype is torch.int8:  # the upper byte alone: 24 bits
        return ((hi.view(torch.int16).int() << 16) + (lo.int() << 8)).view(torch.float32)
    return ((hi.view(torch.int16).int() << 16) + lo.int()).view(torch.float32)


def _split(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    bits = master.view(torch.int32)
    bits = torch.where(bits & 0x7FFFFFFF > 0x7F800000, _CANONICAL_NAN, bits)
    if lo.dtype is torch.int8:
        bits = (bits + 0x7F + (bits >> 8 & 1)) & -0x100  # half to even
    rounded = (bits + 0x8000) >> 16  # half away from zero
    hi.view(torch.int16).copy_(rounded)
    lower = bits - (rounded << 16)
    lo.copy_(lower >> 8 if lo.dtype is torch.int8 else lower)


@without_grad
def split_master(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    for part in _slabs(master.numel()):
        _split(master[part], hi[part], lo[part])


@without_grad
def join_master(hi: Tensor, lo: Tensor, out: Tensor) -> None:
    for part in _slabs(out.numel()):
        out[part] = _join(hi[part], lo[part])


# ---- gradients and their norm ----------------------------------------------------------------------------------------


@without_grad
def copy_grad(dst: Tensor, src: Tensor) -> list[float]:
    dst.copy_(src)
    return sum_squares(dst)


@without_grad
def accumulate_grad(acc: Tensor, src: Tensor) -> list[float]:
    for part in _slabs(acc.numel()):
        acc[part] += src[part].float()
    return sum_squares(acc)


@without_grad
def sum_grad24(hi: Tensor, lo: Tensor, src: Tensor, adding: bool) -> list[float]:
    for part in _slabs(hi.numel()):
        values = src[part].float()
        _split(_join(hi[part], lo[part]) + values if adding else values, hi[part], lo[part])
    return sum_squares(hi)


@without_grad
def sum_squares(src: Tensor) -> list[float]:
    sums: list[float] = []
    for part in _slabs(src.numel()):
        blocks = _block_sums(src[part])
        per_tile = NORM_TILE // NORM_BLOCK
        sums += [total(blocks[begin : begin + per_tile]) for begin in range(0, len(blocks), per_tile)]
    return sums


def _block_sums(x: Tensor) -> list[float]:
    """One fp64 sum of squares per block of 4096: 32 lanes in sequence, then lanes pairwise."""
    rows_per_block = NORM_BLOCK // NORM_LANES
    rows = min(rows_per_block, -(-x.numel() // NORM_LANES))  # rows beyond would add +0.0
    x = pad(x.float(), (0, -x.numel() % NORM_BLOCK)).double().view(-1, rows_per_block, NORM_LANES)
    squares = x * x
    lanes = squares[:, 0]
    for row in range(1, rows):
        lanes = lanes + squares[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0].tolist()


def total(sums: list[float]) -> float:
    result = 0.0
    for value in sums:
        result += value
    return result


# ---- the mode of a thread --------------------------------------------------------------------------------------------


def flush_mode() -> int:
    # In both modes that torch sets the half of the smallest normal number is zero, or counts as one.
    return int(sys.float_info.min / 2 == 0.0)


def set_flush_mode(mode: int) -> None:
    torch.set_flush_denormal(mode != 0)


# ---- I/O without native code -----------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Request:
    write: bool
    fd: int
    address: int
    nbytes: int
    offset: int
    taken: int = 0  # bytes handed to threads so far
    inside: int = 0  # blocks being transferred now
    error: BaseException | None = None  # the first
    over: Latch = field(default_factory=Latch)

    def note_end(self) -> None:
        if not self.inside and self.taken == self.nbytes:
            self.over.set()


class ThreadedIoQueue:
    """The native IoQueue in Python: positioned reads and writes of 4 MiB blocks on a few threads."""

    def __init__(self, num_threads: int = IO_THREADS) -> None:
        if num_threads < 1:
            raise ValueError("IoQueue needs at least 1 thread")
        self._owner = os.getpid()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="gemini-io")
        self._tickets: dict[int, _Request] = {}
        self._urgent: deque[_Request] = deque()  # requests with blocks not yet taken
        self._others: deque[_Request] = deque()
        self._lock = threading.Lock()
        self._next_ticket = itertools.count(1)
        self._closed = False

    def submit_read(self, fd: int, address: int, nbytes: int, offset: int, urgent: bool = False) -> int:
        return self._submit(_Request(False, fd, address, nbytes, offset), urgent)

    def submit_write(self, fd: int, address: int, nbytes: int, offset: int, urgent: bool = False) -> int:
        return self._submit(_Request(True, fd, address, nbytes, offset), urgent)

    def _submit(self, request: _Request, urgent: bool) -> int:
        self._require_owner()
        with WHOLE, self._lock:
            if self._closed:
                raise ValueError("this IoQueue is closed")
            ticket = next(self._next_ticket)
            self._tickets[ticket] = request
            if request.nbytes:
                (self._urgent if urgent else self._others).append(request)
            # A thread gets one turn per block, and decides when its turn comes which block that is.
            for _ in range(0, request.nbytes, _IO_BLOCK):
                self._pool.submit(self._transfer_next)
            request.note_end()
        return ticket

    def _transfer_next(self) -> None:
        with self._lock:
            line = self._urgent or self._others
            if not line:
                return  # a request failed, and its other blocks were dropped
            request = line[0]
            begin = request.taken
            nbytes = min(_IO_BLOCK, request.nbytes - begin)
            request.taken += nbytes
            request.inside += 1
            if request.taken == request.nbytes:
                line.popleft()
        error = None
        try:
            _transfer(request.write, request.fd, request.address + begin, nbytes, request.offset + begin)
        except BaseException as caught:
            error = caught
        with self._lock:
            request.inside -= 1
            if error is not None:
                request.error = request.error or error
                request.taken = request.nbytes
                if request in line:
                    line.remove(request)
            request.note_end()

    def wait(self, ticket: int) -> None:
        self._require_owner()
        request = self._find(ticket)
        # All of its blocks: after an error too, no thread may touch the memory any more.
        request.over.wait()
        self._tickets.pop(ticket, None)  # not before: an interrupt leaves a ticket that can be waited for
        if request.error is not None:
            raise request.error

    def done(self, ticket: int) -> bool:
        self._require_owner()
        return self._find(ticket).over.is_set()

    def _find(self, ticket: int) -> _Request:
        if ticket not in self._tickets:
            raise ValueError(f"ticket {ticket} is unknown or was already waited for")
        return self._tickets[ticket]

    def close(self) -> None:
        self._require_owner()
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True)

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"this IoQueue belongs to process {self._owner}; its threads did not follow the fork: "
                "make a new one in the child"
            )


def _transfer(write: bool, fd: int, address: int, nbytes: int, offset: int) -> None:
    what = f"{'write' if write else 'read'} of {nbytes} bytes at offset {offset} of file descriptor {fd}"
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    done = 0
    while done < nbytes:
        at = offset + done
        try:
            moved = (os.pwritev if write else os.preadv)(fd, [memory[done:]], at)
        except OSError as error:
            raise OSError(error.errno, f"{what}: {error.strerror}") from error
        if moved == 0:
            ended = f"the file ends at byte {min(at, os.fstat(fd).st_size)}, before the end of the request"
            raise OSError(errno.EIO, f"{what}: {'the device accepted no more bytes' if write else ended}")
        done += moved
