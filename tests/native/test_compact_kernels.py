"""Compact states: every kernel has the bits of the torch lines, and the format does what it is for."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gemini import kernels
from gemini.kernels.reference import decode, encode
from gemini.optim import AdamRule, LionRule, PlainSGDRule, SGDRule
from gemini.optim.compact import CompactRule
from gemini.rules import Arrays, Segment, UpdateRule, Where
from tests.native.emulated_cuda import emulate
from tests.native.native_cases import GRAD_DTYPES, NATIVE_ISAS, adam_update, any_bits, as_bits, to_dtype

needs_native = pytest.mark.skipif(not NATIVE_ISAS, reason="the native library is not built")
CASES: dict[str, tuple[UpdateRule, dict[str, Any], int]] = {
    "adamw": (AdamRule(), {"weight_decay": 0.1}, 3),
    "adam": (AdamRule(), {"weight_decay": 0.1, "decoupled": False}, 1),
    "sgd": (SGDRule(), {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, 3),
    "plain sgd": (PlainSGDRule(), {"lr": 0.1, "weight_decay": 0.1}, 3),
    "lion": (LionRule(), {"lr": 1e-3, "weight_decay": 0.1}, 3),
}
SEGMENTS = ((0, 1), (64, 130), (192, 256), (256, 1000), (1024, 3001))


def scalars_of(which: str, grad_scale: float = 0.37) -> Any:
    rule, hypers, step = CASES[which]
    return rule.scalars({**rule.defaults, **hypers}, step, grad_scale)


def arrays(which: str, n: int, dtype: torch.dtype) -> list[Any]:
    """weights, residual, codes and scales by name, grad; of any bits."""
    rule, generator = CompactRule(CASES[which][0]), torch.Generator().manual_seed(n)
    hi, lo = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int8)
    with kernels.use_isa("reference"):
        kernels.split_master(any_bits(n, 1), hi, lo)
    states = {}
    for spec in rule.spec.planes:
        low, high = (0, 254) if spec.block > 1 else (-127, 128) if spec.dtype == "int8" else (0, 256)
        size = (spec.num_items(n),)
        states[spec.kind] = torch.randint(low, high, size, generator=generator).to(getattr(torch, spec.dtype))
    return [hi, lo, states, to_dtype(any_bits(n, 4), dtype)]


def updated(isa: str, which: str, given: list[Any], segments: Sequence[Segment], stop: Any = None) -> dict[str, Tensor]:
    """Copies after one update, by name."""
    hi, lo, states, grad = given
    hi, lo, states = hi.clone(), lo.clone(), {kind: state.clone() for kind, state in states.items()}
    with kernels.use_isa(isa):
        CompactRule(CASES[which][0]).run(Arrays(hi, lo, states, grad), segments, stop)
    return {"weights": as_bits(hi), "residual": lo, **states}


def assert_alike(given: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, wanted in expected.items():
        assert torch.equal(given[name], wanted), f"{what}: {name}, {int((given[name] != wanted).sum())} differ"


@pytest.mark.sweep(every=1)
@needs_native
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("which", CASES)
def test_every_isa_gives_the_bits_of_the_torch_lines(which: str, dtype: torch.dtype) -> None:
    for n in (0, 1, 63, 64, 65, 511, 512, 513, 100_003):
        given = arrays(which, n, dtype)
        whole = [Segment(0, n, scalars_of(which), Where("a.weight", 128))]
        expected = updated("reference", which, given, whole)
        for isa in NATIVE_ISAS:
            assert_alike(updated(isa, which, given, whole), expected, f"{isa}, n = {n}")


@pytest.mark.slow  # a compiler runs; test_cuda_bodies.py shows the same of Adam's
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("which", CASES)
def test_the_text_of_the_cuda_kernels_gives_them(
    which: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several params in a launch, of arrays that are not aligned, and of a launch that is stopped."""
    several = segments_of(which)
    given = arrays(which, 3005, dtype)
    moved = [{k: shifted(v) for k, v in x.items()} if isinstance(x, dict) else shifted(x) for x in given]
    stop = torch.ones(1, dtype=torch.int32)
    for some, what in ((given, "aligned"), (moved, "not aligned")):
        expected = updated("reference", which, some, several)
        with monkeypatch.context() as patch:
            emulated = emulate(patch)
            assert_alike(updated("scalar", which, some, several), expected, what)
            before = {"weights": as_bits(some[0]), "residual": some[1], **some[2]}
            assert_alike(updated("scalar", which, some, several, stop), before, "stopped")
            assert emulated.module.launches["update_compact"] == 2


