"""Tensors inside what modules take and return: tuples, lists, dicts, ModelOutputs, dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def iter_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in a module's output: tensors, containers of them, ModelOutputs, dataclasses."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    if isinstance(tree, torch.Tensor):
        return [tree]
    map_tensors(tree, note)
    return found


def map_tensors(tree: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``tree`` with ``fn`` applied to its tensors. Containers of unknown types (caches) are returned as they are."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, dict):  # ModelOutput is one, and keeps attributes in step when items are set
        for key, value in list(tree.items()):
            mapped = map_tensors(value, fn)
            if mapped is not value:
                tree[key] = mapped
        return tree
    if isinstance(tree, tuple):
        values = [map_tensors(value, fn) for value in tree]
        if all(new is old for new, old in zip(values, tree, strict=True)):
            return tree
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list):
        return [map_tensors(value, fn) for value in tree]
    if is_dataclass(tree) and not isinstance(tree, type):
        changed = {
            f.name: mapped
            for f in fields(tree)
            if (mapped := map_tensors(getattr(tree, f.name), fn)) is not getattr(tree, f.name)
        }
        return replace(tree, **changed) if changed else tree
    return tree
