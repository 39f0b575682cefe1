"""What every kind of transfer promises: one list, and one way to begin, wait for, take back and end what moves."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator

import pytest
import torch

from benchmarks._progress import PATIENCE
from benchmarks._progress import run as watched_run
from gemini import kernels
from gemini.errors import GeminiError, StorageError
from gemini.ledger import Ledger
from gemini.memory.devices.device import CpuDevice, Event
from gemini.memory.movement.mover import Mover
from gemini.memory.movement.transfers import Errand, Held, JobThread, Lane, Transfer, Transfers, Worker
from gemini.tiers import Tier
from tests.invariants import check_transfers


class World:
    """Transfers of one lane, and a first one that holds the lane's thread up until it is let go."""

    def __init__(self, lane: Lane):
        self.lane, self.ledger = lane, Ledger({Tier.CPU: 2**20})
        self.mover = Mover(CpuDevice(), 1024, self.ledger)
        self.transfers = Transfers(self.mover, Lane)
        self.done = list[int]()
        self._entered, self._go = threading.Event(), threading.Event()

    def submit(self, number: int, deadline: float = 0.0, fail: Exception | None = None) -> Transfer:
        def run() -> None:
            self.done.append(number)
            if fail is not None:
                raise fail

        return self.transfers.begin(self.lane, run, deadline, key=number)

    def hold(self) -> None:
        def run() -> None:
            self._entered.set()
            assert self._go.wait(PATIENCE)

        self.transfers.begin(self.lane, run, -1.0, key="held")
        assert self._entered.wait(PATIENCE)

    def let_go(self) -> None:
        self._go.set()

    def wait(self, transfer: Transfer) -> Exception | None:
        return self.transfers.wait(transfer, "a test", "wait for a test")

    @property
    def open(self) -> list[object]:
        return list(self.transfers.open[self.lane])


@pytest.fixture(params=list(Lane), ids=lambda lane: lane.value)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.let_go()
    made.transfers.close()


def test_what_is_submitted_stands_in_the_list_until_it_has_ended(world: World) -> None:
    world.hold()
    first, second = world.submit(1), world.submit(2)
    assert world.open == ["held", 1, 2] and not first.is_over()
    world.let_go()
    assert world.wait(first) is None and world.wait(second) is None and world.done == [1, 2]
    assert world.open == ["held", 1, 2], "nobody has noted their ends"
    world.transfers.end(first)
    assert world.open == ["held", 2]
    world.transfers.drain(world.lane, "a test", "wait for a test")
    assert world.open == []
    check_transfers(world.transfers)


def test_the_first_deadline_goes_first_and_before_it_what_somebody_waits_for(world: World) -> None:
    world.hold()
    made = [world.submit(number, deadline) for number, deadline in enumerate([3, 1, 2])]
    world.transfers.thread(made[0].lane).hurry(made[0])
    world.let_go()
    assert all(world.wait(transfer) is None for transfer in made) and world.done == [0, 1, 2]


def test_what_nobody_wants_never_begins_or_is_waited_for(world: World) -> None:
    world.hold()
    first, second = world.submit(1), world.submit(2)
    world.transfers.take_back(second, "a test", "wait for a test")
    assert second.taken_back and second.is_over() and isinstance(second.outcome(), GeminiError)
    world.transfers.end(second)
    world.let_go()
    assert world.wait(first) is None
    world.transfers.take_back(first, "a test", "wait for a test")
    assert not first.taken_back and world.done == [1] and world.open == ["held", 1]


def test_what_went_wrong_is_told_once_and_the_rest_goes_on(world: World) -> None:
    error = StorageError("the disk is gone")
    world.submit(1, fail=error)
    last = world.submit(2)
    assert world.wait(last) is None
    with pytest.raises(StorageError) as caught:
        world.transfers.drain(world.lane, "a test", "wait for a test")
    assert caught.value is error and world.done == [1, 2] and world.open == []
    world.transfers.drain(world.lane, "a test", "wait for a test")


def test_it_is_over_with_its_copies_and_not_before(world: World) -> None:
    transfer, copies = Transfer(world.lane), Event()
    transfer.copies = copies
    world.transfers.add(transfer)
    assert transfer.is_complete() and not transfer.is_over() and world.open == [transfer]
    if world.lane is Lane.CHECKPOINT:  # goes on behind steps, and is checked between them
        check_transfers(world.transfers)
    else:
        with pytest.raises(AssertionError, match="on its way"):
            check_transfers(world.transfers)
    copies.finish(RuntimeError("a copy"))
    assert transfer.is_over() and isinstance(world.wait(transfer), GeminiError)


