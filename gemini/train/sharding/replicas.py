"""Gradients among the replicas of a model: of its shard each rank has the sum of one replica, and needs that of all.

With ``gradients="retain"`` every backward ends with these sums, as it does in DistributedDataParallel; they are made
chunk by chunk behind it, where gradients are in host memory. Else they are made once per step, before the norm.

*Behind backward* the ranks that hold the same shard follow a script (:mod:`gemini.train.sharding.scripted`): the order
in which chunks were landed in the last backward, if all had the same. Whoever cannot go on leaves it: its backward is
over or has failed, or it is about to do something else (:meth:`ReplicaSums.leave`). What is left then is added up when
the backward ends. So whoever waits is answered, and both ways make the same sums.

A chunk that is landed on once more after it was added up stays as it is on the first replica, and is zero on the others
from then on: the sum over replicas is that of all backwards.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Sequence
from enum import IntEnum
from functools import partial

import torch

from gemini import kernels
from gemini.errors import RankMismatch
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk, Plane
from gemini.memory.devices.device import DONE
from gemini.memory.movement.mover import Working, tiles
from gemini.memory.movement.worker import Job
from gemini.memory.store import ChunkStore
from gemini.planning.planes import GRAD, GRAD_ERROR
from gemini.planning.script import Reduce, Script
from gemini.ranks.agree import Facts, Point, agree
from gemini.ranks.wire import Tag, Wire
from gemini.train.params.handle import ParamHandle
from gemini.train.sharding.channel import Channel
from gemini.train.sharding.scripted import ScriptedStep
from gemini.train.sharding.shards import Shards

_GOES_ON = 1
"""The word of a rank for each sum behind backward; one that leaves says another."""


class _Standing(IntEnum):
    """Says whose sum the gradients of a chunk are."""

    NONE = 0
    OWN = 1
    """The sum of this replica."""
    SUMMED = 2
    """The sum of all replicas."""
    REOPENED = 3
    """The sum of this replica, and on the first one beside it that of all replicas from before."""


class ReplicaSums:
    """The sums over the ranks that hold the same shard; nothing is done where there is none.

    Args:
        each_backward: whether they are made at the end of every backward, and not once per step.
    """

    def __init__(self, shards: Shards, store: ChunkStore, *, each_backward: bool):
        wire = shards.ranks.replicas
        self.are_none = wire.size == 1
        self.each_backward = each_backward and not self.are_none
        self.num_behind = 0
        """Chunks that were added up behind backward."""
        self._shards, self._wire, self._params = shards, wire, shards.params
        self._chunks, self._mover = store.chunks, store.mover
        # Other ranks of ep have other experts: what all of their tokens gave these has come with backward, and is
        # added up among those that have the same ones.
        self._by_chunk: dict[int, Sequence[ParamHandle]] = {}
        self._wires: dict[int, Wire] = {}
        for index, handles in shards.params.by_chunk.items():
            are_experts = shards.ranks.experts.size > 1 and any(handle.cut is not None for handle in handles)
            across = shards.ranks.copies if are_experts else wire
            if across.size > 1:
                self._by_chunk[index], self._wires[index] = handles, across
        grads = [chunk.planes[GRAD] for chunk in store.chunks if GRAD in chunk.planes]
        is_on_host = all(plane.host_view(0, 0) is not None for plane in grads)
        self._lanes = shards.replica_lanes if each_backward and is_on_host else None
        self._channel = Channel(wire, store, shards.replica_scratch)
        self._fetches = store.manager.fetches
        self._lock = threading.Lock()
        self._landed: list[int] = []
        self._backward = -1
        """The number of the backward in which these were landed."""
        self._standing: dict[int, _Standing] = {}
        self._usual: tuple[int, ...] = ()
        self._step: ScriptedStep | None = None
        """The sums behind the backward under way, in the order of all replicas."""
        self._left: list[ScriptedStep] = []
        """Those of before that this rank has left, and nobody has waited for."""
        self._jobs: dict[int, Job] = {}

    def begin_landing(self, chunk: Chunk, *, adding: bool) -> None:
        """Prepare for sums of this replica that are about to be written, or added to what is there."""
        index = chunk.spec.index
        if index in self._jobs:
            # The sum that is under way reads what is about to be written.
            self._jobs[index].wait()
        if not adding:
            self._standing.pop(index, None)
        elif self._standing.get(index) is _Standing.SUMMED:
            self._reopen(chunk)

    def landed(self, index: int, backward: int) -> None:
        """Note that all gradients of a chunk are there, in that backward. Called by any thread, in any order."""
        if self._lanes is None or index not in self._by_chunk:
            return
        with WHOLE, self._lock:
            # Autograd runs on several threads, and a backward that failed never said that it is over.
            if backward != self._backward:
                if self._landed:  # of a backward that has failed
                    self._leave()
                self._backward = backward
            self._landed.append(index)
            step = self._step
            # The order is that of all replicas: what landed early waits for what stands before it.
            while step is not None and (following := step.next_reduction) in self._landed:
                assert following is not None
                self._jobs[following] = step.reduce(_GOES_ON, partial(self._sum_behind, following), lambda: DONE)

    def _sum_behind(self, index: int) -> None:
        """Add up one chunk behind backward. Runs on the replicas' worker, one chunk after the other."""
        with self._mover.working(Working(self._mover.watch.moved)):
            self._add_up(self._chunks[index], [])
        self.num_behind += 1
        self._standing[index] = _Standing.SUMMED

    def leave(self) -> None:
        """Leave the script before this rank meets the other replicas for something else: they wait for no sum of it."""
        with WHOLE, self._lock:
            self._leave()

    def _leave(self) -> None:
        """Leave the script, if one is followed; what it has begun is waited for later. Needs the lock."""
        step, self._step = self._step, None
        self._landed.clear()
        if step is not None:
            step.part()
            self._left.append(step)

    def sum_now(self, chunk: Chunk, section: torch.Tensor, present: Sequence[ParamHandle], plan: int) -> None:
        """Add up gradients that are about to be used, and are kept nowhere: ``section``, this rank's shard, becomes the
        sum over replicas. They come here for one chunk after another, in the order of backward.

        Args:
            present: who has a gradient in it.
            plan: what the updates depend on, as a checksum.

        Raises:
            RankMismatch: on every rank, if a replica has other gradients, or is about to update them in another way.
        """
        if self.are_none:
            return
        names = [handle.name for handle in present]
        facts = Facts({"the chunk": chunk.spec.index, "the gradients in it": names, "the hyperparameters": plan})
        # Not as other agreements: a replica that stands elsewhere says more there.
        agree(self._wire, f"the update of {chunk.name} inside backward", lambda: facts, tag=Tag.HEADER)
        across = self._wires.get(chunk.spec.index)
        if across is None:
            return
        for start, stop in tiles(0, section.numel(), self._shards.replica_scratch.numel() // 8):
            tile = section[start:stop].cpu()
            across.all_reduce(Tag.ALL_REDUCE, tile, self._shards.replica_scratch, f"the all-reduce of {chunk.name}")
            if tile.data_ptr() != section[start:stop].data_ptr():
                section[start:stop].copy_(tile)

    # ---- all that is left ---------------------------------------------------------------------------------------

    def end_backward(self) -> None:
        """The end of a backward on every rank of this replica. Raises RankMismatch, on every rank, if the replicas do
        different things.
        """
        if not self.each_backward:
            return
        # Before it is cleared by the end of the order: it may be the usual one of the next backward.
        landed = tuple(self._landed)
        self._finish()
        standings = set(map(self._standing_of, self._by_chunk))
        said = zlib.crc32(json.dumps(landed).encode()) << 1 | bool(standings & {_Standing.OWN, _Standing.REOPENED})
        heard = {number for row in self._shards.meet_replicas(Point.END_BACKWARD, [said]) for number in row}
        if any(number & 1 for number in heard):
            self.sum_all()
        self._usual = landed if len({number >> 1 for number in heard}) == 1 else ()
        self._expect()

    def give_up(self) -> None:
        """Stop adding up what a backward that has failed has left: gradients are about to be dropped."""
        if self._jobs:
            self._finish()

    def _finish(self) -> None:
        """Wait for what goes on behind backward; more does not. Raises RankLost if a rank does not answer."""
        self.leave()
        left, self._left = self._left, []
        jobs, self._jobs = self._jobs, {}
        if not left:
            return
        with self._mover.about("other ranks", "wait for other ranks"):
            # All of them, before the first error is raised: none may run on while gradients are dropped.
            for step in left:
                step.finish()
            for job in jobs.values():
                job.wait()

    def end_step(self, *, has_gradients: bool) -> None:
        """Note that an optimizer step is over, which all replicas make."""
        if not has_gradients:
            self._standing.clear()
        self._expect()

    def _expect(self) -> None:
        """Prepare for a backward that may follow: what it lands in the usual order is added up behind it."""
        if self._step is not None or not self._usual or self._lanes is None:
            return
        self._finish()  # what was left for another meeting, in which all replicas have left it
        script = Script((), tuple(Reduce(0, index) for index in self._usual))
        self._step = ScriptedStep(script, self._channel, self._fetches, self._lanes)

    def sum_all(self) -> None:
        """Add up what was not, chunk by chunk in the order of the layout. All replicas come here. Raises RankMismatch,
        on every rank, if some have dropped what others have added up.
        """
        if self.are_none:
            return
        self._finish()  # of a backward that has failed
        own = [self._standing_of(index) for index in self._by_chunk]
        flags = [handle.has_grad for handle in self._params.handles]
        said = torch.tensor([*own, *flags], dtype=torch.uint8, device="cpu")
        rows = self._wire.swap(Tag.AGREEMENT, said, "comparing gradients across replicas")
        standings = rows[:, : len(own)].T.tolist()
        anywhere = dict(zip((h.name for h in self._params.handles), rows[:, len(own) :].any(0).tolist(), strict=True))
        for index, column in zip(self._by_chunk, standings, strict=True):
            chunk, found = self._chunks[index], set(column)
            if found <= {_Standing.NONE} or found == {_Standing.SUMMED}:
                continue
            # Sums of all and of one cannot be added up any more: one of them would count twice.
            if min(found) < _Standing.SUMMED <= max(found):
                raise RankMismatch(
                    f"the gradients of {chunk.name} were added up over the replicas of this model, and one of them "
                    "has dropped or replaced its own since. Every rank must make the same backwards and zero_grad() "
                    "the same gradients"
                )
            if _Standing.REOPENED in found and self._standing_of(index) is _Standing.SUMMED:
                self._reopen(chunk)
            self._add_up(chunk, [h for h in self._by_chunk[index] if not h.has_grad and anywhere[h.name]])
            self._standing[index] = _Standing.SUMMED

    def _standing_of(self, index: int) -> _Standing:
        if not any(handle.has_grad for handle in self._by_chunk[index]):
            return _Standing.NONE
        return self._standing.get(index, _Standing.OWN)

    def _add_up(self, chunk: Chunk, absent: Sequence[ParamHandle]) -> None:
        """This rank's shard of the gradients of a chunk becomes the sum over replicas; ``absent`` have none here."""
        plane, scratch, across = chunk.planes[GRAD], self._shards.replica_scratch, self._wires[chunk.spec.index]
        handles = [h for h in self._by_chunk[chunk.spec.index] if h.has_grad] + list(absent)
        sums: dict[str, kernels.Sums] = {handle.name: [] for handle in handles}
        for start, stop in tiles(0, plane.numel, min(self._mover.tile, scratch.numel() // 8)):
            tile, is_staged = self._mover.host_tile(1, plane, start, stop)
            # Other replicas have these gradients; this one adds zeros, and has them from here on.
            for handle in absent:
                tile[max(handle.part.start - start, 0) : max(handle.part.stop - start, 0)].zero_()
            across.all_reduce(Tag.ALL_REDUCE, tile, scratch, f"the all-reduce of {chunk.name}")
            if is_staged:
                self._mover.store(plane, start, stop, tile)
            for handle in handles:
                first, last = max(handle.part.start, start), min(handle.part.stop, stop)
                if first < last:
                    sums[handle.name] += kernels.sum_squares(tile[first - start : last - start])
        if GRAD_ERROR in chunk.planes:
            # The error of rounding was of this replica's part, which is in the sum now.
            self._clear(chunk.planes[GRAD_ERROR])
        for handle in handles:
            handle.norm_sums = sums[handle.name]

    def _reopen(self, chunk: Chunk) -> None:
        """Let the first replica keep the sum, and the others begin anew from zeros."""
        self._standing[chunk.spec.index] = _Standing.REOPENED
        # One of them must keep what all have, or the next sum would lose it.
        if self._wires[chunk.spec.index].rank != 0:
            self._clear(chunk.planes[GRAD])

    def _clear(self, plane: Plane) -> None:
        for start, stop in tiles(0, plane.numel, self._mover.tile):
            tile, is_staged = self._mover.host_tile(1, plane, start, stop)
            tile.zero_()
            if is_staged:
                self._mover.store(plane, start, stop, tile)
