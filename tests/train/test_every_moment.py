"""Ctrl-C at moments that are spread over all there are; ``tests.hunts.interrupt_hunt`` takes every one."""

from __future__ import annotations

import dis
import gc
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini.interrupts import WHOLE
from tests.train.helpers import PLACEMENTS
from tests.train.interrupted import OPERATIONS, World, make_trials
from tests.train.moments import Moment, held_locks, interrupt_at, moments_of


def try_moments(where: str, name: str, path: Path, number: int) -> None:
    trials = make_trials(where, name, path)
    moments = trials.moments()
    for moment in moments[:: max(len(moments) // number, 1)]:
        trials.at(moment)
    assert trials.outcomes["error"] == 0
    assert trials.outcomes["before"] + trials.outcomes["after"] > number // 2


@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_leaves_no_lock_and_nothing_half_done(where: str, name: str, tmp_path: Path) -> None:
    try_moments(where, name, tmp_path, 15)


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_many_more_moments(where: str, name: str, tmp_path: Path) -> None:
    try_moments(where, name, tmp_path, 150)


def test_waiting_for_an_update_holds_no_lock_that_the_worker_needs(tmp_path: Path) -> None:
    """At every moment in which the training thread shares something with the update worker."""
    trials = make_trials("ram", "drain", tmp_path)
    shared = ("worker.py", "waiting.py", "threading.py", "device.py")
    moments = [moment for moment in trials.moments() if moment.code.co_filename.endswith(shared)]
    moments = [moment for moment in moments if moment.occurrence == 1]
    assert len(moments) > 50, "it waits"
    for moment in moments:
        trials.at(moment)


@pytest.mark.parametrize("where", PLACEMENTS)
def test_a_model_that_is_deleted_after_an_interrupt_leaves_other_models_alone(where: str, tmp_path: Path) -> None:
    """Its hooks for what autograd saves were open when the interrupt came, and no hook of its own has closed them."""

    def interrupt(module: nn.Module, given: Any) -> None:
        raise KeyboardInterrupt

    world = World(where, tmp_path, offloads=True)
    world.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        world.loss(world.model, 0)
    del world
    gc.collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    plain = nn.Linear(4, 4)
    plain(torch.ones(2, 4)).sum().backward()
    assert plain.weight.grad is not None


def test_whole_blocks_are_left_as_they_were() -> None:
    """Depth, handler and what is inside, at every moment of the blocks themselves."""
    lock, books = threading.Lock(), [0, 0]

    def change() -> None:
        with WHOLE:
            with WHOLE, lock:
                books[0] += 1
                _nothing()
                books[1] += 1

    def _nothing() -> None:
        pass

    handler, num_interrupted = signal.getsignal(signal.SIGINT), 0
    for moment in moments_of(change, silent=True, everywhere=True):
        try:
            interrupt_at(moment, change)
            _nothing()
        except KeyboardInterrupt:
            num_interrupted += 1
        assert books[0] == books[1] and not lock.locked(), moment
        assert (WHOLE._depth, WHOLE._before, WHOLE._noted) == (0, None, None), moment
        assert signal.getsignal(signal.SIGINT) is handler, moment
    assert num_interrupted > 100, "each of them takes effect, once"


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
