"""Sums of gradients across the replicas of a model. Of its shard each rank has the sum of one replica, and needs that
of all: once per step, before the norm; with updates inside backward, before each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemini import kernels
from gemini.errors import GeminiError, RankMismatch
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.movement.mover import tiles
from gemini.memory.store import ChunkStore
from gemini.planning.planes import GRAD, GRAD_ERROR
from gemini.ranks.agree import Facts, agree
from gemini.ranks.wire import Tag, Wire
from gemini.train.params.by_name import store_range
from gemini.train.params.handle import ParamHandle
from gemini.train.sharding.shards import Shards


class Replicas:
    """The replicas of one model, as one of its ranks sees them."""

    def __init__(self, shards: Shards, store: ChunkStore):
        self._ranks, self._params, self._scratch = shards.ranks, shards.params, shards.replica_scratch
        self._chunks, self._mover = store.chunks, store.mover
        # Other ranks of ep have other experts: what all of their tokens gave these has come with backward, and is
        # added up among those that have the same ones.
        self._wires: dict[int, Wire] = {}
        for index, handles in self._params.by_chunk.items():
            are_experts = self._ranks.experts.size > 1 and any(handle.cut is not None for handle in handles)
            across = self._ranks.copies if are_experts else self._ranks.replicas
            if across.size > 1:
                self._wires[index] = across
        self.summed: set[int] = set()
        """Chunks whose gradients were added up over replicas, or have been dropped since."""

    def refuse_more(self) -> None:
        """A gradient of a further backward has come, which may not be added to sums over replicas."""
        if any(map(self._is_summed, self.summed)):
            raise GeminiError("a backward after clip_grad_norm_: clip after the last backward of a step")
        self.summed.clear()  # they were dropped; once, before sums land behind backward

    def _is_summed(self, index: int) -> bool:
        return index in self.summed and any(handle.has_grad for handle in self._params.by_chunk[index])

    def sum_now(self, chunk: Chunk, section: torch.Tensor, present: Sequence[ParamHandle], plan: int) -> None:
        """Add up gradients that are about to be used, and are kept nowhere: ``section``, this rank's shard, becomes the
        sum over replicas. ``present`` have a gradient in it, and ``plan`` is the checksum of what updates depend on:
        raises RankMismatch, on every rank, if they are others on a replica.
        """
        names = [handle.name for handle in present]
        facts = Facts({"the chunk": chunk.spec.index, "the gradients in it": names, "the hyperparameters": plan})
        # Not as other agreements: a replica that stands elsewhere says more there.
        agree(self._ranks.replicas, f"the update of {chunk.name} inside backward", lambda: facts, tag=Tag.HEADER)
        across = self._wires.get(chunk.spec.index)
        if across is None:
            return
        for start, stop in tiles(0, section.numel(), self._scratch.numel() // 8):
            tile = section[start:stop].cpu()
            across.all_reduce(Tag.ALL_REDUCE, tile, self._scratch, f"the all-reduce of {chunk.name}")
            if tile.data_ptr() != section[start:stop].data_ptr():
                section[start:stop].copy_(tile)

    def sum_all(self) -> None:
        """Add up what was not, chunk by chunk in the order of the layout. Raises RankMismatch, on every rank, if some
        have dropped what others have added up.
        """
        summed = [self._is_summed(index) for index in self._wires]
        flags = [handle.has_grad for handle in self._params.handles]
        said = torch.tensor([*summed, *flags], dtype=torch.uint8, device="cpu")
        rows = self._ranks.replicas.swap(Tag.AGREEMENT, said, "comparing gradients across replicas")
        anywhere = rows[:, len(summed) :].any(0).tolist()
        with_grad = {handle.name for handle, is_there in zip(self._params.handles, anywhere, strict=True) if is_there}
        for index, column in zip(self._wires, rows[:, : len(summed)].T.tolist(), strict=True):
            chunk = self._chunks[index]
            # Sums of all and of one cannot be added up any more: one of them would count twice.
            if len(set(column)) > 1:
                raise RankMismatch(
                    f"the gradients of {chunk.name} were added up over the replicas of this model, and one of them "
                    "has dropped or replaced its own since. Every rank must make the same backwards and zero_grad() "
                    "the same gradients"
                )
            handles = [handle for handle in self._params.by_chunk[index] if handle.name in with_grad]
            if handles and not column[0]:
                self._add_up(chunk, handles)
                self.summed.add(index)

    def _add_up(self, chunk: Chunk, handles: Sequence[ParamHandle]) -> None:
        """This rank's shard of the gradients of a chunk, of which some replica has these, becomes the sum."""
        plane, scratch, across = chunk.planes[GRAD], self._scratch, self._wires[chunk.spec.index]
        absent = [handle for handle in handles if not handle.has_grad]
        sums: dict[str, kernels.Sums] = {handle.name: [] for handle in handles}
        for start, stop in tiles(0, plane.numel, min(self._mover.tile, scratch.numel() // 8)):
            tile, is_staged = self._mover.host_tile(1, plane, start, stop)
            # Other replicas have these gradients; this one adds zeros, and has them from here on.
            for handle in absent:
                tile[max(handle.part.start - start, 0) : max(handle.part.stop - start, 0)].zero_()
            across.all_reduce(Tag.ALL_REDUCE, tile, scratch, f"the all-reduce of {chunk.name}")
            if is_staged:
                self._mover.store([(plane, tile)], start, stop)
            for handle in handles:
                first, last = max(handle.part.start, start), min(handle.part.stop, stop)
                if first < last:
                    sums[handle.name] += kernels.sum_squares(tile[first - start : last - start])
        if GRAD_ERROR in chunk.planes:
            # The error of rounding was of this replica's part, which is in the sum now.
            error = chunk.planes[GRAD_ERROR]
            none = torch.zeros((), dtype=error.dtype, device="cpu").expand(error.items(error.numel))
            store_range(self._mover, error, 0, none)
        for handle in handles:
            handle.norm_sums = sums[handle.name]
