"""Adam and the split master against others: numpy, torch, any hyperparameters, threads, addresses. That each
instruction set has the bits of the torch lines stands in test_rule_kernels.py.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemini import kernels
from tests import kernel_settings
from tests.native.native_cases import (
    GRAD_DTYPES,
    NATIVE_ISAS,
    adam,
    adam_update,
    any_bits,
    as_bits,
    assert_same_bits,
    numpy_adam,
    special_values,
)

Hyper = dict[str, Any]
HYPER: Hyper = {"weight_decay": 0.1, "step": 3, "grad_scale": 0.37}
L2: Hyper = {"weight_decay": 0.1, "step": 3, "decoupled": False}

needs_native = pytest.mark.skipif(not NATIVE_ISAS, reason="the native library is not built")


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    hi, lo = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    kernels.split_master(master, hi, lo)
    return hi, lo


def join(hi: Tensor, lo: Tensor) -> Tensor:
    out = torch.empty_like(hi, dtype=torch.float32)
    kernels.join_master(hi, lo, out)
    return out


def updated(isa: str, is_split: bool, p: Tensor, m: Tensor, v: Tensor, g: Tensor, hyper: Hyper) -> list[Tensor]:
    """[weights, exp_avg, exp_avg_sq] and the residual if there is one, after one update of copies."""
    with kernel_settings.use_isa(isa):
        weights, residual = split(p) if is_split else (p.clone(), None)
        m, v = m.clone(), v.clone()
        adam_update(weights, residual, m, v, g, adam(**hyper))
    return [weights, m, v] if residual is None else [weights, m, v, residual]


def ordinary(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    p, m, g = (torch.randn(n, generator=rng) * scale for scale in (0.02, 1e-3, 1e-3))
    return p, m, torch.rand(n, generator=rng) * 1e-6, g


@pytest.mark.parametrize("isa", kernels.capabilities().isas)
@pytest.mark.parametrize("hyper", [HYPER, L2], ids=["adamw", "adam"])
def test_every_isa_and_the_reference_give_numpys_bits(isa: str, hyper: Hyper) -> None:
    n = 100_003
    for arrays in (ordinary(n), tuple(any_bits(n, seed) for seed in range(4))):
        expected = numpy_adam(*(x.numpy() for x in arrays), **hyper)
        for given_, wanted in zip(updated(isa, False, *arrays, hyper), expected, strict=True):
            assert_same_bits(given_, torch.from_numpy(wanted), isa)


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    lr=st.floats(0, 1e3),
    betas=st.tuples(st.floats(0, 0.99999), st.floats(0, 0.9999999)),
    eps=st.floats(0, 1),
    weight_decay=st.floats(0, 10),
    step=st.integers(1, 10**7),
    decoupled=st.booleans(),
    grad_scale=st.floats(allow_nan=True, allow_infinity=True, width=64),
    is_split=st.booleans(),
    dtype=st.sampled_from(GRAD_DTYPES),
    n=st.integers(1, 130),
)
def test_any_hyperparameters(is_split: bool, dtype: torch.dtype, n: int, **hyper: Any) -> None:
    p, m, v, g = ordinary(n, seed=n)
    expected = updated("reference", is_split, p, m, v, g.to(dtype), hyper)
    for isa in NATIVE_ISAS:
        for given_, wanted in zip(updated(isa, is_split, p, m, v, g.to(dtype), hyper), expected, strict=True):
            assert_same_bits(given_, wanted, isa)


@needs_native
def test_fp16_is_widened_exactly_whatever_its_bits() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    for isa in NATIVE_ISAS:
        with kernel_settings.use_isa(isa):
            wide = torch.empty(1 << 16)
            kernels.copy_grad(wide, every)
            assert_same_bits(wide, torch.from_numpy(every.numpy().astype(np.float32)), isa)


@needs_native
@pytest.mark.parametrize("is_split", [False, True], ids=["fp32", "split"])
def test_threads_do_not_change_bits(is_split: bool, threads_restored: None) -> None:
    arrays = ordinary(1_000_003)
    results = []
    for num_threads in (1, 2, 3, 7):
        kernel_settings.set_num_threads(num_threads)
        results.append(updated("scalar", is_split, *arrays, HYPER))
    for other in results[1:]:
        assert all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("isa", kernels.capabilities().isas)
def test_split_master_follows_the_fp32_run_exactly(isa: str) -> None:
    n = 3001
    rng = torch.Generator().manual_seed(5)
    weights = torch.randn(n, generator=rng)
    hi, lo = split(weights)
    moments = [torch.zeros(n) for _ in range(4)]
    with kernel_settings.use_isa(isa):
        for step in range(1, 101):
            grad = (torch.randn(n, generator=rng) * 10.0 ** (step % 5 - 3)).bfloat16()
            scalars = adam(step, lr=1e-3 / step, betas=(0.9, 0.95), weight_decay=0.1)
            adam_update(weights, None, *moments[:2], grad.float(), scalars)
            adam_update(hi, lo, *moments[2:], grad, scalars)
            assert torch.equal(join(hi, lo).view(torch.int32), weights.view(torch.int32)), f"step {step}"


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("weights", ["zero", "large"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_one_update_agrees_with_torch(decoupled: bool, weights: str, step: int) -> None:
    # No sum here cancels, so that a relative tolerance means something; from weights of zero one sees the update bare.
    _, m, v, g = (x.abs() for x in ordinary(50_000))
    sign = torch.where(torch.arange(50_000) % 2 == 0, 1.0, -1.0)
    p, m, g = (sign * (0.5 + 100 * g) if weights == "large" else torch.zeros_like(g)), sign * m, sign * g
    if step == 1:
        m, v = torch.zeros_like(m), torch.zeros_like(v)
    theirs = torch.nn.Parameter(p.clone())
    stock = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = stock([theirs], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, foreach=False)
    optimizer.state[theirs] = {"step": torch.tensor(step - 1.0), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    theirs.grad = g.clone()
    optimizer.step()
    adam_update(p, None, m, v, g, adam(step, weight_decay=0.1, decoupled=decoupled))
    state = optimizer.state[theirs]
    for ours, stocks in ((p, theirs.detach()), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        torch.testing.assert_close(ours, stocks, rtol=1e-6, atol=0)


@pytest.mark.parametrize("isa", kernels.capabilities().isas)
def test_split_and_join_are_inverse_and_round_half_away(isa: str) -> None:
    with kernel_settings.use_isa(isa):
        master = torch.cat([special_values(), any_bits(100_000, 9)])
        hi, lo = split(master)
        assert_same_bits(join(hi, lo), master, isa)
        nan = master.isnan()
        assert (as_bits(hi)[nan] == 0x7FC0).all() and (lo[nan] == 0).all()
        bits = master[~nan].view(torch.int32).long() & 0xFFFFFFFF
        assert torch.equal(hi.view(torch.int16)[~nan].long() & 0xFFFF, (bits + 0x8000) >> 16 & 0xFFFF)
        ordinary_weights = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
        half_ulp = ordinary_weights.abs() * 2.0**-8
        assert ((split(ordinary_weights)[0].float() - ordinary_weights).abs() <= half_ulp).all()


@needs_native
@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_any_address_will_do(isa: str) -> None:
    """Gradients out of a file may sit at odd addresses; so may anything else as far as the kernels care."""
    n = 1000
    p, m, v, g = ordinary(n)

    def moved(x: Tensor) -> Tensor:
        raw = bytearray(x.nbytes + 1)
        raw[1:] = x.view(torch.uint8).numpy().tobytes()
        return torch.frombuffer(raw, dtype=x.dtype, offset=1)

    expected = updated("reference", False, p, m, v, g.bfloat16(), HYPER)
    arrays = [moved(x) for x in (p, m, v)]
    with kernel_settings.use_isa(isa):
        adam_update(arrays[0], None, arrays[1], arrays[2], moved(g.bfloat16()), adam(**HYPER))
    for given_, wanted in zip(arrays, expected, strict=True):
        assert_same_bits(given_, wanted)
