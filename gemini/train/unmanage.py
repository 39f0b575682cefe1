"""The way back: a managed model becomes an ordinary one, its weights in host memory, for what takes a model apart."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch
from torch import nn

from gemini.errors import BudgetExceeded, human_bytes
from gemini.interrupts import call_without_grad
from gemini.memory.chunks.chunk import Chunk
from gemini.train.checkpoint.saver import pending_in
from gemini.train.engine import Engine
from gemini.train.modules.coded_layers import release_layers
from gemini.train.optimizers.in_place import give_back as give_optimizer_back
from gemini.train.params.handle import ParamHandle, ParamSet
from gemini.train.params.stepper import optimizer_of


def release(model: nn.Module) -> nn.Module:
    """Make a managed model an ordinary one again: the same object, of its original class, with all its weights on the
    CPU in the compute dtype. It can be wrapped again, for example with other budgets or in another precision.

    The optimizer states and the exact masters are dropped. Optimizers of Gemini cannot be used any more; a torch
    optimizer that was converted for the model is one of torch again, and starts anew. Save a checkpoint first if you
    want to continue from it. With several ranks, call it on all of them; each gets the whole model.

    Raises:
        ValueError: for a model that is not managed.
        BudgetExceeded: if host memory has not enough free bytes for the weights. Nothing was changed.
    """
    if "_gemini_engine" not in model.__dict__:
        raise ValueError(
            f"gemini.release takes a model that GeminiDDP manages, and this {type(model).__name__} is none (give the "
            "outermost one, which was wrapped)"
        )
    unmanage(model, "gemini.release(model)")
    return model


def unmanage(model: nn.Module, what: str) -> None:
    """Make ``model`` an ordinary module with its full weights on the CPU, in the compute dtype.

    Masters, states and gradients are gone, and so are chunks, budgets and spill file. With several ranks all of them
    call it, and each gets the whole model.

    Raises:
        BudgetExceeded: if the weights need more than the free memory of the host; nothing was changed.
    """
    engine: Engine = model.__dict__["_gemini_engine"]
    engine.recovery.forget_interrupted()
    engine.drain()
    engine.state.check_whole()
    precision, chunks = engine.config.precision, engine.decision.problem.layout.chunks
    needed = sum(chunk.payload * chunk.itemsize(precision) for chunk in chunks)
    free = psutil.virtual_memory().available
    if needed > free:
        raise BudgetExceeded(
            f"{what} gives an ordinary model and needs {human_bytes(needed)} of host memory for its weights, of which "
            f"{human_bytes(free)} are free; nothing was changed. Save it (model.save_pretrained) and go on where "
            "there is more; an adapter can be merged in place with model.merge_adapter()"
        )
    optimizers = {id(o): o for handle in engine.params.handles if (o := optimizer_of(handle.param)) is not None}
    for pending in pending_in(engine.write_observers):
        pending.join()
    for hook in model.__dict__.pop("_gemini_hooks"):
        hook.remove()
    read = engine.by_names.read_whole if "_gemini_spread" in model.__dict__ else engine.by_names.read
    for put in ("_gemini_context", "_gemini_token_tiles", "_gemini_spread"):
        if (around := model.__dict__.pop(put, None)) is not None:
            around.take_away()
    call_without_grad(_give_back, engine.params, read, engine.store.chunks)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to("cpu")
    release_layers(model)
    engine.params.forget()
    model.__class__ = model._gemini_original  # type: ignore[assignment]
    del model.__dict__["_gemini_engine"]
    for optimizer in optimizers.values():
        give_optimizer_back(optimizer)


def _give_back(params: ParamSet, read: Callable[[ParamHandle], torch.Tensor], chunks: list[Chunk]) -> None:
    """Every param becomes an ordinary one, with its weights."""
    for index, handles in list(params.by_chunk.items()):
        values = [read(handle) for handle in handles]
        for handle, value in zip(handles, values, strict=True):
            param = handle.param
            if handle.hook is not None:
                handle.hook.remove()
            del param._gemini  # type: ignore[attr-defined]
            param.__class__ = handle.kind
            param.data = handle.as_it_was(value)
            handle.view = torch.empty(0, device="cpu")
        chunks[index].clear_planes()  # its home is free for the next one
