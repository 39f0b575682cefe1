"""Training speed under a GPU budget, against the same model's forward and backward alone and against the bound.

    python benchmarks/gpu/throughput.py --shape 8b --budgets 24GiB --out FOLDER
    python benchmarks/gpu/throughput.py --shape 8b --budgets 80GiB --tokens 4096,16384 --out FOLDER
    python benchmarks/gpu/throughput.py --device standin --tiny        # to try the script

bf16, AdamW on an exact fp32 master, gradient checkpointing; sequences of ``--seq-len``. For each number of tokens per
step:

    T_fwd, T_bwd   forward and backward of the plain model, all weights on the GPU, gradients dropped
    W              all updates with nothing beside them
    step           with clipping, and without, updates inside backward
    bound          T_bwd + max(T_fwd, W) with clipping, max(T_fwd + T_bwd, W) with updates inside backward
    waited         by the launching thread for anything, in the last of these steps
    predicted      by the simulator, for the number of tokens that the plan was made for
    goal           with clipping 0.9 of the bound (T_fwd + T_bwd) / (T_bwd + max(T_fwd, W)); from 16k tokens without
                   clipping 0.9 of computing alone

TFLOP/s are those of the model (``_llama.Shape.flops`` has the formula and its source): recomputation is not counted. A
model is built once for each budget and group of token counts (``--groups``), planned for the largest of the group.
"""

import argparse
import statistics
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import gemini
from benchmarks._memory import free_disk
from benchmarks._report import table
from benchmarks.gpu import _llama, _part
from benchmarks.gpu._card import Card, host_budget
from benchmarks.gpu._llama import Shape
from benchmarks.gpu._training import AFTER, CLIPPED, IN_BACKWARD, Training, computing_alone, trace_of
from gemini.errors import human_bytes, parse_bytes
from gemini.machines.measure import Sizes, measure_gpu
from gemini.machines.measure import measure as measure_machine
from gemini.planning.hardware import Hardware

GOAL = 0.90
GOAL_TOKENS = 16384
"""Tokens per step from which computing alone is the goal without clipping."""
SCHEDULES = {"clip": CLIPPED, "in-backward": IN_BACKWARD, "after": AFTER}
IN_FLIGHT = 1.15
"""Of the weights, what the plain model takes on the GPU beside activations: those and gradients on their way."""


def host_arithmetic(shape: Shape, budget: int) -> str:
    """What has to be where, before anything is built."""
    states, gradients = 12 * shape.params, 2 * shape.params
    return (
        f"{shape.params:,} params: 12 bytes each are {human_bytes(states)}, retained gradients {human_bytes(gradients)}"
        f", together {human_bytes(states + gradients)}, less what the GPU budget of {human_bytes(budget)} leaves "
        "beside activations"
    )


def alone(card: Card, shape: Shape, tokens: int, seq_len: int, times: int) -> dict[str, Any]:
    """T_fwd and T_bwd, or why not."""
    if card.real and IN_FLIGHT * 2 * shape.params > card.free_bytes:
        return {
            "why not": f"its weights take {human_bytes(2 * shape.params)}, the GPU has {human_bytes(card.free_bytes)}"
        }
    try:
        forwards, backwards = computing_alone(card, shape, tokens, seq_len, times)
    except torch.OutOfMemoryError as e:
        card.forget()
        return {"why not": f"it does not fit the GPU: {str(e)[:200]}"}
    return {"forward": forwards, "backward": backwards}


def figures_of(args: argparse.Namespace, card: Card) -> Hardware:
    """The machine, measured as ``gemini doctor --measure`` does, so that plans are made for it."""
    small = Sizes(
        product=(32, 32, 32), stream_bytes=2**20, adam_numel=2**16, spill_bytes=2**20, spill_seconds=0.1, repeats=2,
        ops=10, gpu_product=(32, 32, 32), gpu_bytes=2**16,
    )  # fmt: skip
    sizes = small if args.tiny else Sizes(spill_seconds=3.0)
    figures = dict(measure_machine(args.spill if args.nvme else None, sizes))
    if not card.real:
        figures |= dict(measure_gpu(torch.device("cpu"), sizes))
    return Hardware(card.slug, figures)


def settings_for(args: argparse.Namespace, card: Card, budget: int, trace: Any, hardware: Any) -> dict[str, Any]:
    drive = {"nvme": int(free_disk(args.spill) * 0.8), "nvme_path": args.spill} if args.nvme else {}
    memory = gemini.MemoryBudget(gpu=budget, cpu=host_budget(args.host), **drive)
    return {
        "memory": memory, "placement": "auto", "gradients": "retain", "trace": trace, "hardware": hardware,
        "offload_activations": "auto",
    }  # fmt: skip


