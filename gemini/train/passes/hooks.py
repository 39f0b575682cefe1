"""What is hooked into a model, and which pass each hook tells.

Modules that own params whose weights must be gathered: before forward, let go after it, and again when the gradient of
their output arrives. And *entrances* (the root, its named parts and each numbered block, where a user may call in):
they begin and end the phase in which params are ordinary, and the outermost one marks where backward enters. Nothing is
released on module backward hooks (they fire before the params' gradients) and nothing counts on pre and post being
balanced: recomputation and exceptions break that.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import COMPUTE_DTYPES, Chunk
from gemini.train.modules import changing
from gemini.train.modules.calls import CallRecord, begin_backward_of, passes_of
from gemini.train.modules.changing import CompiledParts, hook_around, refuse_compiled_whole, refuse_inside_compiled
from gemini.train.modules.mixed import MADE, cast_inputs, cast_where_they_meet
from gemini.train.modules.reading import Structure, is_a, is_tuner_layer, rewritten_by
from gemini.train.observers import innermost_transform
from gemini.train.params.by_name import Owner
from gemini.train.params.handle import ParamHandle, handles_of
from gemini.train.passes.forward import resident_chunks

ENTRANCE = re.compile(r"(?:[^.\d][^.]*\.)*(?:[^.\d][^.]*|\d+)|")
"""Paths without a numbered part, or with just one at their end: "", "model", "model.norm", "model.layers.7"."""

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks

Chunks = tuple[Chunk, ...]
Pre = Callable[[nn.Module, Any], None]
Post = Callable[[nn.Module, Any, Any], Any]


def attach(structure: Structure, passes: Owner, hooks: list[list[Any]]) -> None:
    """Register every hook on a model, and note it in ``hooks``, which is the model's own and all that is ever to be
    removed: in one list those of the root, in another those that change with what is compiled.
    """
    changing.watch(module for _, module in structure.modules)
    waits = _chunks_to_await(structure, passes)
    root, parts = list[Any](), list[Any]()
    hooks += [root, parts]
    _attach_root(structure, passes, root, waits.get("", ()), parts)
    _attach_parts(structure, passes, parts, waits)


def _attach_parts(structure: Structure, passes: Owner, hooks: list[Any], waits: Mapping[str, Chunks]) -> None:
    """Register hooks on all modules but the root, as what is compiled has it now. ``waits``: by path of an entrance,
    the resident chunks whose updates it waits for.
    """
    ref, model = weakref.ref(passes), structure.model
    gathered = [_to_gather(visit.params) for visit in structure.visits]
    keeps = {} if passes.store.manager.source.in_order else _chunks_to_keep(structure, gathered)
    for visit, chunks in zip(structure.visits, gathered, strict=True):
        if visit.is_again:
            continue
        path, module = visit.path, visit.module
        resident, keep = waits.get(path, ()), keeps.get(id(module), ())
        entrance = bool(ENTRANCE.fullmatch(path))
        rewritten = handles_of(rewritten_by(module))
        if is_a(type(module), "ParamWrapper"):  # of PEFT: it parametrizes what it is around for each forward
            # Registered before ours, so it runs before them: ours would see torch's write and refuse it.
            hooks.append(module.register_forward_hook(_after_parametrization, always_call=True))
        is_around = bool(keep) or (entrance and id(module) in structure.holders)
        if module is not model and (chunks or rewritten or is_around):
            # What it writes to in place must be updated first, or the update would overwrite what it wrote.
            if rewritten:
                resident += resident_chunks(rewritten)
            pre, post = _pre(ref, chunks, resident, keep, is_entrance=entrance), _post(ref)
            if chunks or not passes.store.moves:
                # Most hooks have nothing to do: those return at one look.
                pre, post = _unless_served(passes, chunks, resident, pre, post)
            hooks += hook_around(module, *_taking_over(ref, rewritten, pre, post))
        if is_tuner_layer(module):
            hooks.append(module.register_forward_pre_hook(partial(_unmerge_if_disabled, ref)))
    # Casts are registered after our own hooks, so they run with the weights gathered.
    dtype = COMPUTE_DTYPES[passes.config.precision]
    if dtype is not torch.float32:
        _attach_casts(structure, passes, hooks, dtype)


def _attach_casts(structure: Structure, passes: Owner, hooks: list[Any], dtype: torch.dtype) -> None:
    ref, model = weakref.ref(passes), structure.model
    kept = {key: passes.decision.kept.get(key, MADE) for key in passes.params.in_fp32}
    cast_where_they_meet(structure, kept, dtype, hooks)
    for path, module in structure.modules:
        # A named part may be called like the root: an encoder, by generate().
        is_named = ENTRANCE.fullmatch(path) and not path.rpartition(".")[2].isdigit() and module is not model
        is_python = id(module) not in structure.compiled
        if is_named and is_python and any(id(param) not in kept for param in module.parameters()):
            # In front of the gathering: a cast reads no weights, and its inputs are the user's.
            before = partial(_cast_if_outermost, ref, dtype)
            hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))


def _cast_if_outermost(ref: weakref.ref[Owner], dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast inputs where a user calls in, and not where the model itself does, or repeats it in backward."""
    passes = ref()
    inside = not passes or passes.forward.calls.depth or passes.state.in_backward
    return None if inside else cast_inputs(dtype, module, args, kwargs)


