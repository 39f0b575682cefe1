"""Weights by name for who computes with them elsewhere: one after the other or by the bucket, the model never whole.

What stands in host memory as modules read it is handed out where it stands, so that an inference engine in the same
process and the model that is trained have one copy of the weights between them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import nn

from gemini.errors import GeminiError, parse_bytes
from gemini.interrupts import call_without_grad
from gemini.train.engine import Engine
from gemini.train.modules.codes import first_coded
from gemini.train.modules.reading import is_a, is_tuner_layer
from gemini.train.params.by_name import ByName
from gemini.train.params.handle import ParamHandle, handle_of
from gemini.train.params.state_dict import own_state

NamedTensor = tuple[str, torch.Tensor]
_BASE, _OF_BASE = "base_model.model.", ".base_layer."
"""What PEFT puts in the names of the base model: before all of them, and where a layer is around one."""


class _Weight(NamedTuple):
    """A tensor to come: its size is known before anything is read."""

    name: str
    num_bytes: int
    read: Callable[[], torch.Tensor]


@overload
def weights_for(
    model: nn.Module, *, bucket_bytes: None = None, adapters: Literal["merged", "apart"] = "merged"
) -> Iterator[NamedTensor]: ...
@overload
def weights_for(
    model: nn.Module, *, bucket_bytes: int | str, adapters: Literal["merged", "apart"] = "merged"
) -> Iterator[list[NamedTensor]]: ...
def weights_for(
    model: nn.Module, *, bucket_bytes: int | str | None = None, adapters: Literal["merged", "apart"] = "merged"
) -> Iterator[NamedTensor] | Iterator[list[NamedTensor]]:
    """Iterate over the weights of a managed model as an inference engine loads them: whole tensors on the CPU, in the
    compute dtype, by the names of ``state_dict()`` and with its bits, tied ones once (by their first name), and the
    buffers that ``state_dict()`` has.

    Weights whose home is host memory are not copied: such a tensor is the home itself. Do not write to it; its values
    are the model's until the next ``optimizer.step()`` (or the end of ``parked()``, for weights that live on the GPU).
    Everything else is read when it is asked for.

    Args:
        model: of any number of ranks, parked or not. All ranks that share it iterate together, to the end; slices are
            merged on each of them. A stage of a pipeline gives its own weights.
        bucket_bytes: give lists of pairs of at most so many bytes (one larger tensor is a list of its own). A list is
            emptied when the next one is asked for, so that no two are in memory.
        adapters: of a ``PeftModel``. "merged": the sums that ``merge_adapter()`` makes, on the CPU and without changing
            the model, by the names that the base model had. "apart": base weights and
            adapters as they are, by PEFT's names.

    Returns:
        an iterator over ``(name, tensor)``, or over lists of them.

    Raises:
        ValueError: for a model that is not managed, and for other ``adapters``.
        GeminiError: for "merged" with prompts, or a base of 4-bit codes.
    """
    engine: Engine | None = model.__dict__.get("_gemini_engine")
    if engine is None:
        raise ValueError(f"weights_for takes a model that GeminiDDP manages, and this {type(model).__name__} is none")
    if adapters not in ("merged", "apart"):
        raise ValueError(f"weights_for(adapters={adapters!r}): use 'merged' or 'apart'")
    engine.state.check_whole()
    merges = adapters == "merged" and is_a(type(model), "PeftModel")
    if merges and not hasattr(model.base_model, "merge_adapter"):
        raise GeminiError("weights_for(adapters='merged'): prompts are part of no weight. Use adapters='apart'")
    if merges and (coded := first_coded(model)) is not None:
        raise GeminiError(
            f"weights_for(adapters='merged') with a base of 4-bit codes ({coded!r}): the sum has no 4-bit weights. Use "
            "adapters='apart'"
        )
    entries = _entries(model, engine.by_names)
    found = _merged(entries, model, engine.by_names) if merges else entries
    if bucket_bytes is None:
        return ((entry.name, entry.read()) for entry in found)
    return _in_buckets(found, parse_bytes(bucket_bytes, what="bucket_bytes"))


def _in_buckets(entries: Iterator[_Weight], size: int) -> Iterator[list[NamedTensor]]:
    bucket, num_bytes = list[NamedTensor](), 0
    for entry in entries:
        if bucket and num_bytes + entry.num_bytes > size:
            yield bucket
            # The same list, before anything more is read: the caller's loop holds it still.
            bucket.clear()
            num_bytes = 0
        bucket.append((entry.name, entry.read()))
        num_bytes += entry.num_bytes
    if bucket:
        yield bucket


def _entries(model: nn.Module, by_names: ByName) -> Iterator[_Weight]:
    seen = set[ParamHandle]()
    for name, value in own_state(model).items():
        handle = handle_of(value)
        if handle is None and isinstance(value, torch.Tensor):
            yield _Weight(name, value.nbytes, partial(value.detach().to, "cpu"))
        elif handle is not None and handle not in seen:
            seen.add(handle)
            numel = torch.Size(handle.whole_shape).numel()
            yield _Weight(name, numel * handle.chunk.flat.itemsize, partial(_whole, by_names, handle))


def _whole(by_names: ByName, handle: ParamHandle) -> torch.Tensor:
    own = by_names.in_place(handle, handle.chunk.flat.dtype)
    return by_names.joined(handle, by_names.read(handle) if own is None else own)


# ---- adapters --------------------------------------------------------------------------------------------------------


def _merged(entries: Iterator[_Weight], model: nn.Module, by_names: ByName) -> Iterator[_Weight]:
    """The weights of the base model with the active adapters in them, by the names that they had."""
    layers = {name: module for name, module in model.named_modules() if is_tuner_layer(module)}
    instead = (_OF_BASE, f".modules_to_save.{getattr(model, 'active_adapter', 'default')}.", ".token_adapter.")
    for entry in entries:
        parts, plain, read = entry.name.split("."), entry.name.removeprefix(_BASE), entry.read
        around = [name for name in map(".".join, (parts[:end] for end in range(len(parts)))) if name in layers]
        if plain == entry.name or ".original_module." in entry.name:
            continue
        if around:
            # The innermost: what is not of its base layer is of the adapter.
            if not entry.name.startswith(around[-1] + _OF_BASE):
                continue
            read = partial(_merge, layers[around[0]], parts[-1], by_names)
        for known in instead:
            plain = plain.replace(known, ".")
        yield _Weight(plain.replace(_OF_BASE, "."), entry.num_bytes, read)


def _merge(layer: Any, name: str, by_names: ByName) -> torch.Tensor:
    """Let PEFT merge a copy of one layer, of which nothing is managed: a param of its base layer."""
    made = _ordinary(layer, by_names)
    for part in filter(is_tuner_layer, made.modules()):  # one may be around another, for another param
        part.merged_adapters = list(part.merged_adapters)
        call_without_grad(part.merge)
    value: torch.Tensor = made.get_base_layer().get_parameter(name).detach()
    return value


def _ordinary(module: nn.Module, by_names: ByName) -> Any:
    """Copy a module with its values; all else in it is shared."""
    made = copy.copy(module)
    made._parameters = {
        name: None if param is None else nn.Parameter(_value(param, by_names), requires_grad=False)
        for name, param in module._parameters.items()
    }
    made._modules = {name: None if m is None else _ordinary(m, by_names) for name, m in module._modules.items()}
    return made


def _value(param: torch.Tensor, by_names: ByName) -> torch.Tensor:
    handle = handle_of(param)
    return param.detach().clone() if handle is None else by_names.read_whole(handle)
