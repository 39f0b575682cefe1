"""Compact states in layouts, budgets and plans: their bytes, who keeps exact ones, and where shards are cut."""

import json
from dataclasses import replace
from typing import Any

import pytest
from stacks import stack_trace

from gemini.planning.plan import Plan
from gemini.planning.planes import ADAM, GRAD, PAGE, RESIDUAL, WEIGHTS, PlaneSpec, RuleSpec, plane_specs
from gemini.planning.planner import plan
from gemini.planning.rules import BLOCK, SMALLEST, compact, scale_of, spec_for
from gemini.planning.trace import MemoryTrace, TracedParam
from gemini.planning.working import staged_bytes
from gemini.tiers import Tier

COMPACT = compact(ADAM)
LION = RuleSpec("Lion", (PlaneSpec("exp_avg", "float32"),))
ROOM = {Tier.CPU: 2**44, Tier.NVME: 2**44}


def llama(hidden: int, wide: int, vocab: int, layers: int, **how: Any) -> MemoryTrace:
    """The params of a Llama, with the moments of a small stack."""
    params = [TracedParam(("embed.weight",), (vocab, hidden))]
    for i in range(layers):
        shapes = {"q": (hidden, hidden), "k": (hidden // 4, hidden), "v": (hidden // 4, hidden), "o": (hidden, hidden),
                  "norm": (hidden,), "up": (wide, hidden), "gate": (wide, hidden), "down": (hidden, wide),
                  "norm2": (hidden,)}  # fmt: skip
        params += [TracedParam((f"layers.{i}.{name}",), shape, **how) for name, shape in shapes.items()]
    params += [TracedParam(("norm.weight",), (hidden,)), TracedParam(("head.weight",), (vocab, hidden))]
    return replace(stack_trace(2), params=tuple(params))


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(("rule", "most"), [(COMPACT, 5.2), (compact(LION), 4.1)], ids=["Adam", "Lion"])
def test_a_billion_params_take_no_more_bytes_than_is_said(rule: RuleSpec, most: float, ranks: int) -> None:
    """All planes of all chunks, scales, padding and small exact params among them."""
    trace = llama(2048, 5632, 32000, 22)
    layout = trace.layout(ranks=ranks, rule=rule)
    found = 0
    for chunk in layout.chunks:
        specs = plane_specs("bf16", "transient", rule.of(chunk.exact), trainable=True).values()
        found += ranks * sum(spec.page_bytes(chunk.numel // ranks) for spec in specs)
    assert most - 0.2 < found / trace.num_params < most
    whole = sum(spec.num_bytes(64 * BLOCK) for spec in plane_specs("bf16", "transient", rule, trainable=True).values())
    assert found / trace.num_params - whole / (64 * BLOCK) < 0.05, "small params and padding are next to nothing"


def test_small_params_are_exact_in_chunks_of_their_own() -> None:
    layout = llama(256, 704, 512, 2).layout(rule=COMPACT)
    exact = {slot.name for chunk in layout.chunks if chunk.exact for slot in chunk.slots}
    coded = {slot.name for chunk in layout.chunks if not chunk.exact for slot in chunk.slots}
    assert exact == {"norm.weight", *(f"layers.{i}.{n}" for i in range(2) for n in ("norm", "norm2", "k", "v"))}
    assert {"layers.0.q", "embed.weight"} <= coded, f"{256 * 256} is not less than {SMALLEST}"
    for chunk in layout.chunks:
        specs = plane_specs("bf16", "retain", COMPACT.of(chunk.exact), trainable=True)
        kinds = {WEIGHTS, RESIDUAL, GRAD, "exp_avg", "exp_avg_sq"}
        assert specs.keys() == (kinds if chunk.exact else kinds | {"exp_avg_scale", "exp_avg_sq_scale"})
        assert specs[RESIDUAL].dtype == ("int16" if chunk.exact else "int8")
    assert not any(chunk.exact for chunk in llama(256, 704, 512, 2).layout().chunks), "of exact rules nobody asks"
    long = replace(llama(256, 704, 512, 1), params=(TracedParam(("bias",), (2 * SMALLEST,)),))
    assert long.layout(rule=COMPACT).chunks[0].exact, "a vector, however long"


def test_frozen_params_share_their_chunks_as_before() -> None:
    trace = llama(256, 704, 512, 2, trainable=False)
    alike, ours = trace.layout(), trace.layout(rule=COMPACT)
    frozen = [[slot.name for slot in chunk.slots] for chunk in alike.chunks if not chunk.trainable]
    assert frozen == [[slot.name for slot in chunk.slots] for chunk in ours.chunks if not chunk.trainable]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_no_block_is_of_two_params_or_of_two_ranks(ranks: int) -> None:
    layout = llama(264, 700, 517, 2).layout(ranks=ranks, rule=COMPACT)
    for chunk in layout.chunks:
        cuts = [rank * (chunk.numel // ranks) for rank in range(ranks)]
        for slot in chunk.slots:
            inside = [cut - slot.start for cut in cuts if slot.start < cut < slot.stop]
            assert slot.start % PAGE == 0 and all(cut % PAGE == 0 for cut in inside), "blocks and pages of bytes"


def test_a_plan_keeps_its_states() -> None:
    trace = llama(256, 704, 512, 2)
    made = plan(trace, None, ROOM, compute=Tier.CPU, states="compact")
    assert made.problem.rule == COMPACT and 5.03 < made.bytes_per_param < 7  # many of so few are small
    again = Plan.from_json(made.to_json())
    assert again.problem == made.problem and again.bytes_per_param == made.bytes_per_param
    body = json.loads(made.to_json())
    assert RuleSpec.from_body(COMPACT.to_body()) == COMPACT and ADAM.to_body() == ["Adam", *ADAM.to_body()[1:3]]
    assert "Adam, compact" in json.dumps(body)
    for chunk, homes in zip(made.layout.chunks, made.placement.homes, strict=True):
        assert (scale_of("exp_avg") in homes) == (not chunk.exact)
    with pytest.raises(ValueError, match="precision='fp32' was asked for"):
        plan(trace, None, ROOM, compute=Tier.CPU, states="compact", precision="fp32")


def test_states_move_in_less_than_half_the_bytes() -> None:
    """Everything on the drive."""
    trace, traffic = llama(2048, 5632, 32000, 4), {}
    for states in ("exact", "compact"):
        made = plan(trace, None, {Tier.CPU: 2**31, Tier.NVME: 2**44}, compute=Tier.CPU, states=states,
                    gradients="transient")  # fmt: skip
        index = next(i for i, chunk in enumerate(made.layout.chunks) if chunk.payload > 10 * SMALLEST)
        sizes = made.problem.sizes[index]
        traffic[states] = sum(n for kind, n in sizes.items() if kind not in made.problem.rule.in_memory)
    assert traffic["compact"] <= 0.45 * traffic["exact"]


def test_a_tile_of_either_form_fits_into_staging() -> None:
    staged = staged_bytes(2**20, COMPACT)
    for rule in (COMPACT, ADAM):
        for kind, spec in plane_specs("bf16", "accumulate", rule, trainable=True).items():
            assert staged[kind] >= spec.num_bytes(2**20), (rule.name, kind)


def test_what_has_no_compact_form_is_refused() -> None:
    with pytest.raises(ValueError, match="is for the rules Adam, Lion, SGD, SGD without momentum, not for 'Muon'"):
        compact(RuleSpec("Muon", (PlaneSpec("exp_avg", "float32"),)))
    with pytest.raises(ValueError, match="not for 'Adam, compact'"):
        compact(COMPACT)
    with pytest.raises(ValueError, match="residual of 'int4'"):
        RuleSpec("x", residual="int4")
    assert spec_for(ADAM, "exact", "fp32") is ADAM
