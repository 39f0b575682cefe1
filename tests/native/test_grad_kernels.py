"""Copy, accumulate and norm of gradients: one tree of sums whatever runs it, and close to the true norm."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gemini import kernels
from gemini.kernels import NORM_BLOCK, NORM_LANES, NORM_TILE
from tests import kernel_settings
from tests.native.native_cases import (
    GRAD_DTYPES,
    LENGTHS,
    NATIVE_ISAS,
    any_bits,
    as_bits,
    assert_same_bits,
    same_sums,
    to_dtype,
)

needs_native = pytest.mark.skipif(not NATIVE_ISAS, reason="the native library is not built")
ISAS = kernels.capabilities().isas


def tree_sums(x: Tensor) -> list[float]:
    """The tree in numpy, element order as the contract has it, with no shortcut for short blocks."""
    values = x.float().numpy().astype(np.float64)
    tiles = []
    for tile in range(0, len(values), NORM_TILE):
        total = 0.0
        for at in range(tile, min(tile + NORM_TILE, len(values)), NORM_BLOCK):
            block = np.zeros(NORM_BLOCK)
            part = values[at : min(at + NORM_BLOCK, tile + NORM_TILE)]
            block[: len(part)] = part
            lanes = np.zeros(NORM_LANES)
            with np.errstate(all="ignore"):
                for row in block.reshape(-1, NORM_LANES):
                    lanes = lanes + row * row
                while len(lanes) > 1:
                    lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
                total = total + float(lanes[0])
        tiles.append(total)
    return tiles


def gradient(n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_sums_are_the_written_tree(dtype: torch.dtype, isa: str) -> None:
    with kernel_settings.use_isa(isa):
        for n in (0, 1, 31, 33, 4095, 4096, 4097, 70_001, NORM_TILE + 4097):
            x = gradient(n, dtype)
            assert same_sums(kernels.sum_squares(x), tree_sums(x)), n


@needs_native
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_every_isa_gives_the_reference_sums_and_bits(dtype: torch.dtype) -> None:
    for n in LENGTHS:
        src, acc = to_dtype(any_bits(n, 1), dtype), any_bits(n, 2)
        results = []
        for isa in ISAS:
            with kernel_settings.use_isa(isa):
                same, wide, added = torch.empty_like(src), torch.empty(n), acc.clone()
                twice, rounded = acc.clone(), torch.empty(n, dtype=torch.bfloat16)
                sums = [
                    kernels.sum_squares(src),
                    kernels.copy_grad(same, src),
                    kernels.copy_grad(wide, src),
                    kernels.accumulate_grad(added, src),
                    kernels.accumulate_grad(twice, src, rounded),
                ]
                assert torch.equal(as_bits(same), as_bits(src)), "a copy keeps even the NaNs"
                assert same_sums(sums[0], sums[1]) and same_sums(sums[0], sums[2])
                assert same_sums(sums[3], kernels.sum_squares(added))
                assert same_sums(sums[4], kernels.sum_squares(rounded))
                assert_same_bits(twice, added, isa)
                assert_same_bits(rounded, added.bfloat16(), isa)
                results.append((sums, wide, added))
        for isa, (sums, wide, added) in zip(ISAS, results, strict=True):
            assert all(same_sums(a, b) for a, b in zip(sums, results[0][0], strict=True)), (isa, n)
            assert_same_bits(wide, results[0][1], isa)
            assert_same_bits(added, results[0][2], isa)


@needs_native
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_every_isa_gives_the_same_sums_in_24_bits(dtype: torch.dtype) -> None:
    for n in LENGTHS:
        src, master = to_dtype(any_bits(n, 1), dtype), any_bits(n, 2)
        results = []
        for isa in ISAS:
            with kernel_settings.use_isa(isa):
                hi, lo = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int8)
                kernels.split_master(master, hi, lo)
                first = torch.empty_like(hi), torch.empty_like(lo)
                sums = [kernels.sum_grad24(hi, lo, src, adding=True), kernels.sum_grad24(*first, src, adding=False)]
                assert same_sums(sums[0], kernels.sum_squares(hi)) and same_sums(sums[1], kernels.sum_squares(first[0]))
                results.append((hi, lo, *first))
        for isa, found in zip(ISAS, results, strict=True):
            for tensor, wanted in zip(found, results[0], strict=True):
                assert_same_bits(tensor, wanted, isa)


def test_sums_in_24_bits_lose_less_than_those_in_16() -> None:
    """Of 64 gradients, against the sum in fp64: as good as one rounding to bf16 where no error is kept is far off."""
    n = 4096
    hi, lo, plain = torch.zeros(n).bfloat16(), torch.zeros(n, dtype=torch.int8), torch.zeros(n).bfloat16()
    exact = torch.zeros(n, dtype=torch.float64)
    for seed in range(64):
        grad = (torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 1e-3 + 1e-3).bfloat16()
        kernels.sum_grad24(hi, lo, grad, adding=seed > 0)
        plain += grad
        exact += grad.double()
    rounded = (exact.bfloat16().double() - exact).norm() / exact.norm()
    assert (hi.double() - exact).norm() / exact.norm() < 1.02 * rounded
    assert (plain.double() - exact).norm() / exact.norm() > 4 * rounded


@needs_native
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_threads_do_not_change_sums(dtype: torch.dtype, threads_restored: None) -> None:
    src = gradient(3 * NORM_TILE + 12_345, dtype)
    with kernel_settings.use_isa("reference"):
        expected = kernels.sum_squares(src)
    for num_threads in (1, 2, 3, 7):
        kernel_settings.set_num_threads(num_threads)
        assert kernels.sum_squares(src) == expected
        assert kernels.copy_grad(torch.empty(src.numel()), src) == expected


def test_reference_slabs_do_not_change_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    src = gradient(5 * NORM_TILE + 77, torch.bfloat16)
    with kernel_settings.use_isa("reference"):
        expected = kernels.sum_squares(src)
        monkeypatch.setattr("gemini.kernels.reference._SLAB", NORM_TILE)
        assert kernels.sum_squares(src) == expected
    assert kernels.sum_squares(src) == expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_shows_in_its_tile_only(bad: float, isa: str) -> None:
    src = torch.ones(2 * NORM_TILE + 5)
    src[NORM_TILE + 4321] = bad
    with kernel_settings.use_isa(isa):
        sums = kernels.sum_squares(src)
    assert not math.isfinite(sums[1])
    assert (sums[0], sums[2]) == (NORM_TILE, 5)


def test_total_adds_from_left_to_right() -> None:
    sums = [1e16, 1.0, 1.0, -1e16]
    assert kernels.total(sums) == ((1e16 + 1.0) + 1.0) - 1e16 == 0.0
    assert math.fsum(sums) == 2.0, "a compensated sum would differ, so the test can fail"
    assert kernels.total([]) == 0.0


@needs_native
@pytest.mark.parametrize("isa", NATIVE_ISAS)
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_source_at_an_odd_address(dtype: torch.dtype, isa: str) -> None:
    src = gradient(5000, dtype)
    raw = bytearray(src.nbytes + 3)
    raw[3:] = src.view(torch.uint8).numpy().tobytes()
    odd = torch.frombuffer(raw, dtype=dtype, offset=3)
    assert odd.data_ptr() % 2 == 1
    with kernel_settings.use_isa(isa):
        for dst in (torch.empty_like(src), torch.empty(5000)):
            assert kernels.copy_grad(dst, odd) == kernels.sum_squares(src)
            assert torch.equal(dst, src.to(dst.dtype))
