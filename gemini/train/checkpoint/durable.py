"""A durable store as a checkpoint: committed as one (:class:`StoreHome`), and read as the one that its last commit is.

The manifest is the same, and so is the reader. Records and layouts have checksums: what they say is believed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from gemini.errors import GeminiError, StorageError, of_storage
from gemini.kernels import crc32
from gemini.memory.chunks.chunk import Chunk, DurablePlane
from gemini.memory.devices.device import Device, Event
from gemini.memory.devices.pages import PAGE
from gemini.memory.durable.folder import (
    Commit,
    CommitRecord,
    StoreFolder,
    last_commit,
    read_layout,
    slots_paths,
)
from gemini.memory.durable.slots import ZEROS, Runs, slot_name
from gemini.memory.movement.mover import tiles
from gemini.memory.nvme import striped_bytes, stripes
from gemini.planning.planes import GRADS
from gemini.ranks.agree import Handshake
from gemini.train.checkpoint.format import (
    STORED_DTYPES,
    VALUES,
    Manifest,
    TensorFile,
    TensorSpec,
    bytes_of,
    manifest_of,
    opened,
    read_all,
)
from gemini.train.checkpoint.write import CheckpointHome, Draft, Piece, PlanePart
from gemini.train.observers import ChangedChunks

_AT_ONCE = 2**20
"""Bytes that are read at once to be summed."""


class StoreHome(CheckpointHome):
    """The model's durable store: what training has written to its slots already becomes a checkpoint. Only what lives
    in memory, and has changed since the last commit, is put into slots of its own; then one record is written. What the
    commit before names is not overwritten until all ranks have theirs, so that a run which is killed anywhere goes on
    from this step or from the one before.

    It may be made while updates of the step are in flight, ``pending`` by chunk. Changes of later steps wait for the
    record (``before_write`` of :mod:`gemini.train.checkpoint.write`), which is there long before their gradients are.
    """

    def __init__(
        self,
        store: StoreFolder,
        draft: Draft,
        chunks: list[Chunk],
        sources: list[PlanePart],
        piece: int,
        *,
        pending: Mapping[int, Event],
        changed: ChangedChunks,
    ):
        self.place, self.draft, self.pending = store.directory, draft, dict(pending)
        self._store, self._sources, self._changed = store, sources, changed
        for chunk in chunks:
            for kind in chunk.planes:
                if kind not in GRADS and slot_name(kind, chunk.spec.index) not in store.slots.pairs:
                    raise GeminiError(
                        f"{chunk.name} was frozen when the model was wrapped and is trained now, and the durable store "
                        f"has no room for its {kind}: set requires_grad before wrapping, or save a checkpoint to "
                        "another folder"
                    )
        # Now: what changes from here on belongs to the next commit.
        taken = changed.take() | self.pending.keys()
        self.pieces = [
            Piece(chunk.spec.index, kind, plane, start, stop, [])
            for chunk in chunks
            if chunk.spec.index in taken
            for kind, plane in chunk.planes.items()
            if kind not in GRADS and not isinstance(plane, DurablePlane)
            for start, stop in tiles(0, plane.numel, piece)
        ]
        # A record names slots that chunks live in: these may change when it is there.
        self.held = {
            chunk.spec.index for chunk in chunks if any(isinstance(p, DurablePlane) for p in chunk.planes.values())
        }
        self.in_place = not self.pieces

    def begin(self, ranks: Handshake) -> None:
        self._sequence = ranks.step(lambda: (self.draft.rng, self._store.highest), self._next)

    def _next(self, given: list[tuple[list[Any], int]]) -> int:
        """Choose the number of the commit, on the first rank."""
        self.draft.take_rng([rng for rng, _ in given])
        # Higher than any rank has seen, so that what a commit that broke off has left is never taken for one of this.
        return 1 + max(highest for _, highest in given)

    def put(self, piece: Piece, device: Device, staging: torch.Tensor) -> None:
        # In bytes of the slots, whose pages are those of the plane.
        at = piece.start // piece.plane.block * piece.plane.dtype.itemsize
        pair = self._store.slots.pairs[slot_name(piece.kind, piece.chunk_index)]
        # Waited for, since the next piece comes into the same staging.
        pair.write(piece.staged(device, staging)[1], at)

    def flush(self) -> None:
        self._layout = self._store.write_layout(layout_of(self._sources, self._store))
        self._store.slots.sync()

    def commit(self, ranks: Handshake) -> None:
        """Write a record on every rank: all that it names has reached every drive."""
        store = self._store
        try:
            runs = {name: pair.runs() for name, pair in store.slots.pairs.items()}
            ranks.step(lambda: store.commit(self._record(ranks.rank, runs)), lambda _: None)
            self._changed.committed()
        except BaseException as e:  # here or there a record may be on the drive
            store.slots.refuse_writes(e)
            raise
        # Only now may the slots of the commit before be overwritten: any rank could still have had to go back to it.
        store.committed_by_all(runs)

    def _record(self, rank: int, runs: Mapping[str, Any]) -> CommitRecord:
        text = {"ranks": self._store.ranks, "layout": self._layout, "runs": runs}
        # The first rank's record alone has the manifest and the values.
        if rank:
            return CommitRecord(self._sequence, text, b"")
        tensors = self.draft.tensors
        text["manifest"] = self.draft.manifest
        text["values"] = [[STORED_DTYPES[tensor.dtype], list(tensor.shape)] for tensor in tensors]
        return CommitRecord(self._sequence, text, b"".join(bytes(bytes_of(tensor)) for tensor in tensors))

    def end(self) -> None:
        """Nothing to do: what was taken and not committed is taken by the next one."""


def layout_of(sources: list[PlanePart], store: StoreFolder) -> dict[str, Any]:
    """Describe which slots there are, and where in them each master and state of this rank begins."""
    return {
        "sizes": [[name, pair.num_bytes] for name, pair in store.slots.pairs.items()],
        "tensors": {
            source.spec.name: {
                "of": source.key,
                "start": source.offset,
                "dtype": STORED_DTYPES[source.spec.dtype],
                "shape": list(source.spec.shape),
                "slots": slot_name(source.kind, source.handle.chunk.spec.index),
                # In bytes of a slot.
                "at": source.plane.items(source.place(0)) * source.plane.dtype.itemsize,
            }
            for source in sources
            if source.numel
        },
    }


class Stored(NamedTuple):
    """The last commit of a store, opened: its manifest, the slots of every rank by file name, and its values."""

    commit: Commit
    manifest: Manifest
    opened: dict[str, SlotReader]
    values: list[torch.Tensor]


class _PageRun(NamedTuple):
    """A run of pages of a plane from ``first`` on: how many, in which slot they are, and their CRC-32."""

    first: int
    pages: int
    slot: int
    crc: int


class SlotReader(TensorFile):
    """The slots of one rank as a file of tensors. Raises StorageError if the file is missing or cut short."""

    def __init__(self, paths: Sequence[Path], layout: dict[str, Any], runs: dict[str, Any]):
        self._paths, self.path = paths, paths[0]
        tensors = layout["tensors"]
        self.specs = {name: TensorSpec.of(name, entry["dtype"], entry["shape"]) for name, entry in tensors.items()}
        self._places = {name: (entry["slots"], entry["at"]) for name, entry in tensors.items()}
        """By tensor its plane, and where it is in it."""
        self.entries = {name: {"of": e["of"], "start": e["start"], "sums": []} for name, e in tensors.items()}
        self._whole: set[tuple[str, int]] = set()  # runs that were compared, by plane and first page
        self.slots: dict[str, tuple[Runs, int, int]] = {}
        """By plane its runs, where its slots begin, and the bytes of one."""
        offset = 0
        for name, size in layout["sizes"]:
            self.slots[name] = runs[name], offset, size
            # Each plane has two slots, one behind the other; its runs say in which of them a page was written last.
            offset += 2 * size
        for drive, file in enumerate(paths):
            with of_storage(f"{file} cannot be read"):
                there = os.stat(file).st_size
            wanted = striped_bytes(offset, drive, len(paths))
            if there < wanted:
                raise StorageError(f"{file} is cut short: it has {there} bytes of {wanted}. Use a checkpoint")

    def check(self, name: str, piece: int, sums: Sequence[int]) -> None:
        """Compare the sums of the record, once each: they are of what was written at once, of one tensor or several.
        Raises StorageError if something that the tensor lies in is not what was written.
        """
        plane, at = self._places[name]
        for run in self._runs(plane, at, at + self.specs[name].num_bytes):
            # Small params share a run, and every one of them asks for it.
            if (plane, run.first) not in self._whole:
                self._compare(plane, run)
                self._whole.add((plane, run.first))

    def damage(self) -> Iterator[str]:
        """Find what of the committed slots is not as it was written, in words."""
        for plane, (_, _, size) in self.slots.items():
            for run in self._runs(plane, 0, size):
                try:
                    self._compare(plane, run)
                except StorageError as e:
                    yield str(e)

    def _runs(self, plane: str, start: int, stop: int) -> Iterator[_PageRun]:
        """Find the runs that have any of the bytes ``[start, stop)`` of a plane."""
        page = 0
        for count, slot, crc in self.slots[plane][0]:
            if page * PAGE < stop and start < (page + count) * PAGE:
                yield _PageRun(page, count, slot, crc)
            page += count

    def _compare(self, plane: str, run: _PageRun) -> None:
        """Read a run and compare its sum. Raises StorageError if it is unreadable or not what was written."""
        # Nothing was ever written there, and nothing is read.
        if run.slot == ZEROS:
            return
        _, offset, size = self.slots[plane]
        position, cause = offset + run.slot * size + run.first * PAGE, None
        try:
            if self._sum_of(position, run.pages * PAGE) == run.crc:
                return
        except StorageError as e:
            cause = e
        kind, _, chunk = plane.rpartition("/")
        raise StorageError(
            f"{self.path} is damaged in the {kind} of chunk {chunk}{self._params_in(plane, run)}, {run.pages} pages "
            f"from byte {position}: {cause or 'they are not what was written'}. Check the drive; resume from a "
            "checkpoint, or start anew in another folder"
        ) from cause

    def _sum_of(self, position: int, num_bytes: int) -> int:
        crc, buffer = 0, torch.empty(min(_AT_ONCE, num_bytes), dtype=torch.uint8, device="cpu")
        with self._all_opened() as files:
            for at in range(0, num_bytes, _AT_ONCE):
                # The last one may be shorter.
                part = buffer[: num_bytes - at]
                self._fill(files, position + at, bytes_of(part))
                crc = crc32(part, crc)
        return crc

    def _params_in(self, plane: str, run: _PageRun) -> str:
        """The params that have something in a run, in words."""
        start, stop = run.first * PAGE, (run.first + run.pages) * PAGE
        held = [
            name
            for name, (of, at) in self._places.items()
            if of == plane and at < stop and start < at + self.specs[name].num_bytes
        ]
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        return f", of {held[0]}{more}" if held else ""

    def read_into(self, name: str, start: int, into: torch.Tensor) -> None:
        plane, at = self._places[name]
        _, offset, size = self.slots[plane]
        view = bytes_of(into)
        first = at + start * into.element_size()
        last = first + len(view)
        with self._all_opened() as files:
            for run in self._runs(plane, first, last):
                # What of the wanted bytes is in this run, in bytes of the plane.
                begin, end = max(first, run.first * PAGE), min(last, (run.first + run.pages) * PAGE)
                part = view[begin - first : end - first]
                if run.slot == ZEROS:
                    part[:] = bytes(len(part))
                else:
                    self._fill(files, offset + run.slot * size + begin, part)

    @contextmanager
    def _all_opened(self) -> Iterator[list[BinaryIO]]:
        with ExitStack() as stack:
            yield [stack.enter_context(opened(path)) for path in self._paths]

    def _fill(self, files: Sequence[BinaryIO], position: int, view: memoryview) -> None:
        for drive, at, start, size in stripes(position, len(view), len(files)):
            too_short = f"is cut short at byte {at}. Use a checkpoint"
            read_all(files[drive], self._paths[drive], at, view[start : start + size], too_short)


def open_store(directory: Path) -> Stored:
    """The last commit that all ranks of the run have. Raises StorageError if there is none, or it is damaged."""
    commit = last_commit(directory)
    opened: dict[str, SlotReader] = {}
    # The manifest as a folder would have it. The values are in the first rank's record.
    files: dict[str, Any] = {VALUES: {"header": 0, "tensors": {}}}
    for rank, record in enumerate(commit.records):
        layout = read_layout(commit.folder, rank, record.text["layout"])
        name = f"slots-{rank:05d}.safetensors"
        opened[name] = SlotReader(slots_paths(commit.folder, rank), layout, record.text["runs"])
        files[name] = {"header": 0, "tensors": opened[name].entries}
    first = commit.records[0]
    values, at = [], 0
    for number, (dtype, shape) in enumerate(first.text["values"]):
        spec = TensorSpec.of(str(number), dtype, shape)
        value = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        bytes_of(value)[:] = first.tensors[at : at + spec.num_bytes]
        values.append(value)
        at += spec.num_bytes
    return Stored(commit, manifest_of({**first.text["manifest"], "files": files}, commit.folder), opened, values)
