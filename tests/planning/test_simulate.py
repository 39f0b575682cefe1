"""What the simulator says of plans whose outcome can be told by hand."""

from collections import Counter
from dataclasses import replace

import pytest
from stacks import FETCHES, LAYERS, MS, NUMEL, close, machine, simulate, stack_plan, stack_trace

import gemini
from gemini.errors import MissingFigure, PlanMismatch
from gemini.planning.costs import Efficiency
from gemini.planning.plan import Plan
from gemini.planning.simulate import SHARING
from gemini.planning.timeline import Timeline, Track
from gemini.planning.trace import with_seconds
from gemini.planning.traffic import Traffic, by_name
from gemini.tiers import Tier
from tests.planning.policies import check_plan


def test_serial_step_is_the_sum_of_its_parts_on_a_gpu() -> None:
    """Weights, gradients and states in host memory: fetches 2 ms each, computing 1 and 2 ms a layer, landing 4 ms,
    Adam 10 ms; nothing else takes time.
    """
    plan = stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU)
    check_plan(plan)
    timeline = simulate(plan, machine())
    assert sum(len(moves.fetch) for moves in plan.moves) == FETCHES
    assert timeline.step_seconds == close((FETCHES * 2 + LAYERS * (1 + 2 + 4 + 10)) * MS)
    assert timeline.stalls == {
        "update": close(LAYERS * 10 * MS),
        "gradient landing": close(LAYERS * 4 * MS),
        "fetch from cpu": close(FETCHES * 2 * MS),
    }
    assert timeline.busy[Track.COMPUTE] == close(LAYERS * 3 * MS)
    assert timeline.busy[Track.H2D] == close(FETCHES * 2 * MS)
    assert timeline.moved == {"cpu->gpu": FETCHES * 2 * NUMEL, "gpu->cpu": LAYERS * 2 * NUMEL}
    assert timeline.source == "predicted" and timeline.tokens == 8 and timeline.flops == LAYERS * 3 * 10**9
    assert "Stack on round, serial" in str(timeline)


def test_serial_step_is_the_sum_of_its_parts_on_cpu_and_nvme() -> None:
    """Weights and states on drives at 20 ms per 2 bytes per param read and 40 written; computing 10 and 20 ms.

    The update reads 2 + 2 + 4 + 4 + 2 bytes and writes 12; a gradient lands with 2 bytes written.
    """
    plan = stack_plan(LAYERS, weights=Tier.NVME, states=Tier.NVME, compute=Tier.CPU)
    timeline = simulate(plan, machine())
    per_layer = 10 + 20 + 40 + (7 * 20 + 10 + 6 * 40)
    assert timeline.step_seconds == close((FETCHES * 20 + LAYERS * per_layer) * MS)
    assert timeline.moved == {"nvme->cpu": (FETCHES * 2 + LAYERS * 14) * NUMEL, "cpu->nvme": LAYERS * 14 * NUMEL}
    assert timeline.stalls["fetch from nvme"] == close(FETCHES * 20 * MS)
    assert timeline.stalls["update"] == close(LAYERS * 390 * MS)
    assert timeline.bound_by is Track.NVME_WRITE


def test_what_goes_from_nvme_to_the_gpu_takes_both_ways() -> None:
    timeline = simulate(stack_plan(LAYERS, weights=Tier.NVME, states=Tier.CPU), machine())
    assert timeline.stalls["fetch from nvme"] == close(FETCHES * 22 * MS)
    assert timeline.moved["nvme->cpu"] == timeline.moved["cpu->gpu"] + LAYERS * 2 * NUMEL  # and once for the update


def test_serial_transient_updates_follow_their_gradients() -> None:
    plan = stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU, gradients="transient")
    timeline = simulate(plan, machine())
    # 26 bytes per param of the figure update_cpu, whether the gradient has a plane or not
    assert timeline.step_seconds == close((FETCHES * 2 + LAYERS * (1 + 2 + 4 + 10)) * MS)
    updates = [span for span in timeline.spans if span.track is Track.UPDATE]
    backward = [span for span in timeline.spans if span.name.startswith("backward")]
    assert updates[0].chunk == LAYERS - 1
    assert backward[0].stop <= updates[0].start and updates[0].stop <= backward[1].start


