"""Ranks that wait for each other's disks: a group of its own, whose messages do not meet those of training."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from gemini.patches import register
from gemini.ranks.subgroup import end_subgroup, make_subgroup
from gemini.ranks.wire import guarded

T = TypeVar("T")

_open: weakref.WeakSet[WaitingGroup] = weakref.WeakSet()


class WaitingGroup:
    """A group of some ranks, made by all of them at the first use.

    It is another group than those of training, whose messages go on while a checkpoint is written behind it, and waits
    as long as torch does by default (half an hour), whatever was chosen to notice a rank that hangs in a step.

    Args:
        global_ranks: ascending, with this one.
    """

    def __init__(self, global_ranks: Sequence[int]):
        self._ranks = list(global_ranks)
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None for a rank alone."""
        if self._group is None and len(self._ranks) > 1:
            self._group = make_subgroup(self._ranks, "gloo")
            _open.add(self)
        return self._group

    def wait_for_all(self, doing: str) -> None:
        """Let one rank work on something long, while the others wait here.

        Raises:
            RankLost: if one does not come.
        """
        if self.group is not None:
            guarded(doing, lambda: dist.barrier(self.group))

    def exchange(self, value: T, doing: str) -> list[T]:
        """What every rank gives, in their order: plain values and tensors on the CPU.

        Raises:
            RankLost: if one does not come.
        """
        if self.group is None:
            return [value]
        heard: list[Any] = [None] * len(self._ranks)
        guarded(doing, lambda: dist.all_gather_object(heard, value, group=self.group))
        return heard

    def close(self) -> None:
        """The model ends."""
        group, self._group = self._group, None  # its threads live as long as somebody refers to it
        if group is not None:
            end_subgroup(group)


@partial(register, "atexit.register")
def end_all() -> None:
    """A thread of gloo may be the last to let go of a tensor, which takes the interpreter: they end before it does."""
    for waiting in list(_open):
        waiting.close()