def case_of(args: argparse.Namespace, training: Training, tokens: int, results: _part.Results) -> dict[str, Any]:
    """Steps of every schedule at ``tokens``, and W."""
    training.tokens = tokens
    steps = 1 if args.tiny else args.steps
    case: dict[str, Any] = {"schedules": {}}
    for key in args.schedules:
        training.use(SCHEDULES[key])
        seconds, losses = training.timed_steps(steps, 1 if args.tiny or training.done else 2)
        report = training.finish()
        case["schedules"][key] = {
            "seconds": seconds, "losses": losses, "moved": dict(report["moved"]), "stalls": dict(report["stalls"]),
            "gpu": {name: report["gpu"][name] for name in ("budget", "peak", "used")},
            "allocator": dict(report.get("allocator", {})) or training.card.peaks(),
            "host": {name: report["cpu"][name] for name in ("budget", "peak", "used")},
        }  # fmt: skip
    training.use(AFTER)
    case["update alone"] = training.update_alone(1 if args.tiny else 2)
    return case


def rows_of(
    shape: Shape, tokens: int, seq_len: int, budget: int, case: dict[str, Any]
) -> tuple[list[list[str]], list[str]]:
    """Rows of the table, one for each schedule, and what is to be said of the goals."""
    flops, work = shape.flops(tokens, seq_len), statistics.median(case["update alone"])
    alone_t, rows, lines = case["alone"], [], []
    where = f"{human_bytes(budget)}, {tokens:,} tokens"
    for key, own in case["schedules"].items():
        step = statistics.median(own["seconds"])
        foretold = case.get("predicted", {}).get(key) if tokens == case["planned for"] else None
        if foretold is not None:
            what = f"{where}, {SCHEDULES[key].name}: step over the simulator's"
            lines.append(_part.verdict_between(what, step / foretold, 0.95, 1.05))
        row = [human_bytes(budget), f"{tokens:,}", SCHEDULES[key].name, f"{step:.3f}"]
        row.append(f"{sum(own['stalls'].values()):.3f}")
        row += ["-" if foretold is None else f"{foretold:.3f}", f"{flops / step / 1e12:.1f}"]
        if "forward" not in alone_t:
            rows.append([*row, "-", "-", "-", "-", f"{work:.3f}"])
            continue
        t_fwd, t_bwd = (statistics.median(alone_t[name]) for name in ("forward", "backward"))
        share, bound = (t_fwd + t_bwd) / step, (t_bwd + max(t_fwd, work)) / step
        if SCHEDULES[key].in_backward:
            bound = max(t_fwd + t_bwd, work) / step
        rows.append([*row, f"{share:.1%}", f"{bound:.1%}", f"{t_fwd:.3f}", f"{t_bwd:.3f}", f"{work:.3f}"])
        if SCHEDULES[key].clip:
            lines.append(_part.verdict(f"{where}, with clipping: share of the bound", bound, GOAL))
        elif tokens >= GOAL_TOKENS:
            lines.append(_part.verdict(f"{where}, {SCHEDULES[key].name}: share of computing alone", share, GOAL))
    return rows, lines


