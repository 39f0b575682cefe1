"""``model.gathered()``: full weights to look at, and to write, where the writes become the masters exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.store import ChunkStore
from gemini.ranks.agree import value_facts
from gemini.ranks.agreement import Point
from gemini.train.params.by_name import ByName
from gemini.train.params.exposure import undo_writes
from gemini.train.params.handle import ParamHandle
from gemini.train.write_observers import WriteObservers


class Gathering:
    """Of one model.

    Args:
        opened: keeps the weights of chunks gathered and their params ordinary ones, inside a block.
    """

    def __init__(
        self, by_names: ByName, store: ChunkStore, observers: WriteObservers, *,
        opened: Callable[[Iterable[Chunk]], AbstractContextManager[None]],
    ):  # fmt: skip
        self._by_names, self._manager, self._observers = by_names, store.manager, observers
        self._opened = opened

    @contextmanager
    def gathered(self, handles: list[ParamHandle], *, write: bool) -> Iterator[None]:
        """Keep the full weights of ``handles`` readable; with ``write`` what was written becomes the master exactly.

        Autograd is off where weights are written. An exception inside undoes what was written. With several ranks each
        writes its shard, so all must write the same.
        """
        chunks = list({handle.chunk.spec.index: handle.chunk for handle in handles}.values())
        begun = list[Chunk]()
        # Of weights that are changed in place nothing else tells what they were, so that the rest keeps its residual.
        before: dict[str, torch.Tensor] = {}
        if write:
            for chunk in chunks:
                chunk.settle()
            before = {handle.name: handle.view.clone() for handle in handles if handle.chunk.resident}
        try:
            with self._opened(chunks):
                if write:
                    for chunk in chunks:
                        self._observers.before_write(chunk)  # one that never moves is written in place
                        begun.append(chunk)
                takes_over = False
                try:
                    with torch.no_grad() if write else nullcontext():  # torch allows writes to weights only there
                        yield
                    if write:
                        self._check_same_on_all(handles)
                        with WHOLE:  # Ctrl-C leaves no write half done
                            takes_over = True
                            for handle in handles:
                                self._by_names.take_over(handle, before.get(handle.name))
                except BaseException:
                    with WHOLE:
                        for handle in handles if not takes_over else ():
                            undo_writes(handle)
                            if handle.name in before:
                                handle.view.copy_(before[handle.name])
                    raise
        finally:
            if write:
                with WHOLE:
                    self._manager.drop(chunks)
                    self._manager.refresh_lent()
                    for chunk in begun:
                        self._observers.after_write(chunk)

    def _check_same_on_all(self, handles: list[ParamHandle]) -> None:
        """Refuse, before any master changes, what was not written alike on every rank.

        Raises:
            RankMismatch: on every rank.
        """
        values = ((handle.name, self._by_names.to_compare(handle, handle.view)) for handle in handles)
        self._by_names.agree(Point.WRITE, "gathered(write=True)", lambda: value_facts(values))
