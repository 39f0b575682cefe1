"""``with model.recording() as recording:``, whose ``timeline`` is the last whole step inside: where its time went, what
every tier held.

The engine tells a :class:`Recording` when modules begin and end, forward and backward; it names the stretches of
computing between moves, and knows where a step begins (the first forward with gradients after an update) and ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.memory.watching import RecordedStep, Recorder
from gemini.planning.timeline import Timeline
from gemini.planning.trace import MemoryTrace
from gemini.train.engine import Engine
from gemini.train.observers import iter_tensors

LOSS = "loss"
"""The name of what is computed between the end of the model's forward and the beginning of its backward."""


class _Whole(NamedTuple):
    step: RecordedStep
    tokens: int
    num_batches: int


class Recording:
    """What ``model.recording()`` gives: read :attr:`timeline` after a whole step, inside the block or behind it."""

    def __init__(self, engine: Engine, model: nn.Module, trace: MemoryTrace | None):
        """
        Raises:
            PlanMismatch: for a trace of another model.
        """
        # Weakly: a program may keep the recording, to read its timeline, for longer than the model.
        self._reference = weakref.ref(engine)
        if trace is not None:
            ours = engine.decision.trace
            # A trace may have been made without knowing what stays in fp32 here.
            ours.check_same_model(trace.with_fp32({p.name for p in ours.params if p.fp32}), what="the trace")
        self._trace = trace
        self._recorder = Recorder(engine.store.device)
        # By `id`, as of now: the model is the caller's, and outlives the block.
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._name = type(model).__name__
        ranks = self._ranks = engine.ranks.everyone.size
        self._title = f"{self._name}, {engine.config.precision}, {engine.store.device.name}"
        self._title += f", 1 of {ranks} ranks" if ranks > 1 else ""
        self._budgets = {tier: engine.store.ledger.budget(tier) for tier in engine.store.ledger.tiers}
        self._is_open = False
        # A step whose beginning was before the block is not recorded.
        self._is_late = engine.state.computing or engine.backward.sink.has_gradients
        self._in_backward = ""
        self._num_backwards = 0
        self._tokens = 0
        self._last: _Whole | None = None

    @property
    def timeline(self) -> Timeline:
        """The last whole step: from its first forward to the next step's first forward; if there was none, to the end
        of ``optimizer.step()`` and of the updates that it left in flight, which are waited for.

        So of steps in a row each has the end of the updates of the one before. ``stalls`` is what the training thread
        waited for. ``moments`` are stretches of computing. ``moved`` is what crossed each boundary for the step: with
        nothing else done in between, ``memory_report()["moved"]`` after it. Recomputation of a block whose weights do
        not move counts to the block's backward.

        Raises:
            GeminiError: if no whole step was recorded.
        """
        if self._last is None:
            raise GeminiError(
                "no whole step was recorded: let a forward with gradients, its backward and optimizer.step() run "
                "inside `with model.recording()`, and zero_grad() of what was there before"
            )
        self.drain()
        step, tokens, num_batches = self._last
        flops = 0 if self._trace is None else self._trace.flops * num_batches
        return step.timeline(title=self._title, tokens=tokens * self._ranks, flops=flops, budgets=self._budgets)

    # ---- told by the engine -------------------------------------------------------------------------------------

    def begin_call(self, module: nn.Module) -> None:
        """Note that a hooked module starts: what it gathers is gathered for it. Called under the lock of the books."""
        engine = self._engine()
        # A step begins with the first outermost forward with gradients; evaluation in between is no step.
        outermost = not engine.forward.calls.running and not engine.state.in_backward
        if outermost and torch.is_grad_enabled() and not self._recorder.in_step and not self._is_late:
            self._recorder.begin_step({tier: engine.store.ledger.holders(tier) for tier in engine.store.ledger.tiers})
            self._tokens, self._num_backwards = 0, 0
        self._recorder.computing(self._name_of(module, "recompute" if engine.state.in_backward else "forward"))

    def end_call(self) -> None:
        """Note that a hooked module is over: the one around it goes on. Called under the lock of the books."""
        engine = self._engine()
        around = engine.forward.calls.innermost if engine.forward.calls.running else None
        if around is not None and around.module is not None:
            phase = "recompute" if engine.state.in_backward else "forward"
            self._recorder.computing(self._name_of(around.module, phase))
        elif engine.state.in_backward:
            self._recorder.computing(self._in_backward)
        else:
            # The outermost one ended: what comes before its backward is the loss.
            self._recorder.computing(LOSS if torch.is_grad_enabled() else None)

    def watch_backward(self, module: nn.Module, output: Any) -> None:
        """Notice when the gradient of a module's output arrives: its backward begins."""
        name = self._name_of(module, "backward")

        def begins(grad: torch.Tensor) -> None:
            # The graph may be run after the block.
            if self._is_open:
                self._in_backward = name
                self._recorder.computing(name)

        for tensor in iter_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begins)

    def begin_backward(self) -> None:
        """Note that the first gradient of a backward has arrived."""
        # A backward outside of any recorded step: its forward was before the block, so its step is not whole.
        self._is_late = self._is_late or not self._recorder.in_step
        self._num_backwards += 1
        if not self._in_backward:
            self._in_backward = f"backward {self._name}"
        self._recorder.computing(self._in_backward)

    def end_backward(self) -> None:
        """Note that the whole graph is done."""
        self._in_backward = ""
        self._recorder.computing(None)

    def discard(self) -> None:
        """Forget the step if no gradient is left: what was computed for those that were forgotten became none."""
        if not self._engine().backward.sink.has_gradients and (self._num_backwards or self._is_late):
            self._recorder.abandon_step()
            self._is_late, self._num_backwards = False, 0

    def end_step(self) -> None:
        """Keep the step that an optimizer step has ended, if it was recorded from its beginning."""
        if self._recorder.in_step:
            self._last = _Whole(self._recorder.end_step(), self._tokens, self._num_backwards)
        self._is_late, self._num_backwards = False, 0

    # ---- inside -------------------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, model: nn.Module) -> Iterator[Recording]:
        """Record the steps of ``model`` inside."""
        engine = self._engine()
        observers, watch, ledger = engine.forward.observers, engine.store.mover.watch, engine.store.ledger
        if observers.recording is not None:
            raise GeminiError("this model is being recorded already: open one recording() at a time")

        def count(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._recorder.in_step and torch.is_grad_enabled() and not engine.state.in_backward:
                self._tokens += count_tokens(args, kwargs)  # a recomputation has none

        counting = model.register_forward_pre_hook(count, with_kwargs=True)
        observers.record(self)
        # Hooks of a settled forward would tell nothing.
        engine.state.unsettle()
        watch.recorder, ledger.on_change = self._recorder, self._recorder.held
        # Last: `drain` and hooks of graphs go by it.
        self._is_open = True
        try:
            # Only if nothing was raised: after an interrupt a wait for updates might raise again, and hide the first
            # error.
            yield self
            self.drain()
        finally:
            # First: what follows must not be told to a recorder that ends.
            self._is_open = False
            observers.record(None)
            watch.recorder = ledger.on_change = None
            self._recorder.close()
            counting.remove()

    def drain(self) -> None:
        """Let updates that the last step left in flight end: they are part of it, unless the next one has begun."""
        engine = self._reference()
        if engine is not None and self._is_open and self._last is not None and self._last.step.next_start is None:
            engine.drain()

    def _name_of(self, module: nn.Module, phase: str) -> str:
        return f"{phase} {self._paths.get(id(module)) or self._name}"

    def _engine(self) -> Engine:
        engine = self._reference()
        assert engine is not None
        return engine


def count_tokens(args: Any, kwargs: Mapping[str, Any]) -> int:
    """Count the positions that a call works on: token ids if there are any, else samples (rows of the first input)."""
    ids = kwargs.get("input_ids")
    tensors = [ids] if isinstance(ids, torch.Tensor) else list(iter_tensors((args, dict(kwargs))))
    if not tensors or tensors[0].dim() == 0:
        return 0
    first = tensors[0]
    return first.numel() if not first.is_floating_point() and first.dim() == 2 else first.shape[0]
