"""Which module calls are running, and which chunks they keep gathered, in forward and in backward.

Forward is a stack. Backward needs a rule: autograd runs nodes strictly in the reverse order of their creation, so when
the backward of one call begins, every call that is neither around it nor inside it is over, and its chunks may go. The
rule needs no hook at the end of a module's backward, where torch has none that can be trusted.

A forward inside backward is a recomputation (gradient checkpointing). The node that asked for it waits, so what
backward keeps is let go for the time and gathered again before the node goes on: recomputing needs no more room than
forward did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gemini.errors import IllegalTransition
from gemini.memory.chunk import Chunk


class CallRecord:
    """One call of a hooked module, or one operation that reads: its chunks, and the call around it."""

    __slots__ = ("chunks", "first_node", "module", "parent")

    def __init__(self, module: nn.Module | None, chunks: tuple[Chunk, ...], parent: CallRecord | None):
        self.module = module
        self.chunks = chunks
        self.parent = parent
        self.first_node = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]

    def is_around(self, other: CallRecord) -> bool:
        """Whether ``other`` is this call or one inside it."""
        record: CallRecord | None = other
        while record is not None:
            if record is self:
                return True
            record = record.parent
        return False

    def on_gradient(self, result: torch.Tensor, begin: Callable[[torch.Tensor], None]) -> None:
        """Call ``begin`` when the gradient of a result of this call arrives.

        What it was given and passes on (T5's position bias) is no result: its gradient arrives when this call's
        backward is over, in the middle of that of the call which made it.

        A write into a view (``h[mask] = 0``, and ``h`` of a linear layer is a view) leads its gradient around the view
        to what it is a view of; so that is hooked as well, if it was made by this call and not given to it.
        """
        if result.grad_fn is None or result.grad_fn._sequence_nr() < self.first_node:
            return
        result.register_hook(begin)
        base = result._base
        if base is not None and base.grad_fn is not None and base.grad_fn._sequence_nr() >= self.first_node:
            base.register_hook(begin)


class Calls:
    """The running calls of one model. ``acquire`` and ``release`` pin and unpin a chunk's gathered weights."""

    def __init__(self, acquire: Callable[[Chunk], None], release: Callable[[Chunk], None]):
        self._acquire = acquire
        self._release = release
        self._running: list[CallRecord] = []
        self._reading: list[CallRecord] = []
        self._waiting: list[CallRecord] = []

    @property
    def running(self) -> bool:
        """Whether a forward is on the stack."""
        return bool(self._running)

    @property
    def innermost(self) -> CallRecord | None:
        """The call that computes now, in forward or else in backward."""
        stack = self._running or self._reading
        return stack[-1] if stack else None

    def begin(self, module: nn.Module, chunks: tuple[Chunk, ...]) -> None:
        """A hooked module starts: gather what it reads. On an error nothing has begun."""
        if not self._running and self._reading:
            self._waiting, self._reading = self._reading, []
            for record in self._waiting:
                self._release_all(record.chunks)
        self._acquire_all(chunks)
        self._running.append(CallRecord(module, chunks, self._running[-1] if self._running else None))

    def end(self, module: nn.Module) -> CallRecord | None:
        """A hooked module is done, or failed; calls inside it that ended without their hook end with it.

        None if it never began (its own gathering failed).
        """
        if all(record.module is not module for record in self._running):
            return None
        while True:
            record = self._running.pop()
            self._release_all(record.chunks)
            if record.module is module:
                break
        record.module = None  # the record lives as long as the graph, the module need not
        if not self._running and self._waiting:
            for waiting in self._waiting:
                self._acquire_all(waiting.chunks)
                self._reading.append(waiting)
            self._waiting = []
        return record

    @contextmanager
    def reading(self, chunks: tuple[Chunk, ...]) -> Iterator[None]:
        """Gather chunks for one operation."""
        self._acquire_all(chunks)
        try:
            yield
        finally:
            self._release_all(chunks)

    def hold(self, chunk: Chunk) -> None:
        """Let the innermost call keep a chunk gathered that it reads though no param of its own is in it."""
        call = self.innermost
        assert call is not None
        if chunk not in call.chunks:
            self._acquire(chunk)
            call.chunks += (chunk,)

    def begin_backward(self, record: CallRecord) -> None:
        """The gradient of a call's output has arrived: its weights are read now, those of finished calls are not."""
        staying = []
        for other in self._reading:
            if other.is_around(record) or record.is_around(other):
                staying.append(other)
            else:
                self._release_all(other.chunks)
        self._reading = staying
        if record not in staying:
            self._acquire_all(record.chunks)
            staying.append(record)

    def end_backward(self) -> None:
        reading, self._reading, self._waiting = self._reading, [], []
        for record in reading:
            self._release_all(record.chunks)

    def abandon(self, *, backward: bool = False) -> None:
        """Forget a forward, or a backward, that an exception ended without its hooks.

        An interrupt may have come between pinning a chunk and noting it: whoever keeps the books looks at them next.
        """
        records, self._running = self._running, []
        if backward:
            records, self._reading, self._waiting = [*records, *self._reading], [], []
        for record in records:
            with contextlib.suppress(AssertionError, IllegalTransition):
                self._release_all(record.chunks)

    def _acquire_all(self, chunks: Iterable[Chunk]) -> None:
        acquired = []
        try:
            for chunk in chunks:
                self._acquire(chunk)
                acquired.append(chunk)
        except BaseException:
            self._release_all(acquired)
            raise

    def _release_all(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self._release(chunk)
