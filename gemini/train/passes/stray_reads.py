"""A param that an operation reads outside its own module's forward: served as a call of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gemini.errors import ParamAccessError
from gemini.memory.chunks.chunk import Chunk
from gemini.train.modules.calls import CallRecord, iter_tensors
from gemini.train.params.handle import ParamHandle
from gemini.train.params.owner import owner_of
from gemini.train.passes.forward import ForwardPass


class StrayReads:
    """Those of one model's params.

    Args:
        begin_backward_of: what to call when the gradient of an operation's result arrives; it does not keep the model.
    """

    def __init__(self, forward: ForwardPass, begin_backward_of: Callable[[CallRecord, torch.Tensor], None]):
        self._forward, self._begin_backward_of = forward, begin_backward_of

    def in_call(self, func: Callable[..., Any], args: Any, kwargs: Any, handles: list[ParamHandle]) -> Any:
        """An operation reads params outside their own module's forward, while the model computes.

        The operation is a call of its own: its chunks are gathered for it, and again when the gradient of its result
        arrives. A result that is a view of the weights lends them to the call around it.
        """
        forward = self._forward
        chunks = {handle.chunk.spec.index: handle.chunk for handle in handles}
        for chunk in chunks.values():
            if chunk.resident:
                forward.exposure.expose(chunk)
        moving = tuple(chunk for chunk in chunks.values() if not chunk.resident)
        if not moving:
            return func(*args, **kwargs)
        record, begin = CallRecord(None, moving, forward.calls.innermost), self._begin_backward_of
        with forward.opened(moving):
            result = func(*args, **kwargs)
        forward.lend_what_is_left(moving)
        record.on_gradient(result, partial(begin, record))
        forward.exposure.refuse_writes()
        return result

    @contextmanager
    def opened(self, chunks: Iterable[Chunk]) -> Iterator[None]:
        """Around an operation that reads ``chunks`` while no module computes."""
        self._forward.begin_reading()
        with self._forward.opened(chunks):
            yield

    def outside(self, func: Callable[..., Any], args: Any, kwargs: Any, handles: list[ParamHandle]) -> Any:
        """An operation that autograd records reads params while no module computes: a loss with a weight in it.

        Raises:
            ParamAccessError: if the result is a view of weights that autograd does not follow: a write to it would
                leave masters behind.
        """
        owners = {id(owner): owner for owner in map(owner_of, handles)}
        storages = {handle.chunk.face.untyped_storage()._cdata: handle for handle in handles}
        with contextlib.ExitStack() as stack:
            for owner in owners.values():
                chunks = {h.chunk.spec.index: h.chunk for h in handles if h.owner() is owner}
                stack.enter_context(owner.reads.opened(chunks.values()))
            result = func(*args, **kwargs)
        for tensor in iter_tensors(result):
            if not tensor.requires_grad and _storage_of(tensor) in storages:
                handle = storages[_storage_of(tensor)]
                raise ParamAccessError(
                    f"{getattr(func, '__name__', func)} of managed param {handle.name!r} outside of forward gives a "
                    "view of its weights, which live in a chunk. Use model.full_param(name) or model.gathered([param])"
                )
        return result


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except RuntimeError:  # sparse, or a wrapper without memory of its own
        return None
