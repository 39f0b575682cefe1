"""What leaves a model: ``save_pretrained`` by transformers, weights by name.

transformers knows renames, tied weights, shards; it only wants a state dict. Each value in it is a tensor over the very
bytes of its home in host memory, or over a nameless file beside the result, into which it was read: its pages are
written out by the system rather than run out of memory. So nothing is ever whole in memory.

An inference engine takes weights one after the other or by the bucket. What stands in host memory as modules read it
is handed out where it stands, so that an engine in the same process and the model have one copy between them.

With several ranks the first one writes; the others wait at an agreement, where they serve its reads.
"""

from __future__ import annotations

import copy
import inspect
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from gemini.errors import GeminiError, StorageError, parse_bytes
from gemini.interrupts import call_without_grad
from gemini.memory.chunks.chunk import COMPUTE_DTYPES
from gemini.patches import original as original_of
from gemini.patches import replaced, replaced_for_thread
from gemini.ranks.agree import Attempt, Point
from gemini.ranks.wire import Tag
from gemini.train.checkpoint.format import bytes_of
from gemini.train.engine import Engine
from gemini.train.modules.codes import first_coded
from gemini.train.modules.reading import is_a, is_tuner_layer
from gemini.train.params.by_name import ByName
from gemini.train.params.handle import ParamHandle, handle_of
from gemini.train.params.state_dict import own_state

ShapeAndDtype = tuple[torch.Size, torch.dtype]


def save_pretrained(
    engine: Engine,
    model: nn.Module,
    original: Any,
    folder: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
) -> Any:
    """Call that of ``original`` (``super()`` of the model) with weights as its ``state_dict``, unless the caller gave
    one: in ``dtype``, or as they are. With several ranks all of them call it, one writes, and a failure there is
    raised on all of them. Raises StorageError if it cannot be written.
    """
    ranks, compute = engine.ranks, COMPUTE_DTYPES[engine.config.precision]
    call = inspect.signature(original.save_pretrained).bind(folder, *args, **kwargs)
    # In a place of its own, perhaps as None, or among those by name (PEFT's).
    *_, last = call.signature.parameters
    given = call.arguments if "state_dict" in call.signature.parameters else call.arguments.setdefault(last, {})
    is_given = given.get("state_dict") is not None
    if dtype not in (None, compute, torch.float32):
        raise ValueError(
            f"save_pretrained(dtype={dtype}): weights are there in {compute} and, exactly, in torch.float32; "
            "convert the files afterwards"
        )
    if dtype is not None and is_given:
        raise ValueError("save_pretrained takes dtype= or state_dict=, not both: a state has the dtypes it has")
    dtype = None if dtype is compute else dtype  # then each is written in its own: some stay in fp32
    is_writer = ranks.everyone.rank == ranks.parts.rank == 0
    result: Any = None
    # What fails is kept: raised now, the others would wait at the next meeting until the timeout.
    attempt = Attempt(BaseException)
    if is_writer:
        with attempt:
            if os.path.exists(folder) and not os.path.isdir(folder):
                raise StorageError(f"save_pretrained({str(folder)!r}): that is a file, not a directory")
    collects = is_writer and not is_given
    views = _collect(engine, folder, dtype, attempt if collects else None)
    if collects and attempt.refusal is None:
        with attempt:
            given["state_dict"] = _state_of(model, engine.by_names, views)
    engine.shards.meet_all(Point.EXPORT)  # until here the others serve what the first one reads
    if is_writer and attempt.refusal is None:
        # PEFT's config is of an adapter, and says no dtype.
        says = nullcontext() if dtype is None or is_a(type(model), "PeftModel") else _said_in(model.config, dtype)
        with attempt, says:
            result = original.save_pretrained(*call.args, **call.kwargs)
    # What has failed on one rank fails on all. The others may wait long for the one that writes.
    ranks.waiting.wait_for_all("save_pretrained")
    engine.shards.agree_on_folder(Point.EXPORT, "save_pretrained", folder, _of_disk(attempt.refusal, folder))
    return result


