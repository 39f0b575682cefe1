"""On a GPU: the CUDA kernels give the bits of the CPU kernels, and nobody waits for them but ``resolve``.

The same bodies run on the host in tests/native (test_cuda_bodies, test_device_sums); here the device runs them, with
its own arithmetic, warps and streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import gemini
from gemini import kernels, rules
from gemini.kernels import DeviceSums, Segment
from gemini.kernels.cuda import CudaKernels
from tests import models
from tests.gpu.gpu_cases import takes_time
from tests.native import rule_cases
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

ADAMW = adam(step=3, grad_scale=0.37, weight_decay=0.1)
L2 = adam(step=7, lr=2e-3, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, decoupled=False)
BIG = (1 << 21) + 4097


@pytest.fixture(autouse=True)
def built() -> None:
    assert kernels.capabilities().cuda, f"no CUDA kernel runs here: {kernels.capabilities()}"


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Torch raises where it would let the host wait for the device."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def arrays(n: int, is_split: bool, dtype: torch.dtype, seed: int = 0) -> list[Tensor | None]:
    """On the host, of any bits: all magnitudes, subnormals, inf and NaN."""
    p, m, v, g = (any_bits(n, 4 * seed + number).clone() for number in range(4))
    hi, lo = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    kernels.split_master(p, hi, lo)
    return [hi if is_split else p, lo if is_split else None, m, v.abs(), to_dtype(g, dtype)]


def on_card(tensors: list[Tensor | None], shift: int = 0) -> list[Any]:
    """``shift`` elements off an aligned address."""
    result: list[Any] = []
    for tensor in tensors:
        if tensor is not None:
            room = torch.empty(len(tensor) + shift, dtype=tensor.dtype, device="cuda")
            room[shift:].copy_(tensor)
            tensor = room[shift:]
        result.append(tensor)
    return result


def assert_all_same(given: list[Any], expected: list[Any]) -> None:
    for name, a, b in zip(("weights", "residual", "exp_avg", "exp_avg_sq", "grad"), given, expected, strict=True):
        if b is not None:
            assert_same_bits(a.cpu(), b, name)


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "fp32"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_adam_is_the_cpu_kernel_s(dtype: torch.dtype, is_split: bool, shift: int) -> None:
    for hyper in ({"grad_scale": 0.37}, {"lr": 2e-3, "betas": (0.8, 0.99), "eps": 1e-6, "decoupled": False}):
        expected: list[Any] = arrays(BIG, is_split, dtype)
        given = on_card(expected, shift)
        for step in range(3):  # what an update made of special values is the next one's input
            scalars = adam(step=1 + step, weight_decay=0.1, **hyper)
            adam_update(*expected, scalars)
            with nobody_waits():
                adam_update(*given, scalars)
        assert_all_same(given, expected)


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize(("which", "is_split"), rule_cases.WAYS)
def test_rules_are_the_cpu_kernel_s(which: str, is_split: bool, shift: int) -> None:
    """Also of compact states: eight threads agree on a scale, whatever the length of the param."""
    case = rule_cases.CASES[which]
    bounds = ((0, 4097), (8192, BIG - 65)) if case.is_compact else ((3, BIG - 5),)
    segments = [rules.Segment(begin, end, case.scalars(), rules.Where(f"p{begin}", 128)) for begin, end in bounds]
    expected = rule_cases.arrays(case.rule, BIG, is_split, torch.bfloat16)
    before = rule_cases.flat(expected)
    given = rule_cases.renewed(expected, dict(zip(before, on_card([*before.values()], shift), strict=True)))
    case.rule.run(expected, segments)
    with nobody_waits():
        case.rule.run(given, segments)
    found = {name: tensor.cpu() for name, tensor in rule_cases.flat(given).items()}
    rule_cases.assert_alike(rule_cases.renewed(expected, found), expected, which)


@pytest.mark.parametrize("is_split", [True, False], ids=["split", "fp32"])
def test_segments_go_together_and_leave_what_is_between(is_split: bool) -> None:
    """More of them than one launch holds, beginning and ending anywhere."""
    n = 40_000
    edges = [3, 8, 8, 15, 64, 4101, *range(4200, 4400, 2), 6000, 8999, 9001, 39_999]
    segments = [
        Segment(begin, end, ADAMW if number % 2 else L2)
        for number, (begin, end) in enumerate(zip(edges[:-1], edges[1:], strict=True))
        if number != 5
    ]
    assert len(segments) > 2 * 48
    expected: list[Any] = arrays(n, is_split, torch.bfloat16)
    given, scale = on_card(expected), torch.tensor([0.25])
    scale_there = scale.cuda()
    adam_update(*expected, segments, grad_scale=scale)
    with nobody_waits():
        stop = torch.zeros(1, dtype=torch.int32, device="cuda")
        adam_update(*given, segments, grad_scale=scale_there, stop=stop)
    assert_all_same(given, expected)
    with nobody_waits():
        adam_update(*given, segments, stop=stop.fill_(1))
    assert_all_same(given, expected)


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
def test_gradients_and_their_sums(dtype: torch.dtype, shift: int) -> None:
    """Of many calls, which one copy brings: those of ordinary values, and of any bits."""
    sources = [to_dtype(torch.randn(n, generator=torch.Generator().manual_seed(n)), dtype) for n in (*LENGTHS, BIG)]
    sources.append(to_dtype(any_bits(100_000, 5), dtype))
    expected: list[kernels.Sums] = []
    found: list[kernels.Sums] = []
    written: list[tuple[Tensor, Tensor]] = []
    for src in sources:
        (there,) = on_card([src], shift)
        halves = torch.ones(len(src), dtype=torch.bfloat16), torch.ones(len(src), dtype=torch.int8)
        targets = [torch.empty_like(src), torch.zeros(len(src)), torch.ones(len(src)), *halves]
        on_device = on_card([*targets], shift)
        for into, sums, values in ((targets, expected, src), (on_device, found, there)):
            with nobody_waits():
                sums.append(kernels.sum_squares(values))
                sums.append(kernels.copy_grad(into[0], values))
                sums.append(kernels.copy_grad(into[1], values))
                sums.append(kernels.accumulate_grad(into[2], values))
                sums.append(kernels.sum_grad24(into[3], into[4], values, adding=True))
        written += zip(on_device, targets, strict=True)
    assert all(isinstance(part, DeviceSums) for sums in found for part in sums)
    for sums, wanted in zip(kernels.resolve(found), expected, strict=True):
        assert same_sums(sums, wanted)  # type: ignore[arg-type]
    for given, wanted in written:
        assert_same_bits(given.cpu(), wanted, f"{len(wanted)} elements")


def test_sums_of_another_stream_are_waited_for() -> None:
    src = torch.randn(BIG, generator=torch.Generator().manual_seed(1))
    expected, side = kernels.total(kernels.sum_squares(src)), torch.cuda.Stream()  # type: ignore[arg-type]
    for _ in range(5):
        with torch.cuda.stream(side):
            there = src.cuda()
            for _ in range(20):
                there = there * 1.0
            sums = kernels.sum_squares(there)
        assert kernels.totals([sums]) == [expected]


@takes_time
def test_sums_on_a_stream_of_their_own_come_before_what_is_under_way() -> None:
    src = torch.randn(BIG, generator=torch.Generator().manual_seed(1))
    expected, there = kernels.total(kernels.sum_squares(src)), src.cuda()  # type: ignore[arg-type]
    busy = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(200):
        busy = busy @ busy / 4096
    under_way = torch.cuda.Event()
    under_way.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        found = kernels.totals([kernels.sum_squares(there)])
    was_done = under_way.query()
    assert found == [expected] and not was_done, "200 products of 4096 x 4096 take longer than one sum"


@pytest.mark.parametrize("bad", [1.0, float("inf"), float("nan")])
def test_a_flag_stops_the_update_without_the_host(bad: float) -> None:
    grad = torch.ones(BIG, dtype=torch.bfloat16)
    grad[-1] = bad
    expected: list[Any] = [torch.ones(BIG), None, torch.zeros(BIG), torch.zeros(BIG), grad]
    given = on_card(expected)
    whole = [Segment(0, BIG, ADAMW)]
    with nobody_waits():
        sums = [kernels.sum_squares(given[4]), kernels.sum_squares(given[4][:100])]
        flag = kernels.nonfinite_flag(sums)
        adam_update(*given, whole, stop=flag)
    if math.isfinite(bad):
        adam_update(*expected, whole)
    assert_all_same(given, expected)
    assert flag is not None and bool(flag) != math.isfinite(bad)
    assert math.isfinite(kernels.totals(sums)[0]) == math.isfinite(bad)


@pytest.mark.parametrize("max_norm", [0.0, 1.0, math.inf])
def test_the_clip_factor_is_the_host_s(max_norm: float) -> None:
    """Of gradients of several tiles: each one's are added first, and in order, as the host does."""
    cuda = kernels._cuda
    assert cuda is not None
    for several in ([[3.0, 1e16, 1.0], [1.0, 1.0]], [[0.25], []], [[math.inf, 1.0]], [[1.0], [math.nan]]):
        there = [[torch.tensor([tile], dtype=torch.float64, device="cuda") for tile in tiles] for tiles in several]
        cuda.clip_factor(there, max_norm)  # the first time, it learns how many tiles there are
        with nobody_waits():
            norm, factor, nonfinite = cuda.clip_factor(there, max_norm)
        wanted = math.sqrt(kernels.total([kernels.total(tiles) for tiles in several]))
        assert norm.item() == wanted or math.isnan(wanted)
        assert factor.cpu().equal(torch.tensor([kernels.clip_coefficient(wanted, max_norm)]))
        assert int(nonfinite) == (not math.isfinite(wanted))


