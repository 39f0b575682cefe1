"""Params become managed, and ordinary ones again: their values move home, and back if the model cannot be wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from gemini.interrupts import call_without_grad
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.store import ChunkStore
from gemini.train.modules.saved_weights import SavedWeights
from gemini.train.params.by_name import ByName
from gemini.train.params.exposure import Exposure, poison
from gemini.train.params.handle import ParamHandle, ParamSet, find_siblings
from gemini.train.params.owner import GradHook
from gemini.train.params.stepper import reference_to_optimizer_of


class _Taken(NamedTuple):
    """What it takes to give a param back as it was: its dtype, and its values where its home has not all their bits."""

    handle: ParamHandle
    dtype: torch.dtype
    original: torch.Tensor | None


class Adoption:
    """The params of one model change hands.

    Args:
        grad_hook: makes what takes the gradients of a param.
        is_divided: whether the rest of each param is on other ranks.
    """

    def __init__(
        self, params: ParamSet, store: ChunkStore, by_names: ByName, exposure: Exposure, saved_weights: SavedWeights, *,
        grad_hook: GradHook, is_divided: bool,
    ):  # fmt: skip
        self._params, self._chunks, self._by_names = params, store.chunks, by_names
        self._exposure, self._saved_weights, self._is_divided = exposure, saved_weights, is_divided
        self._grad_hook, self._taken = grad_hook, list[_Taken]()
        self._is_whole = False

    def take_all(self, *, filled: bool = False) -> None:
        """Move the params home one by one. If one cannot be moved, those that were are given back as they were.

        ``filled``: the homes hold the values already; such a model has nothing to go back to.
        """
        try:
            for index, handles in self._params.by_chunk.items():
                for handle in handles:
                    self._taken.append(_Taken(handle, *self._take(handle, filled)))
                if self._chunks[index].gathered:
                    self._exposure.hide(self._chunks[index])
                else:
                    self._exposure.poison(self._chunks[index])
                    self._saved_weights.watch(self._chunks[index], handles)
        except BaseException:
            if self._is_divided:
                raise  # other ranks may be past this point: the model must be made anew
            self.give_back()
            raise
        find_siblings(self._params.handles)
        if filled:
            self.keep()

    def give_back(self, *, whole: bool = False) -> None:
        """Make taken params ordinary ones again: with the values they had, as long as that can be done; once the model
        is whole, with those they have by then, on the CPU in the compute dtype.

        Args:
            whole: whether params that are slices become whole ones.
        """
        if self._is_whole:
            call_without_grad(self._let_go, self._by_names.read_whole if whole else self._by_names.read)
        elif not self._is_divided:
            for handle, dtype, original in self._taken:
                value = original
                if value is None:
                    value = handle.as_it_was(self._by_names.read(handle, torch.float32).to(dtype))
                _make_ordinary(handle, value)
        else:
            return
        self._params.forget()

    def _let_go(self, read: Callable[[ParamHandle], torch.Tensor]) -> None:
        for index, handles in list(self._params.by_chunk.items()):
            values = [read(handle) for handle in handles]
            for handle, value in zip(handles, values, strict=True):
                _make_ordinary(handle, handle.as_it_was(value))
                handle.view = torch.empty(0, device="cpu")
            self._chunks[index].clear_planes()  # its home is free for the next one

    def keep(self) -> None:
        """The model is whole: there is no way back to what it was."""
        self._taken.clear()
        self._is_whole = True

    def _take(self, handle: ParamHandle, filled: bool) -> tuple[torch.dtype, torch.Tensor | None]:
        """Move one param's values home and make it a view of its chunk; returns what undoing that needs.

        Its dtype is enough, unless it is frozen and gets narrower, or float64: then the original is kept until the
        model is whole.
        """
        param = handle.param
        original = param.data
        if not filled:
            self._by_names.write(handle, original)
            like = torch.empty_like(original, device="meta")  # of a view with gaps: dense, with its order of dims
            handle.layout = None if like.is_contiguous() else like.stride()
        param.grad = None
        param.data = handle.view
        handle.version = param._version
        param._gemini = handle  # type: ignore[attr-defined]
        handle.trained, handle.optimizer = param.requires_grad, reference_to_optimizer_of(param)
        if handle.trained:
            handle.hook = param.register_post_accumulate_grad_hook(self._grad_hook(handle))
        narrowed = not handle.chunk.spec.trainable and original.dtype.itemsize > param.dtype.itemsize
        return original.dtype, original if narrowed or original.dtype.itemsize > 4 else None


def _make_ordinary(handle: ParamHandle, value: torch.Tensor) -> None:
    param = handle.param
    if handle.hook is not None:
        handle.hook.remove()
    del param._gemini  # type: ignore[attr-defined]
    param.__class__ = handle.kind
    param.data = value


def take_apart(chunks: Iterable[Chunk], handles: Iterable[ParamHandle]) -> None:
    """The model ends: params refuse to be read, and neither they nor a chunk that somebody keeps hold any memory."""
    handles = list(handles)
    poison(handles)
    for handle in handles:
        handle.view = torch.empty(0, device="cpu")
        if handle.hook is not None:
            handle.hook.remove()
    for chunk in chunks:
        chunk.clear_planes()
        chunk.window = chunk.lender = None
        chunk.on_gone.clear()
        chunk.flat = chunk.face = torch.empty(0, dtype=chunk.flat.dtype, device="cpu")
