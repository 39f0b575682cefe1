"""Who shares one model: the process groups, from what the user gave, from an existing group, or from torchrun.

Of those with the same params the first one writes what only one may write. Our own groups are made beside the user's,
so that messages of the user and of Gemini never meet.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gemini.ranks import launch
from gemini.ranks.agree import checksum_of
from gemini.ranks.process_groups import WaitingGroup, end_subgroup, make_subgroup, start_group
from gemini.ranks.wire import Tag, Wire

NAMES = ("pp", "dp_replicate", "dp", "cp", "tp", "ep")
_SAME = {"replicate": "dp_replicate", "dp_shard": "dp", "shard": "dp", "fsdp": "dp", "sp": "cp"}
"""Other names of dims, of torch's FSDP2 examples and accelerate."""
# Dims whose ranks divide every chunk among them.
SHARDING = ("dp", "cp")
# Dims whose ranks have other params, or other parts of them.
SLICING = ("pp", "tp", "ep")
# Dims whose ranks read other samples; along all others they compute with the same ones.
SAMPLING = ("dp_replicate", "dp", "ep")


class DataRank(NamedTuple):
    """Which part of the data a process reads: part ``rank`` of ``world``."""

    rank: int
    world: int


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """The dims of ``mesh`` in our names. Without names one dim shards; of two the first replicates. ValueError for
    names that mean nothing here or the same twice, for three dims or more without names, and for ``ep`` beside ``tp``;
    TypeError for what is no mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh= is a DeviceMesh (init_device_mesh of torch makes one), got {type(mesh).__name__}")
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
    return math.prod(along for name, along in zip(names_of(mesh), mesh.mesh.shape, strict=True) if name in names)


def place_in(mesh: DeviceMesh, *names: str) -> int:
    """The number of this rank along these dims together."""
    return ranks_along(mesh, *names).index(dist.get_rank())


def ranks_along(mesh: DeviceMesh, *names: str) -> list[int]:
    """The global ranks, ascending, that differ from this one in these dims alone. ValueError: it is not in the mesh."""
    own_names = names_of(mesh)
    here = (mesh.mesh == dist.get_rank()).nonzero()
    if not len(here):
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh, which has ranks {mesh.mesh.flatten().tolist()}")
    index: tuple[Any, ...] = tuple(
        slice(None) if name in names else int(at) for name, at in zip(own_names, here[0].tolist(), strict=True)
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


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of one job as one of them sees them. Where a mesh has no such ranks, this one is alone on that wire.

    Attributes:
        wire: among the ranks that divide chunks (the shard group).
        replicas: among the ranks that hold the same shard of what is no expert.
        copies: among those that hold the same shard of everything.
        everyone: among all ranks with the same params: those of the model, or of this slice of it. Ranks with other
            experts are among them.
        alike: the same without these.
        job: among all ranks of the mesh; the same as ``everyone`` where no other dim slices the model.
        same_batch: among the slices that compute with this rank's batch (``tp``).
        stages: among those that have the stages of one pipeline (``pp``).
        parts: of a model that Gemini has cut, among those that have its slices and stages and compute with one batch;
            this rank alone of a model that is whole, or cut by the caller.
        context: among the ranks that have parts of the same sequences (``cp``).
        experts: among the ranks that have the other experts of this one's layers (``ep``). They are replicas in what
            is not cut.
        writers: among the ranks that write one checkpoint: those with the same params, or all of the job where Gemini
            has cut the model.
        waiting: these wait for each other here.
        local_size: ranks of the job on this machine, who divide its memory and disk.
        slice_: which slice of the model this rank has, by the dims that slice it; "" for all of it.
    """

    wire: Wire
    replicas: Wire = field(default_factory=Wire)
    copies: Wire = field(default_factory=Wire)
    everyone: Wire
    alike: Wire
    job: Wire
    same_batch: Wire = field(default_factory=Wire)
    stages: Wire = field(default_factory=Wire)
    parts: Wire = field(default_factory=Wire)
    context: Wire = field(default_factory=Wire)
    experts: Wire = field(default_factory=Wire)
    writers: Wire
    waiting: WaitingGroup
    local_size: int
    slice_: str = ""

    @property
    def is_one_model(self) -> bool:
        """Whether all ranks of the job together have one model, of which it is known what each of them has."""
        return self.writers is self.job

    @property
    def is_cut(self) -> bool:
        """Whether Gemini has cut the model: this rank has a slice, a stage, or some of the experts."""
        return self.parts.size > 1 or self.experts.size > 1

    @property
    def slices(self) -> Wire:
        """Among the ranks that have the other slices of this one's params (``tp``, or else ``ep``)."""
        return self.same_batch if self.same_batch.size > 1 else self.experts

    @property
    def shares_params(self) -> bool:
        """Whether another rank has the same params."""
        return self.everyone.size > 1

    def close(self) -> None:
        """The model ends: so do the groups that were made for it, each with threads and connections of its own."""
        # Several wires may have one group, which ends once.
        for group in {wire.group for wire in vars(self).values() if isinstance(wire, Wire) and wire.group}:
            end_subgroup(group)
        self.waiting.close()

    @property
    def are_alone(self) -> bool:
        """Whether this process is all there is."""
        return self.job.size == 1

    def refuse_one_folder(self, doing: str, folder: str) -> None:
        """Slices that the caller has cut are written into folders of their own; all ranks of the job come here. Raises
        ValueError, on every rank, if two slices are to be written into the same one.
        """
        if self.is_one_model or self.are_alone:
            return
        texts = self.job.exchange_texts(json.dumps([folder, self.slice_]), f"comparing the folders of {doing}")
        said = sorted({(other, slice_) for other, slice_ in map(json.loads, texts)})
        for (other, slice_), (following, next_slice) in itertools.pairwise(said):
            if other == following:
                raise ValueError(
                    f"{doing}({other!r}) was asked for by slices {slice_} and {next_slice} of the model, which would "
                    "overwrite each other: give each slice a folder of its own"
                )

    def smallest(self, values: list[int]) -> list[int]:
        """The minimum over all ranks of the job of each value."""
        everyone = self.job.swap(Tag.VALUES, torch.tensor(values, dtype=torch.int64, device="cpu"), "the start")
        return everyone.amin(0).tolist()  # type: ignore[no-any-return]

    def take_from_first(self, tensors: Mapping[str, torch.Tensor], wire: Wire | None = None) -> list[str]:
        """Make ``tensors`` those of the first rank of ``wire``, or of those with the same params, as
        DistributedDataParallel does. Only those that differ are sent; their names.
        """
        wire = wire or self.everyone
        if wire.size == 1:
            return []
        sums = torch.tensor([checksum_of(tensor) for tensor in tensors.values()], dtype=torch.int64, device="cpu")
        # Every rank hears all checksums, so all come to the same names, in the same order, for the broadcasts.
        everyone = wire.swap(Tag.VALUES, sums, "the comparison of weights")
        differing = (everyone != everyone[0]).any(0).tolist()
        names = [name for name, differs in zip(tensors, differing, strict=True) if differs]
        for name in names:
            tensor = tensors[name]
            on_cpu = tensor.detach().to("cpu").contiguous()
            wire.broadcast(Tag.VALUES, on_cpu, 0, f"sending {name} of rank 0 to all")
            # A contiguous tensor on the CPU was received in place; any other gets its values from the copy.
            if on_cpu.data_ptr() != tensor.data_ptr() and wire.rank != 0:
                tensor.detach().copy_(on_cpu)
        return names


