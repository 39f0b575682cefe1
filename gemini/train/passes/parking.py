"""A model leaves the device that computes while something else works there (an engine that generates), and comes back.

What lives there is copied below it, to host memory or else a drive; then windows, their pool, staging and the planes
give their memory back. A plane keeps its tensor, whose memory comes and goes as that of windows does: views of it hold,
and nobody who knows them is told. Meanwhile the copies are the planes: weights are read, written and saved by name as
ever, and gradients that wait are carried along. What is in flight is over before, and nothing computes until the end.
"""

from __future__ import annotations

import gc
import weakref
from typing import NamedTuple

import torch

from gemini.config import GeminiConfig
from gemini.errors import BudgetExceeded, GeminiError, human_bytes
from gemini.interrupts import WHOLE
from gemini.ledger import WELCOME
from gemini.memory.chunks.chunk import Chunk, MemoryPlane, Plane
from gemini.memory.movement.mover import Working
from gemini.memory.watching import Moved
from gemini.planning.placement import Problem
from gemini.planning.planes import WEIGHTS, PlaneKind, PlaneSpec
from gemini.ranks.agree import Attempt, Facts, Point
from gemini.tiers import FILED, Tier
from gemini.train.gradients.store import HOLDER
from gemini.train.params.by_name import copy_plane
from gemini.train.params.exposure import expose, hide
from gemini.train.passes.forward import Parts
from gemini.train.setup.build import begin_budget

_STAYS = "context"
"""The holder of what is the driver's for as long as the process lives."""


class _Away(NamedTuple):
    """A plane of the device, and what stands in its place meanwhile."""

    chunk: Chunk
    kind: PlaneKind
    plane: MemoryPlane
    below: Plane


class Block:
    """One ``with model.parked():`` of a program."""


