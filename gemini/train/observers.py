"""Who is told what a model does, and what is done for chunks beside the model's own work.

Own work stands apart from the transforms of ``torch.func`` as well: while one runs, torch hands every operation through
a stack of interpreters, allows no saved-tensor hooks, and keeps the params themselves for its own backward, where
nobody can count them. So the engine moves weights outside of that stack, and what a differentiating transform has read
stays gathered until it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from gemini.memory.chunks.chunk import Chunk


class Observers:
    """The recording and the tracer of one model: each is there or not, and asked for in every hook."""

    def __init__(self) -> None:
        self.recordings: tuple[Any, ...] = ()
        """The :class:`~gemini.train.report.Recording` that is told when modules and steps begin and end, if any."""
        self.around_own_work: Callable[[], AbstractContextManager[None]] | None = None
        """Entered around what is done for chunks beside the model's own work."""
        self.are_there = False
        """Whether there is a recording or a tracer: they are told of every module, and of what it reads alone."""

    def record(self, *recordings: Any) -> None:
        """Tell this one from now on, or nobody."""
        self.recordings = recordings
        self.set_apart(self.around_own_work)

    def make_way(self) -> bool:
        """End a recording of Gemini's own, if there is one; says whether the program has none open either."""
        for recording in self.recordings:
            if (end := recording.gives_way()) is not None:
                end()
        return not self.recordings

    def set_apart(self, around: Callable[[], AbstractContextManager[None]] | None) -> None:
        """Enter ``around`` around own work from now on, or nothing."""
        self.around_own_work = around
        self.are_there = around is not None or bool(self.recordings)


# ---- writes to masters and states ------------------------------------------------------------------------------------


class WriteObserver:
    """Told of writes to chunks, and by default does nothing. It is called on any thread that changes them, and must not
    keep the model alive.
    """

    def before_updates(self) -> None:
        """Note that updates are handed over next, behind those of earlier steps. Called by the training thread."""

    def before_write(self, chunk: Chunk) -> None:
        """Note that masters or states of ``chunk`` change when this returns; until then they may still be read."""

    def close(self) -> None:
        """End: the model does."""


class WriteObservers(list[WriteObserver]):
    """All write observers of one model. They may come and go while another thread tells the others something, so each
    method goes through a copy.
    """

    def before_updates(self) -> None:
        for observer in tuple(self):
            observer.before_updates()

    def before_write(self, chunk: Chunk) -> None:
        """Masters or states of ``chunk`` may change when this returns: no fetch reads them, and all were told."""
        # A fetch out of the home may be under way on its lane: it would read half of the write.
        chunk.begin_write()
        for observer in tuple(self):
            observer.before_write(chunk)

    def close(self) -> None:
        for observer in tuple(self):
            observer.close()


class ChangedChunks(WriteObserver):
    """Notes which chunks have changed since a durable store was told, on whatever thread they do."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        # One for each commit that was begun since the last one that is there. Nothing of the first is in the store.
        self._since = [{chunk.spec.index for chunk in chunks}]

    def take(self) -> set[int]:
        """The changed chunks, by index, for a commit that begins; begin to note those that change afterwards."""
        # In one call: what changes from here on goes into that one.
        self._since.append(set())
        return {index for changed in self._since[:-1] for index in changed}

    def committed(self) -> None:
        """Note that what was taken last is in the store: until then the next commit would take it again."""
        del self._since[:-1]

    def before_write(self, chunk: Chunk) -> None:
        """Note that a chunk is no longer what the store has."""
        # Before the write: the store must not take half of it for what it has.
        self._since[-1].add(chunk.spec.index)


# ---- own work, and what sets it apart --------------------------------------------------------------------------------


_functorch: Any = torch._C._functorch

innermost_transform: Callable[[], Any] = _functorch.peek_interpreter_stack
"""The transform that runs in this thread, or None. torch's own function: it is asked in every hook."""

_NOTHING = nullcontext()


def is_differentiating() -> bool:
    """Whether a transform that runs in this thread takes derivatives."""
    if innermost_transform() is None:
        return False
    kinds = _functorch.TransformType
    return any(interpreter.key() in (kinds.Grad, kinds.Jvp) for interpreter in _functorch.get_interpreter_stack())


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Unwrap what a transform has wrapped, to the tensor itself."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def without_transforms(lock: AbstractContextManager[Any] = _NOTHING) -> AbstractContextManager[Any]:
    """Keep what is done inside (moving weights), under a lock, out of the transforms that run in this thread."""
    return lock if innermost_transform() is None else _without_stack(lock)


@contextmanager
def _without_stack(lock: AbstractContextManager[Any]) -> Iterator[None]:
    stack = []
    try:
        while innermost_transform() is not None:
            stack.append(_functorch.pop_dynamic_layer_stack())
        with lock:
            yield
    finally:
        # In the reverse order, whatever happened inside: torch pops them itself at the end of each transform.
        while stack:
            _functorch.push_dynamic_layer_stack(stack.pop())


_Method = TypeVar("_Method", bound=Callable[..., Any])


def own_work(method: _Method) -> _Method:
    """Decorate a method, of an object with ``observers``, that works for chunks beside the model's own work."""

    @wraps(method)
    def apart(self: Any, *args: Any) -> Any:
        # One look: without a tracer, which is nearly always, nothing is entered.
        around = self.observers.around_own_work
        if around is None:
            return method(self, *args)
        with around():
            return method(self, *args)

    return cast(_Method, apart)


def iter_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in what operations and modules take and give: containers of them, ModelOutputs, dataclasses.
    Containers of unknown types (caches) are not looked into.
    """
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    parts: Iterable[Any] = ()
    if isinstance(tree, dict):
        parts = list(tree.values())
    elif isinstance(tree, (tuple, list)):
        parts = tree
    elif is_dataclass(tree) and not isinstance(tree, type):
        parts = [getattr(tree, field.name) for field in fields(tree)]
    for part in parts:
        yield from iter_tensors(part)
