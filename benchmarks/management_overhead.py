"""What being managed costs when nothing has to move: the step of a small Llama with and without GeminiDDP.

    python benchmarks/management_overhead.py --out benchmarks/reports/management_overhead_<hardware>_<date>.md

All sides start from the same weights and read the same batches. "plain" is the bare model with HybridAdam, clipped by
``torch.nn.utils.clip_grad_norm_``: the same optimizer, so the difference is management alone. "AdamW" is what people
write without us: torch's fused AdamW on fp32 masters, cast to the weights after every step. The managed model runs with
the serial engine and with the overlapped one. They live in one process and take turns, a few steps
each, in rotating order, so that a busy machine hurts all alike; each ratio is the median of the ratios of neighbouring
turns. A turn ends when no update is in flight any more, and that wait is charged to it. ``--profile`` also says where
the managed side spends its time, hook by hook (plain timers) and function by function (cProfile, which adds its own).
"""

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gemini
from benchmarks import _models
from benchmarks._report import add_out, head, publish, set_threads, table
from benchmarks._rounds import in_turn, median_ratio, ratios
from benchmarks._timers import timed

PHASES = ("forward", "backward", "clip", "update")
PLAIN, PEER, SERIAL, OVERLAPPED = "plain", "AdamW", "serial", "overlapped"
GOAL = 0.01
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_model(args: argparse.Namespace, hidden: int) -> Any:
    return _models.build(_models.llama_config(hidden, args.layers, args.vocab, positions=args.tokens))


class Side:
    """One of the loops."""

    clock = "wall"

    def __init__(self, model: Any, optimizer: Any, clip: Callable[[float], Any]):
        self.model, self.optimizer, self.clip = model, optimizer, clip
        engine = model.__dict__.get("_gemini_engine")
        self.drain: Callable[[], None] = getattr(engine, "drain", lambda: None)
        self.turns: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def turn(self, batches: list[dict[str, torch.Tensor]], *, keep: bool) -> float:
        """A few steps of the ordinary loop; the first loss. Its four phases are timed, per step."""
        now, total, losses = CLOCKS[self.clock], [0.0] * len(PHASES), []
        for number, batch in enumerate(batches):
            clock = [now()]
            loss = self.model(**batch).loss
            clock.append(now())
            loss.backward()
            clock.append(now())
            self.clip(1.0)
            clock.append(now())
            self.optimizer.step()
            self.optimizer.zero_grad()
            if number == len(batches) - 1:
                self.drain()
            clock.append(now())
            losses.append(loss.detach())
            total = [a + end - begin for a, begin, end in zip(total, clock[:-1], clock[1:], strict=True)]
        if keep:
            for phase, seconds in zip(PHASES, total, strict=True):
                self.turns[phase].append(seconds / len(batches))
        return float(losses[0])

    def seconds(self, phases: tuple[str, ...]) -> list[float]:
        """Of some phases together, turn by turn."""
        return [sum(parts) for parts in zip(*(self.turns[phase] for phase in phases), strict=True)]


class MasterAdamW:
    """Torch's fused AdamW on fp32 copies of half-precision weights (on fp32 weights: on those)."""

    def __init__(self, params: list[torch.nn.Parameter]):
        self.params = params
        self.wide = params[0].dtype is not torch.float32
        self.masters = [p.detach().float() if self.wide else p for p in params]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, weight_decay=0.01, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        if self.wide:
            for param, master in zip(self.params, self.masters, strict=True):
                master.grad = param.grad.float()
        self.optimizer.step()
        if self.wide:
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)
                master.grad = None

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


def make_sides(args: argparse.Namespace, hidden: int, precision: str) -> dict[str, Side]:
    sides = {}
    for name in (PLAIN, PEER):
        model = make_model(args, hidden).to(DTYPES[precision])
        params = list(model.parameters())
        optimizer = MasterAdamW(params) if name == PEER else gemini.HybridAdam(params, lr=1e-4)
        sides[name] = Side(model, optimizer, partial(torch.nn.utils.clip_grad_norm_, params))
    for name in (SERIAL, OVERLAPPED):
        memory = gemini.MemoryBudget(cpu="8GiB")
        config = gemini.GeminiConfig(precision=precision, memory=memory, device="cpu", overlap=name == OVERLAPPED)
        managed = gemini.GeminiDDP(make_model(args, hidden), config)
        sides[name] = Side(managed, gemini.HybridAdam(managed.parameters(), lr=1e-4), managed.clip_grad_norm_)
    return sides


def compare(args: argparse.Namespace, hidden: int, precision: str) -> list[str]:
    """Take turns; the lines of a table."""
    sides = make_sides(args, hidden, precision)
    first: dict[str, float] = {}
    turns: dict[int, list[dict[str, Any]]] = {}
    gc.collect()
    gc.disable()  # a collection in one side's step would be charged to it; all make the same garbage
    try:
        for number, name in in_turn(sides, args.turns, args.warmup):
            if number not in turns:
                gc.collect()
                turns[number] = [batch_of(args, seed=1000 * (number + args.warmup) + i) for i in range(args.steps)]
            loss = sides[name].turn(turns[number], keep=number >= 0)
            first.setdefault(name, loss)
    finally:
        gc.enable()
    # bf16 masters round half away from zero, a cast half to even: there the first losses agree closely, not in bits.
    assert max(first.values()) - min(first.values()) < 1e-2, f"the sides do not compute the same: {first}"
    num_params = sum(p.numel() for p in sides[PLAIN].model.parameters())
    lines = [f"## {precision}, hidden {hidden}: {num_params / 1e6:.1f}M params", ""]
    for name, side in sides.items():
        if name in (SERIAL, OVERLAPPED):
            lines += against(name, side, sides)
    if args.profile:
        lines += ["", *time_hooks(args, sides[SERIAL]), "", *profile(args, sides[SERIAL])]
    return [*lines, ""]