def _unmerge_if_disabled(ref: weakref.ref[Owner], layer: Any, args: Any) -> None:
    """Take merged adapters out before a layer computes without them: in its own forward the write would be refused."""
    if layer.disable_adapters and layer.merged:
        passes: Owner = passes_of(ref)
        for chunk in resident_chunks(handles_of(layer.parameters())):
            passes.forward.exposure.expose(chunk)  # after its update
        passes.forward.unmerge(layer)


def _to_gather(params: tuple[nn.Parameter, ...]) -> Chunks:
    chunks = dict.fromkeys([handle.chunk for handle in handles_of(params)])
    return tuple([chunk for chunk in chunks if not chunk.resident])


def _chunks_to_keep(structure: Structure, gathered: list[Chunks]) -> dict[int, Chunks]:
    """Find modules, by ``id``, that may keep gathered for all modules below them what these read: where one of them
    reads all of it at once anyway, so that it takes no more room. Only the outermost of them; the root is none. Not
    among ranks that gather in one order: their script lets go of chunks where the plan does. ``gathered``: what each
    visit reads that has to be gathered.
    """
    visits = structure.visits
    own = [set(chunks) for chunks in gathered]
    below, most, number = [set(chunks) for chunks in own], list(own), [int(bool(chunks)) for chunks in own]
    for at in range(len(visits) - 1, 0, -1):  # from the leaves up: a module stands behind the one around it
        around = visits[at].around
        below[around] |= below[at]
        most[around] = max(most[around], most[at], key=len)
        number[around] += number[at]
    found: dict[int, Chunks] = {}
    keeping = [False] * len(visits)
    for at, visit in enumerate(visits[1:], 1):
        keeping[at] = keeping[visit.around]
        if not keeping[at] and number[at] > 1 and below[at] == most[at]:
            keeping[at] = True
            found[id(visit.module)] = tuple(sorted(below[at] - own[at], key=lambda chunk: chunk.spec.index))
    return found


def _chunks_to_await(structure: Structure, passes: Owner) -> dict[str, Chunks]:
    """Find, by path of an entrance, the resident chunks whose updates it waits for before it computes. A block waits
    for all that it holds; what is around blocks for what it reads itself. A param that is read elsewhere is still
    guarded, and waits then.
    """
    found: dict[str, dict[int, Chunk]] = {}
    # Updates may be under way where steps overlap.
    for path, _, params, *_ in structure.readers if passes.config.overlap else ():
        around = path
        # The root's path matches, so this ends.
        while not ENTRANCE.fullmatch(around):
            around = around.rpartition(".")[0]
        for handle in handles_of(params):
            if handle.chunk.resident:
                found.setdefault(around, {})[handle.chunk.spec.index] = handle.chunk
    return {path: tuple(chunks.values()) for path, chunks in found.items()}


