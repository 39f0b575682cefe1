"""From a model and a config to chunks at their homes: the one-time work of ``GeminiDDP(model, config)``.

Everything that can be refused is refused before the first byte of the model moves: bad params, budgets that cannot hold
it, a directory that cannot be written. Then the params move chunk by chunk, each freed as soon as it stands in its
home, so that the model and its chunks are never in memory twice.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from gemini.config import GeminiConfig
from gemini.errors import BudgetExceeded, GeminiError, human_bytes, parse_bytes
from gemini.memory.chunk import COMPUTE_DTYPES, Chunk, FilePlane, MemoryPlane, Plane, plane_dtype
from gemini.memory.device import Device, StorageWindow
from gemini.memory.mover import staging_bytes, tile_numel
from gemini.memory.nvme import SpillFile, probe
from gemini.plan.layout import ChunkSpec, Layout, ParamSpec, make_layout
from gemini.plan.placement import Placement, Problem, StaticPlacement, by_fractions, bytes_per_tier, check_fits
from gemini.plan.placement import fill_fastest as place_automatically
from gemini.plan.planes import PlaneKind, compute_itemsize, plane_itemsizes
from gemini.states import Use
from gemini.tiers import Ledger, Tier
from gemini.train.guard import ParamHandle, engine_of, handle_of

if TYPE_CHECKING:
    from gemini.train.engine import Engine

MARGIN = 0.8
"""The share of measured free bytes that a budget which was left out may take; the rest is for others."""


@dataclass(frozen=True)
class NamedParam:
    """A param once, with all the names it goes by (the first one is its name here)."""

    param: nn.Parameter
    names: tuple[str, ...]


def collect_params(model: nn.Module) -> list[NamedParam]:
    """The model's params in declaration order, tied ones once.

    Raises:
        TypeError: for params whose dtype cannot be trained in chunks.
        ValueError: without params, or if one of them belongs to a wrapped model already.
    """
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    if not params:
        raise ValueError(f"{type(model).__name__} has no params: there is nothing for GeminiDDP to manage")
    for key, param in params.items():
        handle = handle_of(param)
        if handle is not None:
            raise ValueError(
                f"param {names[key][0]!r} is managed by another GeminiDDP model already (as {handle.name!r}): "
                "a param can belong to one wrapped model only. Wrap the outermost model once"
            )
        if param.dtype is torch.float64:
            warnings.warn(f"param {names[key][0]!r} is float64: its master will be float32", stacklevel=6)
        elif param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"param {names[key][0]!r} is {param.dtype}: GeminiDDP manages float32, bfloat16 and float16 "
                "params (integer, quantized and complex ones are not supported): register it as a buffer"
            )
        if param.is_meta:
            raise ValueError(
                f"param {names[key][0]!r} is on the meta device: it has no values to train from. Load or initialize "
                "the model first"
            )
        if param.layout is not torch.strided:
            raise TypeError(f"param {names[key][0]!r} is {param.layout}: GeminiDDP manages dense params only")
    return [NamedParam(param, tuple(names[key])) for key, param in params.items()]


def measure_budgets(config: GeminiConfig, device: Device) -> dict[Tier, int]:
    """Bytes per existing tier: as declared, else what is free now times ``MARGIN``.

    Raises:
        StorageError: if ``nvme_path`` cannot hold a spill file.
    """
    memory = config.memory
    budgets: dict[Tier, int] = {}
    gpu = memory.bytes_of(Tier.GPU)
    if device.tier is Tier.GPU:
        budgets[Tier.GPU] = int(device.free_bytes() * MARGIN) if gpu is None else gpu
    elif gpu:
        warnings.warn(f"memory gpu={memory.gpu!r} has no effect: the device is {device.name}", stacklevel=6)
    cpu = memory.bytes_of(Tier.CPU)
    budgets[Tier.CPU] = int(psutil.virtual_memory().available * MARGIN) if cpu is None else cpu
    if memory.nvme_path is not None:
        found = probe(memory.nvme_path)
        nvme = memory.bytes_of(Tier.NVME)
        budgets[Tier.NVME] = int(found.free_bytes * MARGIN) if nvme is None else nvme
    return budgets


def working_set(model: nn.Module, chunk_of: Callable[[nn.Parameter], ChunkSpec], itemsize: int) -> int:
    """Bytes of gathered weights that one module needs at once: its own chunks and those of the modules around it.

    A module that owns params may read its leaf children's weights itself (``out_proj.weight`` in an attention module
    that calls a fused op), so theirs count too.
    """
    largest = 0

    def visit(module: nn.Module, around: frozenset[int]) -> None:
        nonlocal largest
        own = [chunk_of(p) for p in module._parameters.values() if p is not None]
        inside = around | {chunk.index for chunk in own}
        leaves = [p for child in module.children() if not any(child.children()) for p in child._parameters.values()]
        read = own + [chunk_of(p) for p in leaves if p is not None and own]
        for chunk in read:
            sizes[chunk.index] = chunk.numel * itemsize
        largest = max(largest, sum(sizes[index] for index in inside | {chunk.index for chunk in read}))
        for child in module.children():
            visit(child, inside)

    sizes: dict[int, int] = {}
    visit(model, frozenset())
    return largest


def decide_placement(problem: Problem, config: GeminiConfig) -> Placement:
    """The placement the config asks for.

    Raises:
        BudgetExceeded: if it does not fit.
    """
    if isinstance(config.placement, StaticPlacement):
        wanted = config.placement
        if problem.compute is Tier.CPU and (wanted.weights_on_gpu or wanted.optimizer_on_gpu):
            warnings.warn("StaticPlacement: fractions on gpu have no effect without a GPU", stacklevel=6)
            wanted = StaticPlacement(weights_on_nvme=wanted.weights_on_nvme, optimizer_on_nvme=wanted.optimizer_on_nvme)
        return by_fractions(problem, wanted)
    if isinstance(config.placement, Placement):
        check_fits(problem, config.placement)
        return config.placement
    return place_automatically(problem)


@dataclass
class Built:
    """What :func:`build` hands to the engine."""

    layout: Layout
    placement: Placement
    ledger: Ledger
    spill: SpillFile | None
    chunks: list[Chunk]
    handles: list[ParamHandle]
    tile: int


def build(model: nn.Module, config: GeminiConfig, device: Device, engine: weakref.ref[Engine]) -> Built:
    """Lay out, place, reserve and allocate. The params still hold their own memory afterwards."""
    named = collect_params(model)
    layout = make_layout(
        [ParamSpec(n.names[0], n.param.numel(), n.param.requires_grad) for n in named], max_chunk=config.max_chunk
    )
    place_of = {slot.name: (chunk, slot) for chunk in layout.chunks for slot in chunk.slots}
    chunk_by_id = {id(n.param): place_of[n.names[0]][0] for n in named}
    tile = tile_numel(max(chunk.numel for chunk in layout.chunks))
    problem = Problem(
        layout=layout,
        precision=config.precision,
        gradients=config.gradients,
        budgets=measure_budgets(config, device),
        compute=device.tier,
        working_set=working_set(model, lambda p: chunk_by_id[id(p)], compute_itemsize(config.precision)),
        staging=staging_bytes(tile),
        activations=parse_bytes(config.activations) if device.tier is Tier.GPU else 0,
    )
    placement = decide_placement(problem, config)
    ledger = Ledger(dict(problem.budgets))
    _reserve(ledger, problem, placement)
    on_disk = bytes_per_tier(problem, placement).get(Tier.NVME, 0)
    spill = SpillFile(config.memory.nvme_path, on_disk) if config.memory.nvme_path is not None else None
    chunks = [_make_chunk(spec, problem, placement, device, spill) for spec in layout.chunks]
    handles = [
        ParamHandle(
            n.names[0], n.names, n.param, chunks[place_of[n.names[0]][0].index], place_of[n.names[0]][1], engine
        )
        for n in named
    ]
    for chunk, own in ((chunks[index], own) for index, own in iter_chunks(handles).items()):
        _make_views(chunk, own)
    return Built(layout, placement, ledger, spill, chunks, handles, tile)


def _make_views(chunk: Chunk, handles: list[ParamHandle]) -> None:
    # torch makes no view of a storage that has been resized to nothing: give it memory for the moment.
    borrowed = chunk.window if isinstance(chunk.window, StorageWindow) else None
    if borrowed is not None:
        borrowed.populate()
    for handle in handles:
        handle.view = chunk.flat[handle.slot.start : handle.slot.stop].view(handle.param.shape)
    if borrowed is not None:
        borrowed.depopulate()


def _reserve(ledger: Ledger, problem: Problem, placement: Placement) -> None:
    """Everything but the windows, whose room is taken and given back as they come and go."""
    for i, homes in enumerate(placement.homes):
        for kind, num_bytes in problem.plane_bytes(i).items():
            ledger.reserve(homes[kind], num_bytes, kind.value)
    if problem.activations:
        ledger.reserve(problem.compute, problem.activations, "activations")
    demands = problem.demands(placement)
    if problem.compute is Tier.GPU or demands != problem.spoken_for(gathers=False, stages=False):
        ledger.reserve(Tier.CPU, problem.staging, "staging")


def make_plane(numel: int, dtype: torch.dtype, tier: Tier, device: Device, spill: SpillFile | None) -> Plane:
    """A zeroed plane in its home; whoever calls has reserved it."""
    if tier is Tier.NVME:
        assert spill is not None
        return FilePlane(spill, numel, dtype)
    make = device.make_buffer if tier is Tier.GPU else device.make_host_buffer
    return MemoryPlane(make(numel * dtype.itemsize).view(dtype), tier, device)


def _make_chunk(
    spec: ChunkSpec, problem: Problem, placement: Placement, device: Device, spill: SpillFile | None
) -> Chunk:
    homes = placement.homes[spec.index]
    precision = problem.precision
    planes = {}
    for kind, itemsize in plane_itemsizes(precision, problem.gradients, trainable=spec.trainable).items():
        dtype = plane_dtype(kind, precision, trainable=spec.trainable, itemsize=itemsize)
        planes[kind] = make_plane(spec.numel, dtype, homes[kind], device, spill)
    weights = planes[PlaneKind.WEIGHTS]
    dtype = COMPUTE_DTYPES[precision]
    if not problem.needs_window(spec.index, homes[PlaneKind.WEIGHTS]):
        assert isinstance(weights, MemoryPlane)
        return Chunk(spec, planes, weights.tensor, None, use=Use.HOLD)
    window = device.make_window(spec.numel * dtype.itemsize)
    return Chunk(spec, planes, window.bytes.view(dtype), window)


def make_trainable(engine: Engine, chunk: Chunk) -> None:
    """Give a frozen chunk the planes of a trained one, on the fastest tier below the GPU with room for all."""
    precision = engine.config.precision
    sizes = plane_itemsizes(precision, engine.config.gradients, trainable=True)
    missing = {kind: size for kind, size in sizes.items() if kind not in chunk.planes}
    if not missing:
        return
    if precision == "fp16":
        raise GeminiError(
            f"{chunk.name} was frozen when the model was wrapped: in fp16 it has no fp32 master to train. "
            "Set requires_grad before wrapping, or use precision='bf16'"
        )
    num_bytes = sum(missing.values()) * chunk.spec.numel
    below = [tier for tier in engine.ledger.tiers if tier is not Tier.GPU]
    if engine.device.tier in below:
        with contextlib.suppress(BudgetExceeded):  # then the next tier
            engine.manager.make_room(num_bytes, what=chunk.name)
    tier = next((t for t in below if engine.ledger.free(t) >= num_bytes), None)
    if tier is None:
        raise BudgetExceeded(
            f"{chunk.name} became trained after wrapping and needs {human_bytes(num_bytes)} for gradients and "
            "optimizer states, which no tier has: set requires_grad before wrapping, or raise a budget"
        )
    planes = {}
    for kind, size in missing.items():
        dtype = plane_dtype(kind, precision, trainable=True, itemsize=size)
        planes[kind] = make_plane(chunk.spec.numel, dtype, tier, engine.device, engine.spill)
        engine.ledger.reserve(tier, planes[kind].num_bytes, kind.value)
    chunk.planes.update(planes)


def iter_chunks(handles: Iterable[ParamHandle]) -> dict[int, list[ParamHandle]]:
    """Handles by the index of their chunk."""
    by_chunk: dict[int, list[ParamHandle]] = {}
    for handle in handles:
        by_chunk.setdefault(handle.chunk.spec.index, []).append(handle)
    return by_chunk


def adopt_all(engine: Engine) -> None:
    """Move the params home one by one. If one cannot be moved, those that were are given back as they were."""
    given: list[tuple[ParamHandle, torch.dtype, torch.Tensor | None]] = []
    try:
        for index, handles in engine.by_chunk.items():
            for handle in handles:
                given.append((handle, *_adopt(engine, handle)))
            if engine.chunks[index].gathered:
                engine.hide_chunk(engine.chunks[index])
            else:
                engine.poison_chunk(engine.chunks[index])
    except BaseException:
        for handle, dtype, original in given:
            param = handle.param
            param.__class__ = nn.Parameter
            param.data = engine.by_names.read(handle, torch.float32).to(dtype) if original is None else original
            del param._gemini  # type: ignore[attr-defined]
            if handle.hook is not None:
                handle.hook.remove()
        engine.handles = []
        raise


def _adopt(engine: Engine, handle: ParamHandle) -> tuple[torch.dtype, torch.Tensor | None]:
    """Move one param's values home and make it a view of its chunk; returns what undoing that needs.

    Its dtype is enough, unless it is frozen and gets narrower: then the original is kept until all are home.
    """
    param = handle.param
    original = param.data
    engine.by_names.write(handle, original)
    param.grad = None
    param.data = handle.view
    handle.version = param._version
    param._gemini = handle  # type: ignore[attr-defined]
    handle.trained = param.requires_grad
    if handle.trained:
        handle.hook = param.register_post_accumulate_grad_hook(grad_hook(handle))
    narrowed = not handle.chunk.spec.trainable and original.dtype.itemsize > param.dtype.itemsize
    return original.dtype, original if narrowed else None


def grad_hook(handle: ParamHandle) -> Any:
    """What moves a param's gradient into its chunk as soon as it is complete."""

    def take(param: torch.Tensor) -> None:
        engine_of(handle).take_grad(handle)

    return take
