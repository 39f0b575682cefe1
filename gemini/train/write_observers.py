"""Who is told when masters and states change: a checkpoint that is written behind the training, and whatever else
keeps a durable copy of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from gemini.memory.chunks.chunk import Chunk


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
