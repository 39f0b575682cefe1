"""Forgets what a forward or backward left behind that an exception, Ctrl-C above all, ended without its hooks.

Called at the next place that begins something new, so that a program which goes on after an exception finds books that
balance, and one that does not has lost nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from gemini.errors import GeminiError
from gemini.interrupts import WHOLE
from gemini.train.params.guard import ManagedParameter, hide

if TYPE_CHECKING:
    from gemini.train.engine import Engine


def forget_interrupted(engine: Engine) -> None:
    """End what was under way; nothing if a backward is running in this thread."""
    if torch._C._current_graph_task_id() != -1:
        return
    WHOLE.let_go()
    engine.calls.abandon()
    if engine.state.in_forward and not engine.calls.running:
        engine.state.end_forward()
    engine.let_go_of_transformed()
    engine.updates.forget_collected()
    with contextlib.suppress(Exception):  # the backward broke off: its gradients are of no use
        engine.gradients.drain()
    engine.manager.foresight.interrupt()
    engine.activations.recover()
    was_closed = not engine.state.num_open
    if not was_closed:
        with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
            for handle in engine.handles:
                handle.param.grad = None  # of autograd, if the interrupt came just before the hook that takes it
    if engine.state.in_backward:
        has_begun = engine.state.takes_gradients
        engine.calls.abandon(backward=True)
        engine.end_backward()
        if engine.state.updated_in_backward and has_begun:
            engine.state.forget_update_in_backward()
            engine.state.mark_corrupted(GeminiError("its backward ended early, after some params were updated in it"))
    engine.exposure.rest_if_idle()
    if not (was_closed or engine.state.computing):
        # An interrupt may have come between making params ordinary and noting it.
        hide([handle for handle in engine.handles if not isinstance(handle.param, ManagedParameter)])
        engine.state.close_all()
    if not (engine.state.computing or engine.transformed or engine.manager.is_balanced()):
        engine.manager.start_over()