class Parking:
    """Parks one model, and brings it back. Called by one thread alone, while nothing is in flight."""

    def __init__(self, parts: Parts, config: GeminiConfig, problem: Problem):
        self._store, self._state, self._params = parts.store, parts.state, parts.params
        self._exposure, self._by_names = parts.exposure, parts.by_names
        self._config, self._problem = config, problem
        # Weakly: a block that an interrupt has kept from leaving ends with its frame, and keeps nothing parked.
        self._blocks = weakref.WeakSet[Block]()
        self._away = list[_Away]()
        self._given: dict[str, int] = {}  # bytes of the device's budget that were given back, by holder

    def enter(self, block: Block) -> None:
        """Park the model, unless it is. All ranks come here together. What is refused has moved nothing."""
        if self._state.is_parked:
            self._blocks.add(block)
            return
        away = list[_Away]()
        try:
            with Attempt(BaseException) as attempt:
                if self._state.computing:
                    raise GeminiError("parked() inside a forward, a backward or gathered(): leave that first")
                self._copy_down(away)
            self._by_names.agree(Point.PARK, "parked()", lambda: Facts({}), attempt.refusal)
            with WHOLE:
                self._leave(away)
                self._blocks.add(block)
        except BaseException:
            if not self._state.is_parked:
                with WHOLE:
                    self._store.device.synchronize()  # a copy that was begun is no longer waited for
                    self._drop(away)
            raise

    def leave(self, block: Block) -> None:
        """Bring the model back, at the end of the outermost block. If others have its memory it stays parked."""
        if block in self._blocks:  # else it was refused, or cut off, before it had parked anything
            self._blocks.discard(block)
            if not self._blocks:
                self._come_back()

    def _copy_down(self, away: list[_Away]) -> None:
        """Copy what lives on the device below it; ``away`` gets what was made, also if that breaks off."""
        store, tier = self._store, self._store.device.tier
        if tier is not Tier.GPU:
            return
        there = [
            (chunk, kind, plane)
            for chunk in store.chunks
            for kind, plane in chunk.planes.items()
            if isinstance(plane, MemoryPlane) and plane.tier is tier
        ]
        self._refuse_strangers(there)
        # Weights first: those that stand in host memory are what others read.
        for chunk, kind, plane in sorted(there, key=lambda found: found[1] != WEIGHTS):
            self._make_below(away, chunk, kind, plane)
        for _, _, plane, below in away:
            self._copy(plane, below)

    def _refuse_strangers(self, there: list[tuple[Chunk, PlaneKind, MemoryPlane]]) -> None:
        """Refuse what would keep memory there, or be read where there is none."""
        tier = self._store.device.tier
        if waiting := self._store.ledger.held(tier, HOLDER):
            raise GeminiError(
                f"parked(): {human_bytes(waiting)} of {tier.value} are {HOLDER} that ranks have yet to add up "
                "(no_sync): park after the backward that reduces them, or after optimizer.step()"
            )
        found = self._looked_into(there)
        if found:
            gc.collect()  # what only a cycle holds
            found = self._looked_into(there)
        if found or not self._store.manager.room.evict_all():
            names = ", ".join(repr(chunk.spec.slots[0].name) for chunk in found[:3])
            raise GeminiError(
                "parked(): a tensor of the program, or a graph whose backward is to come, still looks into the "
                f"weights of {len(found)} chunks on {tier.value} ({names}): run the backward or drop the loss first, "
                "and del views of weights. Nothing was moved"
            )

    def _looked_into(self, there: list[tuple[Chunk, PlaneKind, MemoryPlane]]) -> list[Chunk]:
        """Find the chunks whose memory on the device others have tensors over."""
        found = [chunk for chunk in self._store.chunks if chunk.is_lent]
        for chunk, kind, plane in there:
            chunk.prepared.clear()
            handles = self._params.by_chunk[chunk.spec.index] if kind == WEIGHTS else []
            # Of each param the view that is kept for it, and the param itself while it is not NaN.
            if plane.num_views() > sum(2 - handle.poisoned for handle in handles):
                found.append(chunk)
        return found

    def _make_below(self, away: list[_Away], chunk: Chunk, kind: PlaneKind, plane: MemoryPlane) -> None:
        """Make a plane below the device: in host memory, or where there is no room in a file."""
        store, num_bytes = self._store, plane.num_bytes
        spec = PlaneSpec(kind, str(plane.dtype).removeprefix("torch."), plane.block)
        for tier in (Tier.CPU, *(filed for filed in FILED if filed in store.files and plane.block == 1)):
            with WHOLE, torch.inference_mode(False):
                if store.ledger.reserve_if_room(tier, num_bytes, kind, WELCOME):
                    away.append(_Away(chunk, kind, plane, store.make_plane(spec, plane.numel, tier, crosses=False)))
                    return
        below_gpu = [tier for tier in store.ledger.tiers if tier is not Tier.GPU]
        free = ", ".join(f"{tier.value} {human_bytes(store.ledger.free(tier))}" for tier in below_gpu)
        raise BudgetExceeded(
            f"parked() keeps below the GPU what lives on it (weights, states, gradients), and {human_bytes(num_bytes)} "
            f"of {kind} of {chunk.name} have no room there ({free} are left). Nothing was moved: raise the cpu budget, "
            "or give nvme_path="
        )

    def _copy(self, source: Plane, target: Plane) -> None:
        """Copy a whole plane, tile by tile. It is no part of any step, and counts in none."""
        mover = self._store.mover
        with mover.working(Working(Moved())):
            copy_plane(mover, source, target)

    def _drop(self, away: list[_Away]) -> None:
        """Give back what was made below."""
        for _, kind, _, below in away:
            self._store.give_back(kind, below)

    def _leave(self, away: list[_Away]) -> None:
        """Put the copies in the place of the planes, and give the device's memory back."""
        store, ledger, tier = self._store, self._store.ledger, self._store.device.tier
        self._state.is_parked = True
        self._away = away
        if tier is not Tier.GPU:
            return
        for chunk, kind, _, below in away:
            if kind == WEIGHTS:
                self._exposure.poison(chunk)  # before there is nothing behind its params
            chunk.change_planes({kind: below})
        self._given = {holder: held for holder, held in ledger.holders(tier).items() if holder != _STAYS}
        self._empty()
        for holder, held in self._given.items():
            ledger.release(tier, held, holder)
        if not store.device.keeps_windows:
            self._given.pop("pool", None)  # these come page by page as windows need them

    def _empty(self) -> None:
        """Give back the memory of planes, staging and windows. Nothing on the device reads it any more."""
        store = self._store
        store.device.synchronize()
        for _, _, plane, _ in self._away:
            plane.give_up()
        store.mover.staging.leave_device()
        store.manager.room.give_up()
        # Others may have what the budget was, and torch keeps nothing of it.
        store.device.begin_budget(None, 0, 0, limited=False)

    def _come_back(self) -> None:
        """Bring back what was on the device, all or nothing: then the model stays parked."""
        reserved = dict[str, int]()
        try:
            if self._store.device.tier is Tier.GPU:
                self._take_back(reserved)
                self._fill_again()
            with WHOLE:
                for chunk, kind, plane, _ in self._away:
                    chunk.change_planes({kind: plane})
                    if kind == WEIGHTS:
                        expose(self._params.by_chunk[chunk.spec.index])
                        hide(self._params.by_chunk[chunk.spec.index])
                self._drop(self._away)
                self._away = []
                self._state.is_parked = False
        except BaseException:
            if self._state.is_parked and reserved:
                with WHOLE:
                    self._empty()
                    for holder, held in reserved.items():
                        self._store.ledger.release(Tier.GPU, held, holder)
            raise

    def _take_back(self, reserved: dict[str, int]) -> None:
        """Reserve what was given; ``reserved`` gets what was, by holder, also if that breaks off."""
        try:
            for holder, held in self._given.items():
                with WHOLE:
                    self._store.ledger.reserve(Tier.GPU, held, holder)
                    reserved[holder] = held
        except BudgetExceeded as e:
            raise BudgetExceeded(
                f"{e}: other models of its budget have taken what this one gave. It stays parked: let them give back "
                "(park or delete one), then `with model.parked(): pass` brings it back"
            ) from e

    def _fill_again(self) -> None:
        """Put memory behind planes and windows once more, and the copies into the planes."""
        device = self._store.device
        begin_budget(device, self._config, self._problem, self._store.ledger.used(Tier.GPU))
        device.reserve_windows(self._given.get("pool", 0))
        device.reserve_buffers([plane.num_bytes for _, _, plane, _ in self._away])
        for _, _, plane, below in self._away:
            plane.take_again()
            self._copy(below, plane)
