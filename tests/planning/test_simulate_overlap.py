"""Steps in which computing and updates share a host of two cores: bounds of the overlapped optimizer, by hand.

A layer computes 10 ms in forward and 20 ms in backward with one thread; what its update takes is each test's own.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from stacks import NUMEL, machine, stack_plan, stack_trace

from gemini.planning import simulate as simulating
from gemini.planning.hardware import Hardware
from gemini.planning.plan import Plan
from gemini.planning.simulate import SHARING
from gemini.planning.timeline import Timeline, Track
from gemini.planning.trace import with_seconds
from gemini.tiers import Tier

simulate = partial(simulating.simulate, schedule="serial")

LAYERS = 60
MS = 1e-3
FORWARD, BACKWARD = LAYERS * 10 * MS, LAYERS * 20 * MS


def host(adam_ms: float, **figures: float) -> Hardware:
    """Two cores, one for torch; an update takes half as long with both."""
    one = adam_ms * MS / NUMEL
    return machine(**{"cpu_threads": 2, "torch_threads": 1, "update_cpu": one / 2, "update_cpu_one": one, **figures})


def stack(layers: int = LAYERS, *, clipped: bool = False, states: Tier = Tier.CPU, **fields: Any) -> Plan:
    gradients = "retain" if clipped else "transient"
    return stack_plan(layers, weights=Tier.CPU, states=states, compute=Tier.CPU, gradients=gradients, **fields)


def overlapped(plan: Plan, hardware: Hardware, **options: Any) -> Timeline:
    return simulate(plan, hardware, schedule="overlapped", **options)


@pytest.mark.parametrize("adam_ms", [2.0, 15.0, 30.0, 50.0])
def test_without_clipping_a_step_is_the_longer_of_computing_and_updates(adam_ms: float) -> None:
    """And the update of the chunk that is needed first, which nothing hides."""
    timeline = overlapped(stack(), host(adam_ms))
    bound, first = max(FORWARD + BACKWARD, LAYERS * adam_ms * MS), adam_ms * MS
    assert bound * (1 - 1e-6) <= timeline.step_seconds <= bound + 2 * first
    assert SHARING not in timeline.stalls, "each on a core of its own"
    recorded = with_seconds(stack_trace(LAYERS), [10 * MS] * LAYERS + [20 * MS] * LAYERS)
    assert overlapped(stack(trace=recorded), host(adam_ms)).step_seconds == pytest.approx(timeline.step_seconds)
    serial = simulate(stack(), host(adam_ms))
    assert serial.step_seconds == pytest.approx(FORWARD + BACKWARD + LAYERS * adam_ms * MS / 2), "with both cores"


@pytest.mark.parametrize("adam_ms", [2.0, 10.0, 30.0])
def test_with_clipping_updates_hide_behind_the_next_forward(adam_ms: float) -> None:
    timeline = overlapped(stack(clipped=True), host(adam_ms))
    bound = BACKWARD + max(FORWARD, LAYERS * adam_ms * MS)
    assert bound * (1 - 1e-6) <= timeline.step_seconds <= bound + 2 * adam_ms * MS
    (wait,) = [cause for cause, seconds in timeline.stalls.items() if seconds > MS]
    assert wait == "update"


def test_threads_are_parts_of_the_cores() -> None:
    """Computing and updates of 30 ms a layer each, side by side all the time."""
    side_by_side = FORWARD + BACKWARD
    for options, figures, times in (
        ({}, {}, 1.0),
        ({}, {"torch_threads": 2}, 1.5),  # three threads on two cores
        ({"update_threads": 2}, {}, 1.25),  # three threads again, until the updates, twice as quick, are over
        ({}, {"cpu_contention": 1.3}, 1.3),
        ({}, {"cpu_threads": 8, "torch_threads": 4}, 1.0),
    ):
        step = overlapped(stack(), host(30.0, **figures), **options).step_seconds
        assert step == pytest.approx(times * side_by_side, rel=0.03), (options, figures)
    without = host(30.0).with_figures("a data sheet")
    whole = Hardware("old", {k: f for k, f in without.figures.items() if k not in ("torch_threads", "update_cpu_one")})
    step = overlapped(stack(), whole).step_seconds
    assert step == pytest.approx(FORWARD + BACKWARD + LAYERS * 15 * MS, rel=0.03), "either takes all of the host"


def test_more_threads_than_memory_feeds_are_no_faster() -> None:
    """The figure of all cores is the least that an update takes."""
    hardware = host(30.0, cpu_threads=8, update_cpu=10 * MS / NUMEL)
    for threads, adam_ms in ((1, 30), (2, 15), (6, 10)):
        timeline = overlapped(stack(), hardware, update_threads=threads)
        assert timeline.busy[Track.UPDATE] == pytest.approx(LAYERS * adam_ms * MS, rel=0.02)
    timeline = overlapped(stack(), hardware)
    assert timeline.busy[Track.UPDATE] == pytest.approx(LAYERS * 10 * MS, rel=0.02), "what torch leaves: seven"


def test_the_update_of_a_single_chunk_is_a_pipeline_too() -> None:
    """Read 120 ms, Adam 10 ms, write 200 ms, in four pieces: the writes, and the first piece's read and Adam."""
    timeline = overlapped(stack(1, clipped=True, states=Tier.NVME), host(10.0))
    landing = 40
    assert timeline.step_seconds == pytest.approx((10 + 20 + landing + (120 + 10) / 4 + 200) * MS, rel=1e-4)
    assert timeline.moved == {"nvme->cpu": 12 * NUMEL, "cpu->nvme": 12 * NUMEL}
    whole = simulate(stack(1, clipped=True, states=Tier.NVME), host(10.0))
    assert whole.step_seconds == pytest.approx((10 + 20 + landing + 120 + 5 + 200) * MS, rel=1e-4)


