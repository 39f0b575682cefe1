"""Writing a checkpoint now, or behind the training that goes on.

Behind the training a thread writes chunk after chunk straight from its home. Whoever is about to change a chunk that
is not written yet (an optimizer step, a write by name) asks for it with ``before_write``: the thread takes it next, and
the change waits for it. So the checkpoint is the state of one moment, no copy of the model is made, and a step waits
for the disk only where it overtakes the writing.

    unsaved chunk -> (its turn, or asked for) being written -> saved: free to change
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from gemini.errors import BudgetExceeded, GeminiError, human_bytes, warn
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import Device, Event
from gemini.memory.movement.transfers import Held, Lane, Transfer, Transfers
from gemini.memory.store import ChunkStore
from gemini.ranks.agree import Handshake
from gemini.tiers import Tier
from gemini.train.checkpoint.write import CheckpointHome, Piece, write
from gemini.train.observers import WriteObserver, WriteObservers
from gemini.waiting import PROGRESS, Latch, await_latch

_HOLDER = "checkpoint"
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
"""Staging where nothing is staged."""


class PendingCheckpoint(WriteObserver):
    """A checkpoint that may still be being written; what :func:`save_checkpoint` returns. A program calls :meth:`done`
    and :meth:`wait`, the model the other methods. Made on all ranks together, after they agreed to.

    A thread must not keep a model alive: what would is given to :meth:`start` and not kept. So is the group of ranks,
    which must end with the program (ranks/process_groups.py), and a handle of a checkpoint may be kept for long.
    """

    def __init__(self, place: Path):
        self._final = place
        self._unsaved: dict[int, Latch] = {}
        """Of each chunk that may not change yet, what is set when it may."""
        self._held: set[int] = set()
        """Chunks that may change only when all is written."""
        self._pending: dict[int, Event] = {}
        """Updates that were in flight, by chunk: what is written is what they make."""
        self._urgent: int | None = None
        self._abandoned = False
        self._transfer: Transfer | None = None
        """The writing behind the training; None where it is written at once."""
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
                self._transfer = None
                self._free_all()
                if self in observers:
                    observers.remove(self)
                transfer.finish()  # which gives back what it holds
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
        own = self._pending.get(index)
        if own is not None and not own.is_complete():  # nobody else changes a chunk before its update is over
            return
        saved, transfers = self._unsaved.get(index), self._transfers()
        if saved is not None and transfers is not None and not self.done() and not self._is_own_thread:
            # Read by the thread when it takes its next piece. A later wish overwrites an earlier one, which then has
            # its turn.
            self._urgent = index
            with transfers.about("checkpoint", f"wait for the checkpoint of {chunk.name}", index):
                await_latch(saved, lambda: f"chunk {index}, which the checkpoint {self._final} needs as it is")

    def done(self) -> bool:
        """Whether writing has ended, successfully or not."""
        return self._transfer is None or self._transfer.is_complete()

    @property
    def _is_own_thread(self) -> bool:
        return self._transfer is not None and self._transfer.worker is not None and self._transfer.worker.is_own_thread

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
        if self._transfer is not None and not self._was_told:
            self._was_told = True
            error = self._transfer.outcome()
            if error is not None:
                raise error

    def join(self, timeout: float | None = None) -> None:
        """:meth:`wait`, however the writing ends."""
        if self.done() or self._is_own_thread:
            return
        assert self._transfer is not None
        if timeout is None:
            self._transfer.wait_until_over()
        elif not self._transfer.is_done_in(timeout):
            raise TimeoutError(f"the checkpoint {self._final} is still being written after {timeout:g} s")

    def end(self, observers: WriteObservers) -> None:
        """Wait for it, and note that it is over: nobody is told of changes for it any more. Called by the training
        thread.

        Raises:
            GeminiError: what nobody has asked for yet, once.
        """
        self.join()
        observers.remove(self)
        transfers = self._transfers()
        if transfers is not None and self._transfer is not None:
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
            assert index is not None
            yield waiting[index].popleft()
            # The piece is written: who waits for this or another chunk sees that something moves.
            PROGRESS.note()
            if not waiting[index]:
                # Its last piece: the chunk may change, unless a record names the slots that it lives in.
                del waiting[index]
                if index not in self._held:
                    self._free(index)

    def _free(self, index: int) -> None:
        """Let a chunk change, and who waits for that go on."""
        self._unsaved.pop(index).set()

    def _free_all(self) -> None:
        for index in list(self._unsaved):
            self._free(index)


def write_now(home: CheckpointHome, ranks: Handshake, store: ChunkStore) -> None:
    """Write a checkpoint now. Raises StorageError if it cannot be written; an existing one is as it was."""
    # Staging that nothing passes through is not reserved.
    staging = _NOTHING if home.in_place else store.mover.scratch(1, torch.uint8, store.mover.tile * 4)
    write(home, ranks, store.device, staging)


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
