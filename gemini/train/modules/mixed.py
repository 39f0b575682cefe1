"""Parts of a model that stay in fp32 beside those of two bytes: which they are, and what is cast where they meet.

Stays in fp32 what is so already in a model of bf16 or fp16, what the model's class declares (transformers'
``_keep_in_fp32_modules``), what torch can only compute with the fp32 buffers beside it (running statistics, spectral
norms), and what ``GeminiConfig(keep_fp32=)`` names. Where the first two meet the rest is the model's own business, as
in plain torch; torch's parts and those that were named are helped here. So are torch's layers that are given fp32
values which a program made in its forward. Inputs of the whole are cast as FSDP2's policy casts them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from operator import setitem
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from gemini.errors import warn
from gemini.train.modules.reading import Structure, own_buffers, structure_of

HALVES = (torch.bfloat16, torch.float16)
TARGETS = ("label", "labels")
"""Names of inputs that are compared with outputs, in fp32 where they are: not cast."""

NAMED, DECLARED, STATISTICS = "by keep_fp32=", "by the model's class", "with running statistics"
PARAMETRIZED, MADE = "under a parametrization", "as they were made"

_DECLARATIONS = {"bf16": ("strict",), "fp16": ("strict", "")}
"""transformers' ``_keep_in_fp32_modules`` is for fp16 alone, and ``_keep_in_fp32_modules_strict`` for both."""

_BACK = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
"""Modules that hand outputs on to the body of a model: in its dtype, as torch's norms with fp32 weights do."""

_NOT_BY_AUTOCAST = (nn.Bilinear, nn.LayerNorm, nn.GroupNorm)
"""Modules of the next that autocast leaves alone on the CPU; it casts inputs and weights of the others by itself."""

_OF_VALUES = frozenset({list, tuple, *torch.return_types.all_return_types})  # type: ignore[attr-defined]
"""Sequences that are made of their values, beside named tuples."""

_OF_ONE_DTYPE = (*_NOT_BY_AUTOCAST, nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention)
"""Modules that torch computes only with inputs of their weights' dtype: casting changes no program that runs."""

KeepFp32 = str | tuple[Any, ...] | None


def kept_in_fp32(model: nn.Module | Structure, precision: str, keep_fp32: KeepFp32 = "auto") -> dict[int, str]:
    """Find the params of ``model`` that stay in fp32: by their ``id``, why."""
    kept: dict[int, str] = {}
    if precision == "fp32" or keep_fp32 is None:
        return kept
    structure = structure_of(model)

    def keep(params: Iterable[nn.Parameter | None], why: str) -> None:
        for param in params:
            if param is not None and param.is_floating_point() and id(param) not in structure.coded:
                # The first reason stays: it decides whether casts are ours to make.
                kept.setdefault(id(param), why)

    for wanted in () if isinstance(keep_fp32, str) else keep_fp32:
        keep(_chosen(structure, wanted), NAMED)
    for _, module in structure.modules:
        for which in _DECLARATIONS[precision]:
            keep(_declared(module, which), DECLARED)
        if _has_statistics(module):
            keep(module._parameters.values(), STATISTICS)
        for original, _ in _parametrized(module):
            keep(original, PARAMETRIZED)
    # The dtype of adapters is PEFT's or TRL's choice, for the sake of masters and of memory.
    base = [param for param, _ in structure.params if id(param) not in structure.adapters]
    if any(param.dtype in HALVES for param in base):
        keep((param for param in base if param.dtype is torch.float32), MADE)
    return kept


def move_buffers(model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], kept: Collection[int]) -> None:
    """Apply ``fn`` of ``model.to(...)`` to the buffers that it gives another dtype or device, as torch does; but not to
    those of modules of the params ``kept`` in fp32.
    """
    beside = set()
    for module in model.modules():
        if any(id(param) in kept for param in module._parameters.values()):
            # Buffers of a parametrization are those of modules below the one with its params; elsewhere what is below
            # has params of its own.
            own = module.modules() if isinstance(module, parametrize.ParametrizationList) else (module,)
            beside |= {id(part) for part in own}
    for module in model.modules():
        for name, buffer in {} if id(module) in beside else own_buffers(module).items():
            # Asked with an empty tensor: a buffer that stays as it is is not copied.
            probe = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
            moved = fn(probe)
            if (moved.dtype, moved.device) != (probe.dtype, probe.device):
                module._buffers[name] = fn(buffer)


def half_of(model: nn.Module | Structure) -> str | None:
    """Find the precision of a model all of whose params are bf16, or all fp16; else None."""
    dtypes = {param.dtype for param, _ in structure_of(model).params}
    return next((name for name, dtype in zip(("bf16", "fp16"), HALVES, strict=True) if dtypes == {dtype}), None)