def test_the_host_lands_gradients_that_stay_between_two_moments() -> None:
    """Those that leave the computing tier land beside it: to the drive in 4 ms a layer, or off a GPU in less."""
    hardware = host(0.001, land_cpu=5 * MS / NUMEL, d2h=1e18, h2d=1e18)
    timeline = overlapped(stack(clipped=True), hardware)
    assert timeline.stalls["gradient landing"] == pytest.approx(LAYERS * 5 * MS, rel=1e-3)
    assert timeline.step_seconds == pytest.approx(FORWARD + BACKWARD + LAYERS * 5 * MS, rel=0.01)
    quick = hardware.with_figures("measured", gpu_flops_bf16=1e11, nvme_write=2 * NUMEL / (4 * MS))
    for leaves in (stack(clipped=True, states=Tier.NVME), stack_plan(LAYERS, weights=Tier.GPU, states=Tier.CPU)):
        assert overlapped(leaves, quick).stalls.get("gradient landing", 0.0) < 20 * MS, "those of the last moments"


@pytest.mark.parametrize(("mixed", "layer_ms"), [(None, 100.0), (1.2, 10 * 20 / 1.2), (1.0, 200.0), (0.5, 200.0)])
def test_a_drive_that_reads_and_writes_has_one_speed_for_both(mixed: float | None, layer_ms: float) -> None:
    """10 bytes per param each way, 20 ms per 2 bytes alone; ``mixed``: of both at once, by the speed of one alone."""
    alone = NUMEL * 2 / (20 * MS)
    figures = {"nvme_read": alone, "nvme_write": alone} | ({} if mixed is None else {"nvme_mixed": mixed * alone})
    timeline = overlapped(stack(states=Tier.NVME), host(2.0, **figures))
    assert timeline.step_seconds == pytest.approx(LAYERS * layer_ms * MS, rel=0.05)
    serial = simulate(stack(states=Tier.NVME), host(2.0, **figures))
    assert serial.step_seconds == pytest.approx(FORWARD + BACKWARD + LAYERS * (200 + 1) * MS, rel=0.01), "one at a time"


