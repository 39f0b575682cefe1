"""What is known of one managed param: its place in its chunk, its gradient, its count of updates."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.kernels import Sums
from gemini.memory.chunks.chunk import Chunk
from gemini.planning.layout import Part, Slot
from gemini.train.params.stepper import Stepper


class Leftover(IntEnum):
    """What a plain loop's ``p.grad`` would hold of earlier steps, while no gradient is here."""

    NOTHING = 0
    """Nothing: there was none since ``zero_grad()``."""
    USED = 1
    """One that a step has used, or skipped."""
    ZEROS = 2
    """Zeros, by ``zero_grad(set_to_none=False)``: the next step updates with them what gets no other."""


@dataclass(eq=False, slots=True)
class ParamHandle:
    """Reachable from the param as ``param._gemini``."""

    name: str
    names: tuple[str, ...]
    param: nn.Parameter
    chunk: Chunk
    slot: Slot
    """Its place in the gathered weights."""
    part: Part
    """Its place in the planes of this rank: all of the slot in one process."""
    owner: weakref.ref[Any]
    """The model that manages it, as :func:`gemini.train.params.owner.owner_of` knows it."""
    hook: Any = None
    """The post-accumulate-grad hook, if the param is trained."""
    view: torch.Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    """The gathered weights of the param, in its shape. Only to be read while its chunk is gathered."""
    version: int = 0
    """torch's count of writes to the param when it became ordinary."""
    fingerprint: tuple[int, int] | None = None
    """Of the weights when ``param.data`` was asked for last, in a forward or backward."""
    siblings: tuple[ParamHandle, ...] = ()
    """Params with the same count of writes, this one too: views of one tensor that each was made a parameter."""
    num_writes: int = 0
    """How often Gemini has changed the weights: a graph from before must not be used after."""
    poisoned: bool = False
    """``param.data`` is NaN: its weights are not gathered."""
    trained: bool = False
    """``requires_grad`` as of the last look; flips at rest are noticed by the guard."""
    norm_sums: Sums | None = None
    """Sums of squares of the gradient's norm tiles, on a device still perhaps; None while there is no gradient."""
    leftover: Leftover = Leftover.NOTHING
    num_steps: int = 0
    """Updates this param has had (Adam's bias correction); a skipped step leaves it."""
    in_backward: int = -1
    """The number of the backward in which the gradient arrived last."""
    optimizer: weakref.ref[Stepper] | None = None
    """The one that the param was given to, beside ``_owners``: every step asks for it."""
    clip: float = 1.0
    """What clipping of some params (one optimizer's of several) makes of the gradient; 1 while there is none."""
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    """States of it that are no planes, in host memory."""
    clip_folded: float = 1.0
    """The part of ``clip`` that is of an earlier step, and so of the gradient itself to whoever reads it."""

    @property
    def has_grad(self) -> bool:
        return self.norm_sums is not None

    @property
    def takes_step(self) -> bool:
        """Whether the next ``optimizer.step()`` updates it."""
        return self.norm_sums is not None or self.leftover is Leftover.ZEROS

    def refuse_used_gradient(self) -> None:
        """A gradient arrives where a step has used the last one, and nobody called ``zero_grad()`` since.

        Raises:
            GeminiError: unless its optimizer steps inside backward, where every gradient is used and gone.
        """
        stepper = None if self.optimizer is None else self.optimizer()
        if stepper is None or not stepper.step_in_backward:
            raise GeminiError(
                f"a gradient of {self.name!r} arrives, and optimizer.step() has used the one before it without "
                "zero_grad() since: torch would add the two up, and Gemini keeps no gradient that a step has used. "
                "Call optimizer.zero_grad() after every optimizer.step()"
            )


def handle_of(param: Any) -> ParamHandle | None:
    """The handle of a managed param, else None."""
    return getattr(param, "_gemini", None)


@dataclass
class ParamSet:
    """The managed params of one model, in its order."""

    handles: list[ParamHandle]
    by_chunk: dict[int, list[ParamHandle]]
    """By the index of their chunk."""

    def forget(self) -> None:
        """They are ordinary params again, and nobody's here."""
        self.handles.clear()
