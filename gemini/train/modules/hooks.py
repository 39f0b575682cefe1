"""What is hooked into a model, and what each hook tells the engine.

Two kinds of modules are hooked. Modules that own params whose weights must be gathered: gather before forward, let go
after it, gather again when the gradient of their output arrives. And *entrances* (the root, its named parts and each
numbered block, where a user may call in): they begin and end the phase in which params are ordinary, and the outermost
one marks where backward enters. Nothing is released on module backward hooks (they fire before the params' gradients)
and nothing counts on pre and post being balanced: recomputation and exceptions break that.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import Chunk
from gemini.train.gradients.scaled_backward import ScaleGradient
from gemini.train.modules.compiled import CompiledParts, hook_around, make_room_for_compiled, refuse_inside_compiled
from gemini.train.modules.containers import iter_tensors, map_tensors
from gemini.train.modules.injected import refuse_injected, watch
from gemini.train.modules.reading import is_a, params_read_by, readers
from gemini.train.modules.renormalized import renormalized_by, resident_chunks, taking_over
from gemini.train.modules.transforms import is_transforming
from gemini.train.params.guard import handle_of
from gemini.train.setup.build import follow_requires_grad

if TYPE_CHECKING:
    from gemini.train.engine import Engine
    from gemini.train.modules.calls import CallRecord

ENTRANCE = re.compile(r"(?:[^.\d][^.]*\.)*(?:[^.\d][^.]*|\d+)|")
"""Paths without a numbered part, or with just one at their end: "", "model", "model.norm", "model.layers.7"."""

NUM_ROOT_HOOKS = 2
"""Of the list of hooks the first ones are the root's, which run while others change."""


def attach(model: nn.Module, engine: Engine) -> list[Any]:
    """Register every hook on ``model``. They refer to the engine weakly: the model alone keeps it alive.

    The list changes with what is compiled: it is the model's own, and all that is ever to be removed.
    """
    hooks: list[Any] = []
    watch(model)
    try:
        _attach_root(model, engine, hooks)
        _attach_parts(model, engine, hooks)
    except BaseException:
        for hook in hooks:
            hook.remove()
        raise
    return hooks


def _attach_parts(model: nn.Module, engine: Engine, hooks: list[Any]) -> None:
    """Hooks on all but the root, as what is compiled has it now."""
    ref = weakref.ref(engine)
    waits = _chunks_to_await(model) if engine.config.overlap else {}
    gathers_none = all(chunk.resident for chunk in engine.chunks)
    for path, module, params in readers(model):
        chunks, resident = _chunks_to_gather(params), waits.get(path, ())
        entrance = ENTRANCE.fullmatch(path) is not None
        rewritten = renormalized_by(module)
        if is_a(type(module), "ParamWrapper"):
            hooks.append(module.register_forward_hook(_after_parametrization, always_call=True))
        if module is not model and (chunks or rewritten or (entrance and any(True for _ in module.parameters()))):
            resident = (*resident, *resident_chunks(rewritten))
            pre, post = _pre(ref, chunks, resident, is_entrance=entrance), _post(ref, is_root=False)
            if gathers_none:
                pre, post = _unless_inside(ref, resident, pre, post)
            hooks += hook_around(module, *taking_over(ref, rewritten, pre, post))


def _chunks_to_gather(params: tuple[nn.Parameter, ...]) -> tuple[Chunk, ...]:
    chunks: dict[int, Chunk] = {}
    for param in params:
        handle = handle_of(param)
        if handle is not None and not handle.chunk.resident:
            chunks[handle.chunk.spec.index] = handle.chunk
    return tuple(chunks.values())


def _chunks_to_await(model: nn.Module) -> dict[str, tuple[Chunk, ...]]:
    """By path of an entrance: the resident chunks whose updates it waits for before it computes.

    A block waits for all that it holds; what is around blocks for what it reads itself. A param that is read elsewhere
    is still guarded, and waits then.
    """
    found: dict[str, dict[int, Chunk]] = {}
    for path, _, params in readers(model):
        around = path
        while ENTRANCE.fullmatch(around) is None:
            around = around.rpartition(".")[0]
        for param in params:
            handle = handle_of(param)
            if handle is not None and handle.chunk.resident:
                found.setdefault(around, {})[handle.chunk.spec.index] = handle.chunk
    return {path: tuple(chunks.values()) for path, chunks in found.items()}


def _after_parametrization(module: nn.Module, args: Any, output: Any) -> None:
    """PEFT's ParamWrapper registers a parametrization for each forward, in which torch sets the param to itself: to
    torch a write, and nothing was written.
    """
    for param in module.parameters():
        handle = handle_of(param)
        if handle is not None and not handle.poisoned:
            handle.version = param._version


def _engine(ref: weakref.ref[Engine]) -> Engine:
    engine = ref()
    if engine is None:
        raise GeminiError("the GeminiDDP model this module belonged to was deleted: its weights are gone")
    return engine


