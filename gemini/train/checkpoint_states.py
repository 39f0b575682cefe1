"""What a checkpoint keeps besides masters and moments: optimizer groups, plain params, buffers, RNG states."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gemini.train.guard import handle_of
from gemini.train.optimizer import HybridAdam


def groups_of(optimizer: HybridAdam) -> list[dict[str, Any]]:
    """The groups with params by name; params that are not managed by their number."""
    groups, index = [], 0
    for group in optimizer.param_groups:
        names = []
        for param in group["params"]:
            handle = handle_of(param)
            names.append(handle.name if handle is not None else f"#{index}")
            index += 1
        groups.append({**group, "params": names})
    return groups


def plain_states(optimizer: HybridAdam) -> dict[str, Any]:
    """Params of the optimizer that are not managed, with their states, by number."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"#{i}": {"param": p.detach(), "state": dict(optimizer.state[p])}
        for i, p in enumerate(params)
        if handle_of(p) is None
    }


def load_plain_states(optimizer: HybridAdam, states: dict[str, Any]) -> None:
    """Put back what :func:`plain_states` gave."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    with torch.no_grad():
        for key, saved in states.items():
            param = params[int(key[1:])]
            param.copy_(saved["param"])
            optimizer.state[param] = saved["state"]


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors, as ``state_dict`` has them."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def rng_states() -> dict[str, Any]:
    """The random states of this process: Python's, torch's, numpy's if it is loaded."""
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, torch.tensor(internal, device="cpu"), gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        states["numpy"] = [name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached]
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Put back what :func:`rng_states` gave."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states:
        import numpy

        name, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
