"""``model.gathered()``: full weights to look at, and to write, where the writes become the masters exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk
from gemini.ranks.agreement import Point
from gemini.train.params.guard import ParamHandle, undo_writes
from gemini.train.sharding.alike import agree_on_values, value_facts

if TYPE_CHECKING:
    from gemini.train.engine import Engine


@contextmanager
def gathered(engine: Engine, handles: list[ParamHandle], *, write: bool) -> Iterator[None]:
    """Keep the full weights of ``handles`` readable; with ``write`` what was written becomes the master exactly.

    An exception inside undoes what was written. With several ranks each writes its shard, so all must write the same.
    """
    chunks = list({handle.chunk.spec.index: handle.chunk for handle in handles}.values())
    begun = list[Chunk]()
    # Of weights that are changed in place nothing else tells what they were, so that the rest keeps its residual.
    before: dict[str, torch.Tensor] = {}
    if write:
        for chunk in chunks:
            engine.updates.wait(chunk)
        before = {handle.name: handle.view.clone() for handle in handles if handle.chunk.resident}
    try:
        with engine.open_gathered(chunks):
            if write:
                for chunk in chunks:
                    engine.before_write(chunk)  # one that never moves is written in place
                    begun.append(chunk)
            try:
                yield
                if write:
                    _check_same_on_all(engine, handles)
            except BaseException:
                with WHOLE:
                    for handle in handles:
                        undo_writes(handle)
                        if handle.name in before:
                            handle.view.copy_(before[handle.name])
                raise
            if write:
                with WHOLE:  # Ctrl-C leaves no write half done
                    for handle in handles:
                        engine.by_names.take_over(handle, before.get(handle.name))
    finally:
        if write:
            with WHOLE:
                engine.manager.drop(chunks)
                engine.manager.refresh_lent()
                for chunk in begun:
                    engine.write_observers.after_write(chunk)


def _check_same_on_all(engine: Engine, handles: list[ParamHandle]) -> None:
    """Refuse, before any master changes, what was not written alike on every rank.

    Raises:
        RankMismatch: on every rank.
    """
    values = ((handle.name, handle.view) for handle in handles)
    agree_on_values(engine, Point.WRITE, "gathered(write=True)", lambda: value_facts(values))
