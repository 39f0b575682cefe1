"""The kernels of SGD, Lion, Adan and Sophia-G: the bits of their torch lines, on every instruction set and in the text
that the CUDA kernels are compiled from."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rule_cases import CASES, arrays, copied, flat, scalars_of

from gemini import kernels
from gemini.rules import Arrays, Segment, UpdateRule
from tests.native.emulated_cuda import emulate
from tests.native.native_cases import GRAD_DTYPES, NATIVE_ISAS, any_bits, as_bits, assert_same_bits

needs_native = pytest.mark.skipif(not NATIVE_ISAS, reason="the native library is not built")
SEGMENTS = ((0, 1), (1, 7), (9, 500), (500, 3001))


def updated(isa: str, rule: UpdateRule, given: list[Any], segments: Sequence[Segment], stop: Any = None) -> list[Any]:
    """Copies after one update."""
    result = copied(given)
    with kernels.use_isa(isa):
        rule.run(Arrays(*result), segments, stop)
    return result


def assert_alike(given: list[Any], expected: list[Any], what: str) -> None:
    for name, wanted in flat(expected).items():
        found = flat(given)[name]
        if wanted.element_size() == 2 and name != "grad":  # halves of a master: NaN is canonical there
            assert torch.equal(as_bits(found), as_bits(wanted)), f"{what}: {name}"
        assert_same_bits(found, wanted, f"{what}: {name}")


@pytest.mark.sweep(every=1)
@needs_native
@pytest.mark.parametrize("is_split", [False, True], ids=["fp32", "split"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("which", CASES)
def test_every_isa_gives_the_bits_of_the_torch_lines(which: str, dtype: torch.dtype, is_split: bool) -> None:
    rule, scalars = CASES[which][0], scalars_of(CASES[which])
    for n in (0, 1, 7, 63, 64, 65, 511, 512, 513, 100_003):
        given, whole = arrays(rule, n, is_split, dtype), [Segment(0, n, scalars)]
        expected = updated("reference", rule, given, whole)
        for isa in NATIVE_ISAS:
            assert_alike(updated(isa, rule, given, whole), expected, f"{isa}, n = {n}")


@pytest.mark.slow  # a compiler runs; test_cuda_bodies.py shows the same of Adam's
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("is_split", [False, True], ids=["fp32", "split"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("which", CASES)
def test_the_text_of_the_cuda_kernels_gives_them(
    which: str, dtype: torch.dtype, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of segments that begin and end anywhere, of arrays that are not aligned, and of a launch that is stopped."""
    rule, scalars = CASES[which][0], scalars_of(CASES[which])
    other = scalars_of(CASES[which], grad_scale=0.5)
    segments = [Segment(begin, end, (scalars, other)[number % 2]) for number, (begin, end) in enumerate(SEGMENTS)]
    given = arrays(rule, 3005, is_split, dtype)
    moved = [None if x is None else {k: v[1:] for k, v in x.items()} if isinstance(x, dict) else x[1:] for x in given]
    stop = torch.ones(1, dtype=torch.int32)
    for some, what in ((given, "aligned"), (moved, "not aligned")):
        expected = updated("reference", rule, some, segments)
        with monkeypatch.context() as patch:
            emulated = emulate(patch)
            assert_alike(updated("scalar", rule, some, segments), expected, what)
            assert_alike(updated("scalar", rule, some, segments, stop), some, "stopped")
            assert emulated.module.launches["update"] == 2


@needs_native
@pytest.mark.parametrize("which", CASES)
def test_segments_go_each_their_own_way_and_leave_what_is_between(which: str) -> None:
    rule, first = CASES[which][0], scalars_of(CASES[which])
    second = scalars_of(CASES[which], grad_scale=0.5)
    segments = [Segment(begin, end, (first, second)[number % 2]) for number, (begin, end) in enumerate(SEGMENTS)]
    given = arrays(rule, 3005, True, torch.bfloat16)
    expected = copied(given)
    for begin, end, scalars, _ in segments:
        part = slice(begin, end)
        weights, residual, states, grad = expected
        master = torch.empty(end - begin)
        kernels.join_master(weights[part], residual[part], master)
        rule.update(master, grad[part], {kind: state[part] for kind, state in states.items()}, scalars, None)
        kernels.split_master(master, weights[part], residual[part])
    for isa in ("reference", *NATIVE_ISAS):
        assert_alike(updated(isa, rule, given, segments), expected, isa)
        flag = torch.ones(1, dtype=torch.int32)
        assert_alike(updated(isa, rule, given, segments, flag), given, f"{isa}, stopped")


def test_arrays_and_scalars_of_another_rule_are_refused() -> None:
    rule, scalars = CASES["lion"][0], scalars_of(CASES["lion"])
    weights, moment, grad = (any_bits(64, seed).clone() for seed in range(3))
    with pytest.raises(ValueError, match="update: exp_avg and grad overlap"):
        rule.run(Arrays(weights, None, {"exp_avg": grad}, grad), [Segment(0, 64, scalars)])
    with pytest.raises(ValueError, match="exp_avg: bfloat16 .*accepted: float32"):
        rule.run(Arrays(weights, None, {"exp_avg": moment.bfloat16()}, grad), [Segment(0, 64, scalars)])
    with pytest.raises(ValueError, match="segments ascend inside the 64 elements"):
        rule.run(Arrays(weights, None, {"exp_avg": moment}, grad), [Segment(0, 65, scalars)])
    if NATIVE_ISAS:
        before = weights.clone()
        for states, others, words in (
            ({"exp_avg": moment}, scalars_of(CASES["adan"]), "states of another rule"),
            ({"exp_avg": moment}, (1.0, "lion"), "scalars of another rule"),
            ({"exp_avg": moment}, (1.0, "tiger"), "no rule is called tiger"),
        ):
            with pytest.raises(ValueError, match=words):
                kernels.update(Arrays(weights, None, states, grad), rule.spec, [Segment(0, 64, others)])
        assert_same_bits(weights, before)
