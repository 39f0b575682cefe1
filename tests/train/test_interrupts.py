"""Ctrl-C at chosen moments, with real signals: an update or a write is whole or has not begun."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini import kernels
from gemini.interrupts import WHOLE
from gemini.memory.movement.mover import Mover
from gemini.train.checkpoint import read as checkpoint_read
from gemini.train.params import by_name, exposure
from tests.train.helpers import (
    PLACEMENTS,
    Blocks,
    Plain,
    adam,
    assert_same_snapshot,
    assert_same_state,
    make_config,
    snapshot,
    squares,
    train,
    train_plain,
)
from tests.world import world_of


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
    assert torch.is_grad_enabled()


def ctrl_c() -> None:
    """To the main thread, as from a terminal: there it is handled before this returns, from elsewhere soon after."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def wait_for_ctrl_c(seconds: float = 5.0) -> None:
    """Until the one that another thread has sent takes effect here: nothing may be on its way when the test goes on."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.001)
    raise AssertionError("no Ctrl-C took effect")


def at_call(
    patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, *, once: bool = False, after: bool = False
) -> list[int]:
    """Ctrl-C before and after the ``number``-th call of a function, or only one of both; the list grows with calls.

    Threads may call at once: each call has a number of its own, so there is one signal and never two.
    """
    real, numbers, calls = getattr(owner, name), itertools.count(1), list[int]()

    def call(*args: Any, **kwargs: Any) -> Any:
        mine = next(numbers)
        calls.append(mine)
        if mine == number and not after:
            ctrl_c()
        result = real(*args, **kwargs)
        if mine == number and not once:
            ctrl_c()
        return result

    patch.setattr(owner, name, call)
    return calls


def wrap(where: str, path: Path, *, overlap: bool = False, **how: Any) -> Any:
    config = make_config(Blocks(), where, path, **how)
    return gemini.GeminiDDP(Blocks(), dataclasses.replace(config, overlap=overlap))


# ---- updates ---------------------------------------------------------------------------------------------------------

MOMENTS: dict[str, tuple[Any, str]] = {
    "kernel": (kernels, "update"), "store": (Mover, "begin_store"), "load": (Mover, "begin_load"),
}  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("where", "moment"), [("ram", "kernel"), *((where, moment) for where in PLACEMENTS[1:] for moment in MOMENTS)]
)
def test_an_update_is_whole_before_it_is_interrupted(
    where: str, moment: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the update too: then the signal may find the program anywhere, and costs nothing anyway."""
    model, plain = wrap(where, tmp_path, overlap=overlap), Plain(Blocks())
    optimizer = adam(model)
    for number in (1, 3):
        squares(model, number).backward()
        with monkeypatch.context() as patch:
            calls = at_call(patch, *MOMENTS[moment], number, once=overlap)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
                world_of(model).settle()
                wait_for_ctrl_c()
            world_of(model).settle()
            assert len(calls) >= number
        optimizer.zero_grad()
        train_plain(plain, [number], squares, clip=None)
        assert_same_state(model, plain)
    train(model, optimizer, [7], squares)
    train_plain(plain, [7], squares)
    assert_same_state(model, plain)


