"""``save_pretrained``: transformers' own writer, given weights that take no memory.

transformers knows renames, tied weights, fused experts, shards and index files; it only wants a state dict. Each param
is handed to it as a tensor over the very bytes of its home: host memory of the chunk, or pages of the spill file mapped
read-only, which the system takes back at will. So a model is saved without ever being whole in memory.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.errors import StorageError
from gemini.memory.chunk import COMPUTE_DTYPES, FilePlane
from gemini.plan.planes import PlaneKind
from gemini.train.guard import ParamHandle, handle_of

if TYPE_CHECKING:
    from gemini.train.engine import Engine


def export_pretrained(
    model: nn.Module, engine: Engine, original: Any, save_directory: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call ``original.save_pretrained`` with mapped weights as its ``state_dict`` (unless the caller gave one)."""
    directory = Path(save_directory)
    if directory.exists() and not directory.is_dir():
        raise StorageError(f"save_pretrained({str(directory)!r}): that is a file, not a directory")
    if len(args) >= 2 or kwargs.get("state_dict") is not None:
        return original.save_pretrained(save_directory, *args, **kwargs)
    directory.mkdir(parents=True, exist_ok=True)
    state = nn.Module.state_dict(model, keep_vars=True)
    views: dict[int, torch.Tensor] = {}
    for name, value in state.items():
        handle = handle_of(value)
        if handle is not None:
            if id(value) not in views:
                views[id(value)] = _mapped(engine, handle, directory)
            state[name] = views[id(value)]
        elif isinstance(value, torch.Tensor):
            state[name] = value.detach().cpu()
    return original.save_pretrained(save_directory, *args, state_dict=state, **kwargs)


def _mapped(engine: Engine, handle: ParamHandle, directory: Path) -> torch.Tensor:
    """The weights in the compute dtype, each param a storage of its own (transformers tells ties by storages)."""
    plane, slot = handle.chunk.weights, handle.slot
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
    dtype = COMPUTE_DTYPES[engine.config.precision]
    with tempfile.TemporaryFile(dir=directory) as file:
        file.truncate(handle.slot.numel * dtype.itemsize)
        mapping = mmap.mmap(file.fileno(), handle.slot.numel * dtype.itemsize)
    mapped = torch.frombuffer(mapping, dtype=torch.uint8).view(dtype)
    at = 0
    for part in engine.by_names.read_parts(handle, PlaneKind.WEIGHTS):
        mapped[at : at + part.numel()].copy_(part)
        at += part.numel()
    return mapped.view(handle.param.shape)
