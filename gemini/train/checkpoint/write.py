"""Writing a checkpoint: what this rank keeps of every master and state, piece by piece into files of its own.

A *source* is one param's part of one plane on this rank. Its key (``exp_avg/model.norm.weight``) and its place in the
whole param are all a checkpoint knows: chunks, shards, tiers and the number of ranks are of the run, not of the model.
Pieces of sources are put into a :class:`CheckpointHome`, which is a folder here (:class:`FolderHome`), or the durable
store of the model (:mod:`gemini.train.checkpoint.durable`), by one loop (:func:`write`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gemini import replacing
from gemini.errors import StorageError, of_storage
from gemini.memory.chunks.chunk import Plane
from gemini.memory.devices.device import Device, Event
from gemini.memory.devices.pages import in_pages
from gemini.planning.planes import GRADS, PlaneKind
from gemini.ranks.agree import Handshake
from gemini.train.checkpoint.format import VALUES, check_target, encode, write_manifest
from gemini.train.checkpoint.tensor_file import TensorFileWriter, TensorSpec
from gemini.train.params.handle import ParamHandle

FILE_BYTES = 2 * 2**30
"""About how large a file becomes: many streams on a parallel file system, few entries in a folder."""


class PlanePart(NamedTuple):
    """A param's part of a plane on this rank. It holds the plane, so that it outlives the model if it must."""

    key: str
    kind: PlaneKind
    handle: ParamHandle
    plane: Plane
    spec: TensorSpec
    """What it is in a file: a whole param has its own name and shape, a slice says which, a part its elements."""
    numel: int
    """Items of this rank's part: elements, or of a plane with one item for a block of them, blocks."""
    offset: int
    """The place in the whole param's items at which they begin."""
    first: int
    """The place in the plane's items at which they begin."""

    def place(self, start: int) -> int:
        """The element of the plane at which item ``start`` of the part stands."""
        return (self.first + start) * self.plane.block


def sources_of(handles: list[ParamHandle]) -> list[PlanePart]:
    """List every source of this rank: chunk after chunk, in each plane after plane, as they stand there."""
    found = [source for handle in handles for source in _sources(handle)]
    # Chunk after chunk: behind the training each is free to change as soon as its last piece is written. Plane after
    # plane: what stands side by side is read at once.
    return sorted(found, key=lambda source: (source.handle.chunk.spec.index, source.kind, source.first))


