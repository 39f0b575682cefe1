"""Params become ordinary ones, for who computes with them, and guarded again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from gemini.errors import ParamAccessError
from gemini.train.params.guard import ManagedParameter, nan_of
from gemini.train.params.handle import ParamHandle
from gemini.train.params.versions import SET_DATA, notes_a_write


def expose(handles: list[ParamHandle]) -> list[ParamHandle]:
    """Make params of gathered chunks ordinary parameters; returns those that were written to since the last look."""
    written = []
    for handle in handles:
        param = handle.param
        param.__class__ = nn.Parameter
        if param._version != handle.version and notes_a_write(handle):
            written.append(handle)
        if handle.poisoned:
            param.data = handle.view
            handle.poisoned = False
            handle.version = param._version
    return written


class Hidden(NamedTuple):
    """What :func:`hide` found."""

    written: list[ParamHandle]
    """Params that were written to while they were ordinary ones."""
    cast: list[ParamHandle]
    """Params that were given the same values in other memory, which they keep until the model is at rest."""


def hide(handles: list[ParamHandle]) -> Hidden:
    """Guard params: nobody computes with them now."""
    written, cast = list[ParamHandle](), list[ParamHandle]()
    for handle in handles:
        param = handle.param
        if param._version != handle.version and notes_a_write(handle):
            written.append(handle)
        handle.fingerprint = None
        if not handle.poisoned and param.data_ptr() != handle.view.data_ptr():
            if _is_cast(handle):
                cast.append(handle)
            else:
                param.data = handle.view
                handle.version = param._version
                written.append(handle)
        param.__class__ = ManagedParameter
    return Hidden(written, cast)


def poison(handles: list[ParamHandle]) -> None:
    """Guard params whose weights are not gathered. What reads past the guard (``torch.tensor(p)``) finds NaN."""
    for handle in handles:
        param = handle.param
        param.__class__ = nn.Parameter  # the guard would refuse the next line
        param.data = nan_of(param.dtype, param.device).expand(param.shape)
        param.__class__ = ManagedParameter
        handle.poisoned = True


def undo_writes(handle: ParamHandle) -> None:
    """An ordinary param is a view of its window again, and what was written until now is no write."""
    handle.param.data = handle.view
    handle.version = handle.param._version


def bring_back(handles: Iterable[ParamHandle]) -> None:
    """What was cast inside a forward is a view of its window again."""
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        for handle in handles:
            if not handle.poisoned and handle.param.data_ptr() != handle.view.data_ptr():
                SET_DATA(handle.param, handle.view)


def _is_cast(handle: ParamHandle) -> bool:
    """Whether a param that was given other memory has the same values there: from ``module.to(dtype)``, or cuDNN, which
    makes weights contiguous.
    """
    given, view = handle.param.detach(), handle.view
    return given.shape == view.shape and given.device == view.device and torch.equal(given, view.to(given.dtype))


def refuse_written(written: list[ParamHandle]) -> None:
    """A param was written to while it was an ordinary parameter: its master does not know, so say so."""
    if written:
        raise ParamAccessError(
            f"the weights of {written[0].name!r} were written to inside a forward, a backward or gathered(): its fp32 "
            "master does not know of it. Write with model.gathered([param], write=True), outside of forward"
        )
