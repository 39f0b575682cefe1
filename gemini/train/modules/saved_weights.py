"""What autograd saves of weights that move, and who else still looks into a window.

Autograd saves *views* of weights. While a module with weights that move computes, saved-tensor hooks are open, and what
is saved of a window is kept as its place in the chunk, which is gathered again when a node of backward asks for it, in
whatever pass, order or thread. So backward finds the weights that forward read wherever a module's results went.

What no hook sees (a view kept in an attribute or on ``ctx``, a NumPy array, what ``torch.func`` saves) is a tensor over
the window's storage, and torch counts those. A window that others look into is *lent*: it is not evicted, and after an
update its new content is fetched at once. So a read is right, or there is no room and an error says who is in the way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._pytree import tree_map_only

from gemini.errors import ParamAccessError
from gemini.interrupts import WHOLE
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import DONE
from gemini.memory.movement.manager import Manager
from gemini.patches import patch
from gemini.train.modules.calls import CallRecord
from gemini.train.observers import Observers, own_work
from gemini.train.params.by_name import owner_of
from gemini.train.params.guard import ManagedParameter
from gemini.train.params.handle import ParamHandle

_hooks: Any = torch._C._autograd
_CHECKPOINTING = torch.utils.checkpoint.__name__
_PLAIN = (torch.Tensor, nn.Parameter)


class _Place(tuple[Chunk, ParamHandle, int, torch.dtype, Any, Any, Any]):
    """A view of a window, as where it is, found again when the chunk is gathered: the chunk, the param, how often that
    was written to, and the dtype, offset, shape and stride of the view.
    """

    __slots__ = ()  # and no `__init__`, as `_Kept`


class _Kept(tuple[torch.Tensor, int]):
    """Another tensor, as torch would keep it, and its count of writes, which is looked at when it is asked for."""

    __slots__ = ()  # and no `__init__`: one is made for all that is saved


class _OfOther(NamedTuple):
    """A param of another managed model, which a function of the program's own has saved outside of that one's forward:
    what it shows there is no memory to be kept. ``num_writes``: how often it had been written to.
    """

    handle: ParamHandle
    num_writes: int

    def read(self) -> torch.Tensor:
        """Return a copy of it."""
        _refuse_written(*self)
        with torch.no_grad(), owner_of(self.handle).forward.opened_at_rest([self.handle.chunk]):
            return self.handle.param.detach().clone()


class _Elsewhere(NamedTuple):
    """Another tensor, as the hooks have it that were open around ours (checkpointing, the user's)."""

    packed: Any
    unpack: Any


class _Recomputed:
    """A view of a window, saved in a region that is recomputed (activation checkpointing), which is asked for first:
    gathered before, the weight would take the room of those of its whole region.
    """

    __slots__ = ("packed", "place", "task", "unpack")

    def __init__(self, place: _Place, packed: Any, unpack: Any):
        self.place, self.packed, self.unpack = place, packed, unpack
        self.task = -1

    def recompute(self) -> None:
        """Once in a backward: checkpointing gives nothing away twice."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self.task):
            self.unpack(self.packed)
            self.task = task


class _Lazy(torch.Tensor):
    """A stand-in that checkpointing keeps of a weight which its recomputation saved: a shape to compare, no window.
    Where forward saved that weight without our hooks (it called another function than the recomputation does), the node
    gets this tensor itself: each operation on it gathers the weight.
    """

    read: Callable[[], torch.Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, view: torch.Tensor, read: Callable[[], torch.Tensor]) -> _Lazy:
        made: _Lazy = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, view.shape, view.stride(), dtype=view.dtype, device=view.device
        )
        made.read = read
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(_Lazy, lambda weight: weight.read(), (args, kwargs or {}))
        return func(*args, **kwargs)


class SavedWeights:
    """The saved-tensor hooks of one model, and its count of who looks into windows. torch's hooks are a stack of each
    thread. Packing runs on the thread of the forward and takes no lock; unpacking runs on the thread of autograd that
    runs the node, and takes the lock of the books while it gathers.
    """

    def __init__(self, manager: Manager, lock: AbstractContextManager[Any], observers: Observers):
        self._manager: Manager | None = manager
        self._lock, self.observers = lock, observers
        # By the address of a window's storage, which stays when its memory goes.
        self._by_storage: dict[int, Chunk] = {}
        # By chunk: where its params begin in the window, in bytes, in the order of `_handles`.
        self._starts: dict[int, list[int]] = {}
        self._handles: dict[int, list[ParamHandle]] = {}
        # By chunk: references to its storage that are ours, beside those of params that are views of it.
        self._own_references: dict[int, int] = {}
        self.open_for: str | None = None  # a param of the call for which the hooks were opened last

    def watch(self, chunk: Chunk, handles: list[ParamHandle]) -> None:
        """Look after a chunk that moves. Its params are at home and guarded, and nobody has a view of its window."""
        assert chunk.window is not None
        ordered = sorted(handles, key=lambda handle: handle.slot.start)
        index, storage = chunk.spec.index, chunk.face.untyped_storage()._cdata
        self._by_storage[storage] = chunk
        self._handles[index] = ordered
        self._starts[index] = [handle.slot.start * chunk.face.dtype.itemsize for handle in ordered]
        # Counted while nobody else can look in: every reference more is somebody's.
        self._own_references[index] = _num_references(storage) - _num_attached(ordered)
        chunk.lender = self

    def close(self) -> None:
        """Pop hooks that a forward has left open which an interrupt ended: other models would save by them. The model
        ends; graphs may still refer to this.
        """
        top = _hooks._top_saved_tensors_default_hooks
        while (there := top(False)) and getattr(there[0], "_gemini_of", None) is self:
            _hooks._pop_saved_tensors_default_hooks()
        self._manager = None

    def is_lent(self, chunk: Chunk) -> bool:
        """Whether somebody else has a tensor over the window of a chunk."""
        index = chunk.spec.index
        if (own := self._own_references.get(index)) is None:
            return False
        num_others = _num_references(chunk.face.untyped_storage()._cdata) - own
        return num_others > 0 and num_others > _num_attached(self._handles[index])

    # ---- when the hooks are open ---------------------------------------------------------------------------------

    def begin_call(self, record: CallRecord) -> None:
        """Open the hooks for a call whose weights move."""
        if record.chunks and torch.is_grad_enabled():
            with WHOLE:  # hooks that nobody has noted would stay open for good
                record.num_hooks = self._push(is_for_others=0 < len(record.kept) == len(record.chunks))
                record.hooks_in = torch._C._current_graph_task_id()
            there = _hooks._top_saved_tensors_default_hooks(False)
            record.pack = there[0] if there else None
            self.open_for = record.chunks[0].spec.slots[0].name

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep the hooks open while something else than a module reads weights."""
        num_hooks = 0
        try:
            if torch.is_grad_enabled():
                with WHOLE:
                    num_hooks = self._push()
            yield
        finally:
            if num_hooks:
                _hooks._pop_saved_tensors_default_hooks()

    def _push(self, *, is_for_others: bool = False) -> int:
        """Put our hooks over those that are there; 1, or 0 where ours are open already or torch allows none.
        ``is_for_others``: nothing but modules inside reads the weights for which they are opened.
        """
        # Inside a transform that takes derivatives torch refuses them: `_keep_for_transform` keeps chunks there.
        there = _hooks._top_saved_tensors_default_hooks(False)
        is_open = there and getattr(there[0], "_gemini_of", None) is self
        if is_open or not self._by_storage or not _hooks._saved_tensors_hooks_is_enabled():
            return 0
        pack: Any = self._around(*there) if there else partial(self._pack)
        pack._gemini_of, pack._gemini_is_for_others = self, is_for_others
        _hooks._push_saved_tensors_default_hooks(pack, self._unpack)
        return 1

    def _around(self, pack_elsewhere: Any, unpack_elsewhere: Any) -> Callable[[torch.Tensor], Any]:
        """Make a hook that keeps views of windows as places, and leaves the rest to the hooks that are open around it.
        Checkpointing counts what is saved, now and in its recomputation: it is told of weights as well. Hooks of the
        program get them too, as what they are: they may keep them in another precision.
        """
        # Told by module: checkpointing makes new hooks for each region, and has no class for them.
        origin = getattr(pack_elsewhere, "__module__", None) or ""

        def pack(tensor: torch.Tensor) -> Any:
            place = self._pack(tensor)
            if type(place) is _OfOther:
                return place
            if type(place) is not _Place:
                return _Elsewhere(pack_elsewhere(tensor), unpack_elsewhere)
            # Our own hooks for activations: a weight is none, and moving it is not their business.
            if origin.startswith("gemini."):
                return place
            if origin == _CHECKPOINTING and torch._C._current_graph_task_id() != -1:
                # The recomputation inside backward: checkpointing keeps what it is given here until the node asks.
                return _Recomputed(place, pack_elsewhere(_Lazy(tensor, partial(self._gather, place))), unpack_elsewhere)
            packed = pack_elsewhere(tensor.detach())  # not the param itself, which shows NaN while it is away
            if origin == _CHECKPOINTING:
                return _Recomputed(place, packed, unpack_elsewhere)
            return _Elsewhere(packed, unpack_elsewhere)

        return pack

    # ---- what is saved -------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> _Place | _Kept | _OfOther:
        """Keep what a node saves; runs for everything that is saved, so it calls nothing of ours for most of it."""
        chunk = None
        # Subclasses may have no storage, or one that says nothing of where their values are.
        if type(tensor) in _PLAIN:
            try:
                chunk = self._by_storage.get(tensor.untyped_storage()._cdata)
            except RuntimeError:  # sparse, or a wrapper without memory of its own
                pass
        if chunk and not (tensor.is_conj() or tensor.is_neg()):
            index = chunk.spec.index
            # The param whose place begins last before the view; in bytes, for a view may have another dtype.
            at = bisect_right(self._starts[index], tensor.storage_offset() * tensor.dtype.itemsize) - 1
            handle = self._handles[index][max(at, 0)]
            view = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
            return _Place((chunk, handle, handle.num_writes, *view))
        if type(tensor) is ManagedParameter:
            handle = tensor._gemini  # type: ignore[attr-defined]
            return _OfOther(handle, handle.num_writes)
        # Detached: an output that held its own graph would be freed by the garbage collector only.
        around = self.observers.around_own_work
        if not around:
            return _Kept((tensor.detach(), tensor._version))
        with around():
            return _Kept((tensor.detach(), tensor._version))

    def _unpack(self, packed: Any) -> torch.Tensor:
        kind = type(packed)
        if kind is _Kept:
            tensor, version = packed
            # torch makes this check for what it keeps itself; a tensor in our hands is ours to check.
            if tensor._version != version:
                raise overwritten(tensor, version)
            return tensor
        if kind is _Elsewhere:
            return packed.unpack(packed.packed)
        if kind is _OfOther:
            return packed.read()  # type: ignore[no-any-return]
        if kind is _Recomputed:
            packed.recompute()
            packed = packed.place
        return self._find(packed) if self.observers.around_own_work is None else self._gather(packed)

    def _find(self, place: _Place) -> torch.Tensor:
        """Make the view again. It lends the window to the node that asked, for as long as that has it. Called on the
        thread that runs the node; takes the lock.
        """
        chunk, handle, num_writes, dtype, *at = place
        if not self._manager:
            raise ParamAccessError(
                f"backward needs the weights of {handle.name!r}, and the model that had them was deleted: keep "
                "the model until backward is over"
            )
        # Before anything is gathered: new weights would give a gradient that no forward has, silently.
        if handle.num_writes != num_writes:
            _refuse_written(handle, num_writes)
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            # This node's backward is recorded for a second one (create_graph). What autograd's engine sets up for a
            # node ends with it, our hooks too.
            self._push()
        face = chunk.face
        with self._lock:
            is_pinned = chunk.pins > 0  # as nearly always: backward keeps what the call reads that this node is of
            device = self._manager.device
            if not is_pinned:
                self._manager.acquire(chunk)
            elif chunk.fetched is not DONE or device.stream_number() not in device.computing:
                self._manager.let_compute_wait(chunk)
            try:
                # Made while it is pinned: then the window may go, and from here on the view itself keeps it.
                return torch.empty(0, dtype=dtype, device=face.device).set_(face.untyped_storage(), *at)
            finally:
                if not is_pinned:
                    self._manager.release(chunk)

    _gather = own_work(_find)


def _refuse_written(handle: ParamHandle, num_writes: int) -> None:
    if handle.num_writes != num_writes:
        raise ParamAccessError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: the "
            f"weights of {handle.name!r} were updated or written after the forward that this backward is of. "
            "Call backward before optimizer.step(), or run the forward again"
        )


