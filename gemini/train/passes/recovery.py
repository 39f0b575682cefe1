"""Forgets what a forward or backward left behind that an exception, Ctrl-C above all, ended without its hooks.

Called at the next place that begins something new, so that a program which goes on after an exception finds books that
balance, and one that does not has lost nothing.
"""

from __future__ import annotations

import torch

from gemini.interrupts import WHOLE
from gemini.train.params.exposure import hide
from gemini.train.params.guard import ManagedParameter
from gemini.train.passes.backward import BackwardPass
from gemini.train.passes.forward import ForwardPass
from gemini.train.passes.parts import Parts


class Recovery:
    """Of one model."""

    def __init__(self, parts: Parts, forward: ForwardPass, backward: BackwardPass):
        self._params, self._manager, self._state = parts.params, parts.store.manager, parts.state
        self._forward, self._backward, self._exposure = forward, backward, parts.exposure
        self._activations, self._gradients, self._updates = parts.activations, parts.gradients, parts.updates

    def forget_interrupted(self) -> None:
        """End what was under way, if anything is; nothing if a backward is running in this thread."""
        state = self._state
        if not state.num_open or torch._C._current_graph_task_id() != -1:
            return
        WHOLE.let_go()
        self._forward.abandon()
        self._updates.forget_collected()
        self._updates.await_held()
        # The backward broke off: what is landing of it is of no use.
        self._gradients.start_over(alone=not self._backward.is_reduced)
        self._manager.foresight.interrupt()
        self._activations.recover()
        with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
            for handle in self._params.handles:
                handle.param.grad = None  # of autograd, if the interrupt came just before the hook that takes it
        if state.in_backward:
            self._backward.abandon()
        self._exposure.rest_if_idle()
        if not state.computing:
            # An interrupt may have come between making params ordinary and noting it.
            hide([handle for handle in self._params.handles if not isinstance(handle.param, ManagedParameter)])
            state.num_open = 0
        if not (state.computing or self._forward.is_transformed or self._manager.is_balanced()):
            self._manager.start_over()