def _collect(engine: Engine, folder: Any, dtype: torch.dtype | None, attempt: Attempt | None) -> dict[str, Any]:
    """Collect the weights by name in ``folder``, on the rank with an ``attempt``, where what fails is kept."""
    ranks, views = engine.ranks, dict[str, torch.Tensor]()
    if attempt is not None and attempt.refusal is None:
        with attempt:
            os.makedirs(folder, exist_ok=True)
            views = {} if ranks.is_cut else _views(engine.by_names, folder, dtype)
    # Of slices and stages one rank each reads. To the end even after a failure: others send and serve every param.
    reads = ranks.is_cut and (ranks.wire if ranks.experts.size > 1 else ranks.everyone).rank == 0
    for name, whole in _wholes(engine, dtype) if reads else ():
        if attempt is not None and attempt.refusal is None:
            with attempt:
                views[name] = places_in(folder, [(whole.shape, whole.dtype)])[0].copy_(whole)
    return views


@contextmanager
def _said_in(config: Any, dtype: torch.dtype) -> Iterator[None]:
    """Within, a config is saved with the dtype that weights are written in, in which they will be read: transformers
    says the model's, and may send the files to a hub before it returns.
    """
    kind = type(config)

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        with replaced(self, "dtype", str(dtype).removeprefix("torch.")):
            return original_of(kind, "save_pretrained")(self, *args, **kwargs)

    with replaced_for_thread(kind, "save_pretrained", save):
        yield


def _of_disk(error: BaseException | None, folder: Any) -> BaseException | None:
    """A StorageError of what a full or broken disk makes libraries say; others (a hub's have no number) as they are."""
    if getattr(error, "errno", None) is None and type(error).__name__ != "SafetensorError":
        return error
    refusal = StorageError(f"save_pretrained({str(folder)!r}): {getattr(error, 'strerror', None) or error}")
    refusal.__cause__ = error
    return refusal


