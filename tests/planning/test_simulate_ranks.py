"""What the simulator says of several ranks, of policies, and of the memory held at each moment; by hand, too."""

import pytest
from stacks import FETCHES, LAYERS, MS, NUMEL, close, machine, simulate, simulate_policy, stack_plan, stack_trace
from traces import decoder_trace

from gemini.planning.planner import plan as make_plan
from gemini.planning.timeline import Track
from gemini.tiers import Tier
from tests.planning.policies import DoneThenLeastRecent, FirstInFirstOut

# ---- ranks ------------------------------------------------------------------------------------------------------


def test_ranks_divide_the_machine_and_send_each_other_the_rest() -> None:
    """Four ranks on one host: a quarter of each plane, at a quarter of the host's speed (Adam, drives), the whole link
    each; a ring sends three quarters of each chunk at 8 ms a layer.
    """
    plan, shared = (stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU, ranks=ranks) for ranks in (1, 4))
    one, four = simulate(plan, machine()), simulate(shared, machine())
    assert four.tokens == 4 * one.tokens and four.flops == one.flops
    assert four.stalls["all-gather"] == close(FETCHES * 6 * MS)
    assert four.stalls["reduce-scatter"] == close(LAYERS * 6 * MS)
    assert four.stalls["fetch from cpu"] == close(FETCHES * 0.5 * MS)
    assert four.stalls["update"] == close(one.stalls["update"])  # a quarter of the params at a quarter of the speed
    assert four.moved == {way: num_bytes // 4 for way, num_bytes in one.moved.items()}
    on_two_machines = simulate(shared, machine(num_gpus=2))
    assert on_two_machines.stalls["update"] == close(one.stalls["update"] / 2)
    assert "4 x round" in four.title


def test_ranks_divide_drives_and_memory() -> None:
    """A quarter of the bytes at a quarter of the speed takes as long, whichever figure it is that bounds it."""
    for figures in ({}, {"dram_bandwidth": 1e8}):
        plans = (stack_plan(LAYERS, weights=Tier.NVME, states=Tier.NVME, ranks=ranks) for ranks in (1, 4))
        one, four = (simulate(plan, machine(**figures)) for plan in plans)
        assert four.stalls["update"] == close(one.stalls["update"])


def test_gradients_of_a_chunk_are_divided_once_all_of_them_are_there() -> None:
    trace = decoder_trace(hidden=128, layers=2)
    plan = make_plan(trace, None, {Tier.GPU: 2**30, Tier.CPU: 2**30}, ranks=4, compute=Tier.GPU)
    assert any(len(chunk.slots) > 1 for chunk in plan.layout.chunks)
    for schedule in ("serial", "overlapped"):
        timeline = simulate(plan, machine(), schedule=schedule)
        reduced = [span.chunk for span in timeline.spans if span.track is Track.REDUCE]
        assert sorted(reduced) == list(range(len(plan.layout.chunks)))


def test_what_stood_on_the_gpu_is_gathered_from_all_ranks_at_each_use() -> None:
    plan = stack_plan(LAYERS, weights=Tier.GPU, states=Tier.GPU, ranks=2, windows=1)
    timeline = simulate(plan, machine())
    gathers = [span for span in timeline.spans if span.track is Track.GATHER and span.name.startswith("all-gather")]
    assert len(gathers) == 2 * LAYERS - 1  # the last layer turns around
    assert timeline.stalls["all-gather"] == close((2 * LAYERS - 1) * 4 * MS)
    assert not timeline.moved


# ---- policies ---------------------------------------------------------------------------------------------------


def test_a_policy_is_played_as_the_plan_that_it_makes() -> None:
    plan = stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU, windows=4)
    given = plan.trace, plan.problem, plan.placement
    lru = simulate_policy(*given, DoneThenLeastRecent(), machine())
    assert lru == simulate(plan, machine())
    fifo = simulate_policy(*given, FirstInFirstOut(), machine())
    assert fifo.moved["cpu->gpu"] >= lru.moved["cpu->gpu"]


# ---- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["serial", "overlapped"])
def test_samples_hold_planes_windows_and_staging(schedule: str) -> None:
    plan = stack_plan(LAYERS, weights=Tier.NVME, states=Tier.CPU, windows=3)
    timeline = simulate(plan, machine(), schedule=schedule)
    for sample in timeline.samples:
        assert sample.held[Tier.NVME] == {"weights": LAYERS * 2 * NUMEL}
        assert sample.held[Tier.CPU]["exp_avg"] == LAYERS * 4 * NUMEL
        assert sample.held[Tier.CPU]["staging"] == 17 * NUMEL
        assert 0 <= sample.held[Tier.GPU].get("windows", 0) <= 3 * 2 * NUMEL
    assert max(sample.held[Tier.GPU].get("windows", 0) for sample in timeline.samples) == 3 * 2 * NUMEL
    assert [s.seconds for s in timeline.samples] == sorted({s.seconds for s in timeline.samples})
    assert all(timeline.peaks[tier] <= budget for tier, budget in plan.problem.budgets.items())
    assert {sample.moment for sample in timeline.samples} <= set(range(2 * LAYERS))


def test_serial_windows_stay_until_someone_needs_the_room_or_the_update_comes() -> None:
    timeline = simulate(stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU, windows=LAYERS), machine())
    windows = [sample.held[Tier.GPU].get("windows", 0) // (2 * NUMEL) for sample in timeline.samples]
    assert windows == [*range(1, LAYERS + 1), *reversed(range(1, LAYERS))]


def test_activations_on_the_gpu_are_in_the_samples() -> None:
    trace = stack_trace(2, live_bytes=1000, peak_bytes=5000)
    timeline = simulate(stack_plan(2, weights=Tier.GPU, states=Tier.GPU, trace=trace), machine())
    found = [sample.held[Tier.GPU].get("activations", 0) for sample in timeline.samples]
    assert set(found) <= {1000, 5000} and max(found) == 5000
