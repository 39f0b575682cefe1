"""Which params are ordinary parameters now, for who computes with them, and which are guarded.

While the model computes, the params of gathered chunks are ordinary; those of chunks that never move become so together
when it starts to compute, but not before their update is over: until then the guard stands, a block waits for its own
chunks as it begins, and any other read waits when it meets the guard. At rest all are guarded.
"""

from __future__ import annotations

import torch
from torch import nn

from gemini.errors import ParamAccessError
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.movement.transfers import Lane
from gemini.memory.store import ChunkStore
from gemini.train.params.guard import managed_kind, nan_of
from gemini.train.params.handle import SET_DATA, ParamHandle, ParamSet, notes_a_write, written_to
from gemini.train.step import StepState


class Exposure:
    """Puts the guards of one model's params up and takes them away. Called under the lock of the books, or where one
    thread computes (Recovery, the step); but not where a hook or a stray read only waits for resident chunks
    (:meth:`catch_up`, :meth:`expose`).
    """

    def __init__(self, params: ParamSet, store: ChunkStore, state: StepState):
        self._by_chunk, self._chunks, self._manager = params.by_chunk, store.chunks, store.manager
        # The books of the lane themselves, by chunk index: a look at them is no call.
        self._state, self._updating = state, store.transfers.open[Lane.UPDATE]
        self._never_move = {chunk.spec.index: chunk for chunk in store.chunks if chunk.resident}
        self._in_place = [handle for index in self._never_move for handle in params.by_chunk.get(index, ())]
        """The params of those, together: most steps expose and guard them all at once."""
        # Chunks whose params are ordinary ones now, by index.
        self._exposed: set[int] = set()
        self._num_readers: dict[int, int] = {}
        """By index of a chunk that moves, how many computations see its params as ordinary ones now."""
        self.late: set[int] = set()
        """Resident chunks that are still being updated, or were when the model began to compute."""
        self._cast: list[ParamHandle] = []  # params that were cast while they were ordinary ones
        self._covered: set[int] = set()
        """Chunks that move and were guarded again since the model was at rest: somebody may have views of them."""
        # Told when a window's memory goes: a param must not look into memory that is somebody else's by then.
        for chunk in store.chunks:
            chunk.on_gone.append(self.poison)
        self.written: list[ParamHandle] = []  # params that others have written to, which has yet to be refused

    def begin(self) -> None:
        """Make ordinary what never moves, unless it is being updated: the model computes from now on. With gradients
        off all updates are waited for. torch then has fused paths for whole layers, which look at the class of every
        param in them and compute other bits where one is guarded.
        """
        if self._updating and not torch.is_grad_enabled():
            for chunk in self._never_move.values():
                chunk.settle()
        fresh = self._never_move.keys() - self._exposed
        # Jobs that end meanwhile stay in `late` as well: `expose` finds that out at no cost.
        if self._updating:
            late = fresh & self._updating.keys()
            self.late |= late
            fresh -= late
        self.written += expose(self._params_of(fresh))
        self._exposed |= fresh
        # What was late in a forward before and is over by now is exposed with the rest.
        self.late -= fresh

    def _params_of(self, indices: set[int]) -> list[ParamHandle]:
        if indices == self._never_move.keys():
            return self._in_place
        return [handle for index in indices for handle in self._by_chunk[index]]

    def catch_up(self, chunks: tuple[Chunk, ...]) -> None:
        """Wait for the updates of chunks that are read now, and expose them."""
        for chunk in chunks:
            if chunk.spec.index in self.late:
                self.expose(chunk)

    def expose(self, chunk: Chunk) -> None:
        """Make the params of a gathered chunk ordinary parameters, until as many :meth:`cover` if it moves."""
        index, is_resident = chunk.spec.index, chunk.window is None
        # Two calls may read one chunk (tied weights, a nested call): the guard returns after the last of them.
        if not is_resident:
            self._num_readers[index] = self._num_readers.get(index, 0) + 1
        if index not in self._exposed:
            if is_resident:
                # The update first: torch would let the module read weights that a worker is writing.
                chunk.settle()
                self.late.discard(index)
            assert is_resident or chunk.pins, chunk.name
            written = expose(self._by_chunk[index])
            self._exposed.add(index)
            if written:
                self._note(chunk, written)

    def cover(self, chunk: Chunk) -> None:
        """Count one reader less of a chunk that moves, and guard it after the last: no other read goes unnoticed."""
        index = chunk.spec.index
        if index not in self._num_readers:  # it moves not
            return
        self._num_readers[index] -= 1
        if not self._num_readers[index]:
            del self._num_readers[index]
            self._covered.add(index)
            if self.hide(chunk):  # a write, refused when everything has been let go: the copy may go
                self._manager.drop([chunk])

    def withdraw(self, chunk: Chunk) -> None:
        """Guard a resident chunk whose update begins during forward or backward: a later read waits for the update."""
        if chunk.resident and chunk.spec.index in self._exposed:
            self.hide(chunk)
            self.late.add(chunk.spec.index)

    def hide(self, chunk: Chunk) -> bool:
        """Guard the params of a chunk. True if one was written to, which is refused when that can be done."""
        # Noted before it is done: what an interrupt leaves half hidden is hidden again by Recovery.
        self._exposed.discard(chunk.spec.index)
        return self._hide(self._by_chunk[chunk.spec.index])

    def _hide(self, handles: list[ParamHandle]) -> bool:
        written, cast = hide(handles)
        self.written += written
        self._cast += cast
        return bool(written)

    def look_for_writes(self, chunk: Chunk) -> None:
        """Notice writes to guarded params, through views that somebody has: refused when that can be done."""
        if written := written_to(self._by_chunk[chunk.spec.index]):
            self._note(chunk, written)

    def _note(self, chunk: Chunk, written: list[ParamHandle]) -> None:
        self.written += written
        self._manager.drop([chunk])  # a copy that differs from its home

    def refuse(self, written: list[ParamHandle]) -> None:
        """Refuse to update weights that others have written to: nothing is updated yet."""
        # The copy with the write goes first: the program may catch the error and go on, with the masters.
        self._manager.drop({handle.chunk.spec.index: handle.chunk for handle in written}.values())
        self.written += written
        self.refuse_writes()

    def poison(self, chunk: Chunk) -> None:
        """Guard the params of a chunk whose gathered weights go away, with NaN behind them."""
        # While the counts can still be compared: `poison` replaces param.data, and with it what was written.
        self.look_for_writes(chunk)
        self._exposed.discard(chunk.spec.index)
        self._num_readers.pop(chunk.spec.index, None)
        poison(self._by_chunk[chunk.spec.index])

    def rest_if_idle(self) -> None:
        """Guard everything if nobody computes any more, and refuse what was written meanwhile."""
        if not self._state.computing:
            # Guarded chunks need no note: `begin` asks anew which updates are under way.
            self.late.clear()
            self._num_readers.clear()
            # Their params were guarded when their module ended, and a view of them may have been written to since.
            covered, self._covered = self._covered - self._exposed, set()
            if self._exposed:
                handles = self._params_of(self._exposed)
                self._exposed.clear()
                self._hide(handles)
            for index in covered:
                self.look_for_writes(self._chunks[index])
            # Not sooner: a module of the same forward may compute with the cast weights again.
            if self._cast:
                cast, self._cast = self._cast, []
                with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
                    for handle in cast:
                        if not handle.poisoned and handle.param.data_ptr() != handle.view.data_ptr():
                            SET_DATA(handle.param, handle.view)  # torch's own: the guard would refuse the setter
        # Last, for it raises: everything is guarded by then, and the next forward finds a model at rest.
        if self.written:
            self.refuse_writes()

    def refuse_writes(self) -> None:
        """Raise for params that were written to while they were ordinary ones."""
        # Taken out first: a write is refused once, not in every forward from here on.
        written, self.written = self.written, []
        if written:
            raise ParamAccessError(
                f"the weights of {written[0].name!r} were written to inside a forward, a backward or gathered(): its "
                "fp32 master does not know of it. Write with model.gathered([param], write=True), outside of forward"
            )


