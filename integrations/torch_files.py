"""An ordinary file by ``torch.save``, of a managed model and its optimizer, for Lightning.

``torch.save`` gets its values late: a state dict has *promises* first, tensors with a shape and a dtype and no memory,
so that Lightning can pass it on and take entries out before anything is read. Each is then read into a nameless file
beside the result, so that nothing is ever whole in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from gemini.errors import GeminiError, of_storage
from gemini.planning.planes import PlaneKind
from gemini.replacing import atomic_write
from gemini.rules import UpdateRule, rule_of
from gemini.train.checkpoint.export import ShapeAndDtype, places_in
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.optimizers.states import read_state, shown_layout_of
from gemini.train.params.by_name import owner_of
from gemini.train.params.handle import ParamHandle, handle_of, params_of
from gemini.train.params.state_dict import model_state


def promised_model_state(original: Any) -> dict[str, Any]:
    """``state_dict`` (``original`` is the model's ``super()``) with promises of exact masters (of frozen params: of
    what there is, in the compute dtype); no update of the model may have broken off.
    """

    def promise(handle: ParamHandle) -> torch.Tensor:
        dtype = torch.float32 if handle.chunk.trained else handle.param.dtype
        # A function: a copy of a promise (copy.deepcopy) has the same one, where of a method it would copy the model.
        return _promise(handle.param.shape, dtype, lambda: owner_of(handle).by_names.read(handle, dtype))

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


def write_torch_file(content: Any, path: Path) -> None:
    """``torch.save(content, path)``, with values for promises: under a name of its own until it is whole on the disk,
    then renamed. Raises StorageError if it cannot be written; an existing file is as it was.
    """
    with of_storage(f"could not save {path}"), atomic_write(path) as draft:
        kept = keep_promises(content, partial(places_in, path.parent))
        try:
            torch.save(kept, draft)
        except RuntimeError as e:
            if "inline_container" not in str(e):  # where torch writes: it does not tell what the system said
                raise
            raise OSError(f"the disk is full, or fails ({' '.join(str(e).split())[:100]})") from e


def keep_promises(content: Any, make: Callable[[list[ShapeAndDtype]], list[torch.Tensor]] | None = None) -> Any:
    """``content`` with values for promises, in memory or in what ``make`` gives. GeminiError: one was computed with."""
    # Tied ones are one, and read once.
    promises = {id(leaf): leaf for leaf in tree_leaves(content) if isinstance(leaf, FakeTensor)}
    for leaf in promises.values():
        if not hasattr(leaf, "gemini_read"):
            raise GeminiError(
                f"a checkpoint holds a tensor of shape {tuple(leaf.shape)} that was computed from weights or states "
                "which are not in memory: they are read when the file is written. Entries of a checkpoint may be "
                "removed (in on_save_checkpoint, for example); for values use model.full_param(name)"
            )
    # All places first: memory that is taken and freed beside what stays falls to pieces.
    forms = [(leaf.shape, leaf.dtype) for leaf in promises.values()]
    places = make(forms) if make else [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in forms]
    kept = dict(zip(promises, places, strict=True))
    for number, leaf in promises.items():
        kept[number].copy_(leaf.gemini_read().detach())  # type: ignore[attr-defined]
    return tree_map(lambda leaf: kept.get(id(leaf), leaf), content)


def _promise(shape: torch.Size, dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> torch.Tensor:
    # Outside of the mode a fake tensor stays one: whatever computes with it makes another, which nothing is known of.
    with FakeTensorMode():
        promise: Any = torch.empty(shape, dtype=dtype, device="cpu")
    promise.gemini_read = read
    return promise  # type: ignore[no-any-return]
