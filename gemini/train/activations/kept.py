"""Blocks of a model that checkpoints which are not computed again in backward: spread evenly, the last one among them.
What autograd saves in them stays, or waits where the inputs of the others do.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from torch import nn

from gemini.planning.trace import kept_among
from gemini.train.modules.changing import hook_around
from gemini.train.modules.reading import compiled_part

_FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"


class _Inside(threading.local):
    """By thread, whether its forward is in a kept block, and how many of them it has entered."""

    kept = False
    number = 0


INSIDE = _Inside()


class _InPlace(NamedTuple):
    """Computes a block where transformers would have it checkpointed, with the same arguments: without a cache too."""

    checkpointing: Any  # what stood in its place

    def __call__(self, function: Any, *args: Any) -> Any:
        return function(*args)


class KeptBlocks:
    """``number`` blocks of ``model``, or all. Raises ValueError for a model that has no flags of blocks."""

    def __init__(self, model: nn.Module, number: int):
        numbered = [(n, m) for n, m in model.named_modules() if hasattr(m, _FLAG) and n.rpartition(".")[2].isdecimal()]
        around = {name[:at] for name, _ in numbered for at, letter in enumerate(name) if letter == "."}
        blocks = [module for name, module in numbered if name not in around]
        self.blocks = [blocks[place] for place in kept_among(len(blocks), number)]
        if not self.blocks:
            raise ValueError(
                f"kept_blocks={number}: {type(model).__name__} has no numbered blocks with a flag `{_FLAG}` of their "
                "own, so it cannot be told which of them to compute again. Leave kept_blocks out"
            )
        self._told: set[int] = set()  # blocks whose flags are down, by their place here
        self._compiled: list[Any] = []  # by their place, what was compiled when they were hooked
        self.handles: list[Any] = []

    def keep(self, model: nn.Module) -> None:
        """Keep them in each forward of ``model``, which this does not hold."""
        self.handles.append(model.register_forward_pre_hook(self._tell, prepend=True))
        self._tell()

    def _tell(self, *_: Any) -> None:
        """Before each forward: the program may have switched checkpointing on since, or compiled blocks."""
        INSIDE.kept = False  # where an interrupt has ended a forward
        if (compiled := [compiled_part(block) for block in self.blocks]) != self._compiled:
            while len(self.handles) > 1:  # all but that of this
                self.handles.pop().remove()
            for block in self.blocks:
                self.handles += hook_around(block, _enter, _leave)
            self._compiled = compiled
        for place, block in enumerate(self.blocks):
            if (function := block.__dict__.get(_FUNCTION)) is None:
                if getattr(block, _FLAG):
                    self._told.add(place)
                    setattr(block, _FLAG, False)
            elif not isinstance(function, _InPlace):
                block.__dict__[_FUNCTION] = _InPlace(function)

    def take_away(self) -> None:
        """Let the model checkpoint as it did."""
        while self.handles:
            self.handles.pop().remove()
        for place, block in enumerate(self.blocks):
            if isinstance(function := block.__dict__.get(_FUNCTION), _InPlace):
                block.__dict__[_FUNCTION] = function.checkpointing
            elif place in self._told:
                setattr(block, _FLAG, True)


def _enter(module: nn.Module, args: Any) -> None:
    INSIDE.kept, INSIDE.number = True, INSIDE.number + 1


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    INSIDE.kept = False