def _wholes(engine: Engine, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """All params by their first names, each for the moment; on ranks that do not write whatever is there. Whatever
    fails on one rank, the others are here as well.
    """
    of_stages = dtype or COMPUTE_DTYPES[engine.config.precision]
    by_names, stages, own = engine.by_names, engine.ranks.stages, {h.whole_name: h for h in engine.by_names.handles}
    if not engine.params.of_stages:
        yield from ((handle.name, by_names.read_whole(handle, dtype)) for handle in by_names.handles)
    for name, param in engine.params.of_stages.items():
        owner, doing = param.ranks[0], f"sending {name}"
        if stages.rank == owner:
            value = by_names.read_whole(own[name], of_stages)
            if owner:
                stages.start(Tag.BY_NAME, {0: value.contiguous()}, {}, doing).wait()
            yield name, value
        elif stages.rank == 0:
            value = torch.empty(param.shape, dtype=of_stages, device="cpu")
            stages.start(Tag.BY_NAME, {}, {owner: value}, doing).wait()
            yield name, value


def _views(by_names: ByName, folder: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The weights by name, each param a storage of its own (transformers tells ties by storages)."""
    views, elsewhere = dict[str, torch.Tensor](), list[tuple[ParamHandle, ShapeAndDtype]]()
    for handle in by_names.handles:
        written = dtype or handle.chunk.flat.dtype
        view = by_names.in_place(handle, written)
        if view is None or not view.numel():
            elsewhere.append((handle, (handle.param.shape, written)))
            continue
        views[handle.name] = torch.frombuffer(bytes_of(view), dtype=written).view(view.shape)
    for (handle, _), place in zip(elsewhere, places_in(folder, [form for _, form in elsewhere]), strict=True):
        views[handle.name] = place.copy_(by_names.read(handle, dtype))
    return views


def _state_of(model: nn.Module, by_names: ByName, views: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The state of the model, with ``views`` by the first names of the params of all stages."""
    state, own = own_state(model), {handle.whole_name for handle in by_names.handles}
    # By every name that the model's state has now, tied ones too; all but params is copied to the CPU.
    for name, value in state.items():
        handle = handle_of(value)
        if handle is not None:
            state[name] = views[handle.whole_name]
        elif isinstance(value, torch.Tensor):
            state[name] = value.detach().cpu()
    return {**state, **{name: value for name, value in views.items() if name not in own}}


def places_in(folder: Any, forms: list[ShapeAndDtype]) -> list[torch.Tensor]:
    """Tensors over one nameless file in a folder: of mappings the system allows a process 65,530 (vm.max_map_count)."""
    ends = [0, *accumulate(-(-shape.numel() * dtype.itemsize // 64) * 64 for shape, dtype in forms)]
    if not ends[-1]:  # no file of no bytes can be mapped
        return [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in forms]
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, ends[-1])  # a full disk says so here, and not by SIGBUS
        # The mapping keeps the nameless file when it is closed.
        mapping = mmap.mmap(file.fileno(), ends[-1])
    return [
        torch.frombuffer(mapping, dtype=dtype, count=shape.numel(), offset=start).view(shape)
        if shape.numel()
        else torch.empty(shape, dtype=dtype, device="cpu")
        for (shape, dtype), start in zip(forms, ends, strict=False)
    ]


# ---- weights by name -------------------------------------------------------------------------------------------------


NamedTensor = tuple[str, torch.Tensor]
_BASE, _OF_BASE = "base_model.model.", ".base_layer."
"""What PEFT puts in the names of the base model: before all of them, and where a layer is around one."""


class _Weight(NamedTuple):
    """A tensor to come: its size is known before anything is read."""

    name: str
    num_bytes: int
    read: Callable[[], torch.Tensor]
    ties: tuple[str, ...] = ()  # the other names of a param


def weights_for(
    model: nn.Module, *, bucket_bytes: int | str | None = None, adapters: Literal["merged", "apart"] = "merged"
) -> Iterator[Any]:
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
    engine: Engine | None = getattr(model, "__dict__", {}).get("_gemini_engine")
    if engine is None:
        raise ValueError(f"weights_for takes a model that GeminiDDP manages, and this {type(model).__name__} is none")
    if adapters not in ("merged", "apart"):
        raise ValueError(f"weights_for(adapters={adapters!r}): use 'merged' or 'apart'")
    engine.state.check_whole()
    merges = adapters == "merged" and is_a(type(model), "PeftModel")
    if merges and not hasattr(model.base_model, "merge_adapter"):
        raise GeminiError("weights_for(adapters='merged'): prompts are part of no weight. Use adapters='apart'")
    if merges and (coded := first_coded(model)):
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
            numel, ties = torch.Size(handle.whole_shape).numel(), handle.names[1:]
            yield _Weight(name, numel * handle.chunk.flat.itemsize, partial(_whole, by_names, handle), ties)


def _whole(by_names: ByName, handle: ParamHandle) -> torch.Tensor:
    own = by_names.in_place(handle, handle.chunk.flat.dtype)
    return by_names.joined(handle, by_names.read(handle) if own is None else own)


# ---- adapters --------------------------------------------------------------------------------------------------------


def _merged(entries: Iterator[_Weight], model: nn.Module, by_names: ByName) -> Iterator[_Weight]:
    """The weights of the base model with the active adapters in them, by the names that they had."""
    layers = {name: module for name, module in model.named_modules() if is_tuner_layer(module)}
    instead = (_OF_BASE, f".modules_to_save.{getattr(model, 'active_adapter', 'default')}.", ".token_adapter.")
    for entry in entries:
        names = [n for n in (entry.name, *entry.ties) if n.startswith(_BASE) and ".original_module." not in n]
        if not names:
            continue
        around, places = list[str](), list[tuple[Any, str]]()
        # Of tied weights each layer may have an adapter, and PEFT adds all of them to the one weight.
        for name in names:
            parts = name.split(".")
            around = [path for path in map(".".join, (parts[:end] for end in range(len(parts)))) if path in layers]
            # The innermost: what is not of its base layer is of the adapter.
            if around and name.startswith(around[-1] + _OF_BASE):
                places.append((layers[around[0]], parts[-1]))
        if around and not places:
            continue
        plain, read = names[0].removeprefix(_BASE), partial(_merge, places, by_names) if places else entry.read
        for known in instead:
            plain = plain.replace(known, ".")
        yield _Weight(plain.replace(_OF_BASE, "."), entry.num_bytes, read)


def _merge(places: list[tuple[Any, str]], by_names: ByName) -> torch.Tensor:
    """Let PEFT merge copies of layers, of which nothing is managed: the param of their base layers by these names."""
    value: torch.Tensor | None = None
    for layer, name in places:
        made = _ordinary(layer, by_names)
        if value is not None:
            made.get_base_layer().get_parameter(name).data = value
        for part in filter(is_tuner_layer, made.modules()):  # one may be around another, for another param
            part.merged_adapters = list(part.merged_adapters)
            call_without_grad(part.merge)
        value = made.get_base_layer().get_parameter(name).detach()
    assert value is not None
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