def _sources(handle: ParamHandle) -> Iterator[PlanePart]:
    """List what a param has of every plane that is saved."""
    # Asked once for all planes: every question to a param passes its guard.
    name, shape, cut = handle.whole_name, handle.param.shape, handle.cut
    part, numel = handle.part, handle.part.numel
    for kind, plane in handle.chunk.planes.items():
        if kind in GRADS:
            continue
        key, items, start = f"{kind}/{name}", plane.items(numel), part.offset // plane.block
        in_file = key if cut is None else f"{key}[slice {cut.rank} of {cut.size}]"
        if numel == handle.slot.numel:
            # Flat where a plane has fewer items than the param elements.
            spec = TensorSpec(in_file, plane.dtype, tuple(shape) if shape.numel() == items else (items,))
        else:
            spec = TensorSpec(f"{in_file}[{start}:{start + items}]", plane.dtype, (items,))
        yield PlanePart(key, kind, handle, plane, spec, items, start, part.start // plane.block)


class Cut(NamedTuple):
    """Items ``[start, stop)`` of a source, which a piece has among others."""

    source: PlanePart
    start: int
    stop: int


class Piece(NamedTuple):
    """Elements ``[start, stop)`` of a plane (``start`` on a page): what is read and put into a home at a time."""

    chunk_index: int
    kind: PlaneKind
    plane: Plane
    start: int
    stop: int
    cuts: list[Cut]
    """What of sources it has; none where a home keeps planes."""

    def read(self, device: Device, staging: torch.Tensor) -> torch.Tensor:
        """Their items as a host tensor, in place where the host can read them, else in ``staging``."""
        in_place = self.plane.host_view(self.start, self.stop)
        return self.staged(device, staging)[0] if in_place is None else in_place

    def staged(self, device: Device, staging: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Their items in ``staging``, and the bytes of the pages that have them, with zeros behind the items."""
        plane, size = self.plane, self.plane.dtype.itemsize
        first = self.start // plane.block * size
        num_bytes = plane.items(self.stop) * size - first
        # Files are read in whole pages, which every plane fills. Behind the items stand those of another param, or
        # nothing.
        pages = staging[: in_pages(num_bytes)]
        items = pages[:num_bytes].view(plane.dtype)
        here, there = plane.host_view(self.start, self.stop), plane.device_view(self.start, self.stop)
        if here is not None:
            items.copy_(here)
        elif there is not None:  # on a stream of its own: the saver is not the only one who copies
            device.copy(items, there, "checkpoint").wait()
        else:
            plane.load(self.start, self.start + len(pages) // size, pages.view(plane.dtype))
        # Else the drive would get what the buffer held before.
        pages[num_bytes:].zero_()
        return items, pages


def pieces_of(sources: Iterable[PlanePart], most: int) -> list[Piece]:
    """Cut sources, in the order of :func:`sources_of`, into pieces of at most so many items. Small ones that stand
    side by side are in one piece, which costs one read.
    """
    pieces: list[Piece] = []
    for source in sources:
        plane, block = source.plane, source.plane.block
        for start in range(0, source.numel, most):
            cut = Cut(source, start, min(start + most, source.numel))
            begin, end = (source.first + cut.start) * block, (source.first + cut.stop) * block
            last = pieces[-1] if pieces else None
            if last is not None and last.plane is plane and end - last.start <= most * block:
                last.cuts.append(cut)
                pieces[-1] = last._replace(stop=end)
            else:
                pieces.append(Piece(source.handle.chunk.spec.index, source.kind, plane, begin, end, [cut]))
    return pieces


class Draft(NamedTuple):
    """All that a checkpoint holds but masters and states, as it was when the checkpoint was asked for."""

    manifest: dict[str, Any]
    tensors: list[torch.Tensor]
    rng: Any
    """Of this rank; None where one that has another slice of the same params says it."""

    def take_rng(self, rng: list[Any]) -> None:
        """Note the RNG states of all ranks, on the first one."""
        self.manifest["rng"] = encode([one for one in rng if one is not None], self.tensors, "rng")


class CheckpointHome(ABC):
    """Where a checkpoint is kept. Every rank puts its own pieces; then all of them commit it, or none.

    Attributes:
        place: its name.
        draft: everything but masters and states.
        pieces: what this rank puts, in any order.
        held: chunks that may change only when all is committed.
        pending: updates that were in flight, by chunk: what is put is what they make.
        in_place: whether no staging is needed.
    """

    place: Path
    draft: Draft
    pieces: list[Piece]
    held: set[int]
    pending: dict[int, Event]
    in_place: bool

    @abstractmethod
    def begin(self, ranks: Handshake) -> None:
        """Agree on what is about to be written; the first rank hears the RNG states of all."""

    @abstractmethod
    def put(self, piece: Piece, device: Device, staging: torch.Tensor) -> None:
        """Read a piece and write it; its chunk may change afterwards, if it is not held. ``staging``: memory for what
        cannot be read in place.
        """

    @abstractmethod
    def flush(self) -> None:
        """Bring what this rank has put to the drive."""

    @abstractmethod
    def commit(self, ranks: Handshake) -> None:
        """Make it the newest checkpoint, of what all ranks have put and flushed."""

    @abstractmethod
    def end(self) -> None:
        """Leave nothing of a checkpoint that was not committed. Comes in any case, last."""


def write(
    home: CheckpointHome,
    ranks: Handshake,
    device: Device,
    staging: torch.Tensor,
    order: Callable[[list[Piece]], Iterable[Piece]] = iter,
) -> None:
    """Write a checkpoint, on all ranks or on none.

    Args:
        staging: host bytes, page-aligned, with room for the largest piece; empty if the home is ``in_place``.
        order: in which pieces are put; the next is asked for when one is written.

    Raises:
        GeminiError: on every rank, naming the one that failed. What was there before is whole.
    """

    def put_all() -> None:
        for piece in order(home.pieces):
            if piece.chunk_index in home.pending:
                # The checkpoint has what the update makes, not what it began with.
                home.pending[piece.chunk_index].wait()
            home.put(piece, device, staging)
        # Also those of chunks without a piece: they write to the drive themselves, and are flushed with the rest.
        for update in home.pending.values():
            update.wait()
        home.flush()  # last of all: nobody who waits for a piece waits for the disk itself

    try:
        with of_storage(f"could not save the checkpoint {home.place}"):
            # In this order on every rank: none commits before all have flushed.
            home.begin(ranks)
            ranks.step(put_all, lambda _: None)
            home.commit(ranks)
    finally:
        home.end()


class FolderHome(CheckpointHome):
    """The folder ``place``, in which each rank has files of its own. The first one makes it under another name, which
    it tells the others, and ends it: values, manifest, and the folder gets its name.

    Args:
        sources: what this rank writes; none if another replica of the model writes the same.
        piece: items of a piece.
    """

    def __init__(self, place: Path, draft: Draft, sources: list[PlanePart], piece: int):
        self.place, self.draft = place, draft
        self._sources = {source.key: source for source in sources if source.numel}
        self.pieces = pieces_of(self._sources.values(), piece)
        # Asked of an empty range, a plane says whether the host can read it where it is.
        self.in_place = all(source.plane.host_view(0, 0) is not None for source in self._sources.values())
        self.held, self.pending = set(), {}
        self._files: dict[str, TensorFileWriter] = {}
        """By source."""
        # By source, in the order of its pieces, which therefore must be put in order.
        self._sums: dict[str, list[int]] = {key: [] for key in self._sources}
        self._made: Path | None = None

    def begin(self, ranks: Handshake) -> None:
        name = ranks.step(lambda: self.draft.rng, self._make)
        self._work, self._rank = self.place.parent / name, ranks.rank

    def _make(self, rng: list[Any]) -> str:
        """Make the folder that all write into, beside the final one; on the first rank."""
        self._made = replacing.begin(self.place)
        self._made.mkdir()
        self.draft.take_rng(rng)
        return self._made.name

    def put(self, piece: Piece, device: Device, staging: torch.Tensor) -> None:
        # With the first piece: a replica that puts nothing makes no files.
        if not self._files:
            self._open()
        items, first = piece.read(device, staging), piece.start // piece.plane.block
        for source, start, stop in piece.cuts:
            at = source.first + start - first
            written = self._files[source.key].write(source.spec.name, start, items[at : at + stop - start])
            self._sums[source.key].append(written)

    def _open(self) -> None:
        """Make the files, of about ``FILE_BYTES`` each."""
        # A folder that only the first rank sees would make each rank save a part that nobody finds.
        if not self._work.is_dir():
            raise StorageError(
                f"{self._work}, which the first rank has made, is not there: ranks on several machines need a "
                "directory that all of them share"
            )
        groups: list[list[PlanePart]] = [[]]
        filled = 0
        for source in self._sources.values():
            if filled and filled + source.spec.num_bytes > FILE_BYTES:
                groups.append([])
                filled = 0
            groups[-1].append(source)
            filled += source.spec.num_bytes
        for number, group in enumerate(groups):
            path = self._work / f"params-{self._rank:05d}-{number:05d}.safetensors"
            file = TensorFileWriter(path, [source.spec for source in group])
            self._files |= {source.key: file for source in group}

    def flush(self) -> None:
        for file in dict.fromkeys(self._files.values()):
            file.close()

    def commit(self, ranks: Handshake) -> None:
        ranks.step(self._listed, self._finish)

    def _listed(self) -> dict[str, Any]:
        """List what the manifest says of the files of this rank."""
        listed: dict[str, Any] = {}
        for key, source in self._sources.items():
            file = self._files[key]
            in_file = listed.setdefault(file.path.name, {"header": file.header_checksum, "tensors": {}})
            entry = {"of": key, "start": source.offset, "sums": self._sums[key]}
            in_file["tensors"][source.spec.name] = entry
            if source.handle.cut is not None:
                entry["slice"] = source.handle.cut.rank
        return listed

    def _finish(self, listed: list[dict[str, Any]]) -> None:
        """Write values and manifest, on the first rank when all are done, and let the new one replace the old one."""
        assert self._made is not None
        files = self.draft.manifest["files"] = {VALUES: _write_values(self._made / VALUES, self.draft.tensors)}
        for of_rank in listed:
            files.update(of_rank)
        # Last: a folder without a manifest is no checkpoint.
        write_manifest(self._made, self.draft.manifest)
        check_target(self.place, self.place)  # again: the writing may have taken long
        replacing.swap(self._made, self.place)

    def end(self) -> None:
        for file in self._files.values():
            file.abandon()
        if self._made is not None:
            replacing.end(self._made)


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
