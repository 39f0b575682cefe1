"""Writing a checkpoint now, or behind the training that goes on.

Behind the training a thread writes chunk after chunk straight from its home. Whoever is about to change a chunk that
is not written yet (an optimizer step, a write by name) asks for it with ``before_write``: the thread takes it next, and
the change waits for it. So the checkpoint is the state of one moment, no copy of the model is made, and a step waits
for the disk only where it overtakes the writing.

    unsaved chunk -> (its turn, or asked for) being written -> saved: free to change
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.planner import WriteItem

from gemini.errors import BudgetExceeded, GeminiError, StorageError, human_bytes
from gemini.memory.chunks.chunk import Chunk
from gemini.tiers import Ledger, Tier
from gemini.train.checkpoint import ranks as checkpoint_ranks
from gemini.train.checkpoint.parts import Buffer, Source, sources_of
from gemini.train.checkpoint.write import Draft, Planner, Writer

if TYPE_CHECKING:
    from gemini.train.engine import Engine

_HOLDER = "checkpoint"
_LOOK_SECONDS = 1.0
"""How often whoever waits looks whether the thread still lives."""


class Saver:
    """One checkpoint being written. Made on all ranks together, after they agreed to."""

    def __init__(self, engine: Engine, final: Path, draft: Draft, group: ProcessGroup | None):
        self._final, self._draft, self._group = final, draft, group
        self._changed = threading.Condition()
        self._unsaved: set[int] = set()
        self._urgent: int | None = None
        self._abandoned = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._engine: Engine | None = engine  # let go of when the writing has begun: a thread must not keep a model

    def run(self) -> None:
        """Write it now.

        Raises:
            StorageError: if it cannot be written; an existing checkpoint is as it was.
        """
        engine, self._engine = self._engine, None
        assert engine is not None
        mover = engine.mover
        self._write(self._planner(engine, lambda num_bytes: mover.scratch(1, torch.uint8, num_bytes)))

    def start(self) -> None:
        """Write it behind what the caller does next; or now, with a warning, if there is no memory for that."""
        engine = self._engine
        assert engine is not None
        sources = _own_sources(engine)
        num_bytes = engine.mover.tile * 4 if any(not _in_place(source) for source in sources.values()) else 0
        try:
            _reserve(engine, num_bytes)
        except BudgetExceeded as e:
            warnings.warn(f"the checkpoint is written while the training waits: {e}", stacklevel=3)
            self.run()
            return
        self._engine = None
        try:
            self._draft.tensors[:] = [tensor.clone() for tensor in self._draft.tensors]
            staging = engine.device.make_host_buffer(num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
            planner = self._planner(engine, lambda wanted: staging[:wanted])
            if engine.device.torch_device.type == "cuda":
                torch.cuda.synchronize(engine.device.torch_device)  # the thread has a stream of its own
            self._chunk_of = {source.key: source.handle.chunk.spec.index for source in sources.values()}
            self._unsaved = {self._chunk_of[item.index.fqn] for item in planner.items}
            arguments = (planner, engine.ledger, num_bytes)
            # Not a daemon: the interpreter waits for the checkpoint before it ends.
            self._thread = threading.Thread(target=self._work, args=arguments, name="gemini-checkpoint", daemon=False)
            engine.saver = self
            self._thread.start()
        except BaseException:
            self._unsaved.clear()
            engine.ledger.release(Tier.CPU, num_bytes, _HOLDER)
            raise

    def before_write(self, chunk: Chunk) -> None:
        """A chunk is about to change: come back when it has been written."""
        index = chunk.spec.index
        with self._changed:
            while index in self._unsaved and self._alive and threading.current_thread() is not self._thread:
                self._urgent = index
                self._changed.wait(_LOOK_SECONDS)

    @property
    def done(self) -> bool:
        return not self._alive

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, well or not.

        Raises:
            TimeoutError: if it has not after ``timeout`` seconds.
        """
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the checkpoint {self._final} is still being written after {timeout:g} s")

    def raise_if_unseen(self) -> None:
        """Raise, once, what ended the thread."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """The model ends: the checkpoint is finished first. (If the garbage collector ends the model in the very
        thread that writes, the checkpoint is given up.)
        """
        if self._thread is threading.current_thread():
            self._abandoned = True
            return
        self.join()
        error, self._error = self._error, None
        if error is not None:
            warnings.warn(f"a checkpoint that nobody waited for failed: {error}", stacklevel=3)

    @property
    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _planner(self, engine: Engine, buffer: Buffer) -> Planner:
        return Planner(_own_sources(engine), engine.mover.tile, engine.device, buffer, self._draft)

    def _work(self, planner: Planner, ledger: Ledger, num_bytes: int) -> None:
        try:
            self._write(planner)
        except BaseException as e:  # surfaces where somebody waits for it
            self._error = e
            if not threading.main_thread().is_alive():
                warnings.warn(f"a checkpoint that nobody waited for failed: {e}", stacklevel=1)
        finally:
            del planner
            ledger.release(Tier.CPU, num_bytes, _HOLDER)
            with self._changed:
                self._unsaved.clear()
                self._changed.notify_all()

    def _write(self, planner: Planner) -> None:
        writer = Writer(self._final, self._draft, self._in_order)
        group, self._group = self._group, None  # not held beyond the end of the program (together.py)
        try:
            checkpoint_ranks.save(planner, writer, group, f"saving the checkpoint {self._final}")
        except OSError as e:
            raise StorageError(f"could not save the checkpoint {self._final}: {e.strerror or e}") from e
        finally:
            writer.clean_up()

    def _in_order(self, items: Iterable[WriteItem]) -> Iterator[WriteItem]:
        """The pieces chunk by chunk, one that is asked for first. A chunk is saved when its last piece is written."""
        if self._thread is None:
            yield from items
            return
        waiting: dict[int, deque[WriteItem]] = {}
        for item in items:
            waiting.setdefault(self._chunk_of[item.index.fqn], deque()).append(item)
        while waiting:
            if self._abandoned:
                raise GeminiError(f"the model was deleted while the checkpoint {self._final} was written")
            index = self._urgent if self._urgent in waiting else next(iter(waiting))
            assert index is not None
            yield waiting[index].popleft()
            if not waiting[index]:
                del waiting[index]
                with self._changed:
                    self._unsaved.discard(index)
                    self._changed.notify_all()


class PendingCheckpoint:
    """A checkpoint that may still be being written."""

    def __init__(self, saver: Saver):
        self._saver = saver

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._saver.done

    def wait(self, timeout: float | None = None) -> None:
        """Block until the checkpoint is whole under its name.

        Raises:
            StorageError: if it could not be written, with several ranks on every rank and naming the one that failed;
                an existing checkpoint is as it was.
            TimeoutError: if it is still being written after ``timeout`` seconds; it goes on.
        """
        self._saver.join(timeout)
        self._saver.raise_if_unseen()


def _own_sources(engine: Engine) -> dict[str, Source]:
    """What this rank writes: of several replicas of the model the first one writes."""
    replicas = None if engine.shards is None else engine.shards.ranks.replicas
    return sources_of(engine) if replicas is None or replicas.rank == 0 else {}


def _in_place(source: Source) -> bool:
    return source.plane.host_view(0, 0) is not None


def _reserve(engine: Engine, num_bytes: int) -> None:
    """Take staging from what no step will need.

    Raises:
        BudgetExceeded: if there is not so much.
    """
    ledger = engine.ledger
    if num_bytes == 0:
        return
    room = ledger.free(Tier.CPU) - max(engine.mover.staging.num_bytes - ledger.held(Tier.CPU, "staging"), 0)
    if engine.device.tier is Tier.CPU:  # windows come and go: what counts is what a step may take in all
        passing = sum(ledger.held(Tier.CPU, holder) for holder in ("windows", "pool", "gradients in flight"))
        room += passing - engine.working_set
    if room < num_bytes:
        raise BudgetExceeded(
            f"writing behind the training needs {human_bytes(num_bytes)} of cpu, and steps leave {human_bytes(room)} "
            f"of the budget of {human_bytes(ledger.budget(Tier.CPU))}"
        )
    if engine.device.tier is Tier.CPU:
        engine.manager.make_room(num_bytes, what="a checkpoint")
    ledger.reserve(Tier.CPU, num_bytes, _HOLDER)
