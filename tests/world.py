"""What a test may ask of a managed model: what it holds and moves, what is in flight, and whether all of it is sound.

Tests look behind a model through :func:`world_of` and nowhere else, so that a part which is moved, renamed or merged
with another is found again here alone: :data:`WHERE` says where each is now. Its first lines are true of every managed
model, in the words of the design (chunks, planes, tiers); in the parts after them a test puts a fault or counts calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from unittest import mock

from torch import nn

from gemini.pipeline import micro_batches
from gemini.tiers import Tier
from tests.invariants import check_engine, check_ledger, check_manager

WHERE = {
    # what was asked for and decided
    "config": "config",
    "rule": "stepping.rule.spec",  # what an update computes
    "decision": "decision",
    "trace": "decision.trace",
    "plan": "decision.plan",
    "placement": "decision.placement",
    "problem": "decision.problem",
    "layout": "decision.problem.layout",
    # chunks, and what is known of every param: in the order of the model, by its chunk's index, by each of its names
    "chunks": "store.chunks",
    "handles": "params.handles",
    "by_chunk": "params.by_chunk",
    "by_names": "by_names",
    "read": "by_names.read",
    "read_plane": "by_names.read_plane",
    # memory: of a tier, and what one holder has of it
    "tiers": "store.ledger.tiers",
    "budget": "store.ledger.budget",
    "used": "store.ledger.used",
    "peak": "store.ledger.peak",
    "free": "store.ledger.free",
    "held": "store.ledger.held",
    "holders": "store.ledger.holders",
    # movement: bytes over every boundary, and how often weights were brought into a window or taken out of it
    "moved": "store.mover.watch.moved.counts",
    "moved_last_step": "store.mover.watch.moved_last_step.counts",
    "num_gathers": "store.manager.num_gathers",
    "num_evictions": "store.manager.room.num_evictions",
    "tile": "store.mover.tile",  # elements that are moved and updated at a time
    # a step
    "has_gradients": "backward.sink.has_gradients",
    "corrupted_by": "state.corrupted_by",  # the failure after which values are no longer those of any step
    # ranks
    "ranks": "ranks",
    "shards": "shards",
    # parts
    "state": "state",
    "device": "store.device",
    "ledger": "store.ledger",
    "durable": "store.durable",
    "manager": "store.manager",
    "transfers": "store.transfers",  # all that is in flight beside training
    "foresight": "store.manager.foresight",
    "schedule": "store.manager.foresight.schedule",
    "mover": "store.mover",
    "staging": "store.mover.staging",
    "recorder": "store.mover.watch.recorder",
    "recordings": "forward.observers.recordings",
    "write_observers": "write_observers",
    "forward": "forward",
    "calls": "forward.calls",
    "backward": "backward",
    "gradients": "backward.gradients",
    "updates": "updates",
    "guesses": "updates.guesses",
    "update_worker": "updates._worker",
    "activations": "activations",
    "discard": "stepping.discard",
    "forget_updates": "updates.forget",
    "forget_interrupted": "recovery.forget_interrupted",
}


def is_managed(model: nn.Module) -> bool:
    return "_gemini_engine" in model.__dict__


def world_of(model: Any) -> World:
    return World(model)


class World:
    """All that stands behind one managed model, which it keeps alive."""

    def __init__(self, model: Any):
        self._engine = model._gemini_engine

    def __getattr__(self, name: str) -> Any:
        if name not in WHERE:
            raise AttributeError(f"a test asks for {name}: say in tests.world.WHERE where that is")
        return attrgetter(WHERE[name])(self._engine)

    @property
    def activation_workers(self) -> Any:
        """The activations in flight; None where their moves are made in turn."""
        flights = self._engine.activations.flights
        return None if flights.in_turn else flights

    @property
    def first_use(self) -> dict[int, int]:
        """By the index of a chunk, when the next step needs it."""
        return {chunk.spec.index: chunk.first_use for chunk in self.chunks}

    @property
    def spill(self) -> Any:
        """The file on NVMe; None without a folder for it."""
        return self._engine.store.files.get(Tier.NVME)

    def reference(self) -> weakref.ref[Any]:
        """Refer to what manages the model, without keeping it alive."""
        return weakref.ref(self._engine)

    @property
    def root(self) -> object:
        """From what everything else is reached, for who walks through all of it."""
        return self._engine

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        self._engine.drain()

    def settle_by(self, how: Callable[[], Any]) -> None:
        """Let ``how`` do it from now on, also where the product waits for everything."""
        self._engine.drain = how

    def check(self) -> None:
        """Settle, and demand what must hold between two steps."""
        check_engine(self._engine)

    def check_ledger(self) -> None:
        """Demand that the sums of who holds what are right, also in the middle of things."""
        check_ledger(self.ledger)

    def check_windows(self) -> None:
        """Demand it of the windows and of what is on its way to them."""
        check_manager(self.manager)

    def close(self) -> None:
        self._engine.close()

    @property
    def updates_in_flight(self) -> list[Any]:
        """What ``step()`` left to be done while training goes on."""
        return list(self.updates.pending.values())

    def wait_for_update(self, chunk: Any) -> None:
        chunk.settle()

    def guess_by(self, guesses: Any) -> None:
        """Let it decide whether an update begins before its step is known to be finite and unclipped."""
        self.updates.guesses = guesses

    def make_room(self, num_bytes: int) -> bool:
        """Let whoever can give memory of the computing tier back do so; whether there is that much now."""
        return bool(self.ledger.make_room(self.device.tier, num_bytes))


@contextmanager
def steps_by_block() -> Iterator[Any]:
    """Count steps block by block (``call_count``). A model all of whose memory stays is cut as one that moves."""
    with (
        mock.patch.object(micro_batches, "_sums_fit", return_value=False),
        mock.patch.object(micro_batches, "has_to_move", return_value=True),
        mock.patch.object(micro_batches, "breadth_first", wraps=micro_batches.breadth_first) as counted,
    ):
        yield counted