def _after_parametrization(module: nn.Module, args: Any, output: Any) -> None:
    """Forget a write that was none: PEFT's ParamWrapper registers a parametrization for each forward, in which torch
    sets the param to itself.
    """
    for handle in handles_of(module.parameters()):
        # A poisoned param was not looked at by that forward: its count stays, so a real write to it is still seen.
        if not handle.poisoned:
            handle.version = handle.param._version


def _taking_over(ref: weakref.ref[Owner], handles: list[ParamHandle], pre: Pre, post: Post) -> tuple[Pre, Post]:
    """Add to the hooks of a module that may write to ``handles`` what makes its writes the masters."""
    if not handles:
        return pre, post
    of_threads: dict[int, dict[str, torch.Tensor]] = {}
    """By thread, what weights were that are rewritten in place: several threads may evaluate the module at once."""

    def begin(module: nn.Module, args: Any) -> None:
        # After `pre`: only then are the weights gathered, and the updates over.
        pre(module, args)
        of_threads[threading.get_ident()] = passes_of(ref).forward.begin_rewriting(handles)

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        # Before `post`, which guards the params again and would take the write for one of the program's.
        before, passes = of_threads.pop(threading.get_ident(), None), ref()
        if before is not None and passes:
            passes.forward.end_rewriting(handles, before)
        return post(module, args, output)

    return begin, end


def _attach_root(structure: Structure, passes: Owner, hooks: list[Any], resident: Chunks, parts: list[Any]) -> None:
    """Register hooks on the root. They run while those of ``parts`` change, and so stay."""
    ref, model = weakref.ref(passes), structure.model
    chunks, rewritten = _to_gather(structure.visits[0].params), handles_of(rewritten_by(model))
    compiled = CompiledParts(structure)
    begin = partial(_begin_root, ref, compiled, parts, chunks, resident + resident_chunks(rewritten))
    pre, post = _taking_over(ref, rewritten, begin, _post(ref))
    # Ours gathers before all other hooks of the model, and lets go after them, on exceptions too (always_call).
    hooks.append(model.register_forward_pre_hook(pre, prepend=True))
    hooks.append(model.register_forward_hook(post, always_call=True))
    dtype = COMPUTE_DTYPES[passes.config.precision]
    if dtype is not torch.float32:  # where a mistake stays one
        # Prepended last, so it runs first of all.
        hooks.append(model.register_forward_pre_hook(partial(cast_inputs, dtype), prepend=True, with_kwargs=True))


def _begin_root(
    ref: weakref.ref[Owner],
    compiled: CompiledParts,
    parts: list[Any],
    chunks: Chunks,
    resident: Chunks,
    module: nn.Module,
    args: Any,
) -> None:
    """Begin a call of the whole model, ``module``."""
    passes: Owner = passes_of(ref)
    state = passes.state
    # First of all: what an interrupt has left open would make the rest of this hook go wrong. Inside another call of
    # this thread nothing was interrupted.
    if state.num_open and not passes.forward.calls.depth:
        passes.recovery.forget_interrupted()
    # Looked up and not imported: importing the compiler takes seconds.
    is_compiler_there = "torch._dynamo" in sys.modules
    if is_compiler_there:
        refuse_inside_compiled()
    if state.num_looked_at != changing.num_registered:
        changing.refuse_injected(state, module, is_root=True)
    if is_compiler_there and not state.computing and compiled.have_changed(module):
        _follow_compiled(module, passes, parts)
        compiled.note(module)
    # Before anything is gathered: what became trained needs planes, whose room windows would have taken.
    if state.requires_grad_changed and not state.computing:
        passes.forward.follow_flips()
    passes.forward.begin_call(module, chunks, resident)


