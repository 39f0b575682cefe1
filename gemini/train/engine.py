"""The engine behind one wrapped model: makes all that its training is done with, and hands each part what it needs.

Nothing below knows it. Hooks and params refer to it weakly, as the passes and the owner that they ask
(:mod:`gemini.train.passes.hooks`, :mod:`gemini.train.params.owner`): the model alone keeps it alive. Params are
ordinary ones while the model computes (a forward is on the stack, a backward is running, or ``gathered()`` is open),
and guarded at all other times.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from gemini.config import GeminiConfig
from gemini.memory.devices.device import make_device
from gemini.memory.movement.manager import Manager
from gemini.memory.movement.mover import Mover
from gemini.memory.movement.worker import Worker
from gemini.memory.store import ChunkStore
from gemini.optim.compact import rule_for
from gemini.ranks.group import Ranks, join
from gemini.tiers import Tier, Turn
from gemini.train.activations.store import make_activation_store
from gemini.train.gradients.loss_scale import LossScale
from gemini.train.gradients.norms import GradientNorms
from gemini.train.gradients.scaled_backward import Scaling
from gemini.train.gradients.store import GradientStore
from gemini.train.modules.calls import Calls
from gemini.train.modules.reading import Structure
from gemini.train.modules.saved_weights import SavedWeights
from gemini.train.observers import ChangedChunks, Observers, WriteObservers
from gemini.train.params.by_name import ByName
from gemini.train.params.exposure import Exposure
from gemini.train.params.gathered import Gathering, Rewriting
from gemini.train.params.guard import ManagedParameter
from gemini.train.params.handle import StageParam
from gemini.train.params.tensor_slice import TensorSlice
from gemini.train.passes.backward import BackwardPass, Recovery, begin_backward_of, grad_hook
from gemini.train.passes.forward import ForwardPass, StrayReads
from gemini.train.passes.hooks import Passes
from gemini.train.passes.stepping import Stepping
from gemini.train.setup.adoption import Adoption, TrainedParams, take_apart
from gemini.train.setup.build import build
from gemini.train.setup.problem import prepare, reduce_dtype
from gemini.train.sharding.company import Company
from gemini.train.sharding.reduction import Reduction
from gemini.train.sharding.shards import Shards
from gemini.train.slices.together import OtherSlices, refuse_unsuited
from gemini.train.step import StepState
from gemini.train.update.in_backward import InBackward
from gemini.train.update.sinks import GradientSink, UsedAtOnce
from gemini.train.update.updates import Updates


class Engine:
    """One per wrapped model.

    Args:
        fill: what writes the values of params that hold none yet to their homes, given those and who shares them.
        cuts: by the id of a param of a model in slices, which slice it is.
        of_stages: of one stage of a pipeline, the params of all of them in the order of the whole model.
    """

    def __init__(
        self, structure: Structure, config: GeminiConfig, *, process_group: Any = None, mesh: Any = None,
        fill: Callable[[ByName, Ranks], None] | None = None,
        cuts: Mapping[int, TensorSlice] | None = None, of_stages: Mapping[str, StageParam] | None = None,
    ):  # fmt: skip
        config = self.config = config.resolved()
        rule, own = rule_for(config.optimizer, config.states, config.precision), weakref.ref[Passes](self)
        state = self.state = StepState()
        lock, observers = threading.RLock(), Observers()
        self.write_observers = WriteObservers()
        device = make_device(config.device)
        ranks = self.ranks = join(
            process_group, mesh, cuda=device.torch_device.type == "cuda", in_parts=bool(cuts) or of_stages is not None
        )  # fmt: skip
        if not ranks.are_alone:
            prepare(structure, config, ranks, filled=fill is None, cuts=cuts)
        others = None
        if cuts and (with_others := ranks.same_batch or ranks.experts) is not None:
            refuse_unsuited(config, rule.spec, ranks, in_stages=of_stages is not None)
            others = OtherSlices(with_others)
        built = build(structure, config, device, own, ranks, cuts)
        self.decision, params = built.decision, built.params
        self.params = params
        params.of_stages = of_stages or {}
        alone, shared, overlap = ranks.size == 1, ranks.shares_params, config.overlap

        mover = Mover(device, built.tile, built.ledger, device_tile=built.device_tile, rule=rule.spec)
        # Staging is short where budgets are tight: updates first, which have nothing without it.
        slots = mover.staging.take_slots() if config.overlap else None
        behind = mover.staging.take() if overlap and not alone else None
        manager = Manager(
            built.chunks, ledger=built.ledger, device=device, mover=mover, foresight=built.foresight,
            worker=Worker("fetch") if overlap else None, worker_staging=mover.staging.take() if overlap else None,
        )  # fmt: skip
        store = self.store = ChunkStore(
            built.chunks, device, built.ledger, mover, manager, built.spill, built.working_set, built.durable
        )  # fmt: skip

        updates = self.updates = Updates(
            store, state, self.write_observers, rule, built.first_use, alone=not shared, slots=slots,
            threads=config.update_threads,
        )  # fmt: skip
        exposure = Exposure(params, store, state, updates)
        saved_weights = SavedWeights(manager, lock, observers)
        calls = Calls(manager.acquire, manager.release, exposure.expose, exposure.cover)
        store.ledger.register(Turn.PINS, calls.relieve, device.tier)
        stages = None if of_stages is None else ranks.stages
        norms = GradientNorms(
            params.handles, others, stages, copies=[] if stages is None else params.copies(stages.rank),
            knows_all=not ranks.slice_ or ranks.is_one_model,
        )  # fmt: skip
        gradients = GradientStore(
            params.handles, ledger=store.ledger, device=device, mover=mover, manager=manager, spill=store.spill,
            working_set=store.working_set if shared or store.moves else 0,
            worker=Worker("landing") if overlap and not shared and device.tier is Tier.GPU else None,
            norms=norms,
        )  # fmt: skip
        updates.connect(exposure)
        activations = self.activations = make_activation_store(
            store, calls, built.decision.offload_activations, overlap
        )
        scaling = Scaling(params, state, gradients, LossScale() if config.precision == "fp16" else None)
        in_backward = InBackward(
            params, state, mover, rule, updates, gradients, scaling, transient=config.gradients == "transient"
        )

        company, shards = Company(ranks, mover), None
        kind = UsedAtOnce if in_backward.transient else GradientSink
        sink = kind(store, state, gradients=gradients, updates=updates, in_backward=in_backward)
        if shared:
            exchange = built.decision.problem.exchange
            company = shards = Shards(
                ranks, params, store, state, exchange=exchange, kinds=rule.spec.kinds,
                follows=overlap and ranks.context is None,  # whose attention asks in between
            )  # fmt: skip
            sink = reduction = Reduction(
                shards, store, state, dtype=reduce_dtype(config), room=built.decision.problem.in_flight,
                gradients=gradients, scaling=scaling, updates=updates, in_backward=in_backward,
                staging=behind, sums_each_backward=config.gradients == "retain",
            )  # fmt: skip
            shards.connect(reduction)
        self.shards = company
        by_names = self.by_names = ByName(
            params.handles, store, observers=self.write_observers, company=company,
            slices=others, all_agree=ranks.experts is not None,
        )  # fmt: skip
        trained = TrainedParams(
            params,
            store,
            activations,
            precision=config.precision,
            gradients=config.gradients,
            rule=rule.spec,
            grad_hook=grad_hook,
        )

        forward = self.forward = ForwardPass(
            store, state, calls, lock=lock, observers=observers, exposure=exposure, saved_weights=saved_weights,
            activations=activations, updates=updates, trained=trained,
            begin_step=company.begin_step,
        )  # fmt: skip
        backward = self.backward = BackwardPass(
            params, store, state, calls, lock=lock, observers=observers, exposure=exposure, activations=activations,
            gradients=gradients, scaling=scaling, updates=updates, in_backward=in_backward, by_names=by_names,
            sink=sink,
        )  # fmt: skip
        recovery = self.recovery = Recovery(
            params, store, state, forward, backward, exposure, activations, gradients, updates
        )
        self.stepping = Stepping(
            params, store, state, rule, gradients=config.gradients, backward=backward, scaling=scaling,
            updates=updates, exposure=exposure, recovery=recovery, observers=self.write_observers, company=company,
            slices=others,
        )  # fmt: skip

        self.reads = StrayReads(forward, partial(begin_backward_of, own))
        self.rewriting = Rewriting(by_names, self.write_observers, lock)
        self.gathering = Gathering(by_names, store, self.write_observers, opened=forward.opened)
        manager.connect(
            on_evict=exposure.poison,
            gather=None if alone or shards is None else shards.gather,
            is_lent=saved_weights.is_lent,
            explain=sink.explain,
            upcoming=None if alone or shards is None else shards.upcoming,
            follow=(lambda: None) if alone or shards is None else shards.follow,
        )
        self.adoption = Adoption(
            params, store, by_names, exposure, saved_weights, grad_hook=grad_hook, is_divided=shared
        )
        if store.durable is not None:
            self.write_observers.append(ChangedChunks(store.chunks))
        state.is_made = True
        if fill is not None:
            fill(by_names, ranks)
        self.adoption.take_all(filled=fill is not None)
        mover.watch.start_over()  # coming home is no part of the first step
        gc.collect(0)

    def drain(self) -> None:
        """Wait until nothing is in flight: the world is as if everything had been done in turn.

        Raises:
            StorageError and whatever else broke off an update.
        """
        self.forward.let_go_of_transformed()
        self.updates.drain()
        self.store.manager.drain()
        self.activations.drain()

    def watch_apart(self, around: Callable[[], AbstractContextManager[None]] | None) -> None:
        """For who looks at what is alive at every moment: own work is done in turn, and inside ``around``."""
        self.forward.observers.set_apart(around)
        self.backward.gradients.do_in_turn(around is not None)
        self.activations.do_in_turn(around is not None)

    def check_invariants(self) -> None:
        """Everything that must hold between steps; for tests."""
        self.drain()
        self.store.manager.check_invariants()
        self.store.check_planes(self.stepping.rule.spec.kinds)
        if not self.state.computing:
            assert all(isinstance(h.param, ManagedParameter) for h in self.params.handles)
            assert all(c.pins == 0 for c in self.store.chunks)

    def close(self) -> None:
        """Give everything back, whoever still holds a param: it keeps its shape and name, and refuses to be read."""
        self.write_observers.close()
        self.forward.close()  # its hooks are over those of activations
        for workers in (self.updates, self.store.manager, self.backward.gradients, self.activations):
            workers.close()
        take_apart(self.store.chunks, self.params.handles)
        self.shards.close()
        self.ranks.close()
        if self.store.spill is not None:
            self.store.spill.close()
        if self.store.durable is not None:
            self.store.durable.close()
        self.store.device.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the interpreter the system takes everything back, and torch and this module may be half gone.
        if not is_finalizing() and hasattr(self, "adoption"):
            with _disable_current_modes():  # garbage is collected in the middle of anything, of fake tensors too
                self.close()
