"""What a step costs when nothing waits: computing on one core, Adam on the other, in every schedule of the engine.

    python benchmarks/overlap.py --report benchmarks/reports/overlap_<hardware>_<date>.md

The model is a stack of equal residual blocks, one chunk each, with real matrix products in bf16. Torch computes with
one thread, an update has one thread, and the tokens of a step are chosen so that both take about as long. Each round
measures forward and backward (T) and one update of every param (W), alone and beside each other: T while an unrelated
loop of the same kernel runs over equally large memory, W meanwhile. Then it trains the same model in every schedule,
one after the other, in turning order, from the same weights and on the same batches; a step is counted from one
forward's beginning to the next one's. Ratios are taken inside a round, and the median over rounds is what is told. In
the first round masters and states of all schedules are compared bit for bit.

What the steps are held against (W beside the computing that runs meanwhile):

    serial         T_forward + T_backward + W
    overlapped     max(T_forward + T_backward, W)
    with clipping  T_backward + max(T_forward, W)

``--nvme DIR``: residuals and states are on the drive, weights and gradients in memory; W streams them through.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gemini
from benchmarks._contention import AdamLoop, Busy, DriveLoop, measure_alone, measure_beside, together
from benchmarks._report import add_out, head, processor, publish, set_threads, table
from benchmarks._rounds import Spread
from benchmarks.simulate_here import one_machine, one_trace
from gemini import kernels
from gemini.machines.measure import Sizes, measure, measure_host
from gemini.planning.hardware import Hardware
from gemini.planning.placement import Placement
from gemini.planning.planes import ADAM, GRAD, WEIGHTS
from gemini.planning.planner import pose_problem
from gemini.planning.policy import NextUse
from gemini.testing.policies import plan_by_policy
from gemini.tiers import Tier

CLIP = 1e-6
"""Far below the norm of any gradient here, so that clipping changes what is computed."""
GOAL_BOUND, GOAL_SERIAL, GOAL_FIFO, GOAL_TOLD = 1.10, 1.6, 1.15, 0.10


class Schedule(NamedTuple):
    """How a model is trained. ``family``: schedules of one family compute the same bits."""

    name: str
    overlap: bool
    gradients: str
    clip: bool = False
    order: str = "next use"
    cores: int = 1
    in_backward: bool = False

    @property
    def family(self) -> str:
        return "with clipping" if self.clip else "without"


SERIAL = Schedule("serial", False, "retain")
SERIAL_CORES = Schedule("serial, Adam on all cores", False, "retain", cores=0)
SERIAL_CLIP = Schedule("serial, clipping", False, "retain", clip=True)
OVERLAPPED = Schedule("overlapped, in backward", True, "transient", in_backward=True)
FIFO = Schedule("first in, first out", True, "transient", order="fifo", in_backward=True)
LANDED = Schedule("overlapped, in backward, landed", True, "retain", in_backward=True)
RETAINED = Schedule("overlapped, after backward", True, "retain")
CLIPPED = Schedule("overlapped, clipping", True, "retain", clip=True)
SCHEDULES = (SERIAL, OVERLAPPED, FIFO, LANDED, RETAINED, SERIAL_CLIP, CLIPPED, SERIAL_CORES)
FEW = (SERIAL, OVERLAPPED, FIFO)


class Block(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.linear = nn.Linear(hidden, hidden, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


class Stack(nn.Module):
    def __init__(self, hidden: int, num_blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().pow(2).mean()


def make_model(args: argparse.Namespace) -> Stack:
    torch.manual_seed(0)
    return Stack(args.hidden, args.blocks)


def batch(args: argparse.Namespace, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(args.tokens, args.hidden, generator=generator).bfloat16()


def wrap(args: argparse.Namespace, schedule: Schedule) -> tuple[Any, Any]:
    planes = 14 * args.hidden**2 * args.blocks
    memory = gemini.MemoryBudget(cpu=2 * planes + 2**30)
    placement: Any = "auto"
    if args.nvme is not None:
        memory = gemini.MemoryBudget(cpu=2 * planes + 2**30, nvme=2 * planes, nvme_path=args.nvme)
        homes = dict.fromkeys(ADAM.states, Tier.NVME) | {WEIGHTS: Tier.CPU}
        if schedule.gradients != "transient":
            homes[GRAD] = Tier.CPU
        placement = Placement((homes,) * args.blocks)
    config = gemini.GeminiConfig(
        memory=memory, placement=placement, device="cpu", gradients=schedule.gradients, overlap=schedule.overlap,
        update_threads=1,
    )  # fmt: skip
    model = gemini.GeminiDDP(make_model(args), config)
    engine = model._gemini_engine
    shares = [chunk.spec.payload / engine.decision.problem.layout.payload for chunk in engine.store.chunks]
    assert len(shares) >= args.blocks and max(shares) <= max(0.02, 1.001 / args.blocks), (len(shares), max(shares))
    engine.updates.order = schedule.order
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-4, step_in_backward=schedule.in_backward)
    return model, optimizer


class Trained(NamedTuple):
    seconds: list[float]
    worked: float
    """Seconds of processors per step, all threads."""
    stalls: dict[str, float]
    bits: str


def train(args: argparse.Namespace, schedule: Schedule, *, with_bits: bool) -> Trained:
    """Some steps that do not count and some that do."""
    kernels.set_num_threads(schedule.cores or args.all_cores)
    try:
        model, optimizer = wrap(args, schedule)
        begins, worked = [], []
        for number in range(args.warmup + args.steps + 1):
            x = batch(args, number)
            begins.append(time.perf_counter())
            worked.append(time.process_time())
            model(x).backward()
            if schedule.clip:
                model.clip_grad_norm_(CLIP)
            optimizer.step()
            optimizer.zero_grad()
        seconds = [b - a for a, b in zip(begins[args.warmup :], begins[args.warmup + 1 :], strict=False)]
        stalls = dict(model.memory_report()["stalls"])  # when nothing is in flight any more
        bits = bits_of(model, optimizer) if with_bits else ""
        del model, optimizer
    finally:
        kernels.set_num_threads(1)
        gc.collect()
    return Trained(seconds, (worked[-1] - worked[args.warmup]) / args.steps, stalls, bits)


def bits_of(model: Any, optimizer: Any) -> str:
    """Of all weights, residuals and states."""
    found = hashlib.sha256()
    for handle in model._gemini_engine.params.handles:
        name = handle.names[0]
        state = optimizer.full_state(name)
        for tensor in (model.full_param(name), *(state[kind] for kind in sorted(state))):
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


# ---- computing and updating, alone and beside each other -------------------------------------------------------------


def computing(args: argparse.Namespace, *, keep: bool) -> Callable[[], tuple[float, float]]:
    """Forward and backward of one step, which leave the gradients in their planes (``keep``), or nowhere."""
    x = batch(args, 0)
    if keep:
        model, _ = wrap(args, SERIAL)
        forget = model.zero_grad
    else:
        model, forget = make_model(args), lambda: None
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def compute() -> tuple[float, float]:
        begin = time.perf_counter()
        loss = model(x)
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        forget()
        return middle - begin, end - middle

    return compute


class Limits(NamedTuple):
    """Of one round: gradients dropped as they come (``transient``), or landed in their planes (``retain``)."""

    alone: dict[str, Busy]
    beside: dict[str, Busy]

    def of(self, schedule: Schedule) -> float:
        """Seconds that a step of a schedule cannot do without."""
        alone, beside = self.alone[schedule.gradients], self.beside[schedule.gradients]
        if not schedule.overlap:
            return alone.computing + alone.update
        update = (alone.update, beside.update)
        if schedule.in_backward:
            return together((alone.computing, beside.computing), update)
        return alone.backward + together((alone.forward, beside.forward), update)


def limits(args: argparse.Namespace, loop: AdamLoop) -> Limits:
    alone, beside = {}, {}
    for gradients in ("transient", "retain"):
        compute = computing(args, keep=gradients == "retain")
        alone[gradients] = measure_alone(compute, loop.once, args.repeats)
        beside[gradients] = measure_beside(compute, loop.once, args.repeats)
        del compute
        gc.collect()
    return Limits(alone, beside)


def calibrate(args: argparse.Namespace, loop: AdamLoop) -> int:
    """Tokens per step with which computing takes as long as updating, both beside each other."""
    args.tokens = 16 if args.nvme is None else 128
    before: tuple[int, float] | None = None
    for _ in range(5):
        busy = measure_beside(computing(args, keep=False), loop.once, 2)
        if abs(busy.computing / busy.update - 1) < 0.04:
            break
        wanted = args.tokens * busy.update / busy.computing
        if before is not None and before[1] != busy.computing:  # a straight line through the last two
            slope = (busy.computing - before[1]) / (args.tokens - before[0])
            wanted = args.tokens + (busy.update - busy.computing) / slope if slope > 0 else wanted
        before = (args.tokens, busy.computing)
        args.tokens = max(8, min(4 * args.tokens, round(wanted / 4) * 4))
        if args.tokens == before[0]:
            break
    return args.tokens


# ---- predictions -----------------------------------------------------------------------------------------------------


def record(args: argparse.Namespace) -> Any:
    model, optimizer = wrap(args, SERIAL._replace(gradients="retain"))
    with gemini.MemoryTracer(model, skip=1) as tracer:
        for number in range(2 + args.repeats):
            model(batch(args, number)).backward()
            optimizer.zero_grad()
    return tracer.trace


def measure_machine(args: argparse.Namespace) -> Hardware:
    """As ``gemini doctor --measure`` does, with one thread of torch; gradients land with one as well."""
    kernels.set_num_threads(args.all_cores)
    figures = dict(measure(args.nvme))
    kernels.set_num_threads(1)
    figures["land_cpu"] = dict(measure_host(Sizes()))["land_cpu"]
    return Hardware(processor(), figures)


def predict(args: argparse.Namespace, schedule: Schedule, trace: Any, hardware: Hardware) -> float:
    """Seconds of a step as the simulator has it."""
    budgets = dict.fromkeys((Tier.CPU, Tier.NVME) if args.nvme is not None else (Tier.CPU,), 2**42)
    problem = pose_problem(trace, budgets, precision="bf16", gradients=schedule.gradients)
    model, _ = wrap(args, schedule)
    plan = plan_by_policy(trace, problem, model._gemini_engine.decision.placement, NextUse())
    if not schedule.overlap:
        if schedule.cores == 1:
            one = hardware.figures["update_cpu_one"]
            hardware = hardware.with_figures(one.source, update_cpu=one.value)
        return gemini.simulate(plan, hardware, schedule="serial").step_seconds
    return gemini.simulate(
        plan, hardware, schedule="overlapped", clipping=not schedule.in_backward, order=schedule.order, update_threads=1
    ).step_seconds


# ---- the run ---------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048, help="(default: %(default)s: 503M params, 7 GB twice)")
    parser.add_argument("--blocks", type=int, default=120, help="chunks of the model (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=0, help="per step (default: so that T is about W)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="steps of each run that do not count")
    parser.add_argument("--steps", type=int, default=8, help="steps of each run that count")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of T and of W per round, at least")
    parser.add_argument("--nvme", type=Path, default=None, help="folder of the spill file: states are on the drive")
    parser.add_argument("--few", action="store_true", help="only in turn, overlapped, first in first out; no clipping")
    add_out(parser)
    args = parser.parse_args()
    args.all_cores = kernels.get_num_threads()
    set_threads(1)
    publish(compare(args), args.out)


def compare(args: argparse.Namespace) -> list[str]:
    numel = args.hidden**2 * args.blocks
    schedules = FEW if args.few else SCHEDULES
    chunk = args.hidden**2
    loop = AdamLoop(numel, chunk) if args.nvme is None else DriveLoop(numel, chunk, args.nvme)
    chosen = "given"
    if not args.tokens:
        args.tokens, chosen = calibrate(args, loop), "chosen so that T is about W"
    machines, traces, found = [], [], []
    runs: dict[Schedule, list[Trained]] = {schedule: [] for schedule in schedules}
    for number in range(args.rounds):
        machines.append(measure_machine(args))
        traces.append(record(args))
        gc.collect()
        found.append(limits(args, loop))
        for schedule in reversed(schedules) if number % 2 else schedules:
            runs[schedule].append(train(args, schedule, with_bits=number == 0))
    loop.close()
    hardware, trace = one_machine(machines, "median"), one_trace(traces, "median")
    told = {schedule: predict(args, schedule, trace, hardware) for schedule in schedules}
    lines = head(
        "Computing and updating at once",
        [
            f"{args.blocks} residual blocks of a Linear({args.hidden}, {args.hidden}), one chunk each: {numel:,} "
            f"params, bf16, {args.tokens} tokens per step ({chosen}). Torch computes with 1 thread of "
            f"{args.all_cores}, updates have 1. Residuals and states are "
            f"{'in RAM' if args.nvme is None else f'on the drive of {args.nvme}, all else in RAM'}. "
            f"{args.rounds} rounds, {args.steps} steps of each schedule after {args.warmup}, one model alive at a "
            "time, in turning order.",
        ],
    )
    lines += limits_table(found)
    lines += steps_table(schedules, runs, found, told)
    lines += verdicts(schedules, runs, found, told)
    return lines


def limits_table(found: Sequence[Limits]) -> list[str]:
    rows = []
    for gradients, words in (("transient", "gradients dropped"), ("retain", "gradients landed")):
        for where in ("alone", "beside"):
            busy = [getattr(one, where)[gradients] for one in found]
            parts = [[getattr(b, part) for b in busy] for part in ("forward", "backward", "computing", "update")]
            rows.append([f"{words}, {'beside each other' if where == 'beside' else where}", *map(_ms, parts)])
    return [
        "Milliseconds, medians over rounds (processors: of all threads together).",
        "",
        *table(["", "T forward", "T backward", "T", "W"], rows),
    ]


def steps_table(
    schedules: Sequence[Schedule], runs: dict[Schedule, list[Trained]], found: Sequence[Limits],
    told: dict[Schedule, float],
) -> list[str]:  # fmt: skip
    rows = []
    for schedule in schedules:
        steps = [seconds for run in runs[schedule] for seconds in run.seconds]
        measured, prediction = statistics.median(steps), told[schedule]
        bound = statistics.median(of_rounds(runs[schedule], [one.of(schedule) for one in found]))
        stalls = sorted(runs[schedule][-1].stalls.items(), key=lambda item: -item[1])[:2]
        rows.append([
            schedule.name, _ms(steps), f"{min(steps) * 1e3:.1f} to {max(steps) * 1e3:.1f}",
            f"{prediction * 1e3:.1f}", f"{prediction / measured:.3f}",
            f"{bound:.3f}", _ms([run.worked for run in runs[schedule]]),
            ", ".join(f"{cause} {seconds * 1e3:.1f}" for cause, seconds in stalls),
        ])  # fmt: skip
    names = ["", "step, ms", "spread", "predicted", "predicted / step", "step / bound", "processors", "last stalls"]
    return table(names, rows)


def verdicts(
    schedules: Sequence[Schedule], runs: dict[Schedule, list[Trained]], found: Sequence[Limits],
    told: dict[Schedule, float],
) -> list[str]:  # fmt: skip
    lines = []

    def verdict(what: str, ratios: list[float], goal: float, *, at_most: bool) -> None:
        spread = Spread.of(ratios)
        met = spread.median <= goal if at_most else spread.median >= goal
        words = f"at {'most' if at_most else 'least'} {goal:.2f}"
        lines.append(f"- {what}: {spread.told()} over rounds; goal {words}: {'met' if met else 'MISSED'}")

    best = [statistics.median(run.seconds) for run in runs[OVERLAPPED]]
    bounds = [one.of(OVERLAPPED) for one in found]
    verdict("step / max(T, W), in backward", of_rounds(runs[OVERLAPPED], bounds), GOAL_BOUND, at_most=True)
    verdict("serial / overlapped", of_rounds(runs[SERIAL], best), GOAL_SERIAL, at_most=False)
    verdict("first in, first out / overlapped", of_rounds(runs[FIFO], best), GOAL_FIFO, at_most=False)
    if SERIAL_CORES in runs:
        cores = of_rounds(runs[SERIAL_CORES], best)
        verdict("serial with Adam on all cores / overlapped", cores, 1.0, at_most=False)
    clipping = "(T_backward + max(T_forward, W))"
    for schedule, bound in ((LANDED, "max(T, W)"), (CLIPPED, clipping), (RETAINED, clipping)):
        if schedule in runs:
            bounds = [one.of(schedule) for one in found]
            verdict(f"step / {bound}, {schedule.name}", of_rounds(runs[schedule], bounds), GOAL_BOUND, at_most=True)
    if CLIPPED in runs:
        clipped = [statistics.median(run.seconds) for run in runs[CLIPPED]]
        verdict("serial / overlapped, both clipping", of_rounds(runs[SERIAL_CLIP], clipped), 1.0, at_most=False)
    errors = {
        schedule.name: abs(told[schedule] / statistics.median([s for run in runs[schedule] for s in run.seconds]) - 1)
        for schedule in schedules
    }
    worst = max(errors, key=errors.__getitem__)
    met = "met" if errors[worst] <= GOAL_TOLD else "MISSED"
    lines.append(f"- predictions: largest error {errors[worst]:.1%} ({worst}); goal at most {GOAL_TOLD:.0%}: {met}")
    for family in dict.fromkeys(schedule.family for schedule in schedules):
        bits = {runs[schedule][0].bits for schedule in schedules if schedule.family == family}
        same = "the same" if len(bits) == 1 else "NOT the same"
        lines.append(f"- masters and states of all schedules {family.replace('without', 'without clipping')}: {same}")
    return lines


def of_rounds(runs: Sequence[Trained], others: Sequence[float]) -> list[float]:
    """Per round, the median step over what it is held against."""
    return [statistics.median(run.seconds) / other for run, other in zip(runs, others, strict=True)]


def _ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f}"


if __name__ == "__main__":
    main()
