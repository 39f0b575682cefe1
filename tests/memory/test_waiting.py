"""Latches, and waits that end when nothing goes on."""

from __future__ import annotations

import threading
import time

import pytest

from gemini import waiting
from gemini.errors import GeminiError
from gemini.memory.movement.transfers import Job, Worker
from gemini.train.step import Occupancy
from gemini.waiting import PROGRESS, Latch, await_latch, is_running


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.005)
    monkeypatch.setattr(waiting, "TELL_LOOKS", 4)
    monkeypatch.setattr(waiting, "GIVE_UP_LOOKS", 12)


def test_a_latch_wakes_all_who_wait() -> None:
    latch, woken = Latch(), []
    threads = [threading.Thread(target=lambda: woken.append(latch.wait())) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert not latch.is_set and not latch.wait(0.01)
    latch.set()
    latch.set()
    for thread in threads:
        thread.join(10)
    assert woken == [True] * 5 and latch.is_set and latch.wait(0)
    assert not latch._waiters, "who has waited in vain is not remembered"


def test_who_was_not_woken_looks() -> None:
    """An interrupt in ``set`` may come before anybody is woken."""
    latch = Latch()
    thread = threading.Thread(target=latch.wait)
    thread.start()
    latch.is_set = True
    thread.join(10)
    assert not thread.is_alive()


def test_a_wait_in_which_nothing_moves_says_so_and_ends() -> None:
    worker, begun, release = Worker("stuck"), threading.Event(), threading.Event()

    def stand_still() -> None:
        begun.set()
        release.wait(30)

    job = worker.submit(stand_still)
    assert begun.wait(10)
    try:
        with (
            pytest.warns(UserWarning, match="nothing has moved .* while waiting for a job of gemini-stuck"),
            pytest.raises(GeminiError, match="a job of gemini-stuck.*gemini-stuck is in .*_work, line"),
        ):
            job.wait()
    finally:
        release.set()
        worker.close()
    job.wait()


def test_a_wait_goes_on_while_anything_moves() -> None:
    latch, num_noted = Latch(), 0

    def move() -> None:
        nonlocal num_noted
        while num_noted < 60:
            time.sleep(0.002)
            PROGRESS.count += 1
            num_noted += 1
        latch.set()

    looks: list[None] = []
    threading.Thread(target=move).start()
    await_latch(latch, lambda: "it", lambda: looks.append(None))
    assert num_noted == 60 and looks


def test_a_wait_does_not_end_while_another_thread_waits_for_other_ranks() -> None:
    latch = Latch()

    def wait_elsewhere() -> None:
        with PROGRESS.elsewhere():
            time.sleep(0.3)
        latch.set()

    threading.Thread(target=wait_elsewhere).start()
    await_latch(latch, lambda: "it")
    assert not PROGRESS.is_elsewhere


def test_a_job_that_no_thread_got_is_named() -> None:
    with pytest.warns(UserWarning), pytest.raises(GeminiError, match="a job of a thread that never got it"):
        Job(0).wait()


def test_an_interrupt_in_a_look_at_a_thread_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python marks a thread as ended whose ``is_alive`` a Ctrl-C has broken off; nobody of ours goes by that."""
    go, found = threading.Event(), list[bool]()
    thread = threading.Thread(target=lambda: found.append(go.wait(30)))
    assert not is_running(thread), "not begun"
    thread.start()
    occupancy = Occupancy()
    monkeypatch.setattr(threading.Thread, "is_alive", lambda self: False)
    assert is_running(thread) and is_running(threading.main_thread())
    occupancy.begin_alone()
    assert occupancy.is_own
    other = threading.Thread(target=lambda: found.append(occupancy.is_own))
    other.start()
    other.join()
    assert found == [False] and occupancy.is_own
    monkeypatch.undo()
    go.set()
    thread.join(30)
    assert not is_running(thread)
