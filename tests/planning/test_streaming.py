"""Updates that are streamed from host memory through the GPU: their value, bytes, budget, choice and predicted time."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from stacks import FETCHES, LAYERS, MS, NUMEL, close, machine, stack_plan
from traces import decoder_trace

from gemini.errors import BudgetExceeded, PlanMismatch
from gemini.jobs.plan_report import Report, planned, screen
from gemini.jobs.planner import Machine
from gemini.jobs.screen import say
from gemini.jobs.settings import PlanSettings
from gemini.planning.costs import Speeds
from gemini.planning.hardware import Figure, Hardware
from gemini.planning.layout import Layout, ParamSpec, make_layout
from gemini.planning.placement import Placement, Problem, StaticPlacement, by_fractions, bytes_per_tier, check_fits
from gemini.planning.plan import Plan
from gemini.planning.planes import ADAM, GRAD, WEIGHTS, PlaneKind
from gemini.planning.planner import plan, pose_problem
from gemini.planning.simulate import simulate
from gemini.planning.timeline import Track
from gemini.planning.traffic import by_name, gradient_traffic, update_tier, update_traffic
from gemini.planning.working import (
    DEVICE_SLOTS,
    DEVICE_TILE,
    activation_bytes,
    device_staging_bytes,
    device_tile_numel,
    staging_bytes,
)
from gemini.tiers import Boundary, Tier
from tests.planning.policies import check_plan

GPU, CPU, NVME = Tier.GPU, Tier.CPU, Tier.NVME
N = 4096
MUCH = 2**40
UP, DOWN = Boundary(CPU, GPU), Boundary(GPU, CPU)


def layout_of(num_chunks: int = 10, *, frozen: tuple[int, ...] = ()) -> Layout:
    return make_layout([ParamSpec(f"layers.{i}.w", N, i not in frozen) for i in range(num_chunks)])


def problem_of(budgets: dict[Tier, int] | None = None, **how: object) -> Problem:
    settings: dict[str, object] = {
        "layout": layout_of(), "precision": "bf16", "gradients": "retain", "budgets": budgets or {GPU: MUCH, CPU: MUCH},
        "compute": GPU, "working_set": 2 * N, "staging": 1000, "device_staging": 500,
    }  # fmt: skip
    return Problem(**{**settings, **how})  # type: ignore[arg-type]


def homes_of(problem: Problem, index: int = 0, **elsewhere: Tier) -> dict[PlaneKind, Tier]:
    return {kind: elsewhere.get(kind, CPU) for kind in problem.sizes[index]}


# ---- the value -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_streamed_is_refused() -> None:
    homes = homes_of(problem_of())
    assert Placement((homes,), frozenset({0})).streamed == {0}
    for bad, words in ((homes | {"exp_avg": NVME}, "exp_avg on nvme"), (dict.fromkeys(homes, GPU), "weights on gpu")):
        with pytest.raises(ValueError, match=f"update of chunk 0 is streamed.*{words}"):
            Placement((bad,), frozenset({0}))
    with pytest.raises(ValueError, match="chunk 3 is streamed, and there are 1 chunks"):
        Placement((homes,), frozenset({3}))
    problem = problem_of(layout=layout_of(2, frozen=(1,)))
    both = Placement((homes, {WEIGHTS: CPU}), frozenset({0, 1}))
    with pytest.raises(ValueError, match=r"frozen chunks \[1\]: leave them out"):
        check_fits(problem, both)
    with pytest.raises(ValueError, match="this machine has none"):
        check_fits(replace(problem, compute=CPU, budgets={CPU: MUCH}), replace(both, streamed=frozenset({0})))


@pytest.mark.parametrize("fraction", [0, 0.3, 0.5, 1])
def test_a_fraction_of_the_states_in_host_memory_is_streamed_first_chunks_first(fraction: float) -> None:
    found = by_fractions(problem_of(), StaticPlacement(updates_on_gpu=fraction)).streamed
    assert found == set(range(round(10 * fraction)))
    problem = problem_of({GPU: MUCH, CPU: MUCH, NVME: MUCH}, layout=layout_of(frozen=(4,)))
    mixed = StaticPlacement(0.2, 0.3, optimizer_on_nvme=0.3, updates_on_gpu=fraction)
    homes = by_fractions(problem, mixed)
    on_cpu = [i for i, planes in enumerate(homes.homes) if planes.get("exp_avg") is CPU]
    assert on_cpu == [3, 5, 6] and 4 not in homes.streamed
    wanted = on_cpu[: {0: 0, 0.3: 1, 0.5: 1, 1: 3}[fraction]]
    assert sorted(homes.streamed) == wanted, "those on the GPU and on NVMe do not count"
    on_disk = by_fractions(problem, StaticPlacement(weights_on_nvme=1, updates_on_gpu=1))
    assert not on_disk.streamed, "nothing comes from NVMe"


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "gradients", "elsewhere", "up", "down"),
    [
        ("bf16", "retain", {}, 14, 12),  # 2 + 2 + 4 + 4 both ways, and the gradient there
        ("bf16", "accumulate", {}, 16, 12),
        ("bf16", "transient", {}, 12, 12),
        ("bf16", "retain", {"weights": GPU}, 12, 10),
        ("bf16", "retain", {"weights": GPU, "grad": GPU}, 10, 10),
        ("fp16", "retain", {}, 14, 12),
        ("fp32", "transient", {"weights": GPU}, 8, 8),
    ],
)
def test_what_is_streamed_crosses_once_each_way_and_gradients_not_back(
    precision: str, gradients: str, elsewhere: dict[str, Tier], up: int, down: int
) -> None:
    problem = problem_of(precision=precision, gradients=gradients)
    homes = homes_of(problem, **elsewhere)
    assert update_tier(problem, homes) is CPU and update_tier(problem, homes, streamed=True) is GPU
    assert update_traffic(problem, homes, 0, streamed=True) == {UP: up * N, DOWN: down * N}
    landed = gradient_traffic(problem, homes, 0, streamed=True)
    narrow = 4 if precision == "fp32" else 2
    stays = gradients == "transient" or homes[GRAD] is GPU
    assert landed == ({} if stays else {DOWN: narrow * N})


def test_staging_on_the_device_is_taken_only_where_something_is_streamed() -> None:
    problem = problem_of(layout=layout_of(2))
    homes = (homes_of(problem),) * 2
    without, streams = (bytes_per_tier(problem, Placement(homes, frozenset(s))) for s in ((), (1,)))
    assert streams == {**without, GPU: without[GPU] + 500}
    tight = replace(problem, budgets={**problem.budgets, GPU: without[GPU] + 499})
    check_fits(tight, Placement(homes))
    with pytest.raises(BudgetExceeded) as error:
        check_fits(tight, Placement(homes, frozenset({1})))
    assert "1 B missing on gpu" in str(error.value)
    assert "placement='auto', which these budgets hold" in str(error.value)
    check_fits(replace(tight, budgets={**tight.budgets, GPU: without[GPU] + 500}), Placement(homes, frozenset({1})))
    with pytest.raises(BudgetExceeded, match="Cheapest change: raise the gpu budget to at least"):
        check_fits(replace(tight, budgets={**tight.budgets, GPU: N}), Placement(homes, frozenset({1})))


def test_tiles_on_the_device_are_large_and_several_even_of_a_small_chunk() -> None:
    assert device_tile_numel(2**30) == DEVICE_TILE
    for numel in (1, 2048, 8193, 10**6, DEVICE_TILE, 10**9):
        tile = device_tile_numel(numel)
        assert tile % 2048 == 0 and tile * DEVICE_SLOTS >= min(numel, DEVICE_TILE)
        assert tile < max(numel, 1) // DEVICE_SLOTS + 2049
    assert device_staging_bytes(2**30, overlap=True) == DEVICE_SLOTS * staging_bytes(DEVICE_TILE)
    assert device_staging_bytes(2**30, overlap=False) == staging_bytes(DEVICE_TILE)
    trace = decoder_trace(hidden=64, layers=2)
    there = {GPU: MUCH, CPU: MUCH}
    largest = max(chunk.numel for chunk in trace.layout().chunks)
    for overlap in (True, False):
        posed = pose_problem(trace, there, precision="bf16", overlap=overlap)
        assert posed.device_staging == device_staging_bytes(largest, overlap=overlap)
    assert pose_problem(trace, there, precision="bf16", compute=CPU).device_staging == 0


# ---- the choice ------------------------------------------------------------------------------------------------------

SMALL = decoder_trace(hidden=64, layers=12, tokens=64)


def box(**figures: float) -> Hardware:
    values = {
        "h2d": 50e9, "d2h": 50e9, "gpu_bandwidth": 1e12, "update_cpu": 0.5e-9, "update_gpu": 0.01e-9,
        "gpu_flops_bf16": 1e16, "cpu_bytes": 2**40, "gpu_bytes": 2**40, **figures,
    }  # fmt: skip
    return Hardware("box", {key: Figure(value, "made up for a test") for key, value in values.items() if value})


def tight(trace: object = SMALL, *, more: int = 0) -> dict[Tier, int]:
    """Host memory for everything, a GPU that just gathers weights, and ``more`` of it."""
    posed = pose_problem(SMALL, {GPU: MUCH, CPU: MUCH}, precision="bf16")
    return {GPU: posed.spoken_for()[GPU] + more, CPU: MUCH}


ROOM = pose_problem(SMALL, {GPU: MUCH, CPU: MUCH}, precision="bf16").device_staging


@pytest.mark.parametrize("schedule", ["serial", "overlapped"])
def test_a_fast_link_beside_a_slow_host_streams_all_and_a_slow_link_nothing(schedule: str) -> None:
    trained = set(range(len(SMALL.layout().chunks)))
    fast = plan(SMALL, box(h2d=1e14, d2h=1e14, update_cpu=5e-9), tight(more=ROOM), schedule=schedule)
    slow = plan(SMALL, box(h2d=1e8, d2h=1e8), tight(more=ROOM), schedule=schedule)
    assert fast.placement.streamed == trained and not slow.placement.streamed
    assert all(fast.update_tier(i) is GPU for i in trained) and all(slow.update_tier(i) is CPU for i in trained)
    assert f"Adam runs on the GPU for {len(trained)} of {len(trained)} chunks, {len(trained)} of them" in str(fast)
    for made in (fast, slow):
        check_plan(made)
        assert made.bytes_per_tier[GPU] <= made.problem.budgets[GPU]
        assert Plan.from_json(made.to_json()) == made


def test_in_between_the_host_and_the_gpu_share_the_updates() -> None:
    """Of the busiest track: neither the host alone nor the link alone is as quick as both."""
    made = plan(SMALL, box(h2d=40e9, d2h=40e9, update_cpu=0.5e-9), tight(more=ROOM))
    streamed = len(made.placement.streamed)
    assert 0 < streamed < len(made.layout.chunks)
    assert not plan(SMALL, box(h2d=40e9, d2h=40e9), tight(more=ROOM), schedule="serial").placement.streamed
    more = plan(SMALL, box(h2d=80e9, d2h=80e9), tight(more=ROOM))
    assert len(more.placement.streamed) > streamed


def test_nothing_is_streamed_without_the_figure_or_the_room() -> None:
    fast = {"h2d": 1e14, "d2h": 1e14, "update_cpu": 5e-9}
    assert plan(SMALL, box(**fast), tight(more=ROOM)).placement.streamed
    assert not plan(SMALL, box(**fast, update_gpu=0), tight(more=ROOM)).placement.streamed, "nobody measured it"
    assert not plan(SMALL, box(**fast), tight(more=ROOM - 1)).placement.streamed, "and the model still fits"
    assert not plan(SMALL, None, tight(more=ROOM)).placement.streamed, "typical speeds decide no such thing"
    assert not Speeds.typical().measured_update_gpu
    assert Speeds.of(box(update_gpu=3e-11), {GPU: 1, CPU: 1}).update_gpu == 3e-11
    assert Speeds.of(box(update_gpu=0), {GPU: 1, CPU: 1}).update_gpu == pytest.approx(26e-12 / 0.9)


def test_gradients_stay_on_the_gpu_for_a_streamed_update_where_there_is_room() -> None:
    """They need not land on the host to come back."""
    weights_and_grads = 4 * SMALL.layout().numel
    made = plan(SMALL, box(h2d=1e12, d2h=1e12, update_cpu=5e-9), tight(more=ROOM + weights_and_grads))
    moment = "exp_avg"
    both = [i for i, homes in enumerate(made.placement.homes) if homes[GRAD] is GPU and homes[moment] is CPU]
    assert both and made.placement.streamed.issuperset(both)
    assert made.bytes_per_tier[GPU] <= made.problem.budgets[GPU]


# ---- JSON ------------------------------------------------------------------------------------------------------------


def test_plans_of_before_are_read_and_stream_nothing() -> None:
    made = plan(SMALL, None, tight(more=ROOM), placement=StaticPlacement(updates_on_gpu=0.5))
    assert 0 < len(made.placement.streamed) < len(made.layout.chunks)
    assert Plan.from_json(made.to_json()) == made
    body = json.loads(made.to_json())
    assert body["streamed"] == sorted(made.placement.streamed)
    del body["streamed"], body["spoken_for"]["device_staging"]
    old = Plan.from_json(json.dumps(body))
    assert (
        not old.placement.streamed and old.problem.device_staging == 0 and old.placement.homes == made.placement.homes
    )
    body["streamed"] = [len(made.layout.chunks)]
    with pytest.raises(PlanMismatch):
        Plan.from_json(json.dumps(body))


def shown(report: Report) -> list[str]:
    """The lines of the screen."""
    out = io.StringIO()
    say(Console(file=out, width=100), screen(report))
    return out.getvalue().splitlines()


def test_the_report_says_how_much_is_streamed_and_what_that_holds() -> None:
    made = plan(SMALL, None, tight(more=ROOM), placement=StaticPlacement(updates_on_gpu=0.5))
    asked = PlanSettings(), Machine(dict(made.problem.budgets), {}, None, GPU, 1, 1)
    told = planned(*asked, made, None)
    assert told["held"]["gpu"]["staging"] == made.problem.device_staging
    assert sum(told["held"]["gpu"].values()) == made.bytes_per_tier[GPU]
    params = sum(made.layout.chunks[i].payload for i in made.placement.streamed)
    assert told["streamed"] == params == told["update"]["gpu"] and told["update"]["cpu"] == SMALL.num_params - params
    (line,) = [line for line in shown(told) if line.startswith("  of it streamed")]
    assert f"{params / SMALL.num_params:.0%}" in line
    without = planned(*asked, plan(SMALL, None, tight(more=ROOM), placement=StaticPlacement()), None)
    assert without["streamed"] == 0 and "staging" not in without["held"]["gpu"]
    assert not any("streamed" in line for line in shown(without))


# ---- the predicted time ----------------------------------------------------------------------------------------------


def streamed_stack(streamed: range = range(LAYERS), **how: object) -> Plan:
    made = stack_plan(LAYERS, weights=CPU, states=CPU, **how)  # type: ignore[arg-type]
    staging = device_staging_bytes(NUMEL, overlap=True)
    budgets = {**made.problem.budgets, GPU: made.problem.budgets[GPU] + staging}
    problem = replace(made.problem, device_staging=staging, budgets=budgets)
    made = replace(made, problem=problem, placement=replace(made.placement, streamed=frozenset(streamed)))
    check_plan(made)
    return made


def test_serial_streams_in_turn() -> None:
    """A layer's 2 bytes per param take 2 ms up and 4 ms down: 14 ms and 24 ms for a retained update."""
    made = streamed_stack(range(2))
    timeline = simulate(made, machine(), schedule="serial")
    update = 2 * (14 + 24) + (LAYERS - 2) * 10
    assert timeline.step_seconds == close((FETCHES * 2 + LAYERS * (1 + 2 + 4) + update) * MS)
    assert timeline.stalls["update"] == close(update * MS)
    assert timeline.moved == by_name(made.traffic)
    assert all(sample.held[GPU]["staging"] == made.problem.device_staging for sample in timeline.samples)
    transient = streamed_stack(gradients="transient")
    told = simulate(transient, machine(), schedule="serial")
    assert told.step_seconds == close((FETCHES * 2 + LAYERS * (1 + 2 + 12 + 24)) * MS), "gradients stay where they are"
    assert told.moved == by_name(transient.traffic)


