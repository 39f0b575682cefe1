"""The simulator against this machine: predicted and measured step times of CPU + NVMe runs, from all in memory to next
to nothing.

    python benchmarks/simulate_here.py --spill /scratch --out benchmarks/reports/simulate_here_<hardware>_<date>.md
    OMP_NUM_THREADS=1 python benchmarks/simulate_here.py --overlap --gradients transient --spill /scratch

The machine is measured as ``gemini doctor --measure`` does, the step is recorded with everything in memory, each budget
gets its plan, and each plan its prediction, of the serial schedule or, with --overlap, of the overlapped one: with
gradients "transient" updates begin inside backward, else they wait for the norm (every step is clipped). Everything is
interleaved: every round measures and records again, then builds every budget's model anew, in turning order, and makes
some steps that do not count and some that do. A prediction is made from the medians of the rounds' figures and moments,
and compared with the median of the steps. A step is a forward, a backward, an update and zero_grad; of overlapped ones
in a row each waits for what the one before left in flight.
"""

import argparse
import gc
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _models
from benchmarks._report import add_out, head, publish, table
from benchmarks._rounds import in_turn

GOAL = 0.15
SHARES = (1.1, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
"""Of all planes, what fits into host memory beside what a step needs in any case."""


class Measured(NamedTuple):
    """Seconds of one step, in parts."""

    forward: float
    backward: float
    update: float

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.update


def make_model(args: argparse.Namespace) -> Any:
    return _models.build(_models.llama_config(args.width, args.layers, args.vocab, positions=args.tokens))


def make_batch(args: argparse.Namespace) -> dict[str, Any]:
    return _models.uniform_batch(args.vocab, args.batch, args.tokens, 1)


def wrap(
    args: argparse.Namespace, budgets: dict[Any, int], placement: Any, folder: Path, *, overlap: bool
) -> tuple[Any, Any]:
    import gemini
    from gemini.tiers import Tier

    memory = gemini.MemoryBudget(cpu=budgets[Tier.CPU], nvme=budgets[Tier.NVME], nvme_path=folder)
    config = gemini.GeminiConfig(
        memory=memory, placement=placement, device="cpu", gradients=args.gradients, max_chunk=args.max_chunk,
        overlap=overlap,
    )  # fmt: skip
    model = gemini.GeminiDDP(make_model(args), config)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-4, step_in_backward=args.gradients == "transient")
    return model, optimizer


def one_step(model: Any, optimizer: Any, batch: dict[str, Any], *, clips: bool) -> Measured:
    times = [time.perf_counter()]
    loss = model(**batch).loss
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    if clips:
        model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter())
    return Measured(*(b - a for a, b in zip(times, times[1:], strict=False)))


def measure_machine(folder: Path) -> Any:
    from gemini.machines.measure import measure
    from gemini.planning.hardware import FIGURES, Hardware

    figures = dict(measure(folder))
    return Hardware(platform.node() or "here", {key: figures[key] for key in FIGURES if key in figures})


def one_machine(machines: list[Any], of: str) -> Any:
    """The median of each figure, or the best of each."""
    from gemini.planning.hardware import FIGURES, Figure, Hardware

    figures = {}
    for key, figure in machines[0].figures.items():
        values = [machine.figures[key].value for machine in machines]
        note = f"{figure.source}; {len(values)} times, from {min(values):.4g} to {max(values):.4g}"
        best = min(values) if "seconds" in FIGURES[key] or "as long" in FIGURES[key] else max(values)
        figures[key] = Figure(best if of == "best" else statistics.median(values), note)
    return Hardware(machines[0].name, figures)


def one_trace(traces: list[Any], of: str) -> Any:
    """The median of each moment's seconds, or the least of the rounds."""
    from gemini.planning.trace import with_seconds

    seconds = zip(*([moment.seconds for moment in trace.moments] for trace in traces), strict=True)
    return with_seconds(traces[0], [min(values) if of == "best" else statistics.median(values) for values in seconds])


def record(args: argparse.Namespace, folder: Path) -> Any:
    """The step with everything in memory: what is read, how much work it is, how long it takes."""
    import gemini
    from gemini.tiers import Tier

    roomy = {Tier.CPU: 2**40, Tier.NVME: 2**20}
    model, optimizer = wrap(args, roomy, "auto", folder, overlap=False)
    batch = make_batch(args)
    one_step(model, optimizer, batch, clips=False)
    with gemini.MemoryTracer(model) as tracer:
        for _ in range(1 + args.steps * 2):
            one_step(model, optimizer, batch, clips=False)
    return tracer.trace


def budgets_of(args: argparse.Namespace, trace: Any) -> list[dict[Any, int]]:
    from gemini.planning.planner import pose_problem
    from gemini.tiers import Tier

    there = dict.fromkeys((Tier.CPU, Tier.NVME), 2**40)
    problem = pose_problem(
        trace, there, precision="bf16", gradients=args.gradients, max_chunk=args.max_chunk, overlap=args.overlap
    )
    planes = sum(sum(sizes.values()) for sizes in problem.sizes)
    least = problem.spoken_for()[Tier.CPU]
    return [{Tier.CPU: least + int(share * planes), Tier.NVME: planes + 2**24} for share in args.shares]


