"""The recorder with a clock of whole seconds: what interrupts what, whose time it is, and what is held when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch

from benchmarks._progress import PATIENCE
from gemini import waiting
from gemini.errors import GeminiError
from gemini.ledger import Ledger
from gemini.memory.devices.device import CpuDevice, Event
from gemini.memory.movement.mover import Mover
from gemini.memory.watching import Activity, RecordedEvent, RecordedStep, Recorder, Watch
from gemini.planning.timeline import Span, Timeline, Track
from gemini.tiers import Tier


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def recorder_by(clock: Callable[[], float], device: Any = None) -> Recorder:
    recorder = Recorder(device)
    recorder.clock = clock
    return recorder


def recorded(seconds: float = 100.0) -> tuple[Recorder, Clock]:
    clock = Clock()
    return recorder_by(clock), clock


def watch_by(clock: Clock) -> Watch:
    watch = Watch()
    watch.clock = clock
    return watch


def value(step: RecordedStep) -> Timeline:
    return step.timeline(title="", tokens=0, flops=0, budgets={Tier.CPU: 100})


def timeline_of(recorder: Recorder) -> Timeline:
    return value(recorder.end_step())


def spans(timeline: Timeline) -> list[tuple[str, str, float, float]]:
    return [(s.track.value, s.name, s.start, s.stop) for s in timeline.spans]


class Worker:
    """A thread beside the training, which does as it is told, at once."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._open = ExitStack()

    def does(self, what: Callable[[], object]) -> None:
        self._pool.submit(what).result(PATIENCE)

    def enters(self, activity: Callable[[], AbstractContextManager[None]]) -> None:
        self.does(lambda: self._open.enter_context(activity()))

    def leaves(self) -> None:
        self.does(self._open.close)


def test_a_move_inside_a_module_splits_its_computing_and_is_a_stall() -> None:
    recorder, clock = recorded()
    recorder.begin_step({})
    recorder.computing("forward a")
    clock.now += 1
    with Activity(recorder, None, "fetch chunk 7", "fetch from nvme", 7):
        clock.now += 2  # asking for room keeps no track busy, and computing waits
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
    assert timeline.moved == {"nvme->cpu": 4096}
    assert timeline.stalls == {"fetch from nvme": 9} and timeline.busy == {Track.COMPUTE: 6, Track.NVME_READ: 3}
    assert timeline.step_seconds == 15


def test_a_track_that_is_interrupted_by_another_counts_its_bytes_once() -> None:
    recorder, clock = recorded()
    recorder.begin_step({})
    with recorder.span(Track.REDUCE, "reduce chunk 1", 1, num_bytes=10):
        clock.now += 1
        with recorder.span(Track.NVME_WRITE, num_bytes=20):
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
    with recorder.span(Track.UPDATE):  # before the step
        clock.now += 1
        recorder.begin_step({})
        clock.now += 2
    recorder.computing("forward a")
    clock.now += 3
    recorder.computing(None)
    clock.now += 4
    timeline = timeline_of(recorder)
    assert spans(timeline) == [("update", "update", 0, 2), ("compute", "forward a", 2, 5)]
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
    ledger.release(Tier.NVME, 5, "activations")
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

    class Slow:
        def synchronize(self) -> None:
            clock.now += 1

    recorder = recorder_by(clock, Slow())
    recorder.begin_step({})
    recorder.computing("forward a")
    recorder.computing("forward b")
    assert spans(timeline_of(recorder)) == [("compute", "forward a", 1, 2), ("compute", "forward b", 2, 3)]


# ---- beside the training thread --------------------------------------------------------------------------------------


def test_what_other_threads_do_is_beside_computing_and_stalls_nobody() -> None:
    recorder, clock = recorded()
    adam, ahead = Worker(), Worker()
    recorder.begin_step({})
    recorder.computing("forward a")
    clock.now += 1
    ahead.enters(lambda: Activity(recorder, None, "fetch chunk 2", "fetch from nvme", 2))
    ahead.enters(lambda: recorder.move(Tier.NVME, Tier.CPU, 64))
    clock.now += 1
    adam.enters(lambda: Activity(recorder, None, "update chunk 1", "update", 1))
    adam.enters(lambda: recorder.span(Track.UPDATE))
    clock.now += 2
    ahead.leaves()
    recorder.computing("forward b")
    clock.now += 1
    adam.leaves()
    with Activity(recorder, None, "wait for the update of chunk 3", "update", 3):
        clock.now += 4
    timeline = timeline_of(recorder)
    assert spans(timeline) == [
        ("compute", "forward a", 0, 4), ("nvme read", "fetch chunk 2", 1, 4), ("update", "update chunk 1", 2, 5),
        ("compute", "forward b", 4, 5),
    ]  # fmt: skip
    assert [(s.moment, s.chunk, s.num_bytes) for s in timeline.spans] == [(0, -1, 0), (0, 2, 64), (0, 1, 0), (1, -1, 0)]
    assert timeline.stalls == {"update": 4}, "only what the training thread waited for"
    assert timeline.busy == {Track.COMPUTE: 5, Track.NVME_READ: 3, Track.UPDATE: 3} and timeline.step_seconds == 9
    assert timeline.moved == {"nvme->cpu": 64} and timeline.moments == ("forward a", "forward b")


