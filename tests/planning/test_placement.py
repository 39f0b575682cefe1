"""Where planes live, from integers alone: two policies of placing, the arithmetic of what fits, what is said if not."""

import re
import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gemini.errors import BudgetExceeded, human_bytes, parse_bytes
from gemini.planning.layout import Layout, ParamSpec, make_layout
from gemini.planning.placement import (
    Placement,
    Problem,
    StaticPlacement,
    by_fractions,
    bytes_per_tier,
    check_fits,
    fill_fastest,
)
from gemini.planning.planes import ADAM, GRAD, RESIDUAL, WEIGHTS, PlaneKind, compute_itemsize, plane_specs
from gemini.tiers import Tier

GPU, CPU, NVME = Tier.GPU, Tier.CPU, Tier.NVME
N = 4096  # elements of each chunk below
MUCH = 2**40


def layout_of(num_chunks: int, *, frozen: tuple[int, ...] = ()) -> Layout:
    return make_layout([ParamSpec(f"layers.{i}.w", N, i not in frozen) for i in range(num_chunks)])


def problem_of(
    budgets: dict[Tier, int],
    *,
    layout: Layout | None = None,
    precision: str = "bf16",
    gradients: str = "retain",
    working_set: int = 2 * N,
    staging: int = 1000,
    activations: int = 0,
) -> Problem:
    compute = GPU if GPU in budgets else CPU
    layout = layout or layout_of(10)
    return Problem(layout, precision, gradients, budgets, compute, working_set, staging, activations)


def tiers_of(placement: Placement, kind: PlaneKind) -> list[Tier]:
    return [homes[kind] for homes in placement.homes]


# ---- bytes per element -----------------------------------------------------------------------------------------------


def itemsizes(precision: str, gradients: str, *, trainable: bool) -> dict[str, int]:
    return {kind: spec.block_bytes for kind, spec in plane_specs(precision, gradients, trainable=trainable).items()}


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_persistent_state_is_12_bytes_per_param(precision: str) -> None:
    sizes = itemsizes(precision, "transient", trainable=True)
    assert sum(sizes.values()) == 12 and GRAD not in sizes
    assert (RESIDUAL in sizes) == (precision == "bf16")
    assert itemsizes(precision, "retain", trainable=True)[GRAD] == compute_itemsize(precision)
    assert itemsizes(precision, "accumulate", trainable=True)[GRAD] == 4
    for gradients in ("transient", "retain", "accumulate"):
        assert itemsizes(precision, gradients, trainable=False) == {WEIGHTS: compute_itemsize(precision)}


def test_frozen_chunks_hold_weights_alone() -> None:
    problem = problem_of({CPU: MUCH}, layout=layout_of(2, frozen=(0,)))
    assert problem.sizes[0] == {WEIGHTS: 2 * N}
    assert sum(problem.sizes[1].values()) == 14 * N


def test_windows_are_needed_where_weights_cannot_be_read_in_place() -> None:
    layout = layout_of(2, frozen=(0,))
    for precision, trained in (("bf16", False), ("fp32", False), ("fp16", True)):  # an fp16 master is fp32: cast
        problem = problem_of({CPU: MUCH, NVME: MUCH}, layout=layout, precision=precision)
        assert problem.needs_window(1, CPU) is trained
        assert problem.needs_window(0, CPU) is False
        assert problem.needs_window(0, NVME) and problem.needs_window(1, NVME)


# ---- the fastest first -----------------------------------------------------------------------------------------------


def test_all_in_the_fastest_tier_needs_nothing_on_top() -> None:
    everything = 10 * 14 * N
    problem = problem_of({CPU: everything, NVME: MUCH})
    placement = fill_fastest(problem)
    assert {tier for homes in placement.homes for tier in homes.values()} == {CPU}
    assert bytes_per_tier(problem, placement) == {CPU: everything, NVME: 0}


