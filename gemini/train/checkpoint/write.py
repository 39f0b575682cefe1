"""Writing a checkpoint: what this rank keeps of every master and state, piece by piece into files of its own.

A *source* is one param's part of one plane on this rank. Its key (``exp_avg/model.norm.weight``) and its place in the
whole param are all a checkpoint knows: chunks, shards, tiers and the number of ranks are of the run, not of the model.
The ranks exchange little: the first one hears the RNG states of all, tells them the folder, hears the checksums when
all have written, and ends the checkpoint (:meth:`Writer._finish`): values, manifest, and the folder gets its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gemini import replacing
from gemini.errors import StorageError
from gemini.memory.chunks.chunk import Plane
from gemini.memory.devices.device import Device, Event
from gemini.memory.movement.mover import tiles
from gemini.planning.planes import WEIGHTS, PlaneKind
from gemini.ranks.agree import Handshake
from gemini.train.checkpoint.format import VALUES, check_target, key_in_file, whole_shape, write_manifest
from gemini.train.checkpoint.plain_data import encode
from gemini.train.checkpoint.tensor_file import TensorFileWriter, TensorSpec
from gemini.train.params.handle import ParamHandle

FILE_BYTES = 2 * 2**30
"""About how large a file becomes: many streams on a parallel file system, few entries in a folder."""

Buffer = Callable[[int], torch.Tensor]
"""So many bytes of host memory, page-aligned, for what cannot be read in place; overwritten when asked again."""


class PlanePart(NamedTuple):
    """A param's part of a plane on this rank. It holds the plane, so that it outlives the model if it must."""

    key: str
    kind: PlaneKind
    handle: ParamHandle
    plane: Plane
    spec: TensorSpec
    """What it is in a file: a whole param has its own name and shape, a slice says which, a part its elements."""

    @property
    def numel(self) -> int:
        """Items of this rank's part: elements, or of a plane with one item for a block of them, blocks."""
        return self.plane.items(self.handle.part.numel)

    @property
    def offset(self) -> int:
        """Where in the whole param's items they begin."""
        return self.handle.part.offset // self.plane.block

    def place(self, start: int) -> int:
        """The element of the plane at which item ``start`` of the part stands."""
        return self.handle.part.start + start * self.plane.block

    def read(self, start: int, stop: int, device: Device, buffer: Buffer) -> torch.Tensor:
        """Items ``[start, stop)`` of the part (``start`` on a page) as a host tensor, in place or in the buffer."""
        first, last = self.place(start), self.place(stop)
        in_place = self.plane.host_view(first, last)
        if in_place is not None:
            return in_place
        padded = self.plane.page_up(last - first)
        staged = buffer(self.plane.items(padded) * self.plane.dtype.itemsize).view(self.plane.dtype)
        on_device = self.plane.device_view(first, last)
        if on_device is not None:  # on a stream of its own: the saver is not the only one who copies
            device.copy(staged[: stop - start], on_device, "checkpoint").wait()
        else:
            self.plane.load(first, first + padded, staged)
        return staged[: stop - start]


def sources_of(handles: list[ParamHandle]) -> list[PlanePart]:
    """Every source of this rank, chunk after chunk."""
    found = [_source(kind, handle) for handle in handles for kind in (WEIGHTS, *handle.chunk.states)]
    return sorted(found, key=lambda source: source.handle.chunk.spec.index)


def _source(kind: PlaneKind, handle: ParamHandle) -> PlanePart:
    key, plane, cut = f"{kind}/{handle.whole_name}", handle.chunk.planes[kind], handle.cut
    in_file = key if cut is None else key_in_file(key, cut.rank, cut.size)
    spec = TensorSpec(in_file, plane.dtype, whole_shape(handle.param.shape, plane.items(handle.slot.numel)))
    source = PlanePart(key, kind, handle, plane, spec)
    if handle.part.numel == handle.slot.numel:
        return source
    start, numel = source.offset, source.numel
    return source._replace(spec=TensorSpec(f"{in_file}[{start}:{start + numel}]", plane.dtype, (numel,)))


class Piece(NamedTuple):
    """Items ``[start, stop)`` of a source: what is read, written and has a checksum of its own at a time."""

    source: PlanePart
    start: int
    stop: int

    @property
    def chunk_index(self) -> int:
        """Of the chunk."""
        return self.source.handle.chunk.spec.index


class Draft(NamedTuple):
    """Everything but masters and states, as it was when the checkpoint was asked for."""

    manifest: dict[str, Any]
    tensors: list[torch.Tensor]
    rng: Any
    """Of this rank; None where one that has another slice of the same params says it."""


