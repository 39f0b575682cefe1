"""Who is told what a model does: a recording of its steps, and a tracer that must not count what is ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn


class StepObserver(Protocol):
    """Told when modules and steps begin and end."""

    def begin_call(self, module: nn.Module) -> None:
        """A hooked module starts: what it gathers is gathered for it."""

    def end_call(self) -> None:
        """A hooked module is over: the one around it goes on."""

    def watch_backward(self, module: nn.Module, output: Any) -> None:
        """A hooked module has given ``output``: its backward begins when a gradient of that arrives."""

    def begin_backward(self) -> None:
        """The first gradient of a backward has arrived."""

    def end_backward(self) -> None:
        """The whole graph is done."""

    def discard(self) -> None:
        """Gradients were forgotten."""

    def end_step(self) -> None:
        """An optimizer step is over."""


class Observers:
    """Those of one model."""

    def __init__(self) -> None:
        self.recording: StepObserver | None = None
        self.around_own_work: Callable[[], AbstractContextManager[None]] | None = None
        """Entered around what is done for chunks beside the model's own work."""

    def record(self, recording: StepObserver | None) -> None:
        """From now on ``recording`` is told, or nobody is."""
        self.recording = recording

    def set_apart(self, around: Callable[[], AbstractContextManager[None]] | None) -> None:
        """From now on ``around`` is entered around own work, or nothing is."""
        self.around_own_work = around
