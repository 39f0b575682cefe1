"""How the model of a training job is managed: the job's options, or a plan that ``gemini plan`` wrote, as a config; and
the step that a plan was made for, as options of ``gemini train``.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import ParallelismConfig

import gemini
from gemini.integrations.parallelism import parallel_of
from gemini.jobs.errors import JobError, as_job_error
from gemini.jobs.models import ModelSource
from gemini.jobs.options import spelled
from gemini.jobs.settings import TrainSettings
from gemini.memory.devices.device import registered_device
from gemini.planning import document
from gemini.planning.plan import Plan
from gemini.planning.rules import name_of, rule_named
from gemini.ranks import launch
from gemini.tiers import Tier
from gemini.train.loading.attention import AUTO


def make_config(
    settings: TrainSettings, source: ModelSource, device: torch.device, notes: list[str]
) -> gemini.GeminiConfig:
    """The config of a job. ``notes`` takes what a job that runs a plan makes otherwise.

    A device with its own memory needs to know what activations take there: without a plan, and unless
    ``--activations`` says it, the job's own step is traced ahead of time.

    Raises:
        JobError: for options that cannot be used together.
        PlanMismatch: for a plan that cannot be read.
    """
    plan: gemini.Plan | None = None
    budgets: Mapping[Tier, int] = {}
    gradients = "accumulate" if settings.accumulate > 1 else "retain"
    kind = registered_device(settings.device)
    if settings.plan is not None:
        plan = document.load(settings.plan, "--plan", gemini.Plan.from_json)
        budgets, gradients = plan.problem.budgets, plan.problem.gradients
        notes += check_step(
            plan,
            settings,
            ranks=launch.num_processes() // settings.replicas,
            computes=(Tier.GPU if device.type == "cuda" else Tier.CPU) if kind is None else kind.tier,
        )
    trace = None
    if plan is None and settings.activations is None and (device.type == "cuda" or kind is not None):
        if settings.ep > 1:
            raise JobError(f"--ep {settings.ep} needs --activations, such as 4GiB: its step is not traced ahead.")
        trace = trace_of(settings, source)
    with as_job_error(asked="The settings cannot be used together"):
        return gemini.GeminiConfig(
            precision=settings.precision,
            states=settings.states,
            memory=gemini.MemoryBudget(
                gpu=settings.gpu_memory or budgets.get(Tier.GPU),
                cpu=settings.cpu_memory or budgets.get(Tier.CPU),
                nvme=settings.nvme_memory or budgets.get(Tier.NVME),
                nvme_path=settings.nvme_path,
                durable=settings.durable_every > 0,
            ),
            placement="auto" if plan is None else plan,
            gradients=gradients,
            device=str(device) if kind is None else settings.device,
            activations=settings.activations,
            offload_activations=settings.offload_activations,
            trace=trace,
            tile_tokens=settings.tile_tokens,
            optimizer=rule_named(settings.optimizer),
        )


def parallelism_of(settings: TrainSettings, num_processes: int) -> ParallelismConfig | None:
    """How processes share sequences and layers, as the Trainer is told it; None where none do.

    Raises:
        JobError: for numbers of processes that do not go together.
    """
    groups = settings.replicas * settings.sharing * settings.ep
    if num_processes % groups:
        asked = [f"--{name} {size}" for name in _DIMS if (size := getattr(settings, name)) > 1]
        raise JobError(
            f"{' '.join(asked)} takes {groups} processes or a multiple of that, and there "
            f"{'is' if num_processes == 1 else 'are'} {num_processes}: torchrun --nproc-per-node {groups} -m gemini ..."
        )
    if settings.sharing == 1:
        return None
    if settings.replicas > 1 and num_processes == groups:  # accelerate does not know replicas that shard nothing
        raise JobError(
            f"--replicas {settings.replicas} leaves each of {num_processes} processes without another one to share its "
            "part of the model with: leave --replicas out, or start more processes."
        )
    return ParallelismConfig(
        dp_replicate_size=settings.replicas,
        dp_shard_size=num_processes // groups,
        cp_size=settings.cp,
        tp_size=settings.tp,
    )


def mesh_of(settings: TrainSettings, num_processes: int) -> Any:
    """The mesh of the job's processes; None where all of them share one model.

    Raises:
        JobError: as :func:`parallelism_of`.
    """
    kind = "cuda" if torch.cuda.is_available() and (settings.device or "cuda").startswith("cuda") else "cpu"
    parallelism = parallelism_of(settings, num_processes)
    if parallelism is not None:
        found = parallel_of(parallelism, num_processes, kind)
        return None if found is None else found.mesh
    if settings.replicas == settings.ep == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (settings.replicas, num_processes // (settings.replicas * settings.ep), settings.ep)
    return init_device_mesh(kind, sizes, mesh_dim_names=("dp_replicate", "dp", "ep"))


_DIMS = ("replicas", "tp", "cp", "ep")


def trace_of(settings: TrainSettings, source: ModelSource) -> gemini.MemoryTrace:
    """One micro-batch of the job's step, traced on fake tensors."""
    config = copy.deepcopy(source.config)
    if settings.attn_implementation != AUTO:
        config._attn_implementation = settings.attn_implementation
    ids = torch.empty(settings.batch_size, settings.seq_len, dtype=torch.int64, device="meta")
    return gemini.trace(
        config,
        {"input_ids": ids, "labels": ids},
        precision=settings.precision,
        checkpointing="non-reentrant" if settings.gradient_checkpointing else None,
        tile_tokens=settings.tile_tokens,
        tensor_parallel=settings.tp,
        context_parallel=settings.cp,
    )


