"""Planes of a byte and of less per element, and rules with other planes than Adam's: sizes, places, homes, costs."""

import json
from dataclasses import replace
from typing import Any

import pytest
from stacks import stack_trace

from gemini.errors import PlanMismatch
from gemini.optim import AveragedRule
from gemini.planning.costs import Costs, Efficiency, Speeds
from gemini.planning.hardware import Figure, Hardware
from gemini.planning.layout import ParamSpec, make_layout
from gemini.planning.placement import (
    Placement,
    Problem,
    StaticPlacement,
    by_fractions,
    bytes_per_tier,
    check_fits,
    fill_fastest,
)
from gemini.planning.plan import Plan
from gemini.planning.planes import (
    ADAM,
    ALIGN,
    GRAD,
    PAGE,
    RESIDUAL,
    WEIGHTS,
    WHOLE_TEMPORARIES,
    FactorSpec,
    PlaneSpec,
    RuleSpec,
    factor_bytes,
    plane_specs,
    spec_of,
)
from gemini.planning.planner import plan
from gemini.planning.working import (
    TILE,
    device_staging_bytes,
    device_tile_numel,
    staged_bytes,
    staging_bytes,
    tile_numel,
    whole_numel,
)
from gemini.tiers import Tier

CPU, NVME, GPU = Tier.CPU, Tier.NVME, Tier.GPU
CODED = RuleSpec("coded", (PlaneSpec("code", "uint8"), PlaneSpec("scale", "float32", block=64)), "place")
TINY = RuleSpec("tiny", (PlaneSpec("codes", "int16"), PlaneSpec("scale", "uint8", block=64)), "place")
LOMO = RuleSpec("LOMO")
RULES = pytest.mark.parametrize("rule", [CODED, TINY, LOMO, ADAM], ids=lambda rule: rule.name)


def problem_of(rule: RuleSpec, budgets: dict[Tier, int], **how: Any) -> Problem:
    layout = make_layout([ParamSpec(f"layers.{i}.w", 100_000) for i in range(8)], align=rule.align)
    return Problem(layout, "bf16", "retain", budgets, CPU, 10**6, 10**6, rule=rule, **how)


@RULES
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_param_starts_on_a_page_of_every_plane_that_may_be_in_a_file(rule: RuleSpec, ranks: int) -> None:
    sizes = [1, 63, 2047, 2048, 2049, 4097, 100_001]
    layout = make_layout([ParamSpec(f"p{n}", n) for n in sizes], ranks=ranks, align=rule.align)
    specs = plane_specs("bf16", "retain", rule, trainable=True).values()
    for chunk in layout.chunks:
        share = chunk.numel // ranks
        for spec in specs:
            starts = [*(slot.start for slot in chunk.slots), share]
            assert all(start % spec.block == 0 for start in starts), "no block is of two params"
            if not spec.stays_in_memory:
                assert all(spec.num_bytes(start) % PAGE == 0 for start in starts), (spec, starts)
    assert rule.align == (2 * ALIGN if rule is CODED else ALIGN), "nobody pays for planes that he has not"