@pytest.mark.parametrize("gradients", ["retain", "transient"])
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_backward_that_updates_is_whole_before_it_is_interrupted(
    where: str, gradients: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first update on; before that it is forgotten, as every backward."""
    model, plain = wrap(where, tmp_path, gradients=gradients), Plain(Blocks())
    optimizer = adam(model, step_in_backward=True)
    for number in (1, 2):
        loss = squares(model, number)
        with monkeypatch.context() as patch:
            calls = at_call(patch, kernels, "update", number)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
            assert len(calls) > number, "the rest of the backward has been made"
        optimizer.step()
        train_plain(plain, [number], squares, clip=None)
        assert_same_state(model, plain)
    before = snapshot(model)
    loss = squares(model, 3)
    with monkeypatch.context() as patch:
        at_call(patch, world_of(model).backward, "take_grad", 1)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    optimizer.zero_grad()
    assert_same_snapshot(before, snapshot(model))
    train(model, optimizer, [3], squares, clip=None)
    train_plain(plain, [3], squares, clip=None)
    assert_same_state(model, plain)


@pytest.mark.parametrize("number", [1, 2])
def test_params_that_an_interrupt_left_ordinary_are_guarded_again(
    where: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came when a chunk's params had become ordinary, and nobody had noted it."""
    model, plain = wrap(where, tmp_path), Plain(Blocks())
    optimizer = adam(model)
    with monkeypatch.context() as patch:
        at_call(patch, exposure, "expose", number, after=True)
        with pytest.raises(KeyboardInterrupt):
            squares(model, 0).backward()
    optimizer.zero_grad()
    world_of(model).check()
    train(model, optimizer, [1], squares)
    train_plain(plain, [1], squares)
    assert_same_state(model, plain)


def test_an_error_in_a_backward_that_updates_does_not_keep_ctrl_c(tmp_path: Path) -> None:
    model = wrap("ram", tmp_path, gradients="transient")
    optimizer = adam(model, step_in_backward=True)

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("a hook of the user's")

    x = torch.randn(2, 5, 32).bfloat16().requires_grad_()
    x.register_hook(fail)
    with pytest.raises(RuntimeError, match="of the user's"):
        model(x).float().sum().backward()
    assert signal.getsignal(signal.SIGINT) is WHOLE._handler, "nobody could tell that the backward is over"
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
    del optimizer


def test_plain_params_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Blocks()
    optimizer = adam(model)
    model(torch.ones(2, 32)).sum().backward()
    at_call(monkeypatch, kernels, "update", 2)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert all(optimizer.state[param]["step"] == 1 for param in model.parameters())


def test_a_closure_is_interrupted_at_once(tmp_path: Path) -> None:
    model = wrap("disk", tmp_path)
    optimizer = adam(model)
    before = snapshot(model)

    def closure() -> torch.Tensor:
        loss = squares(model, 0)
        loss.backward()
        ctrl_c()
        raise AssertionError("it goes on")

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    optimizer.zero_grad()
    assert_same_snapshot(before, snapshot(model))


# ---- writes ----------------------------------------------------------------------------------------------------------


def new_values(model: Any) -> dict[str, torch.Tensor]:
    return {name: torch.full(p.shape, 1.0 + i / 7) for i, (name, p) in enumerate(model.named_parameters())}


def by_gathered(model: Any, values: dict[str, torch.Tensor]) -> None:
    with model.gathered(write=True), torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values[name])


def by_state_dict(model: Any, values: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(values)


WRITES = {"gathered": by_gathered, "load_state_dict": by_state_dict}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_write_is_whole(write: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slack = 2**16 if where == "disk" else 0  # to gather all of it
    model, quiet = (wrap(where, tmp_path, slack=slack) for _ in range(2))
    for one in (model, quiet):
        train(one, adam(one), [0], squares)
    WRITES[write](quiet, new_values(quiet))
    at_call(monkeypatch, by_name, "store_range", 3)
    with pytest.raises(KeyboardInterrupt):
        WRITES[write](model, new_values(model))
    assert_same_snapshot(snapshot(quiet), snapshot(model))
    world_of(model).check()


def test_a_loaded_optimizer_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = wrap("disk", tmp_path), wrap("disk", tmp_path)
    optimizer, theirs = adam(model), adam(other, lr=0.5)
    train(model, optimizer, [0], squares)
    train(other, theirs, [1, 2], squares)
    at_call(monkeypatch, by_name, "store_range", 3)
    with pytest.raises(KeyboardInterrupt):
        optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    for name, own in snapshot(other).items():
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(snapshot(model)[name][kind], own[kind])


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_loaded_checkpoint_is_whole(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first write, and at what comes back after the last one; before the first write it takes effect at once."""
    model, other = wrap(where, tmp_path), wrap(where, tmp_path)
    optimizer, theirs = adam(model), adam(other, lr=0.5)
    train(other, theirs, [1, 2], squares)
    gemini.save_checkpoint(tmp_path / "ckpt", other, theirs, extra="whole")
    for owner, name, whole in (
        (checkpoint_read, "compare_sums", False),
        (checkpoint_read.Reader, "_fill", True),
        (checkpoint_read, "load_plain_states", True),
    ):
        train(model, optimizer, [0], squares)
        before = snapshot(model)
        with monkeypatch.context() as patch:
            at_call(patch, owner, name, 1)
            with pytest.raises(KeyboardInterrupt):
                gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
        assert_same_snapshot(snapshot(other) if whole else before, snapshot(model))
        assert optimizer.param_groups[0]["lr"] == (0.5 if whole else 1e-2)
        world_of(model).state.check_whole()
