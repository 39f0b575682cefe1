"""Params that are codes: chunks of bytes of their own, half a byte per weight in plans, and documents that say so."""

from dataclasses import replace

import pytest

from gemini.errors import PlanMismatch
from gemini.planning.layout import ParamSpec, make_layout
from gemini.planning.planes import PAGE, WEIGHTS, plane_specs
from gemini.planning.planner import pose_problem
from gemini.planning.trace import MemoryTrace, Moment, Phase, Source, TracedParam, scale_bytes, with_4bit_base
from gemini.tiers import Tier

WIDTH = 256


def trace() -> MemoryTrace:
    params = (
        TracedParam(("embed.weight",), (64, WIDTH), False),
        TracedParam(("layers.0.up.base_layer.weight",), (WIDTH, WIDTH), False),
        TracedParam(("layers.0.up.lora_A.default.weight",), (4, WIDTH)),
        TracedParam(("layers.0.norm.weight",), (WIDTH,), False),
    )
    moments = (
        Moment(Phase.FORWARD, "layers.0.up.base_layer", (1,), peak_bytes=100, touched_bytes=1000, num_ops=1),
        Moment(Phase.BACKWARD, "layers.0.up.base_layer", (1,), peak_bytes=200, touched_bytes=2000, num_ops=2),
        Moment(Phase.BACKWARD, "layers.0.norm", (3,), peak_bytes=300),
    )
    return MemoryTrace("Model", "bf16", {}, 8, "cuda", Source.AHEAD, params, moments, buffer_bytes=10)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_codes_have_chunks_of_whole_pages_of_bytes(ranks: int) -> None:
    specs = [
        ParamSpec("layers.0.a", 5000, False, coded=True),
        ParamSpec("layers.0.norm", 10, False),
        ParamSpec("layers.0.b", 1, False, coded=True),
    ]
    codes, numbers = make_layout(specs, ranks=ranks).chunks
    assert [slot.name for slot in codes.slots] == ["layers.0.a", "layers.0.b"] and codes.coded and not numbers.coded
    assert [slot.start % PAGE for slot in codes.slots] == [0, 0]
    assert codes.numel % (ranks * PAGE) == 0 and numbers.numel % (ranks * PAGE // 2) == 0
    (plane,) = plane_specs("fp32", "retain", trainable=False, coded=True).values()
    assert (plane.kind, plane.dtype, plane.num_bytes(codes.numel)) == (WEIGHTS, "uint8", codes.numel)


def test_a_step_on_a_base_of_4_bits() -> None:
    before, after = trace(), with_4bit_base(trace())
    numel = WIDTH * WIDTH
    assert after.params[1] == TracedParam(before.params[1].names, (numel // 2, 1), False, coded=True)
    assert (after.params[0], *after.params[2:]) == (before.params[0], *before.params[2:])
    assert after.num_params == before.num_params
    scales = numel // 64 + 4 * (numel // 64 // 256) + 4 * (16 + 256 + 1)  # the formula of double quantization, in bytes
    assert after.buffer_bytes == 10 + scales == 10 + scale_bytes(numel)
    made = 2 * numel + 4 * numel // 64
    assert [m.peak_bytes for m in after.moments] == [100 + made, 200 + made, 300]
    assert [m.num_ops for m in after.moments] == [2, 3, 0]
    assert after.flops == before.flops


@pytest.mark.parametrize("form", ["tiled", "all_kept"])
def test_other_forms_of_a_step_have_the_same_base(form: str) -> None:
    other = getattr(with_4bit_base(replace(trace(), **{form: trace()})), form)
    assert other == with_4bit_base(trace())


@pytest.mark.parametrize("ranks", [1, 2])
def test_half_a_byte_per_weight_is_planned(ranks: int) -> None:
    budgets = {Tier.GPU: 2**30, Tier.CPU: 2**30}
    problem = pose_problem(with_4bit_base(trace()), budgets, precision="bf16", ranks=ranks)
    (index,) = [chunk.index for chunk in problem.layout.chunks if chunk.coded]
    assert problem.sizes[index] == {WEIGHTS: WIDTH * WIDTH // 2 // ranks}
    assert problem.window_bytes(index) == WIDTH * WIDTH // 2
    assert problem.working_set == WIDTH * WIDTH // 2  # no module reads more at once


def test_scales() -> None:
    assert scale_bytes(64 * 1000) == 1000 + 4 * (16 + 256 + 4 + 1)
    many = 2**30
    assert round(scale_bytes(many) / many, 4) == 0.0159


def test_codes_are_written_and_told_apart() -> None:
    coded = with_4bit_base(trace())
    assert MemoryTrace.from_json(coded.to_json()) == coded
    plain = replace(coded, params=tuple(replace(param, coded=False) for param in coded.params))
    assert plain.fingerprint != coded.fingerprint
    with pytest.raises(PlanMismatch, match=r"\[32768, 1\] frozen coded"):
        plain.check_same_model(coded, what="the trace")


def test_without_adapters_nothing_is_frozen() -> None:
    whole = replace(trace(), params=trace().params[:1])
    with pytest.raises(ValueError, match="no layer of this step has an adapter"):
        with_4bit_base(whole)
