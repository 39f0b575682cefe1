"""A model becomes a managed one, and an ordinary one again.

Each change of the model is ``apply(...) -> undo``, and one list of undos, run from the last to the first, serves all
ends: a wrap that fails leaves the model as it was, and :func:`gemini.release` makes a model ordinary with the values
that it has by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any

import psutil
from torch import nn

from gemini.config import GeminiConfig
from gemini.errors import BudgetExceeded, human_bytes
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import COMPUTE_DTYPES
from gemini.ranks.agree import Point
from gemini.ranks.group import Ranks
from gemini.sharing import joining
from gemini.train.activations.kept import KeptBlocks
from gemini.train.checkpoint.write import pending_in
from gemini.train.context import ContextParallel, Exchange
from gemini.train.engine import Engine, engine_of
from gemini.train.modules.codes import prepare_layers
from gemini.train.modules.float8 import compute_in_float8, float8_layers
from gemini.train.modules.mixed import kept_in_fp32
from gemini.train.modules.reading import Structure, is_a, own_buffers
from gemini.train.modules.token_tiles import tile_tokens
from gemini.train.optimizers.in_place import give_back as give_optimizer_back
from gemini.train.params.by_name import ByName
from gemini.train.params.handle import StageParam, owners_of
from gemini.train.passes import hooks
from gemini.train.passes.parking import Block
from gemini.train.second_look import SecondLook
from gemini.train.sharding.shards import Shards
from gemini.train.slices.alike import compare_first_batch
from gemini.train.slices.experts import experts_of
from gemini.train.slices.slicing import WholeParams, cuts_in, slices_if_whole

Undo = Callable[[nn.Module], None]
"""Takes back one change of the model that it is given."""

Fill = Callable[[ByName, Ranks], nn.Module]
"""Writes the values of params that hold none yet to their homes, and returns the model that has them."""


class Changes(list[Undo]):
    """Everything that was done to a model. The model keeps it, so nothing in it may refer to the model: that one goes
    when nobody else does.
    """

    def undo(self, model: nn.Module) -> None:
        """Take all back, the last change first; an error in one keeps none of the others from it."""
        with ExitStack() as stack:
            # An ExitStack runs all callbacks, in reverse, and raises the last error with the others behind it.
            for undo in self:
                stack.callback(undo, model)
            self.clear()


def manage(
    model: nn.Module,
    config: GeminiConfig,
    *,
    process_group: Any = None,
    mesh: Any = None,
    fill: Fill | None = None,
    of_stages: Mapping[str, StageParam] | None = None,
    whole: WholeParams | None = None,
    structure: Structure | None = None,
    managed_class: Callable[[type[nn.Module]], type[nn.Module]],
) -> nn.Module:
    """Make ``model`` a GeminiDDP model; if that fails, what it was before. ``fill``: for a model whose params hold no
    values yet. ``of_stages``: of one stage of a :class:`gemini.Pipeline` over ranks, the params of all of them.
    ``whole``: how the model is cut; without it, as the mesh says. ``structure``: of the model, if it was walked before.
    ``managed_class``: the class of a managed model that had the given one.
    """
    changes, is_filled = Changes(), fill is None
    try:
        if config.float8:  # first: such layers are neither cut nor computed in tiles
            structure = structure or Structure(model)
            _multiply_in_float8(structure, config, changes)
        if whole is None:
            whole = slices_if_whole(model, mesh, is_filled=is_filled) or experts_of(model, mesh, is_filled=is_filled)
        # Each undo is noted before, or as soon as, its change can have begun: an interrupt must find it in the list.
        if whole is not None:
            changes.append(_to_call(whole.give_back))
            whole.cut(model)
        cuts = cuts_in(model) if whole is None else whole.by_param(model)
        # Before anything is planned: what is computed in tiles is gathered together.
        if config.tile_tokens not in (None, "auto"):
            with WHOLE:
                changes.append(_to_call(tile_tokens(model, config.tile_tokens).take_away))
            # What was walked before has not seen that tiled parts are read as a whole.
            structure = None
        structure = structure or Structure(model)
        how: dict[str, Any] = {"process_group": process_group, "mesh": mesh, "of_stages": of_stages, "cuts": cuts}
        with joining(config.memory):
            engine = Engine(structure, config, is_filled=is_filled, **how)
            changes.append(_to_call(engine.close))  # else whoever keeps an error would keep its store in use
            if whole is not None:
                changes.append(_to_call(whole.take_away))
            changes.append(_to_call(engine.adoption.give_back))
            model = engine.take_home(model, fill)
        # Optimizers made before the wrap write their plain states into chunks, and keep them until the model is whole.
        adopted = [(of, of.adopt_plain_states()) for of in owners_of(engine.params.handles)]
        with WHOLE:  # short from here on, of many changes
            moved = _put_on(model, structure, engine, whole, changes)
            # Last: until here the model is an ordinary one to everybody, errors included.
            original = type(model)
            changes.append(lambda model: setattr(model, "__class__", original))
            model.__class__ = managed_class(original)  # type: ignore[assignment]
            # The model is whole. From here on undoing gives the values of then: those of before free their memory.
            engine.adoption.keep()
            moved.keep()
            if whole is not None:
                whole.keep()
            for states, param in ((of.state, param) for of, params in adopted for param in params):
                dict.pop(states, param)
            model.__dict__["_gemini_changes"] = changes
    except BaseException:
        if "_gemini_changes" not in model.__dict__:  # else an interrupt has waited for all of it
            changes.undo(model)
        raise
    return model


def _multiply_in_float8(structure: Structure, config: GeminiConfig, changes: Changes) -> None:
    layers = float8_layers(structure, kept_in_fp32(structure, "bf16", config.keep_fp32))
    with WHOLE:
        changes.append(_to_call(compute_in_float8(layers, str(config.device or "cuda"))))


def _put_on(
    model: nn.Module, planned: Structure, engine: Engine, whole: WholeParams | None, changes: Changes
) -> _Buffers:
    """Give a model, whose params are home, its engine, tiles, buffers and hooks; each with its undo in ``changes``.
    ``planned``: the structure that the engine was made for. Returns the buffers, which can go back until they are kept.
    """
    structure = planned
    if whole is not None:
        whole.put_on(model, engine.ranks)
        engine.adoption.becomes_whole = whole.comes_back
    model.__dict__["_gemini_engine"] = engine
    changes.append(lambda model: model.__dict__.pop("_gemini_engine", None))
    # With `fill` another module may have come, and "auto" has chosen its tile only now.
    tokens = engine.decision.tile_tokens
    if model is not planned.model and engine.config.float8:
        _multiply_in_float8(Structure(model), engine.config, changes)
    if model is not planned.model or (tokens is not None and engine.config.tile_tokens == "auto"):
        if tokens is not None:
            changes.append(_to_call(tile_tokens(model, tokens).take_away))
        structure = Structure(model)
    moved = _Buffers(structure, engine)
    # Before it moves anything: half moved, they can still go back.
    changes.append(moved.undo)
    moved.move()
    changes.append(_to_call(prepare_layers(structure, engine.store.device.torch_device)))
    # After what changes forwards (tiles) and devices: hooks hang on the model as it is going to compute.
    changes.append(_unhook)
    registered = model.__dict__["_gemini_hooks"] = list[list[Any]]()
    hooks.attach(structure, engine, registered)
    number = engine.decision.kept_blocks
    kept = KeptBlocks(model, number) if number else None
    if kept is not None:
        changes.append(_to_call(kept.take_away))
        registered.append(kept.handles)
        kept.keep(model)
    if engine.config.step == "fastest" and engine.decision.choice is not None:
        changes.append(_to_call(SecondLook(model, kept).close))
    if engine.ranks.context.size > 1:
        _divide_sequences(model, engine, changes)
    if engine.ranks.same_batch.size > 1:
        registered.append([compare_first_batch(model, engine.ranks.same_batch)])
    return moved


def release(model: nn.Module) -> nn.Module:
    """Make a managed model an ordinary one again: the same object, of its original class, with all its weights on the
    CPU in the compute dtype. It can be wrapped again, for example with other budgets or in another precision.

    The optimizer states and the exact masters are dropped. Optimizers of Gemini cannot be used any more; a torch
    optimizer that was converted for the model is one of torch again, and starts anew. Save a checkpoint first if you
    want to continue from it. With several ranks, call it on all of them; each gets the whole model.

    Raises:
        ValueError: for a model that is not managed.
        BudgetExceeded: if host memory has not enough free bytes for the weights. Nothing was changed.
        StorageError: if weights cannot be read. Nothing was changed: the model is managed as before.
    """
    if "_gemini_engine" not in model.__dict__:
        raise ValueError(
            f"gemini.release takes a model that GeminiDDP manages, and this {type(model).__name__} is none (give the "
            "outermost one, which was wrapped)"
        )
    unmanage(model, "gemini.release(model)")
    return model


def settle(engine: Engine) -> None:
    """Wait until nothing is under way, and nobody behind training reads chunks; GeminiError if an update broke off."""
    # In this order: what an interrupt has left cannot be waited for, and a failed update is seen only after the wait.
    engine.recovery.forget_interrupted()
    engine.drain()
    engine.state.check_whole()
    for pending in pending_in(engine.write_observers):
        pending.join()


def park(engine: Engine, block: Block) -> None:
    """Begin ``model.parked()`` (:meth:`gemini.train.passes.parking.Parking.enter`)."""
    settle(engine)
    engine.parking.enter(block)


def unmanage(model: nn.Module, what: str) -> None:
    """Make ``model`` an ordinary module with its full weights on the CPU, in the compute dtype. Masters, states and
    gradients are gone, and so are chunks, budgets and spill file. With several ranks all of them call it, and each gets
    the whole model. BudgetExceeded if the weights need more than the free memory of the host; nothing was changed.
    """
    engine = engine_of(model)
    engine.state.check_there()
    engine.state.check_masters(what)
    settle(engine)
    precision, chunks = engine.config.precision, engine.decision.problem.layout.chunks
    needed = sum(chunk.payload * chunk.itemsize(precision) for chunk in chunks)
    free = psutil.virtual_memory().available
    if needed > free:
        raise BudgetExceeded(
            f"{what} gives an ordinary model and needs {human_bytes(needed)} of host memory for its weights, of which "
            f"{human_bytes(free)} are free; nothing was changed. Save it (model.save_pretrained) and go on where "
            "there is more; an adapter can be merged in place with model.merge_adapter()"
        )
    # Found before the undo: afterwards params have no handles.
    optimizers = owners_of(engine.params.handles)
    # What may fail or take long comes first: after it the model is an ordinary one, or managed as before.
    engine.adoption.read_back()
    with WHOLE:
        model.__dict__.pop("_gemini_changes").undo(model)
        for optimizer in optimizers:
            give_optimizer_back(optimizer)


def _to_call(undo: Callable[[], None]) -> Undo:
    return lambda model: undo()


def _unhook(model: nn.Module) -> None:
    for hook in chain.from_iterable(model.__dict__.pop("_gemini_hooks", ())):
        hook.remove()


class _Buffers:
    """Brings the buffers of one model to the device that computes, and back."""

    def __init__(self, structure: Structure, engine: Engine):
        self._device, self._compute = engine.store.device.torch_device, COMPUTE_DTYPES[engine.config.precision]
        # The tensors themselves: undoing a failed wrap gives back the same objects, wherever they were.
        self._before = [(module, own) for _, module in structure.modules if (own := own_buffers(module))]

    def move(self) -> None:
        for module, named in self._before:
            # Random projections (VeRA) multiply what adapters give, in its dtype; UniLora has indices too.
            in_compute = is_a(type(module), "BufferDict")
            for name, buffer in named.items():
                dtype = self._compute if in_compute and buffer.is_floating_point() else buffer.dtype
                module._buffers[name] = buffer.to(self._device, dtype)

    def keep(self) -> None:
        """Let go of what they were: there is no way back to it."""
        self._before.clear()

    def undo(self, model: nn.Module) -> None:
        """Make them what they were or, once that is let go of, bring them to the CPU as they are now."""
        for module, named in self._before:
            module._buffers.update(named)
        if not self._before:
            for module in model.modules():
                module._buffers.update({name: buffer.to("cpu") for name, buffer in own_buffers(module).items()})


def _divide_sequences(model: nn.Module, engine: Engine, changes: Changes) -> None:
    """Let ranks compute parts of sequences, and meet inside attention."""
    reference = weakref.ref(engine.shards)  # what transformers knows of attention outlives the model

    def meet() -> None:
        found = reference()
        assert isinstance(found, Shards), "ranks with parts of a sequence share params"
        found.meet(Point.CONTEXT)

    ranks = engine.ranks
    slices = 1 if ranks.parts.size == 1 else ranks.same_batch.size
    divided = ContextParallel(model, Exchange(ranks.context, meet), slices)
    changes.append(_to_call(divided.take_away))
    divided.put()