def test_closing_ends_what_waits_and_lets_end_what_runs(world: World) -> None:
    world.hold()
    waiting = world.submit(1)
    closing = threading.Thread(target=world.transfers.close)
    closing.start()
    assert isinstance(world.wait(waiting), GeminiError) and world.done == []
    world.let_go()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    before = world.open
    with pytest.raises(GeminiError, match="closed"):
        world.submit(2)
    assert world.open == before, "all or none"


def test_an_interrupt_while_it_is_queued_leaves_nothing_in_flight_that_is_not_known(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = JobThread.put

    def before(*args: object) -> None:
        raise KeyboardInterrupt

    def after(thread: JobThread, *jobs: Transfer) -> None:
        real(thread, *jobs)
        raise KeyboardInterrupt

    for put in (before, after):
        with monkeypatch.context() as patch:
            world.submit(0)
            patch.setattr(JobThread, "put", put)
            with pytest.raises(KeyboardInterrupt):
                world.submit(1)
        world.transfers.drain(world.lane, "a test", "wait for a test")
        assert world.open == []
    world.submit(2)
    world.transfers.drain(world.lane, "a test", "wait for a test")
    assert world.done[-1] == 2


def test_what_has_ended_keeps_nothing_of_what_it_moved(world: World) -> None:
    class Bytes:
        def move(self) -> None:
            pass

    moved = Bytes()
    alive, transfer = weakref.ref(moved), world.transfers.begin(world.lane, moved.move)
    assert world.wait(transfer) is None
    world.wait(world.submit(1))  # the thread has let go of the one before
    del moved
    gc.collect()
    assert alive() is None and transfer in world.transfers.open[world.lane]


def test_how_it_ended_keeps_nothing_of_what_the_caller_was_handling(world: World) -> None:
    """An interrupt: its frames hold the graph, which would live until the garbage collector runs."""
    world.hold()
    wanted, failing, copied = world.submit(1), world.submit(2, fail=StorageError("the drive failed")), world.submit(3)
    copied.copies = Event()
    copied.copies.finish(ValueError("no copy"))
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        world.transfers.take_back(wanted, "a test", "wait for a test")
        world.let_go()
        errors = [transfer.outcome() for transfer in (wanted, failing, copied)]
    for error in errors:
        assert isinstance(error, GeminiError) and error.__context__ in (None, error.__cause__)
        assert error.__traceback__ is None


def test_what_it_holds_is_given_back_when_it_is_over_or_taken_back(world: World) -> None:
    def begin(number: int) -> Transfer:
        held = Held(world.ledger, Tier.CPU, 100, "a test")
        world.ledger.reserve(Tier.CPU, 100, "a test")
        return world.transfers.begin(world.lane, lambda: None, key=number, held=held)

    def open_bytes() -> int:
        transfers = world.transfers.open[world.lane].values()
        return sum(transfer.held.num_bytes for transfer in transfers if transfer.held is not None)

    world.hold()
    made = [begin(number) for number in range(3)]
    assert world.ledger.held(Tier.CPU, "a test") == open_bytes() == 300
    world.transfers.take_back(made[1], "a test", "wait for a test")
    assert world.ledger.held(Tier.CPU, "a test") == open_bytes() == 200
    world.let_go()
    assert world.wait(made[0]) is None and world.wait(made[2]) is None
    assert world.ledger.held(Tier.CPU, "a test") == open_bytes() == 0


def test_a_wait_counts_as_a_stall_of_its_cause(world: World) -> None:
    world.hold()
    transfer = world.submit(1)
    threading.Timer(0.05, world.let_go).start()
    assert world.wait(transfer) is None
    world.mover.watch.end_step()
    assert world.mover.watch.stalls["a test"] > 0.01


# ---- the threads below -----------------------------------------------------------------------------------------------


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("test")
    yield made
    made.close()


def test_a_worker_may_be_closed_by_its_own_job(worker: Worker) -> None:
    worker.submit(worker.close).wait()


@pytest.mark.parametrize("flushes", [True, False])
def test_a_job_computes_as_the_thread_that_submitted_it(worker: Worker, flushes: bool) -> None:
    modes: list[int] = []
    try:
        torch.set_flush_denormal(flushes)
        expected = kernels.flush_mode()
        worker.submit(lambda: modes.append(kernels.flush_mode())).wait()
    finally:
        torch.set_flush_denormal(False)
    assert modes == [expected]


def test_a_forked_child_ends_whatever_locks_were_held(worker: Worker) -> None:
    worker.submit(lambda: None).wait()
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with worker._lock:
            held.set()
            assert free.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(PATIENCE)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        worker.close()
        os._exit(0)
    free.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0


def test_the_interpreter_ends_with_a_worker_at_work() -> None:
    """In the middle of native code, and with more that waits: nothing hangs, nothing is printed."""
    code = (
        "import torch\n"
        "from gemini.memory.movement.transfers import Worker\n"
        "worker = Worker('busy')\n"
        "x = torch.zeros(2**22)\n"
        "jobs = [worker.submit(lambda: [x.add_(1) for _ in range(20)]) for _ in range(1000)]\n"
    )
    run = watched_run([sys.executable, "-c", code])
    assert run.returncode == 0 and run.stderr == "", run.stderr


def test_the_end_of_the_interpreter_waits_for_checkpoints() -> None:
    code = (
        "import time\n"
        "from gemini.memory.movement.transfers import Errand\n"
        "errand = Errand('test')\n"
        "for number in range(3):\n"
        "    errand.submit(lambda: time.sleep(0.2) or print('written', flush=True))\n"
    )
    run = watched_run([sys.executable, "-c", code])
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert run.stdout.splitlines() == ["written"] * 3


def test_a_thread_that_ended_with_its_last_job_begins_anew_with_the_next() -> None:
    errand = Errand("test")
    for _ in range(3):
        job = errand.submit(lambda: None)
        job.wait()
        until = time.monotonic() + PATIENCE
        while errand.is_alive:
            assert time.monotonic() < until, "its thread has nothing left to do"
            time.sleep(0.001)
    errand.close()
    with pytest.raises(GeminiError, match="closed"):
        errand.submit(lambda: None)


def test_who_only_waits_is_not_kept_by_the_error() -> None:
    """An error keeps the frames that it went through, and they keep the model of whoever trains there."""
    worker = Worker("test")
    job = worker.submit(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    job.wait_until_over()
    assert isinstance(job.error, ZeroDivisionError) and _waiters(job.error) == 0
    with pytest.raises(ZeroDivisionError):
        job.wait()
    assert _waiters(job.error) == 1
    worker.close()


def _waiters(error: BaseException) -> int:
    frames = traceback.extract_tb(error.__traceback__)
    return sum(frame.name == "test_who_only_waits_is_not_kept_by_the_error" for frame in frames)


def test_memory_is_found_in_flight_or_in_the_ledger_at_every_moment() -> None:
    seen = list[bool]()
    transfer = Transfer(Lane.FETCH)

    class Watched(Ledger):
        def release(self, tier: Tier, num_bytes: int, holder: str) -> None:
            seen.append(transfer.held is not None and not transfer.is_complete())
            super().release(tier, num_bytes, holder)

    ledger = Watched({Tier.CPU: 100})
    ledger.reserve(Tier.CPU, 60, "test")
    transfer.held = Held(ledger, Tier.CPU, 60, "test")
    transfer.finish()
    transfer.finish(GeminiError("closed"))  # by the end of the model, beside its own thread
    assert seen == [True] and transfer.held is None and ledger.free(Tier.CPU) == 100


def test_what_no_thread_takes_gives_back_what_it_holds() -> None:
    ledger = Ledger({Tier.CPU: 100})
    transfers = Transfers(Mover(CpuDevice(), 16, ledger), [Lane.FETCH])
    transfers.thread(Lane.FETCH).close()
    ledger.reserve(Tier.CPU, 60, "test")
    with pytest.raises(GeminiError, match="closed"):
        transfers.begin(Lane.FETCH, lambda: None, held=Held(ledger, Tier.CPU, 60, "test"))
    assert ledger.free(Tier.CPU) == 100 - ledger.held(Tier.CPU, "staging") and not transfers.open[Lane.FETCH]
