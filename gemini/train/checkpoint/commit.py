"""A commit to the model's durable store: what training has written to its slots already becomes a checkpoint.

Only what lives in memory, and has changed since the last commit, is written, into slots of its own; then one record.
Two phases on all ranks: everything that the record will name has reached every drive; then every rank writes its
record. What the commit before names is not overwritten until all have theirs, so that a run which is killed anywhere
goes on from this step or from the one before.

It may be asked for while updates of the step are in flight: it waits for them on its own thread. Changes of later steps
wait for the record (``before_write`` of :mod:`gemini.train.checkpoint.saver`), which is there long before their
gradients are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import Chunk, DurablePlane, Plane
from gemini.memory.devices.device import Device, Event
from gemini.memory.durable.folder import StoreFolder
from gemini.memory.durable.records import Record
from gemini.memory.durable.slots import SlotPair, slot_name
from gemini.memory.movement.mover import tiles
from gemini.planning.planes import GRADS
from gemini.ranks.agree import Handshake
from gemini.train.checkpoint.plain_data import encode
from gemini.train.checkpoint.tensor_file import STORED_DTYPES, bytes_of
from gemini.train.checkpoint.write import Buffer, Draft, PlanePart
from gemini.train.observers import ChangedChunks


class PlanePiece(NamedTuple):
    """Elements ``[start, stop)`` of a plane in memory, on their way to its slots."""

    chunk_index: int
    """Of the chunk."""
    plane: Plane
    pair: SlotPair
    start: int
    stop: int

    def write(self, device: Device, buffer: Buffer) -> None:
        """Copy them into the buffer, and it into the slot."""
        plane, size = self.plane, self.plane.dtype.itemsize
        first, numel = self.start // plane.block, plane.items(self.stop) - self.start // plane.block
        padded = min(plane.num_bytes, -(-(first + numel) * size // 4096) * 4096) - first * size
        staged = buffer(padded)
        items = staged[: numel * size].view(plane.dtype)
        here, there = plane.host_view(self.start, self.stop), plane.device_view(self.start, self.stop)
        if here is not None:
            items.copy_(here)
        elif there is not None:
            device.copy(items, there, "checkpoint").wait()
        else:
            plane.load(self.start, self.stop, items)
        staged[numel * size :].zero_()
        self.pair.begin_write(staged, first * size).wait()


class Commit:
    """One commit on its way. :class:`~gemini.train.checkpoint.saver.Saver` carries it out, as it does checkpoints.

    Args:
        sources: what this rank keeps of every master and state.
        pending: updates of the step that are in flight, by chunk.
        changed: the chunks that are not in the store as they are.
    """

    def __init__(
        self, store: StoreFolder, draft: Draft, chunks: list[Chunk], sources: list[PlanePart], piece: int, *,
        pending: Mapping[int, Event], changed: ChangedChunks,
    ):  # fmt: skip
        self.final, self.draft, self.pending = store.directory, draft, dict(pending)
        self._store, self._sources, self._changed = store, sources, changed
        _check_slots(store, chunks)
        self._taken = changed.take() | self.pending.keys()
        planes = [
            (chunk.spec.index, plane, store.slots.pairs[slot_name(kind, chunk.spec.index)])
            for chunk in chunks
            if chunk.spec.index in self._taken
            for kind, plane in chunk.planes.items()
            if kind not in GRADS and not isinstance(plane, DurablePlane)
        ]
        self.pieces = [PlanePiece(*of, *span) for of in planes for span in tiles(0, of[1].numel, piece)]
        self.held = {
            chunk.spec.index for chunk in chunks if any(isinstance(p, DurablePlane) for p in chunk.planes.values())
        }
        """Chunks of which the record names slots that they live in: free to change when it is there."""
        self.in_place = not self.pieces
        """Whether no staging is needed."""

    def write(
        self,
        ranks: Handshake,
        device: Device,
        buffer: Buffer,
        order: Callable[[list[PlanePiece]], Iterable[PlanePiece]] = iter,
    ) -> None:
        """Commit, on all ranks or on none.

        Raises:
            GeminiError: on every rank, naming the one that failed. What was committed before is whole.
        """
        store = self._store
        try:
            sequence = ranks.step(lambda: self._bring(order(self.pieces), device, buffer), self._prepare)
        except BaseException:
            self._changed.give_back(self._taken)
            raise
        try:
            runs = {name: pair.runs() for name, pair in store.slots.pairs.items()}
            ranks.step(lambda: store.commit(self._record(sequence, ranks.rank, runs), runs), lambda _: None)
        except BaseException as e:  # here or there a record may be on the drive
            store.slots.refuse_writes(e)
            raise
        store.committed_by_all(runs)

    def _bring(self, pieces: Iterable[PlanePiece], device: Device, buffer: Buffer) -> tuple[Any, int]:
        """Everything that the record names is on the drive; the random states of this rank and its highest number."""
        for piece in pieces:
            if piece.chunk_index in self.pending:
                self.pending[piece.chunk_index].wait()
            piece.write(device, buffer)
        for update in self.pending.values():
            update.wait()
        self._layout = self._store.write_layout(layout_of(self._sources, self._store))
        self._store.slots.sync()
        return self.draft.rng, self._store.highest

    def _prepare(self, given: list[tuple[Any, int]]) -> int:
        """On the first rank: the number of the commit."""
        self.draft.manifest["rng"] = encode([rng for rng, _ in given], self.draft.tensors, "rng")
        return 1 + max(highest for _, highest in given)

    def _record(self, sequence: int, rank: int, runs: Mapping[str, Any]) -> Record:
        text = {"ranks": self._store.ranks, "layout": self._layout, "runs": runs}
        if rank:
            return Record(sequence, text, b"")
        tensors = self.draft.tensors
        text["manifest"] = self.draft.manifest
        text["values"] = [[STORED_DTYPES[tensor.dtype], list(tensor.shape)] for tensor in tensors]
        return Record(sequence, text, b"".join(bytes(bytes_of(tensor)) for tensor in tensors))


def layout_of(sources: list[PlanePart], store: StoreFolder) -> dict[str, Any]:
    """Which slots there are, and where in them each master and state of this rank begins."""
    return {
        "sizes": [[name, pair.num_bytes] for name, pair in store.slots.pairs.items()],
        "tensors": {
            source.spec.name: {
                "of": source.key,
                "start": source.offset,
                "dtype": STORED_DTYPES[source.spec.dtype],
                "shape": list(source.spec.shape),
                "slots": slot_name(source.kind, source.handle.chunk.spec.index),
                "at": source.plane.items(source.place(0)) * source.plane.dtype.itemsize,
            }
            for source in sources
            if source.numel
        },
    }


def _check_slots(store: StoreFolder, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        for kind in chunk.planes:
            if kind not in GRADS and slot_name(kind, chunk.spec.index) not in store.slots.pairs:
                raise GeminiError(
                    f"{chunk.name} was frozen when the model was wrapped and is trained now, and the durable store has "
                    f"no room for its {kind}: set requires_grad before wrapping, or save a checkpoint to another folder"
                )
