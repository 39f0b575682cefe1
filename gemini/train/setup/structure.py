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
from gemini.train.modules.codes import scales_in
from gemini.train.modules.mixed import KeepFp32, kept_in_fp32
from gemini.train.modules.reading import Structure, own_buffers, own_params, structure_of
from gemini.train.params.handle import is_in_stages


def _buffer_bytes(structure: Structure) -> int:
    """Bytes of all buffers and of the scales of codes, those that share memory once."""
    buffers = [buffer for _, module in structure.modules for buffer in own_buffers(module).values()]
    coded = [(names[0], param) for param, names in structure.params if id(param) in structure.coded]
    dense = [b for b in (*buffers, *scales_in(coded).values()) if b.layout is torch.strided]
    # By storage: views of one count once, with all of it.
    storages = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in dense}
    return sum(storages.values())


def working_set(model: nn.Module, layout: Layout, precision: str) -> int:
    """Bytes of gathered weights that one module needs at once: its own chunks and those of the modules around it."""
    return gathered_at_once(structural_trace(model, precision), layout, precision)


def structural_trace(
    model: nn.Module | Structure, precision: str, keep_fp32: KeepFp32 = "auto", *, target: str = "cpu"
) -> MemoryTrace:
    """The moments of ``model`` as its modules are declared, forward and then backward in reverse.

    A moment holds what one module reads, what the modules around it read, and, because a module that owns params may
    read its leaf children's weights itself (``out_proj.weight`` in an attention module that calls a fused op), theirs.
    So the largest set of chunks over the moments is the room that gathered weights need whatever forward does.
    """
    structure = structure_of(model)
    return trace_of(structure, precision, kept_in_fp32(structure, precision, keep_fp32), target=target)


def trace_of(structure: Structure, precision: str, kept: Collection[int], *, target: str = "cpu") -> MemoryTrace:
    """The same, where it is known which params stay in fp32 (``kept``, by their ``id``)."""
    params = tuple(
        [
            TracedParam(
                names,
                tuple(param.shape),
                # As its layout has it: adapters that are switched off may be trained later.
                trainable=param.requires_grad or id(param) in structure.adapters,
                apart=is_in_stages(param),
                coded=id(param) in structure.coded,
                fp32=id(param) in kept,
            )
            for param, names in structure.params
        ]
    )
    index_of = {id(param): index for index, (param, _) in enumerate(structure.params)}
    moments: list[Moment] = []
    owns: list[list[int]] = []
    gathered: list[frozenset[int]] = []  # by the place of a visit: what it and those around it read
    for visit in structure.visits:
        # Visits come in the order of declaration: what is around a module was visited before it.
        around = frozenset[int]() if visit.around is None else gathered[visit.around]
        own = [index_of[id(param)] for param in visit.params]
        gathered.append(around.union(own))
        if own:
            # A child without children of its own: its owner may read its weight without calling it.
            leaves = [child for child in visit.module.children() if not any(child.children())]
            reachable = [index_of[id(p)] for leaf in leaves for p in own_params(leaf).values()]
            moments.append(Moment(Phase.FORWARD, visit.path, tuple(sorted(gathered[-1].union(reachable)))))
            owns.append(own)
    done: set[int] = set()
    backward: list[Moment] = []
    for moment, own in zip(moments, owns, strict=True):  # a shared param's gradient is complete at its first use
        complete = [index for index in own if params[index].trainable and index not in done]
        done.update(complete)
        backward.append(Moment(Phase.BACKWARD, moment.module, moment.params, gradients=tuple(sorted(set(complete)))))
    return MemoryTrace(
        model=type(structure.model).__name__,
        precision=precision,
        batch={},
        tokens=0,
        target=target,
        source=Source.STRUCTURE,
        params=params,
        moments=(*moments, *reversed(backward)),
        buffer_bytes=_buffer_bytes(structure),
    )
