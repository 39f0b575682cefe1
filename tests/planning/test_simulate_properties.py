"""What holds of every simulation: over shapes, budgets, formats and schedules."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stacks import machine, stack_plan
from traces import decoder_trace

import gemini.planning.schedules as schedules
from gemini.planning import simulate as simulating
from gemini.planning.costs import Costs, Efficiency, Grid, MeshSizes
from gemini.planning.placement import can_stream
from gemini.planning.plan import Plan
from gemini.planning.planner import plan as make_plan
from gemini.planning.planner import pose_problem
from gemini.planning.schedules import Work, serial
from gemini.planning.timeline import Track
from gemini.planning.traffic import by_name, path
from gemini.tiers import Tier
from tests.planning.policies import DoneThenLeastRecent, plan_by_policy

simulate = partial(simulating.simulate, schedule="serial")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A small decoder in some format, its planes over two or three tiers as budgets have it."""
    trace = decoder_trace(
        hidden=128, layers=draw(st.integers(1, 5)), checkpointing=draw(st.booleans()),
        frozen=draw(st.booleans()), precision=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
    )  # fmt: skip
    gradients = draw(st.sampled_from(["retain", "accumulate", "transient"]))
    compute = draw(st.sampled_from([Tier.CPU, Tier.GPU]))
    ranks, max_chunk = draw(st.sampled_from([1, 1, 4])), 2 ** draw(st.integers(14, 18))
    offload = draw(st.sampled_from([None, "cpu", "nvme"]))
    there = dict.fromkeys((compute, Tier.CPU, Tier.NVME), 2**40)
    problem = pose_problem(
        trace, there, precision=trace.precision, gradients=gradients, offload_activations=offload, ranks=ranks,
        max_chunk=max_chunk,
    )  # fmt: skip
    planes = sum(sum(sizes.values()) for sizes in problem.sizes)
    taken = problem.spoken_for()
    budgets = {Tier.NVME: ranks * (2 * planes + taken.get(Tier.NVME, 0))}  # of a machine
    budgets[Tier.CPU] = ranks * (taken.get(Tier.CPU, 0) + int(planes * draw(st.sampled_from([0.0, 0.2, 0.5, 1.1]))))
    if compute is Tier.GPU:
        budgets[Tier.GPU] = taken[Tier.GPU] + int(planes * draw(st.sampled_from([0.0, 0.1, 0.4, 1.1])))
    plan = make_plan(
        trace, None, budgets, gradients=gradients, compute=compute, ranks=ranks,
        max_chunk=max_chunk,
        accumulate=1 if gradients == "transient" else draw(st.integers(1, 3)),
        offload_activations=offload,
    )  # fmt: skip
    if compute is Tier.GPU and draw(st.booleans()):
        plan = with_streamed(plan, draw(st.sampled_from([2, 1])))
    if draw(st.booleans()):
        return plan
    made = plan_by_policy(trace, plan.problem, plan.placement, DoneThenLeastRecent())
    return replace(plan, moves=made.moves, again=())


def with_streamed(plan: Plan, every: int) -> Plan:
    """The same plan with so many of the updates streamed as can be, and the room for that."""
    homes, chunks = plan.placement.homes, plan.layout.chunks
    able = [i for i, planes in enumerate(homes) if chunks[i].trainable and can_stream(planes)]
    placement = replace(plan.placement, streamed=frozenset(able[::every]))
    more = plan.problem.device_staging if placement.streamed else 0
    budgets = {**plan.problem.budgets, Tier.GPU: plan.problem.budgets[Tier.GPU] + more}
    return replace(plan, placement=placement, problem=replace(plan.problem, budgets=budgets))


def _hops(plan: Plan) -> list[Any]:
    """Every hop of a step, with its time alone."""
    costs = Costs(
        machine(), Efficiency(), compute=plan.problem.compute, precision=plan.problem.precision,
        local_ranks=plan.layout.ranks,
    )  # fmt: skip
    return [
        task.hop
        for task in serial(
            Work(plan, costs, Grid(MeshSizes(dp=plan.layout.ranks), plan.layout.ranks), measured=False)
        ).tasks
    ]


SLOW = {"gpu_flops_bf16": 2e9, "gpu_flops_fp32": 1e9, "cpu_flops_bf16": 2e9, "cpu_flops_fp32": 1e9}
"""So that computing is worth overlapping."""


