"""From a model and a config to chunks at their homes: the one-time work of ``GeminiDDP(model, config)``.

Everything that can be refused is refused before the first byte of the model moves: bad params, budgets that cannot hold
it, a directory that cannot be written. Then the params move chunk by chunk, each freed as soon as it stands in its
home, so that the model and its chunks are never in memory twice.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from gemini.config import GeminiConfig
from gemini.errors import BudgetExceeded, GeminiError, human_bytes
from gemini.memory.chunks.chunk import COMPUTE_DTYPES, Chunk, MemoryPlane, make_plane
from gemini.memory.chunks.states import Use
from gemini.memory.devices.device import Device, StorageWindow
from gemini.memory.movement.foresight import Foresight, Schedule
from gemini.memory.nvme import SpillFile
from gemini.planning.layout import ChunkSpec, part_of
from gemini.planning.placement import Placement, Problem, bytes_per_tier
from gemini.planning.plan import Moves
from gemini.planning.planes import WEIGHTS, plane_specs
from gemini.planning.planner import moves_for
from gemini.planning.trace import Access, Source, accesses
from gemini.planning.working import device_tile_numel, tile_numel
from gemini.ranks.group import Ranks
from gemini.rules import rule_of
from gemini.tiers import Ledger, Tier
from gemini.train.params.guard import ParamHandle, engine_of, find_siblings, owner_of, poison
from gemini.train.setup.problem import Decision, check_optimizers, collect_params, decide

if TYPE_CHECKING:
    from gemini.train.engine import Engine


@dataclass
class Built:
    """What :func:`build` hands to the engine."""

    decision: Decision
    ledger: Ledger
    spill: SpillFile | None
    chunks: list[Chunk]
    handles: list[ParamHandle]
    tile: int
    device_tile: int
    """Elements of a tile that passes through the device."""
    working_set: int
    """Bytes of the computing tier that a step takes at most beside planes."""
    foresight: Foresight
    first_use: dict[int, int]
    """By chunk, the moment of a step at which it is read first, as far as that is known beforehand."""


def build(
    model: nn.Module, config: GeminiConfig, device: Device, engine: weakref.ref[Engine], ranks: Ranks | None = None
) -> Built:
    """Lay out, place, reserve and allocate. The params still hold their own memory afterwards."""
    named = collect_params(model)
    check_optimizers(named, rule_of(config.optimizer))
    size, rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
    decision = decide(model, config, device, ranks)
    problem, placement, layout = decision.problem, decision.placement, decision.problem.layout
    place_of = {slot.name: (chunk, slot) for chunk in layout.chunks for slot in chunk.slots}
    largest = max(chunk.numel for chunk in layout.chunks)
    tile, device_tile = tile_numel(largest), device_tile_numel(largest, problem.rule)
    ledger = Ledger(dict(problem.budgets))
    _reserve(ledger, problem, placement)
    needed = bytes_per_tier(problem, placement)
    device.reserve_host(needed.get(Tier.CPU, 0))
    device.reserve_windows(_window_bytes(ledger, problem, placement))
    on_disk = needed.get(Tier.NVME, 0)
    spill = SpillFile(config.memory.nvme_path, on_disk) if config.memory.nvme_path is not None else None
    chunks = [_make_chunk(spec, problem, placement, device, spill) for spec in layout.chunks]
    handles = [
        ParamHandle(
            n.names[0],
            n.names,
            n.param,
            chunks[spec.index],
            slot,
            part_of(slot, spec.numel, size, rank),
            engine,
        )
        for n in named
        for spec, slot in [place_of[n.names[0]]]
    ]
    for chunk, own in ((chunks[index], own) for index, own in iter_chunks(handles).items()):
        _make_views(chunk, own)
    in_steps = problem.working_set + problem.in_flight
    first_use: dict[int, int] = {}
    for access in accesses(decision.trace, layout):
        for index in access.chunks:
            first_use.setdefault(index, access.moment)
    foresight = _foresight(decision, engine)
    return Built(decision, ledger, spill, chunks, handles, tile, device_tile, in_steps, foresight, first_use)


def _foresight(decision: Decision, engine: weakref.ref[Engine]) -> Foresight:
    """The plan's own moves, if it was made for a real step; else those for the first step that is seen, which leave
    some room to activations on their way if they can.
    """
    trace, problem, placement, plan, _ = decision
    homes = placement.homes
    chunks = range(len(problem.layout.chunks))
    moving = frozenset(i for i in chunks if problem.needs_window(i, homes[i][WEIGHTS]))
    schedule = None
    if plan is not None and trace.source is not Source.STRUCTURE:
        schedule = Schedule(plan.accesses, plan.moves, moving, plan.again)

    def make_moves(steps: tuple[Access, ...]) -> tuple[Moves, ...]:
        owner = engine()
        for headroom in dict.fromkeys((0 if owner is None else owner.activations.headroom_bytes(), 0)):
            budgets = {**problem.budgets, problem.compute: problem.budgets[problem.compute] - headroom}
            with contextlib.suppress(BudgetExceeded):
                return moves_for(trace, replace(problem, budgets=budgets), placement, steps=steps)[0]
        # It went well because something else took less than it may: nothing can be promised.
        return (Moves(),) * len(steps)

    return Foresight(make_moves, schedule)


def _make_views(chunk: Chunk, handles: list[ParamHandle]) -> None:
    # torch makes no view of a storage that has been resized to nothing: give it memory for the moment.
    borrowed = chunk.window if isinstance(chunk.window, StorageWindow) else None
    if borrowed is not None:
        borrowed.populate()
    for handle in handles:
        handle.view = chunk.face[handle.slot.start : handle.slot.stop].view(handle.param.shape)
    if borrowed is not None:
        borrowed.depopulate()


def _reserve(ledger: Ledger, problem: Problem, placement: Placement) -> None:
    """Everything but the windows, whose room is taken and given back as they come and go."""
    for i, homes in enumerate(placement.homes):
        for kind, num_bytes in problem.plane_bytes(i).items():
            ledger.reserve(homes[kind], num_bytes, kind)
    if problem.exchange:
        ledger.reserve(Tier.CPU, problem.exchange, "exchange")
    if problem.activations:
        ledger.reserve(problem.compute, problem.activations, "activations")
    demands = problem.demands(placement)
    if problem.compute is Tier.GPU or demands != problem.spoken_for(gathers=False, stages=False):
        ledger.reserve(Tier.CPU, problem.staging, "staging")
    if placement.streamed:
        ledger.reserve(Tier.GPU, problem.device_staging, "staging")


def _window_bytes(ledger: Ledger, problem: Problem, placement: Placement) -> int:
    """The most that windows can have at once: all of them, or what the budget leaves them."""
    moving = [i for i, homes in enumerate(placement.homes) if problem.needs_window(i, homes[WEIGHTS])]
    return min(sum(problem.window_bytes(i) for i in moving), ledger.free(problem.compute) - problem.in_flight)


def _make_chunk(
    spec: ChunkSpec, problem: Problem, placement: Placement, device: Device, spill: SpillFile | None
) -> Chunk:
    homes, numel = placement.homes[spec.index], spec.numel // problem.layout.ranks
    planes = {
        kind: make_plane(form, numel, homes[kind], device, spill)
        for kind, form in problem.plane_specs(spec.index).items()
    }
    weights = planes[WEIGHTS]
    dtype = COMPUTE_DTYPES[problem.precision]
    if not problem.needs_window(spec.index, homes[WEIGHTS]):
        assert isinstance(weights, MemoryPlane)
        chunk = Chunk(spec, planes, weights.tensor, None, weights.tensor, use=Use.HOLD)
    else:
        window = device.make_window(spec.numel * dtype.itemsize)
        chunk = Chunk(spec, planes, window.bytes.view(dtype), window, window.face().view(dtype))
    chunk.trained, chunk.streamed = spec.trainable, spec.index in placement.streamed
    return chunk


def make_trainable(engine: Engine, chunk: Chunk) -> None:
    """Give a frozen chunk the planes of a trained one, on the fastest tier below the GPU with room for all."""
    if chunk.trained:
        return
    precision, numel = engine.config.precision, chunk.weights.numel
    specs = plane_specs(precision, engine.config.gradients, engine.rule.spec, trainable=True)
    missing = {kind: spec for kind, spec in specs.items() if kind not in chunk.planes}
    if precision == "fp16":
        raise GeminiError(
            f"{chunk.name} was frozen when the model was wrapped: in fp16 it has no fp32 master to train. "
            "Set requires_grad before wrapping, or use precision='bf16'"
        )
    num_bytes = sum(spec.page_bytes(numel) for spec in missing.values())
    below = [tier for tier in engine.ledger.tiers if tier is not Tier.GPU]
    if engine.device.tier in below:
        with contextlib.suppress(BudgetExceeded):  # then the next tier
            engine.manager.make_room(num_bytes, what=chunk.name)
    if engine.rule.spec.in_memory:
        below = [tier for tier in below if tier is not Tier.NVME]
    tier = next((t for t in below if engine.ledger.free(t) >= num_bytes), None)
    if tier is None:
        raise BudgetExceeded(
            f"{chunk.name} became trained after wrapping and needs {human_bytes(num_bytes)} for gradients and "
            "optimizer states, which no tier has: set requires_grad before wrapping, or raise a budget"
        )
    planes = {}
    for kind, spec in missing.items():
        planes[kind] = make_plane(spec, numel, tier, engine.device, engine.spill)
        engine.ledger.reserve(tier, planes[kind].num_bytes, kind)
    chunk.planes.update(planes)
    chunk.trained = True


def follow_requires_grad(engine: Engine) -> None:
    """After a flip of ``requires_grad``: a param that became trained gets its hook, its chunk what it lacks."""
    engine.activations.drain()
    for handle in engine.handles:
        handle.trained = handle.param.requires_grad
        if handle.trained and handle.hook is None:
            make_trainable(engine, handle.chunk)
            handle.hook = handle.param.register_post_accumulate_grad_hook(grad_hook(handle))


def iter_chunks(handles: Iterable[ParamHandle]) -> dict[int, list[ParamHandle]]:
    """Handles by the index of their chunk."""
    by_chunk: dict[int, list[ParamHandle]] = {}
    for handle in handles:
        by_chunk.setdefault(handle.chunk.spec.index, []).append(handle)
    return by_chunk


class Taken(NamedTuple):
    """What it takes to give a param back as it was: its dtype, and its values where its home has not all their bits."""

    handle: ParamHandle
    dtype: torch.dtype
    original: torch.Tensor | None


def adopt_all(engine: Engine, *, filled: bool = False) -> list[Taken]:
    """Move the params home one by one; what :func:`give_back` needs. If one cannot be moved, those that were are given
    back as they were.

    ``filled``: the homes hold the values already.
    """
    given: list[Taken] = []
    try:
        for index, handles in engine.by_chunk.items():
            for handle in handles:
                given.append(Taken(handle, *_adopt(engine, handle, filled)))
            if engine.chunks[index].gathered:
                engine.exposure.hide(engine.chunks[index])
            else:
                engine.exposure.poison(engine.chunks[index])
                engine.saved_weights.watch(engine.chunks[index], handles)
    except BaseException:
        if engine.shards is not None:
            raise  # the rest of a param is on other ranks, who may be past this point: the model must be made anew
        give_back(engine, given)
        raise
    find_siblings(engine.handles)
    return given


def give_back(engine: Engine, given: Iterable[Taken]) -> None:
    """Make taken params ordinary ones again, with the values they had."""
    for handle, dtype, original in given:
        param = handle.param
        value = engine.by_names.read(handle, torch.float32).to(dtype) if original is None else original
        param.__class__ = nn.Parameter
        param.data = value
        del param._gemini  # type: ignore[attr-defined]
        if handle.hook is not None:
            handle.hook.remove()
    engine.forget_params()


def _adopt(engine: Engine, handle: ParamHandle, filled: bool) -> tuple[torch.dtype, torch.Tensor | None]:
    """Move one param's values home and make it a view of its chunk; returns what undoing that needs.

    Its dtype is enough, unless it is frozen and gets narrower, or float64: then the original is kept until the model is
    whole.
    """
    param = handle.param
    original = param.data
    if not filled:
        engine.by_names.write(handle, original)
    param.grad = None
    param.data = handle.view
    handle.version = param._version
    param._gemini = handle  # type: ignore[attr-defined]
    handle.trained, handle.optimizer = param.requires_grad, owner_of(param)
    if handle.trained:
        handle.hook = param.register_post_accumulate_grad_hook(grad_hook(handle))
    narrowed = not handle.chunk.spec.trainable and original.dtype.itemsize > param.dtype.itemsize
    return original.dtype, original if narrowed or original.dtype.itemsize > 4 else None


def grad_hook(handle: ParamHandle) -> Any:
    """What moves a param's gradient into its chunk as soon as it is complete."""

    def take(param: torch.Tensor) -> None:
        engine_of(handle).take_grad(handle)

    return take


def take_apart(chunks: Iterable[Chunk], handles: Iterable[ParamHandle]) -> None:
    """The model ends: params refuse to be read, and neither they nor a chunk that somebody keeps hold any memory."""
    handles = list(handles)
    poison(handles)
    for handle in handles:
        handle.view = torch.empty(0, device="cpu")
        if handle.hook is not None:
            handle.hook.remove()
    for chunk in chunks:
        chunk.planes.clear()
        chunk.window = None
        chunk.flat = chunk.face = torch.empty(0, dtype=chunk.flat.dtype, device="cpu")
