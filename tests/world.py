"""What a test may ask of a managed model: what it holds and moves, what is in flight, and whether all of it is sound.

Tests look behind a model through :func:`world_of` and nowhere else, so that a part which is moved, renamed or merged
with another is found again here alone. First comes what is true of every managed model, in the words of the design
(chunks, planes, tiers, what is held, moved, in flight); then the parts in which a test puts a fault or counts calls,
which may change with how things are done inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from gemini.tiers import Tier


def is_managed(model: nn.Module) -> bool:
    return "_gemini_engine" in model.__dict__


def world_of(model: Any) -> World:
    return World(model)


class World:
    """All that stands behind one managed model, which it keeps alive."""

    def __init__(self, model: Any):
        self._engine = model._gemini_engine

    def reference(self) -> weakref.ref[Any]:
        """Refer to what manages the model, without keeping it alive."""
        return weakref.ref(self._engine)

    @property
    def root(self) -> object:
        """From what everything else is reached, for who walks through all of it."""
        return self._engine

    # ---- in order, at rest, over ----

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        self._engine.drain()

    def settle_by(self, how: Callable[[], Any]) -> None:
        """Let ``how`` do it from now on, also where the product waits for everything."""
        self._engine.drain = how

    def check(self) -> None:
        """Settle, and demand what must hold between two steps."""
        self._engine.check_invariants()

    def check_ledger(self) -> None:
        """Demand that the sums of who holds what are right, also in the middle of things."""
        self.ledger.check_invariants()

    def check_windows(self) -> None:
        """Demand it of the windows and of what is on its way to them."""
        self.manager.check_invariants()

    def close(self) -> None:
        self._engine.close()

    @property
    def corrupted_by(self) -> BaseException | None:
        """After which failure the values are no longer those of any step."""
        return self.state.corrupted_by

    # ---- what was asked for and decided ----

    @property
    def config(self) -> Any:
        return self._engine.config

    @property
    def rule(self) -> Any:
        """What an update computes."""
        return self._engine.stepping.rule.spec

    @property
    def decision(self) -> Any:
        return self._engine.decision

    @property
    def problem(self) -> Any:
        return self.decision.problem

    @property
    def layout(self) -> Any:
        return self.problem.layout

    @property
    def placement(self) -> Any:
        return self.decision.placement

    @property
    def plan(self) -> Any:
        return self.decision.plan

    @property
    def trace(self) -> Any:
        return self.decision.trace

    # ---- chunks and params ----

    @property
    def chunks(self) -> Any:
        return self._engine.store.chunks

    @property
    def handles(self) -> Any:
        """What is known of every param, in the order of the model."""
        return self._engine.params.handles

    @property
    def by_chunk(self) -> Any:
        """The same by the index of its chunk."""
        return self._engine.params.by_chunk

    @property
    def by_names(self) -> Any:
        """The same by every name of a param."""
        return self._engine.by_names

    def read(self, handle: Any, dtype: Any = None) -> Any:
        """Read the weights of a param, in fp32 the master."""
        return self.by_names.read(handle, dtype)

    def read_plane(self, handle: Any, kind: str) -> Any:
        return self.by_names.read_plane(handle, kind)

    # ---- memory ----

    @property
    def tiers(self) -> Any:
        return self.ledger.tiers

    def budget(self, tier: Tier) -> int:
        return self.ledger.budget(tier)

    def used(self, tier: Tier) -> int:
        return self.ledger.used(tier)

    def peak(self, tier: Tier) -> int:
        return self.ledger.peak(tier)

    def free(self, tier: Tier) -> int:
        return self.ledger.free(tier)

    def held(self, tier: Tier, holder: str) -> int:
        """Count the bytes that one holder has of a tier."""
        return self.ledger.held(tier, holder)

    def holders(self, tier: Tier) -> dict[str, int]:
        return self.ledger.holders(tier)

    @property
    def tile(self) -> int:
        """Elements of one piece of a chunk, in which it is moved and updated."""
        return self.mover.tile

    # ---- movement ----

    def moved(self) -> Any:
        """Bytes over every boundary since the last step ended."""
        return self.mover.watch.moved.counts()

    def moved_last_step(self) -> Any:
        return self.mover.watch.moved_last_step.counts()

    @property
    def num_gathers(self) -> int:
        """How often weights were brought into a window."""
        return self.manager.num_gathers

    @property
    def num_evictions(self) -> int:
        return self.manager.num_evictions

    def make_room(self, num_bytes: int) -> bool:
        """Let whoever can give memory of the computing tier back do so; whether there is that much now."""
        return bool(self.ledger.make_room(self.device.tier, num_bytes))

    def give_back(self) -> None:
        """Give activations what windows have borrowed of their room."""
        self.manager.room.give_back()

    # ---- gradients and updates ----

    @property
    def has_gradients(self) -> bool:
        return self.backward.has_gradients

    @property
    def loss_scale(self) -> Any:
        """In fp16 the scale of the loss, else None."""
        return self.backward.scaling.loss_scale

    @property
    def updates_in_flight(self) -> list[Any]:
        """What ``step()`` left to be done while training goes on."""
        return list(self.updates.pending.values())

    def wait_for_update(self, chunk: Any) -> None:
        chunk.settle()

    def forget_updates(self) -> None:
        self.updates.forget()

    @property
    def guesses(self) -> Any:
        """What decides whether an update begins before its gradients are known to be finite and unclipped."""
        return self.updates.guesses

    @guesses.setter
    def guesses(self, guesses: Any) -> None:
        self.updates.guesses = guesses

    def discard(self, handles: list[Any]) -> None:
        """Drop the gradients of these params."""
        self._engine.stepping.discard(handles)

    def forget_interrupted(self) -> None:
        """Do what comes first after an interrupt."""
        self._engine.recovery.forget_interrupted()

    # ---- parts, for faults and counts ----

    @property
    def state(self) -> Any:
        return self._engine.state

    @property
    def device(self) -> Any:
        return self._engine.store.device

    @property
    def ledger(self) -> Any:
        return self._engine.store.ledger

    @property
    def spill(self) -> Any:
        return self._engine.store.spill

    @property
    def durable(self) -> Any:
        return self._engine.store.durable

    @property
    def manager(self) -> Any:
        return self._engine.store.manager

    @property
    def fetches(self) -> Any:
        return self.manager.fetches

    @property
    def foresight(self) -> Any:
        return self.manager.foresight

    @property
    def schedule(self) -> Any:
        return self.foresight.schedule

    @property
    def mover(self) -> Any:
        return self._engine.store.mover

    @property
    def staging(self) -> Any:
        return self.mover.staging

    @property
    def recorder(self) -> Any:
        return self.mover.watch.recorder

    @property
    def recording(self) -> Any:
        return self.forward.observers.recording

    @property
    def write_observers(self) -> Any:
        return self._engine.write_observers

    @property
    def forward(self) -> Any:
        return self._engine.forward

    @property
    def calls(self) -> Any:
        return self.forward.calls

    @property
    def backward(self) -> Any:
        return self._engine.backward

    @property
    def gradients(self) -> Any:
        return self.backward.gradients

    @property
    def updates(self) -> Any:
        return self._engine.updates

    @property
    def update_worker(self) -> Any:
        return self.updates._worker

    @property
    def first_use(self) -> Any:
        """By the index of a chunk, when the next step needs it."""
        return self.updates._first_use

    @property
    def activations(self) -> Any:
        return self._engine.activations

    @property
    def activation_workers(self) -> Any:
        return self.activations.workers

    # ---- ranks ----

    @property
    def ranks(self) -> Any:
        """Who trains the model: a group of one, or of many."""
        return self._engine.ranks

    @property
    def shards(self) -> Any:
        """How chunks are divided among ranks, and what is asked of them together."""
        return self._engine.shards

    @property
    def replicas(self) -> Any:
        return self.backward.sink._replicas