def test_measured_seconds_stand_for_their_own_device_only() -> None:
    trace = with_seconds(stack_trace(LAYERS), [7 * MS] * 2 * LAYERS)
    plan = stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU, trace=trace)
    assert simulate(plan, machine()).busy[Track.COMPUTE] == close(LAYERS * 14 * MS)
    elsewhere = replace(plan, trace=replace(plan.trace, target="cpu"))
    assert simulate(elsewhere, machine()).busy[Track.COMPUTE] == close(LAYERS * 3 * MS)


def test_a_moment_takes_its_slowest_part() -> None:
    for fields, figures, milliseconds in (
        ({"touched_bytes": 5 * 10**6}, {"gpu_bandwidth": 1e9}, 5),
        ({"num_ops": 4}, {"gpu_op_seconds": 1 * MS}, 4),
        ({"forward_flops": 6 * 10**9, "backward_flops": 6 * 10**9}, {}, 6),
    ):
        plan = stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU, trace=stack_trace(LAYERS, **fields))
        timeline = simulate(plan, machine(**figures))
        taken = timeline.busy[Track.COMPUTE] + timeline.stalls.get("launching", 0.0)
        assert taken == close(2 * LAYERS * milliseconds * MS)


def test_landing_takes_what_it_was_measured_to_take() -> None:
    """2 + 2 bytes, and of sums in fp32 2 + 4, to which a second micro-batch adds: read once more."""
    measured = machine().with_figures("measured here", land_cpu=3 * MS / NUMEL)
    for gradients, accumulate, passes in (("retain", 1, 0), ("accumulate", 1, 1.5), ("accumulate", 2, 1.5 + 2.5)):
        how = {"gradients": gradients, "accumulate": accumulate}
        plan = stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU, **how)
        at_memory_speed = simulate(plan, machine()).stalls["gradient landing"]
        assert at_memory_speed == close(accumulate * LAYERS * 4 * MS), "what leaves as it is kept the host leaves alone"
        assert simulate(plan, measured).stalls["gradient landing"] == close(at_memory_speed + passes * LAYERS * 3 * MS)


def test_a_copy_takes_its_latency_too() -> None:
    plan = stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU)
    told, late = simulate(plan, machine()), simulate(plan, machine(copy_seconds=1 * MS))
    assert late.step_seconds - told.step_seconds == close((FETCHES + LAYERS) * MS), "one for each gradient"
    assert late.moved == told.moved


def test_adam_on_the_gpu_runs_at_its_memory_speed() -> None:
    plan = stack_plan(LAYERS, weights=Tier.GPU, states=Tier.GPU)
    timeline = simulate(plan, machine(gpu_bandwidth=26 * NUMEL / 1e-3))
    # and landing a gradient in its plane reads and writes 2 bytes each
    assert timeline.stalls["update"] == close(LAYERS * 1 * MS)
    assert timeline.stalls["gradient landing"] == close(LAYERS * 4 / 26 * MS)
    assert not timeline.moved


def test_activations_that_wait_elsewhere_cross_twice() -> None:
    trace = stack_trace(4)
    moments = [replace(m, saved_bytes=2 * NUMEL) for m in trace.moments[:4]]
    moments += [replace(m, restored_bytes=2 * NUMEL) for m in trace.moments[4:]]
    trace = replace(trace, moments=tuple(moments), checkpointing=True)
    plan = stack_plan(4, weights=Tier.GPU, states=Tier.GPU, trace=trace, offload_activations="nvme")
    timeline = simulate(plan, machine())
    assert timeline.stalls["activation"] == close(4 * (4 + 40 + 20 + 2) * MS)
    assert timeline.moved == dict.fromkeys(["cpu->gpu", "cpu->nvme", "gpu->cpu", "nvme->cpu"], 8 * NUMEL)
    held = [sample.held[Tier.NVME].get("activations", 0) for sample in timeline.samples]
    assert max(held) == 8 * NUMEL and held[-1] == 0
    overlapped = simulate(plan, machine(), schedule="overlapped")
    assert overlapped.moved == timeline.moved
    assert overlapped.step_seconds < timeline.step_seconds