class Writer:
    """One checkpoint on its way into the folder ``final``.

    Args:
        sources: what this rank writes; none if another replica of the model writes the same.
        piece: items of a piece.
    """

    def __init__(self, final: Path, draft: Draft, sources: list[PlanePart], piece: int):
        self.final, self.draft = final, draft
        self._sources = [source for source in sources if source.numel]
        self.pieces = [Piece(s, *span) for s in self._sources for span in tiles(0, s.numel, piece)]
        self.in_place = all(source.plane.host_view(0, 0) is not None for source in self._sources)
        """Whether no staging is needed."""
        self.held, self.pending = set[int](), dict[int, Event]()  # as of a commit: here a written chunk is free
        self._made: Path | None = None

    def write(
        self,
        ranks: Handshake,
        device: Device,
        buffer: Buffer,
        order: Callable[[list[Piece]], Iterable[Piece]] = iter,
    ) -> None:
        """Write it, on all ranks or on none; nothing but the checkpoint stays behind.

        Args:
            order: in which pieces are written; the next is asked for when one is written.

        Raises:
            GeminiError: on every rank, naming the one that failed.
        """

        def write_own() -> dict[str, Any]:
            work = self.final.parent / folder
            if self.pieces and not work.is_dir():
                raise StorageError(
                    f"{work}, which the first rank has made, is not there: ranks on several machines need a directory "
                    "that all of them share"
                )
            return self._write_own(work, ranks.rank, order(self.pieces), device, buffer)

        try:
            folder = ranks.step(lambda: self.draft.rng, self._begin)
            ranks.step(write_own, self._finish)
        except OSError as e:
            raise StorageError(f"could not save the checkpoint {self.final}: {e.strerror or e}") from e
        finally:
            if self._made is not None:
                replacing.end(self._made)

    def _begin(self, rng: list[Any]) -> str:
        """On the first rank: the folder that all write into, beside the final one, with the RNG states of all."""
        self._made = replacing.begin(self.final)
        self._made.mkdir()
        self.draft.manifest["rng"] = encode([one for one in rng if one is not None], self.draft.tensors, "rng")
        return self._made.name

    def _write_own(
        self, work: Path, rank: int, pieces: Iterable[Piece], device: Device, buffer: Buffer
    ) -> dict[str, Any]:
        """Stream the pieces of this rank into its files, which are on the disk afterwards; what the manifest says of
        them.
        """
        files = _open_writers(work, rank, self._sources)
        sums: dict[str, list[int]] = {key: [] for key in files}
        try:
            for source, start, stop in pieces:
                data = source.read(start, stop, device, buffer)
                sums[source.key].append(files[source.key].write(source.spec.name, start, data))
            for file in files.values():  # last of all: nobody who waits for a piece waits for the disk itself
                file.close()
        finally:
            for file in files.values():
                file.abandon()
        listed: dict[str, Any] = {}
        for source in self._sources:
            key, file = source.key, files[source.key]
            in_file = listed.setdefault(file.path.name, {"header": file.header_checksum, "tensors": {}})
            entry = in_file["tensors"][source.spec.name] = {"of": key, "start": source.offset, "sums": sums[key]}
            if source.handle.cut is not None:
                entry["slice"] = source.handle.cut.rank
        return listed

    def _finish(self, listed: list[dict[str, Any]]) -> None:
        """On the first rank, when all have written: values and manifest, then the new one takes the old one's place."""
        assert self._made is not None
        files = self.draft.manifest["files"] = {VALUES: _write_values(self._made / VALUES, self.draft.tensors)}
        for of_rank in listed:
            files.update(of_rank)
        write_manifest(self._made, self.draft.manifest)
        check_target(self.final, self.final)  # again: the writing may have taken long
        replacing.swap(self._made, self.final)


def _open_writers(work: Path, rank: int, sources: list[PlanePart]) -> dict[str, TensorFileWriter]:
    """By key, the file it goes into; about ``FILE_BYTES`` each."""
    groups: list[list[PlanePart]] = [[]]
    filled = 0
    for source in sources:
        if filled and filled + source.spec.num_bytes > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(source)
        filled += source.spec.num_bytes
    writers = {}
    for number, group in enumerate(groups):
        path = work / f"params-{rank:05d}-{number:05d}.safetensors"
        writer = TensorFileWriter(path, [source.spec for source in group])
        writers.update({source.key: writer for source in group})
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
