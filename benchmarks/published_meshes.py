"""What the simulator says of clusters for which others have published figures, and of Gemini there.

    python benchmarks/published_meshes.py

Published are shares of a peak or ratios to other systems, with no whole description of the step. So the step is said
here, and what is compared is the model FLOPs utilization (MFU): 6 FLOP per param and token against the GPUs' peak, with
what is computed twice not counted. Nothing of it was run: GPUs are data sheets, and nobody's kernels are in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import GPT2Config, LlamaConfig

import gemini
from gemini.errors import BudgetExceeded, human_bytes
from gemini.planning.hardware import Hardware, machine
from gemini.planning.mesh import MeshSizes
from gemini.planning.parallel import play_mesh
from gemini.planning.plan import Plan
from gemini.planning.trace import MemoryTrace
from gemini.planning.working import MARGIN
from gemini.tiers import Tier
from gemini.tracing.batches import batch_for

GIB = 2**30


class Case(NamedTuple):
    name: str
    said: str
    config: Any
    num_params: float
    hardware: Hardware
    samples: int
    length: int
    windows: int
    meshes: tuple[MeshSizes, ...]
    schedules: tuple[str, ...] = ("overlapped",)


def llama(**sizes: int) -> LlamaConfig:
    return LlamaConfig(vocab_size=32000, max_position_embeddings=4096, use_cache=False, **sizes)


def cases() -> Iterator[Case]:
    a100 = machine("dgx-a100")
    # HBM2 of the 40 GB part: 1,555 GB/s, and 1 TB of host memory (NVIDIA DGX A100 320GB data sheet).
    small = a100.with_figures(
        "peak: NVIDIA A100 40GB and DGX A100 320GB data sheets", gpu_bytes=40 * GIB, gpu_bandwidth=1.555e12,
        cpu_bytes=1024 * GIB,
    )  # fmt: skip
    yield Case(
        "LLaMA-2 70B, 512 x A100 40 GB", "Colossal-AI: 195 % of the speed of what it was compared with",
        llama(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
              num_key_value_heads=8), 69e9, small, 2, 4096, 1024,
        (MeshSizes(dp=512), MeshSizes(dp=64, tp=8), MeshSizes(pp=4, dp=16, tp=8), MeshSizes(pp=8, dp=64)),
    )  # fmt: skip
    yield Case(
        "LLaMA-2 7B, 8 x A100 80 GB", "Colossal-AI: 54 % MFU",
        llama(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
              num_key_value_heads=32), 6.74e9, a100, 4, 4096, 64,
        (MeshSizes(dp=8), MeshSizes(dp=4, tp=2), MeshSizes(pp=2, dp=4), MeshSizes(tp=8)),
    )  # fmt: skip
    yield Case(
        "GPT-2 10B, 8 x A100 80 GB", "Colossal-AI Gemini: 2.33 x DeepSpeed",
        GPT2Config(n_embd=4096, n_layer=50, n_head=32, n_positions=1024, use_cache=False), 10.3e9, a100, 8, 1024, 64,
        (MeshSizes(dp=8), MeshSizes(dp=2, cp=4)), ("overlapped", "serial"),
    )  # fmt: skip


def main() -> None:
    for case in cases():
        print(f"{case.name}; {case.windows} windows of {case.length} tokens a step, gradient checkpointing")
        print(f"  published: {case.said}")
        peak = case.hardware.figures["gpu_flops_bf16"].value
        traces: dict[int, MemoryTrace] = {}
        for sizes in case.meshes:
            if sizes.tp not in traces:
                traces[sizes.tp] = gemini.trace(
                    case.config, batch_for(case.config, case.samples, case.length), target="cuda",
                    checkpointing="non-reentrant", tensor_parallel=sizes.tp,
                )  # fmt: skip
            for schedule in case.schedules:
                print(f"  {sizes!s:<24}{schedule:<12}", end="", flush=True)
                try:
                    print(_played(case, traces[sizes.tp], sizes, schedule, peak), flush=True)
                except BudgetExceeded as e:
                    print(f"does not fit: {e}"[:120])


def _played(case: Case, trace: MemoryTrace, sizes: MeshSizes, schedule: str, peak: float) -> str:
    micro_batches = max(case.windows // (case.samples * sizes.dp), 1)

    def make(trace: MemoryTrace, accumulate: int, order: str) -> Plan:
        budgets = {tier: int(MARGIN * (case.hardware.capacity(tier) or 0)) for tier in (Tier.GPU, Tier.CPU)}
        gradients = "accumulate" if accumulate > 1 or sizes.pp > 1 else "retain"
        return gemini.plan(
            trace, case.hardware, budgets, gradients=gradients, accumulate=accumulate, ranks=sizes.shards,
            local_ranks=8, schedule=schedule,
        )  # fmt: skip

    outcome = play_mesh(
        trace, case.hardware, sizes, make, micro_batches=micro_batches, width=case.config.hidden_size, per_machine=8,
        schedule=schedule, ends=True,
    )  # fmt: skip
    flops = 6 * case.num_params * outcome.tokens_per_second / sizes.ranks
    held = max(stage.plan.bytes_per_tier[Tier.GPU] for stage in outcome.stages)
    each = outcome.tokens_per_second / sizes.ranks
    return (
        f"{outcome.order or '-':<6}{each:>8,.0f} tokens/s each, MFU {flops / peak:.1%}, "
        f"bubble {outcome.bubble / outcome.step_seconds:.0%}, {human_bytes(held)} of GPU"
    )


if __name__ == "__main__":
    main()
