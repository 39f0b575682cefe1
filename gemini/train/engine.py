"""The engine behind one wrapped model: makes all that its training is done with, and hands each part what it needs.

Nothing below knows it. Hooks and params refer to it weakly, as the passes and the owner that they ask: the model alone
keeps it alive. Params are ordinary ones while the model computes, and guarded at all other times.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from gemini.config import GeminiConfig
from gemini.errors import warn
from gemini.interrupts import WHOLE
from gemini.ledger import Turn
from gemini.memory.devices.device import Device, make_device
from gemini.optim.around import rule_for
from gemini.patches import sums_in_fp16
from gemini.ranks.group import Ranks, join
from gemini.ranks.wire import Wire
from gemini.rules import UpdateRule
from gemini.train.activations.store import ActivationStore
from gemini.train.gradients.norms import GradientNorms
from gemini.train.gradients.scaling import Scaling
from gemini.train.gradients.store import GradientStore
from gemini.train.modules.calls import Calls
from gemini.train.modules.reading import Structure
from gemini.train.modules.saved_weights import SavedWeights
from gemini.train.observers import ChangedChunks, Observers, WriteObservers
from gemini.train.params.by_name import ByName, Owner
from gemini.train.params.exposure import Exposure
from gemini.train.params.handle import StageParam, TensorSlice
from gemini.train.passes.again import Again
from gemini.train.passes.backward import BackwardPass, Recovery
from gemini.train.passes.forward import ForwardPass, Parts
from gemini.train.passes.parking import Parking
from gemini.train.passes.stepping import Stepping
from gemini.train.setup.adoption import Adoption, TrainedParams, take_apart
from gemini.train.setup.build import Built, build
from gemini.train.setup.problem import prepare, reduce_dtype
from gemini.train.sharding.reduction import Reduction
from gemini.train.sharding.shards import Company, Shards
from gemini.train.step import StepState, alone
from gemini.train.update.sinks import GradientSink
from gemini.train.update.updates import Updates


class Engine:
    """Everything that one wrapped model is trained with. Made, drained and closed by the training thread.
    ``is_filled``: params hold their values; else :meth:`take_home` is given what writes them. ``cuts``: by the id of a
    param of a model in slices, which slice it is. ``of_stages``: of one stage of a pipeline, the params of all of them
    in the order of the whole model.
    """

    def __init__(
        self,
        structure: Structure,
        config: GeminiConfig,
        *,
        process_group: Any = None,
        mesh: Any = None,
        is_filled: bool = True,
        cuts: Mapping[int, TensorSlice] | None = None,
        of_stages: Mapping[str, StageParam] | None = None,
    ):
        config = self.config = config.resolved()
        device, in_stages = make_device(config.device), of_stages is not None
        on_cuda, rule = device.torch_device.type == "cuda", rule_for(config.optimizer, config.states, config.precision)
        self.ranks = join(process_group, mesh, cuda=on_cuda, in_parts=bool(cuts) or in_stages)
        # What has been made ends here if the rest cannot be: threads, connections and locks would else stay for as long
        # as somebody keeps the error. In the reverse of this order: what moves bytes before the bytes that it moves.
        with ExitStack() as opened:
            opened.callback(self.ranks.close)
            if not self.ranks.are_alone:
                # A collective, before anything is allocated: ranks that differ in model or config find out here.
                prepare(structure, config, self.ranks, filled=is_filled, cuts=cuts, in_stages=in_stages)
            with WHOLE:
                opened.enter_context(_sums(config, device))
            self._make(structure, device, rule, cuts, of_stages or {}, opened)
            self._opened = opened.pop_all()

    def _make(
        self,
        structure: Structure,
        device: Device,
        rule: UpdateRule,
        cuts: Mapping[int, TensorSlice] | None,
        of_stages: Mapping[str, StageParam],
        opened: ExitStack,
    ) -> None:
        # Weak already here: what is made below must not keep the engine, which goes with its model.
        own, config, ranks = weakref.ref[Owner](self), self.config, self.ranks
        # Where the bytes are, and what moves them; then what computes with them, and the passes of a step.
        built = build(structure, config, device, own, ranks, rule, cuts, opened)
        self.decision = built.decision
        params = self.params = built.params
        params.of_stages = of_stages
        store = self.store = built.store
        parts = _make_parts(built, config, ranks, rule, ranks.slices if cuts else Wire())
        self.state = parts.state
        self.write_observers = parts.writes
        self.updates = parts.updates
        self.activations = parts.activations
        self.shards = parts.company
        self.by_names = by_names = parts.by_names
        opened.callback(parts.company.close)
        # After all that may still write to planes.
        opened.callback(take_apart, store.chunks, params.handles)
        for part in (parts.activations, store.manager, parts.updates):
            opened.callback(part.close)
        # The threads end here: from here on nobody but the one that closes touches a chunk.
        opened.callback(store.transfers.close)
        self.forward = ForwardPass(parts, TrainedParams(params, store, parts.activations, config, rule.spec), own)
        opened.callback(parts.saved_weights.close)  # its hooks are over those of activations
        # A checkpoint that is being written reads chunks: it ends, or is given up, before they go.
        opened.callback(parts.writes.close)
        self.backward = BackwardPass(parts)
        self.recovery = Recovery(parts, self.forward, self.backward)
        self.again = Again(parts, self.backward, self.recovery)
        self.stepping = Stepping(parts, rule, config.gradients, self.backward, self.recovery)
        self.parking = Parking(parts, config, built.decision.problem)

        # The params come home, and into the hands of all that.
        self.adoption = Adoption(
            params, store, by_names, parts.exposure, parts.saved_weights, is_divided=ranks.shares_params
        )

    def take_home(self, model: nn.Module, fill: Callable[[ByName, Ranks], nn.Module] | None = None) -> nn.Module:
        """Take the params over: from here on the model is trained with what was made. ``fill`` writes the values of
        params that hold none yet, given their homes and who shares them; given is the model that has them, its result.
        """
        if fill is not None:
            model = fill(self.by_names, self.ranks)
        self.adoption.take_all(filled=fill is not None)
        self.store.mover.watch.start_over()  # coming home is no part of the first step
        # What the wrap has made and dropped holds memory of the model that it was.
        gc.collect(0)
        return model

    @alone
    def drain(self) -> None:
        """Wait until nothing is in flight: the world is as if everything had been done in turn."""
        # First: an update that is only guessed is undone below, and its gradients have landed all the same.
        self.backward.gradients.drain()
        # Updates first: they begin fetches (of lent windows) and end what the manager waits for.
        self.forward.let_go_of_transformed()
        self.updates.drain()
        self.store.manager.drain()
        self.activations.drain()

    def watch_apart(self, around: Callable[[], AbstractContextManager[None]] | None) -> None:
        """Do own work in turn, and inside ``around``, for whoever looks at what is alive at every moment (a tracer)."""
        self.forward.observers.set_apart(around)
        self.backward.gradients.synchronous = around is not None
        self.activations.flights.in_turn = around is not None or not self.store.transfers.beside

    def close(self) -> None:
        """Give everything back, whoever still holds a param: it keeps its shape and name, and refuses to be read."""
        self._opened.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the interpreter the system takes everything back, and torch and this module may be half gone.
        # A forked child has nothing to give back: threads, pages and files are its parent's.
        if not is_finalizing() and hasattr(self, "_opened") and not self.state.occupancy.is_forked:
            with _disable_current_modes():  # garbage is collected in the middle of anything, of fake tensors too
                self.close()


def _sums(config: GeminiConfig, device: Device) -> AbstractContextManager[None]:
    """Sum products in fp16 while there is an engine, if its config says so."""
    if config.precision != "fp16":
        return nullcontext()
    card = torch.cuda.get_device_name(device.torch_device) if device.torch_device.type == "cuda" else "the CPU"
    if config.fp16_accumulation and "GeForce" not in card:
        warn(f"fp16_accumulation=True gains nothing on {card}: GeForce cards alone are quicker by it. Leave it out")
    return sums_in_fp16(config.fp16_accumulation)


def engine_of(model: Any) -> Engine:
    engine: Engine = model.__dict__["_gemini_engine"]
    return engine


def _make_parts(built: Built, config: GeminiConfig, ranks: Ranks, rule: UpdateRule, slices: Wire) -> Parts:
    """Make what computes with weights out of their homes, gradients and activations in, updates between."""
    params, store, state, shared = built.params, built.store, StepState(), ranks.shares_params
    store.ledger.if_alone = state.occupancy.if_alone
    # Of the books. An RLock: what is gathered under it may meet a stray read, which takes it again.
    lock, observers = threading.RLock(), Observers()
    writes = WriteObservers([] if store.durable is None else [ChangedChunks(store.chunks)])
    exposure = Exposure(params, store, state)
    calls = Calls(store.manager, exposure)
    # When room is short, weights that only the rest of a backward may need go before somebody is refused.
    store.ledger.register(Turn.PINS, calls.relieve, store.device.tier)
    updates = Updates(store, state, exposure, writes, rule, alone=not shared, config=config)
    # Room that gathered weights need at once, which gradients on the same tier must leave free.
    working_set = store.working_set if shared or store.moves else 0
    # Other slices and stages may have a part of the norms.
    stages = ranks.stages if params.of_stages else Wire()
    knows_all = not ranks.slice_ or ranks.is_one_model
    norms = GradientNorms(params.handles, slices, stages, copies=params.copies(stages.rank), knows_all=knows_all)
    gradients = GradientStore(params.handles, store, norms, working_set=working_set)
    activations = ActivationStore(store, calls, built.decision.offload_activations)
    scaling = Scaling(params, state, gradients, is_needed=config.precision == "fp16")
    sink = GradientSink(params, store, state, updates, gradients, scaling, transient=config.gradients == "transient")
    company = Company(ranks, store.mover)
    if shared:
        # Where other ranks have the same params, weights and gradients are divided among them. No script is followed
        # where attention asks in between.
        problem, follows = built.decision.problem, store.transfers.beside and ranks.context.size == 1
        shards = Shards(ranks, params, store, exchange=problem.exchange, kinds=rule.spec.kinds, follows=follows)
        company, sink = shards, Reduction(shards, sink, dtype=reduce_dtype(config), room=problem.in_flight)
        if ranks.wire.size > 1:
            store.manager.source = shards
    return Parts(
        params=params,
        store=store,
        state=state,
        lock=lock,
        observers=observers,
        writes=writes,
        exposure=exposure,
        saved_weights=SavedWeights(store.manager, lock, observers),
        calls=calls,
        updates=updates,
        gradients=gradients,
        activations=activations,
        scaling=scaling,
        company=company,
        sink=sink,
        by_names=ByName(params.handles, store, state, observers=writes, company=company, slices=slices),
        slices=slices,
    )
