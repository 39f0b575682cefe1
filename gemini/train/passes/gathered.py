"""Writes to gathered weights become the masters exactly.

Those of a program inside ``model.gathered(write=True)``, and those of a module inside its own forward:
``nn.Embedding(max_norm=...)`` and modules of the program's own with a number called ``max_norm`` scale rows, OFT with
``coft=True`` and CPT bound what they have, and layers with a merged adapter that is disabled take it out first.
Elements that such a write changed have no residual any more, others keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from gemini.interrupts import WHOLE, call_without_grad, yield_without_grad
from gemini.memory.chunks.chunk import Chunk
from gemini.ranks.agree import Point, value_facts
from gemini.train.observers import WriteObservers
from gemini.train.params.by_name import ByName
from gemini.train.params.exposure import take_in, undo_writes
from gemini.train.params.handle import ParamHandle, handles_of
from gemini.train.passes.forward import ForwardPass
from gemini.train.passes.parts import Parts


class Gathering:
    """Keeps params of one model readable for a program, and takes over what it writes. The training thread's alone."""

    def __init__(self, parts: Parts, forward: ForwardPass):
        self._by_names, self._manager, self._observers = parts.by_names, parts.store.manager, parts.writes
        self._forward, self._occupancy = forward, parts.state.occupancy

    @contextmanager
    def gathered(self, handles: list[ParamHandle], *, write: bool) -> Iterator[None]:
        """Keep the full weights of ``handles`` readable; with ``write`` what was written becomes the master exactly.
        Autograd is off where weights are written. An exception inside undoes what was written.
        """
        chunks = list({handle.chunk.spec.index: handle.chunk for handle in handles}.values())
        before: dict[str, torch.Tensor] = {}
        is_first = write and not self._occupancy.is_own
        try:
            if is_first:
                self._occupancy.begin_alone()
            if write:
                # Before the copies: an update in flight still changes weights that are in place.
                for chunk in chunks:
                    chunk.settle()
                before = _copies_of(handles)
            # A checkpoint that is being written has these chunks first: `before_write` waits for it.
            with self._forward.opened(chunks):
                if write:
                    for chunk in chunks:
                        self._observers.before_write(chunk)  # one that never moves is written in place
                # Once masters change there is no way back: what was shown must not be undone under them.
                takes_over = False
                try:
                    yield from yield_without_grad() if write else (None,)  # torch allows writes to weights only there
                    if write:
                        # Before any master changes, on every rank: what was not written alike is refused on all.
                        values = ((h.name, self._by_names.to_compare(h, h.view)) for h in handles)
                        self._by_names.agree(Point.WRITE, "gathered(write=True)", lambda: value_facts(values))
                        with WHOLE:  # Ctrl-C leaves no write half done
                            takes_over = True
                            for handle in handles:
                                self._by_names.take_over(handle, before.get(handle.name))
                except BaseException:
                    with WHOLE:
                        # Nothing was taken over: weights in place get their old values, windows are dropped below.
                        for handle in handles if not takes_over else ():
                            undo_writes(handle)
                            if handle.name in before:
                                handle.view.copy_(before[handle.name])
                    raise
        finally:
            if write:
                with WHOLE:
                    # In any case: after an error a window has values that no master has, and after a write it may lack
                    # the rounding.
                    self._manager.drop(chunks)
                    self._manager.refresh_lent()
            if is_first:
                self._occupancy.end_alone()


class Rewriting:
    """Makes what modules write to their weights in a forward the masters of one model. ``lock``: of its books.

    On the thread that calls the module, which may be one of several that evaluate the model.
    """

    def __init__(self, by_names: ByName, observers: WriteObservers, lock: AbstractContextManager[Any]):
        self._by_names, self._observers, self._lock = by_names, observers, lock

    def begin(self, handles: list[ParamHandle]) -> dict[str, torch.Tensor]:
        """Begin the call of a module that may rewrite these; gives what those are now that are rewritten in place."""
        for chunk in resident_chunks(handles):
            self._observers.before_write(chunk)
        return call_without_grad(_copies_of, handles)

    def end(self, handles: list[ParamHandle], before: dict[str, torch.Tensor]) -> None:
        """End the call, and take over what it wrote; ``before``: what :meth:`begin` gave."""
        call_without_grad(self._take_over, handles, before)

    def unmerge(self, layer: Any) -> None:
        """Take the merged adapters of a tuner layer out of its weights, with the bits of PEFT."""
        handles = handles_of(layer.parameters())
        before = self.begin(handles)
        try:
            call_without_grad(layer.unmerge)
        finally:
            self.end(handles, before)

    def _take_over(self, handles: list[ParamHandle], before: dict[str, torch.Tensor]) -> None:
        with self._lock, WHOLE:
            for handle in handles:
                # PEFT sets `weight.data`: the values come into the window before torch's count is compared.
                take_in(handle)
                if handle.param._version != handle.version:
                    handle.version = handle.param._version  # torch has counted this write itself
                    handle.num_writes += 1
                    self._by_names.take_over(handle, before.get(handle.name))


def resident_chunks(handles: Iterable[ParamHandle]) -> tuple[Chunk, ...]:
    """Find the chunks whose weights are written to in place: their updates have to be over when a write begins."""
    return tuple({handle.chunk.spec.index: handle.chunk for handle in handles if handle.chunk.resident}.values())


def _copies_of(handles: Iterable[ParamHandle]) -> dict[str, torch.Tensor]:
    """Copy weights that are about to be written to in place: nothing else tells which elements were changed."""
    return {handle.name: handle.view.clone() for handle in handles if handle.chunk.resident}