def _follow_compiled(model: nn.Module, passes: Owner, parts: list[Any]) -> None:
    """Hook a model's modules anew: some were compiled, or are no longer, and what is gathered when goes by that."""
    # Updates in flight are awaited by the hooks that go now.
    passes.drain()
    structure = Structure(model)  # what is read as a whole has changed
    # Before a hook is removed: what is refused here leaves the model as it was hooked.
    refuse_compiled_whole(structure)
    waits = _chunks_to_await(structure, passes)
    with WHOLE:  # a hook that is registered and not noted would stay for good
        while parts:
            parts.pop().remove()
        _attach_parts(structure, passes, parts, waits)


def _pre(ref: weakref.ref[Owner], chunks: Chunks, resident: Chunks, keep: Chunks, *, is_entrance: bool) -> Pre:
    """Make the hook that begins the call of a module. It runs on the thread that calls the module."""

    def pre(module: nn.Module, args: Any) -> None:
        passes: Owner = ref() or passes_of(ref)
        if keep and not chunks and not is_entrance and passes.forward.observers.are_there:
            return  # it keeps nothing then, and has no other reason to be hooked
        state = passes.state
        if state.requires_grad_changed and not state.computing:
            passes.forward.follow_flips()
        if is_entrance and not state.computing:
            changing.refuse_injected(state, module, is_root=False)
        passes.forward.begin_call(module, chunks, resident, keep)

    return pre


def _unless_served(passes: Owner, chunks: Chunks, resident: Chunks, pre: Pre, post: Post) -> tuple[Pre, Post]:
    """Make the same hooks for a module inside another, for which its weights are ordinary ones already: then there is
    nothing to do but to wait for updates under way, whatever it reads, saves or leaves behind.
    """
    ref = weakref.ref(passes)  # the model alone keeps those alive
    running, observers, late = passes.forward.calls.running, passes.forward.observers, passes.forward.exposure.late
    device, own = passes.store.device, frozenset(chunks)

    def is_seen(around: CallRecord) -> bool:
        """Whether what moves is kept by our hooks where autograd saves it now, and on a stream that windows know."""
        # Other hooks may be open on top of ours (checkpointing, the program's), or none inside of a transform.
        top = _top_hooks(False) if torch.is_grad_enabled() else (around.pack,)
        return bool(top) and top[0] is around.pack and device.stream_number() == around.stream

    def pre_unless_served(module: nn.Module, args: Any) -> None:
        stack = running.get(threading.get_ident())
        around = stack[-1] if stack else None
        if around is None or observers.are_there or not own <= around.exposed or (own and not is_seen(around)):
            pre(module, args)
            return
        if resident and late:
            passes_of(ref).forward.exposure.catch_up(resident)
        around.inside.append(module)

    def post_unless_served(module: nn.Module, args: Any, output: Any) -> Any:
        stack = running.get(threading.get_ident())
        if not stack or module not in (inside := stack[-1].inside):
            return post(module, args, output)
        while inside.pop() is not module:  # what is inside of it may have had no end of its own
            pass
        return None

    return pre_unless_served, post_unless_served


def _post(ref: weakref.ref[Owner]) -> Post:
    """Make the hook that ends the call of a module, and notices when its backward begins."""

    def post(module: nn.Module, args: Any, output: Any) -> Any:
        passes: Owner = ref() or passes_of(ref)
        record = passes.forward.end_call(module)
        if not record or output is None:
            return None
        for recording in passes.forward.observers.recordings:
            recording.watch_backward(module, output)
        # A transform wraps its tensors: a hook on one would never be called.
        if not torch.is_grad_enabled() or innermost_transform() is not None:
            return None
        # A recomputation is outermost in its thread as well, and its backward is running already.
        outermost = not record.parent and not passes.state.in_backward
        if record.chunks or outermost:
            record.on_gradient(output, partial(begin_backward_of, ref, record))
        return None

    return post
