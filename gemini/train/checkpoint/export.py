"""``save_pretrained``: transformers' own writer, given weights that take no memory.

transformers knows renames, tied weights, fused experts, shards and index files; it only wants a state dict. Each param
is handed to it as a tensor over the very bytes of its home: host memory of the chunk, or pages of the spill file mapped
read-only, which the system takes back at will. So a model is saved without ever being whole in memory.

With several ranks the first one writes. What the others keep arrives param by param in nameless files beside the
result, mapped likewise, while they wait and serve.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.errors import RankLost, RankMismatch, StorageError
from gemini.memory.chunks.chunk import COMPUTE_DTYPES, FilePlane
from gemini.memory.movement.mover import tiles
from gemini.planning.planes import WEIGHTS
from gemini.ranks.agreement import Point
from gemini.train.params.guard import ParamHandle, handle_of
from gemini.train.sharding.consensus import tell, wait_for_all

if TYPE_CHECKING:
    from gemini.train.engine import Engine


def export_pretrained(
    model: nn.Module, engine: Engine, original: Any, save_directory: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call ``original.save_pretrained`` with mapped weights as its ``state_dict`` (unless the caller gave one).

    With several ranks all of them call it, one writes, and a failure there is raised on all of them.
    """
    shards = engine.shards
    if shards is None:
        export = _Export(model, engine, original, save_directory, args, kwargs)
        export.collect()
        return export.write()
    result: Any = None
    failure: BaseException | None = None
    if shards.ranks.is_first:
        try:
            export = _Export(model, engine, original, save_directory, args, kwargs)
            export.collect()
        except (RankLost, RankMismatch):  # the others heard of it, or never will
            raise
        except BaseException as e:
            failure = e
    shards.meet_all(Point.EXPORT)  # until here the others serve what the first one reads
    if shards.ranks.is_first and failure is None:
        try:
            result = export.write()
        except BaseException as e:
            failure = e
    wait_for_all(engine, "save_pretrained")
    tell(engine, "save_pretrained", failure, directory=Path(save_directory).name)
    return result


class _Export:
    """One call of the original's ``save_pretrained``, on the rank that writes."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        original: Any,
        save_directory: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        self._model, self._engine, self._original = model, engine, original
        self._directory = save_directory
        self._args, self._kwargs = args, kwargs

    def collect(self) -> None:
        """All weights as tensors that take no memory, as the ``state_dict`` argument, unless the caller gave one."""
        directory = Path(self._directory)
        if directory.exists() and not directory.is_dir():
            raise StorageError(f"save_pretrained({str(directory)!r}): that is a file, not a directory")
        if len(self._args) >= 2 or self._kwargs.get("state_dict") is not None:
            return
        directory.mkdir(parents=True, exist_ok=True)
        state = nn.Module.state_dict(self._model, keep_vars=True)
        views: dict[int, torch.Tensor] = {}
        for name, value in state.items():
            handle = handle_of(value)
            if handle is not None:
                if id(value) not in views:
                    views[id(value)] = _mapped(self._engine, handle, directory)
                state[name] = views[id(value)]
            elif isinstance(value, torch.Tensor):
                state[name] = value.detach().cpu()
        self._kwargs = {**self._kwargs, "state_dict": state}

    def write(self) -> Any:
        """Let transformers write."""
        return self._original.save_pretrained(self._directory, *self._args, **self._kwargs)


def _mapped(engine: Engine, handle: ParamHandle, directory: Path) -> torch.Tensor:
    """The weights in the compute dtype, each param a storage of its own (transformers tells ties by storages)."""
    plane, slot = handle.chunk.weights, handle.slot
    if not slot.numel:  # no file of no bytes can be mapped
        return torch.empty(handle.param.shape, dtype=COMPUTE_DTYPES[engine.config.precision], device="cpu")
    if engine.shards is not None and engine.shards.ranks.size > 1:
        return _received(engine, handle, directory)
    if plane.dtype != COMPUTE_DTYPES[engine.config.precision]:
        return _spooled(engine, handle, directory)
    if isinstance(plane, FilePlane):
        return plane.mapped(slot.start, slot.stop).view(handle.param.shape)
    view = plane.host_view(slot.start, slot.stop)
    if view is None:
        return _spooled(engine, handle, directory)
    buffer = (ctypes.c_char * (view.numel() * view.element_size())).from_address(view.data_ptr())
    buffer.owner = view  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=view.dtype).view(handle.param.shape)


def _spooled(engine: Engine, handle: ParamHandle, directory: Path) -> torch.Tensor:
    """The weights in a nameless file beside the result, mapped: for those that have to be cast or copied first."""
    mapped = _file_backed(handle.slot.numel, COMPUTE_DTYPES[engine.config.precision], directory)
    at = 0
    for part in engine.by_names.read_parts(handle, WEIGHTS):
        mapped[at : at + part.numel()].copy_(part)
        at += part.numel()
    return mapped.view(handle.param.shape)


def _received(engine: Engine, handle: ParamHandle, directory: Path) -> torch.Tensor:
    """The same from all ranks, each sending its part straight into the file's pages."""
    assert engine.shards is not None
    numel, dtype = handle.slot.numel, COMPUTE_DTYPES[engine.config.precision]
    whole = _file_backed(numel, handle.chunk.weights.dtype, directory)
    engine.shards.read_into(handle, WEIGHTS, whole)
    if whole.dtype != dtype:
        wide, whole = whole, _file_backed(numel, dtype, directory)
        for start, stop in tiles(0, numel, engine.mover.tile):
            whole[start:stop].copy_(wide[start:stop])
    return whole.view(handle.param.shape)


def _file_backed(numel: int, dtype: torch.dtype, directory: Path) -> torch.Tensor:
    """A flat tensor over a nameless file: the system writes its pages out rather than run out of memory."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.truncate(numel * dtype.itemsize)
        mapping = mmap.mmap(file.fileno(), numel * dtype.itemsize)
    return torch.frombuffer(mapping, dtype=torch.uint8).view(dtype)