def test_weights_first_then_gradients_then_states() -> None:
    staging, one_module = 1000, 2 * N
    for room, wanted in (
        (one_module + 4 * 2 * N, {WEIGHTS: 4}),  # some weights move, so one module's must be gathered
        (10 * 2 * N + 3 * 2 * N, {WEIGHTS: 10, GRAD: 3}),  # none move: no room is kept for gathering
        (10 * 4 * N + 5 * 2 * N, {WEIGHTS: 10, GRAD: 10, RESIDUAL: 5}),
    ):
        problem = problem_of({CPU: staging + room, NVME: MUCH})
        placement = fill_fastest(problem)
        for kind in ADAM.kinds:
            tiers = tiers_of(placement, kind)
            assert tiers.count(CPU) == wanted.get(kind, 0) and tiers.count(NVME) == 10 - tiers.count(CPU), kind
            assert kind is not WEIGHTS or NVME not in tiers[: tiers.count(CPU)], "the first ones"


@pytest.mark.parametrize("share", [0.2, 0.3, 0.5, 0.8])
def test_states_on_a_drive_are_spread_over_the_step(share: float) -> None:
    """However many there are: of each ten chunks as many as of all, to within one or two."""
    problem = problem_of({CPU: int((14 - 4 * share) * 100 * N) + 1000, NVME: MUCH}, layout=layout_of(100))
    on_drive = [tier is NVME for tier in tiers_of(fill_fastest(problem), ADAM.states[-1])]
    assert abs(sum(on_drive) - 100 * share) <= 1
    for start in range(0, 91):
        assert abs(sum(on_drive[start : start + 10]) - sum(on_drive) / 10) < 2, start


def test_on_an_accelerator_states_stand_there_together_or_not_at_all() -> None:
    floor = 2 * N + 500
    problem = problem_of({GPU: floor + 10 * 2 * N + 2 * 12 * N + 5, CPU: MUCH}, activations=500)
    placement = fill_fastest(problem)
    assert set(tiers_of(placement, WEIGHTS)) == {GPU}
    for kind in (GRAD, *ADAM.states):
        assert tiers_of(placement, kind) == [GPU] * 2 + [CPU] * 8, kind


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20_000), st.booleans()), min_size=1, max_size=12),
    st.sampled_from(["bf16", "fp16", "fp32"]),
    st.sampled_from(["transient", "retain", "accumulate"]),
    st.dictionaries(st.sampled_from(list(Tier)), st.integers(0, 3_000_000), max_size=3),
    st.integers(0, 50_000),
)
def test_what_it_places_fits_and_what_it_refuses_names_the_gap(
    sizes: list[tuple[int, bool]], precision: str, gradients: str, budgets: dict[Tier, int], activations: int
) -> None:
    assume(CPU in budgets)
    layout = make_layout([ParamSpec(f"layers.{i}.w", n, t) for i, (n, t) in enumerate(sizes)])
    problem = problem_of(
        budgets, layout=layout, precision=precision, gradients=gradients, working_set=40_000, activations=activations
    )
    try:
        placement = fill_fastest(problem)
    except BudgetExceeded as e:
        assert "missing on" in str(e) and "Cheapest change: " in str(e)
        return
    used = bytes_per_tier(problem, placement)
    assert all(used[tier] <= budgets[tier] for tier in used)
    for i, homes in enumerate(placement.homes):
        assert homes.keys() == problem.sizes[i].keys()
        assert set(homes.values()) <= budgets.keys()
    assert placement == fill_fastest(problem), "a pure function"


# ---- by fractions ----------------------------------------------------------------------------------------------------

fractions = st.floats(0, 1).map(lambda x: round(x, 3))


