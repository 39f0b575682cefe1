"""Ctrl-C at chosen moments, with real signals: an update or a write is whole or has not begun."""

import dataclasses
import dis
import gc
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini import interrupts, kernels
from gemini.interrupts import WHOLE, call_with_grad, call_without_grad, without_grad
from gemini.rules import ADAM, Arrays, Segment
from gemini.train.checkpoint import states
from gemini.train.checkpoint.format import TensorFile
from gemini.train.checkpoint.read import Reader
from tests import kernel_settings
from tests.train.helpers import (
    PLACEMENTS,
    Blocks,
    adam,
    assert_same_snapshot,
    llama,
    make_config,
    on_batch,
    snapshot,
    squares,
    train,
)
from tests.train.interrupted import OPERATIONS, World, make_trials
from tests.train.moments import Moment, held_locks, interrupt_at, moments_of
from tests.train.test_wrappable import looks
from tests.world import is_managed, world_of


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


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_loaded_checkpoint_is_whole(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first write, and at what comes back after the last one; before the first write it takes effect at once."""
    model, other = wrap(where, tmp_path), wrap(where, tmp_path)
    optimizer, theirs = adam(model), adam(other, lr=0.5)
    train(other, theirs, [1, 2], squares)
    gemini.save_checkpoint(tmp_path / "ckpt", other, theirs, extra="whole")
    for owner, name, number, whole in (
        (TensorFile, "check", 1, False),
        (states, "set_rng_states", 1, False),  # tried, and put back
        (Reader, "_fill", 1, True),
        (states, "set_rng_states", 3, True),
    ):
        train(model, optimizer, [0], squares)
        before = snapshot(model)
        with monkeypatch.context() as patch:
            at_call(patch, owner, name, number)
            with pytest.raises(KeyboardInterrupt):
                gemini.load_checkpoint(tmp_path / "ckpt", model, optimizer)
        assert_same_snapshot(snapshot(other) if whole else before, snapshot(model))
        assert optimizer.param_groups[0]["lr"] == (0.5 if whole else 1e-2)
        world_of(model).state.check_whole()


# ---- moments that are spread over all there are ----------------------------------------------------------------------

# ``tests.hunts.interrupt_hunt`` takes every one.


@pytest.mark.parametrize("number", [15, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_leaves_no_lock_and_nothing_half_done(where: str, name: str, number: int, tmp_path: Path) -> None:
    """At so many moments."""
    trials = make_trials(where, name, tmp_path)
    moments = trials.moments()
    for moment in moments[:: max(len(moments) // number, 1)]:
        trials.at(moment)
    assert trials.outcomes["error"] == 0
    assert trials.outcomes["before"] + trials.outcomes["after"] > number // 2


@pytest.mark.parametrize("where", ["disk", "standin"])
def test_sums_of_a_stage_go_home_though_an_interrupt_comes(where: str, tmp_path: Path) -> None:
    """Else their bytes would be taken for good of the budget where modules compute."""
    trials = make_trials(where, "step by blocks", tmp_path)
    moments = [moment for moment in trials.moments() if "GradientHomes._send_home" in str(moment)]
    assert len(moments) > 20
    for moment in moments[::7]:
        trials.at(moment)


def test_waiting_for_an_update_holds_no_lock_that_the_worker_needs(tmp_path: Path) -> None:
    """At every moment in which the training thread shares something with the update worker."""
    trials = make_trials("ram", "drain", tmp_path)
    shared = ("worker.py", "transfers.py", "waiting.py", "threading.py", "device.py")
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


@pytest.mark.parametrize("every", [50, pytest.param(7, marks=pytest.mark.slow)])
def test_a_wrap_is_whole_or_leaves_the_model_as_it_was(every: int, tmp_path: Path) -> None:
    """With params that go home, tiles, buffers, casts and hooks."""
    config = dataclasses.replace(make_config(llama(), "ram", tmp_path), tile_tokens=16)

    def manage() -> None:
        gemini.GeminiDDP(model, config)

    model = llama()
    manage()  # what is done once in a process
    model = llama()
    outcomes = []
    for moment in moments_of(manage)[::every]:
        model = llama()
        before, values = looks(model), [param.detach().clone() for param in model.parameters()]
        try:
            interrupt_at(moment, manage)
        except KeyboardInterrupt:
            outcomes.append(is_managed(model))
        if is_managed(model):
            gemini.release(model)
            assert not any({"forward", "_gemini_engine"} & vars(m).keys() for m in model.modules()), moment
        else:
            assert looks(model) == before, moment
            assert all(map(torch.equal, model.parameters(), values)), moment
    assert len(outcomes) > 50 and False in outcomes


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


# ---- ``interrupts.WHOLE``: when Ctrl-C takes effect, and that autograd is never left off by it. With real signals ----


def test_it_takes_effect_where_the_outermost_block_ends() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        with WHOLE:
            with WHOLE:
                ctrl_c()
                ctrl_c()
                done.append("inner")
            done.append("outer")
        done.append("never")
    assert done == ["inner", "outer"]
    with WHOLE:
        pass  # nothing is left of it


def test_an_error_inside_is_told_with_it() -> None:
    with pytest.raises(ValueError, match="own"):
        with WHOLE:
            raise ValueError("its own")
    with pytest.raises(KeyboardInterrupt) as told:
        with WHOLE:
            ctrl_c()
            raise ValueError("its own")
    assert isinstance(told.value.__context__, ValueError)


def test_a_handler_of_the_programs_is_called_later_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def own(number: int, frame: Any) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGINT, own)
    try:
        with WHOLE:
            ctrl_c()
            assert calls == []
        assert calls == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is own
        with WHOLE:
            signal.signal(signal.SIGINT, before)  # installed meanwhile: it is not put back over that
        assert signal.getsignal(signal.SIGINT) is before
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with WHOLE:
            ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_it_is_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        with WHOLE:
            for now[0] in (10.0, 10.1, 14.9):
                ctrl_c()
                done.append("waits")
            now[0] = 15.1
            ctrl_c()
            done.append("never")
    assert done == ["waits"] * 3


def test_other_threads_are_left_alone(tmp_path: Path) -> None:
    found: list[Any] = []

    def run() -> None:
        model = wrap("ram", tmp_path)
        train(model, adam(model), [0, 1], squares)
        with WHOLE:
            WHOLE.hold(lambda: True)
            found.append(signal.getsignal(signal.SIGINT))
            WHOLE.let_go()
        found.append(WHOLE._depth)

    with WHOLE:
        here = signal.getsignal(signal.SIGINT)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert found == [here, 1]


def test_held_over_calls() -> None:
    going_on = True
    WHOLE.hold(lambda: going_on)
    ctrl_c()
    with WHOLE:
        pass
    ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        WHOLE.let_go()
    WHOLE.let_go()
    WHOLE.hold(lambda: going_on)
    going_on = False
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


# ---- autograd --------------------------------------------------------------------------------------------------------


def test_autograd_is_on_after_an_interrupt_at_any_moment_of_a_call() -> None:
    """Many real ones, at random moments within microseconds; one that comes after its turn is over is let go."""
    off = without_grad(torch.is_grad_enabled)
    num_interrupts, expected = 0, False

    def interrupt(number: int, frame: Any) -> None:
        if expected:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for count in range(1500):
            try:
                expected = True
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + count % 40))
                for _ in range(60):
                    off()
                    call_without_grad(off)
                expected = False
            except KeyboardInterrupt:
                num_interrupts += 1
                expected = False
            assert torch.is_grad_enabled(), count
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        time.sleep(0.01)  # the last one is handled by now: the handler of before would take it for its own
        signal.signal(signal.SIGALRM, before)
    assert num_interrupts > 1000


def test_the_mode_of_the_caller_comes_back() -> None:
    assert not call_without_grad(torch.is_grad_enabled) and torch.is_grad_enabled()
    with torch.no_grad():
        assert call_with_grad(torch.is_grad_enabled) and not torch.is_grad_enabled()
        with pytest.raises(ZeroDivisionError):
            call_with_grad(lambda: 1 / 0)
        assert not torch.is_grad_enabled()


def test_nothing_in_a_step_can_leave_autograd_off(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C where it hurts most: torch's no_grad has switched autograd off, and its block has not begun."""
    model = gemini.GeminiDDP(llama(), make_config(llama(), where, tmp_path))
    optimizer = adam(model)
    real = torch.no_grad.__enter__

    def enter(self: Any) -> None:
        real(self)
        ctrl_c()

    parts: list[Callable[[], Any]] = [
        lambda: on_batch(model, 0).backward(),
        lambda: model.clip_grad_norm_(1.0),
        optimizer.step,
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
        lambda: model.load_state_dict(model.state_dict()),
        lambda: model.lm_head.weight == 0,
        optimizer.zero_grad,
    ]
    interrupted = []
    for part in parts:
        with monkeypatch.context() as patch:
            patch.setattr(torch.no_grad, "__enter__", enter)
            try:
                part()
            except KeyboardInterrupt:
                interrupted.append(part)
        assert torch.is_grad_enabled()
    # transformers has one in every forward, torch in load_state_dict (which is made whole first), and Gemini none.
    assert interrupted == [parts[0], parts[4]]
    on_batch(model, 0).backward()
    optimizer.step()


def test_references_of_kernels_too() -> None:
    weights, moments = torch.ones(8, requires_grad=True), torch.zeros(8)
    arrays = Arrays(weights, None, {"exp_avg": moments, "exp_avg_sq": moments.clone()}, torch.ones(8))
    with kernel_settings.use_isa("reference"):
        ADAM.run(arrays, [Segment(0, 8, ADAM.scalars(ADAM.defaults, 1, 1.0))])
    assert torch.is_grad_enabled() and weights[0] < 1
