"""Which module calls are running, which chunks they keep gathered in forward and in backward, and what they give.

Forward is a stack, one of each thread. Backward needs a rule: autograd runs nodes in the reverse order of their
creation, so when the backward of one call begins, every call that is neither around it nor inside it is over, and its
chunks may go. No hook at the end of a module's backward is needed, where torch has none that can be trusted. The rule
is about time and room only: what backward reads is right whatever it says (:mod:`gemini.train.modules.saved_weights`).

A forward inside backward is a recomputation (gradient checkpointing). The node that asked for it waits, so what
backward keeps is let go for the time and gathered again before the node goes on.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from gemini.errors import BudgetExceeded, GeminiError, IllegalTransition
from gemini.interrupts import WHOLE
from gemini.ledger import Want
from gemini.memory.chunks.chunk import Chunk
from gemini.train.observers import iter_tensors


class CallRecord:
    """One call of a hooked module, or one operation that reads: its chunks, and the call around it."""

    __slots__ = (
        "chunks exposed first_node hooks_in inside kept module num_exchanges num_hooks pack parent stream".split()
    )

    def __init__(
        self, module: nn.Module | None, chunks: tuple[Chunk, ...], parent: CallRecord | None, num_exchanges: int
    ):
        self.module = module
        self.chunks = chunks
        self.exposed = frozenset(chunks)
        """Chunks whose params are ordinary for it; those of the others it only keeps gathered."""
        self.kept: tuple[Chunk, ...] = ()
        """Those of ``chunks`` that it keeps for the modules inside it, and lets go of where something else needs room.
        """
        self.inside: list[nn.Module] = []
        """The modules that compute inside it now with what is exposed for it, the outermost first."""
        self.parent = parent
        self.num_exchanges = num_exchanges
        """Of weights with their averages, when it began: a backward would have the gradients of other weights."""
        self.stream = 0  # the stream on which it computes, by its number
        self.pack: Any = None  # the saved-tensor hook of ours that is open for it
        self.num_hooks = 0  # pairs of saved-tensor hooks that were pushed for this call, to be popped at its end
        self.hooks_in = -1
        """The backward, by autograd's number, inside which they were: they end with it, if it breaks off."""
        # Nodes of this thread are numbered in the order of their creation: what is older was given to the call.
        self.first_node = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]

    def around(self) -> list[CallRecord]:
        """This call and those around it, the innermost first."""
        calls = [self]
        while parent := calls[-1].parent:
            calls.append(parent)
        return calls

    def on_gradient(self, output: Any, begin: Callable[[torch.Tensor], None]) -> None:
        """Call ``begin`` when the gradient of a result of this call arrives, for each tensor in what it gave. What it
        was given and passes on (T5's position bias) is no result: its gradient arrives when this call's backward is
        over, in the middle of that of the call which made it. A write into a view (``h[mask] = 0``, and ``h`` of a
        linear layer is a view) leads its gradient around the view to what it is a view of; so that is hooked as well,
        if it was made by this call and not given to it.
        """
        for result in (output,) if isinstance(output, torch.Tensor) else iter_tensors(output):
            if result.grad_fn is None or result.grad_fn._sequence_nr() < self.first_node:
                continue
            result.register_hook(begin)
            base = result._base
            # Not for `result` alone: after a write into it the hook on it would never be called.
            if base is not None and base.grad_fn is not None and base.grad_fn._sequence_nr() >= self.first_node:
                base.register_hook(begin)


