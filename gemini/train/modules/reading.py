"""What a model is made of, found in one walk: modules, params, and which params a module reads in its own forward.

What a module reads is gathered when it starts, and counted before it fits. Most read the params they own, and those in
a ``nn.ParameterDict`` or ``nn.ParameterList`` that they hold, which are never called. All that is under it is read by a
module that is compiled or computed in tiles; by a tuner layer of PEFT (DoRA takes the norm of the base weight, IA3
scales it, LoHa and OFT build new ones) and CPT; and by torch's own layers with a fused path for evaluation, which
computes other bits and is taken only where every param is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini.train.modules.codes import is_coded

READ_AS_A_WHOLE = "_gemini_computed_in_tiles"
"""The mark of a module that is computed in tiles of tokens."""

COPY_OF_COMPILED = "_gemini_read_as_a_whole"
"""The mark of the copy of a compiled module: it runs as Python, and counts as compiled."""

_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def own_params(module: nn.Module) -> dict[str, nn.Parameter]:
    """The params of a module itself, under all their names there; modules register None for one that they lack."""
    return {name: param for name, param in module._parameters.items() if param is not None}


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Its buffers, as :func:`own_params`."""
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None}


class NamedParam(NamedTuple):
    """A param once, with all the names it goes by (the first one is its name here)."""

    param: nn.Parameter
    names: tuple[str, ...]


class CalledModule(NamedTuple):
    """A module that is called on its own."""

    path: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]  # the params that it reads itself
    around: int  # the place of the module around it among all visits; the root's is its own
    is_again: bool  # whether the same module was visited under another path before


class Structure:
    """Findings of one walk of a model. It is a snapshot: what is compiled or tiled later needs another one."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.modules: list[tuple[str, nn.Module]] = []  # every module once, by path
        self.visits: list[CalledModule] = []  # the modules that are called on their own, under each of their paths
        self.read_as_a_whole = False  # whether a module reads all that is under it, where nothing is called on its own
        # By `id`: modules and params live as long as the walk, and not every one can be hashed or compared.
        self.compiled: set[int] = set()  # the modules that run as compiled code
        self.holders: set[int] = set()  # the modules with a param in them or in a module below
        self.adapters: set[int] = set()
        """The params of all adapters, also of those that are not active now: laid out as trained ones, so that
        ``set_adapter`` finds states for them, and apart from base weights."""
        self._seen: set[int] = set()
        self._called: set[int] = set()
        self._names: dict[int, tuple[nn.Parameter, list[str]]] = {}
        self._base: set[int] = set()
        # The root first, so that `visits[0]` is the root.
        self._visit("", model, 0, in_adapter=False, is_called=True)
        # A param that is tied to one of the base is the base's.
        self.adapters -= self._base
        # In the order of declaration.
        self.params = [NamedParam(param, tuple(names)) for param, names in self._names.values()]
        self.coded = {id(param) for param, _ in self.params if is_coded(param)}  # those whose elements are 4-bit codes

    @property
    def readers(self) -> list[CalledModule]:
        """The modules that are called on their own, each once."""
        return [visit for visit in self.visits if not visit.is_again]

    def _visit(self, path: str, module: nn.Module, around: int, *, in_adapter: bool, is_called: bool) -> bool:
        """Note ``module`` and all below it; returns whether there are params. ``is_called``: whether nothing around it
        computes without calling it.
        """
        prefix = f"{path}." if path else ""
        if id(module) not in self._seen:
            self._seen.add(id(module))
            self.modules.append((path, module))
            if is_compiled(module):
                self.compiled.add(id(module))
        own = own_params(module)
        for name, param in own.items():
            self._names.setdefault(id(param), (param, []))[1].append(prefix + name)
            (self.adapters if in_adapter else self._base).add(id(param))
        if is_called:
            read = tuple(params_read_by(module))
            self.visits.append(CalledModule(path, module, read, around, id(module) in self._called))
            self._called.add(id(module))
            # Modules below stand inside this visit, not inside a module that is never called.
            around = len(self.visits) - 1
        if id(module) in self.compiled or READ_AS_A_WHOLE in module.__dict__:
            # What is below computes without being called: the module itself reads it all.
            is_called = False
            self.read_as_a_whole = True
        has_params = bool(own)
        # Not `named_children`, which gives a module that has two names here under the first alone.
        for name, child in module._modules.items():
            if child is not None:
                of_adapter = _is_of_adapter(module, name, in_adapter=in_adapter)
                has_params |= self._visit(prefix + name, child, around, in_adapter=of_adapter, is_called=is_called)
        if has_params:
            self.holders.add(id(module))
        return has_params


def structure_of(model: nn.Module | Structure) -> Structure:
    """Walk ``model``, if that was not done yet."""
    return model if isinstance(model, Structure) else Structure(model)


def is_compiled(module: nn.Module) -> bool:
    """Whether a compiled function runs when ``module`` is called."""
    return compiled_part(module) is not None


def compiled_part(module: nn.Module) -> Any:
    """Find the compiled function that runs when ``module`` is called; None for one that runs as Python."""
    own = module.__dict__
    call = own.get("_compiled_call_impl")
    if call is not None:
        # Beneath our own hooks around it, so that hooking does not look like compiling anew.
        return getattr(call, "_gemini_inner", call)
    # torch marks what it has compiled with the function that it was, and what it is told to leave alone.
    forward = own.get("forward", getattr(type(module), "forward", None))
    if hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False):
        return forward
    return own.get(COPY_OF_COMPILED)


def is_a(kind: type, name: str) -> bool:
    """Whether a class is, or comes from, PEFT's class of that name. By name: PEFT need not be installed."""
    return any(base.__name__ == name and base.__module__.startswith("peft.") for base in kind.__mro__)


def _is_of_adapter(module: nn.Module, name: str, *, in_adapter: bool) -> bool:
    """Whether what a module has by that name is of an adapter of PEFT; ``in_adapter``: whether the module itself is."""
    if is_tuner_layer(module) or is_a(type(module), "AuxiliaryTrainingWrapper"):
        return name not in ("base_layer", "original_module")
    return in_adapter or (name == "prompt_encoder" and is_a(type(module), "PeftModel"))


def is_tuner_layer(module: nn.Module) -> bool:
    """Whether PEFT has put this module around one of the base model."""
    return is_a(type(module), "BaseTunerLayer")


def params_read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Find the params that ``module`` reads itself, when it is called."""
    of_peft = is_tuner_layer(module) or is_a(type(module), "CPTEmbedding")
    is_whole = is_compiled(module) or READ_AS_A_WHOLE in module.__dict__
    if of_peft or is_whole or isinstance(module, _FUSED):
        yield from module.parameters()
        return
    if isinstance(module, nn.TransformerEncoder) and len(module.layers):
        yield from module.layers[0].parameters()  # they decide on nested tensors
    yield from own_params(module).values()
    for child in module.children():
        if isinstance(child, (nn.ParameterDict, nn.ParameterList)):
            yield from params_read_by(child)


def rewritten_by(module: nn.Module) -> list[nn.Parameter]:
    """Find the params that a call of ``module`` may write to: prompts and rotations of PEFT that bound themselves, and
    embeddings with a ``max_norm``, torch's or the program's own.
    """
    if is_a(type(module), "CPTEmbedding") or (is_a(type(module), "OFTRotationModule") and module.coft):
        return list(module.parameters())
    max_norm = getattr(module, "max_norm", None)
    # None in most embeddings; a program's own attribute of that name may be anything.
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)):
        return []
    return [param for param in own_params(module).values() if param.dim() == 2]
