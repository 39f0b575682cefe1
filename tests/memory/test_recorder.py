"""The recorder with a clock of whole seconds: what interrupts what, whose time it is, and what is held when."""

from __future__ import annotations

from gemini.memory.recorder import Recorder
from gemini.planning.timeline import Lane, Timeline
from gemini.tiers import Ledger, Tier


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def recorded(seconds: float = 100.0) -> tuple[Recorder, Clock]:
    clock = Clock()
    return Recorder(clock=clock), clock


def timeline_of(recorder: Recorder) -> Timeline:
    return recorder.end_step().timeline(title="", tokens=0, flops=0, moved={}, budgets={Tier.CPU: 100})


def spans(timeline: Timeline) -> list[tuple[str, str, float, float]]:
    return [(s.lane.value, s.name, s.start, s.stop) for s in timeline.spans]


def test_a_move_inside_a_module_splits_its_computing_and_is_a_stall() -> None:
    recorder, clock = recorded()
    recorder.begin_step({})
    recorder.computing("forward a")
    clock.now += 1
    with recorder.about("fetch from nvme", "fetch chunk 7", 7):
        clock.now += 2  # asking for room keeps no lane busy, and computing waits
        with recorder.move(Tier.NVME, Tier.CPU, 4096):
            clock.now += 3
        with recorder.move(Tier.CPU, Tier.CPU, 4096):
            clock.now += 4
    clock.now += 5
    timeline = timeline_of(recorder)
    assert spans(timeline) == [
        ("compute", "forward a", 0, 1), ("nvme read", "fetch chunk 7", 3, 6), ("compute", "forward a", 10, 15),
    ]  # fmt: skip
    assert [(s.moment, s.chunk, s.num_bytes) for s in timeline.spans] == [(0, -1, 0), (0, 7, 4096), (0, -1, 0)]
    assert timeline.stalls == {"fetch from nvme": 9} and timeline.busy == {Lane.COMPUTE: 6, Lane.NVME_READ: 3}
    assert timeline.step_seconds == 15


def test_a_lane_that_is_interrupted_by_another_counts_its_bytes_once() -> None:
    recorder, clock = recorded()
    recorder.begin_step({})
    with recorder.span(Lane.REDUCE, "reduce chunk 1", 1, num_bytes=10):
        clock.now += 1
        with recorder.span(Lane.NVME_WRITE, num_bytes=20):
            clock.now += 2
        clock.now += 3
    timeline = timeline_of(recorder)
    assert spans(timeline) == [
        ("reduce-scatter", "reduce chunk 1", 0, 1), ("nvme write", "reduce chunk 1", 1, 3),
        ("reduce-scatter", "reduce chunk 1", 3, 6),
    ]  # fmt: skip
    assert [s.num_bytes for s in timeline.spans] == [10, 20, 0] and {s.moment for s in timeline.spans} == {-1}


def test_time_outside_of_everything_is_nobodys() -> None:
    recorder, clock = recorded()
    with recorder.span(Lane.ADAM):  # before the step
        clock.now += 1
        recorder.begin_step({})
        clock.now += 2
    recorder.computing("forward a")
    clock.now += 3
    recorder.computing(None)
    clock.now += 4
    timeline = timeline_of(recorder)
    assert spans(timeline) == [("adam", "adam", 0, 2), ("compute", "forward a", 2, 5)]
    assert timeline.step_seconds == 9 and timeline.moments == ("forward a",)


def test_every_change_of_the_ledger_is_a_sample() -> None:
    recorder, clock = recorded()
    ledger = Ledger({Tier.CPU: 100, Tier.NVME: 50})
    ledger.reserve(Tier.CPU, 10, "weights")
    ledger.on_change = recorder.held
    recorder.begin_step({tier: ledger.holders(tier) for tier in ledger.tiers})
    recorder.computing("forward a")
    clock.now += 1
    ledger.reserve(Tier.CPU, 20, "windows")
    clock.now += 1
    ledger.pass_on(Tier.CPU, 20, "windows", "pool")
    with ledger.reserving(Tier.NVME, 5, "activations"):
        clock.now += 1
    timeline = timeline_of(recorder)
    assert [(s.seconds, {t.value: dict(h) for t, h in s.held.items()}) for s in timeline.samples] == [
        (0, {"cpu": {"weights": 10}, "nvme": {}}),
        (1, {"cpu": {"weights": 10, "windows": 20}, "nvme": {}}),
        (2, {"cpu": {"weights": 10, "pool": 20}, "nvme": {}}),
        (2, {"cpu": {"weights": 10, "pool": 20}, "nvme": {"activations": 5}}),
        (3, {"cpu": {"weights": 10, "pool": 20}, "nvme": {}}),
    ]
    assert timeline.peaks[Tier.CPU] == 30 == ledger.peak(Tier.CPU)


def test_the_device_is_waited_for_before_the_clock_is_read() -> None:
    clock = Clock()

    def finish() -> None:
        clock.now += 1

    recorder = Recorder(finish, clock)
    recorder.begin_step({})
    recorder.computing("forward a")
    recorder.computing("forward b")
    assert spans(timeline_of(recorder)) == [("compute", "forward a", 1, 2), ("compute", "forward b", 2, 3)]
