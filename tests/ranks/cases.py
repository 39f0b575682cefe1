"""What ranks are asked to run in the tests of this room: small models, the ordinary loop, and what came out of it."""

import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gemini
import tests.standin_device  # noqa: F401 - "standin" is a device then
from gemini.memory.devices.device import make_device
from gemini.planning.placement import Placement, Problem, bytes_per_tier
from gemini.planning.planes import ADAM
from gemini.planning.working import device_staging_bytes, gradients_in_flight, scratch_bytes, staging_bytes, tile_numel
from gemini.tiers import Tier
from gemini.train.params.by_name import read_range
from gemini.train.setup.problem import reduce_dtype, structural_trace
from tests import models
from tests.hunts.race_recipes import AlwaysPays
from tests.models import working_set
from tests.scaling import backward, clip_grads, make_step, new_scaler
from tests.world import world_of

KINDS = ("weights", "residual", "exp_avg", "exp_avg_sq")


def make_model(family: str) -> nn.Module:
    return models.SomeUnused() if family == "unused" else models.make_model(family)


@dataclass(frozen=True)
class Job:
    """One managed training run, the same on every rank."""

    family: str = "llama"
    precision: str = "fp32"
    where: str = "ram"
    gradients: str = "retain"
    num_steps: int = 3
    num_micro: int = 1
    no_sync: bool = False
    clip: float | None = 1.0
    lr: float = 1e-3
    rows: int = 8
    mesh: tuple[int, int] | None = None
    reduce_dtype: str | None = None
    tight: bool = True
    path: str = ""
    guesses: bool = False
    """Updates begin inside backward, before it is known whether the step clips."""
    update_threads: int | None = None
    reads: bool = True
    """Also read whole gradients and masters by name (many small messages); else only this rank's parts."""


@dataclass
class Outcome:
    """What a rank saw. ``state``: a checksum of the bits of its part of every plane of every param."""

    losses: list[float]
    norms: list[float]
    state: dict[str, int]
    steps: dict[str, int]
    grads: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]
    sent: list[dict[str, int]]
    num_gathers: int
    num_evictions: int
    report: Any
    gathers: list[int] | None = None
    """The elements of the chunks that the script of a step gathers."""


