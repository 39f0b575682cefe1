"""Workers: jobs by urgency on a thread of their own, errors where somebody waits, and an end that never hangs."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
import weakref

import pytest
import torch

from benchmarks._progress import PATIENCE
from benchmarks._progress import run as watched_run
from gemini import kernels
from gemini.errors import GeminiError, StorageError
from gemini.memory.movement.worker import Worker


class Gate:
    """Holds a worker up, so that what is submitted meanwhile waits."""

    def __init__(self, worker: Worker):
        self.entered, self._open = threading.Event(), threading.Event()
        self.job = worker.submit(self._run, -1)
        assert self.entered.wait(PATIENCE)

    def _run(self) -> None:
        self.entered.set()
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()
        self.job.wait(PATIENCE)


@pytest.fixture
def worker():  # type: ignore[no-untyped-def]
    made = Worker("test")
    yield made
    made.close()


def test_the_most_urgent_goes_first_and_equals_in_order(worker: Worker) -> None:
    gate, done = Gate(worker), list[int]()
    jobs = [worker.submit(lambda n=n: done.append(n), urgency) for n, urgency in enumerate([3, 1, 2, 1])]
    gate.open()
    for job in jobs:
        job.wait(PATIENCE)
    assert done == [1, 3, 2, 0]


def test_what_somebody_waits_for_is_hurried_and_what_nobody_wants_taken_back(worker: Worker) -> None:
    gate, done = Gate(worker), list[int]()
    jobs = [worker.submit(lambda n=n: done.append(n), n) for n in range(4)]
    worker.hurry(jobs[3])
    assert worker.cancel(jobs[1]) and jobs[1].is_complete()
    gate.open()
    jobs[2].wait(PATIENCE)
    assert done == [3, 0, 2] and not worker.cancel(jobs[0])
    with pytest.raises(GeminiError, match="taken back"):
        jobs[1].wait()


def test_what_a_job_raises_is_raised_where_it_is_waited_for_and_the_worker_goes_on(worker: Worker) -> None:
    error = StorageError("the disk is gone")

    def fail() -> None:
        raise error

    job = worker.submit(fail)
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            job.wait(PATIENCE)
        assert caught.value is error
    worker.submit(lambda: None).wait(PATIENCE)


def test_closing_drops_what_waits_and_lets_end_what_runs(worker: Worker) -> None:
    gate = Gate(worker)
    waiting = worker.submit(lambda: None)
    closing = threading.Thread(target=worker.close)
    closing.start()
    with pytest.raises(GeminiError, match="deleted"):
        waiting.wait(PATIENCE)
    gate.open()
    closing.join(PATIENCE)
    assert not closing.is_alive() and not worker.is_alive
    with pytest.raises(GeminiError, match="closed"):
        worker.submit(lambda: None)


def test_a_worker_may_be_closed_by_its_own_job(worker: Worker) -> None:
    worker.submit(worker.close).wait(PATIENCE)


def test_an_idle_worker_keeps_nothing_alive(worker: Worker) -> None:
    class Thing:
        def work(self) -> None:
            pass

    thing = Thing()
    seen = weakref.ref(thing)
    worker.submit(thing.work).wait(PATIENCE)
    worker.submit(lambda: None).wait(PATIENCE)
    del thing
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("flushes", [True, False])
def test_a_job_computes_as_the_thread_that_submitted_it(worker: Worker, flushes: bool) -> None:
    modes: list[int] = []
    try:
        torch.set_flush_denormal(flushes)
        expected = kernels.flush_mode()
        worker.submit(lambda: modes.append(kernels.flush_mode())).wait(PATIENCE)
    finally:
        torch.set_flush_denormal(False)
    assert modes == [expected]


def test_a_forked_child_ends_whatever_locks_were_held(worker: Worker) -> None:
    worker.submit(lambda: None).wait(PATIENCE)
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
        "from gemini.memory.movement.worker import Worker\n"
        "worker = Worker('busy')\n"
        "x = torch.zeros(2**22)\n"
        "jobs = [worker.submit(lambda: [x.add_(1) for _ in range(20)]) for _ in range(1000)]\n"
    )
    run = watched_run([sys.executable, "-c", code])
    assert run.returncode == 0 and run.stderr == "", run.stderr


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