def join(
    process_group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    *,
    cuda: bool = False,
    in_parts: bool = False,
) -> Ranks:
    """The ranks this process shares a job with, itself among them: those of ``mesh`` by the names of its dims
    (:func:`names_of`), or of the process group. Without both it is the default one; if there is none but torchrun or
    srun has started this process, it is made. ``in_parts``: Gemini has cut the model over the mesh, into slices or
    stages. Raises ValueError as :func:`names_of`; for a mesh without this process, or both arguments.
    """
    if mesh is not None and process_group is not None:
        raise ValueError("give GeminiDDP a process_group or a mesh, not both")
    if mesh is None:
        if process_group is None and not dist.is_initialized():
            if launch.num_processes() == 1:
                return alone()
            start_group(dist.default_pg_timeout, cuda=cuda)
        process_group = process_group or dist.group.WORLD
        assert process_group is not None
        mesh = DeviceMesh.from_group(process_group, "cpu")
    return _of_mesh(mesh, cuda=cuda, in_parts=in_parts)


def alone() -> Ranks:
    """A process alone."""
    wire = Wire()
    waiting = WaitingGroup(wire.global_ranks)
    return Ranks(wire=wire, everyone=wire, alike=wire, job=wire, writers=wire, waiting=waiting, local_size=1)


