"""State that ranks load into one optimizer must be the same on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gemini.ranks.agree import Facts, checksum_text, plain
from gemini.ranks.agreement import Point
from gemini.train.params.handle import ParamHandle, handle_of
from gemini.train.params.owner import Owner


def agree_on_state(optimizer: Any, owner: Owner, state: Mapping[str, Any], refusal: BaseException | None) -> None:
    """See that every rank is about to load the same state into managed params, and has nothing against it.

    Raises:
        RankMismatch: on every rank, naming what differs; nothing was changed.
        GeminiError: on every rank, if one refuses; there its ``refusal``.
    """

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

    owner.stepping.company.agree(Point.LOAD_OPTIMIZER, "optimizer.load_state_dict", facts, refusal)


def _facts_of(handle: ParamHandle, state: Mapping[str, Any]) -> dict[str, str]:
    # A param without states says nothing: a rank that has some differs in that they are there.
    values = {}
    for name, value in state.items():
        # Whole tensors go as checksums, numbers as what they say, so that an error can name both.
        is_values = isinstance(value, torch.Tensor) and value.dim() > 0
        values[f"{name} of {handle.name!r}"] = checksum_text(value) if is_values else repr(plain(value))
    return values
