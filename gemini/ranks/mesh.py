"""A mesh by the names of its dims: what each dim divides, and which ranks differ in some of them alone.

    pp            stages of the model                   dp            chunks of it (ZeRO-3)
    dp_replicate  nothing: each replica has all of it   cp            every sequence, and chunks
    tp            matrices of every layer               ep            experts

Chunks are divided over ``dp`` and ``cp`` together. Ranks that differ in ``pp``, ``tp`` or ``ep`` have other params:
other *slices* of the model; those of ``ep`` other experts, and all else alike. Ranks that differ in ``dp_replicate``,
``dp`` or ``ep`` have other samples, all others the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gemini.ranks import launch

NAMES = ("pp", "dp_replicate", "dp", "cp", "tp", "ep")
_SAME = {"replicate": "dp_replicate", "dp_shard": "dp", "shard": "dp", "fsdp": "dp", "sp": "cp"}
"""What torch's FSDP2 examples and accelerate call them."""
SHARDING = ("dp", "cp")
SLICING = ("pp", "tp", "ep")
SAMPLING = ("dp_replicate", "dp", "ep")


class DataRank(NamedTuple):
    """Which part of the data a process reads: part ``rank`` of ``world``."""

    rank: int
    world: int


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """The dims of ``mesh`` in our names. Without names one dim shards; of two the first replicates.

    Raises:
        ValueError: for names that mean nothing here or the same twice, for three dims or more without names, and for
            ``ep`` beside ``tp``.
    """
    given = mesh.mesh_dim_names
    if given is None:
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"mesh has {mesh.ndim} dimensions without names. Without names one dimension shards, and of two the "
                f"first replicates. Name them: init_device_mesh(..., mesh_dim_names=), any of {', '.join(NAMES)}"
            )
        return ("dp_replicate", "dp")[-mesh.ndim :]
    names = tuple(_SAME.get(name, name) for name in given)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(
            f"mesh has a dimension called {unknown[0]!r}: name its dimensions any of {', '.join(NAMES)} (it has "
            f"{', '.join(given)})"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"mesh has dimensions {', '.join(given)}, two of which mean the same: name each once")
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    if sizes.get("ep", 1) > 1 and sizes.get("tp", 1) > 1:
        raise ValueError(
            f"mesh has ep={sizes['ep']} and tp={sizes['tp']}: ep cannot be combined with tp. Use "
            "dp in place of one of them"
        )
    return names


def size_of(mesh: DeviceMesh, *names: str) -> int:
    """How many ranks there are along these dims; 1 along dims that the mesh does not have."""
    size = 1
    for name, along in zip(names_of(mesh), mesh.mesh.shape, strict=True):
        size *= along if name in names else 1
    return size


def place_in(mesh: DeviceMesh, *names: str) -> int:
    """The number of this rank along these dims together."""
    return ranks_along(mesh, *names).index(dist.get_rank())


def ranks_along(mesh: DeviceMesh, *names: str) -> list[int]:
    """The global ranks, ascending, that differ from this one in these dims alone.

    Raises:
        ValueError: if this process is not in the mesh.
    """
    here = (mesh.mesh == dist.get_rank()).nonzero()
    if not len(here):
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh, which has ranks {mesh.mesh.flatten().tolist()}")
    index: tuple[Any, ...] = tuple(
        slice(None) if name in names else int(at) for name, at in zip(names_of(mesh), here[0].tolist(), strict=True)
    )
    return sorted(torch.as_tensor(mesh.mesh[index]).flatten().tolist())


def data_rank(mesh: DeviceMesh | None = None) -> DataRank:
    """Which part of the data this process must read: its number among the readers, and how many readers there are.

        rank, world = gemini.data_rank(mesh)
        sampler = DistributedSampler(data, num_replicas=world, rank=rank, drop_last=True)

    Ranks that differ only in ``tp``, ``pp`` or ``cp`` must read the same samples, so they get the same number. Without
    a mesh every process that torchrun or srun has started reads its own part; a single process reads everything.

    Raises:
        ValueError: for a mesh that :class:`gemini.GeminiDDP` would refuse.
    """
    if mesh is None:
        if not (dist.is_available() and dist.is_initialized()):
            return DataRank(launch.rank(), launch.num_processes())
        return DataRank(dist.get_rank(), dist.get_world_size())
    return DataRank(place_in(mesh, *SAMPLING), size_of(mesh, *SAMPLING))
