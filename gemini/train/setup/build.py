"""From a model and a config to chunks at their homes: the one-time work of ``GeminiDDP(model, config)``.

Everything that can be refused is refused before the first byte of the model moves. Then the params move chunk by chunk,
each freed as soon as it stands in its home, so that the model and its chunks are never in memory twice.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini.config import GeminiConfig
from gemini.errors import BudgetExceeded
from gemini.ledger import Ledger
from gemini.memory.chunks.chunk import COMPUTE_DTYPES, Chunk, MemoryPlane, Use, make_plane
from gemini.memory.devices.device import Device, StorageWindow
from gemini.memory.devices.pages import PAGE
from gemini.memory.durable.folder import StoreFolder
from gemini.memory.durable.slots import slot_name
from gemini.memory.movement.foresight import Foresight, Schedule
from gemini.memory.movement.manager import Manager
from gemini.memory.movement.mover import Mover
from gemini.memory.movement.transfers import Lane, Transfers
from gemini.memory.nvme import SpillFile
from gemini.memory.store import ChunkStore
from gemini.planning.layout import ChunkSpec, part_of
from gemini.planning.placement import Placement, Problem, bytes_per_tier
from gemini.planning.plan import Moves, window_room
from gemini.planning.planes import GRADS, WEIGHTS, precision_of
from gemini.planning.planner import moves_for
from gemini.planning.policy import EvictionPolicy
from gemini.planning.trace import Access, Source, accesses
from gemini.planning.working import device_tile_numel, tile_numel, whole_numel
from gemini.ranks.group import Ranks
from gemini.rules import UpdateRule, refuse_other
from gemini.sharing import pool_of
from gemini.tiers import DRIVE, FILED, Tier
from gemini.train.modules.reading import NamedParam, Structure
from gemini.train.params.handle import ParamHandle, ParamSet, TensorSlice, make_factors, optimizer_of
from gemini.train.setup.problem import Decision, collect_params, decide

_CROSSING = (WEIGHTS, *GRADS)
"""Planes of the host that are copied to or from the device in every step; of streamed updates the others are, too."""


class Built(NamedTuple):
    """The parts that :func:`build` hands to the engine."""

    decision: Decision
    params: ParamSet
    store: ChunkStore


def build(
    structure: Structure,
    config: GeminiConfig,
    device: Device,
    owner: weakref.ref[Any],
    ranks: Ranks,
    rule: UpdateRule,
    cuts: Mapping[int, TensorSlice] | None,
    opened: ExitStack,
) -> Built:
    """Lay out, place, reserve and allocate; params keep their memory. ``cuts``: by a param's id, which slice it is.
    ``opened``: is given what is to be closed when the model ends, or cannot be made.
    """
    named = collect_params(structure)
    for optimizer in filter(None, [optimizer_of(n.param) for n in named]):
        refuse_other(optimizer.rule, rule)
    # Gradients of experts are added up among other ranks than those of the rest.
    spread = cuts if cuts and ranks.experts.size > 1 else ()
    decision = decide(structure, config, device, ranks, {n.names[0] for n in named if id(n.param) in spread})
    problem, placement = decision.problem, decision.placement
    ledger, needed = _make_ledger(config, problem, placement), bytes_per_tier(problem, placement)
    for part in (ledger, device):  # whose memory, and the limit of its allocator, go before the books say so
        opened.callback(part.close)
    opened.callback(device.reserve_windows, 0)
    # The params are still where they were: of a budget that is declared they take a part until they are taken over.
    there = sum(n.param.nbytes for n in named if n.param.device == device.torch_device)
    begin_budget(device, config, problem, needed[device.tier], there)
    _reserve_on_device(device, ledger, problem, placement, in_flight=0 if ranks.are_alone else problem.in_flight)
    durable = _open_store(config, problem, ranks)
    if durable is not None:
        opened.callback(durable.close)
    files = dict[Tier, SpillFile]()
    for tier, num_bytes in _in_files(config, needed, durable).items():
        files[tier] = SpillFile(config.memory.paths_of(tier), num_bytes, tier)
        opened.callback(files[tier].close)
    chunks = _make_chunks(decision, device, files, durable)
    params = _make_params(named, chunks, problem, owner, ranks, cuts or {})
    for index, handles in params.by_chunk.items():
        _make_views(chunks[index], handles)
    largest = max(chunk.spec.numel for chunk in chunks)
    whole = whole_numel(problem.layout, problem.rule)
    device_tile = device_tile_numel(largest, problem.rule, whole)  # staging is for tiles of the largest chunk
    mover = Mover(device, tile_numel(largest, whole), ledger, device_tile=device_tile, rule=rule.spec)
    transfers = Transfers(mover, _lanes(config, ranks, device))
    manager = Manager(
        chunks,
        ledger=ledger,
        device=device,
        mover=mover,
        policy=config.eviction_policy,
        foresight=PlannedForesight(decision, owner, config.eviction_policy, ledger),
        transfers=transfers,
    )
    in_steps = problem.working_set + problem.in_flight
    store = ChunkStore(chunks, device, ledger, mover, transfers, manager, files, in_steps, durable)
    return Built(decision, params, store)


def _lanes(config: GeminiConfig, ranks: Ranks, device: Device) -> set[Lane]:
    """Say what moves beside training."""
    lanes = set(Lane) if config.overlap else set()
    if ranks.wire.size == 1:
        lanes.discard(Lane.REDUCE)
    if ranks.shares_params or device.tier is not Tier.GPU:
        lanes.discard(Lane.LANDING)  # what ranks add up lands behind that; elsewhere gradients are at home at once
    return lanes


def begin_budget(device: Device, config: GeminiConfig, problem: Problem, needed: int, there: int = 0) -> None:
    """Tell the device what the model may take, ``needed`` bytes of it at once; ``there`` ones are about to go."""
    # The allocator knows one limit for each model: of a shared budget all have the same bytes.
    is_declared = config.memory.bytes_of(device.tier) is not None and pool_of(config.memory) is None
    # Of a budget that leaves activations no room nobody has said that it is all there may be.
    has_all = problem.activations > 0 or config.activations is not None
    device.begin_budget(problem.budgets[device.tier] if is_declared else None, needed, there, limited=has_all)


def _open_store(config: GeminiConfig, problem: Problem, ranks: Ranks) -> StoreFolder | None:
    """Open the durable store, with two slots of every plane that outlives the process; None without one."""
    if not problem.durable:
        return None
    directories = config.memory.paths_of(DRIVE)
    sizes = {
        slot_name(kind, i): num_bytes
        for i in range(len(problem.layout.chunks))
        for kind, num_bytes in problem.durable_bytes(i).items()
    }
    return StoreFolder(directories, sizes, rank=ranks.wire.rank, ranks=ranks.wire.size, smallest=ranks.smallest)


class PlannedForesight(Foresight):
    """Foresight that plans as the planner does: the plan's own moves, if it was made for a real step; else those for
    the first step that is seen. ``owner``: the passes of the model, weakly: foresight keeps no model. ``policy``: who
    makes the moves; None for what costs least. ``ledger``: knows what later models have taken of a shared budget.
    """

    def __init__(self, decision: Decision, owner: weakref.ref[Any], policy: EvictionPolicy | None, ledger: Ledger):
        problem, plan = decision.problem, decision.plan
        self._problem, self._placement = problem, decision.placement
        self._owner, self._policy, self._ledger = owner, policy, ledger
        schedule = None
        if plan is not None and decision.trace.source is not Source.STRUCTURE:
            schedule = Schedule(plan.accesses, plan.moves, problem.moving(decision.placement), plan.again)
        super().__init__(schedule)

    def plan(self, steps: tuple[Access, ...]) -> Sequence[Moves]:
        """Make the moves for recorded accesses, which leave some room to activations on their way if they can."""
        model, problem = self._owner(), self._problem
        left = {tier: min(n, self._ledger.share(tier)) for tier, n in problem.budgets.items()}
        problem = replace(problem, budgets=left)
        # First with room for activations on their way, then without; a dict keeps the order, and says 0 once.
        for room in {0 if model is None else model.activations.flights.headroom_bytes(): None, 0: None}:
            budgets = {**left, problem.compute: left[problem.compute] - room}
            with contextlib.suppress(BudgetExceeded):
                return moves_for(steps, replace(problem, budgets=budgets), self._placement, policy=self._policy)[0]
        # It went well because something else took less than it may: nothing can be promised.
        return super().plan(steps)


def _make_views(chunk: Chunk, handles: list[ParamHandle]) -> None:
    # torch makes no view of a storage that has been resized to nothing: give it memory for the moment.
    borrowed = [chunk.window] if isinstance(chunk.window, StorageWindow) else []
    for window in borrowed:
        window.populate()
    for handle in handles:
        handle.view = chunk.face.narrow(0, handle.slot.start, handle.slot.numel).view(handle.param.shape)
    for window in borrowed:
        window.depopulate()


def _make_ledger(config: GeminiConfig, problem: Problem, placement: Placement) -> Ledger:
    """Reserve all but the windows, whose room is taken and given back as they come and go. Before anything is
    allocated: what does not fit is refused while the model is whole.
    """
    pool = pool_of(config.memory)
    budgets = dict(problem.budgets) if pool is None else {tier: pool.budget(tier) for tier in problem.budgets}
    ledger = Ledger(budgets, pool)
    moving = problem.moving(placement)
    ledger.needs[problem.compute] = problem.in_flight + (problem.working_set if moving else 0)
    ledger.gathers[problem.compute] = problem.in_flight + sum(map(problem.window_bytes, moving))
    for homes, sizes in zip(placement.homes, problem.sizes, strict=True):
        for kind, num_bytes in sizes.items():
            ledger.reserve(homes[kind], num_bytes, kind)
    ledger.reserve(Tier.CPU, problem.exchange, "exchange")
    ledger.reserve(Tier.CPU, problem.factors, "factors")
    ledger.reserve(problem.compute, problem.beside, "context")
    ledger.reserve(problem.compute, problem.activations, "activations")
    for tier in {Tier.CPU, problem.compute}:
        ledger.reserve(tier, problem.temporaries, "temporaries")
    # The second slot of every plane in the store, which the next commit is written to.
    if problem.durable:
        ledger.reserve(DRIVE, problem.spare_slots(placement), "spare slots")
    demands = problem.demands(placement)
    # On the host, everything in memory, and no durable store: updates work in place.
    still = problem.compute is not Tier.GPU and not problem.durable  # nothing has to be staged
    if not still or demands != problem.spoken_for(gathers=False, stages=False):
        ledger.reserve(Tier.CPU, problem.staging, "staging")
    if placement.streamed:
        ledger.reserve(Tier.GPU, problem.device_staging, "staging")
    return ledger


def _reserve_on_device(
    device: Device, ledger: Ledger, problem: Problem, placement: Placement, *, in_flight: int
) -> None:
    """Let the device take the memory of what it computes with. ``in_flight``: gradients that stand in windows too."""
    # What of host memory is copied to or from the device, by name, in the order in which it is made.
    crossing = [
        (f"{kind} of chunk {i}", num_bytes)
        for i, homes in enumerate(placement.homes)
        for kind, num_bytes in problem.sizes[i].items()
        if homes[kind] is Tier.CPU and (kind in _CROSSING or i in placement.streamed)
    ]
    device.reserve_host(crossing)
    # No more than all windows, and no more than the plan leaves them; beside those of ranks, whose gradients stand in
    # windows too until they are divided.
    windows = ledger.gathers[problem.compute] - problem.in_flight
    wanted = min(windows, window_room(problem, placement)) + in_flight
    if device.keeps_windows:  # which others may have for their own
        ledger.make_room(device.tier, wanted)
    # Rounded down to whole pages, in which windows get their memory.
    of_windows = min(wanted, ledger.free(problem.compute)) // PAGE * PAGE
    device.reserve_windows(of_windows)
    # Windows that are never given back count in full; others as they come and go.
    if device.keeps_windows:
        ledger.reserve(device.tier, of_windows, "pool")
    planes = zip(placement.homes, problem.sizes, strict=True)
    device.reserve_buffers(n for homes, sizes in planes for kind, n in sizes.items() if homes[kind] is problem.compute)


def _in_files(config: GeminiConfig, needed: Mapping[Tier, int], durable: StoreFolder | None) -> dict[Tier, int]:
    """Say how many bytes of the ``needed`` ones each spill file has; what is in the durable store needs none."""
    in_store = {DRIVE: 0 if durable is None else durable.slots.num_bytes}
    return {t: needed.get(t, 0) - in_store.get(t, 0) for t in FILED if config.memory.paths_of(t)}


def _make_chunks(
    decision: Decision, device: Device, files: Mapping[Tier, SpillFile], durable: StoreFolder | None
) -> list[Chunk]:
    """Allocate all chunks, which know when they are first read."""
    problem, placement = decision.problem, decision.placement
    chunks = [_make_chunk(spec, problem, placement, device, files, durable) for spec in problem.layout.chunks]
    for access in accesses(decision.trace, problem.layout):
        for index in access.chunks:
            chunks[index].first_use = min(chunks[index].first_use, access.moment)
    return chunks


def _make_chunk(
    spec: ChunkSpec,
    problem: Problem,
    placement: Placement,
    device: Device,
    files: Mapping[Tier, SpillFile],
    durable: StoreFolder | None,
) -> Chunk:
    homes, numel = placement.homes[spec.index], spec.numel // problem.layout.ranks
    streamed = spec.index in placement.streamed
    planes = {}
    for kind, form in problem.forms[spec.index].items():
        pair = None if durable is None else durable.slots.pairs.get(slot_name(kind, spec.index))
        crosses = streamed or kind in _CROSSING
        planes[kind] = make_plane(form, numel, homes[kind], device, files, pair, crosses=crosses)
    weights = planes[WEIGHTS]
    dtype = torch.uint8 if spec.coded else COMPUTE_DTYPES[precision_of(spec, problem.precision)]
    # Its home is where modules read: the plane itself is what they see.
    if not problem.needs_window(spec.index, homes[WEIGHTS]):
        assert isinstance(weights, MemoryPlane)
        chunk = Chunk(spec, planes, weights.tensor, None, weights.tensor, use=Use.HOLD)
    else:
        # Address space alone: memory comes when the window is populated.
        window = device.make_window(spec.numel * dtype.itemsize)
        chunk = Chunk(spec, planes, window.bytes.view(dtype), window, window.face().view(dtype))
    chunk.trained, chunk.streamed = spec.trainable, streamed
    return chunk


def _make_params(
    named: list[NamedParam],
    chunks: list[Chunk],
    problem: Problem,
    owner: weakref.ref[Any],
    ranks: Ranks,
    cuts: Mapping[int, TensorSlice],
) -> ParamSet:
    """Make the handles, in the order of declaration; their views are still missing."""
    size, rank = ranks.wire.size, ranks.wire.rank
    place_of = {
        slot.name: (chunk, slot, part_of(slot, chunk.spec.numel, size, rank))
        for chunk in chunks
        for slot in chunk.spec.slots
    }
    params = ParamSet([], {})
    for n in named:
        chunk, slot, part = place_of[n.names[0]]
        kind = type(n.param) if issubclass(type(n.param), nn.Parameter) else nn.Parameter
        cut = cuts.get(id(n.param))
        handle = ParamHandle(n.names[0], n.names, n.param, chunk, slot, part, owner, kind=kind, cut=cut)
        if problem.rule.factors and chunk.trained:  # small, and always in host memory
            handle.factors = make_factors(problem.rule, n.param.shape)
        params.handles.append(handle)
        params.by_chunk.setdefault(chunk.spec.index, []).append(handle)
    return params