@settings(max_examples=200, deadline=None)
@given(fractions, fractions, fractions, fractions, st.lists(st.integers(1, 20_000), min_size=1, max_size=12))
def test_fractions_are_met_to_within_one_chunk(
    weights_gpu: float, states_gpu: float, weights_nvme: float, states_nvme: float, sizes: list[int]
) -> None:
    assume(weights_gpu + weights_nvme <= 1 and states_gpu + states_nvme <= 1)
    layout = make_layout([ParamSpec(f"layers.{i}.w", n) for i, n in enumerate(sizes)])
    problem = problem_of({GPU: MUCH, CPU: MUCH, NVME: MUCH}, layout=layout)
    placement = by_fractions(problem, StaticPlacement(weights_gpu, states_gpu, weights_nvme, states_nvme))
    for kinds, on_gpu, on_nvme in (
        ((WEIGHTS,), weights_gpu, weights_nvme),
        ((*ADAM.states, GRAD), states_gpu, states_nvme),
    ):
        num_bytes = [sum(problem.sizes[i][k] for k in kinds) for i in range(len(sizes))]
        for tier, fraction in ((GPU, on_gpu), (NVME, on_nvme)):
            found = sum(n for n, homes in zip(num_bytes, placement.homes, strict=True) if homes[kinds[0]] is tier)
            assert abs(found - fraction * sum(num_bytes)) <= max(num_bytes), (tier, kinds)
    for homes in placement.homes:
        assert len({homes[kind] for kind in (*ADAM.states, GRAD)}) == 1, "a chunk's states stand together"


def test_first_chunks_go_to_the_gpu_and_last_ones_to_the_disk() -> None:
    problem = problem_of({GPU: MUCH, CPU: MUCH, NVME: MUCH})
    placement = by_fractions(problem, StaticPlacement(0.3, 0.1, 0.2, 0.5))
    assert tiers_of(placement, WEIGHTS) == [GPU] * 3 + [CPU] * 5 + [NVME] * 2
    assert tiers_of(placement, GRAD) == [GPU] + [CPU] * 4 + [NVME] * 5
    assert tiers_of(by_fractions(problem, StaticPlacement()), WEIGHTS) == [CPU] * 10
    assert tiers_of(by_fractions(problem, StaticPlacement(weights_on_nvme=1)), WEIGHTS) == [NVME] * 10


def test_fractions_of_a_tier_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="nvme, which does not exist: give nvme_path="):
        by_fractions(problem_of({CPU: MUCH}), StaticPlacement(optimizer_on_nvme=0.5))
    with pytest.raises(ValueError, match="gpu, which does not exist"):
        by_fractions(problem_of({CPU: MUCH}), StaticPlacement(weights_on_gpu=0.5))


@pytest.mark.parametrize("bad", [-0.1, 1.1, "all", None, float("nan")])
def test_fractions_are_checked(bad: object) -> None:
    with pytest.raises(ValueError, match=r"weights_on_nvme=\) is a fraction"):
        StaticPlacement(weights_on_nvme=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="make more than 1"):
        StaticPlacement(optimizer_on_gpu=0.6, optimizer_on_nvme=0.5)


def test_a_placement_of_other_chunks_or_planes_is_refused() -> None:
    problem = problem_of({CPU: MUCH})
    whole = by_fractions(problem, StaticPlacement())
    with pytest.raises(ValueError, match=r"homes for 9 chunks, of 10"):
        check_fits(problem, Placement(whole.homes[1:]))
    with pytest.raises(ValueError, match=r"homes for \['weights'\] of chunk 0, which has \['weights', "):
        check_fits(problem, Placement(({WEIGHTS: CPU}, *whole.homes[1:])))


# ---- what fits -------------------------------------------------------------------------------------------------------


def test_the_arithmetic_term_by_term() -> None:
    """used = planes + activations + (working set on the computing tier, if anything moves) + staging on the CPU (if
    anything moves, or if there is an accelerator: values reach it, and are read from it, through the host)."""
    layout = layout_of(2)
    homes = dict.fromkeys([WEIGHTS, GRAD, *ADAM.states], CPU)
    on_cpu = Placement((homes, homes))
    mixed = Placement((homes | {WEIGHTS: NVME}, homes))
    cpu_only = problem_of({CPU: MUCH, NVME: MUCH}, layout=layout, working_set=700, staging=30)
    assert bytes_per_tier(cpu_only, on_cpu) == {CPU: 28 * N, NVME: 0}
    assert bytes_per_tier(cpu_only, mixed) == {CPU: 26 * N + 730, NVME: 2 * N}
    gpu = problem_of({GPU: MUCH, CPU: MUCH}, layout=layout, working_set=700, staging=30, activations=5)
    assert bytes_per_tier(gpu, on_cpu) == {GPU: 705, CPU: 28 * N + 30}
    on_gpu = Placement((dict.fromkeys(homes, GPU),) * 2)
    assert bytes_per_tier(gpu, on_gpu) == {GPU: 28 * N + 5, CPU: 30}


