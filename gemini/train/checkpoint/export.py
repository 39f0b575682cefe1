"""What leaves a model in files of other libraries: ``save_pretrained`` by transformers, an ordinary file by torch.

They know renames, tied weights, shards, pickles; they only want a state dict. Each value in it is a tensor over the
very bytes of its home in host memory, or over a nameless file beside the result, into which it was read: its pages are
written out by the system rather than run out of memory. So nothing is ever whole in memory.

``torch.save`` gets its values late: a state dict has *promises* first, tensors with a shape and a dtype and no memory,
so that Lightning can pass it on and take entries out before anything is read.

With several ranks the first one writes; the others wait at an agreement, where they serve its reads.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from gemini.errors import GeminiError, StorageError, of_storage
from gemini.memory.chunks.chunk import COMPUTE_DTYPES
from gemini.planning.planes import WEIGHTS, PlaneKind
from gemini.ranks.agree import Attempt, Point
from gemini.ranks.group import Ranks
from gemini.ranks.wire import Tag
from gemini.replacing import atomic_write
from gemini.rules import UpdateRule, rule_of
from gemini.train.engine import Engine
from gemini.train.modules.reading import is_a
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.optimizers.states import read_state, shown_layout_of
from gemini.train.params.by_name import owner_of
from gemini.train.params.handle import ParamHandle, handle_of, params_of
from gemini.train.params.state_dict import model_state, own_state


class Export:
    """One call of ``original.save_pretrained``, with weights as its ``state_dict`` unless the caller gave one.

    Args:
        original: ``super()`` of the managed model.
        dtype: in which weights are written: as they are, if None, or fp32, which are the exact masters.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        original: Any,
        save_directory: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype | None,
    ):
        self._model, self._original, self._directory = model, original, save_directory
        self._args, self._kwargs = args, kwargs
        self._by_names, self._ranks, self._company = engine.by_names, engine.ranks, engine.shards
        # But for those that stay in fp32.
        compute = self._compute = COMPUTE_DTYPES[engine.config.precision]
        self._dtype = dtype or compute
        if self._dtype not in (compute, torch.float32):
            raise ValueError(
                f"save_pretrained(dtype={dtype}): weights are there in {compute} and, exactly, in torch.float32; "
                "convert the files afterwards"
            )
        if dtype is not None and self._is_given():
            raise ValueError("save_pretrained takes dtype= or state_dict=, not both: a state has the dtypes it has")
        self._of_stages = engine.params.of_stages

    def run(self) -> Any:
        """Save, and give what the original gives. With several ranks all of them call it, one writes, and a failure
        there is raised on all of them.

        Raises:
            StorageError: if it cannot be written.
        """
        ranks = self._ranks
        writes = ranks.everyone.rank == ranks.parts.rank == 0
        takes = writes and not self._is_given()
        result: Any = None
        views: dict[str, torch.Tensor] = {}
        # What fails is kept: raised now, the others would wait at the next meeting until the timeout.
        attempt = Attempt(BaseException)
        if writes:
            with attempt:
                self._begin()
        # Of slices and stages one rank each reads. Gone through to the end even after a failure: the other ranks send
        # and serve every param.
        for name, whole in self._wholes(ranks) if ranks.is_cut and ranks.reads_parts else ():
            if takes and attempt.refusal is None:
                with attempt:
                    views[name] = _file_backed(self._directory, whole.shape, whole.dtype).copy_(whole)
        if takes and attempt.refusal is None:
            with attempt:
                if not ranks.is_cut:
                    views = {handle.name: self._view(handle) for handle in self._by_names.handles}
                self._give(views)
        self._company.meet_all(Point.EXPORT)  # until here the others serve what the first one reads
        if writes and attempt.refusal is None:
            with attempt:
                result = self._write()
        # What has failed on one rank fails on all. The others may wait long for the one that writes.
        ranks.waiting.wait_for_all("save_pretrained")
        refusal = attempt.refusal and self._in_our_words(attempt.refusal)
        self._company.agree_on_folder(Point.EXPORT, "save_pretrained", self._directory, refusal)
        return result

    def _wholes(self, ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
        """All params by their first names, each for the moment; on ranks that do not write whatever is there. Whatever
        fails on one rank, the others are here as well.
        """
        if not self._of_stages:
            for handle in self._by_names.handles:
                yield handle.name, self._by_names.read_whole(handle, self._dtype_of(handle))
            return
        own = {handle.whole_name: handle for handle in self._by_names.handles}
        for name, param in self._of_stages.items():
            owner, doing = param.ranks[0], f"sending {name}"
            if ranks.stages.rank == owner:
                value = self._by_names.read_whole(own[name], self._dtype)
                if owner:
                    ranks.stages.start(Tag.BY_NAME, {0: value.contiguous()}, {}, doing).wait()
                yield name, value
            elif ranks.stages.rank == 0:
                value = torch.empty(param.shape, dtype=self._dtype, device="cpu")
                ranks.stages.start(Tag.BY_NAME, {}, {owner: value}, doing).wait()
                yield name, value

    def _is_given(self) -> bool:
        """Whether the caller gave the state."""
        return len(self._args) >= 2 or self._kwargs.get("state_dict") is not None

    def _begin(self) -> None:
        directory = Path(self._directory)
        if directory.exists() and not directory.is_dir():
            raise StorageError(f"save_pretrained({str(directory)!r}): that is a file, not a directory")
        if not self._is_given():
            directory.mkdir(parents=True, exist_ok=True)

    def _give(self, views: dict[str, torch.Tensor]) -> None:
        """Give weights, by the first names of the params of all stages, as the ``state_dict`` argument."""
        state = own_state(self._model)
        # By every name that the model's state has now, tied ones too; all but params is copied to the CPU.
        for name, value in state.items():
            handle = handle_of(value)
            if handle is not None:
                state[name] = views[handle.whole_name]
            elif isinstance(value, torch.Tensor):
                state[name] = value.detach().cpu()
        own = {handle.whole_name for handle in self._by_names.handles}  # in the state already, by the names of now
        state.update((name, value) for name, value in views.items() if name not in own)
        self._kwargs = {**self._kwargs, "state_dict": state}

    def _write(self) -> Any:
        """Let transformers write."""
        result = self._original.save_pretrained(self._directory, *self._args, **self._kwargs)
        config = Path(self._directory, "config.json")
        if self._dtype != self._compute and config.exists() and not is_a(type(self._model), "PeftModel"):
            body = json.loads(config.read_text(encoding="utf-8"))  # says the model's dtype, in which it would be read
            body["dtype"] = str(self._dtype).removeprefix("torch.")
            config.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return result

    def _dtype_of(self, handle: ParamHandle) -> torch.dtype:
        """The dtype in which a param is written."""
        return handle.chunk.flat.dtype if self._dtype is self._compute else self._dtype

    def _view(self, handle: ParamHandle) -> torch.Tensor:
        """The weights, each param a storage of its own (transformers tells ties by storages)."""
        dtype, kept, shape = self._dtype_of(handle), handle.chunk.weights.dtype, handle.param.shape
        view = self._by_names.in_place(handle, dtype)
        if view is not None and view.numel():
            buffer = (ctypes.c_char * view.nbytes).from_address(view.data_ptr())
            # torch.frombuffer keeps the buffer, and this keeps the plane's memory for it.
            buffer.owner = view  # type: ignore[attr-defined]
            return torch.frombuffer(buffer, dtype=dtype).view(shape)
        whole = _file_backed(self._directory, shape, dtype)
        if dtype != handle.chunk.flat.dtype:  # masters: one param in memory at once, then its pages are the file's
            return whole.copy_(self._by_names.read(handle, dtype))
        # Read where it is to be: memory that is taken and freed beside what stays falls to pieces.
        read = whole if kept == dtype else _file_backed(self._directory, shape, kept)
        self._by_names.read_into(handle, WEIGHTS, read.view(-1))
        return whole if read is whole else whole.copy_(read)

    def _in_our_words(self, error: BaseException) -> BaseException:
        """What a full or broken disk makes libraries say; another error (those of a hub have no number) as it is."""
        if not (isinstance(error, OSError) and error.errno is not None) and type(error).__name__ != "SafetensorError":
            return error
        what = getattr(error, "strerror", None) or error
        told = StorageError(f"save_pretrained({str(self._directory)!r}): {what}")
        told.__cause__ = error
        return told


def _file_backed(folder: Any, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over a nameless file in a folder."""
    num_bytes = shape.numel() * dtype.itemsize
    if not num_bytes:  # no file of no bytes can be mapped
        return torch.empty(shape, dtype=dtype, device="cpu")
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk says so here, and not by SIGBUS
        # The mapping keeps the nameless file when it is closed.
        mapping = mmap.mmap(file.fileno(), num_bytes)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)


# ---- files of torch --------------------------------------------------------------------------------------------------


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


def write_torch_file(content: Any, path: Path) -> None:
    """``torch.save(content, path)``, with values for promises: under a name of its own until it is whole on the disk,
    then renamed.

    Raises:
        StorageError: if it cannot be written; an existing file is as it was.
    """
    with of_storage(f"could not save {path}"), atomic_write(path) as draft:
        kept = keep_promises(content, partial(_file_backed, path.parent))
        try:
            torch.save(kept, draft)
        except RuntimeError as e:
            if "inline_container" not in str(e):  # where torch writes: it does not tell what the system said
                raise
            raise OSError(f"the disk is full, or fails ({' '.join(str(e).split())[:100]})") from e


def keep_promises(content: Any, make: Callable[..., torch.Tensor] | None = None) -> Any:
    """``content`` with values for promises, in memory or in what ``make`` gives.

    Raises:
        GeminiError: if somebody has computed with a promise.
    """
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
    make = make or partial(torch.empty, device="cpu")
    kept = {number: make(leaf.shape, dtype=leaf.dtype) for number, leaf in promises.items()}
    for number, leaf in promises.items():
        kept[number].copy_(leaf.gemini_read().detach())  # type: ignore[attr-defined]
    return tree_map(lambda leaf: kept.get(id(leaf), leaf), content)


def _promise(shape: torch.Size, dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> torch.Tensor:
    # Outside of the mode a fake tensor stays one: whatever computes with it makes another, which nothing is known of.
    with FakeTensorMode():
        promise: Any = torch.empty(shape, dtype=dtype, device="cpu")
    promise.gemini_read = read
    return promise  # type: ignore[no-any-return]