def test_each_thread_has_its_own_nesting() -> None:
    """An update that passes through a drive, while the training thread waits for something else."""
    recorder, clock = recorded()
    worker = Worker()
    recorder.begin_step({})
    with Activity(recorder, None, "fetch chunk 9", "fetch from cpu", 9):
        worker.enters(lambda: recorder.span(Track.UPDATE, "update chunk 1", 1))
        clock.now += 1
        write = Worker()
        worker.enters(lambda: recorder.move(Tier.CPU, Tier.NVME, 8))
        clock.now += 2
        write.enters(lambda: recorder.span(Track.NVME_WRITE, "write behind", 4, 16))
        clock.now += 3
        write.leaves()
    clock.now += 1
    worker.leaves()
    timeline = timeline_of(recorder)
    assert spans(timeline) == [
        ("update", "update chunk 1", 0, 1), ("nvme write", "update chunk 1", 1, 7),
        ("nvme write", "write behind", 3, 6),
    ]  # fmt: skip
    assert [s.num_bytes for s in timeline.spans] == [0, 8, 16] and timeline.moved == {"cpu->nvme": 24}
    assert timeline.stalls == {"fetch from cpu": 6}


def test_the_tail_of_the_last_updates_is_cut_where_the_next_step_begins() -> None:
    recorder, clock = recorded()
    worker = Worker()
    recorder.begin_step({})
    recorder.computing("forward a")
    clock.now += 1
    worker.enters(lambda: recorder.span(Track.UPDATE, "update chunk 1", 1, 5))
    clock.now += 1
    first = recorder.end_step()
    clock.now += 2
    assert value(first).step_seconds == 2, "as far as it is known"
    recorder.begin_step({})
    recorder.computing("forward a")
    assert value(first).step_seconds == 4 and spans(value(first))[1] == ("update", "update chunk 1", 1, 4)
    clock.now += 3
    worker.leaves()
    worker.enters(lambda: recorder.span(Track.UPDATE, "update chunk 2", 2))
    clock.now += 1
    second = recorder.end_step()
    clock.now += 2
    worker.leaves()
    clock.now += 7  # nobody's
    assert spans(value(first)) == [("compute", "forward a", 0, 2), ("update", "update chunk 1", 1, 4)]
    assert spans(value(second)) == [
        ("update", "update chunk 1", 0, 3), ("compute", "forward a", 0, 4), ("update", "update chunk 2", 3, 6),
    ]  # fmt: skip
    assert [s.moment for s in value(second).spans] == [-1, 0, 0], "a moment of the first step is none of the second"
    assert value(second).step_seconds == 6, "until the updates that were left in flight are over"
    recorder.close()
    worker.enters(lambda: recorder.span(Track.UPDATE, "too late"))
    clock.now += 1
    worker.leaves()
    assert len(value(second).spans) == 3


def test_transfers_that_are_added_may_overlap_and_reach_across_a_step() -> None:
    recorder, clock = recorded()
    recorder.add(Activity(recorder, Track.NVME_READ, "before any step", "", -1, 0), 95.0, 99.0)
    recorder.begin_step({})
    clock.now += 4
    first = recorder.end_step()
    recorder.begin_step({})
    clock.now += 6
    recorder.add(Activity(recorder, Track.NVME_READ, "fetch chunk 1", "", 1, 10), 98.0, 102.0)
    recorder.add(Activity(recorder, Track.NVME_READ, "fetch chunk 2", "", 2, 20), 101.0, 107.0)
    recorder.add(Activity(recorder, Track.NVME_READ, "fetch chunk 3", "", 3, 40), 105.0, 109.0)
    second = recorder.end_step()
    assert spans(value(first)) == [("nvme read", "fetch chunk 1", 0, 2), ("nvme read", "fetch chunk 2", 1, 4)]
    assert spans(value(second)) == [("nvme read", "fetch chunk 2", 0, 3), ("nvme read", "fetch chunk 3", 1, 5)]
    assert (value(first).moved, value(second).moved) == ({"nvme->cpu": 30}, {"nvme->cpu": 40}), "where they started"
    assert value(second).busy == {Track.NVME_READ: 5} and not value(second).stalls


