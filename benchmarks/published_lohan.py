"""The simulator against LoHan's published throughput: a 13B model on one RTX 4090 with one to twelve SSDs.

    python benchmarks/published_lohan.py > benchmarks/reports/published_lohan_DATE.md

Nothing is run and nothing is fitted: the machine is ``gemini/machines/lohan.json`` (specifications), the model is its
shape, and the shares of the peaks are those of ``gemini.planning.costs.Efficiency``, as for every other machine.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import table
from gemini.planning.costs import Costs, Efficiency
from gemini.planning.hardware import Hardware, machine
from gemini.planning.placement import Placement, Problem
from gemini.planning.plan import Plan
from gemini.planning.schedules import Work, overlapped
from gemini.planning.simulate import timeline_of
from gemini.planning.timeline import Timeline
from gemini.planning.trace import MemoryTrace, Moment, Phase, Source, TracedParam
from gemini.planning.working import staging_bytes, tile_numel
from gemini.testing.policies import LeastRecentlyUsed, plan_by_policy
from gemini.tiers import Tier

HIDDEN, LAYERS, SEQUENCE, VOCAB = 5120, 40, 1024, 50257
READ, WRITE = 6.5e9, 3.4e9
PUBLISHED = [
    (32, 1, 37.5), (32, 2, 64.3), (32, 3, 81.1), (32, 6, 121.7), (32, 12, 142.0),
    (8, 12, 42.8), (16, 12, 84.3), (64, 12, 155.8),
]  # fmt: skip
"""Batch, SSDs, TFLOP/s. (Batch 32 with 12 SSDs is given twice: 142 in one series, 143.1 in the other.)"""
THEIR_WRITES = 14
OUR_WRITES = 12
"""Bytes per param of an update: they write fp32 master and moments and an fp16 copy; a split master needs no copy."""


def gpt_trace(batch: int, recomputed: int) -> MemoryTrace:
    """A GPT of 13B, moment by moment: one per layer, its activations swapped to host memory or recomputed.

    Per token and layer a forward is 24 h^2 FLOP of products with weights and 4 s h of attention; backward is twice
    that. A layer keeps 34 s b h bytes for backward (V. Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022, without the attention matrix, which fused attention does not keep), or its input of
    2 s b h bytes where it is ``recomputed`` (the last layers, so that swapping begins early).
    """
    h, tokens = HIDDEN, batch * SEQUENCE
    params = [TracedParam(("wte.weight",), (VOCAB, h)), TracedParam(("wpe.weight",), (SEQUENCE, h))]
    for layer in range(LAYERS):
        shapes = {"attn.qkv": (3 * h, h), "attn.out": (h, h), "mlp.up": (4 * h, h), "mlp.down": (h, 4 * h)}
        params += [TracedParam((f"h.{layer}.{name}.weight",), shape) for name, shape in shapes.items()]
        params.append(TracedParam((f"h.{layer}.vectors",), (13 * h,)))
    params += [TracedParam(("ln_f.weight",), (2 * h,)), TracedParam(("lm_head.weight",), (VOCAB, h))]
    of_layer = [tuple(range(2 + 5 * layer, 7 + 5 * layer)) for layer in range(LAYERS)]
    head = (len(params) - 2, len(params) - 1)
    layer_flops = tokens * (24 * h * h + 4 * SEQUENCE * h)
    head_flops = tokens * 2 * VOCAB * h
    layer_bytes = 2 * 34 * tokens * h
    moments = [Moment(Phase.FORWARD, "embed", (0, 1), touched_bytes=4 * tokens * h)]
    again = range(LAYERS - recomputed, LAYERS)
    kept = [(2 if layer in again else 34) * tokens * h for layer in range(LAYERS)]
    for layer, params_of_it in enumerate(of_layer):
        moments.append(
            Moment(Phase.FORWARD, f"h.{layer}", params_of_it, saved_bytes=kept[layer], flops=layer_flops,
                   touched_bytes=layer_bytes)
        )  # fmt: skip
    moments.append(Moment(Phase.FORWARD, "lm_head", head, flops=head_flops))
    moments.append(Moment(Phase.BACKWARD, "lm_head", head, flops=2 * head_flops, gradients=head))
    for layer in reversed(range(LAYERS)):
        back = {"restored_bytes": kept[layer]}
        if layer in again:
            moments.append(
                Moment(Phase.RECOMPUTE, f"h.{layer}", of_layer[layer], flops=layer_flops, touched_bytes=layer_bytes,
                       **back)
            )  # fmt: skip
            back = {}
        moments.append(
            Moment(Phase.BACKWARD, f"h.{layer}", of_layer[layer], flops=2 * layer_flops,
                   touched_bytes=2 * layer_bytes, gradients=of_layer[layer], **back)
        )  # fmt: skip
    moments.append(Moment(Phase.BACKWARD, "embed", (0, 1), touched_bytes=4 * tokens * h, gradients=(0, 1)))
    return MemoryTrace(
        "GPT-13B", "bf16", {"input_ids": (batch, SEQUENCE)}, tokens, "cuda", Source.AHEAD, tuple(params),
        tuple(moments), checkpointing=True,
    )  # fmt: skip


def spilled(trace: MemoryTrace) -> Plan:
    """Everything on the drives, gradients consumed as they come, activations in host memory; 4 GB of windows."""
    layout = trace.layout()
    problem = Problem(
        layout=layout, precision="bf16", gradients="transient",
        budgets={Tier.GPU: 24 * 10**9, Tier.CPU: 768 * 10**9, Tier.NVME: 3 * 10**12}, compute=Tier.GPU,
        working_set=4 * 10**9, activations=20 * 10**9,
        staging=staging_bytes(tile_numel(max(chunk.numel for chunk in layout.chunks))),
        offload_to=Tier.CPU, offloaded=trace.checkpoint_bytes,
    )  # fmt: skip
    homes = tuple(dict.fromkeys(problem.plane_bytes(i), Tier.NVME) for i in range(len(layout.chunks)))
    plan = plan_by_policy(trace, problem, Placement(homes), LeastRecentlyUsed())
    return replace(plan, offload_activations="cpu")


def play(plan: Plan, hardware: Hardware, *, barrier: bool) -> Timeline:
    costs = Costs(hardware, Efficiency(), compute=Tier.GPU, precision="bf16", local_ranks=1)
    graph = overlapped(Work(plan, costs, measured=False), clipping=False, barrier=barrier)
    return timeline_of(graph, title="", is_serial=False)


def model_flops(batch: int) -> int:
    """Of a step, without recomputation."""
    return gpt_trace(batch, 0).flops


def predict(batch: int, drives: int, *, barrier: bool) -> tuple[Timeline, int]:
    """The step with the best number of recomputed layers, and that number."""
    specified = machine("lohan")
    write = drives * WRITE * OUR_WRITES / THEIR_WRITES
    hardware = specified.with_figures(f"peak: {drives} x P5510", nvme_read=drives * READ, nvme_write=write)
    found = []
    for recomputed in range(0, LAYERS + 1, 4):
        timeline = play(spilled(gpt_trace(batch, recomputed)), hardware, barrier=barrier)
        found.append((timeline.step_seconds, recomputed, timeline))
    _, recomputed, timeline = min(found, key=lambda item: item[:2])
    return timeline, recomputed


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    trace = gpt_trace(32, 0)
    plan = spilled(trace)
    updates = sum(plan.layout.chunks[i].numel for i in range(len(plan.layout.chunks)))
    read = sum(n for way, n in plan.traffic.items() if way.source is Tier.NVME) / updates
    written = sum(n for way, n in plan.traffic.items() if way.target is Tier.NVME) / updates
    print(f"{trace.num_params:,} params; {read:.2f} bytes read and {written:.2f} written per param and step, "
          f"written at {OUR_WRITES}/{THEIR_WRITES} of the drives' speed")  # fmt: skip
    print(f"{model_flops(32) / 1e12:,.0f} TFLOP per step of batch 32, without recomputation\n")
    rows, errors = [], []
    for batch, drives, published in PUBLISHED:
        theirs, recomputed = predict(batch, drives, barrier=True)
        ours, _ = predict(batch, drives, barrier=False)
        rate = model_flops(batch) / theirs.step_seconds / 1e12
        errors.append(rate / published - 1)
        rows.append([batch, drives, published, f"{rate:.1f}", f"{errors[-1]:+.0%}", f"{recomputed} of {LAYERS}",
                     theirs.bound_by.value, f"{model_flops(batch) / ours.step_seconds / 1e12:.1f}"])  # fmt: skip
    names = ["batch", "SSDs", "published", "predicted, as they overlap", "error", "layers recomputed", "bound by",
             "predicted, updates behind forward too"]  # fmt: skip
    print(*table(names, rows), sep="\n")
    print(f"mean error {sum(map(abs, errors)) / len(errors):.0%}, largest {max(errors, key=abs):+.0%}")


if __name__ == "__main__":
    main()