def parts_of(timeline: Any) -> Measured:
    """The prediction in the same parts: where the first backward and the first update of the serial schedule begin."""
    spans = [span for span in timeline.spans if span.track.value == "compute"]
    moments = timeline.moments
    turn = next(i for i, name in enumerate(moments) if not name.startswith("forward"))
    forward = max(span.stop for span in spans if span.moment < turn)
    update = min((s.start for s in timeline.spans if s.name.startswith("update")), default=timeline.step_seconds)
    return Measured(forward, update - forward, timeline.step_seconds - update)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--gradients", default="retain", choices=("retain", "accumulate", "transient"))
    parser.add_argument("--overlap", action="store_true", help="updates and fetches run beside computing")
    parser.add_argument("--max-chunk", type=int, default=64 * 2**20)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of all planes, in host memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2, help="steps of each run that do not count")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run that count")
    parser.add_argument("--of", default="median", choices=("median", "best"), help="best: on a machine with other work")
    parser.add_argument("--spill", type=Path, default=None, help="folder of the spill file (default: a temporary one)")
    add_out(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.spill) as folder:
        report = compare(args, Path(folder))
    publish(report, args.out)


def compare(args: argparse.Namespace, folder: Path) -> list[str]:
    import gemini
    from gemini.planning.traffic import by_name

    machines, traces = [measure_machine(folder)], [record(args, folder)]
    budgets = budgets_of(args, traces[0])
    settings = {"gradients": args.gradients, "max_chunk": args.max_chunk}
    schedule = "overlapped" if args.overlap else "serial"
    clips = args.overlap and args.gradients != "transient"
    plans = [gemini.plan(traces[0], machines[0], budget, schedule=schedule, **settings) for budget in budgets]
    runs: list[list[Measured]] = [[] for _ in plans]
    batch = make_batch(args)
    for number, index in in_turn(range(len(plans)), args.rounds, warm_up=0, order="reversed"):
        model, optimizer = wrap(args, budgets[index], plans[index], folder, overlap=args.overlap)
        for step in range(args.warmup + args.steps):
            took = one_step(model, optimizer, batch, clips=clips)
            if step >= args.warmup:
                runs[index].append(took)
                # What is in flight at the end of a step is part of the next one: asking would wait for it.
                assert args.overlap or model.memory_report()["moved"] == by_name(plans[index].traffic)
        del model, optimizer
        gc.collect()
        if index == (0 if number % 2 else len(plans) - 1):  # the end of a round
            machines.append(measure_machine(folder))
            traces.append(record(args, folder))
            gc.collect()
    hardware, trace = one_machine(machines, args.of), one_trace(traces, args.of)
    predicted = [gemini.simulate(replace(plan, trace=trace), hardware, schedule=schedule) for plan in plans]
    return report_of(args, hardware, trace, plans, predicted, runs)


def report_of(
    args: argparse.Namespace, hardware: Any, trace: Any, plans: list[Any], predicted: list[Any],
    runs: list[list[Measured]],
) -> list[str]:  # fmt: skip
    from gemini.errors import human_bytes
    from gemini.planning.hardware import human_figure
    from gemini.tiers import Tier

    schedule = "overlapped schedule" if args.overlap else "serial schedule"
    lines = head(
        "Predicted and measured step times",
        [
            f"Llama of {args.layers} layers of {args.width}, vocab {args.vocab}: {trace.num_params:,} params, bf16, "
            f"gradients={args.gradients!r}, {args.batch} x {args.tokens} tokens, CPU + NVMe, the {schedule}. "
            f"{args.rounds} interleaved rounds, {args.steps} steps each after {args.warmup}; {args.of}.",
            f"Computing alone, recorded with everything in memory: {trace.seconds:.3f} s per step.",
        ],
    )
    names = ["budget cpu", "on nvme", "predicted, s", "measured, s", "spread", "predicted / measured", "forward",
             "backward", "update", "most waited for"]  # fmt: skip
    rows = []
    errors = []
    for plan, timeline, found in zip(plans, predicted, runs, strict=True):
        steps = sorted(run.step for run in found)
        measured = steps[0] if args.of == "best" else statistics.median(steps)
        ratio = timeline.step_seconds / measured
        errors.append(abs(ratio - 1))
        pick = min if args.of == "best" else statistics.median
        parts = ["-"] * len(Measured._fields)  # of overlapped steps nothing has a part of its own
        if not args.overlap:
            told = parts_of(timeline)
            parts = [
                f"{getattr(told, part) / pick([getattr(run, part) for run in found]):.2f}" for part in Measured._fields
            ]
        cause = next(iter(timeline.stalls), "nothing")
        rows.append([
            human_bytes(plan.problem.budgets[Tier.CPU]), human_bytes(plan.bytes_per_tier.get(Tier.NVME, 0)),
            f"{timeline.step_seconds:.3f}", f"{measured:.3f}", f"{steps[0]:.3f} to {steps[-1]:.3f}", f"{ratio:.3f}",
            *parts, cause,
        ])  # fmt: skip
    within = sum(error <= GOAL for error in errors)
    figures = [[key, human_figure(key, figure.value), figure.source] for key, figure in hardware.figures.items()]
    return [
        *lines,
        *table(names, rows),
        f"Within {GOAL:.0%}: {within} of {len(errors)} budgets; largest error {max(errors):.1%}, mean "
        f"{sum(errors) / len(errors):.1%}. Forward, backward and update are predicted / measured of that part.",
        "",
        *table(["figure", "median", "source"], figures),
    ]


if __name__ == "__main__":
    main()
