"""The step that a plan was made for, as options of ``gemini train``: what they are where they are not given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemini.jobs.errors import JobError
from gemini.jobs.options import spelled
from gemini.jobs.settings import TrainSettings
from gemini.planning.plan import Plan
from gemini.planning.rules import name_of
from gemini.tiers import Tier

OF_A_STEP = (
    "batch_size", "seq_len", "accumulate", "gradient_checkpointing", "tile_tokens", "precision", "optimizer", "states",
)  # fmt: skip


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
