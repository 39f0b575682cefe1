"""Loading in terms of ``torch.distributed.checkpoint``: what this rank needs of the saved parts, and reading it.

Whatever number of ranks wrote the checkpoint, a rank reads the ranges that overlap its own parts. Before any rank
changes anything all of them together have compared every checksum, each a share of them; DCP carries the news of damage
to all.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from gemini.errors import StorageError
from gemini.memory.movement.mover import tiles
from gemini.train.checkpoint.files import compare_sums
from gemini.train.checkpoint.manifest import VALUES, Manifest
from gemini.train.checkpoint.parts import Source
from gemini.train.checkpoint.tensor_file import TensorFile
from gemini.train.params.by_name import write_range

if TYPE_CHECKING:
    from gemini.train.engine import Engine


class Reader(StorageReader):
    """The files of one checkpoint.

    Args:
        share: this rank's number and how many ranks compare checksums together.
    """

    def __init__(self, manifest: Manifest, opened: dict[str, TensorFile], share: tuple[int, int]):
        self._piece, self._share = manifest.piece, share
        self._entries = [
            (opened[file], name, entry)
            for file, listed in manifest.files.items()
            if file != VALUES
            for name, entry in listed.tensors.items()
        ]
        self._where = {MetadataIndex(entry.of, [entry.start]): (file, name) for file, name, entry in self._entries}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader is made for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which ranges of each master and moment there are."""
        tensors: dict[str, Any] = {}
        for index, (file, name) in self._where.items():
            spec = file.specs[name]
            assert index.offset is not None
            chunk = ChunkStorageMetadata(index.offset, torch.Size([spec.numel]))
            entry = tensors.setdefault(
                index.fqn, TensorStorageMetadata(TensorProperties(dtype=spec.dtype), torch.Size([0]), [])
            )
            entry.chunks.append(chunk)
        for entry in tensors.values():
            entry.size = torch.Size([sum(chunk.sizes[0] for chunk in entry.chunks)])
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the files are open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Compare this rank's share of the checksums.

        Raises:
            StorageError: naming the file and tensor that is not what was written.
        """
        rank, size = self._share
        for file, name, entry in self._entries[rank::size]:
            compare_sums(file, name, self._piece, entry)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs, range by range."""
        for item in plan.items:
            file, name = self._where[item.storage_index]
            target = planner.resolve_tensor(item)
            file.read_into(name, item.storage_offsets[0], target)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class Planner(LoadPlanner):
    """What this rank needs, as ranges of at most a tile. ``started``: planes are being overwritten.

    Args:
        begin: called when all has been checked, before the first write.
    """

    def __init__(self, engine: Engine, sources: dict[str, Source], begin: Callable[[], object]):
        self._engine, self._sources, self._begin = engine, sources, begin
        self._metadata = Metadata({})
        self._items: list[ReadItem] = []
        self._absent: list[Source] = []
        self.started = False

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take what is there."""
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Overlaps of this rank's parts with what was saved; other ranks need not know.

        Raises:
            StorageError: if the saved parts do not cover a param.
        """
        for key, source in self._sources.items():
            saved = self._metadata.state_dict_metadata.get(key)
            if not isinstance(saved, TensorStorageMetadata):
                self._absent.append(source)  # trained here, frozen when it was saved
                continue
            mine = [
                ChunkStorageMetadata(torch.Size([source.offset + start]), torch.Size([stop - start]))
                for start, stop in tiles(0, source.numel, self._engine.mover.tile)
            ]
            items = create_read_items_for_chunk_list(key, saved, mine)
            if sum(item.lengths[0] for item in items) != source.numel or saved.properties.dtype != source.plane.dtype:
                raise StorageError(f"the checkpoint is damaged: {key!r} is not complete in it. Use an older checkpoint")
            self._items += items
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to decide together."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """All ranks are ready: from here on planes are overwritten."""
        self._begin()
        self.started = True
        for source in self._absent:
            self._clear(source)
        return LoadPlan(self._items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: a checkpoint has no pickled values."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The range in place where the host can write it, else a staging area."""
        source, start = self._place(read_item)
        numel = read_item.lengths[0]
        in_place = source.plane.host_view(source.place(start), source.place(start + numel))
        if in_place is not None:
            return in_place
        return self._engine.mover.scratch(2, source.plane.dtype, numel)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Store what was staged."""
        source, start = self._place(read_item)
        if source.plane.host_view(source.place(start), source.place(start + tensor.numel())) is None:
            write_range(self._engine.mover, source.plane, source.handle, tensor, start * source.plane.block)

    def _clear(self, source: Source) -> None:
        """Begin anew: a residual or moment of before belongs to weights that are gone."""
        mover = self._engine.mover
        for start, stop in tiles(0, source.numel, mover.tile):
            zeros = mover.scratch(2, source.plane.dtype, stop - start).zero_()
            write_range(mover, source.plane, source.handle, zeros, start * source.plane.block)

    def _place(self, read_item: ReadItem) -> tuple[Source, int]:
        """The source, and where in this rank's part of it the range begins."""
        source, offset = self._sources[read_item.dest_index.fqn], read_item.dest_index.offset
        assert offset is not None
        return source, offset[0] + read_item.dest_offsets[0] - source.offset
