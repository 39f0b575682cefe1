"""What the tests of the kernels share: awkward lengths and values, comparison by bits, and an oracle in numpy that
knows neither torch nor our code, so that the torch reference is tested too and not only repeated."""

import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._progress import run
from gemini import kernels
from gemini.rules import ADAM, Arrays, Segment

LENGTHS = (0, 1, 7, 63, 64, 65, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1)
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NATIVE_ISAS = tuple(name for name in kernels.capabilities().isas if name != "reference")
ROOT = Path(__file__).resolve().parents[2]

# fp32 by bits: zeros, the least and greatest subnormals and normals, halfway cases of bf16, inf, quiet and signalling
# NaNs; both signs of each come below.
SPECIAL_BITS = (
    0x00000000, 0x00000001, 0x00000100, 0x007FFFFF, 0x00800000, 0x00800001, 0x00008000, 0x00018000, 0x3F800000,
    0x3F808000, 0x3F807FFF, 0x3F818000, 0x3F81FFFF, 0x33800000, 0x38800000, 0x477FE000, 0x7F7FFFFF, 0x7F7F8000,
    0x7F7F7FFF, 0x7F000000, 0x5F000000, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0x20000000,
)  # fmt: skip


def special_values() -> Tensor:
    positive = np.array(SPECIAL_BITS, dtype=np.uint32)
    return torch.from_numpy(np.concatenate([positive, positive | 0x80000000]).view(np.float32).copy())


@lru_cache(maxsize=64)
def any_bits(n: int, seed: int) -> Tensor:
    """fp32 of random bits (so of all magnitudes, with NaNs and subnormals), every third one ordinary, every third
    special. Shared by the tests: only for reading."""
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32))
    values[::3] = torch.from_numpy(rng.standard_normal(len(values[::3])).astype(np.float32))
    special = special_values()
    values[1::3] = special[torch.from_numpy(rng.integers(0, len(special), len(values[1::3])))]
    return values


def to_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.clone() if dtype == torch.float32 else values.to(dtype)


def as_bits(x: Tensor) -> Tensor:
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_same_bits(given: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal as integers, except that any NaN equals any NaN."""
    assert given.dtype == expected.dtype and given.shape == expected.shape
    differ = as_bits(given) != as_bits(expected)
    if given.is_floating_point():
        differ &= ~(given.isnan() & expected.isnan())
    if differ.any():
        at = int(differ.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {given.numel()} elements differ, the first at {at}: "
            f"{given[at].item()!r} ({as_bits(given)[at].item():#x}) is not "
            f"{expected[at].item()!r} ({as_bits(expected)[at].item():#x})"
        )


def same_sums(given: list[float], expected: list[float]) -> bool:
    return np.array_equal(np.array(given), np.array(expected), equal_nan=True)


def adam(step: int = 1, grad_scale: float = 1.0, **group: Any) -> Any:
    """The scalars of an update by Adam; the defaults are those of the rule."""
    return ADAM.scalars({**ADAM.defaults, **group}, step, grad_scale)


def adam_update(
    weights: Tensor, residual: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor,
    how: Any, **on_device: Tensor | None,
) -> None:  # fmt: skip
    """One update by Adam in place, of all elements, by scalars, or of a list of segments."""
    segments = how if isinstance(how, list) else [Segment(0, weights.numel(), how)]
    arrays = Arrays(weights, residual, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, grad)
    ADAM.run(arrays, segments, **on_device)


def numpy_adam(
    p, m, v, g, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=1, decoupled=True, grad_scale=1.0
):  # fmt: skip
    """The written order in numpy fp32, whose operations are single IEEE operations."""
    f, (beta1, beta2) = np.float32, betas
    c1, c2 = f(1.0 - beta1), f(1.0 - beta2)
    decay, wd = f(1.0 - lr * weight_decay), f(weight_decay)
    neg_step = f(-(lr / (1.0 - beta1**step)))
    inv_sqrt_bc2 = f(1.0 / np.sqrt(1.0 - beta2**step))
    with np.errstate(all="ignore"):
        g = g * f(grad_scale)
        if not decoupled:
            g = g + wd * p
        m = m + (g - m) * c1
        v = v * f(beta2) + (c2 * g) * g
        d = np.sqrt(v) * inv_sqrt_bc2 + f(eps)
        if decoupled:
            p = p * decay
        p = p + (neg_step * m) / d
    return p, m, v


def in_subprocess(code: str, **environment: str) -> str:
    """What a fresh interpreter prints; an error or a hang of it fails the test."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = run([sys.executable, "-c", code], env=env, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