def test_a_refusal_names_the_missing_bytes_and_the_cheapest_change() -> None:
    everything = 10 * 14 * N
    short = problem_of({CPU: everything - 100_000})
    with pytest.raises(BudgetExceeded) as error:
        fill_fastest(short)
    text = str(error.value)
    assert "40,960 params" in text and "bf16" in text and "'retain'" in text
    assert f"{human_bytes(100_000)} missing on cpu" in text, "without a disk nothing moves: no more is needed"
    assert "nvme_path=" in text and "raise the cpu budget to" in text


def test_the_change_it_names_is_enough() -> None:
    """Take the advice, digit by digit, and it fits."""
    tight = {CPU: 2 * N + 1000 + 5 * N, NVME: 20 * N}
    with pytest.raises(BudgetExceeded) as error:
        fill_fastest(problem_of(tight))
    advice = re.search(r"raise the nvme budget to ([\d.]+ [KMGi]*B)", str(error.value))
    assert advice is not None
    roomy = problem_of({**tight, NVME: MUCH})
    needed = bytes_per_tier(roomy, fill_fastest(roomy))[NVME]
    assert needed <= parse_bytes(advice[1]) <= needed * 1.07, "rounded up to a whole unit"
    fill_fastest(problem_of({**tight, NVME: needed}))
    with pytest.raises(BudgetExceeded):
        fill_fastest(problem_of({**tight, NVME: needed - 1}))


def test_where_other_homes_would_fit_no_budget_is_asked_for() -> None:
    budgets = {GPU: 20 * N, CPU: MUCH, NVME: MUCH}
    fill_fastest(problem_of(budgets))
    for only in (budgets, {GPU: budgets[GPU], CPU: MUCH}):
        with pytest.raises(BudgetExceeded, match=r"missing on gpu.*Cheapest change: placement='auto'"):
            by_fractions(problem_of(only), StaticPlacement(optimizer_on_gpu=1))


def test_the_host_memory_that_would_do_instead_of_a_drive_is_not_overstated() -> None:
    """What stands on the GPU, and what a step needs there, is not asked of the host."""
    tiers = {GPU: 4 * N + 100, CPU: 3 * N}
    with pytest.raises(BudgetExceeded) as error:
        fill_fastest(problem_of(tiers, activations=100))
    advice = re.search(r"or raise the cpu budget to ([\d.]+ [KMGi]*B)", str(error.value))
    assert advice is not None
    roomy = problem_of({**tiers, CPU: MUCH}, activations=100)
    needed = bytes_per_tier(roomy, fill_fastest(roomy))[CPU]
    assert needed <= parse_bytes(advice[1]) <= needed * 1.07, "rounded up to a whole unit"


def test_a_computing_tier_that_cannot_hold_one_module_is_told_so() -> None:
    problem = problem_of({CPU: 2 * N + 999, NVME: MUCH})
    with pytest.raises(BudgetExceeded, match="raise the cpu budget to at least.*gathered weights of one module"):
        fill_fastest(problem)
    problem = problem_of({GPU: 2 * N + 99, CPU: MUCH}, activations=100)
    with pytest.raises(BudgetExceeded, match="raise the gpu budget to at least"):
        fill_fastest(problem)


# ---- the ground floor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        "gemini", "gemini.errors", "gemini.tiers", "gemini.config", "gemini.planning",
        "gemini.planning.layout", "gemini.planning.placement", "gemini.planning.planes", "gemini.planning.policy",
    ],
)  # fmt: skip
def test_planning_knows_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