def warn_of_fp16(model: nn.Module | Structure) -> None:
    """Say it where fp16 weights are going to be computed with in bf16, because no precision was given."""
    if half_of(model) == "fp16":
        warn(
            "the model's weights are fp16, and no precision was given: it is computed in bf16, with fp32 masters. "
            'Give GeminiConfig(precision="fp16") and use gemini.GradScaler to compute in fp16, or precision="bf16"'
        )


def _chosen(structure: Structure, wanted: Any) -> list[nn.Parameter]:
    """Find the params that one of ``keep_fp32`` means: of a class of modules, or with that path in their names."""
    if isinstance(wanted, type):
        found = [param for _, m in structure.modules if isinstance(m, wanted) for param in m.parameters()]
        names = sorted({type(module).__name__ for _, module in structure.modules})
    else:
        pattern = re.compile(rf"(^|\.){re.escape(wanted).replace(re.escape('*'), '[^.]*')}($|\.)")
        found = [param for param, names in structure.params if any(map(pattern.search, names))]
        names = [path for path, _ in structure.modules if path]
        names += [name for _, of_one in structure.params for name in of_one]
    if not found:
        raise ValueError(
            f"keep_fp32= has {wanted!r}, and {type(structure.model).__name__} has no params there: give names of "
            "modules or params (with * for a part of one), or classes of modules; "
            f"there are for example {', '.join(names[:3])}"
        )
    return found


def _declared(module: nn.Module, which: str) -> Iterator[nn.Parameter]:
    """Find what transformers loads in fp32: names in which it finds one of the patterns."""
    patterns = getattr(module, f"_keep_in_fp32_modules{which and '_' + which}", None)
    if not patterns or isinstance(patterns, str) or not isinstance(patterns, Collection):
        return
    found = re.compile("|".join(str(pattern).replace("*", ".*") for pattern in patterns))
    for name, param in module.named_parameters(remove_duplicate=False):
        if found.search(name.replace(".base_layer.", ".")):  # PEFT has put a module around it
            yield param


def _are_fp32(buffers: Iterable[torch.Tensor | None]) -> bool:
    return any(buffer is not None and buffer.dtype is torch.float32 for buffer in buffers)


def _has_statistics(module: nn.Module) -> bool:
    """Whether it is a norm with running statistics in fp32: torch's, or one that is written like them (frozen ones)."""
    own = dict(module._buffers.items())  # a scripted module's has no ``get``
    return _are_fp32([own.get("running_mean"), own.get("running_var")])


def _parametrized(module: nn.Module) -> Iterator[tuple[Iterable[nn.Parameter | None], Callable[..., Any]]]:
    """Find what a weight is computed of in fp32, and how the result gets another dtype: ``hook(dtype)`` of each."""
    if parametrize.is_parametrized(module):
        for made in module.parametrizations.values():  # type: ignore[union-attr, operator]
            if _are_fp32(made.buffers()) or any(type(part).__name__ == "_Orthogonal" for part in made):
                yield made.parameters(), partial(_after_parametrization, made)
    for hook in module._forward_pre_hooks.values():
        name = hook.name if isinstance(hook, SpectralNorm) else ""
        if name and _are_fp32([module._buffers.get(f"{name}_u")]):
            yield [module._parameters[f"{name}_orig"]], partial(_before_forward, module, name)


def _after_parametrization(made: nn.Module, dtype: torch.dtype) -> Any:
    return made.register_forward_hook(lambda _, args, weight: weight.to(dtype))


def _before_forward(module: nn.Module, name: str, dtype: torch.dtype) -> Any:
    return module.register_forward_pre_hook(lambda m, args: setattr(m, name, getattr(m, name).to(dtype)))


def cast_where_they_meet(
    model: nn.Module | Structure, kept: Mapping[int, str], dtype: torch.dtype, hooks: list[Any]
) -> None:
    """Hook what has to be cast inside of a model, whose other params are of ``dtype``; each hook is noted in ``hooks``
    at once. Where parts were named, all others take what these give, as modules under FSDP2's policy do.
    """
    if dtype is torch.float32:
        return  # all is of one dtype, and what is given another is a mistake of the model's own
    structure = structure_of(model)
    casts_itself = _inside_of_casting(structure)
    # After a named part in fp32 whatever reads its outputs is given fp32.
    is_told = NAMED in kept.values()
    for _, module in structure.modules:
        made = [(list(original), put) for original, put in _parametrized(module)]
        held = (*module._parameters.values(), *(param for original, _ in made for param in original))
        own = [param for param in held if param is not None]
        # Those of torch's norms that have statistics take inputs of any dtype.
        is_fp32 = _has_statistics(module) and not isinstance(module, _NormBase)
        if is_fp32 or any(kept.get(id(param)) == NAMED for param in own):
            if not isinstance(module, parametrize.ParametrizationList):  # else the module around it is hooked
                _compute_in_fp32(module, dtype, hooks)
            continue
        hooks.extend(put(dtype) for original, put in made if any(id(param) in kept for param in original))
        # The root has a hook of its own for its inputs.
        is_plain = bool(own) and module is not structure.model and not any(id(param) in kept for param in own)
        is_helped = isinstance(module, _OF_ONE_DTYPE) and id(module) not in casts_itself
        if is_plain and (is_told or is_helped):
            cast = partial(cast_inputs if is_told else _as_weights, dtype)
            hooks.append(module.register_forward_pre_hook(cast, with_kwargs=True))


