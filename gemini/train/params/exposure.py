"""Which params are ordinary parameters now, and which are guarded.

While the model computes, the params of gathered chunks are ordinary; those of chunks that never move become so together
when it starts to compute, but not before their update is over: until then the guard stands, a block waits for its own
chunks as it begins, and any other read waits when it meets the guard. At rest all are guarded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from gemini.memory.chunks.chunk import Chunk
from gemini.train.params import guard
from gemini.train.params.guard import ParamHandle

if TYPE_CHECKING:
    from gemini.train.engine import Engine


class Exposure:
    """Which chunks' params are plain ``nn.Parameter``s right now, and which are guarded."""

    def __init__(self, engine: Engine):
        self._reference = engine.self_reference
        self._never_move: tuple[Chunk, ...] | None = None
        self._exposed: set[int] = set()
        self._num_readers: dict[int, int] = {}
        """Of chunks that move: how many computations see their params as ordinary ones now."""
        self._late: set[int] = set()
        """Resident chunks that are still being updated, or were when the model began to compute."""
        self._cast: list[ParamHandle] = []
        """Params that were cast while they were ordinary ones."""
        self._covered: set[int] = set()
        """Chunks that move and were guarded again since the model was at rest: somebody may have views of them."""
        self._written: list[ParamHandle] = []

    def begin(self) -> None:
        """The model computes from now on: what never moves is there to be read, unless it is being updated.

        With gradients off all updates are waited for. torch then has fused paths for whole layers, which look at the
        class of every param in them and compute other bits where one is guarded.
        """
        engine = self._engine()
        if engine.updates.pending and not torch.is_grad_enabled():
            for chunk in self._resident(engine):
                engine.updates.wait(chunk)
        fresh = [chunk for chunk in self._resident(engine) if chunk.spec.index not in self._exposed]
        if engine.updates.pending:
            late = {chunk.spec.index for chunk in fresh if engine.updates.is_pending(chunk)}
            self._late |= late
            fresh = [chunk for chunk in fresh if chunk.spec.index not in late]
        handles = [handle for chunk in fresh for handle in engine.by_chunk[chunk.spec.index]]
        self._written += guard.written_to(handles)
        guard.expose(handles)
        indices = [chunk.spec.index for chunk in fresh]
        self._exposed.update(indices)
        self._late.difference_update(indices)

    def _resident(self, engine: Engine) -> tuple[Chunk, ...]:
        if self._never_move is None:
            self._never_move = tuple(chunk for chunk in engine.chunks if chunk.resident)
        return self._never_move

    def catch_up(self, chunks: tuple[Chunk, ...]) -> None:
        """These are read now: wait for their updates."""
        if self._late:
            for chunk in chunks:
                if chunk.spec.index in self._late:
                    self.expose(chunk)

    def expose(self, chunk: Chunk) -> None:
        """Make the params of a gathered chunk ordinary parameters, until as many :meth:`cover` if it moves."""
        index, engine = chunk.spec.index, self._engine()
        if not chunk.resident:
            self._num_readers[index] = self._num_readers.get(index, 0) + 1
        if index not in self._exposed:
            if chunk.resident:
                engine.updates.wait(chunk)
                self._late.discard(index)
            self.look_for_writes(chunk)
            assert chunk.gathered, chunk.name
            guard.expose(engine.by_chunk[index])
            self._exposed.add(index)

    def cover(self, chunk: Chunk) -> None:
        """One reader less of a chunk that moves: guarded after the last, so that no other read goes unnoticed."""
        index = chunk.spec.index
        if chunk.resident or index not in self._num_readers:
            return
        self._num_readers[index] -= 1
        if not self._num_readers[index]:
            del self._num_readers[index]
            self._covered.add(index)
            if self.hide(chunk):  # a write, refused when everything has been let go: the copy may go
                self._engine().manager.drop([chunk])

    def withdraw(self, chunk: Chunk) -> None:
        """Its update begins while the model computes: whoever reads it from now on (a recomputation) waits."""
        if chunk.resident and chunk.spec.index in self._exposed:
            self.hide(chunk)
            self._late.add(chunk.spec.index)

    def hide(self, chunk: Chunk) -> bool:
        """Guard the params of a chunk. True if one was written to, which is refused when that can be done."""
        return self._hide([chunk.spec.index])

    def _hide(self, indices: list[int]) -> bool:
        by_chunk = self._engine().by_chunk
        self._exposed.difference_update(indices)
        written, cast = guard.hide([handle for index in indices for handle in by_chunk[index]])
        self._written += written
        self._cast += cast
        return bool(written)

    def look_for_writes(self, chunk: Chunk) -> None:
        """Notice writes to guarded params, through views that somebody has: refused when that can be done."""
        engine = self._engine()
        written = guard.written_to(engine.by_chunk[chunk.spec.index])
        if written:
            self._written += written
            engine.manager.drop([chunk])  # a copy that differs from its home

    def check(self, chunks: Iterable[Chunk]) -> None:
        """The weights of these are about to be updated.

        Raises:
            ParamAccessError: if they were written to by others; nothing is updated yet.
        """
        for chunk in chunks:
            self.look_for_writes(chunk)
        self.refuse_writes()

    def poison(self, chunk: Chunk) -> None:
        """The gathered weights of a chunk went away."""
        self.look_for_writes(chunk)
        self._exposed.discard(chunk.spec.index)
        self._num_readers.pop(chunk.spec.index, None)
        guard.poison(self._engine().by_chunk[chunk.spec.index])

    def rest_if_idle(self) -> None:
        """Guard everything if nobody computes any more, and refuse what was written meanwhile."""
        engine = self._engine()
        if not engine.state.computing:
            self._late.clear()
            self._num_readers.clear()
            covered, self._covered = self._covered - self._exposed, set()
            if self._exposed:
                self._hide(list(self._exposed))
            for index in covered:
                self.look_for_writes(engine.chunks[index])
            cast, self._cast = self._cast, []
            guard.bring_back(cast)
        self.refuse_writes()

    def refuse_writes(self) -> None:
        """Raise for writes that were seen.

        Raises:
            ParamAccessError: naming the param.
        """
        written, self._written = self._written, []
        guard.refuse_written(written)

    def _engine(self) -> Engine:
        engine = self._reference()
        assert engine is not None
        return engine