def against(name: str, side: Side, sides: dict[str, Side]) -> list[str]:
    """One managed side against the bare model with the same optimizer, and against AdamW."""
    names = [name, "plain ms", "managed ms", "difference us", "ratio (quartiles)", "AdamW ms", "managed / AdamW"]
    parts = [
        *((phase, (phase,)) for phase in PHASES),
        ("forward + backward + clip", PHASES[:3]),
        ("whole step", PHASES),
    ]
    rows = []
    for words, phases in parts:
        plain, peer, managed = (s.seconds(phases) for s in (sides[PLAIN], sides[PEER], side))
        low, middle, high = statistics.quantiles(ratios(managed, plain), n=4)
        difference = statistics.median(y - x for x, y in zip(plain, managed, strict=True))
        rows.append([
            words, ms(plain), ms(managed), f"{difference * 1e6:+.0f}", f"{middle:.3f} ({low:.3f}-{high:.3f})", ms(peer),
            f"{median_ratio(managed, peer):.3f}",
        ])  # fmt: skip
    overhead = middle - 1  # of the whole step, the last row
    met = "met" if overhead < GOAL else "MISSED"
    verdict = f"Overhead of the whole step: {overhead:+.2%}; goal below {GOAL:.0%}: {met}."
    return [*table(names, rows), verdict, ""]


def ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f}"


def batch_of(args: argparse.Namespace, seed: int) -> dict[str, torch.Tensor]:
    return _models.uniform_batch(args.vocab, args.batch, args.tokens, seed)


def time_hooks(args: argparse.Namespace, managed: Side) -> list[str]:
    """Microseconds per step inside each kind of hook, and inside the kernels that some of it is."""
    from gemini.train.gradients import store as gradients
    from gemini.train.passes.backward import BackwardPass
    from gemini.train.passes.forward import ForwardPass
    from gemini.train.passes.stepping import Stepping
    from gemini.train.update import tiles as update
    from gemini.train.update.updates import Updates

    places: list[tuple[Any, str, str]] = [
        (ForwardPass, "begin_call", "forward pre-hooks"),
        (ForwardPass, "end_call", "forward hooks"),
        (BackwardPass, "begin_of", "hooks on outputs, in backward"),
        (BackwardPass, "take_grad", "post-accumulate hooks (gradients land)"),
        (gradients.kernels, "copy_grad", "  of these: kernel, copy and norm"),
        (BackwardPass, "end", "end of backward"),
        (Stepping, "clip_grad_norm", "clip_grad_norm_"),
        (Updates, "_run_now", "updates of chunks"),
        (update.kernels, "update", "  of these: kernel"),
        (BackwardPass, "discard", "zero_grad"),
    ]
    steps = max(5, args.turns // 2)
    with timed(places) as found:
        for _ in range(steps):
            managed.turn([batch_of(args, seed=3)], keep=False)
    rows = []
    for what in dict.fromkeys(what for _, _, what in places):
        if times := [whole for whole, _ in found.get(what, [])]:
            middle, calls = statistics.median(times) * 1e6, len(times) / steps
            rows.append([what, f"{middle * calls:.0f}", f"{calls:.0f}", f"{middle:.1f}"])
    return table(["where", "us per step", "calls per step", "median us per call"], rows)


def profile(args: argparse.Namespace, managed: Side) -> list[str]:
    """Own time per step of every function of ours, and of what it calls in C, under cProfile (which adds its own)."""
    profiler, steps = cProfile.Profile(), 10
    profiler.enable()
    for _ in range(steps):
        managed.turn([batch_of(args, seed=2)], keep=False)
    profiler.disable()
    root = str(Path(gemini.__file__).parent)
    rows = []
    for (file, line, name), (_, calls, own, total, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        if file.startswith(root):
            where = f"{Path(file).relative_to(Path(root).parent)}:{line} {name}"
            rows.append((own / steps * 1e6, total / steps * 1e6, calls / steps, where))
    costliest = [[where, f"{own:.0f}", f"{total:.0f}", f"{n:.0f}"] for own, total, n, where in sorted(rows)[:-26:-1]]
    return [
        "Where the managed side is, per step under cProfile (own time; with what it calls; calls):",
        "",
        *table(["function", "own us", "with calls us", "calls"], costliest),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, action="append", help="may be given several times (default: 256 and 512)")
    parser.add_argument("--precision", action="append", choices=tuple(DTYPES), help="default: bf16 and fp32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=20, help="of each side, timed (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="of a turn (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="turns that do not count")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch and of the kernels")
    parser.add_argument(
        "--clock",
        choices=tuple(CLOCKS),
        default="wall",
        help="processor: time of this process alone, on a busy machine",
    )
    parser.add_argument("--profile", action="store_true")
    add_out(parser)
    args = parser.parse_args()
    Side.clock = args.clock
    set_threads(args.threads)
    report = head(
        "Cost of management when everything fits",
        [
            f"Llama of {args.layers} layers, vocab {args.vocab}, {args.batch} x {args.tokens} tokens, clipping on all "
            f"sides, {args.threads} threads, {args.turns} turns of {args.steps} steps each.",
        ],
    )
    for hidden in args.hidden or [256, 512]:
        for precision in args.precision or ["bf16", "fp32"]:
            report += compare(args, hidden, precision)
    publish(report, args.out)


if __name__ == "__main__":
    main()
