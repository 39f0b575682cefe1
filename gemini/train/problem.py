"""What has to be placed: the params, their sizes, and the bytes there are, before anything is allocated."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil
import torch
from torch import nn

from gemini.config import GeminiConfig
from gemini.errors import parse_bytes
from gemini.memory.chunk import COMPUTE_DTYPES
from gemini.memory.device import Device
from gemini.memory.nvme import probe
from gemini.planning.layout import ChunkSpec, Layout
from gemini.planning.placement import Placement, Problem, StaticPlacement, by_fractions, check_fits
from gemini.planning.placement import fill_fastest as place_automatically
from gemini.planning.planes import compute_itemsize
from gemini.planning.working import MARGIN, PIECE, gradients_in_flight, scratch_bytes, staging_bytes
from gemini.ranks.group import Ranks
from gemini.tiers import Tier
from gemini.train.guard import handle_of
from gemini.train.reading import params_read_by
from gemini.version import __version__


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
    named = _by_identity(model)
    if not named:
        raise ValueError(f"{type(model).__name__} has no params: there is nothing for GeminiDDP to manage")
    for param, names in ((n.param, n.names) for n in named):
        handle = handle_of(param)
        if handle is not None:
            raise ValueError(
                f"param {names[0]!r} is managed by another GeminiDDP model already (as {handle.name!r}): "
                "a param can belong to one wrapped model only. Wrap the outermost model once"
            )
        if param.dtype is torch.float64:
            warnings.warn(f"param {names[0]!r} is float64: its master will be float32", stacklevel=6)
        elif param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"param {names[0]!r} is {param.dtype}: GeminiDDP manages float32, bfloat16 and float16 "
                "params (integer, quantized and complex ones are not supported): register it as a buffer"
            )
        if param.is_meta:
            raise ValueError(
                f"param {names[0]!r} is on the meta device: it has no values to train from. Load or initialize "
                "the model first, or let gemini.from_pretrained or gemini.from_config do it piece by piece"
            )
        if param.layout is not torch.strided:
            raise TypeError(f"param {names[0]!r} is {param.layout}: GeminiDDP manages dense params only")
    return named


def _by_identity(model: nn.Module) -> list[NamedParam]:
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    return [NamedParam(param, tuple(names[key])) for key, param in params.items()]


def prepare(model: nn.Module, config: GeminiConfig, ranks: Ranks, *, filled: bool = True) -> None:
    """Before anything is built: the same model and settings on every rank, and the weights and buffers of rank 0.

    ``filled``: the model has its values already; else whoever fills it sees that they are the same.

    Raises:
        RankMismatch: if ranks differ.
        ValueError: for settings that do not go with replicas.
    """
    if ranks.replicas is not None and config.gradients == "transient":
        raise ValueError(
            'gradients="transient" updates inside backward, when only the ranks of one replica have added up their '
            'gradients: with a 2-D mesh use gradients="retain" or "accumulate", or a mesh of one dimension'
        )
    named = collect_params(model)  # before weights are compared: what cannot be managed has none that could be
    params = {
        name: f"{tuple(param.shape)} {param.dtype}{'' if param.requires_grad else ' frozen'}"
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    memory = {name: size for name, size in vars(config.memory).items() if name != "nvme_path"}
    settings = {name: value for name, value in vars(config).items() if name not in ("memory", "device")}
    ranks.check_same(
        {
            "version of gemini": __version__,
            "version of torch": str(torch.__version__),
            "version of Python": ".".join(map(str, sys.version_info[:2])),
            "model": type(model).__name__,
            "set of params": params,
            "set of tied params": [list(n.names) for n in named if len(n.names) > 1],
            "config": {name: repr(value) for name, value in settings.items()},
            "memory budget": {name: repr(size) for name, size in memory.items()},
            "nvme_path": config.memory.nvme_path is not None,
            "device": str(config.device).partition(":")[0],
        }
    )
    if not filled:
        return
    tensors = {name: param.data for name, param in model.named_parameters()}
    ranks.take_from_first({**tensors, **dict(model.named_buffers())})


def measure_budgets(config: GeminiConfig, device: Device, ranks: Ranks | None = None) -> dict[Tier, int]:
    """Bytes per existing tier for this process: as declared, else what is free now times ``MARGIN``.

    Host memory and disk are a machine's: the ranks on it divide them. What is measured is what the poorest rank has.

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
    if ranks is not None:
        for tier in (Tier.CPU, Tier.NVME):
            if tier in budgets:
                budgets[tier] //= ranks.local_size
        budgets = dict(zip(budgets, ranks.smallest(list(budgets.values())), strict=True))
    return budgets


def working_set(model: nn.Module, chunk_of: Callable[[nn.Parameter], ChunkSpec], itemsize: int) -> int:
    """Bytes of gathered weights that one module needs at once: its own chunks and those of the modules around it.

    A module that owns params may read its leaf children's weights itself (``out_proj.weight`` in an attention module
    that calls a fused op), so theirs count too.
    """
    largest = 0

    def visit(module: nn.Module, around: frozenset[int]) -> None:
        nonlocal largest
        own = [chunk_of(p) for p in params_read_by(module)]
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


def reduce_dtype(config: GeminiConfig) -> torch.dtype:
    """What gradients are sent in between ranks."""
    return COMPUTE_DTYPES[config.reduce_dtype or config.precision]


def pose(
    model: nn.Module,
    config: GeminiConfig,
    device: Device,
    layout: Layout,
    tile: int,
    chunk_by_id: dict[int, ChunkSpec],
    ranks: Ranks | None,
) -> Problem:
    """All that placing needs to know. ``chunk_by_id``: the chunk of each param, by its ``id``."""
    problem = Problem(
        layout=layout,
        precision=config.precision,
        gradients=config.gradients,
        budgets=measure_budgets(config, device, ranks),
        compute=device.tier,
        working_set=working_set(model, lambda p: chunk_by_id[id(p)], compute_itemsize(config.precision)),
        staging=staging_bytes(tile),
        activations=parse_bytes(config.activations) if device.tier is Tier.GPU else 0,
    )
    if ranks is not None:
        most = max(ranks.size, ranks.num_replicas)
        problem = replace(
            problem,
            in_flight=gradients_in_flight(layout, reduce_dtype(config).itemsize),
            exchange=scratch_bytes(most, min(tile, PIECE)),
        )
    return problem
