"""Compact states: the format does what it is for. Its kernels are tested in test_rule_kernels.py."""

import pytest
import torch
from torch import Tensor

from gemini import kernels
from gemini.kernels.reference import decode, encode
from gemini.optim import AdamRule
from gemini.optim.around import CompactRule
from gemini.rules import Arrays, Segment, Where
from tests import kernel_settings
from tests.native.native_cases import NATIVE_ISAS, adam_update, any_bits, as_bits

needs_native = pytest.mark.skipif(not NATIVE_ISAS, reason="the native library is not built")


@needs_native
@pytest.mark.parametrize("n", [0, 1, 65, 100_003])
def test_a_master_of_24_bits_is_the_nearest(n: int) -> None:
    master = any_bits(n, 3).clone()
    found = []
    for isa in ("reference", *NATIVE_ISAS):
        hi, lo, out = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int8), torch.empty(n)
        with kernel_settings.use_isa(isa):
            kernels.split_master(master, hi, lo)
            kernels.join_master(hi, lo, out)
        found.append((as_bits(hi), lo, as_bits(out)))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(others, found[0], strict=True))
    back = found[0][2].view(torch.float32)
    normal = master.isfinite() & (master.abs() >= 2.0**-126) & (master.abs() < 3e38)
    assert ((back - master).abs()[normal] <= master.abs()[normal] * 2.0**-16).all()
    assert (found[0][2] & 0xFF == 0).all() and torch.equal(back.isnan(), master.isnan())


# ---- the format ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=["signed", "squares"])
def test_every_code_comes_back(dtype: torch.dtype) -> None:
    """Of a block with its largest code in it, then the scale comes back too (where no value is subnormal)."""
    codes = torch.arange(-127, 128).to(torch.int8) if dtype is torch.int8 else torch.arange(256).to(torch.uint8)
    blocks = torch.stack([c.new_full((64,), int(codes.max())) for c in codes])
    blocks[:, 1] = codes
    flat = blocks.view(-1)
    for exponent in (40, 60, 127, 253):
        scales = torch.full((len(codes),), exponent, dtype=torch.uint8)
        again, scales_again = torch.empty_like(flat), torch.empty_like(scales)
        encode(decode(flat, scales), again, scales_again)
        assert torch.equal(scales_again, scales)
        assert torch.equal(again, flat), f"exponent {exponent}"


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=["signed", "squares"])
def test_half_way_between_two_codes_is_half_way_between_their_values(dtype: torch.dtype) -> None:
    """The nearest code is the nearest value, and a code that is right in the mean a value that is: not below code 4."""
    largest = torch.iinfo(dtype).max
    codes = torch.arange(4, largest, dtype=torch.int32)
    scales = torch.full((len(codes),), 127, dtype=torch.uint8)
    low, high, found = (torch.full((len(codes), 64), largest, dtype=dtype) for _ in range(3))
    low[:, 1], high[:, 1] = codes, codes + 1
    middle = (decode(low.view(-1), scales) + decode(high.view(-1), scales)) / 2
    for factor, expected in ((1 - 2**-20, low), (1 + 2**-20, high)):
        values = middle.view(-1, 64).clone()
        values[:, 1] *= factor
        encode(values.view(-1), found.view(-1), scales)
        assert torch.equal(found, expected)


def test_scales_are_the_least_and_squares_never_vanish() -> None:
    values = torch.randn(64 * 500, generator=torch.Generator().manual_seed(0)) ** 3
    scales = torch.empty(500, dtype=torch.uint8)
    signed, squares = (torch.empty(len(values), dtype=dtype) for dtype in (torch.int8, torch.uint8))
    encode(values, signed, scales)
    scale = (scales.int() << 23).view(torch.float32).repeat_interleave(64).double()
    largest = values.abs().view(-1, 64).amax(1).repeat_interleave(64)
    assert ((scale * 63 / 64 >= largest) & (scale * 63 / 128 < largest)).all()
    tiny = values.abs() * torch.where(torch.arange(len(values)) % 64 == 0, 1.0, 1e-30)
    encode(tiny, squares, scales, dither=7)
    assert (squares > 0).all() and (decode(squares, scales) > 0).all()
    for extreme in (0.0, 1e-45, 3e38, float("inf"), float("nan")):
        block = torch.full((64,), extreme)
        encode(block, squares[:64], scales[:1])
        found = decode(squares[:64], scales[:1])
        assert torch.isfinite(found).all() and (found == 0).all() == (extreme == 0.0), extreme


def test_the_dither_is_right_in_the_mean() -> None:
    """Over 512 steps each element's code is rounded up as often as its fraction says; without it, never or always."""
    values = torch.rand(64 * 64, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.05
    codes, scales = torch.empty(len(values), dtype=torch.uint8), torch.empty(64, dtype=torch.uint8)
    total = torch.zeros(len(values), dtype=torch.float64)
    for step in range(512):
        encode(values, codes, scales, dither=(step * 0x9E3779B9) & 0xFFFFFFFF)
        total += decode(codes, scales)
    error = (total / 512 / values - 1).abs()
    assert error.max() < 1e-3 and abs(float((total / 512 / values - 1).mean())) < 2e-5
    encode(values, codes, scales)
    assert (decode(codes, scales) / values - 1).abs().max() > 5e-3


def lengths_of_updates(steps: int, shrinks_at: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Adam on gradients whose sizes spread in every block, half of which become a tenth: the updates of the last step,
    exact and compact, of those that stay and of those that shrink.
    """
    n, generator = 2**14, torch.Generator().manual_seed(0)
    rule, exact = CompactRule(AdamRule()), AdamRule()
    spread = torch.exp(torch.randn(n, generator=generator)) * 1e-4
    shrinking = torch.rand(n, generator=generator) < 0.5
    states = {s.kind: torch.zeros(s.num_items(n), dtype=getattr(torch, s.dtype)) for s in rule.spec.planes}
    hi, lo = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.int8)
    master, m, v = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    for step in range(1, steps + 1):
        if step == shrinks_at:
            spread = torch.where(shrinking, spread / 10, spread)
        grad = torch.randn(n, generator=generator) * spread
        scalars = exact.scalars({**exact.defaults, "weight_decay": 0.0}, step, 1.0)
        rule.run(Arrays(hi, lo, states, grad), [Segment(0, n, scalars, Where("w", 0))])
        adam_update(master, None, m, v, grad, scalars)
    ours = decode(states["exp_avg"], states["exp_avg_scale"]), decode(states["exp_avg_sq"], states["exp_avg_sq_scale"])
    coarse, fine = (a / (b.sqrt() + 1e-12) for a, b in (ours, (m, v)))
    return fine[~shrinking], coarse[~shrinking], fine[shrinking], coarse[shrinking]


def test_updates_are_as_long_as_they_should_be() -> None:
    """Also where gradients shrink, which averages of squares have to follow: rounded to the nearest they would stay."""
    fine, coarse, fine_small, coarse_small = lengths_of_updates(1000, 300)
    along = (coarse * fine).sum() / (fine * fine).sum()
    assert abs(float(along) - 1) < 0.012, float(along)
    assert (coarse - fine).norm() / fine.norm() < 0.1
    ratio = float(coarse_small.abs().mean() / fine_small.abs().mean())
    assert 0.95 < ratio < 1.08, ratio
