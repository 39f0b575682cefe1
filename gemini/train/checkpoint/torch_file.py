"""An ordinary ``torch.save`` file of a managed model, written without ever holding more than one param's values.

``torch.save`` is given *promises* in the place of masters and states: tensors with a shape and a dtype and no memory,
which remember what they stand for. The file is laid out with room for their values, and these are then read from the
chunks one after the other and written into their places. What comes out opens with ``torch.load`` as any other file:
a ``state_dict`` of fp32 masters, an optimizer state as ``torch.optim.AdamW`` has it.

With several ranks only the first calls :func:`write` (or :func:`keep_promises`); the others wait at an agreement, where
they serve its reads.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from gemini.errors import GeminiError, of_storage
from gemini.planning.planes import PlaneKind
from gemini.replacing import atomic_write
from gemini.rules import UpdateRule, rule_of
from gemini.train.optimizers.checks import shown_layout_of
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.optimizers.states import read_state
from gemini.train.params.handle import ParamHandle, handle_of, params_of
from gemini.train.params.owner import owner_of
from gemini.train.params.state_dict import model_state

_readers = WeakTensorKeyDictionary()
"""By promise, the function that reads its values. It goes when the promise does."""


def promised_model_state(original: Any) -> dict[str, Any]:
    """``state_dict`` with promises of exact masters (of frozen params: of what there is, in the compute dtype); no
    update of the model may have broken off.

    ``original`` is ``super()`` of the managed model.
    """

    def promise(handle: ParamHandle) -> torch.Tensor:
        dtype = torch.float32 if handle.chunk.trained else handle.param.dtype
        return _promise(handle.param.shape, dtype, partial(owner_of(handle).by_names.read, handle, dtype))

    return model_state(original, None, "", promise)


def promised_optimizer_state(optimizer: HybridOptimizer) -> dict[str, Any]:
    """``state_dict`` of torch's AdamW, with promises of the states of managed params."""

    def kept_by(handle: ParamHandle) -> UpdateRule:
        # The model's rule may keep an average, which the optimizer's does not know of.
        return rule_of(owner_of(handle).config.optimizer)

    def promise(handle: ParamHandle, kind: PlaneKind) -> torch.Tensor:
        shape, dtype = shown_layout_of(kept_by(handle), handle.param)[kind]
        return _promise(shape, dtype, lambda: read_state(handle, kind)[kind])

    state = torch.optim.Optimizer.state_dict(optimizer)
    for index, param in enumerate(params_of(optimizer)):
        handle = handle_of(param)
        # As in torch, a param has no state before its first step.
        if handle is not None and handle.num_steps:
            states = {spec.kind: promise(handle, spec.kind) for spec in kept_by(handle).spec.planes}
            step = torch.tensor(float(handle.num_steps), device="cpu")
            factors = {name: value.clone() for name, value in handle.factors.items()}
            state["state"][index] = {"step": step, **states, **factors}
    return state


def write(content: Any, path: Path) -> None:
    """``torch.save(content, path)``: under a name of its own until it is whole on the disk, then renamed.

    Raises:
        StorageError: if it cannot be written; an existing file is as it was.
        GeminiError: if somebody has computed with a promise.
    """
    with of_storage(f"could not save {path}"), atomic_write(path) as draft:
        if not _write_streamed(content, draft):
            _save(keep_promises(content), draft)


def keep_promises(content: Any) -> Any:
    """``content`` with values for promises, all in memory at once: 12 bytes per trained param."""
    kept: dict[int, torch.Tensor] = {}

    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, FakeTensor):
            return leaf
        if id(leaf) not in kept:
            kept[id(leaf)] = _reader_of(leaf)()
        return kept[id(leaf)]

    return tree_map(keep, content)


def _write_streamed(content: Any, draft: Path) -> bool:
    """False if ``content`` hides tensors in objects that cannot be looked into; the file is then of no use."""
    tensors = [leaf for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            _reader_of(tensor)
        elif tensor.layout is not torch.strided or tensor.is_quantized:
            return False
    # The layout of the file alone: headers and room for values, which no promise has.
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        _save(content, draft)
    # A record for each storage. One more than was found by looking: an object hides a tensor whose values would be
    # missing.
    records = torch._C.PyTorchFileReader(str(draft)).get_all_records()
    if sum(name.startswith("data/") for name in records) != len({t.untyped_storage()._cdata for t in tensors}):
        return False
    with open(draft, "rb+") as file:
        os.posix_fallocate(file.fileno(), 0, draft.stat().st_size)  # a full disk says so here, and not by SIGBUS
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):  # what is written to its tensors is in the file
        laid_out = torch.load(draft, map_location="cpu", mmap=True, weights_only=False)
    # The same structure in the same order, so that each tensor meets its place.
    places = [leaf for leaf in tree_leaves(laid_out) if isinstance(leaf, torch.Tensor)]
    done: set[int] = set()
    for tensor, place in zip(tensors, places, strict=True):
        # Tied tensors have one place, and are read once.
        if id(tensor) not in done:
            done.add(id(tensor))
            value = _reader_of(tensor)() if isinstance(tensor, FakeTensor) else tensor
            place.detach().copy_(value.detach())
    return True


def _save(content: Any, draft: Path) -> None:
    try:
        torch.save(content, draft)
    except RuntimeError as e:
        if "inline_container" not in str(e):  # where torch writes: it does not tell what the system said
            raise
        raise OSError(f"the disk is full, or fails ({' '.join(str(e).split())[:100]})") from e


def _promise(shape: torch.Size, dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> torch.Tensor:
    # Outside of the mode a fake tensor stays one: whatever computes with it makes another, which nothing is known of.
    with FakeTensorMode():
        promise = torch.empty(shape, dtype=dtype, device="cpu")
    _readers[promise] = read
    return promise


def _reader_of(promise: torch.Tensor) -> Callable[[], torch.Tensor]:
    read = _readers.get(promise)
    if read is None:
        raise GeminiError(
            f"a checkpoint holds a tensor of shape {tuple(promise.shape)} that was computed from weights or states "
            "which are not in memory: they are written to the file straight from their chunks. Entries of a checkpoint "
            "may be removed (in on_save_checkpoint, for example); for values use model.full_param(name)"
        )
    return read
