"""Whether a model that is to be cut is the same on all ranks, and by which sizes it can be."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gemini.ranks.facts import checksum_of
from gemini.ranks.mesh import names_of, size_of


def first_differing(model: nn.Module, mesh: DeviceMesh, dim: str) -> str | None:
    """The first param that is not the same on all ranks along ``dim``."""
    said = [(name, tuple(param.shape), checksum_of(param.data)) for name, param in model.named_parameters()]
    everyone: list[Any] = [None] * size_of(mesh, dim)
    dist.all_gather_object(everyone, said, group=mesh.get_group(names_of(mesh).index(dim)))
    for of_param in zip(*everyone, strict=False):
        if any(other != of_param[0] for other in of_param):
            return str(of_param[0][0])
    return None if len({len(said) for said in everyone}) == 1 else "the number of params"


def sizes_that_divide(number: int) -> str:
    """Those above one, in words for an error."""
    return ", ".join(str(n) for n in range(2, min(number, 64) + 1) if number % n == 0) or "none"
