"""pytest: the engine's own tests on a CUDA device, none of them changed (``-p tests.fakegpu.as_standin``).

Where a test asks for ``device="standin"`` it gets the GPU of this process. Those tests compute with tensors of the CPU:
what a managed model is called with goes to the GPU, and what it returns comes back, by copies that autograd records.
A test that makes a ``StandinDevice`` of its own, with a clock or a gate, still gets just that.
"""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import gemini
import tests.standin_device
from gemini.memory.devices.cuda import CudaDevice
from gemini.memory.devices.device import register_device
from gemini.tiers import Tier
from tests.world import world_of

ON_CARD = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


class OnCard(CudaDevice):
    """The GPU under the stand-in's name, with the memory that the stand-in pretends to have."""

    torch_device = ON_CARD

    def __init__(self) -> None:
        super().__init__(ON_CARD)

    def free_bytes(self) -> int:
        return tests.standin_device.StandinDevice().free_bytes()

    def beside_bytes(self, *_: Any) -> int:
        return 0  # budgets are of a few KiB

    def begin_budget(self, budget: int | None, reserved: int, freed: int, *, limited: bool) -> None:
        pass


def _moved(tree: Any, device: torch.device) -> Any:
    if is_dataclass(tree) and not isinstance(tree, (type, dict)):
        for name in (field.name for field in fields(tree)):
            setattr(tree, name, _moved(getattr(tree, name), device))
        return tree
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tree)


def _install() -> None:
    register_device("standin", OnCard)
    call = gemini.GeminiDDP.__call__

    @wraps(call)
    def called(model: Any, *args: Any, **kwargs: Any) -> Any:
        device = world_of(model).device
        if not isinstance(device, OnCard):
            return call(model, *args, **kwargs)
        args, kwargs = _moved((args, kwargs), device.torch_device)
        return _moved(call(model, *args, **kwargs), torch.device("cpu"))

    gemini.GeminiDDP.__call__ = called  # type: ignore[method-assign]


assert OnCard.tier is Tier.GPU
_install()