class Calls:
    """The running calls of one model. What changes them is called under the lock of the books, or by Recovery. A tracer
    may stand in the place of the :class:`gemini.memory.movement.manager.Manager` and the
    :class:`gemini.train.params.exposure.Exposure`.
    """

    def __init__(self, manager: Any, exposure: Any):
        self._acquire, self._release = manager.acquire, manager.release
        self._expose, self._cover = exposure.expose, exposure.cover
        self.running: dict[int, list[CallRecord]] = {}
        """The calls of each thread that runs a forward, by its identifier: a stack, and none that is empty."""
        self.num_exchanges = 0
        """How often weights and their averages have changed places: calls of before have no backward any more."""
        # Calls that backward keeps gathered now, the outermost first; of the one graph that runs, whatever its thread.
        self._reading: list[CallRecord] = []
        # The same, let go of while a forward inside backward recomputes.
        self._waiting: list[CallRecord] = []

    @property
    def depth(self) -> int:
        """The number of calls that are running in this thread."""
        # This thread's own entry: no other thread changes it, so no lock is needed.
        return len(self.running.get(threading.get_ident(), ()))

    @property
    def innermost(self) -> CallRecord | None:
        """The call that computes now in this thread, in forward or else in backward."""
        stack = self.running.get(threading.get_ident()) or self._reading
        return stack[-1] if stack else None

    def thread_of(self, record: CallRecord) -> int | None:
        """Return the thread whose running forward a call is part of, if it is part of one."""
        around = set(record.around())
        # Copies: other threads end their calls meanwhile.
        return next((ident for ident, stack in list(self.running.items()) if not around.isdisjoint(stack.copy())), None)

    def begin(self, module: nn.Module, chunks: tuple[Chunk, ...], keep: tuple[Chunk, ...] = ()) -> CallRecord:
        """Begin the call of a hooked module: gather what it reads. On an error nothing has begun. ``keep``: what
        modules inside it read, gathered once for all of them where there is room.
        """
        # A recomputation: released before it acquires, or it would need room for both at once.
        if not self.running and self._reading:
            self._waiting, self._reading = self._reading, []
            self._release_all(chunk for record in self._waiting for chunk in record.chunks)
        # Noted only when all is there, so that an error leaves no call that would have to be ended.
        if chunks:
            self._acquire_all(chunks)
        if keep:
            try:
                self._acquire_all(keep)
            except BudgetExceeded:
                keep = ()  # each module inside gathers what it reads
            except BaseException:
                self._release_all(chunks)
                raise
        for chunk in chunks + keep:
            self._expose(chunk)
        stack = self.running.setdefault(threading.get_ident(), [])
        record = CallRecord(module, chunks + keep, stack[-1] if stack else None, self.num_exchanges)
        record.kept = keep
        stack.append(record)
        return record

    def end(self, module: nn.Module) -> CallRecord | None:
        """End the call of a hooked module that is done, or failed, and calls inside it that had no end of their own.
        None if it never began (its own gathering failed).
        """
        stack = self.running.get(threading.get_ident(), [])
        # It is on top nearly always; it is somewhere below if an exception was caught between it and the top.
        if not stack or (stack[-1].module is not module and all(record.module is not module for record in stack)):
            return None
        record = self._pop(stack)
        while record.module is not module:
            record = self._pop(stack)
        record.module = None  # the record lives as long as the graph, the module need not
        # The recomputation is over: the node that waits for it finds its weights again.
        if not self.running and self._waiting:
            for waiting in self._waiting:
                self._read(waiting)
            self._waiting = []
        return record

    def unwind(self, depth: int) -> None:
        """End all calls of this thread but the outermost ``depth``: an exception ended them without their hooks."""
        stack = self.running.get(threading.get_ident(), [])
        while len(stack) > depth:
            # An interrupt may have come between pinning and noting: a release too many is no reason to stop here.
            with contextlib.suppress(AssertionError, IllegalTransition):
                self._pop(stack)

    def _pop(self, stack: list[CallRecord]) -> CallRecord:
        with WHOLE:  # whose hooks nobody knows any more, they would stay open for good
            record = stack.pop()
            if not stack:
                self.running.pop(threading.get_ident(), None)
            # Hooks that were pushed inside a backward which broke off are gone with it: popping would take others'.
            for _ in range(record.num_hooks if record.hooks_in == torch._C._current_graph_task_id() else 0):
                torch._C._autograd._pop_saved_tensors_default_hooks()
            # The hook has those that were open around it, and the graph has the record: a cycle of both otherwise.
            record.num_hooks, record.pack = 0, None
        # Covered before released: a release may take the window away.
        for chunk in record.exposed:
            self._cover(chunk)
        self._release_all(record.chunks)
        return record

    def hold(self, chunk: Chunk) -> None:
        """Let the innermost call keep a chunk gathered that it reads though no param of its own is in it."""
        if not (call := self.innermost):
            return
        if chunk in call.kept:
            call.kept = tuple(kept for kept in call.kept if kept is not chunk)  # from here on it stays
        elif chunk not in call.chunks:
            self._acquire(chunk)
            # Not in `exposed`: the params stay guarded, for the call reads a view that it has already.
            call.chunks += (chunk,)

    def begin_backward(self, record: CallRecord) -> None:
        """Gather what the backward of a call reads, as its gradient has arrived, and let go of calls that are over."""
        staying, around = [], record.around()
        for other in self._reading:
            # By the rule above: any other call was made later, and all its nodes have run.
            if other in around or record in other.around():
                staying.append(other)
            else:
                self._release_all(other.chunks)
        self._reading = staying
        if record not in staying:
            self._read(record)

    def _read(self, record: CallRecord) -> None:
        """Gather what the backward of a call reads; where there is no room now, a node gathers what it asks for."""
        try:
            self._acquire_all(record.chunks)
        except BudgetExceeded:
            return  # a call that could not be gathered is not one to be released later
        self._reading.append(record)

    def relieve(self, want: Want) -> bool:
        """Let go of what is only kept for the rest of a backward, or for modules that this thread may call in a
        forward; False if there is nothing. Asked by the ledger.
        """
        reading, self._reading = self._reading, []
        self._release_all(chunk for record in reading for chunk in record.chunks)
        has_given = any(record.chunks for record in reading)
        # This thread's own alone: a module of another one may begin to read them now.
        for record in self.running.get(threading.get_ident(), ()):
            if record.kept and not record.inside:
                kept, record.kept = record.kept, ()
                record.chunks = tuple(chunk for chunk in record.chunks if chunk not in kept)
                record.exposed -= {*kept}
                for chunk in kept:
                    self._cover(chunk)
                self._release_all(kept)
                has_given = True
        return has_given

    def end_backward(self) -> None:
        """Release what backward keeps, or would have gathered again. Nothing if it is called twice."""
        reading, self._reading, self._waiting = self._reading, [], []
        self._release_all(chunk for record in reading for chunk in record.chunks)

    def abandon(self, *, backward: bool = False) -> None:
        """Forget the forward of this thread, or a backward, that an exception ended without its hooks, and those of
        threads that ended. An interrupt may have come between a pin and its note: the books are looked at next.
        """
        self.unwind(0)
        # Pins of dead threads would stay for good, and a new thread may get the identifier of a dead one.
        alive = {thread.ident for thread in threading.enumerate()}
        dead = [ident for ident in self.running if ident not in alive]
        lost = [record for ident in dead for record in self.running.pop(ident)]
        if backward:
            lost, self._reading, self._waiting = lost + self._reading, [], []
        for record in lost:
            with contextlib.suppress(AssertionError, IllegalTransition):
                self._release_all(record.chunks)

    def _acquire_all(self, chunks: Iterable[Chunk]) -> None:
        acquired = []
        try:
            for chunk in chunks:
                self._acquire(chunk)
                acquired.append(chunk)
        # All or none, on Ctrl-C too: a pin without a call would keep its window for good.
        except BaseException:
            self._release_all(acquired)
            raise

    def _release_all(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self._release(chunk)


def passes_of(ref: weakref.ref[Any]) -> Any:
    """Return the passes of a model, which hooks of its modules and graphs have weakly."""
    passes = ref()
    if not passes:
        raise GeminiError("the GeminiDDP model this module belonged to was deleted: its weights are gone")
    return passes


def begin_backward_of(ref: weakref.ref[Any], record: CallRecord, grad: torch.Tensor) -> None:
    """Tell the passes of a model that the gradient of a result of a call has arrived."""
    (ref() or passes_of(ref)).backward.begin_of(record)