def shifted(tensor: Tensor) -> Tensor:
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    room[1:].copy_(tensor)
    return room[1:]


def segments_of(which: str) -> list[Segment]:
    """Of params that begin at different places in themselves."""
    first, second = scalars_of(which), scalars_of(which, grad_scale=0.5)
    return [
        Segment(begin, end, (first, second)[number % 2], Where(f"p{number}", 4096 * number))
        for number, (begin, end) in enumerate(SEGMENTS)
    ]


@needs_native
@pytest.mark.parametrize("which", CASES)
def test_parts_of_a_param_have_the_bits_of_the_whole(which: str) -> None:
    """The dither and the blocks depend on the place in the param alone; what is between segments is left."""
    given, scalars = arrays(which, 5000, torch.bfloat16), scalars_of(which)
    whole = updated("scalar", which, given, [Segment(0, 5000, scalars, Where("w", 4096))])
    cuts = (0, 64, 1024, 4992, 5000)
    parts = [Segment(a, b, scalars, Where("w", 4096 + a)) for a, b in zip(cuts, cuts[1:], strict=False)]
    before = {"weights": as_bits(given[0]), "residual": given[1], **given[2]}
    for isa in ("reference", *NATIVE_ISAS):
        assert_alike(updated(isa, which, given, parts), whole, isa)
        few = updated(isa, which, given, parts[1:2])
        assert torch.equal(few["weights"][1024:], before["weights"][1024:])
        assert all(torch.equal(few[k][16:], before[k][16:]) for k in before if k.endswith("_scale"))
    other = updated("scalar", which, given, [Segment(0, 5000, scalars, Where("x", 4096))])
    assert ("exp_avg_sq" in whole) == any(not torch.equal(other[kind], whole[kind]) for kind in whole)


def test_what_is_no_compact_update_is_refused() -> None:
    hi, lo, states, grad = arrays("adamw", 256, torch.float32)
    rule, scalars = CompactRule(AdamRule()), scalars_of("adamw")
    with pytest.raises(ValueError, match="begin at multiples of 64"):
        rule.run(Arrays(hi, lo, states, grad), [Segment(32, 256, scalars, Where("w", 0))])
    with pytest.raises(ValueError, match=r"residual: int16 of shape .*accepted: int8"):
        rule.run(Arrays(hi, lo.short(), states, grad), [Segment(0, 256, scalars, Where("w", 0))])
    short = {**states, "exp_avg_scale": states["exp_avg_scale"][:3]}
    with pytest.raises(ValueError, match="exp_avg_scale is 4 contiguous uint8"):
        rule.run(Arrays(hi, lo, short, grad), [Segment(0, 256, scalars, Where("w", 0))])
    if NATIVE_ISAS:
        other = [Segment(0, 256, (0.0,) * 7 + ("sophia",), Where("w", 0))]
        with pytest.raises(ValueError, match="a rule without a compact form"):
            kernels.update(Arrays(hi, lo, states, grad), rule.spec, other)


@needs_native
@pytest.mark.parametrize("n", [0, 1, 65, 100_003])
def test_a_master_of_24_bits_is_the_nearest(n: int) -> None:
    master = any_bits(n, 3).clone()
    found = []
    for isa in ("reference", *NATIVE_ISAS):
        hi, lo, out = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int8), torch.empty(n)
        with kernels.use_isa(isa):
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