def expose(handles: list[ParamHandle]) -> list[ParamHandle]:
    """Make params of gathered chunks ordinary parameters; returns those that were written to since the last look."""
    written = []
    for handle in handles:
        param = handle.param
        # The class first: the guard would answer the lines below itself.
        param.__class__ = handle.kind
        if param._version != handle.version and notes_a_write(handle):
            written.append(handle)
    # Behind all looks: a change of data counts as a write to torch, of params with the same count too.
    for handle in handles:
        if handle.poisoned:
            handle.param.data = handle.view
            handle.poisoned = False
            handle.version = handle.param._version
    return written


def hide(handles: list[ParamHandle]) -> tuple[list[ParamHandle], list[ParamHandle]]:
    """Guard params: nobody computes with them now. Returns those that were written to while they were ordinary ones,
    and those that were given the same values in other memory, which they keep until the model is at rest.
    """
    written, cast = list[ParamHandle](), list[ParamHandle]()
    for handle in handles:
        param = handle.param
        if param._version != handle.version and notes_a_write(handle):
            written.append(handle)
        # It was of a param that others could write to unseen; nobody can behind the guard.
        handle.fingerprint = None
        # It looks elsewhere than into its window: somebody has set param.data.
        if not handle.poisoned and param.data_ptr() != handle.view.data_ptr():
            # The same values: from ``module.to(dtype)``, or cuDNN's contiguous weights.
            given, view = param.detach(), handle.view
            if given.shape == view.shape and given.device == view.device and torch.equal(given, view.to(given.dtype)):
                cast.append(handle)
            else:
                param.data = handle.view
                handle.version = param._version
                written.append(handle)
        param.__class__ = managed_kind(handle.kind)
    return written, cast


def poison(handles: list[ParamHandle]) -> None:
    """Guard params whose weights are not gathered. What reads past the guard (``torch.tensor(p)``) finds NaN."""
    for handle in handles:
        param = handle.param
        param.__class__ = nn.Parameter  # the guard would refuse the next line
        param.data = nan_of(param.dtype, param.device).expand(param.shape)
        param.__class__ = managed_kind(handle.kind)
        handle.poisoned = True


def take_in(handle: ParamHandle) -> None:
    """Make an ordinary param that was given other memory a view of its window again, with the values from there."""
    if handle.param.data_ptr() != handle.view.data_ptr():
        value, handle.param.data = handle.param.data, handle.view
        handle.param.copy_(value)


def undo_writes(handle: ParamHandle) -> None:
    """Make an ordinary param a view of its window again, and forget what was written until now."""
    handle.param.data = handle.view
    handle.version = handle.param._version
