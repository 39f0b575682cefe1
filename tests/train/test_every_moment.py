"""Ctrl-C at moments that are spread over all there are; ``tests.hunts.interrupt_hunt`` takes every one."""

from __future__ import annotations

import dis
import threading
from pathlib import Path

import pytest

from tests.train.helpers import PLACEMENTS
from tests.train.interrupted import OPERATIONS, Drain, Trials, World
from tests.train.moments import Moment, held_locks, interrupt_at, moments_of


def try_moments(where: str, name: str, path: Path, number: int) -> None:
    operation = OPERATIONS[name]()
    trials = Trials(World(where, path, inside=operation.inside), operation)
    moments = trials.moments()
    for moment in moments[:: max(len(moments) // number, 1)]:
        trials.at(moment)
    assert trials.outcomes["error"] == 0
    assert trials.outcomes["before"] + trials.outcomes["after"] > number // 2


@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_leaves_no_lock_and_nothing_half_done(where: str, name: str, tmp_path: Path) -> None:
    try_moments(where, name, tmp_path, 25)


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_many_more_moments(where: str, name: str, tmp_path: Path) -> None:
    try_moments(where, name, tmp_path, 400)


def test_waiting_for_an_update_holds_no_lock_that_the_worker_needs(tmp_path: Path) -> None:
    """At every moment in which the training thread shares something with the update worker."""
    trials = Trials(World("ram", tmp_path), Drain())
    shared = ("worker.py", "waiting.py", "threading.py", "device.py")
    moments = [moment for moment in trials.moments() if moment.code.co_filename.endswith(shared)]
    assert len(moments) > 50, "it waits"
    for moment in moments:
        trials.at(moment)


# ---- the harness -----------------------------------------------------------------------------------------------------


def test_the_harness_finds_a_lock_that_is_left() -> None:
    """What Python's own Condition does: its lock is taken in a function whose end is a moment."""
    held = []

    def take() -> None:
        with condition:
            pass

    condition = threading.Condition()
    for moment in moments_of(take):
        condition = threading.Condition()
        with pytest.raises(KeyboardInterrupt):
            interrupt_at(moment, take)
            (lambda: None)()  # one that comes at the end is taken here
        held += held_locks([(str(moment), condition._lock)], 0.05)  # type: ignore[attr-defined]
    assert held and all("Condition.__enter__" in name for name in held)


def test_a_lock_of_python_itself_is_never_left() -> None:
    """What every lock of Gemini rests on: no signal is taken between ``with`` and its block, nor at its end."""
    lock = threading.Lock()

    def take() -> None:
        with lock:
            pass

    code = take.__code__
    offsets = [instruction.offset for instruction in dis.get_instructions(code)]
    assert len(offsets) > 10
    for offset in offsets:
        try:
            interrupt_at(Moment(code, offset, 1), take)
            (lambda: None)()
        except KeyboardInterrupt:
            pass
        assert not lock.locked(), offset