@settings(max_examples=40, deadline=None)
@given(plans(), st.sampled_from([{}, SLOW, {"dram_bandwidth": 5e9}]))
def test_every_simulation_adds_up(plan: Plan, figures: dict[str, float]) -> None:
    hardware = machine(**figures)
    told = simulate(plan, hardware)
    hidden = simulate(plan, hardware, schedule="overlapped")
    activations = 2 * plan.accumulate * sum(m.saved_bytes for m in plan.trace.moments)
    for timeline in (told, hidden):
        if plan.offload_activations is None or plan.offload_activations == plan.problem.compute.value:
            assert timeline.moved == by_name(plan.traffic)
        else:
            crossed = sum(timeline.moved.values()) - sum(plan.traffic.values())
            ways = len(path(plan.problem.compute, Tier(plan.offload_activations)))
            # Beside computing what has not left when it is asked for is there.
            least = activations if timeline is told else activations // 2
            assert ways * least <= crossed <= ways * activations and crossed % ways == 0
        alone = timeline.step_seconds - sum(timeline.stalls.values())
        assert alone == pytest.approx(sum(s.stop - s.start for s in told.spans if s.track is Track.COMPUTE), rel=1e-6)
        for track, seconds in timeline.busy.items():
            assert seconds <= timeline.step_seconds * (1 + 1e-9), track
        for span in timeline.spans:
            assert 0 <= span.start < span.stop <= timeline.step_seconds * (1 + 1e-9)
        static = told.samples[0].held
        for sample in timeline.samples:
            assert all(num_bytes > 0 for holders in sample.held.values() for num_bytes in holders.values())
            for tier, holders in static.items():
                for holder in set(holders) - {"windows", "activations"}:
                    assert sample.held[tier][holder] == holders[holder]
    # Where the thread that launches has waited, nothing hides what it launches next.
    launching = plan.accumulate * sum(m.num_ops for m in plan.trace.moments) * hardware.figures["gpu_op_seconds"].value
    assert hidden.step_seconds <= told.step_seconds * (1 + 1e-6) + launching
    if not figures:
        tracks: dict[str, float] = {}
        for hop in _hops(plan):
            tracks[hop.queue] = tracks.get(hop.queue, 0.0) + hop.cost.seconds
        assert told.step_seconds == pytest.approx(sum(tracks.values()), rel=1e-6)
        for hop in _hops(plan):
            tracks[hop.queue] -= hop.cost.seconds if hop.name == "restore activations" else 0.0
        assert hidden.step_seconds >= max(tracks.values()) * (1 - 1e-6)


@settings(max_examples=25, deadline=None)
@given(plans(), st.sampled_from(["h2d", "d2h", "nvme_read", "nvme_write", "dram_bandwidth", "interconnect"]))
def test_more_bandwidth_is_never_slower(plan: Plan, figure: str) -> None:
    hardware = machine(dram_bandwidth=2e10)
    faster = hardware.with_figures("measured", **{figure: 3 * hardware.figures[figure].value})
    assert simulate(plan, faster).step_seconds <= simulate(plan, hardware).step_seconds * (1 + 1e-9)
    slower_adam = hardware.with_figures("measured", update_cpu=2 * hardware.figures["update_cpu"].value)
    assert simulate(plan, slower_adam).step_seconds >= simulate(plan, hardware).step_seconds * (1 - 1e-9)


@settings(max_examples=12, deadline=None)
@given(plans())
def test_the_third_step_is_like_those_that_follow(plan: Plan) -> None:
    check_third(plan, SLOW)


def test_what_is_fetched_ahead_for_the_next_step_takes_its_share_of_the_step() -> None:
    """Host memory is the bottleneck, and windows have room for four of six layers."""
    plan = stack_plan(6, weights=Tier.CPU, states=Tier.CPU, gradients="transient", windows=4)
    check_third(plan, {"dram_bandwidth": 1e9})


def check_third(plan: Plan, figures: dict[str, float]) -> None:
    """Compare the step that is told with one of those in the middle of six."""
    told = simulate(plan, machine(**figures), schedule="overlapped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "STEPS", 6)
        work = simulating._work(plan, machine(**figures), "overlapped")
        graph = schedules.overlapped(work, clipping=plan.problem.gradients != "transient")
        run = graph.fluid.run()
    begins = [run.start[task] for task in graph.begins]
    for begin, end in pairwise(begins[2:]):
        assert told.step_seconds == pytest.approx(end - begin, rel=1e-6)


def test_the_windows_of_a_large_model_stay_in_their_room() -> None:
    trace = decoder_trace(hidden=8192, layers=16, intermediate=28672, kv=1024, vocab=32000, tokens=1024)
    budgets = {Tier.GPU: 12 * 2**30, Tier.CPU: 12 * 2**30, Tier.NVME: 2**41}
    plan = make_plan(trace, None, budgets)
    for schedule in ("serial", "overlapped"):
        timeline = simulate(plan, machine(), schedule=schedule)
        assert timeline.moved == by_name(plan.traffic)
        for tier, peak in timeline.peaks.items():
            assert peak <= plan.problem.budgets[tier], (schedule, tier)
        assert len(timeline.spans) < 4 * (len(trace.moments) + 10 * len(plan.layout.chunks))
