"""Writes to weights, by torch's own count of them.

torch counts writes to a tensor, those through its views as well. The count is compared when a param is guarded, before
its weights are evicted and before they are updated: a write that is none of ours never reached the master.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gemini.train.params.handle import ParamHandle, handle_of

_FINGERPRINT_TILE = 2**18
"""Bytes of weights at a time, each of which takes 16 for the moment."""


def note_writes(handles: Iterable[ParamHandle]) -> None:
    """The weights of these params change now. For autograd that is a write in place, as an update is in torch: a
    backward of a forward from before that reads them is refused.
    """
    handles = list(handles)
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version([handle.param for handle in handles])
        for handle in handles:
            for sibling in handle.siblings:
                sibling.version += 1
            handle.num_writes += 1
        for handle in handles:
            handle.version = handle.param._version


def find_siblings(handles: list[ParamHandle]) -> None:
    """torch counts writes by the tensor that a parameter was made of: ``nn.Parameter(w[:8])`` and
    ``nn.Parameter(w[8:])`` have one count. It has no name for it, so count one write to all: what has more than one
    since is such a param.
    """
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]

        def counted(once: list[ParamHandle]) -> list[int]:
            before = [handle.param._version for handle in handles]
            torch.autograd.graph.increment_version([handle.param for handle in once])
            return [handle.param._version - old for handle, old in zip(handles, before, strict=True)]

        shared = [handle for handle, number in zip(handles, counted(handles), strict=True) if number > 1]
        for handle in shared:
            if not handle.siblings:
                family = tuple(h for h, number in zip(handles, counted([handle]), strict=True) if number)
                for sibling in family:
                    sibling.siblings = family
        for handle in handles:
            handle.version = handle.param._version


def written_to(handles: Iterable[ParamHandle]) -> list[ParamHandle]:
    """Those that were written to since the last look, by torch's count: as params, or through views of them."""
    written = []
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        for handle in handles:
            if handle.param._version != handle.version and notes_a_write(handle):
                written.append(handle)
    return written


def notes_a_write(handle: ParamHandle) -> bool:
    """torch has counted one. It may have changed nothing: Gemma 3n clamps ``weight.data`` in each of its forwards."""
    handle.version = handle.param._version
    known = handle.fingerprint is not None and not handle.poisoned and handle.chunk.gathered
    return not known or _fingerprint_of(handle) != handle.fingerprint


def _fingerprint_of(handle: ParamHandle) -> tuple[int, int]:
    """Two sums over the bytes of the weights, of these themselves and times where they stand: tile by tile, so that it
    takes some MiB beside them and not many times their size.
    """
    flat = handle.view.detach().reshape(-1).view(torch.uint8)
    plain, placed = 0, 0
    for start in range(0, flat.numel(), _FINGERPRINT_TILE):
        bits = flat[start : start + _FINGERPRINT_TILE].to(torch.int64)
        tile = int(bits.sum())
        plain += tile
        placed += start * tile + int(bits.mul_(torch.arange(1, bits.numel() + 1, device=bits.device)).sum())
    return plain, placed


GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _data_of(param: nn.Parameter) -> torch.Tensor:
    handle = handle_of(param)
    if handle is None:
        return GET_DATA(param)
    view = param.detach()
    if not handle.poisoned and handle.chunk.gathered and param._version == handle.version:
        handle.fingerprint = _fingerprint_of(handle)
    return view


# torch counts no writes to param.data, and would hide them from us. Those to param.detach() are counted with the
# param's, and the two are the same otherwise. There is no other way to see ``param.data`` of an ordinary nn.Parameter.
nn.Parameter.data = property(_data_of, SET_DATA, doc=torch.Tensor.data.__doc__)  # type: ignore[assignment]
