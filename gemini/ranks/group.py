"""Who shares one model: the process groups, from what the user gave, from an existing group, or from torchrun.

Each chunk is divided among the ranks of a *shard group*. With a 2-D mesh there are several such groups, *replicas*: a
model is sharded within each (a node, say) and gradients are summed up across them. Our own groups are made beside the
user's, so that messages of the user and of Gemini never meet.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gemini.errors import RankMismatch
from gemini.ranks import launch
from gemini.ranks.meeting import start_group
from gemini.ranks.subgroup import end_subgroup, make_subgroup
from gemini.ranks.wire import Tag, Wire


@dataclass(frozen=True)
class Ranks:
    """The ranks of one model as one of them sees them.

    Attributes:
        wire: among the ranks that divide chunks (the shard group).
        replicas: among the ranks that hold the same shard, or None without replicas.
        everyone: among all ranks of the model.
        collective: the library's group for CUDA tensors of the shard group (NCCL); None on the CPU.
        local_size: ranks of the model on this machine, who divide its memory and disk.
    """

    wire: Wire
    replicas: Wire | None
    everyone: Wire
    collective: dist.ProcessGroup | None
    local_size: int

    @property
    def rank(self) -> int:
        return self.wire.rank

    @property
    def size(self) -> int:
        return self.wire.size

    @property
    def num_replicas(self) -> int:
        return 1 if self.replicas is None else self.replicas.size

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what only one may write."""
        return self.everyone.rank == 0

    def close(self) -> None:
        """The model ends: so do the groups that were made for it, each with threads and connections of its own."""
        for group in {wire.group for wire in (self.wire, self.replicas, self.everyone) if wire is not None}:
            end_subgroup(group)

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Compare ``facts`` (name to plain value) with the other ranks.

        Raises:
            RankMismatch: on every rank, naming the first fact that differs and both values.
        """
        texts = self.everyone.exchange_texts(json.dumps(facts, default=str), "the comparison of ranks at the start")
        first = json.loads(texts[0])
        for rank, text in enumerate(texts):
            other = json.loads(text)
            for name in {**first, **other}:
                if first.get(name) != other.get(name):
                    raise RankMismatch(
                        f"rank {rank} was started with another {name} than rank 0: {_differing(first, other, name)}. "
                        "All ranks must run the same program with the same settings on the same versions"
                    )

    def smallest(self, values: list[int]) -> list[int]:
        """The minimum over all ranks of each value."""
        everyone = self.everyone.swap(Tag.VALUES, torch.tensor(values, dtype=torch.int64, device="cpu"), "the start")
        return [int(value) for value in everyone.amin(0)]

    def take_from_first(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Make ``tensors`` those of rank 0, as DistributedDataParallel does; only those that differ are sent.

        Returns the names of those that differed on any rank.
        """
        sums = torch.tensor([checksum_of(tensor) for tensor in tensors.values()], dtype=torch.int64, device="cpu")
        everyone = self.everyone.swap(Tag.VALUES, sums, "the comparison of weights")
        differing = (everyone != everyone[0]).any(0).tolist()
        names = [name for name, differs in zip(tensors, differing, strict=True) if differs]
        for name in names:
            tensor = tensors[name]
            on_cpu = tensor.detach().to("cpu").contiguous()
            self.everyone.broadcast(Tag.VALUES, on_cpu, 0, f"sending {name} of rank 0 to all")
            if on_cpu.data_ptr() != tensor.data_ptr() and self.everyone.rank != 0:
                tensor.detach().copy_(on_cpu)
        return names


def _differing(first: Mapping[str, Any], other: Mapping[str, Any], name: str) -> str:
    a, b = first.get(name), other.get(name)
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [key for key in {**a, **b} if a.get(key) != b.get(key)]
        return f"{len(keys)} differ, the first is {keys[0]!r}: {b.get(keys[0])} against {a.get(keys[0])}"
    return f"{b!r} against {a!r}"


def checksum_of(tensor: torch.Tensor) -> int:
    """Of the bits of its values, in 32 bits; not of its dtype and shape."""
    data = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().view(-1)
    return zlib.crc32(data.view(torch.uint8).numpy().data) if data.numel() else 0


def join(
    process_group: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None, *, cuda: bool = False
) -> Ranks | None:
    """The ranks this process shares a model with; None if it is alone.

    ``mesh``: one dimension shards, of two the first replicates and the second shards (as in torch's FSDP2). Without
    both arguments: the default process group, and if there is none but torchrun has started this process, it is made.

    Raises:
        ValueError: for a mesh of three dimensions, or both arguments.
    """
    if mesh is not None:
        if process_group is not None:
            raise ValueError("give GeminiDDP a process_group or a mesh, not both")
        if mesh.ndim not in (1, 2):
            raise ValueError(f"mesh has {mesh.ndim} dimensions: one shards; of two the first replicates")
        rows = mesh.mesh.view(1, -1) if mesh.ndim == 1 else mesh.mesh
        return _make(rows.tolist(), mesh.get_group(mesh.ndim - 1), cuda=cuda)
    if process_group is None:
        if not dist.is_initialized() and not _start_default(cuda=cuda):
            return None
        process_group = dist.group.WORLD
        assert process_group is not None
    return _make([dist.get_process_group_ranks(process_group)], process_group, cuda=cuda)


def _start_default(*, cuda: bool) -> bool:
    """Make the default process group of a process that torchrun has started, if there are others."""
    if launch.num_processes() == 1 or not dist.is_available():
        return False
    start_group(dist.default_pg_timeout, cuda=cuda)
    return True


def _make(rows: list[list[int]], parent: dist.ProcessGroup, *, cuda: bool) -> Ranks | None:
    """``rows``: the global ranks of each replica."""
    if len(rows) * len(rows[0]) == 1:
        return None
    me = dist.get_rank()
    row = next(row for row in rows if me in row)
    column = [other[row.index(me)] for other in rows]
    everyone = _wire(sorted(rank for other in rows for rank in other), parent)
    wire = everyone if len(rows) == 1 else _wire(row, parent)
    replicas = None if len(rows) == 1 else _wire(column, parent)
    collective = None
    if cuda:
        collective = parent if _has_nccl(parent) else make_subgroup(row, "nccl")
    return Ranks(wire, replicas, everyone, collective, _count_local(everyone))


def _wire(ranks: list[int], parent: dist.ProcessGroup) -> Wire:
    return Wire(make_subgroup(ranks, "gloo", _timeout(parent)))


def _timeout(group: dist.ProcessGroup) -> Any:
    """How long the user's own group waits; None (torch's default) where torch does not tell."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError):
            continue
    return None


def _has_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in dist.get_backend_config(group)


def _count_local(everyone: Wire) -> int:
    """Ranks of the model on this machine: as torchrun says, else those with the same host and boot."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return min(int(os.environ["LOCAL_WORLD_SIZE"]), everyone.size)
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            here = file.read().strip()
    except OSError:
        here = ""
    names = everyone.exchange_texts(f"{os.uname().nodename} {here}", "the count of ranks on this machine")
    return names.count(names[everyone.rank])