def test_micro_batches_repeat_all_but_the_update() -> None:
    once = simulate(stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU, gradients="accumulate"), machine())
    plan = stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU, gradients="accumulate", accumulate=3)
    thrice = simulate(plan, machine())
    assert thrice.step_seconds - 3 * once.step_seconds == close(-2 * once.stalls["update"])
    assert thrice.moved == by_name(plan.traffic)
    assert (thrice.tokens, thrice.flops) == (24, 3 * once.flops)


def test_gradients_on_nvme_are_read_to_be_added_to() -> None:
    plan = stack_plan(
        LAYERS, weights=Tier.CPU, states=Tier.NVME, compute=Tier.CPU, gradients="accumulate", accumulate=3
    )
    assert plan.traffic == simulate_traffic(plan, "serial") == simulate_traffic(plan, "overlapped")
    timeline = simulate(plan, machine())
    # 4 bytes per param: 80 ms to write in each of three micro-batches, 40 ms to read in two
    assert timeline.stalls["gradient landing"] == close(LAYERS * (3 * 80 + 2 * 40) * MS)


def simulate_traffic(plan: Plan, schedule: str) -> Traffic:
    moved = simulate(plan, machine(), schedule=schedule).moved
    return Counter({way: moved[str(way)] for way in plan.traffic})


# ---- overlapped -------------------------------------------------------------------------------------------------


def test_overlapped_step_is_the_busiest_of_computing_and_the_link() -> None:
    """Forward 1 ms and backward 2 ms a layer hide fetches of 0.5 ms; those of 8 ms are all that is left to wait for."""
    layer = 2 * NUMEL
    plan = stack_plan(24, weights=Tier.CPU, states=Tier.CPU, windows=4)
    fast = machine(h2d=layer / 0.5e-3, d2h=layer / 0.1e-3, update_cpu=1e-15)
    assert simulate(plan, fast, schedule="overlapped").step_seconds == pytest.approx(24 * 3 * MS, rel=0.1)
    slow = machine(h2d=layer / 8e-3, d2h=layer / 0.1e-3, update_cpu=1e-15)
    timeline = simulate(plan, slow, schedule="overlapped")
    link = timeline.moved["cpu->gpu"] / layer * 8 * MS
    assert link <= timeline.step_seconds <= 1.1 * link
    assert max(timeline.stalls, key=lambda cause: timeline.stalls[cause]) in ("fetch from cpu", "update")


@pytest.mark.parametrize("adam_ms", [0.5, 2.0, 6.0])
def test_the_bounds_of_the_overlapped_optimizer(adam_ms: float) -> None:
    """W behind the next forward after clipping: T_b + max(T_f, W); inside backward too without: max(T_f + T_b, W)."""
    layers = 40
    figures = {"h2d": 1e18, "d2h": 1e18, "update_cpu": adam_ms * MS / NUMEL}
    forward, backward, work = layers * 1 * MS, layers * 2 * MS, layers * adam_ms * MS
    plan = stack_plan(layers, weights=Tier.CPU, states=Tier.CPU, windows=4)
    clipped = simulate(plan, machine(**figures), schedule="overlapped")
    bound = backward + max(forward, work)
    assert bound <= clipped.step_seconds * (1 + 1e-6) and clipped.step_seconds < 1.06 * bound
    bound = max(forward + backward, work)
    transient = stack_plan(layers, weights=Tier.CPU, states=Tier.CPU, windows=4, gradients="transient")
    for unclipped in (
        simulate(plan, machine(**figures), schedule="overlapped", clipping=False),
        simulate(transient, machine(**figures), schedule="overlapped"),
    ):
        assert bound <= unclipped.step_seconds * (1 + 1e-6) and unclipped.step_seconds < 1.06 * bound
    assert simulate(plan, machine(**figures)).step_seconds == close(forward + backward + work)