@RULES
def test_bytes_are_those_of_the_planes_and_of_nothing_else(rule: RuleSpec) -> None:
    problem = problem_of(rule, {CPU: 2**40})
    numel = problem.layout.chunks[0].numel
    own = {"code": numel, "codes": 2 * numel, "scale": numel // 64 * (4 if rule is CODED else 1)}
    own |= dict.fromkeys(("exp_avg", "exp_avg_sq"), 4 * numel)
    wanted = {WEIGHTS: 2 * numel, RESIDUAL: 2 * numel, GRAD: 2 * numel}
    wanted |= {spec.kind: -(-own[spec.kind] // PAGE) * PAGE for spec in rule.planes}
    assert problem.sizes[0] == wanted
    assert bytes_per_tier(problem, fill_fastest(problem))[CPU] == 8 * sum(wanted.values())
    staged = staged_bytes(TILE, rule)
    assert sum(staged.values()) == staging_bytes(TILE, rule)
    assert all(staged[kind] >= spec.num_bytes(TILE) for kind, spec in problem.forms[0].items())
    assert sum(size >= 4 * TILE for size in staged.values()) >= 3, "scratch for a tile that is cast while one is read"


@pytest.mark.parametrize("rule", [CODED, TINY], ids=lambda rule: rule.name)
def test_less_than_a_byte_per_element_stays_in_memory(rule: RuleSpec) -> None:
    """Its bytes are in the budget of memory, whoever chooses the homes; and nobody can put it elsewhere."""
    roomy = problem_of(rule, {CPU: 2**40, NVME: 2**40})
    scales = sum(roomy.sizes[i]["scale"] for i in range(8))
    problem = replace(roomy, budgets={CPU: sum(roomy.spoken_for().values()) + scales, NVME: 2**40})
    for placement in (
        fill_fastest(problem),
        by_fractions(problem, StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)),
    ):
        assert all(homes["scale"] is CPU for homes in placement.homes)
        others = {tier for homes in placement.homes for kind, tier in homes.items() if kind != "scale"}
        assert others == {NVME} and bytes_per_tier(problem, placement)[CPU] == problem.budgets[CPU]
    filed = Placement(tuple(dict.fromkeys(homes, NVME) for homes in placement.homes))
    with pytest.raises(ValueError, match="scale has less than a byte per param and stays in memory"):
        check_fits(problem, filed)


@RULES
def test_a_plan_keeps_its_rule_through_json_and_older_plans_are_adam_s(rule: RuleSpec) -> None:
    trace = stack_trace(6)
    roomy = plan(trace, None, {CPU: 2**40}, optimizer=rule)
    budgets = {CPU: roomy.bytes_per_tier[CPU] * 2 // 3, NVME: 2**40}
    made = plan(trace, None, budgets, optimizer=rule)
    assert NVME in {tier for homes in made.placement.homes for tier in homes.values()}
    assert all(homes.get("scale", CPU) is CPU for homes in made.placement.homes)
    assert Plan.from_json(made.to_json()) == made and made.problem.rule == rule
    body = json.loads(made.to_json())
    del body["rule"]
    if rule is ADAM:
        assert Plan.from_json(json.dumps(body)) == made
    kept = 4 + sum(spec.block_bytes / spec.block for spec in rule.planes)
    assert made.bytes_per_param == pytest.approx(kept, rel=0.02)
    made.check_settings(rule=rule)
    with pytest.raises(PlanMismatch, match="rule="):
        made.check_settings(rule=replace(rule, name="another"))


def test_time_goes_by_the_bytes_that_an_update_touches() -> None:
    averaged = AveragedRule().spec  # a pass of its own: 8 bytes of the average, and the master's 8 again
    assert (ADAM.touched, LOMO.touched, TINY.touched, averaged.touched) == (26, 10, 14, 26 + 8 + 8)
    speeds = Speeds.typical()
    assert speeds.update(CPU, ADAM) == speeds.update_cpu and speeds.update(GPU, ADAM) == speeds.update_gpu
    assert speeds.update(CPU, LOMO) == pytest.approx(speeds.update_cpu * 10 / 26)
    figure = Figure(1e-9, "measured here")
    hardware = Hardware("box", {"update_cpu": figure, "update_gpu": figure})
    costs = Costs(hardware, Efficiency(), compute=GPU, precision="bf16", local_ranks=1)
    for rule in (ADAM, LOMO, TINY, averaged):
        numel = 2**20
        layout = make_layout([ParamSpec("weight", numel)], align=rule.align)
        problem = Problem(layout, "bf16", "transient", {CPU: 0}, GPU, working_set=0, staging=0, rule=rule)
        for tier in (CPU, GPU):
            cost = costs.update(problem, 0, tier)
            assert cost.seconds == pytest.approx(1e-9 * numel * rule.touched / 26, rel=0.01)


def test_declarations_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        PlaneSpec("moment", "float64")
    for block in (0, 48, 4096):
        with pytest.raises(ValueError, match="must divide 2048"):
            PlaneSpec("scale", "uint8", block)
    moment = PlaneSpec("moment", "float32")
    for planes in ((PlaneSpec("grad", "float32"),), (PlaneSpec("staging", "float32"),), (moment, moment)):
        with pytest.raises(ValueError, match="taken, given twice or no name"):
            RuleSpec("wrong", planes)
    with pytest.raises(ValueError, match="needs='rows' is not known"):
        RuleSpec("wrong", (), "rows")


def test_a_tile_of_a_rule_of_whole_params_is_the_largest_that_is_trained() -> None:
    rule = RuleSpec("whole", (PlaneSpec("moment", "float32"),), "param")
    assert spec_of(rule) is rule and rule.whole and not ADAM.whole
    params = [ParamSpec("frozen", 2**23, False), ParamSpec("layers.0.a", 3 * 2**20 + 5), ParamSpec("layers.0.b", 7)]
    layout = make_layout(params)
    largest = max(chunk.numel for chunk in layout.chunks)
    whole = whole_numel(layout, rule)
    assert (whole, whole_numel(layout, ADAM)) == (3 * 2**20 + 2048, 0)
    assert tile_numel(largest, whole) == whole and tile_numel(largest, 0) == 2**20 and tile_numel(64, 2048) == 2048
    assert device_tile_numel(largest, rule, whole) == whole
    in_turn = device_staging_bytes(largest, rule, whole, overlap=False)
    assert device_staging_bytes(largest, rule, whole, overlap=True) == in_turn == staging_bytes(whole, rule)
    factored = replace(rule, factors=(FactorSpec("row", "rows"), FactorSpec("vector", "vector")))
    assert RuleSpec.from_body(json.loads(json.dumps(factored.to_body()))) == factored
    assert factor_bytes(factored.factors, (3, 5, 7)) == 4 * 15 and factor_bytes(factored.factors, (5,)) == 4 * 5
    with pytest.raises(ValueError, match="factors, which are of whole params"):
        replace(factored, needs="place")
    with pytest.raises(ValueError, match="factor 'row' is 'lines'; use one of 'rows'"):
        FactorSpec("row", "lines")
    made = plan(stack_trace(2), None, {CPU: 2**30}, optimizer=factored)
    assert made.problem.factors == sum(factor_bytes(factored.factors, p.shape) for p in made.trace.params)
    assert Plan.from_json(made.to_json()) == made
    without = replace(made.problem, factors=0)
    assert made.problem.spoken_for()[CPU] - without.spoken_for()[CPU] == made.problem.factors > 0
    areas = [4, 2, 4, 4]  # weights, residual, moment, gradient
    assert staging_bytes(whole, rule) == whole * sum(areas)
    assert made.problem.temporaries == 4 * WHOLE_TEMPORARIES * whole_numel(made.layout, factored)
    of_elements = replace(made.problem, rule=ADAM)
    assert made.problem.spoken_for()[CPU] - of_elements.spoken_for()[CPU] == made.problem.temporaries > 0
    assert of_elements.temporaries == 0


@pytest.mark.parametrize("device", [CPU, Tier.GPU])
def test_all_that_a_tier_holds_has_a_name(device: Tier) -> None:
    """Where whole params are updated, temporaries are held on the tier that computes, too."""
    rule = RuleSpec("whole", (PlaneSpec("moment", "float32"),), "param")
    made = plan(stack_trace(2), None, {CPU: 2**30, device: 2**31}, optimizer=rule)
    assert {tier: sum(held.values()) for tier, held in made.held.items()} == made.bytes_per_tier
    assert made.held[device]["temporaries"] == made.problem.temporaries > 0
