"""The bodies of the CUDA kernels of gradients, run on the host: the text that the device runs gives the reference's
bits. Those of updates are tested in test_rule_kernels.py.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from gemini import kernels
from tests.native.emulated_cuda import EmulatedKernels, library
from tests.native.native_cases import (
    GRAD_DTYPES,
    LENGTHS,
    any_bits,
    assert_same_bits,
    same_sums,
    to_dtype,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def device() -> EmulatedKernels:
    return EmulatedKernels()


def shifted(tensor: Tensor, by: int) -> Tensor:
    room = torch.empty(len(tensor) + by + 64, dtype=tensor.dtype)
    skip = -room.data_ptr() // room.element_size() % 16 + by  # torch aligns to 64 bytes; do not count on it
    result = room[skip : skip + len(tensor)]
    result.copy_(tensor)
    return result


def run_grad(
    device: EmulatedKernels, doing: str, dst: Tensor | None, src: Tensor, lo: Tensor | None = None
) -> list[float]:
    if doing == "read":
        sums = device.sum_squares(src)
    elif dst is not None and lo is not None:
        sums = device.sum_grad24(dst, lo, src, adding=doing == "add24")
    else:
        assert dst is not None
        sums = device.accumulate_grad(dst, src) if doing == "accumulate" else device.copy_grad(dst, src)
    return kernels.resolve([sums])[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_squares_made_of_integers_are_those_of_doubles(dtype: torch.dtype, device: EmulatedKernels) -> None:
    """Of every value that there is: zeros, subnormal numbers, the largest, inf and NaN among them."""
    assert library().other_squares(GRAD_DTYPES.index(dtype)) == 0


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_gradients_and_their_sums(dtype: torch.dtype, shift: int, device: EmulatedKernels) -> None:
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
def test_sums_in_24_bits(dtype: torch.dtype, shift: int, device: EmulatedKernels) -> None:
    for n in (*LENGTHS, 10_000):
        src = shifted(to_dtype(any_bits(n, 5), dtype), shift)
        hi, lo = (shifted(torch.zeros(n, dtype=kind), shift) for kind in (torch.bfloat16, torch.int8))
        wanted = hi.clone(), lo.clone()
        for doing in ("first24", "add24", "add24"):
            sums = run_grad(device, doing, hi, src, lo)
            assert same_sums(sums, kernels.sum_grad24(*wanted, src, adding=doing == "add24")), (doing, n)
            assert_same_bits(hi, wanted[0], f"upper bits of {n}")
            assert_same_bits(lo, wanted[1], f"lower bits of {n}")