def test_backward_waits_where_gradients_do_not_leave_fast_enough() -> None:
    """Landing takes 4 ms a layer, computing 2 ms: all but the last two landings are waited for in backward."""
    layers = 20
    plan = stack_plan(layers, weights=Tier.GPU, states=Tier.CPU, gradients="retain")
    timeline = simulate(plan, machine(update_cpu=1e-15, h2d=1e18), schedule="overlapped", clipping=False)
    backward = [span for span in timeline.spans if span.name.startswith("backward")]
    assert backward[-1].stop - backward[0].start == pytest.approx((layers - 2) * 4 * MS + 2 * 2 * MS, rel=0.05)
    assert timeline.stalls["gradient landing"] > (layers - 3) * 2 * MS


def test_forward_waits_where_activations_do_not_leave_fast_enough() -> None:
    layers = 20
    moments = stack_trace(layers).moments
    moments = (
        *(replace(m, saved_bytes=2 * NUMEL) for m in moments[:layers]),
        *(replace(m, restored_bytes=2 * NUMEL) for m in moments[layers:]),
    )
    trace = replace(stack_trace(layers), moments=moments)
    plan = stack_plan(layers, weights=Tier.GPU, states=Tier.GPU, trace=trace, offload_activations="cpu")
    free = {Tier.GPU: plan.bytes_per_tier[Tier.GPU] + 2 * 2 * NUMEL}  # of two layers
    plan = replace(plan, problem=replace(plan.problem, budgets={**plan.problem.budgets, **free}))
    timeline = simulate(plan, machine(), schedule="overlapped")
    forward = [span for span in timeline.spans if span.name.startswith("forward")]
    assert forward[-1].stop - forward[0].start == pytest.approx((layers - 2) * 4 * MS + 2 * MS, rel=0.05)
    # Backward's 2 ms hide what comes back in 2 ms; the last two have not left when they are asked for.
    assert timeline.stalls["activation"] == pytest.approx((layers - 2) * 3 * MS, rel=0.1)
    restored = [span for span in timeline.spans if span.name == "restore activations" and span.num_bytes]
    assert len(restored) == layers - 2


def test_updates_wait_for_the_last_micro_batch_without_clipping_too() -> None:
    plan = stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU, gradients="accumulate", accumulate=3)
    timeline = simulate(plan, machine(update_cpu=0.1e-3 / NUMEL), schedule="overlapped", clipping=False)
    updates = [span for span in timeline.spans if span.name.startswith("update chunk")]
    backward = [span for span in timeline.spans if span.name.startswith("backward")]
    assert len(updates) == LAYERS
    assert min(span.start for span in updates) > backward[-LAYERS].start


def test_overlapped_nvme_updates_go_at_the_speed_of_the_slowest_stage() -> None:
    """Read 120 ms, Adam 10 ms and write 240 ms a chunk: W is the writes, and the pipeline's filling."""
    layers = 30
    plan = stack_plan(layers, weights=Tier.CPU, states=Tier.NVME, compute=Tier.CPU, windows=4)
    timeline = simulate(plan, machine(), schedule="overlapped", clipping=True)
    # residual and moments: 10 bytes read (and 2 of the gradient), 10 written; landing writes 2 in backward
    writes = layers * 200 * MS
    backward = layers * 40 * MS  # landing, which 20 ms of computing do not hide
    assert timeline.step_seconds == pytest.approx(backward + writes, rel=0.05)


def test_updates_come_in_the_order_of_their_next_use() -> None:
    plan = stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU)
    for schedule in ("overlapped", "serial"):
        timeline = simulate(plan, machine(), schedule=schedule)
        updates = [s.chunk for s in timeline.spans if s.name.startswith("update chunk")]
        assert set(updates) == set(range(LAYERS))
        turn = updates.index(LAYERS - 1) + 1  # then come those of this step
        assert updates[:turn] == list(range(LAYERS - turn, LAYERS))
        assert updates[turn:] == list(range(len(updates) - turn))


