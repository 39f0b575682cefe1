"""A param that an operation reads outside its own module's forward: served as a call of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gemini.errors import ParamAccessError
from gemini.train.modules.calls import CallRecord
from gemini.train.modules.containers import iter_tensors
from gemini.train.params.guard import ParamHandle, engine_of

if TYPE_CHECKING:
    from gemini.train.engine import Engine


def read_in_call(engine: Engine, func: Callable[..., Any], args: Any, kwargs: Any, handles: list[ParamHandle]) -> Any:
    """An operation reads params outside their own module's forward, while the model computes.

    The operation is a call of its own: its chunks are gathered for it, and again when the gradient of its result
    arrives. A result that is a view of the weights lends them to the call around it.
    """
    chunks = {handle.chunk.spec.index: handle.chunk for handle in handles}
    for chunk in chunks.values():
        if chunk.resident:
            engine.exposure.expose(chunk)
    moving = tuple(chunk for chunk in chunks.values() if not chunk.resident)
    if not moving:
        return func(*args, **kwargs)
    record = CallRecord(None, moving, engine.calls.innermost)
    with engine.open_gathered(moving):
        result = func(*args, **kwargs)
    with engine.lock:
        for chunk in moving:
            if engine.saved_weights.is_lent(chunk):
                engine.lend(chunk)
    for tensor in iter_tensors(result):
        record.on_gradient(tensor, lambda grad: engine_of(handles[0]).begin_backward_of(record))
    engine.exposure.refuse_writes()
    return result


def read_outside(engine: Engine, func: Callable[..., Any], args: Any, kwargs: Any, handles: list[ParamHandle]) -> Any:
    """An operation that autograd records reads params while no module computes: a loss with a weight in it.

    Raises:
        ParamAccessError: if the result is a view of weights that autograd does not follow: a write to it would leave
            masters behind.
    """
    engines = {id(owner): owner for owner in map(engine_of, handles)}
    storages = {handle.chunk.face.untyped_storage()._cdata: handle for handle in handles}
    with contextlib.ExitStack() as stack:
        for owner in engines.values():
            owner.begin_reading()
            chunks = {h.chunk.spec.index: h.chunk for h in handles if h.engine() is owner}
            stack.enter_context(owner.open_gathered(chunks.values()))
        result = func(*args, **kwargs)
    for tensor in iter_tensors(result):
        if not tensor.requires_grad and _storage_of(tensor) in storages:
            handle = storages[_storage_of(tensor)]
            raise ParamAccessError(
                f"{getattr(func, '__name__', func)} of managed param {handle.name!r} outside of forward gives a view "
                "of its weights, which live in a chunk. Use model.full_param(name) or model.gathered([param])"
            )
    return result


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except RuntimeError:  # sparse, or a wrapper without memory of its own
        return None