def _attach_root(model: nn.Module, engine: Engine, hooks: list[Any]) -> None:
    ref = weakref.ref(engine)
    own = tuple(param for param in params_read_by(model))
    resident = _chunks_to_await(model).get("", ()) if engine.config.overlap else ()
    resident += resident_chunks(renormalized_by(model))
    begin = _pre(ref, _chunks_to_gather(own), resident, is_entrance=True)
    compiled = CompiledParts(model)

    def root_pre(module: nn.Module, args: Any) -> None:
        engine = _engine(ref)
        if not engine.state.in_method and not engine.calls.depth:
            engine.recover_if_interrupted()
        refuse_injected(engine, module, is_root=True)
        refuse_inside_compiled()
        if not engine.state.computing and compiled.have_changed(module):
            follow_compiled(module, engine)
            compiled.note(module)
        begin(module, args)

    pre, post = taking_over(ref, renormalized_by(model), root_pre, _post(ref, is_root=True))
    hooks.append(model.register_forward_pre_hook(pre, prepend=True))
    hooks.append(model.register_forward_hook(post, always_call=True))


def follow_compiled(model: nn.Module, engine: Engine) -> None:
    """Parts of the model were compiled, or are no longer: what is gathered when goes by that.

    Raises:
        GeminiError: if the whole was compiled.
        BudgetExceeded: if there is no room for what a part reads at once.
    """
    make_room_for_compiled(engine, model)
    hooks = model.__dict__["_gemini_hooks"]
    for hook in hooks[NUM_ROOT_HOOKS:]:
        hook.remove()
    del hooks[NUM_ROOT_HOOKS:]
    _attach_parts(model, engine, hooks)


def call_as_forward(model: nn.Module, engine: Engine, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a method of ``model`` as its forward runs: params are ordinary, and a loss that it returns is the model's.

    Calls of the model inside, ``model(x)`` too, are parts of it.
    """
    own = model.__dict__.get("forward")

    def restore() -> None:
        model.__dict__.pop("forward", None)
        if own is not None:
            model.__dict__["forward"] = own

    def forward(*args: Any, **kwargs: Any) -> Any:
        restore()
        with engine.state.method():
            return method(*args, **kwargs)

    model.__dict__["forward"] = forward
    try:
        return model(*args, **kwargs)
    finally:
        restore()


def _pre(
    ref: weakref.ref[Engine], chunks: tuple[Chunk, ...], resident: tuple[Chunk, ...], *, is_entrance: bool
) -> Callable[[nn.Module, Any], None]:
    def pre(module: nn.Module, args: Any) -> None:
        engine = _engine(ref)
        if engine.state.requires_grad_changed and not engine.state.computing and engine.state.take_flips():
            follow_requires_grad(engine)
        if is_entrance and not engine.state.computing:
            refuse_injected(engine, module, is_root=False)
        if not engine.state.in_backward:
            engine.activations.begin_forward()
        engine.begin_call(module, chunks, resident)

    return pre


def _unless_inside(
    ref: weakref.ref[Engine],
    resident: tuple[Chunk, ...],
    pre: Callable[[nn.Module, Any], None],
    post: Callable[[nn.Module, Any, Any], Any],
) -> tuple[Callable[[nn.Module, Any], None], Callable[[nn.Module, Any, Any], Any]]:
    """The same where no weight ever moves: inside another module there is nothing to do but wait for updates."""

    def pre_unless_inside(module: nn.Module, args: Any) -> None:
        engine = _engine(ref)
        if engine.recording is not None or not engine.calls.is_inside_another(module):
            pre(module, args)
        elif resident:
            engine.exposure.catch_up(resident)

    def post_unless_inside(module: nn.Module, args: Any, output: Any) -> Any:
        # What is innermost now was so before: a call that was noted is that of this module.
        return None if _engine(ref).calls.is_inside_another(module) else post(module, args, output)

    return pre_unless_inside, post_unless_inside


def _post(ref: weakref.ref[Engine], *, is_root: bool) -> Callable[[nn.Module, Any, Any], Any]:
    def post(module: nn.Module, args: Any, output: Any) -> Any:
        engine = _engine(ref)
        record = engine.end_call(module)
        if not engine.calls.running:
            engine.activations.end_forward()
        if record is None or output is None:
            return None
        if engine.recording is not None:
            engine.recording.watch_backward(module, output)
        if not torch.is_grad_enabled() or is_transforming():
            return None
        outermost = record.parent is None and not engine.state.in_backward
        if engine.loss_scale is not None and outermost:
            output = _enter_scale(output, engine, is_root=is_root)
            _hook_outputs(output, ref, record)
            return output
        if record.chunks or outermost:
            _hook_outputs(output, ref, record)
        return None

    return post


def _enter_scale(output: Any, engine: Engine, *, is_root: bool) -> Any:
    """fp16: the loss that the model has computed is where its own loss scale enters in a plain backward."""
    engine.scaling.watch_outputs(output)
    if not is_root:
        return output
    ref = engine.self_reference
    return map_tensors(output, lambda t: ScaleGradient.apply(t, ref) if t.dim() == 0 and t.requires_grad else t)


def _hook_outputs(output: Any, ref: weakref.ref[Engine], record: CallRecord) -> None:
    def begin(grad: torch.Tensor) -> None:
        _engine(ref).begin_backward_of(record)

    for tensor in iter_tensors(output):
        record.on_gradient(tensor, begin)
