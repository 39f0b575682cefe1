"""``interrupts.WHOLE``: when Ctrl-C takes effect, and that autograd is never left off by it. With real signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini import interrupts, kernels
from gemini.interrupts import WHOLE, call_with_grad, call_without_grad, without_grad
from gemini.rules import ADAM, Arrays, Segment
from tests.train.helpers import adam, llama, make_config, on_batch, squares, train
from tests.train.test_interrupts import ctrl_c, nothing_is_left, wrap  # noqa: F401

# ---- the mechanism ---------------------------------------------------------------------------------------------------


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
    with kernels.use_isa("reference"):
        ADAM.run(arrays, [Segment(0, 8, ADAM.scalars(ADAM.defaults, 1, 1.0))])
    assert torch.is_grad_enabled() and weights[0] < 1