def plan_command(settings: TrainSettings) -> str:
    """How ``gemini plan`` is asked what else would do for the job."""
    words = ["gemini", "plan", settings.preset or str(settings.model), "--seq-len", str(settings.seq_len)]
    for name in _OF_THE_STEP:
        value = getattr(settings, name)
        if value != getattr(TrainSettings, name):
            words += [spelled(name)] if value is True else [spelled(name), str(value)]
    for tier in Tier:
        size = getattr(settings, f"{tier.value}_memory")
        words += [] if size is None else [spelled(tier.value), size]
    return shlex.join([*words, "--alternatives"])


_OF_THE_STEP = (
    "layers batch_size accumulate precision optimizer states gradient_checkpointing tile_tokens lora load_in_4bit "
    "offload_activations"
).split()
"""Options that ``gemini plan`` has too, with the same meaning and default."""


# ---- the step of a plan ----------------------------------------------------------------------------------------------

OF_A_STEP = ("batch_size seq_len accumulate gradient_checkpointing tile_tokens precision optimizer states").split()


def step_of(plan: Plan) -> dict[str, Any]:
    """The options that describe its step."""
    trace, rule = plan.trace, plan.problem.rule
    sizes = trace.batch.get("input_ids", ())
    found: dict[str, Any] = dict(zip(("batch_size", "seq_len"), sizes, strict=True)) if len(sizes) == 2 else {}
    return found | {
        "accumulate": plan.accumulate,
        "gradient_checkpointing": trace.checkpointing,
        "tile_tokens": trace.tile_tokens,
        "precision": plan.problem.precision,
        "optimizer": name_of(rule),
        "states": "exact" if rule.exact is None else "compact",
    }


def check_step(plan: Plan, settings: TrainSettings, *, ranks: int, computes: Tier) -> Iterator[str]:
    """What a job that runs a plan makes otherwise than it was planned, where it may: what is larger was not planned
    for, and another kind of step has other planes.

    Args:
        ranks: that divide the model.
        computes: where forward and backward run.

    Raises:
        JobError: naming the option, what it is here and what it was for the plan.
    """
    made = f"--plan {settings.plan} was made"
    for name, planned in step_of(plan).items():
        here = getattr(settings, name)
        if here == planned or (name, here) == ("tile_tokens", "auto"):
            continue
        words = f"{made} {_said(name, planned)}, and this job is {_said(name, here)}"
        sums = name == "accumulate" and plan.problem.gradients != "retain"
        if sums or (name in ("batch_size", "seq_len") and here < planned):
            yield f"{words}: its speed is not the planned one"
            continue
        raise JobError(f"{words}. Leave it out here, and it is as in the plan; or make a plan for this step.")
    if plan.problem.gradients == "transient":
        raise JobError(f"{made} with --gradients transient, and gemini train keeps them until it has clipped them.")
    if plan.layout.ranks != ranks:
        raise JobError(
            f"{made} for {plan.layout.ranks} processes that divide the model (--gpus), and here there are {ranks}: "
            "start as many (torchrun --nproc-per-node), or make a plan for these."
        )
    if plan.problem.compute is not computes:
        raise JobError(
            f"{made} for computing on {plan.problem.compute.value}, and this job computes on {computes.value}: give "
            "--device, or make a plan for this one (--compute)."
        )
    if settings.durable_every and not plan.problem.durable:
        raise JobError(f"{made} without a durable store: leave --durable-every out, or --plan.")
    if Tier.NVME in plan.problem.budgets and settings.nvme_path is None:
        raise JobError(f"--plan {settings.plan} keeps some of the model on NVMe: give --nvme-path, a folder there.")


def _said(name: str, value: Any) -> str:
    if value in (None, True, False) and name in ("tile_tokens", "gradient_checkpointing"):
        return f"{'with' if value else 'without'} {spelled(name)}"
    return f"with {spelled(name)} {value}"
