"""``step_in_backward``: gradients are used inside backward, as soon as those of a whole chunk are there.

With transient gradients from where autograd left them; else from the grad planes, in the backward that is the last of
its step: the one outside ``no_sync()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import Chunk
from gemini.train.params.guard import ParamHandle, optimizer_of, stepping_in_backward

if TYPE_CHECKING:
    from gemini.train.engine import Engine
    from gemini.train.update.optimizer import HybridOptimizer


def use_in_backward(engine: Engine, handle: ParamHandle, grad: torch.Tensor) -> None:
    """Collect a transient gradient (as far as this rank keeps it) for the update of its chunk.

    Raises:
        GeminiError: if no optimizer owns the param, or it got a gradient in this backward already.
    """
    if handle.in_backward == engine.state.backward_number:
        raise GeminiError(
            f"{handle.name!r} got its gradient in two parts (shared under reentrant checkpointing), the first of which "
            'may be used already: gradients="transient" cannot be used with this model; use gradients="retain"'
        )
    optimizer = optimizer_of(handle.param)
    if optimizer is None:
        raise GeminiError(
            f'gradients="transient": no HybridAdam(step_in_backward=True) owns {handle.name!r}, so its gradient '
            "would be lost. Give all trained params to the optimizer before the first backward, or freeze this one"
        )
    engine.updates.collect(optimizer.param_update(engine, handle, grad.detach().contiguous().view(-1)))
    handle.in_backward = engine.state.backward_number


def refuse_used(engine: Engine, handle: ParamHandle) -> None:
    """Refuse another part of a gradient that was used in this backward already.

    Raises:
        GeminiError: it would be another step of this param.
    """
    if handle.in_backward == engine.state.backward_number:
        raise GeminiError(
            f"{handle.name!r} got its gradient in two parts (shared under reentrant checkpointing), and "
            "HybridAdam(step_in_backward=True) has used the first one: leave step_in_backward out, or checkpoint with "
            "use_reentrant=False"
        )


def step_landed(engine: Engine, chunk: Chunk) -> None:
    """Update the params of a chunk whose gradients are in the grad plane, and whose optimizer steps in backward.

    Raises:
        NonFiniteGradient: for inf or NaN; nothing of the chunk was touched. Where the update runs on a device with
            kernels of its own that is told when the step ends.
    """
    if not stepping_in_backward or engine.config.gradients == "transient":
        return
    ready: list[tuple[ParamHandle, HybridOptimizer]] = []
    for handle in engine.by_chunk.get(chunk.spec.index, ()):
        optimizer = optimizer_of(handle.param) if handle.has_grad else None
        if optimizer is not None and optimizer.step_in_backward:
            ready.append((handle, optimizer))
    if not ready:
        return
    engine.gradients.drain()
    handles = [handle for handle, _ in ready]
    stop = engine.updates.unseen.stop_for_landed(engine.mover, chunk, handles, engine.rule)
    if stop is None:
        engine.gradients.check_finite(handles)
    for handle, optimizer in ready:
        engine.updates.collect(optimizer.param_update(engine, handle, None))
        handle.norm_sums = None
        handle.in_backward = engine.state.backward_number
    engine.updates.complete(chunk, stop=stop)