def test_a_forward_waits_for_the_update_of_the_chunk_that_it_reads() -> None:
    timeline = simulate(stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU), machine(), schedule="overlapped")
    for index in range(2, LAYERS):  # those of the first two are over or under way when the step begins
        (update,) = [s for s in timeline.spans if s.name == f"update chunk {index}"]
        fetch = min(s.start for s in timeline.spans if s.name == f"fetch chunk {index}")
        (forward,) = [s for s in timeline.spans if s.name == f"forward layers.{index}"]
        assert update.stop <= fetch < forward.start


def test_adam_and_copies_share_host_memory() -> None:
    """Adam, at work all the time, alone wants all of host memory: every byte that crosses is one that it waits for."""
    plan = stack_plan(40, weights=Tier.CPU, states=Tier.CPU, windows=4, gradients="transient")
    crossing = sum(plan.traffic.values())
    for share in (1.0, 0.5):  # of Adam's own speed that host memory gives
        hardware = machine(dram_bandwidth=share * 26 * NUMEL / 10e-3, update_cpu=10e-3 / NUMEL / share)
        step = simulate(plan, hardware, schedule="overlapped").step_seconds
        assert step == pytest.approx((40 * 26 * NUMEL + crossing) / hardware.figures["dram_bandwidth"].value, rel=0.03)


def test_computing_on_the_host_is_slowed_by_updates_beside_it() -> None:
    """Both want all threads: each layer's Adam of 10 ms costs computing of 1.5 s the 10 ms that it took."""
    plan = stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU, compute=Tier.CPU, gradients="transient")
    timeline = simulate(plan, machine(cpu_flops_bf16=2e9), schedule="overlapped")
    assert timeline.stalls[SHARING] == pytest.approx((LAYERS - 1) * 10 * MS, rel=0.01)
    assert timeline.step_seconds == close(LAYERS * 1510 * MS)
    assert SHARING not in simulate(plan, machine(cpu_flops_bf16=2e9)).stalls


# ---- figures and errors -----------------------------------------------------------------------------------------


def test_only_specified_figures_are_discounted() -> None:
    plan = stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU)
    specified = machine("a data sheet")
    efficiency = Efficiency(matrix=0.5, link=0.25)
    found = simulate(plan, specified, efficiency=efficiency)
    assert found.busy[Track.COMPUTE] == close(LAYERS * 3 * MS / 0.5)
    assert found.busy[Track.H2D] == close(FETCHES * 2 * MS / 0.25)
    assert simulate(plan, machine(), efficiency=efficiency).busy == simulate(plan, machine()).busy
    mixed = specified.with_figures("measured yesterday", h2d=machine().figures["h2d"].value)
    assert simulate(plan, mixed, efficiency=efficiency).busy[Track.H2D] == close(FETCHES * 2 * MS)


def test_a_specified_adam_is_no_faster_than_memory_and_a_measured_one_is_what_it_is() -> None:
    plan = stack_plan(LAYERS, weights=Tier.CPU, states=Tier.CPU)
    slow_memory = 26 * NUMEL / (2 * 10e-3)
    for source, milliseconds in (("measured", 10), ("a data sheet", 20)):
        hardware = machine().with_figures(source, update_cpu=10e-3 / NUMEL)
        hardware = hardware.with_figures("measured", dram_bandwidth=slow_memory)
        assert simulate(plan, hardware).stalls["update"] == close(LAYERS * milliseconds * MS)


def test_measured_computing_on_the_host_shares_its_memory() -> None:
    """Computing that reads as much as memory gives is slowed by what is written to the drives meanwhile."""
    trace = stack_trace(LAYERS, touched_bytes=10**9)
    trace = with_seconds(trace, [1.0] * 2 * LAYERS)
    plan = stack_plan(LAYERS, weights=Tier.NVME, states=Tier.CPU, compute=Tier.CPU, trace=trace, gradients="transient")
    timeline = simulate(plan, machine(dram_bandwidth=10**9, nvme_read=2e8, update_cpu=1e-15), schedule="overlapped")
    # Speeds of 1 / 1.2 while a chunk is fetched: every fetch that is hidden costs a fifth of its own time or more.
    assert timeline.stalls[SHARING] > 0.1 * FETCHES * 2 * NUMEL / 2e8