@pytest.mark.parametrize("gradients", ["retain", "transient"])
def test_backward_of_a_model_on_the_card_waits_for_nothing(gradients: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plane on the GPU: the host waits for no gradient, or once in a step, for all that backward has used."""
    waits: list[int] = []
    fetch = CudaKernels.fetch

    def counted(self: CudaKernels, tensors: Any) -> list[float]:
        waits.append(len(tensors))
        return fetch(self, tensors)

    monkeypatch.setattr(CudaKernels, "fetch", counted)
    config = gemini.GeminiConfig(
        gradients=gradients,
        memory=gemini.MemoryBudget(gpu="3GiB", cpu="1GiB"),
        placement=gemini.StaticPlacement(weights_on_gpu=1, optimizer_on_gpu=1),
    )
    model = gemini.GeminiDDP(models.make_model("llama"), config)
    optimizer = gemini.HybridAdam(model.parameters(), step_in_backward=gradients == "transient")
    for number, (batch,) in enumerate(models.make_batches(4, 1)):
        loss = model(**{name: value.cuda() for name, value in batch.items()}).loss
        # At first cuBLAS sets itself up, and the kernel that clips learns how many tiles there are.
        with nobody_waits() if number else nullcontext():
            loss.backward()
            if gradients == "retain":
                model.clip_grad_norm_(1.0)
                optimizer.step()
        if gradients == "transient":
            optimizer.step()
        optimizer.zero_grad()
        assert len(waits) == (number + 1 if gradients == "transient" else 0)
