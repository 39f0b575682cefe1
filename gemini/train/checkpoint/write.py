"""Saving in terms of ``torch.distributed.checkpoint``: which rank writes what (planner), into which files (storage).

DCP gathers the plans, carries errors between ranks and calls ``finish`` on the first rank when all have written. Its
own planner and storage are not used: they want whole tensors in memory and pickle (docs/decisions). Each rank writes
its parts as pieces of a few MiB, streamed into safetensors files of its own; plans of other ranks are never needed, so
none are sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from gemini.errors import StorageError
from gemini.memory.devices.device import Device
from gemini.memory.movement.mover import tiles
from gemini.train.checkpoint import files, replacing
from gemini.train.checkpoint.manifest import VALUES, whole_shape
from gemini.train.checkpoint.parts import Buffer, Source
from gemini.train.checkpoint.plain_data import encode
from gemini.train.checkpoint.tensor_file import TensorFileWriter, TensorSpec

FILE_BYTES = 2 * 2**30
"""About how large a file becomes: many streams on a parallel file system, few entries in a folder."""

Order = Callable[[list[WriteItem]], Iterable[WriteItem]]
"""In which order pieces are written; the next is asked for when one is written."""


class Draft(NamedTuple):
    """Everything but masters and moments, as it was when the checkpoint was asked for."""

    manifest: dict[str, Any]
    tensors: list[torch.Tensor]
    rng: Any
    """Of this rank; the planner collects those of all."""


class Planner(SavePlanner):
    """What this rank writes: pieces of its sources, or nothing if another replica writes the same."""

    def __init__(self, sources: dict[str, Source], piece: int, device: Device, buffer: Buffer, draft: Draft):
        self.sources = sources
        self.draft = draft
        self._device = device
        self._buffer = buffer
        self.items = [item for source in sources.values() for item in _items(source, piece)]

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the sources were given."""

    def create_local_plan(self) -> SavePlan:
        """What the first rank must know of this one: its RNG states."""
        return SavePlan([], planner_data=self.draft.rng)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the first rank."""
        rng = [plan.planner_data for plan in all_plans]
        self.draft.manifest["rng"] = encode(rng, self.draft.tensors, "rng")
        return [replace(plan, planner_data=None) for plan in all_plans], Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The pieces of this rank, with what the storage decided."""
        return replace(new_plan, items=self.items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """A piece as a flat host tensor, good until the next one."""
        source, data = self.sources[write_item.index.fqn], write_item.tensor_data
        assert data is not None
        start = data.chunk.offsets[0] - source.offset
        return source.read(start, start + data.chunk.sizes[0], self._device, self._buffer)


def _items(source: Source, piece: int) -> list[WriteItem]:
    size = torch.Size([source.plane.items(source.handle.slot.numel)])
    properties = TensorProperties(dtype=source.plane.dtype)
    items = []
    for start, stop in tiles(0, source.numel, piece):
        offsets = torch.Size([source.offset + start])
        data = TensorWriteData(ChunkStorageMetadata(offsets, torch.Size([stop - start])), properties, size)
        items.append(WriteItem(MetadataIndex(source.key, offsets), WriteItemType.SHARD, tensor_data=data))
    return items


class Writer(StorageWriter):
    """Writes the folder ``final``: each rank its files beside it, the first one the rest; then it is renamed."""

    def __init__(self, final: Path, draft: Draft, order: Order = iter):
        self._final = final
        self._draft = draft
        self._order = order
        self._made: Path | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer is made for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The first rank makes the folder."""
        if is_coordinator:
            self._made = replacing.begin(self._final)
            self._made.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank the folder and the beginning of its file names."""
        assert self._made is not None
        return [replace(p, storage_data=(self._made.name, f"params-{i:05d}")) for i, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stream the pieces of this rank; all of its files are on the disk afterwards."""
        folder, prefix = plan.storage_data
        work = self._final.parent / folder
        if plan.items and not work.is_dir():
            raise StorageError(
                f"{work}, which the first rank has made, is not there: ranks on several machines need a directory that "
                "all of them share"
            )
        runs = _runs(plan.items, self._draft.manifest["params"])
        writers = _open_writers(work, prefix, list(runs.values()))
        sums: dict[str, list[int]] = {key: [] for key in runs}
        try:
            for item in self._order(plan.items):
                assert item.tensor_data is not None and item.index.offset is not None
                run = runs[item.index.fqn]
                piece = planner.resolve_data(item)
                assert isinstance(piece, torch.Tensor)
                start = item.index.offset[0] - run.start
                sums[run.key].append(writers[run.key].write(run.spec.name, start, piece))
            for writer in writers.values():  # last of all: nobody who waits for a piece waits for the disk itself
                writer.close()
        finally:
            for writer in writers.values():
                writer.abandon()
        results = [
            WriteResult(
                MetadataIndex(run.key, [run.start]),
                run.spec.num_bytes,
                (run.spec.name, writers[run.key].path.name, writers[run.key].header_checksum, sums[run.key]),
            )
            for run in runs.values()
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, when all have written: values and manifest, then the new one takes the old one's place."""
        assert self._made is not None
        manifest, tensors = self._draft.manifest, self._draft.tensors
        manifest["files"] = listed = {VALUES: _write_values(self._made / VALUES, tensors)}
        for result in (result for of_rank in results for result in of_rank):
            name, file, header, sums = result.storage_data
            assert result.index.offset is not None
            entry = listed.setdefault(file, {"header": header, "tensors": {}})
            entry["tensors"][name] = {"of": result.index.fqn, "start": result.index.offset[0], "sums": sums}
        try:
            files.write_manifest(self._made, manifest)
            files.check_target(self._final, self._final)  # again: the writing may have taken long
            replacing.swap(self._made, self._final)
        except OSError as e:
            raise StorageError(f"{e.strerror or e}") from e

    def clean_up(self) -> None:
        """Whatever happened: nothing but the checkpoint stays behind. Called when no rank writes any more."""
        if self._made is not None:
            replacing.end(self._made)


class _Run(NamedTuple):
    """Pieces of one key that follow each other: one tensor in a file."""

    key: str
    start: int
    spec: TensorSpec


def _runs(items: list[WriteItem], params: dict[str, Any]) -> dict[str, _Run]:
    """A whole param has its own name and shape in the file, a part of one says which elements it holds."""
    first: dict[str, WriteItem] = {}
    numel: dict[str, int] = {}
    for item in items:
        assert item.tensor_data is not None
        first.setdefault(item.index.fqn, item)
        numel[item.index.fqn] = numel.get(item.index.fqn, 0) + item.tensor_data.chunk.sizes[0]
    runs = {}
    for key, item in first.items():
        assert item.tensor_data is not None and item.index.offset is not None
        start, dtype = item.index.offset[0], item.tensor_data.properties.dtype
        name = f"{key}[{start}:{start + numel[key]}]"
        shape: tuple[int, ...] = (numel[key],)
        if numel[key] == item.tensor_data.size[0]:
            name, shape = key, whole_shape(params[key.partition("/")[2]]["shape"], numel[key])
        runs[key] = _Run(key, start, TensorSpec(name, dtype, shape))
    return runs


def _open_writers(work: Path, prefix: str, runs: list[_Run]) -> dict[str, TensorFileWriter]:
    """By key, the file it goes into; about ``FILE_BYTES`` each."""
    groups: list[list[_Run]] = [[]]
    filled = 0
    for run in runs:
        if filled and filled + run.spec.num_bytes > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(run)
        filled += run.spec.num_bytes
    writers = {}
    for i, group in enumerate(groups):
        writer = TensorFileWriter(work / f"{prefix}-{i:05d}.safetensors", [run.spec for run in group])
        writers.update({run.key: writer for run in group})
    return writers


def _write_values(path: Path, tensors: list[torch.Tensor]) -> dict[str, Any]:
    writer = TensorFileWriter(path, [TensorSpec(str(i), t.dtype, tuple(t.shape)) for i, t in enumerate(tensors)])
    listed = {}
    try:
        for i, tensor in enumerate(tensors):
            sums = [writer.write(str(i), 0, tensor.view(-1))] if tensor.numel() else []
            listed[str(i)] = {"of": str(i), "start": 0, "sums": sums}
        writer.close()
    finally:
        writer.abandon()
    return {"header": writer.header_checksum, "tensors": listed}