def test_a_missing_figure_is_named_with_what_needs_it() -> None:
    plan = stack_plan(LAYERS, weights=Tier.NVME, states=Tier.CPU)
    for figure in ("gpu_flops_bf16", "h2d", "d2h", "nvme_read", "dram_bandwidth", "update_cpu"):
        hardware = machine()
        hardware = gemini.Hardware(hardware.name, {k: f for k, f in hardware.figures.items() if k != figure})
        with pytest.raises(MissingFigure, match=f"has no figure '{figure}' .* needs"):
            simulate(plan, hardware)
    without = gemini.Hardware("round", {k: f for k, f in machine().figures.items() if k not in ("interconnect",)})
    simulate(plan, without)
    with pytest.raises(MissingFigure, match="interconnect"):
        simulate(stack_plan(LAYERS, weights=Tier.NVME, states=Tier.CPU, ranks=2), without)


def test_what_cannot_be_played_is_refused() -> None:
    plan = stack_plan(LAYERS, weights=Tier.NVME, states=Tier.CPU)
    figures = machine().figures
    diskless = gemini.Hardware("laptop", {k: f for k, f in figures.items() if not k.startswith("nvme")})
    with pytest.raises(PlanMismatch, match="12 MiB of nvme, and hardware 'laptop' has none"):
        simulate(plan, diskless)
    with pytest.raises(PlanMismatch, match="of gpu, and hardware 'laptop' has none"):
        simulate(plan, gemini.Hardware("laptop", {k: f for k, f in figures.items() if not k.startswith("gpu")}))
    with pytest.raises(PlanMismatch, match=r"has 1 MiB: make a plan"):
        simulate(plan, machine(cpu_bytes=2**20))
    plan_of_four = stack_plan(LAYERS, weights=Tier.NVME, states=Tier.CPU, ranks=4)
    with pytest.raises(PlanMismatch, match="of cpu on one machine"):  # as much as there is, and of that a part per rank
        simulate(plan_of_four, machine(cpu_bytes=1.5 * plan_of_four.bytes_per_tier[Tier.CPU]))
    empty = replace(plan, trace=replace(plan.trace, moments=()), moves=())
    with pytest.raises(PlanMismatch, match="not how much work it is"):
        simulate(empty, machine())
    idle = replace(plan, trace=stack_trace(LAYERS, forward_flops=0, backward_flops=0))
    with pytest.raises(PlanMismatch, match="not how much work"):
        simulate(idle, machine())
    with pytest.raises(ValueError, match="schedule='parallel'"):
        simulate(plan, machine(), schedule="parallel")
    for threads in (0, -1):
        with pytest.raises(ValueError, match=f"update_threads={threads}: it is at least 1"):
            simulate(plan, machine(), update_threads=threads)
    for share in (0, -1, 2, float("nan")):
        with pytest.raises(ValueError, match=f"matrix={share}"):
            Efficiency(matrix=share)
    with pytest.raises(ValueError, match="keeps none"):
        simulate(stack_plan(2, weights=Tier.CPU, states=Tier.CPU, gradients="transient"), machine(), clipping=True)


def test_a_prediction_is_a_value() -> None:
    plan = stack_plan(LAYERS, weights=Tier.NVME, states=Tier.CPU)
    for schedule in ("serial", "overlapped"):
        timeline = gemini.simulate(plan, machine(), schedule=schedule)
        assert Timeline.from_json(timeline.to_json()) == timeline
        assert timeline.to_json() == gemini.simulate(plan, machine(), schedule=schedule).to_json()
        assert timeline.moments[0] == "forward layers.0" and len(timeline.moments) == 2 * LAYERS
