"""What a step takes on the machine it is meant for that its tensors alone do not show, each item with its reason."""

from __future__ import annotations

from typing import Any

import torch


class Target:
    """The CPU: an allocation is as large as its tensor."""

    name = "cpu"

    def allocated_bytes(self, num_bytes: int) -> int:
        """What the allocator takes for a storage."""
        return num_bytes

    def temporary_bytes(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> int:
        """What the kernel of one operation allocates and frees again before it returns."""
        return 0


class Cuda(Target):
    """A CUDA device. Not measured on a card."""

    name = "cuda"


TARGETS = {"cpu": Target, "cuda": Cuda}


def make_target(name: str | None) -> Target:
    """By name; by default "cuda" if there is one.

    Raises:
        ValueError: for another name.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]()
