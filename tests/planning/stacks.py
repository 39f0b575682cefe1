"""A stack of equal layers, its plan and a machine of round figures: simulations whose outcome can be told by hand."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from gemini.planning import simulate as simulating
from gemini.planning.hardware import Figure, Hardware
from gemini.planning.placement import Placement, Problem
from gemini.planning.plan import Plan
from gemini.planning.planes import WEIGHTS
from gemini.planning.trace import MemoryTrace, Moment, Phase, Source, TracedParam
from gemini.tiers import Tier
from tests.planning import policies
from tests.planning.policies import DoneThenLeastRecent, plan_by_policy

NUMEL = 2**20
"""Params of a layer: one chunk, without padding."""
LAYERS = 6
FETCHES = 2 * LAYERS - 2
"""With room for two layers the last two are still there when backward begins."""
MS = 1e-3

simulate = partial(simulating.simulate, schedule="serial")
simulate_policy = partial(policies.simulate_policy, schedule="serial")


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-4)  # the round machine's memory is fast, not infinitely so


def stack_trace(
    layers: int, *, forward_flops: int = 10**9, backward_flops: int = 2 * 10**9, **moment_fields: Any
) -> MemoryTrace:
    """Forward through the layers, then backward, one moment each."""
    params = tuple(TracedParam((f"layers.{i}.weight",), (1024, 1024)) for i in range(layers))
    moments = [Moment(Phase.FORWARD, f"layers.{i}", (i,), flops=forward_flops, **moment_fields) for i in range(layers)]
    moments += [
        Moment(Phase.BACKWARD, f"layers.{i}", (i,), flops=backward_flops, gradients=(i,), **moment_fields)
        for i in reversed(range(layers))
    ]
    return MemoryTrace("Stack", "bf16", {"x": (1, 8)}, 8, "cuda", Source.AHEAD, params, tuple(moments))


def stack_plan(
    layers: int,
    *,
    weights: Tier,
    states: Tier,
    compute: Tier = Tier.GPU,
    gradients: str = "retain",
    windows: int = 2,
    trace: MemoryTrace | None = None,
    precision: str = "bf16",
    ranks: int = 1,
    accumulate: int = 1,
    **fields: Any,
) -> Plan:
    """Every layer's planes alike; gathered by demand into room for ``windows`` layers."""
    trace = replace(trace or stack_trace(layers), target="cpu" if compute is Tier.CPU else "cuda", precision=precision)
    layout = trace.layout(ranks=ranks)
    tiers = [Tier.CPU, Tier.NVME] if compute is Tier.CPU else list(Tier)
    itemsize = 4 if precision == "fp32" else 2
    away = fields.get("offload_activations")
    problem = Problem(
        layout=layout,
        precision=precision,
        gradients=gradients,
        budgets=dict.fromkeys(tiers, 0),
        compute=compute,
        working_set=NUMEL * itemsize * windows,
        staging=17 * NUMEL,
        offload_to=None if away is None else Tier(away),
    )
    homes = []
    for index in range(len(layout.chunks)):
        homes.append({kind: weights if kind == WEIGHTS else states for kind in problem.sizes[index]})
    placement = Placement(tuple(homes))
    held = dict.fromkeys(tiers, 0)
    for index, home in enumerate(homes):
        for kind, num_bytes in problem.sizes[index].items():
            held[home[kind]] += num_bytes
    for tier, num_bytes in problem.demands(placement).items():
        held[tier] += num_bytes
    problem = replace(problem, budgets=held)
    plan = plan_by_policy(trace, problem, placement, DoneThenLeastRecent())
    return replace(plan, accumulate=accumulate, **fields)


def machine(source: str = "measured by hand", **figures: float) -> Hardware:
    """A machine on which a layer's bf16 weights take 2 ms over the link and 20 ms from the drives, and so on."""
    layer = 2 * NUMEL
    values = {
        "num_gpus": 4, "gpu_bytes": 1e12, "cpu_bytes": 1e12, "nvme_bytes": 1e12, "cpu_threads": 8,
        "gpu_flops_bf16": 1e12, "gpu_flops_fp32": 1e12, "gpu_bandwidth": 1e15, "gpu_op_seconds": 1e-9,
        "cpu_flops_bf16": 1e11, "cpu_flops_fp32": 1e11, "cpu_op_seconds": 1e-9, "dram_bandwidth": 1e15,
        "h2d": layer / 2e-3, "d2h": layer / 4e-3, "nvme_read": layer / 20e-3, "nvme_write": layer / 40e-3,
        "update_cpu": 10e-3 / NUMEL, "interconnect": layer / 8e-3,
    }  # fmt: skip
    return Hardware("round", {key: Figure(value, source) for key, value in {**values, **figures}.items()})
