"""The model behind a managed param, as far as a param asks it for anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gemini.config import GeminiConfig
from gemini.errors import ParamAccessError
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.store import ChunkStore
from gemini.train.params.by_name import ByName
from gemini.train.params.handle import ParamHandle, ParamSet
from gemini.train.step import StepState


class Reads(Protocol):
    """Serves operations that read params outside of the module that they belong to."""

    def in_call(self, func: Callable[..., Any], args: Any, kwargs: Any, handles: list[ParamHandle]) -> Any:
        """Run an operation while the model computes."""

    def outside(self, func: Callable[..., Any], args: Any, kwargs: Any, handles: list[ParamHandle]) -> Any:
        """Run an operation that autograd records, while no module computes."""

    def opened(self, chunks: Iterable[Chunk]) -> AbstractContextManager[None]:
        """Keep ``chunks`` gathered around an operation that reads them, while no module computes."""


class Probe(Protocol):
    """Looks at gradients before they are kept."""

    def take(self, param: Any, grad: Any) -> Any:
        """Return what is kept in place of a gradient; None for nothing."""


class TakesGradients(Protocol):
    """Takes every gradient."""

    probe: Probe | None

    def take_grad(self, handle: ParamHandle) -> None:
        """Move a gradient that autograd has accumulated in the param into its chunk. Called on autograd's thread."""


GradHook = Callable[[ParamHandle], Callable[[Any], None]]
"""Makes, for a param, what autograd calls when its gradient is complete."""


class Owner(Protocol):
    """The model as its params know it, weakly: a param that a program keeps must not keep chunks."""

    config: GeminiConfig
    params: ParamSet
    store: ChunkStore
    state: StepState
    by_names: ByName
    reads: Reads
    backward: TakesGradients
    stepping: Any
    """A :class:`gemini.train.passes.stepping.Stepping`, which is in a room above."""


def owner_of(handle: ParamHandle) -> Owner:
    """Return what manages a param.

    Raises:
        ParamAccessError: if its model was deleted.
    """
    owner: Owner | None = handle.owner()
    if owner is None:
        raise ParamAccessError(f"the model that managed {handle.name!r} was deleted; its params hold nothing any more")
    return owner
