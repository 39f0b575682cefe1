"""Who is told what a model does, and what is done for chunks beside the model's own work.

A recording of steps, and a tracer that must not count what is ours; a checkpoint that is written behind the training,
and whatever else keeps a durable copy of masters and states. Own work stands apart from the transforms of
``torch.func`` as well, around a managed model or inside of it: while one runs, torch hands every operation through a
stack of interpreters, allows no saved-tensor hooks, and keeps the params themselves for its own backward, where nobody
can count them. So the engine moves weights outside of that stack, and what a differentiating transform has read stays
gathered until it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from gemini.memory.chunks.chunk import Chunk


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


# ---- writes to masters and states ------------------------------------------------------------------------------------


class WriteObserver(Protocol):
    """It may be called on any thread that changes chunks, and must not keep the model alive."""

    def before_updates(self) -> None:
        """On the thread that trains: updates are about to be handed over, behind those of earlier steps."""

    def before_write(self, chunk: Chunk) -> None:
        """Masters or states of ``chunk`` are about to change; they change when this returns."""

    def after_write(self, chunk: Chunk) -> None:
        """A change is complete. Changes may lie within others (a write by name inside ``gathered(write=True)``): a
        chunk is whole when as many are complete as have begun. One that broke off never is.
        """

    def step_ended(self) -> None:
        """``optimizer.step()`` returns. Updates in flight are over when ``after_write`` says so."""

    def close(self) -> None:
        """The model ends."""


class WriteObservers(list[WriteObserver]):
    """Those of one model. They may come and go while another thread tells the others something."""

    def before_updates(self) -> None:
        """Tell all."""
        for observer in tuple(self):
            observer.before_updates()

    def before_write(self, chunk: Chunk) -> None:
        """Masters or states of ``chunk`` may change when this returns: no fetch reads them, and all were told."""
        chunk.begin_write()
        for observer in tuple(self):
            observer.before_write(chunk)

    def after_write(self, chunk: Chunk) -> None:
        """Tell all."""
        for observer in tuple(self):
            observer.after_write(chunk)

    @contextmanager
    def writing(self, chunk: Chunk) -> Iterator[None]:
        """Around a change."""
        self.before_write(chunk)
        yield
        self.after_write(chunk)

    def step_ended(self) -> None:
        """Tell all."""
        for observer in tuple(self):
            observer.step_ended()

    def close(self) -> None:
        """Tell all."""
        for observer in tuple(self):
            observer.close()


class ChangedChunks:
    """Which chunks have changed since a durable store was told."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._indices = {chunk.spec.index for chunk in chunks}  # nothing of these is in the store

    def take(self) -> set[int]:
        """They, by index, and from now on those that change afterwards."""
        taken, self._indices = self._indices, set()
        return taken

    def give_back(self, indices: Iterable[int]) -> None:
        """These were taken, and did not get there."""
        self._indices.update(indices)

    def before_updates(self) -> None:
        """Nothing to do."""

    def before_write(self, chunk: Chunk) -> None:
        """It is no longer what the store has."""
        self._indices.add(chunk.spec.index)

    def after_write(self, chunk: Chunk) -> None:
        """Nothing to do."""

    def step_ended(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


# ---- own work, and what sets it apart --------------------------------------------------------------------------------


_functorch: Any = torch._C._functorch


innermost_transform: Callable[[], Any] = _functorch.peek_interpreter_stack
"""The transform that runs in this thread, or None. torch's own function: it is asked in every hook."""


_NOTHING = nullcontext()


def is_differentiating() -> bool:
    """Whether one of them takes derivatives."""
    if innermost_transform() is None:
        return False
    kinds = _functorch.TransformType
    return any(interpreter.key() in (kinds.Grad, kinds.Jvp) for interpreter in _functorch.get_interpreter_stack())


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, of what a transform has wrapped."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def without_transforms() -> AbstractContextManager[None]:
    """What is done inside is of no transform: moving weights."""
    return _NOTHING if innermost_transform() is None else _without_stack()


@contextmanager
def _without_stack() -> Iterator[None]:
    stack = []
    try:
        while innermost_transform() is not None:
            stack.append(_functorch.pop_dynamic_layer_stack())
        yield
    finally:
        while stack:
            _functorch.push_dynamic_layer_stack(stack.pop())


_Method = TypeVar("_Method", bound=Callable[..., Any])


def own_work(method: _Method) -> _Method:
    """A method, of an object with ``observers``, that does something for chunks beside the model's own work."""

    @wraps(method)
    def apart(self: Any, *args: Any) -> Any:
        around = self.observers.around_own_work
        if around is None:
            return method(self, *args)
        with around():
            return method(self, *args)

    return cast(_Method, apart)