def measure(args: argparse.Namespace, card: Card, results: _part.Results) -> None:
    shape = _llama.SHAPES["tiny" if args.tiny else args.shape]
    seq_len = 32 if args.tiny else args.seq_len
    groups = [[32, 64]] if args.tiny else args.groups
    budgets = [card.tiny_budget] if args.tiny else args.budgets
    hardware = None
    if not args.typical:
        hardware = figures_of(args, card)
        results.add("hardware", {key: figure.value for key, figure in hardware.figures.items()})
    results.add("shape", shape._asdict() | {"params": shape.params, "seq_len": seq_len})
    computing = {}
    for tokens in [t for group in groups for t in group]:
        computing[tokens] = alone(card, shape, tokens, seq_len, 1 if args.tiny else 3)
        results.add("alone", computing)
    rows, lines, built = [], [], 0.0
    for budget in budgets:
        if card.real and budget > card.total_bytes:
            lines.append(f"- {human_bytes(budget)}: not run, the GPU has {human_bytes(card.total_bytes)}")
            continue
        lines.append(f"- {host_arithmetic(shape, budget)}.")
        for group in groups:
            if results.left() < 1.3 * built:
                lines.append(f"- {human_bytes(budget)}, {group} tokens: not run, no time left")
                continue
            left = results.left()
            try:
                trace = trace_of(shape, max(group), min(seq_len, max(group)), card)
                training = Training(
                    card, shape, max(group), seq_len, settings_for(args, card, budget, trace, hardware)
                )  # fmt: skip
            except (gemini.GeminiError, torch.OutOfMemoryError) as e:
                why = "does not fit" if isinstance(e, gemini.BudgetExceeded) else f"ended by {type(e).__name__}"
                lines.append(f"- {human_bytes(budget)}, {group} tokens: {why}. {e}")
                continue
            built = max(built, left - results.left())
            plan = training.model._gemini_engine.decision.plan
            told = {"budget": budget, "planned for": max(group), "build seconds": training.build_seconds,
                    "plan": str(plan), "checkpointed activations wait in": plan.offload_activations}  # fmt: skip
            if hardware is not None:
                told["predicted"] = {
                    key: gemini.simulate(plan, hardware, clipping=not SCHEDULES[key].in_backward).step_seconds
                    for key in args.schedules
                }
            results.append("built", told)
            for tokens in group:
                try:
                    measured = case_of(args, training, tokens, results)
                except (gemini.GeminiError, torch.OutOfMemoryError) as e:  # the other cases are worth as much
                    lines.append(f"- {human_bytes(budget)}, {tokens:,} tokens: ended by {type(e).__name__}: {e}")
                    results.append("ended", traceback.format_exc())
                    results.say_so_far(*said_of(shape, seq_len, rows, lines, computing))
                    break
                case = told | {"tokens": tokens, "alone": computing[tokens]} | measured
                results.append("cases", case)
                more, said = rows_of(shape, tokens, seq_len, budget, case)
                rows += more
                lines += said
                results.say_so_far(*said_of(shape, seq_len, rows, lines, computing))
            training.close()
            del training
    results.say(*said_of(shape, seq_len, rows, lines, computing))


def said_of(
    shape: Shape, seq_len: int, rows: list[list[str]], lines: list[str], computing: dict[int, dict[str, Any]]
) -> list[str]:
    """The report of these cases."""
    names = ["GPU budget", "tokens", "schedule", "step", "waited", "predicted", "TFLOP/s", "of computing alone",
             "of the bound", "T_fwd", "T_bwd", "W"]  # fmt: skip
    why_not = [
        f"- computing alone at {tokens:,} tokens was not measured: {found['why not']}"
        for tokens, found in computing.items()
        if "why not" in found
    ]
    return [
        f"Llama of {shape.params:,} params, bf16, AdamW, gradient checkpointing, sequences of {seq_len} (seconds; "
        "medians).",
        "",
        *table(names, rows),
        *lines,
        *why_not,
        "",
    ]


def main(argv: Sequence[str] | None = None) -> _part.Results:
    parser = _part.make_parser(__doc__, seconds=420)
    add = parser.add_argument
    add("--shape", choices=_llama.SHAPES, default="8b", help="(default: %(default)s)")
    add("--budgets", type=lambda text: [parse_bytes(one) for one in text.split(",")], default=[24 * 2**30],
        metavar="SIZE,...", help="of the GPU (default: 24GiB)")  # fmt: skip
    add("--groups", type=lambda text: [[int(n) for n in group.split(",")] for group in text.split("/")],
        default=[[4096], [16384]], metavar="N,N/N,...",
        help="tokens per step, those that share a plan together (default: 4096/16384)")  # fmt: skip
    add("--tokens", type=int, nargs="+", default=None, help="instead of --groups: each planned by itself")
    add("--seq-len", type=int, default=4096, help="(default: %(default)s)")
    add("--steps", type=int, default=2, help="that count, of each schedule (default: %(default)s)")
    add("--schedules", type=lambda text: text.split(","), default=["clip", "in-backward"], metavar="NAME,...",
        help=f"of {', '.join(SCHEDULES)} (default: clip,in-backward)")  # fmt: skip
    add("--nvme", action="store_true", help="the plan may use the drive of --spill as well")
    add("--typical", action="store_true", help="plan for typical speeds instead of measuring the machine")

    def started(args: argparse.Namespace, card: Card, results: _part.Results) -> None:
        if args.tokens:
            args.groups = [[tokens] for tokens in args.tokens]
        measure(args, card, results)

    return _part.run("throughput", parser, started, argv)


if __name__ == "__main__":
    main()