def test_bytes_that_other_threads_take_are_seen_between_steps_too() -> None:
    recorder, clock = recorded()
    worker = Worker()
    ledger = Ledger({Tier.CPU: 100})
    ledger.reserve(Tier.CPU, 3, "staging")
    ledger.on_change = recorder.held
    stale = {Tier.CPU: ledger.holders(Tier.CPU)}
    worker.does(lambda: ledger.reserve(Tier.CPU, 7, "staging"))  # between asking the ledger and the step
    recorder.begin_step(stale)
    clock.now += 1
    first = recorder.end_step()
    clock.now += 1
    worker.does(lambda: ledger.release(Tier.CPU, 10, "staging"))
    assert value(first).samples[-1].seconds == value(first).step_seconds == 1, "no sample is later than the step"
    ledger.reserve(Tier.CPU, 7, "windows")  # nothing of the step
    clock.now += 1
    recorder.begin_step(stale)
    assert [(s.seconds, dict(s.held[Tier.CPU])) for s in value(first).samples] == [(0, {"staging": 10}), (2, {})]
    assert value(recorder.end_step()).samples[0].held == {Tier.CPU: {"windows": 7}}


def test_many_threads_at_once_lose_nothing() -> None:
    recorder = Recorder()
    recorder.begin_step({})
    start = threading.Barrier(5)

    def work(number: int) -> None:
        start.wait(PATIENCE)
        for turn in range(200):
            with Activity(recorder, None, f"update chunk {number}", "update", number):
                with recorder.move(Tier.NVME, Tier.CPU, 1), recorder.span(Track.UPDATE):
                    pass
                recorder.held(Tier.CPU, {"staging": turn})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    start.wait(PATIENCE)
    for turn in range(200):
        recorder.computing(f"forward {turn}")
    for thread in threads:
        thread.join(PATIENCE)
    timeline = timeline_of(recorder)
    assert timeline.moved == {"nvme->cpu": 800} and not timeline.stalls and len(timeline.samples) == 801
    for number in range(4):
        mine = [s for s in timeline.spans if s.chunk == number]
        assert all(a.stop <= b.start for a, b in zip(mine, mine[1:], strict=False))
        assert sum(s.track is Track.UPDATE for s in mine) == 200
    assert [s.start for s in timeline.spans] == sorted(s.start for s in timeline.spans)


def test_a_copy_is_recorded_from_when_the_device_comes_to_it_until_the_device_is_done() -> None:
    """What was computed before takes 5 s, and the copy 2; who waits for the copy does so at the end of the step."""
    clock, copied = Clock(), Event()

    class Gpu(CpuDevice):
        computes, copies = 0.0, False

        def synchronize(self) -> None:
            clock.now += self.computes
            self.computes = 0.0
            if self.copies:
                clock.now += 2.0
                copied.finish()
                self.copies = False

    def begin() -> Event:
        gpu.copies = True
        return copied

    recorder = recorder_by(clock, gpu := Gpu())
    recorder.begin_step({})
    gpu.computes = 5.0
    event = recorder.fly(begin, Activity(recorder, Track.D2H, "land", "", 1, 8))
    recorder.computing("next")
    clock.now += 30.0
    event.wait()
    told = spans(timeline_of(recorder))
    assert told == [("gpu to host", "land", 5.0, 7.0), ("compute", "next", 7.0, 37.0)]


def test_what_a_worker_begins_while_the_ends_of_others_are_noted_is_not_lost() -> None:
    recorder, late = recorder_by(Clock(), CpuDevice()), Event()
    activity = Activity(recorder, Track.D2H, "land", "", 1, 8)

    class Flying(list[RecordedEvent]):
        """Of which somebody has just seen all when a worker adds to it."""

        def __iter__(self) -> Iterator[RecordedEvent]:
            yield from super().__iter__()
            if len(self) == 1:
                with ThreadPoolExecutor(1) as worker:
                    worker.submit(recorder.fly, lambda: late, activity).result()

    recorder.begin_step({})
    recorder._flying = Flying()
    over = Event()
    over.finish()
    recorder.fly(lambda: over, activity)
    recorder.computing(None)
    assert [event.is_complete() for event in list(recorder._flying)] == [False]
    late.finish()


