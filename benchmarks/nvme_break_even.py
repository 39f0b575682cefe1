"""From how many tokens per step on a model trains as fast from the drive as from memory, predicted and measured.

    python benchmarks/nvme_break_even.py --spill /scratch --report benchmarks/reports/nvme_break_even_<box>_<date>.md

Two copies of one Llama live in one process: all in memory, and with residuals, states and retained gradients in the
spill file (``--weights`` puts the weights there too; with ``--gradients transient`` updates begin inside backward, and
no gradient is kept). For every number of tokens they take turns, some steps each; a
step is counted from one forward's beginning to the next one's, and what is in flight at the end of a turn is waited for
outside of the clock. The planner's break-even (``gemini.planning.break_even``) comes from a step recorded in memory at
``--traced`` tokens and from the machine as measured in the same run. At it, and past it, the goal is nine tenths of the
speed in memory.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gemini
from benchmarks import _models
from benchmarks._report import add_out, head, publish, table
from benchmarks._rounds import Spread
from benchmarks.simulate_here import measure_machine, one_machine
from gemini import kernels
from gemini.errors import human_bytes
from gemini.planning.break_even import played_break_even, with_work
from gemini.planning.planner import pose_problem
from gemini.planning.policy import NextUse
from gemini.testing.policies import plan_by_policy
from gemini.tiers import Tier
from gemini.train.update.worker import update_threads

GOAL = 0.9
WINDOW = 256
"""Tokens of one sample, at most."""


def make_batch(args: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """``tokens`` of them: one short sample, or several of ``WINDOW``."""
    rows = max(1, tokens // WINDOW)
    return _models.uniform_batch(args.vocab, rows, tokens // rows, tokens)


class Copy:
    """One of the two models, with its optimizer."""

    def __init__(self, args: argparse.Namespace, *, on_drive: bool):
        memory, placement = gemini.MemoryBudget(cpu="64GiB"), "auto"
        if on_drive:
            memory = gemini.MemoryBudget(cpu="64GiB", nvme="64GiB", nvme_path=args.spill)
            placement = gemini.StaticPlacement(optimizer_on_nvme=1.0, weights_on_nvme=1.0 if args.weights else 0.0)
        config = gemini.GeminiConfig(
            memory=memory, placement=placement, device="cpu", overlap=not args.serial,
            update_threads=args.update_threads, gradients=args.gradients,
        )  # fmt: skip
        model = _models.build(_models.llama_config(args.width, args.layers, args.vocab, positions=WINDOW))
        self.model: Any = gemini.GeminiDDP(model, config)
        in_backward = args.gradients == "transient"
        self.optimizer = gemini.HybridAdam(self.model.parameters(), lr=1e-4, step_in_backward=in_backward)
        self.engine = self.model._gemini_engine

    def turn(self, args: argparse.Namespace, batch: dict[str, Any], steps: int) -> list[float]:
        begins = []
        for _ in range(steps + 2):
            begins.append(time.perf_counter())
            self.model(**batch).loss.backward()
            if args.clip:
                self.model.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.engine.drain()
        return [b - a for a, b in zip(begins[1:], begins[2:], strict=False)]  # the first one began with nothing pending


def told(args: argparse.Namespace, memory: Copy, drive: Copy, hardware: Any) -> tuple[int | None, Any, Any]:
    """The break-even, the plan of the copy on the drive, and what plays it."""
    batch = make_batch(args, args.traced)
    with gemini.MemoryTracer(memory.model, skip=1) as tracer:
        for _ in range(5):
            memory.model(**batch).loss.backward()
            memory.optimizer.step()
    budgets = dict.fromkeys((Tier.CPU, Tier.NVME), 2**42)
    problem = pose_problem(tracer.trace, budgets, precision="bf16", gradients=args.gradients)
    plan = plan_by_policy(tracer.trace, problem, drive.engine.decision.placement, NextUse())
    schedule = "serial" if args.serial else "overlapped"

    def play(plan: Any) -> Any:
        return gemini.simulate(plan, hardware, schedule=schedule, update_threads=args.update_threads)

    return played_break_even(plan, play, play(plan), serial=args.serial), plan, play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 2048, 4096, 8192], help="per step")
    parser.add_argument("--traced", type=int, default=512, help="tokens of the recorded step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of a turn, that count (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="that torch computes with")
    parser.add_argument("--update-threads", type=int, default=None, help="of an update (default: the engine's)")
    parser.add_argument("--serial", action="store_true", help="with overlap=False")
    parser.add_argument("--weights", action="store_true", help="weights are on the drive too")
    parser.add_argument("--gradients", default="retain", choices=("retain", "transient"))
    parser.add_argument("--clip", action="store_true", help="with clipping")
    parser.add_argument("--spill", type=Path, default=Path("/tmp"), help="folder of the spill file")
    add_out(parser)
    args = parser.parse_args()
    args.cores = kernels.get_num_threads()
    torch.set_num_threads(args.threads)
    publish(compare(args), args.out)


def compare(args: argparse.Namespace) -> list[str]:
    memory, drive = Copy(args, on_drive=False), Copy(args, on_drive=True)
    machines = [measure_machine(args.spill)]
    break_even, plan, play = told(args, memory, drive, machines[0])
    points = sorted({*args.tokens, *([break_even] if break_even and break_even <= max(args.tokens) else [])})
    points = sorted({n if n <= WINDOW else -(-n // WINDOW) * WINDOW for n in points})  # whole windows
    found: dict[tuple[int, Copy], list[list[float]]] = {(tokens, c): [] for tokens in points for c in (memory, drive)}
    for number in range(args.rounds):
        for tokens in points:
            batch = make_batch(args, tokens)
            for copy in (drive, memory) if number % 2 else (memory, drive):
                found[tokens, copy].append(copy.turn(args, batch, args.steps))
            gc.collect()
        machines.append(measure_machine(args.spill))
    hardware = one_machine(machines, "median")
    break_even, plan, play = told(args, memory, drive, hardware)  # by all rounds' figures
    report = drive.model.memory_report()
    lines = head(
        "Training from the drive against training from memory",
        [
            f"Llama of {args.layers} layers of {args.width}, vocab {args.vocab}: {report['params']:,} params, bf16, "
            f"{'clipping' if args.clip else 'no clipping'}, gradients={args.gradients!r}; "
            f"{human_bytes(report['nvme']['used'])} in the spill file. "
            f"Torch computes with {args.threads} threads of {args.cores}, an update has "
            f"{update_threads(args.update_threads, Tier.CPU)}. "
            f"{'Serial' if args.serial else 'Overlapped'} engine. {args.rounds} rounds, {args.steps} steps of each "
            "copy in each.",
        ],
        threads=args.threads,
    )
    rows, missed = [], []
    for tokens in points:
        pair = found[tokens, memory], found[tokens, drive]
        speeds = Spread.of([statistics.median(a) / statistics.median(b) for a, b in zip(*pair, strict=True)])
        seconds = [statistics.median(s for turn in turns for s in turn) for turns in pair]
        prediction = play(with_work(plan, tokens / args.traced))
        alone = next(s for track, s in prediction.busy.items() if track.value == "compute")
        past = break_even is not None and tokens >= break_even
        if past and speeds.median < GOAL:
            missed.append(tokens)
        rows.append([
            tokens, f"{seconds[0]:.3f}", f"{seconds[1]:.3f}", f"{speeds.median:.3f}",
            f"{speeds.least:.3f} to {speeds.most:.3f}",
            f"{prediction.step_seconds:.3f}", f"{prediction.step_seconds / seconds[1]:.3f}",
            f"{alone / prediction.step_seconds:.3f}", "yes" if past else "",
        ])  # fmt: skip
    names = ["tokens", "memory, s", "drive, s", "speed", "spread", "drive predicted", "predicted / measured",
             "speed predicted", "past break-even"]  # fmt: skip
    lines += table(names, rows)
    if break_even is None:
        return [*lines, "The planner names no break-even: in its eyes no number of tokens is enough."]
    past = [tokens for tokens in points if tokens >= break_even]
    verdict = f"MISSED at {missed}" if missed else "met" if past else "not reached by --tokens"
    lines.append(
        f"Break-even that the planner names (from a step of {args.traced} tokens): {break_even} tokens per step. Goal "
        f"from there on: at least {GOAL:.0%} of the speed in memory: {verdict}."
    )
    return lines


if __name__ == "__main__":
    main()
