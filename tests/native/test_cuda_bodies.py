"""The bodies of the CUDA kernels, run on the host: the text that the device runs gives the reference's bits."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gemini import kernels
from gemini.kernels import NORM_BLOCK, NORM_TILE
from gemini.kernels.arrays import kernel_and_scalars
from gemini.rules import AdamScalars
from tests.native.emulated_cuda import EmulatedModule, library
from tests.native.native_cases import (
    GRAD_DTYPES,
    LENGTHS,
    adam,
    adam_update,
    any_bits,
    assert_same_bits,
    same_sums,
    to_dtype,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")

ADAMW = adam(step=3, grad_scale=0.37, weight_decay=0.1)
L2 = adam(step=7, lr=2e-3, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, decoupled=False)
NUMBER = {dtype: number for number, dtype in enumerate(GRAD_DTYPES)}


@pytest.fixture(scope="module")
def device() -> Any:
    return library()


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def case(n: int, is_split: bool, dtype: torch.dtype, shift: int) -> list[Tensor | None]:
    """weights, residual, exp_avg, exp_avg_sq, grad; of any bits, ``shift`` elements off an aligned address."""
    p, m, v, g = (any_bits(n, seed).clone() for seed in range(4))
    made: list[Tensor | None] = [p, None, m, v.abs(), to_dtype(g, dtype)]
    if is_split:
        hi, lo = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
        kernels.split_master(p, hi, lo)
        made[:2] = [hi, lo]
    return [None if tensor is None else shifted(tensor, shift) for tensor in made]


def shifted(tensor: Tensor, by: int) -> Tensor:
    room = torch.empty(len(tensor) + by + 64, dtype=tensor.dtype)
    skip = -room.data_ptr() // room.element_size() % 16 + by  # torch aligns to 64 bytes; do not count on it
    result = room[skip : skip + len(tensor)]
    result.copy_(tensor)
    return result


def run_adam(
    tensors: Sequence[Tensor | None], bounds: Sequence[tuple[int, int]], hypers: Sequence[AdamScalars],
    scale: float | None = None, stop: int | None = None,
) -> None:  # fmt: skip
    weights, residual, *states, grad = tensors
    run_update(weights, residual, states, grad, bounds, hypers, scale, stop)


def run_update(
    weights: Tensor | None, residual: Tensor | None, states: Sequence[Tensor | None], grad: Tensor | None,
    bounds: Sequence[tuple[int, int]], scalars: Sequence[Any], scale: float | None = None, stop: int | None = None,
) -> None:  # fmt: skip
    assert weights is not None and grad is not None
    scale_there, stop_there = np.array([scale or 0.0], dtype=np.float32), np.array([stop or 0], dtype=np.int32)
    EmulatedModule().cuda_update(
        0, 0, weights.data_ptr(), 0 if residual is None else residual.data_ptr(),
        [state.data_ptr() for state in states if state is not None], grad.data_ptr(), NUMBER[grad.dtype],
        [(*ends, kernel_and_scalars(one), 0) for ends, one in zip(bounds, scalars, strict=True)],
        0 if scale is None else scale_there.ctypes.data, 0 if stop is None else stop_there.ctypes.data,
    )  # fmt: skip


def expected_adam(
    tensors: Sequence[Tensor | None], bounds: Sequence[tuple[int, int]], hypers: Sequence[AdamScalars]
) -> list[Tensor | None]:
    result = [None if tensor is None else tensor.clone() for tensor in tensors]
    for (begin, end), hyper in zip(bounds, hypers, strict=True):
        part: list[Any] = [None if tensor is None else tensor[begin:end] for tensor in result]
        with kernels.use_isa("reference"):
            adam_update(*part, hyper)
    return result


def assert_all_same(given: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for name, a, b in zip(("weights", "residual", "exp_avg", "exp_avg_sq", "grad"), given, expected, strict=True):
        if a is not None and b is not None:
            assert_same_bits(a, b, name)


@pytest.mark.slow
@pytest.mark.sweep(every=1)
@pytest.mark.parametrize("shift", [0, 1, 8], ids=["aligned", "not aligned", "some aligned"])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "fp32"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_adam_over_segments(dtype: torch.dtype, is_split: bool, shift: int) -> None:
    """Segments begin and end anywhere, touch or leave gaps, which are not written; more than one launch holds."""
    n = 9_000
    edges = [0, 1, 8, 15, 64, 64, 4100, 4101, *range(4200, 4400, 2), 6000, 8999]
    bounds = list(zip(edges[:-1], edges[1:], strict=True))
    del bounds[3]
    hypers = [ADAMW if number % 2 else L2 for number in range(len(bounds))]
    tensors = case(n, is_split, dtype, shift)
    expected = expected_adam(tensors, bounds, hypers)
    run_adam(tensors, bounds, hypers)
    assert_all_same(tensors, expected)


def test_the_scale_and_the_stop_are_read_where_they_lie() -> None:
    bounds, hypers = [(0, 500), (500, 1000)], [ADAMW, L2]
    tensors = case(1000, True, torch.bfloat16, 0)
    before = [None if tensor is None else tensor.clone() for tensor in tensors]
    run_adam(tensors, bounds, hypers, scale=0.25, stop=1)
    assert_all_same(tensors, before)
    run_adam(tensors, bounds, hypers, scale=0.25, stop=0)
    quarter = [hyper._replace(grad_scale=0.25) for hyper in hypers]
    assert_all_same(tensors, expected_adam(before, bounds, quarter))


def run_grad(device: Any, doing: str, dst: Tensor | None, src: Tensor, lo: Tensor | None = None) -> list[float]:
    n = len(src)
    blocks = np.zeros(-(-n // NORM_BLOCK), dtype=np.float64)
    number = ("read", "copy", "widen", "accumulate", "first24", "add24").index(doing)
    arrays = address(dst), address(lo), address(src)
    device.grad(number, *arrays, NUMBER[src.dtype], ctypes.c_int64(n), blocks.ctypes.data_as(ctypes.c_void_p))
    per_tile = NORM_TILE // NORM_BLOCK
    with np.errstate(all="ignore"):
        return [kernels.total(blocks[at : at + per_tile].tolist()) for at in range(0, len(blocks), per_tile)]


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_gradients_and_their_sums(dtype: torch.dtype, shift: int, device: Any) -> None:
    for n in LENGTHS:
        src = shifted(to_dtype(torch.randn(n, generator=torch.Generator().manual_seed(n)), dtype), shift)
        assert same_sums(run_grad(device, "read", None, src), kernels.sum_squares(src)), n
        copied, expected = shifted(torch.zeros_like(src), shift), torch.zeros_like(src)
        assert same_sums(run_grad(device, "copy", copied, src), kernels.copy_grad(expected, src)), n
        assert_same_bits(copied, expected, f"copy of {n}")
        acc = shifted(torch.randn(n, generator=torch.Generator().manual_seed(1)), shift)
        sums = acc.clone()
        assert same_sums(run_grad(device, "accumulate", acc, src), kernels.accumulate_grad(sums, src)), n
        assert_same_bits(acc, sums, f"sums of {n}")
        if dtype != torch.float32:
            wide, expected = shifted(torch.zeros(n), shift), torch.zeros(n)
            assert same_sums(run_grad(device, "widen", wide, src), kernels.copy_grad(expected, src)), n
            assert_same_bits(wide, expected, f"widened {n}")


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_sums_in_24_bits(dtype: torch.dtype, shift: int, device: Any) -> None:
    for n in (*LENGTHS, 10_000):
        src = shifted(to_dtype(any_bits(n, 5), dtype), shift)
        hi, lo = (shifted(torch.zeros(n, dtype=kind), shift) for kind in (torch.bfloat16, torch.int8))
        wanted = hi.clone(), lo.clone()
        for doing in ("first24", "add24", "add24"):
            sums = run_grad(device, doing, hi, src, lo)
            assert same_sums(sums, kernels.sum_grad24(*wanted, src, adding=doing == "add24")), (doing, n)
            assert_same_bits(hi, wanted[0], f"upper bits of {n}")
            assert_same_bits(lo, wanted[1], f"lower bits of {n}")


@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_gradients_of_any_bits(dtype: torch.dtype, device: Any) -> None:
    src = to_dtype(any_bits(10_000, 5), dtype)
    copied = torch.zeros_like(src)
    sums = run_grad(device, "copy", copied, src)
    assert_same_bits(copied, src, "copied")
    assert same_sums(sums, kernels.sum_squares(src))
    if dtype != torch.float32:
        wide = torch.zeros(len(src))
        run_grad(device, "widen", wide, src)
        assert_same_bits(wide, src.float(), "widened")