def config_of(job: Job, model: nn.Module) -> gemini.GeminiConfig:
    """Budgets that just hold the job (if it is ``tight``), so that every step evicts, gathers and flushes."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    replicas, shards = job.mesh or (1, world)
    how: dict[str, Any] = {
        "precision": job.precision, "gradients": job.gradients, "reduce_dtype": job.reduce_dtype, "max_chunk": 8000,
        "device": "standin" if job.where in ("standin", "streamed") else "cpu",
        "update_threads": job.update_threads,
    }  # fmt: skip
    plain = gemini.GeminiConfig(**how)
    layout = structural_trace(model, job.precision).layout(ranks=shards, max_chunk=8000)
    largest = max(chunk.numel for chunk in layout.chunks)
    tile = tile_numel(largest)
    problem = Problem(
        layout=layout, precision=job.precision, gradients=job.gradients, budgets={},
        compute=make_device(how["device"]).tier,
        working_set=working_set(model, layout, job.precision),
        in_flight=gradients_in_flight(layout, reduce_dtype(plain).itemsize) if world > 1 else 0,
        staging=staging_bytes(tile),
        exchange=scratch_bytes(shards, tile, replicas) if world > 1 else 0,
        device_staging=device_staging_bytes(largest, overlap=True),
    )  # fmt: skip
    tiers = {
        "ram": [Tier.CPU], "disk": [Tier.NVME], "mixed": [Tier.CPU, Tier.NVME], "standin": list(Tier),
        "streamed": [Tier.CPU],
    }[job.where]  # fmt: skip
    homes = tuple(
        {kind: tiers[(i + number) % len(tiers)] for number, kind in enumerate(ADAM.kinds) if kind in problem.sizes[i]}
        for i in range(len(layout.chunks))
    )
    trained = frozenset(chunk.index for chunk in layout.chunks if chunk.trainable)
    placement = Placement(homes, trained if job.where == "streamed" else frozenset())
    needs = bytes_per_tier(problem, placement)
    spare = 0 if job.tight else 64 * 2**20
    sizes = {tier: num_bytes + spare for tier, num_bytes in needs.items()}
    for tier in (Tier.CPU, Tier.NVME):  # these are a machine's, and divided among its ranks
        if tier in sizes:
            sizes[tier] *= world
    memory: dict[str, Any] = {tier.value: size for tier, size in sizes.items()}
    if job.gradients == "retain" and (job.num_micro > 1 or job.no_sync):
        memory = {name: size + 8 * 2**20 for name, size in memory.items()}  # sums need more than was declared
    if Tier.NVME in sizes:
        memory["nvme_path"] = job.path
    return gemini.GeminiConfig(memory=gemini.MemoryBudget(**memory), placement=placement, **how)


def batches(job: Job, rank: int, world: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """This rank's share of every micro-batch; together the ranks see what one process would."""
    for step in range(job.num_steps):
        micro = []
        for number in range(job.num_micro):
            ids = torch.randint(
                2, models.VOCAB, (job.rows, 7), generator=torch.Generator().manual_seed(100 * step + number)
            )
            ids = ids[rank * job.rows // world : (rank + 1) * job.rows // world]
            micro.append({"input_ids": ids, "labels": ids.clone()})
        yield micro


def run(job: Job) -> Outcome:
    """Train as a user would; everything a test wants to know about it."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = make_model(job.family)
    mesh = None
    if job.mesh is not None:
        mesh = init_device_mesh("cpu", job.mesh)
    managed: Any = gemini.GeminiDDP(model, config_of(job, model), mesh=mesh)
    inner = world_of(managed)
    transient = job.gradients == "transient"
    optimizer = gemini.HybridAdam(
        managed.parameters(), lr=job.lr, weight_decay=0.1, eps=1e-4, step_in_backward=transient or job.guesses,
        speculate=job.guesses,
    )  # fmt: skip
    if job.guesses:
        inner.guess_by(AlwaysPays())
    new_scaler(managed, 2.0**10)
    out = Outcome([], [], {}, {}, {}, {}, [], 0, 0, None)
    for step, micro in enumerate(batches(job, rank, world)):
        evictions = inner.num_evictions
        for number, batch in enumerate(micro):
            last = number == len(micro) - 1
            with managed.no_sync() if job.no_sync and not last else nullcontext():
                loss = managed(**batch).loss / job.num_micro
                backward(managed, loss)
            out.losses.append(float(loss.detach()))
        out.num_evictions += inner.num_evictions - evictions
        if step == 0 and not transient and job.reads:
            for handle in inner.handles:
                grad = managed.full_grad(handle.name)
                if grad is not None:
                    out.grads[handle.name] = grad.float().clone()
        if job.clip is not None and not transient:
            out.norms.append(float(clip_grads(managed, optimizer, job.clip)))
        make_step(managed, optimizer)
        optimizer.zero_grad()
        inner.check()
        out.sent.append(dict(inner.shards.sent_last_step))
    out.num_gathers = inner.num_gathers
    for handle in inner.handles:
        for kind in handle.chunk.planes:
            if kind in KINDS:
                part = read_range(inner.mover, handle.chunk.planes[kind], handle)
                out.state[f"{handle.name}/{kind}"] = zlib.crc32(part.view(torch.uint8).numpy().tobytes())
        out.steps[handle.name] = handle.num_steps
    if job.reads:
        out.masters = managed.state_dict(dtype=torch.float32)
    out.report = dict(managed.memory_report())
    if world > 1:
        script = inner.foresight.script((), {})
        chunks = inner.layout.chunks
        out.gathers = None if script is None else [chunks[gather.chunk].numel for gather in script.gathers]
    return out


def alone(job: Job, ranks: int) -> tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]:
    """Plain torch in one process, without Gemini: gradients of the first step, norms, and weights after the last.

    What each rank sees of a micro-batch is one more micro-batch here, so that a model whose path depends on its batch
    takes the same paths.
    """
    model = make_model(job.family)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job.lr, weight_decay=0.1, eps=1e-4)
    grads: dict[str, torch.Tensor] = {}
    norms = []
    for step, shares in enumerate(zip(*(batches(job, rank, ranks) for rank in range(ranks)), strict=True)):
        for batch in (batch for share in shares for batch in share):
            (model(**batch).loss / (job.num_micro * ranks)).backward()
        if step == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if job.clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(trained, job.clip)))
        optimizer.step()
        optimizer.zero_grad()
    return grads, norms, {name: param.detach().clone() for name, param in model.named_parameters()}