def _of_mesh(mesh: DeviceMesh, *, cuda: bool, in_parts: bool) -> Ranks:
    """Make the groups of a process in a mesh. Collective over the mesh: every rank makes them in the same order."""
    names = names_of(mesh)
    if len(ranks_along(mesh, *names)) == 1:
        return alone()
    # Of the user's group only the timeout is taken over.
    parent = mesh.get_group(0)

    def along(*dims: str, within: Wire | None = None) -> Wire:
        """The wire along ``dims``: ``within`` itself, if that has no other ranks."""
        ranks = ranks_along(mesh, *dims)
        if within is not None and within.global_ranks == ranks:
            return within
        return Wire(make_subgroup(ranks, "gloo", _timeout(parent)) if len(ranks) > 1 else None)

    # The widest first: none of the ranks waits for one that waits for it.
    job = along(*names)
    everyone = along("dp_replicate", *SHARDING, "ep", within=job)
    alike = along("dp_replicate", *SHARDING, within=everyone)
    wire = along(*SHARDING, within=alike)
    replicas = along("dp_replicate", "ep")
    same_batch = along("tp")
    stages = along("pp")
    context = along("cp")
    experts = along("ep")
    copies = along("dp_replicate", within=replicas)
    parts = along("pp", "tp", within=same_batch if stages.size == 1 else stages) if in_parts else Wire()
    if cuda:
        # NCCL's group beside gloo's: agreements and messages by name stay on the CPU. The wire of shards has one even
        # where it has one rank: sums over replicas of whole chunks stay on the device with it. In one order on all
        # ranks: each is made by all of a group together.
        for group in (wire, *(other for other in (context, experts) if other.size > 1)):
            group.library = _collective(group.global_ranks)
    # One who gave a part of a mesh has neighbours in the rest of it, who take memory of this machine as well.
    local_size = _count_local(job, mesh._get_root_mesh().mesh.numel())
    # Slices that the caller has cut are checkpoints of their own: nobody knows what the others have.
    writers = job if in_parts else everyone
    return Ranks(
        wire=wire,
        replicas=replicas,
        copies=copies,
        everyone=everyone,
        alike=alike,
        job=job,
        same_batch=same_batch,
        stages=stages,
        parts=parts,
        context=context,
        experts=experts,
        writers=writers,
        waiting=WaitingGroup(writers.global_ranks),
        local_size=local_size,
        slice_=", ".join(f"{name} {place_in(mesh, name)}" for name in SLICING if size_of(mesh, name) > 1),
    )


def _collective(ranks: list[int]) -> dist.ProcessGroup:
    """NCCL's group of ``ranks``, with a communicator of its own: a thread of ours launches on it, beside whatever the
    program does on its own groups. It stays when the model ends, since NCCL's end waits for the other ranks.
    """
    return make_subgroup(ranks, "nccl")


def _timeout(group: dist.ProcessGroup) -> Any:
    """How long the user's own group waits; None (torch's default) where torch does not tell."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(AttributeError, RuntimeError):
            return group._get_backend(torch.device(device)).options._timeout  # type: ignore[attr-defined]
    return None


def _count_local(job: Wire, most: int) -> int:
    """Count the ranks on this machine, of ``most``: as the launcher says, else those with the same host and boot."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        # The launcher may have started processes here that are not of this job.
        return min(int(os.environ["LOCAL_WORLD_SIZE"]), most)
    # The boot id beside the name: machines of a cluster may have the same name.
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            here = file.read().strip()
    except OSError:
        here = ""
    names = job.exchange_texts(f"{os.uname().nodename} {here}", "the count of ranks on this machine")
    return names.count(names[job.rank])
