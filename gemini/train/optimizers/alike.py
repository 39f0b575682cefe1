"""State that ranks load into one optimizer must be the same on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gemini.ranks.agree import Facts, checksum_text, plain
from gemini.ranks.agreement import Point
from gemini.train.params.handle import ParamHandle, handle_of
from gemini.train.passes.stepping import Stepping


def agree_on_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """See that every rank is about to load the same state into managed params; this one has nothing against it.

    Raises:
        RankMismatch: on every rank, naming what differs; nothing was changed.
    """
    stepping = _stepping_of(optimizer)
    if stepping is None:
        return

    def facts() -> Facts:
        values: dict[str, str] = {}
        for index, (group, loaded) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
            if all(handle_of(param) is None for param in group["params"]):
                continue
            # Hyperparameters alone: labels may differ, and no update depends on them.
            for name in optimizer.defaults:
                values[f"{name} of param group {index}"] = repr(plain(loaded.get(name, "not given")))
            for key, param in zip(loaded["params"], group["params"], strict=True):
                handle = handle_of(param)
                if handle is not None:
                    values.update(_facts_of(handle, state["state"].get(key, {})))
        return Facts(values)

    stepping.company.agree(Point.LOAD_OPTIMIZER, "optimizer.load_state_dict", facts)


def _facts_of(handle: ParamHandle, state: Mapping[str, Any]) -> dict[str, str]:
    # A param without states says nothing: a rank that has some differs in that they are there.
    values = {}
    for name, value in state.items():
        # Whole tensors go as checksums, numbers as what they say, so that an error can name both.
        is_values = isinstance(value, torch.Tensor) and value.dim() > 0
        values[f"{name} of {handle.name!r}"] = checksum_text(value) if is_values else repr(plain(value))
    return values


@contextmanager
def told_to_all(optimizer: Any, doing: str) -> Iterator[None]:
    """What is raised in the block, before :func:`agree_on_state`, is told to all ranks."""
    stepping = _stepping_of(optimizer)
    before = 0 if stepping is None else stepping.company.num_meetings
    try:
        yield
    except Exception as e:
        # If the block has met the other ranks, they have heard of it: a second meeting would wait for ever.
        if stepping is not None and stepping.company.num_meetings == before:
            stepping.company.agree(Point.LOAD_OPTIMIZER, doing, refusal=e)
        raise


def _stepping_of(optimizer: Any) -> Stepping | None:
    owner = optimizer.owner()
    return None if owner is None else owner.stepping