@pytest.mark.parametrize("behind", [False, True])
def test_an_activity_that_an_interrupt_keeps_from_beginning_is_not_under_way(behind: bool) -> None:
    """Whether it comes before it was noted or behind: those around it end as ever, and computing is computing again."""
    recorder, clock = recorded()
    begin, told = recorder._begin, list[str]()

    def interrupted(activity: Activity) -> None:
        if behind:
            begin(activity)
        raise KeyboardInterrupt

    class Listener(AbstractContextManager[None]):
        def __exit__(self, *exc: Any) -> None:
            told.append("ended")

    with Activity(recorder, None, "fetch chunk 1", "fetch from cpu", 1):
        recorder._begin = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            Activity(recorder, Track.UPDATE, "update chunk 2", "", 2, around=Listener()).__enter__()
        recorder._begin = begin  # type: ignore[method-assign]
        assert [activity.name for activity in recorder._training.stack] == ["fetch chunk 1"] and told == ["ended"]
    assert not recorder._training.stack
    clock.now += 1.0


# ---- events that report their end ------------------------------------------------------------------------------------

# Transfers that run by themselves are recorded once, when their end is noticed, however they end.


def recorded_event(event: Event, told: list[str], monkeypatch: pytest.MonkeyPatch) -> RecordedEvent:
    recorder = Recorder()
    monkeypatch.setattr(recorder, "add", lambda activity, start, stop: told.append(activity.name))
    return RecordedEvent(event, Activity(recorder, Track.NVME_READ, "over", "", 1, 8), 0.0)


def test_an_end_is_told_when_it_is_seen_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    event, told = Event(), list[str]()
    recorded = recorded_event(event, told, monkeypatch)
    assert not recorded.is_complete() and not told
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.001)
    with pytest.raises(GeminiError, match="nothing has moved"), pytest.warns(UserWarning, match="nothing has moved"):
        recorded.wait()
    assert not told, "it is still under way"
    event.finish()
    assert not told, "nobody has looked"
    assert recorded.is_complete() and told == ["over"]
    recorded.wait()
    recorded.wait_on_device()
    assert told == ["over"]


def test_a_failure_is_told_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    event, told = Event(), list[str]()
    recorded = recorded_event(event, told, monkeypatch)
    event.finish(OSError("the disk is gone"))
    with pytest.raises(GeminiError, match="the disk is gone"):
        recorded.wait()
    assert told == ["over"]


def test_what_is_under_way_is_counted_and_recorded_where_somebody_does() -> None:
    now = [10.0]
    mover = Mover(CpuDevice(), 1024, Ledger({Tier.CPU: 2**20}))
    first, second = Event(), Event()
    assert mover.under_way(Tier.NVME, Tier.CPU, 8, lambda: first, "update chunk 1", 1) is first, "nobody records"
    recorder = mover.watch.recorder = recorder_by(lambda: now[0])
    recorder.begin_step({})
    found = mover.under_way(Tier.NVME, Tier.CPU, 16, lambda: second, "update chunk 2", 2)
    assert mover.under_way(Tier.CPU, Tier.CPU, 4, lambda: first, "", 3) is first, "no track is busy"
    now[0] = 13.0
    second.finish()
    found.wait()
    step = recorder.end_step()
    assert step.spans == [Span(Track.NVME_READ, 0.0, 3.0, "update chunk 2", -1, 2, 16)] and not step.stalls
    assert mover.watch.moved.counts() == {"nvme->cpu": 24}


# ---- stalls ----------------------------------------------------------------------------------------------------------

# What the training thread waited for, with a clock of whole seconds; and what it costs to know.


def on_a_thread(work: object) -> None:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    thread.join(PATIENCE)


def test_waits_add_up_by_cause_and_the_longest_comes_first() -> None:
    clock = Clock()
    watch = watch_by(clock)
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
    watch = watch_by(clock)
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
    watch = watch_by(clock)

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
    watch = watch_by(clock)

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
    watch = watch_by(clock)
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
    watch = watch_by(clock)
    watch.about("update", "").__enter__()  # an interrupt came before the block did
    watch.end_step()
    with watch.about("update", ""):
        clock.now += 1
    watch.end_step()
    assert watch.stalls == {"update": 1}