def on_gpu(num_ops: int = 0, **how: Any) -> Any:
    """Weights and states on the host; computing takes 10 ms a layer and 20 ms in backward."""
    trace = stack_trace(LAYERS, forward_flops=10**10, backward_flops=2 * 10**10, num_ops=num_ops)
    return stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU, trace=trace, **how)


def test_launching_is_hidden_where_it_is_shorter_and_else_is_what_a_step_takes() -> None:
    """5 operations and one param in a moment. A norm waits for all that was computed, as the update of what is read
    first does: then nothing is launched ahead.
    """
    quick = {"update_cpu": 1e-15, "h2d": 1e18, "d2h": 1e18}
    for op, hook, launching in ((1, 0, 5), (1, 3, 8), (5, 0, 25), (2, 20, 30)):
        hardware = machine(gpu_op_seconds=op * MS, hook_seconds=max(hook, 1e-9) * MS, **quick)
        for clipping in (False, True):
            timeline = overlapped(on_gpu(num_ops=5), hardware, clipping=clipping)
            # A gradient that leaves is one more of them.
            forward, backward = launching * MS, (launching + hook) * MS
            most = max(10 * MS, forward) * LAYERS + max(20 * MS, backward) * LAYERS
            assert most * (1 - 1e-3) <= timeline.step_seconds <= most + (backward if clipping else 0) + 21 * MS
            if launching < 10:
                assert timeline.stalls["launching"] == pytest.approx(forward, abs=1e-6)


@pytest.mark.parametrize(("mixed", "lost"), [(None, 0.0), (2.0, 0.0), (1.0, 1.0)])
def test_a_link_that_does_both_directions_has_one_speed_for_both(mixed: float | None, lost: float) -> None:
    """A fetch of 30 ms and a landing of 30 ms a layer in backward; ``lost``: of the time that both take at once."""
    alone = 2 * NUMEL / (30 * MS)
    figures = {"h2d": alone, "d2h": alone, "update_cpu": 1e-15} | (
        {} if mixed is None else {"link_mixed": mixed * alone}
    )
    timeline = overlapped(on_gpu(), machine(**figures), clipping=False)
    assert timeline.busy[Track.D2H] == pytest.approx((1 + lost) * LAYERS * 30 * MS, rel=0.25)


def test_computing_waits_for_gradients_only_where_there_is_no_room_for_them() -> None:
    """A landing of 60 ms a layer beside 20 ms of computing, and a budget with room for all layers more or for none."""
    hardware = machine(d2h=2 * NUMEL / (60 * MS), h2d=1e18, update_cpu=1e-15)
    plan = on_gpu()
    more = {**plan.problem.budgets, Tier.GPU: plan.problem.budgets[Tier.GPU] + LAYERS * 2 * NUMEL}
    roomy = replace(plan, problem=replace(plan.problem, budgets=more))
    tight, free = (overlapped(of, hardware, clipping=True) for of in (plan, roomy))
    assert free.step_seconds == pytest.approx(tight.step_seconds, rel=0.01), "the link is what takes time"
    last = [max(span.stop for span in of.spans if span.name.startswith("backward")) for of in (tight, free)]
    assert last[1] == pytest.approx(LAYERS * 30 * MS, rel=0.01) and last[0] > last[1] + 3 * 40 * MS


def test_computing_waits_for_the_copy_of_a_gradient_and_not_for_the_host_that_adds_it() -> None:
    """The host takes 60 ms a layer and more, beside 20 ms of computing; copies take none, and there is no room."""
    hardware = machine(d2h=1e18, h2d=1e18, update_cpu=1e-15, land_cpu=60 * MS / NUMEL)
    timeline = overlapped(on_gpu(gradients="accumulate", accumulate=2), hardware, clipping=True)
    last = max(span.stop for span in timeline.spans if span.name.startswith("backward"))
    assert last == pytest.approx(2 * LAYERS * 30 * MS, rel=0.01)
    assert timeline.step_seconds > last + LAYERS * 60 * MS
