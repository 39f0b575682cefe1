"""Writing a checkpoint, now or behind the training that goes on: what this rank keeps of every master and state.

A *source* is one param's part of one plane on this rank. Its key (``exp_avg/model.norm.weight``) and its place in the
whole param are all a checkpoint knows: chunks, shards, tiers and the number of ranks are of the run, not of the model.
Pieces of sources are put into a :class:`CheckpointHome`, which is a folder here (:class:`FolderHome`), or the durable
store of the model (:mod:`gemini.train.checkpoint.durable`), by one loop (:func:`write`).

Behind the training a thread writes chunk after chunk straight from its home. Whoever is about to change a chunk that
is not written yet (an optimizer step, a write by name) asks for it with ``before_write``: the thread takes it next, and
the change waits for it. So the checkpoint is the state of one moment, no copy of the model is made, and a step waits
for the disk only where it overtakes the writing.

    unsaved chunk -> (its turn, or asked for) being written -> saved: free to change
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gemini import replacing
from gemini.errors import BudgetExceeded, GeminiError, StorageError, human_bytes, of_storage, warn
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk, Plane
from gemini.memory.devices.device import DONE, Device, Event
from gemini.memory.devices.pages import in_pages
from gemini.memory.movement.transfers import Held, Lane, Transfer, Transfers
from gemini.memory.store import ChunkStore
from gemini.planning.planes import GRADS, PlaneKind
from gemini.ranks.agree import Handshake
from gemini.tiers import Tier
from gemini.train.checkpoint.format import VALUES, TensorFileWriter, TensorSpec, check_target, encode, write_manifest
from gemini.train.observers import WriteObserver, WriteObservers
from gemini.train.params.handle import ParamHandle
from gemini.waiting import PROGRESS, Latch, await_latch

_HOLDER = "checkpoint"
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
"""Staging where nothing is staged."""
_OVER = Transfer(Lane.CHECKPOINT)  # in the place of one behind the training, where all is written at once
_OVER.finish()


class PlanePart(NamedTuple):
    """A param's part of a plane on this rank. It holds the plane, so that it outlives the model if it must."""

    key: str
    kind: PlaneKind
    handle: ParamHandle
    plane: Plane
    spec: TensorSpec
    """What it is in a file: a whole param has its own name and shape, a slice says which, a part its elements."""
    numel: int  # items of this rank's part: elements, or of a plane with one item for a block of them, blocks
    offset: int  # the place in the whole param's items at which they begin
    first: int  # the place in the plane's items at which they begin

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
    cuts: list[Cut]  # what of sources it has; none where a home keeps planes

    def read(self, device: Device, staging: torch.Tensor) -> torch.Tensor:
        """Their items as a host tensor, in place where the host can read them, else in ``staging``."""
        in_place = self.plane.host_view(self.start, self.stop)
        return self.staged(device, staging)[0] if in_place is None else in_place

    def staged(self, device: Device, staging: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Their items in ``staging``, and the bytes of the pages that have them, with zeros behind the items."""
        plane, size = self.plane, self.plane.dtype.itemsize
        num_bytes = plane.items(self.stop) * size - self.start // plane.block * size
        # Files are read in whole pages, which planes fill. Behind the items stand those of another param, or nothing.
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
            if pieces and (last := pieces[-1]).plane is plane and end - last.start <= most * block:
                last.cuts.append(cut)
                pieces[-1] = last._replace(stop=end)
            else:
                pieces.append(Piece(source.handle.chunk.spec.index, source.kind, plane, begin, end, [cut]))
    return pieces


class Draft(NamedTuple):
    """All that a checkpoint holds but masters and states, as it was when the checkpoint was asked for."""

    manifest: dict[str, Any]
    tensors: list[torch.Tensor]
    rng: list[Any]  # of this rank; empty where one that has another slice of the same params says it

    def take_rng(self, rng: list[list[Any]]) -> None:
        """Note the RNG states of all ranks, on the first one."""
        self.manifest["rng"] = encode([*chain.from_iterable(rng)], self.tensors, "rng")


class CheckpointHome(ABC):
    """A place where a checkpoint is kept. Every rank puts its own pieces; then all of them commit it, or none."""

    place: Path
    draft: Draft
    pieces: list[Piece]
    held: set[int]  # chunks that may change only when all is committed
    pending: dict[int, Event]  # updates that were in flight, by chunk: what is put is what they make
    in_place: bool  # whether no staging is needed

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
    """Write a checkpoint, on all ranks or on none. ``staging``: host bytes, page-aligned, with room for the largest
    piece; empty if the home is ``in_place``. ``order``: of pieces; the next is asked for when one is written. Raises
    GeminiError on every rank, naming the one that failed. What was there before is whole.
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


def write_now(home: CheckpointHome, ranks: Handshake, store: ChunkStore) -> None:
    """Write a checkpoint now. Raises StorageError if it cannot be written; an existing one is as it was."""
    try:
        # Staging that nothing passes through is not reserved.
        staging = _NOTHING if home.in_place else store.mover.scratch(1, torch.uint8, store.mover.tile * 4)
    except BaseException:
        home.end()
        raise
    write(home, ranks, store.device, staging)


class FolderHome(CheckpointHome):
    """The folder ``place``, in which each rank has a file of its own. The first one makes it under another name, which
    it tells the others, and ends it: values, manifest, and the folder gets its name.
    """

    def __init__(self, place: Path, draft: Draft, sources: list[PlanePart], piece: int):
        self.place, self.draft = place, draft
        self._sources = {source.key: source for source in sources if source.numel}
        self.pieces = pieces_of(self._sources.values(), piece)
        self.in_place = all(source.plane.host_reaches for source in self._sources.values())
        self.held, self.pending = set(), {}
        self._files: list[TensorFileWriter] = []  # the one of this rank, once there is a piece for it
        # By source, in the order of its pieces, which therefore must be put in order.
        self._sums: dict[str, list[int]] = {key: [] for key in self._sources}
        self._made: list[Path] = []  # on the first rank the folder that all write into

    def begin(self, ranks: Handshake) -> None:
        self._work, self._rank = self.place.parent / ranks.step(lambda: self.draft.rng, self._make), ranks.rank

    def _make(self, rng: list[list[Any]]) -> str:
        """Make the folder that all write into, beside the final one; on the first rank."""
        self._made.append(replacing.begin(self.place))
        self._made[0].mkdir()
        self.draft.take_rng(rng)
        return self._made[0].name

    def put(self, piece: Piece, device: Device, staging: torch.Tensor) -> None:
        # With the first piece: a replica that puts nothing makes no file.
        if not self._files:
            self._files.append(self._open())
        items, first = piece.read(device, staging), piece.start // piece.plane.block
        for source, start, stop in piece.cuts:
            at = source.first + start - first
            own = items[at : at + stop - start]
            self._sums[source.key].append(self._files[0].write(source.spec.name, start, own))

    def _open(self) -> TensorFileWriter:
        # A folder that only the first rank sees would make each rank save a part that nobody finds.
        if not self._work.is_dir():
            raise StorageError(
                f"{self._work}, which the first rank has made, is not there: ranks on several machines need a "
                "directory that all of them share"
            )
        path = self._work / f"params-{self._rank:05d}-00000.safetensors"
        return TensorFileWriter(path, [source.spec for source in self._sources.values()])

    def flush(self) -> None:
        for file in self._files:
            file.close()

    def commit(self, ranks: Handshake) -> None:
        ranks.step(self._listed, self._finish)

    def _listed(self) -> dict[str, Any]:
        """List what the manifest says of the files of this rank."""
        tensors = {}
        for key, source in self._sources.items():
            entry = tensors[source.spec.name] = {"of": key, "start": source.offset, "sums": self._sums[key]}
            if source.handle.cut is not None:
                entry["slice"] = source.handle.cut.rank
        return {file.path.name: {"header": file.header_checksum, "tensors": tensors} for file in self._files}

    def _finish(self, listed: list[dict[str, Any]]) -> None:
        """Write values and manifest, on the first rank when all are done, and let the new one replace the old one."""
        files = self.draft.manifest["files"] = {VALUES: _write_values(self._work / VALUES, self.draft.tensors)}
        for of_rank in listed:
            files.update(of_rank)
        # Last: a folder without a manifest is no checkpoint.
        write_manifest(self._work, self.draft.manifest)
        check_target(self.place, self.place)  # again: the writing may have taken long
        replacing.swap(self._work, self.place)

    def end(self) -> None:
        for file in self._files:
            file.abandon()
        for made in self._made:
            replacing.end(made)


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


class PendingCheckpoint(WriteObserver):
    """A checkpoint that may still be being written; what :func:`save_checkpoint` returns. A program calls :meth:`done`
    and :meth:`wait`, the model the other methods. Made on all ranks together, after they agreed to.

    A thread must not keep a model alive: what would is given to :meth:`start` and not kept. So is the group of ranks,
    which must end with the program (ranks/process_groups.py), and a handle of a checkpoint may be kept for long.
    """

    def __init__(self, place: Path):
        self._final = place
        self._unsaved: dict[int, Latch] = {}  # of each chunk that may not change yet, what is set when it may
        self._held: set[int] = set()  # chunks that may change only when all is written
        self._pending: dict[int, Event] = {}  # updates that were in flight, by chunk: what is written is what they make
        self._urgent = -1  # the chunk that somebody waits for
        self._abandoned = False
        self._transfer = _OVER  # the writing behind the training, if it is not written at once
        self._transfers: Callable[[], Transfers | None] = lambda: None
        """Weak: it has the model's staging, and a handle of the checkpoint may outlive the model."""
        self._was_told = False

    def start(self, home: CheckpointHome, ranks: Handshake, store: ChunkStore, observers: WriteObservers) -> None:
        """Write it behind what the caller does next; or now, with a warning, if there is no memory for that."""
        num_bytes, refused = 0 if home.in_place else store.mover.tile * 4, ""
        with WHOLE:  # from the first reserved byte until the transfer holds it
            try:
                _reserve(num_bytes, store)
            except BudgetExceeded as e:
                refused = str(e)
            else:
                self._begin(home, ranks, store, observers, num_bytes)
        if refused:
            warn(f"the checkpoint is written while the training waits: {refused}")
            write_now(home, ranks, store)

    def _begin(
        self, home: CheckpointHome, ranks: Handshake, store: ChunkStore, observers: WriteObservers, num_bytes: int
    ) -> None:
        """Write it on the lane of checkpoints, with the ``num_bytes`` that were reserved."""
        transfer = Transfer(Lane.CHECKPOINT)
        transfer.what = f"the checkpoint {self._final}"
        transfer.held = Held(store.ledger, Tier.CPU, num_bytes, _HOLDER)
        try:
            # Buffers and the states of plain params go on changing with the training.
            home.draft.tensors[:] = [tensor.clone() for tensor in home.draft.tensors]
            staging = store.device.make_host_buffer(num_bytes) if num_bytes else _NOTHING
            if store.device.torch_device.type == "cuda":
                torch.cuda.synchronize(store.device.torch_device)  # the thread has a stream of its own
            # Before it is begun and before anybody is told of it: a chunk that is not in here may change.
            self._unsaved = {index: Latch() for index in {piece.chunk_index for piece in home.pieces} | home.held}
            self._held, self._pending = home.held, home.pending
            transfer.run = partial(self._write_behind, home, ranks, store.device, staging)
            # Before it is begun, so that no change of a chunk is missed.
            observers.append(self)
            self._transfer, self._transfers = transfer, weakref.ref(store.transfers)
            store.transfers.submit(transfer)
        except BaseException:
            if transfer.worker is None:  # it was not begun: nobody must wait for its end
                self._free_all()
                if self in observers:
                    observers.remove(self)
                transfer.finish()  # which gives back what it holds
                home.end()
            raise

    def before_updates(self) -> None:
        """Wait until the updates of the step before are over: only then may one of the next wait for its chunk. Called
        by the training thread alone.
        """
        if not self.done():
            for update in self._pending.values():
                update.wait_until_over()

    def before_write(self, chunk: Chunk) -> None:
        """Come back when a chunk that is about to change has been written. Called by any thread; on the saver's own it
        returns at once.
        """
        index = chunk.spec.index
        if not self._pending.get(index, DONE).is_complete():  # nobody else changes a chunk before its update is over
            return
        saved, transfers = self._unsaved.get(index), self._transfers()
        if saved is not None and transfers is not None and not self.done() and not self._is_own_thread:
            # Read by the thread as it takes its next piece. A later wish overwrites an earlier one, which has its turn.
            self._urgent = index
            with transfers.about("checkpoint", f"wait for the checkpoint of {chunk.name}", index):
                await_latch(saved, lambda: f"chunk {index}, which the checkpoint {self._final} needs as it is")

    def done(self) -> bool:
        """Whether writing has ended, successfully or not."""
        return self._transfer.is_complete()

    @property
    def _is_own_thread(self) -> bool:
        return self._transfer.worker is not None and self._transfer.worker.is_own_thread

    def wait(self, timeout: float | None = None) -> None:
        """Block until the checkpoint is complete. What went wrong is raised once.

        Args:
            timeout: the longest time to wait, in seconds. By default without limit.

        Raises:
            StorageError: if it could not be written; with several ranks on all of them, with the rank that failed. An
                existing checkpoint is unchanged.
            TimeoutError: if it is not complete after ``timeout`` seconds. Writing continues.
            GeminiError: without ``timeout``, if nothing moves for minutes.
        """
        self.join(timeout)
        if not self._was_told:
            self._was_told = True
            error = self._transfer.outcome()
            if error is not None:
                raise error

    def join(self, timeout: float | None = None) -> None:
        """:meth:`wait`, however the writing ends."""
        if self.done() or self._is_own_thread:
            return
        if timeout is None:
            self._transfer.wait_until_over()
        elif not self._transfer.is_done_in(timeout):
            raise TimeoutError(f"the checkpoint {self._final} is still being written after {timeout:g} s")

    def end(self, observers: WriteObservers) -> None:
        """Wait for it, and note that it is over: nobody is told of changes for it any more. Called by the training
        thread. Raises what nobody has asked for yet, once.
        """
        self.join()
        observers.remove(self)
        transfers = self._transfers()
        if transfers is not None:
            transfers.end(self._transfer)
        self.wait()

    def close(self) -> None:
        """The model ends: the checkpoint is finished first. (If the garbage collector ends the model in the very
        thread that writes, the checkpoint is given up.)
        """
        if self._is_own_thread:
            self._abandoned = True
            return
        try:
            self.wait()
        except Exception as e:
            warn(f"a checkpoint that nobody waited for failed: {e}")

    def _write_behind(self, home: CheckpointHome, ranks: Handshake, device: Device, staging: torch.Tensor) -> None:
        """Write it, on the lane's thread. However that ends, nobody is left waiting for a chunk."""
        try:
            write(home, ranks, device, staging, self._in_order)
        except BaseException as e:  # surfaces where somebody waits for it
            # The interpreter ends: nobody comes any more to ask.
            if not threading.main_thread().is_alive():
                warn(f"a checkpoint that nobody waited for failed: {e}")
            raise
        finally:
            self._free_all()

    def _in_order(self, pieces: list[Piece]) -> Iterator[Piece]:
        """The pieces chunk by chunk, one that is asked for first. A chunk is saved when its last piece is written."""
        waiting: dict[int, deque[Piece]] = {}
        for piece in pieces:
            waiting.setdefault(piece.chunk_index, deque()).append(piece)
        while waiting:
            # Seen between two pieces: what is in the middle of one goes on to its end.
            if self._abandoned:
                raise GeminiError(f"the model was deleted while the checkpoint {self._final} was written")
            index = self._urgent if self._urgent in waiting else next(iter(waiting))
            yield waiting[index].popleft()
            # The piece is written: who waits for this or another chunk sees that something moves.
            PROGRESS.count += 1
            if not waiting[index]:
                # Its last piece: the chunk may change, unless a record names the slots that it lives in.
                del waiting[index]
                if index not in self._held:
                    self._unsaved.pop(index).set()

    def _free_all(self) -> None:
        """Let all chunks change, and who waits for that go on."""
        while self._unsaved:
            self._unsaved.popitem()[1].set()


def pending_in(observers: WriteObservers) -> list[PendingCheckpoint]:
    """Checkpoints that have not been asked yet how they ended."""
    return [observer for observer in observers if isinstance(observer, PendingCheckpoint)]


def _reserve(num_bytes: int, store: ChunkStore) -> None:
    """Take staging from what no step will need. Raises BudgetExceeded if there is not so much."""
    ledger = store.ledger
    if num_bytes == 0:
        return
    # Staging that no step has needed yet will be reserved by one.
    room = ledger.free(Tier.CPU) - max(store.mover.staging.num_bytes - ledger.held(Tier.CPU, "staging"), 0)
    if store.device.tier is Tier.CPU:  # windows come and go: what counts is what a step may take in all
        passing = sum(ledger.held(Tier.CPU, holder) for holder in ("windows", "pool", "gradients in flight"))
        room += passing - store.working_set
    if room < num_bytes:
        raise BudgetExceeded(
            f"writing behind the training needs {human_bytes(num_bytes)} of cpu, and steps leave "
            f"{human_bytes(room)} of the budget of {human_bytes(ledger.budget(Tier.CPU))}"
        )
    ledger.reserve(Tier.CPU, num_bytes, _HOLDER, what="a checkpoint")