_disable = torch.autograd.graph.disable_saved_tensors_hooks


def overwritten(tensor: torch.Tensor, version: int) -> RuntimeError:
    """The error of torch where a tensor that autograd saved was written to since it had that version."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
        f"expected version {version} instead. torch.autograd.set_detect_anomaly(True) finds the operation"
    )


@contextmanager
def _refusing_in_our_words(error_message: str) -> Iterator[None]:
    """torch runs no transform that takes derivatives while saved-tensor hooks are open, and says so in its words."""
    top = _hooks._top_saved_tensors_default_hooks(False)
    if not top or not (owner := getattr(top[0], "_gemini_of", None)) or not error_message.startswith("torch.func"):
        with _disable(error_message):
            yield
        return
    if not top[0]._gemini_is_for_others:
        raise ParamAccessError(
            f"a module that reads weights of its own ({owner.open_for!r}), which move, called torch.func inside of its "
            "forward: torch can take no derivatives there. Put what torch.func differentiates into a module without "
            "params of its own, or keep these weights where the model computes (StaticPlacement, a larger budget)"
        )
    # Modules inside find that they are not open, and have what the transform reads kept.
    try:
        _hooks._pop_saved_tensors_default_hooks()
        with _disable(error_message):
            yield
    finally:
        _hooks._push_saved_tensors_default_hooks(*top)


patch("torch.autograd.graph.disable_saved_tensors_hooks", _refusing_in_our_words)


_is_poisoned = attrgetter("poisoned")

_num_references: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]
"""Counts the tensors over a storage, of whomever."""


def _num_attached(handles: list[ParamHandle]) -> int:
    """Count the params that are views of their window now; the others' content is NaN."""
    return len(handles) - sum(map(_is_poisoned, handles))
