"""The face of the CUDA kernels, over emulated ones: sums stay on the device until one wait brings all of them. And the
same calls on the CPU, whose bits they have.
"""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import Tensor

from gemini import kernels
from gemini.kernels import DeviceSums
from tests.native.emulated_cuda import EmulatedKernels, emulate
from tests.native.native_cases import GRAD_DTYPES, any_bits, same_sums, to_dtype

BIG = (1 << 20) + 4097  # two tiles, the second of a whole block and one element


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> EmulatedKernels:
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    return emulate(monkeypatch)


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_cuda_for", lambda tensor: None)


def gradients(dtype: torch.dtype) -> list[Tensor]:
    return [to_dtype(any_bits(n, n), dtype) for n in (1, 5000)] + [
        to_dtype(torch.randn(BIG, generator=torch.Generator().manual_seed(1)), dtype)
    ]


# ---- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_one_wait_brings_the_sums_of_many_calls_in_their_bits(
    dtype: torch.dtype, emulated: EmulatedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = gradients(dtype)

    def run() -> list[kernels.Sums]:
        found = [kernels.sum_squares(src) for src in sources]
        found += [kernels.copy_grad(torch.empty_like(src), src) for src in sources]
        found += [kernels.accumulate_grad(torch.ones(len(src)), src) for src in sources]
        found.append(kernels.copy_grad(torch.empty(5000), sources[1]) + kernels.sum_squares(sources[2]))
        return [*found, [2.5, 0.5], []]

    waiting = run()
    assert emulated.num_fetched == [], "nothing is waited for yet"
    assert emulated.module.launches == {"sum_squares": 4, "copy_grad": 4, "accumulate_grad": 3}
    found = kernels.resolve(waiting)
    assert emulated.num_fetched == [11], "all of them in one copy"
    assert kernels.totals(waiting)[-2:] == [3.0, 0.0] and len(emulated.num_fetched) == 1, "known from now on"
    on_cpu(monkeypatch)
    expected = run()
    assert all(isinstance(number, float) for sums in expected for number in sums)
    assert len(found) == len(expected) and all(map(same_sums, found, expected))
    assert [len(sums) for sums in found] == [1, 1, 2] * 3 + [3, 2, 0]


def test_an_empty_tensor_has_no_sums(emulated: EmulatedKernels) -> None:
    assert kernels.sum_squares(torch.empty(0)) == kernels.copy_grad(torch.empty(0), torch.empty(0)) == []
    assert kernels.totals([[], []]) == [0.0, 0.0] and emulated.num_fetched == []


def test_sums_cannot_be_read_before_they_are_there(emulated: EmulatedKernels) -> None:
    sums = kernels.sum_squares(torch.ones(10))
    (waiting,) = sums
    assert isinstance(waiting, DeviceSums) and not waiting.is_here
    with pytest.raises(TypeError):
        kernels.total(sums)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="tolist"):
        waiting.on_device().tolist()
    flag = kernels.nonfinite_flag([sums])
    assert flag is not None
    for read in (bool, int, float, Tensor.item, lambda tensor: (tensor + 1).cpu()):
        with pytest.raises(AssertionError, match="without waiting"):
            read(flag)
    assert kernels.totals([sums]) == [10.0] and waiting.is_here
    with pytest.raises(AssertionError, match="freed"):
        waiting.on_device()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_flags_say_what_the_sums_say(
    bad: float, emulated: EmulatedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    fine, spoilt = torch.ones(BIG), torch.ones(BIG)
    spoilt[-1] = bad
    of_sums = [kernels.nonfinite_flag([kernels.sum_squares(src) for src in (fine, last)]) for last in (fine, spoilt)]
    known, unknown = kernels.sum_squares(spoilt), kernels.sum_squares(fine)
    kernels.resolve([known])
    of_sums.append(kernels.nonfinite_flag([known, unknown]))
    assert kernels.nonfinite_flag([known, [1.0]]) is None and emulated.num_fetched == [1]
    for flag in of_sums:
        assert flag is not None and flag.dtype == torch.int32 and flag.numel() == 1
    assert [bool(emulated.fetch([flag])[0]) for flag in of_sums if flag is not None] == [False, True, True]
    on_cpu(monkeypatch)
    assert kernels.nonfinite_flag([kernels.sum_squares(spoilt)]) is None, "for the host to look at"


@pytest.mark.parametrize("max_norm", [0.0, 1.0, math.inf])
@pytest.mark.parametrize(
    "several", [[[3.0, 1e16, 1.0], [1.0, 1.0]], [[0.25], []], [[math.inf, 1.0], [1.0]], [[1.0], [math.nan]]]
)
def test_the_clip_factor_is_the_host_s(several: list[list[float]], max_norm: float, emulated: EmulatedKernels) -> None:
    """Each gradient's tiles are added first, in order, and then those of all: another order gives other bits."""
    tiles = [torch.tensor(own, dtype=torch.float64) for own in several]
    sums: list[kernels.Sums] = [[DeviceSums(own, None, emulated.fetch)] if own.numel() else [] for own in tiles]
    clip = kernels.clip_factor(sums, max_norm)
    assert clip is not None and emulated.num_fetched == [] and clip.is_of(sums) and not clip.is_of(sums[1:])
    norm = math.sqrt(kernels.total([kernels.total(own) for own in several]))
    wanted = kernels.clip_coefficient(norm, max_norm)
    with torch._C.DisableTorchFunctionSubclass():
        assert clip.norm.item() == norm or math.isnan(norm)
        assert clip.factor.equal(torch.tensor([wanted], dtype=torch.float32))
        assert clip.nonfinite.item() == (not math.isfinite(norm))
    assert clip.coefficient() == wanted and len(emulated.num_fetched) == 1
    assert kernels.clip_factor(sums, max_norm) is None, "the host knows them now"
