"""What the training thread waited for, with a clock of whole seconds; and what it costs to know."""

from __future__ import annotations

import threading

import torch

from benchmarks._progress import PATIENCE
from gemini.memory.devices.device import CpuDevice
from gemini.memory.movement.mover import Mover
from gemini.memory.watching.recorder import Recorder
from gemini.memory.watching.watch import Watch
from gemini.planning.timeline import Track
from gemini.tiers import Ledger, Tier


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def on_a_thread(work: object) -> None:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    thread.join(PATIENCE)


def test_waits_add_up_by_cause_and_the_longest_comes_first() -> None:
    clock = Clock()
    watch = Watch(clock)
    assert watch.stalls == {}
    for seconds in (1, 2):
        with watch.about("fetch from nvme", ""):
            clock.now += seconds
        clock.now += 10
    with watch.about("update", ""):
        clock.now += 4
    watch.end_step()
    assert list(watch.stalls.items()) == [("update", 4), ("fetch from nvme", 3)]
    with watch.about("update", ""):
        clock.now += 5
    assert watch.stalls["update"] == 4, "until the step is over"
    watch.end_step()
    assert watch.stalls == {"update": 5}
    watch.end_step()
    assert watch.stalls == {}


def test_a_wait_inside_another_counts_to_the_outer_one() -> None:
    clock = Clock()
    watch = Watch(clock)
    with watch.about("other ranks", ""):
        clock.now += 1
        with watch.about("fetch from nvme", ""):
            clock.now += 2
            with watch.about("other ranks", ""):
                clock.now += 4
        clock.now += 8
    try:
        with watch.about("update", ""), watch.about("update", ""):
            clock.now += 1
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    watch.end_step()
    assert watch.stalls == {"other ranks": 15, "update": 1}


def test_other_threads_wait_for_nobody() -> None:
    clock = Clock()
    watch = Watch(clock)

    def work() -> None:
        with watch.about("update", ""):
            clock.now += 2

    on_a_thread(work)
    with watch.about("fetch from cpu", ""):
        clock.now += 1
        on_a_thread(work)
    watch.end_step()
    assert watch.stalls == {"fetch from cpu": 3}


def test_whoever_ends_steps_is_the_training_thread() -> None:
    clock = Clock()
    watch = Watch(clock)

    def train() -> None:
        for _ in range(2):
            with watch.about("update", ""):
                clock.now += 1
            watch.end_step()

    on_a_thread(train)
    assert watch.stalls == {"update": 1}
    with watch.about("update", ""):
        clock.now += 1
    watch.end_step()
    assert watch.stalls == {}, "it was another thread's step"


def test_backward_on_a_thread_of_autograd_waits_too() -> None:
    clock = Clock()
    watch = Watch(clock)
    x = torch.ones(1, requires_grad=True)
    y = x.clone()

    def wait(grad: torch.Tensor) -> None:
        with watch.about("gradient landing", ""):
            clock.now += 1

    y.register_hook(wait)
    on_a_thread(lambda: y.backward())
    watch.end_step()
    assert watch.stalls == {"gradient landing": 1}


def test_a_lost_end_of_a_wait_costs_one_step() -> None:
    clock = Clock()
    watch = Watch(clock)
    watch.about("update", "").__enter__()  # an interrupt came before the block did
    watch.end_step()
    with watch.about("update", ""):
        clock.now += 1
    watch.end_step()
    assert watch.stalls == {"update": 1}


def test_waits_are_known_whether_somebody_records_or_not() -> None:
    clock = Clock()
    watch = Watch(clock)
    mover = Mover(CpuDevice(), 1024, Ledger({Tier.CPU: 2**20}), watch=watch)
    for recorder in (None, Recorder(clock=clock)):
        watch.record(recorder)
        if recorder is not None:
            recorder.begin_step({})
        with mover.about("update", "wait for the update of chunk 3", 3):
            clock.now += 2
        with mover.about("all-gather", "all-gather chunk 1", 1, track=Track.GATHER):
            clock.now += 1
        watch.end_step()
        assert watch.stalls == {"update": 2, "all-gather": 1}
    assert recorder is not None
    timeline = recorder.end_step().timeline(title="", tokens=0, flops=0, budgets={})
    assert timeline.stalls == {"update": 2, "all-gather": 1} and timeline.busy == {Track.GATHER: 1}
    assert timeline.spans[0].name == "all-gather chunk 1"
