"""The model behind a managed param, as far as a param asks it for anything."""

from __future__ import annotations

from typing import Any, Protocol

from gemini.config import GeminiConfig
from gemini.errors import ParamAccessError
from gemini.memory.store import ChunkStore
from gemini.train.params.by_name import ByName
from gemini.train.params.handle import ParamHandle, ParamSet
from gemini.train.step import StepState


class Owner(Protocol):
    """The model as its params know it, weakly: a param that a program keeps must not keep chunks."""

    config: GeminiConfig
    params: ParamSet
    store: ChunkStore
    state: StepState
    by_names: ByName
    # Of the passes, which are in a room above: `StrayReads`, `BackwardPass`, `Stepping`.
    reads: Any
    backward: Any
    stepping: Any


def owner_of(handle: ParamHandle) -> Owner:
    """Return what manages a param."""
    owner: Owner | None = handle.owner()
    if owner is None:
        raise ParamAccessError(f"the model that managed {handle.name!r} was deleted; its params hold nothing any more")
    return owner
