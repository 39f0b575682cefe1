"""Writes to gathered weights become the masters exactly: those of a program inside ``model.gathered(write=True)``, and
those of a module inside its own forward.

Before it looks rows up, ``nn.Embedding(max_norm=...)`` scales those that are longer, in place and unseen by autograd;
so does a module of the program's own that has a number called ``max_norm``. The rotations of OFT with ``coft=True`` and
the prompts of CPT bound themselves in each forward, and layers with a merged adapter that is disabled take it out of
the weights first. Elements that such a write changed have no residual any more, the others keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from gemini.interrupts import WHOLE, call_without_grad
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.store import ChunkStore
from gemini.ranks.agree import value_facts
from gemini.ranks.agreement import Point
from gemini.train.observers import WriteObservers
from gemini.train.params.by_name import ByName
from gemini.train.params.exposure import take_in, undo_writes
from gemini.train.params.handle import ParamHandle, handle_of


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
        before: dict[str, torch.Tensor] = {}
        if write:
            for chunk in chunks:
                chunk.settle()
            before = _copies_of(handles)
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


class Rewriting:
    """Makes what modules write to their weights in a forward the masters of one model. ``lock``: of its books."""

    def __init__(self, by_names: ByName, observers: WriteObservers, lock: AbstractContextManager[Any]):
        self._by_names, self._observers, self._lock = by_names, observers, lock

    def begin(self, handles: tuple[ParamHandle, ...]) -> dict[str, torch.Tensor]:
        """The call of a module begins that may rewrite these: what those are now that are rewritten in place."""
        for chunk in resident_chunks(handles):
            self._observers.before_write(chunk)
        return call_without_grad(_copies_of, handles)

    def end(self, handles: tuple[ParamHandle, ...], before: dict[str, torch.Tensor]) -> None:
        """The call is over; ``before``: what :meth:`begin` gave."""
        call_without_grad(self._take_over, handles, before)

    def unmerge(self, layer: Any) -> None:
        """What a tuner layer with merged adapters does before it computes without them, with the bits of PEFT."""
        handles = handles_of(layer.parameters())
        before = self.begin(handles)
        try:
            call_without_grad(layer.unmerge)
        finally:
            self.end(handles, before)

    def _take_over(self, handles: tuple[ParamHandle, ...], before: dict[str, torch.Tensor]) -> None:
        with self._lock, WHOLE:
            for handle in handles:
                take_in(handle)
                if handle.param._version != handle.version:
                    handle.version = handle.param._version  # torch has counted this write itself
                    handle.num_writes += 1
                    self._by_names.take_over(handle, before.get(handle.name))
            for chunk in resident_chunks(handles):
                self._observers.after_write(chunk)


def handles_of(params: Iterable[nn.Parameter]) -> tuple[ParamHandle, ...]:
    """Of those that are managed."""
    return tuple(handle for handle in map(handle_of, params) if handle is not None)


def resident_chunks(handles: Iterable[ParamHandle]) -> tuple[Chunk, ...]:
    """Those whose weights are written to in place: their updates have to be over when a write begins."""
    return tuple({handle.chunk.spec.index: handle.chunk for handle in handles if handle.chunk.resident}.values())


def _copies_of(handles: Iterable[ParamHandle]) -> dict[str, torch.Tensor]:
    """What weights are that are about to be written to in place: nothing else tells which of them were changed."""
    return {handle.name: handle.view.clone() for handle in handles if handle.chunk.resident}
