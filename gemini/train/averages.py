"""``gemini.EMA``: the moving averages that a model keeps beside its masters, by name, and in the place of its weights.

What keeps them up to date is the rule that the model is wrapped for (:mod:`gemini.optim.around`): they are a plane of
its chunks, on the tier of its states. A param that had no update yet, and a frozen one, is its own average.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.interrupts import WHOLE
from gemini.optim.around import AveragedRule
from gemini.planning.planes import EMA as PLANE
from gemini.ranks.agree import Attempt, Facts, Point
from gemini.train.engine import Engine
from gemini.train.params.handle import ParamHandle
from gemini.train.step import run_alone
from gemini.train.wrap import settle


class EMA:
    """The moving average of the weights of a managed model. The model keeps it, in fp32 beside its states, and moves it
    in the pass of the optimizer's update; checkpoints have it.

    Args:
        model: wrapped with ``GeminiConfig(optimizer=gemini.optim.AveragedRule(decay=0.999))``. Of a pipeline its
            ``model``.

    Raises:
        ValueError: for a model that is not managed.
        GeminiError: for one that was wrapped for a rule without an average.
    """

    def __init__(self, model: nn.Module):
        # The model and not what manages it, which goes with `gemini.release(model)`.
        self._model = model
        rule = self._engine.stepping.rule
        if not isinstance(rule, AveragedRule):
            raise GeminiError(
                f"this model keeps no average: it was wrapped for {rule.face!r}. Wrap it with "
                f"GeminiConfig(optimizer=gemini.optim.AveragedRule({rule.face!r}, decay=0.999))"
            )

    @property
    def _engine(self) -> Engine:
        engine = getattr(self._model, "__dict__", {}).get("_gemini_engine")
        if not isinstance(engine, Engine):
            raise ValueError(f"gemini.EMA takes a managed model (of a pipeline `pipe.model`), got {type(self._model)}")
        return engine

    def full_param(self, name: str) -> torch.Tensor:
        """A copy of the average of one param, whole, in fp32 on the CPU. With several ranks all of them call this
        together, as :meth:`gemini.GeminiDDP.full_param`. ``KeyError`` for an unknown name.
        """
        return run_alone(self._engine.state, self._read, self._engine.by_names[name])

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside this block the averages are the weights of the model: what it computes, ``full_param``,
        ``state_dict``, ``save_pretrained`` and :func:`gemini.weights_for` have them. At its end the masters are back,
        with the same bits. Both change places one param after the other, which takes host memory for the largest one.

        Evaluation and export alone: a backward, ``optimizer.step()``, checkpoints and the states of the optimizer are
        refused inside. Gradients that wait for a step are kept. What is written to weights inside goes into the
        averages. With several ranks all of them enter together. A block inside another one of the thread has no effect.

        Raises:
            GeminiError: inside a forward, a backward or ``gathered()``, or while another thread is inside.
            StorageError: if the drive fails: then the model has to be loaded from a checkpoint.
        """
        own, state = threading.get_ident(), self._engine.state
        if state.shows_averages and state.swapped_by == own:
            yield
            return
        try:
            # Inside: a Ctrl-C that had to wait for the exchange is raised right behind it.
            run_alone(state, self._enter, own)
            yield
        finally:
            try:
                run_alone(self._engine.state, self._leave, own)
            except KeyboardInterrupt:
                # It may have come before the exchange, and nobody else would bring the masters back.
                run_alone(self._engine.state, self._leave, own)
                raise

    def _read(self, handle: ParamHandle) -> torch.Tensor:
        by_names, in_place = self._engine.by_names, self._engine.state.shows_averages
        if in_place or not handle.num_steps or PLANE not in handle.chunk.planes:
            return by_names.read_whole(handle, torch.float32)
        return by_names.joined(handle, by_names.read_plane(handle, PLANE))

    def _enter(self, own: int) -> None:
        state = self._engine.state
        with Attempt() as attempt:
            self._engine.recovery.forget_interrupted()  # a backward that broke off is over
            if state.shows_averages:
                raise GeminiError(
                    "swapped_in() while another thread is inside, at whose end the masters are back: enter it once, "
                    "around the work of all threads, or let one thread wait for the other"
                )
            if state.computing:
                raise GeminiError("swapped_in() inside a forward, a backward or gathered(): leave that first")
            settle(self._engine)
        self._engine.by_names.agree(Point.SWAP, "swapped_in()", lambda: Facts({}), attempt.refusal)
        state.swapped_by = own
        self._exchange()

    def _leave(self, own: int) -> None:
        state = self._engine.state
        if state.shows_averages and state.swapped_by == own:
            # What a forward that broke off has left open reads averages.
            self._engine.recovery.forget_interrupted()
            self._exchange()

    def _exchange(self) -> None:
        engine, state = self._engine, self._engine.state
        with WHOLE:
            shows, state.shows_averages = state.shows_averages, False
            with state.changing():
                # The same params both times: nothing is updated or loaded in between.
                for handle in engine.params.handles:
                    if handle.num_steps and PLANE in handle.chunk.planes:
                        engine.by_names.exchange(handle, PLANE)
                        engine.forward.calls.num_exchanges += 1
            state.shows_averages = not shows
