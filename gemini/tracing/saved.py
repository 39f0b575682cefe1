"""Which inputs of checkpointed blocks wait for backward: what offloading of activations would move, and when.

The same rule as ``gemini/train/activations/store.py``, with nothing moved.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gemini.train.activations.store import MIN_BYTES, saved_by_checkpointing

if TYPE_CHECKING:
    from gemini.tracing.observer import Observer


class Kept:
    """One saved input of a checkpointed block."""

    __slots__ = ("__weakref__", "num_bytes", "tensor")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        self.num_bytes = tensor.numel() * tensor.element_size()


class SavedInputs:
    """Open while the outermost forward runs, as the engine's store is."""

    def __init__(self, observer: Observer):
        self._observer = observer
        self._is_open = False
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[Kept]]] = {}
        self._saved = self._restored = 0

    def open(self) -> None:
        if not self._is_open and torch.is_grad_enabled() and self._observer.meter is not None:
            self._known.clear()
            self._saved = self._restored = 0
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
            self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def take(self) -> tuple[int, int]:
        """Bytes saved and bytes asked for since the last call."""
        taken, self._saved, self._restored = (self._saved, self._restored), 0, 0
        return taken

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Runs for everything that is saved. What has a graph is detached: an output that held its own would be freed
        by the garbage collector only.
        """
        meter = self._observer.meter
        if (
            tensor.numel() * tensor.element_size() < MIN_BYTES
            or not saved_by_checkpointing(2)
            or meter is None
            or meter.is_param(tensor)
        ):
            return self._without_graph(tensor)
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        alive, known = self._known.get(key, (None, None))
        kept = known() if known is not None and alive is not None and not alive.expired() else None
        if kept is None:
            kept = Kept(self._without_graph(tensor))
            self._saved += kept.num_bytes
            self._known[key] = (StorageWeakRef(storage), weakref.ref(kept))
        return kept

    def _without_graph(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is None:
            return tensor
        with self._observer.elsewhere():
            return tensor.detach()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, Kept):
            return packed
        self._restored += packed.num_bytes
        return packed.tensor