def _inside_of_casting(structure: Structure) -> set[int]:
    """Find the modules, by id, inside of transformers' models, which cast what they make, or of compiled code, where a
    hook of ours would be a break of the graph.
    """
    casting = [
        whole
        for _, whole in structure.modules
        # By name: transformers need not be installed.
        if id(whole) in structure.compiled or any(c.__name__ == "PreTrainedModel" for c in type(whole).__mro__)
    ]
    return {id(module) for whole in casting for module in whole.modules()}


def _as_weights(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    # One look for what is nearly every call of every layer.
    if len(args) == 1 and getattr(args[0], "dtype", None) is dtype:
        return None  # nearly always
    kind = args[0].device.type if args and isinstance(args[0], torch.Tensor) else "cpu"
    if torch.is_autocast_enabled(kind) and not (kind == "cpu" and isinstance(module, _NOT_BY_AUTOCAST)):
        return None  # autocast casts: to ``dtype`` first would round twice
    if any(param is not None and param.dtype is not dtype for param in module._parameters.values()):
        return None  # the model has cast its weights itself, which its gradients will tell
    return cast_floats(args, dtype), cast_floats(kwargs, dtype)


def _compute_in_fp32(module: nn.Module, dtype: torch.dtype, hooks: list[Any]) -> None:
    """Let ``module`` compute in fp32 whatever it is given; norms and embeddings hand on what the rest computes in."""
    # By thread, since several may evaluate: whether its last call's inputs were cast. A recomputed one may not end.
    was_cast: dict[int, bool] = {}

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        # Outputs are cast back only if inputs were cast: a caller that computes in fp32 itself goes on in fp32.
        given = cast_floats((args, kwargs), torch.float32)
        casts = was_cast[threading.get_ident()] = given[0] is not args or given[1] is not kwargs
        return given if casts else None

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        return cast_floats(output, dtype) if was_cast.get(threading.get_ident(), False) or is_embedding else None

    hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
    is_norm = "norm" in type(module).__name__.lower() and not any(True for _ in module.children())
    if isinstance(module, _BACK) or is_norm or _has_statistics(module):
        hooks.append(module.register_forward_hook(after))


def cast_floats(tree: Any, dtype: torch.dtype, *, but: Collection[Any] = ()) -> Any:
    """``tree`` with its floating-point tensors in ``dtype``; a new one where something changes. What is of unknown
    types (caches, mappings that cannot be written to), and what stands under a key in ``but``, is left.
    """
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() and tree.dtype is not dtype and tree.itemsize > 1 else tree
    kind: Any = type(tree)
    # Of other sequences nobody knows how they are made.
    if kind in _OF_VALUES or (isinstance(tree, tuple) and hasattr(kind, "_make")):
        # The same object where nothing changes, so that callers can tell by `is` and nothing is copied.
        values = [cast_floats(value, dtype, but=but) for value in tree]
        if all(new is old for new, old in zip(values, tree, strict=True)):
            return tree
        return kind(values) if kind in _OF_VALUES else kind._make(values)
    put: Callable[[Any, Any, Any], None]
    if isinstance(tree, MutableMapping):  # dicts, ModelOutput, BatchEncoding
        held, put = tree, setitem
    elif is_dataclass(tree) and not isinstance(tree, type):
        # Not `replace`, which calls __init__: it may want what no field keeps. Frozen ones are written to as well.
        held, put = {field.name: getattr(tree, field.name, None) for field in fields(tree)}, object.__setattr__
    else:
        return tree
    stay = {key for key in held if isinstance(key, str) and key in but}
    changed = {k: v for k, old in held.items() if k not in stay and (v := cast_floats(old, dtype, but=but)) is not old}
    if not changed:
        return tree
    # A copy: the caller's batch keeps its dtypes.
    made = copy(tree)
    if put is setitem and getattr(made, "data", None) is not None and made.data is getattr(tree, "data", None):
        made.data = copy(made.data)
    for key, value in changed.items():
        put(made, key, value)
    return made


def cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Bring inputs to ``dtype``: a pre-hook of the root, or of what reads the outputs of a named part."""
    if len(args) == 1 and not kwargs and getattr(args[0], "dtype", None) is dtype:
        return None  # one look, where nothing is to be cast
    return cast_floats(args, dtype, but=TARGETS), cast_floats(kwargs, dtype, but=TARGETS)