def test_the_gpu_takes_the_time_of_its_own_figure() -> None:
    figure = {"update_gpu": 5 * MS / NUMEL}
    without, told = (simulate(streamed_stack(), machine(**f), schedule="serial") for f in ({}, figure))
    assert told.busy[Track.UPDATE] == close(LAYERS * 5 * MS + without.busy[Track.UPDATE])
    assert told.step_seconds == close(without.step_seconds + LAYERS * 5 * MS)


@pytest.mark.parametrize("clipping", [True, False])
def test_overlapped_streams_in_a_pipeline(clipping: bool) -> None:
    """Both directions at once, behind computing: the link's own time is what a step takes, and no less."""
    made = streamed_stack()
    told = simulate(made, machine(), schedule="overlapped", clipping=clipping)
    up, down = (FETCHES * 2 + LAYERS * 14) * MS, LAYERS * (4 + 24) * MS
    assert told.busy[Track.H2D] == close(up) and told.busy[Track.D2H] == close(down)
    in_turn = simulate(made, machine(), schedule="serial").step_seconds
    assert max(up, down) * (1 - 1e-6) <= told.step_seconds < 0.85 * in_turn
    assert told.moved == by_name(made.traffic)


def test_what_is_streamed_takes_host_memory_s_bandwidth() -> None:
    made, slow = streamed_stack(), {"dram_bandwidth": 2 * NUMEL / 8e-3}  # 8 ms for 2 bytes per param
    told = simulate(made, machine(**slow), schedule="serial")
    assert told.busy[Track.H2D] == close((FETCHES + LAYERS * 7) * 8 * MS)
    assert told.busy[Track.D2H] == close((LAYERS + LAYERS * 6) * 8 * MS)
    whole = sum(made.traffic.values()) / (2 * NUMEL) * 8 * MS
    assert simulate(made, machine(**slow), schedule="overlapped").step_seconds >= whole * (1 - 1e-6)


def test_states_alone_cross_where_weights_live_on_the_gpu() -> None:
    made = stack_plan(LAYERS, weights=GPU, states=CPU)
    made = replace(made, placement=replace(made.placement, streamed=frozenset(range(LAYERS))))
    told = simulate(made, machine(), schedule="serial")
    assert told.step_seconds == close(LAYERS * (1 + 2 + 4 + 12 + 20) * MS)
    assert ADAM.states[0] in made.placement.homes[0] and told.moved == by_name(made.traffic)
    assert activation_bytes(made.trace, offloaded=False) == 0
