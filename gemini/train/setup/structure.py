"""A trace from the order of a model's modules alone: what is read together, before anything is known of a step.

It has no work, no bytes and no batch. Its moments are what the engine reserves room for when it is given no trace: each
module that reads params, with those around it gathered, once in declaration order and once in reverse. The names, ties
and shapes that every trace of a model begins with come from here too.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from gemini.planning.layout import Layout
from gemini.planning.trace import MemoryTrace, Moment, Phase, Source, TracedParam
from gemini.planning.working import gathered_at_once
from gemini.train.modules.mixed import KeepFp32, kept_in_fp32
from gemini.train.modules.reading import adapter_params, is_read_as_a_whole, params_read_by
from gemini.train.params.codes import is_coded, scales_in
from gemini.train.params.handle import is_in_stages


def distinct_params(model: nn.Module) -> list[tuple[nn.Parameter, tuple[str, ...]]]:
    """Every param once, in declaration order, with all names it goes by."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), (param, []))[1].append(name)
    return [(param, tuple(names)) for param, names in found.values()]


def traced_params(model: nn.Module, kept: Collection[int]) -> tuple[TracedParam, ...]:
    """The params of a trace of ``model``, trained or frozen as its layout has them.

    Args:
        kept: by their ``id`` those that stay in fp32.
    """
    adapters = adapter_params(model)
    return tuple(
        TracedParam(
            names,
            tuple(param.shape),
            param.requires_grad or id(param) in adapters,
            is_in_stages(param),
            is_coded(param),
            id(param) in kept,
        )  # fmt: skip
        for param, names in distinct_params(model)
    )


def buffer_bytes(model: nn.Module) -> int:
    """Bytes of all buffers and of the scales of codes, those that share memory once."""
    dense = [b for b in (*model.buffers(), *scales_in(model).values()) if b.layout is torch.strided]
    storages = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in dense}
    return sum(storages.values())


def working_set(model: nn.Module, layout: Layout, precision: str) -> int:
    """Bytes of gathered weights that one module needs at once: its own chunks and those of the modules around it."""
    return gathered_at_once(structural_trace(model, precision), layout, precision)


def read_together(model: nn.Module) -> tuple[tuple[int, ...], ...]:
    """The sets of params that modules of ``model`` may read at once: those of its structural trace, each once."""
    moments = structural_trace(model, "bf16").moments
    return tuple(dict.fromkeys(moment.params for moment in moments))


def structural_trace(
    model: nn.Module, precision: str, keep_fp32: KeepFp32 = "auto", *, target: str = "cpu"
) -> MemoryTrace:
    """The moments of ``model`` as its modules are declared, forward and then backward in reverse.

    A moment holds what one module reads, what the modules around it read, and, because a module that owns params may
    read its leaf children's weights itself (``out_proj.weight`` in an attention module that calls a fused op), theirs.
    So the largest set of chunks over the moments is the room that gathered weights need whatever forward does.
    """
    params = traced_params(model, kept_in_fp32(model, precision, keep_fp32))
    index_of = {id(param): index for index, (param, _) in enumerate(distinct_params(model))}
    moments: list[Moment] = []
    owns: list[list[int]] = []

    def visit(module: nn.Module, path: str, around: frozenset[int]) -> None:
        own = [index_of[id(p)] for p in params_read_by(module)]
        if own:
            leaves = [child for child in module.children() if not any(child.children())]
            reachable = [index_of[id(p)] for leaf in leaves for p in leaf._parameters.values() if p is not None]
            around |= frozenset(own)
            moments.append(Moment(Phase.FORWARD, path, tuple(sorted(around | frozenset(reachable)))))
            owns.append(own)
        if is_read_as_a_whole(module):
            return
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name, around)

    visit(model, "", frozenset())
    done: set[int] = set()
    backward: list[Moment] = []
    for moment, own in zip(moments, owns, strict=True):  # a shared param's gradient is complete at its first use
        complete = [index for index in own if params[index].trainable and index not in done]
        done.update(complete)
        backward.append(Moment(Phase.BACKWARD, moment.module, moment.params, gradients=tuple(sorted(set(complete)))))
    return MemoryTrace(
        model=type(model).__name__,
        precision=precision,
        batch={},
        tokens=0,
        target=target,
        source=Source.STRUCTURE,
        params=params,
        moments=(*moments, *reversed(backward)),
        buffer_bytes=buffer_bytes(model),
    )
