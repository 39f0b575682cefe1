"""Weights that are rewritten inside a forward: by ``nn.Embedding(max_norm=...)`` and ``nn.EmbeddingBag(max_norm=...)``,
and by adapters of PEFT.

Before it looks rows up, such an embedding scales those that are longer than ``max_norm``, in place and unseen by
autograd. What it has written becomes the master exactly as in ``gathered(write=True)``, before the module's call ends:
elements that changed have no residual any more, the others keep theirs. A module of the program's own that has a number
called ``max_norm``, and calls ``F.embedding(..., max_norm=self.max_norm)``, is served alike. So are the rotations of
OFT with ``coft=True`` and the prompts of CPT, which bound themselves in each forward, and layers with a merged adapter
that is disabled, which take it out of the weights first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from gemini.interrupts import WHOLE, call_without_grad
from gemini.memory.chunks.chunk import Chunk
from gemini.train.modules.reading import Structure, rewritten_by
from gemini.train.params.by_name import ByName
from gemini.train.params.exposure import take_in
from gemini.train.params.handle import ParamHandle, handle_of
from gemini.train.write_observers import WriteObservers

Pre = Callable[[nn.Module, Any], None]
Post = Callable[[nn.Module, Any, Any], Any]


def refuse_on_ranks(structure: Structure) -> None:
    """Refuse embeddings that every rank would renormalize for its own batch, so that weights would part.

    Raises:
        ValueError: naming the module.
    """
    for path, module in structure.modules:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"{path or 'the model'!r} ({type(module).__name__}) has max_norm={module.max_norm}: it rewrites the "
                "rows of its batch in every forward, and on several ranks each would rewrite others. Set max_norm=None "
                "and renormalize between steps, inside model.gathered([weight], write=True)"
            )


def renormalized_by(module: nn.Module) -> tuple[ParamHandle, ...]:
    """The params that a call of ``module`` may rewrite, whatever is merged into it."""
    params = rewritten_by(module)
    return _handles(params) if params else ()


def _handles(params: Iterable[nn.Parameter]) -> tuple[ParamHandle, ...]:
    return tuple(handle for handle in map(handle_of, params) if handle is not None)


def resident_chunks(handles: tuple[ParamHandle, ...]) -> tuple[Chunk, ...]:
    """Those that are rewritten in place: their updates have to be over when the call begins."""
    return tuple({handle.chunk.spec.index: handle.chunk for handle in handles if handle.chunk.resident}.values())


class Rewriting:
    """Makes rewritten weights the masters of one model. ``lock``: of its books."""

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
        handles = _handles(layer.parameters())
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


def taking_over(
    rewriting: Callable[[], Rewriting | None], handles: tuple[ParamHandle, ...], pre: Pre, post: Post
) -> tuple[Pre, Post]:
    """The hooks of a module that may rewrite ``handles``: what they are together with its ordinary hooks.

    ``rewriting`` gives None when the model is no more.
    """
    if not handles:
        return pre, post
    of_threads: dict[int, dict[str, torch.Tensor]] = {}
    """By thread: what weights were that are rewritten in place, where nothing else tells."""

    def begin(module: nn.Module, args: Any) -> None:
        pre(module, args)
        ours = rewriting()
        assert ours is not None  # the hook before would have said so
        of_threads[threading.get_ident()] = ours.begin(handles)

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        before, ours = of_threads.pop(threading.get_ident(), None), rewriting()
        if before is not None and ours is not None:
            ours.end(handles, before)
        return post(module, args, output)

    return begin, end


def _copies_of(handles: tuple[ParamHandle, ...]) -> dict[str, torch.Tensor]:
    return {handle.name: handle.view.clone() for handle in handles if handle.chunk.resident}
