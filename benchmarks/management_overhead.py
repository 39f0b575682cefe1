"""What being managed costs when nothing has to move: the step of a small Llama with and without GeminiDDP.

    python benchmarks/management_overhead.py --out benchmarks/reports/management_overhead_<hardware>_<date>.md

Both sides start from the same weights, read the same batches, and use HybridAdam; the plain one clips with
``torch.nn.utils.clip_grad_norm_``. They live in one process and take turns step by step, the one that goes first
alternating, so that a busy machine hurts both alike; each ratio is the median of the ratios of neighbouring steps.
``--profile`` also says where the managed side spends its time, hook by hook (plain timers) and function by function
(cProfile, which adds its own).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import gemini
from gemini import kernels

PHASES = ("forward", "backward", "clip", "update")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_model(args: argparse.Namespace, hidden: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(1, hidden // 64)
    config = LlamaConfig(
        vocab_size=args.vocab, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=args.layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=args.tokens, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


class Side:
    """One of the two loops."""

    def __init__(self, model: Any, clip: Callable[[float], Any]):
        self.model = model
        self.optimizer = gemini.HybridAdam(model.parameters(), lr=1e-4)
        self.clip = clip
        self.times: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def step(self, batch: dict[str, torch.Tensor], *, keep: bool) -> float:
        """The ordinary loop; its four phases are timed."""
        clock = [time.perf_counter()]
        loss = self.model(**batch).loss
        clock.append(time.perf_counter())
        loss.backward()
        clock.append(time.perf_counter())
        self.clip(1.0)
        clock.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        clock.append(time.perf_counter())
        if keep:
            for phase, begin, end in zip(PHASES, clock[:-1], clock[1:], strict=True):
                self.times[phase].append(end - begin)
        return float(loss.detach())

    def totals(self) -> list[float]:
        return [sum(parts) for parts in zip(*self.times.values(), strict=True)]


def make_sides(args: argparse.Namespace, hidden: int, precision: str) -> tuple[Side, Side]:
    plain = make_model(args, hidden)
    managed = make_model(args, hidden)
    for param in plain.parameters():
        param.data = param.data.to(DTYPES[precision])
    config = gemini.GeminiConfig(precision=precision, memory=gemini.MemoryBudget(cpu="8GiB"), device="cpu")
    managed = gemini.GeminiDDP(managed, config)
    params = list(plain.parameters())
    plain_side = Side(plain, lambda norm: torch.nn.utils.clip_grad_norm_(params, norm))
    return plain_side, Side(managed, managed.clip_grad_norm_)


def compare(args: argparse.Namespace, hidden: int, precision: str) -> list[str]:
    """Take turns; the lines of a table."""
    plain, managed = make_sides(args, hidden, precision)
    generator = torch.Generator().manual_seed(1)
    first_losses: list[float] = []
    gc.collect()
    gc.disable()  # a collection in one side's step would be charged to it; both make the same garbage
    try:
        for number in range(args.warmup + args.steps):
            ids = torch.randint(0, args.vocab, (args.batch, args.tokens), generator=generator)
            batch = {"input_ids": ids, "labels": ids}
            keep = number >= args.warmup
            pair = (plain, managed) if number % 2 else (managed, plain)
            losses = {id(side): side.step(batch, keep=keep) for side in pair}
            if number == 0:
                first_losses = [losses[id(plain)], losses[id(managed)]]
            if number % 10 == 9:
                gc.collect()
    finally:
        gc.enable()
    # bf16 masters round half away from zero, a cast half to even: there the first losses agree closely, not in bits.
    assert abs(first_losses[0] - first_losses[1]) < 1e-2, f"the two sides do not compute the same: {first_losses}"
    num_params = sum(p.numel() for p in plain.model.parameters())
    lines = [
        f"## {precision}, hidden {hidden}: {num_params / 1e6:.1f}M params",
        "",
        "| | plain ms | managed ms | difference us | ratio (quartiles) |",
        "|---|---:|---:|---:|---:|",
    ]
    for phase in (*PHASES, "whole step"):
        a, b = (side.totals() if phase == "whole step" else side.times[phase] for side in (plain, managed))
        ratios = sorted(y / x for x, y in zip(a, b, strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        difference = statistics.median(y - x for x, y in zip(a, b, strict=True))
        lines.append(
            f"| {phase} | {statistics.median(a) * 1e3:.2f} | {statistics.median(b) * 1e3:.2f} | "
            f"{difference * 1e6:+.0f} | {middle:.3f} ({low:.3f}-{high:.3f}) |"
        )
    if args.profile:
        lines += ["", *time_hooks(args, managed), "", *profile(args, managed)]
    return [*lines, ""]


def time_hooks(args: argparse.Namespace, managed: Side) -> list[str]:
    """Microseconds per step inside each kind of hook, and inside the kernels that some of it is."""
    from gemini.train import gradients, optimizer, update
    from gemini.train.engine import Engine

    places: list[tuple[Any, str, str]] = [
        (Engine, "begin_call", "forward pre-hooks"),
        (Engine, "end_call", "forward hooks"),
        (Engine, "begin_backward_of", "hooks on outputs, in backward"),
        (Engine, "take_grad", "post-accumulate hooks (gradients land)"),
        (gradients.kernels, "copy_grad", "  of these: kernel, copy and norm"),
        (Engine, "end_backward", "end of backward"),
        (Engine, "clip_grad_norm_", "clip_grad_norm_"),
        (optimizer, "update_chunk", "updates of chunks"),
        (update.kernels, "adam_update", "  of these: kernel"),
        (Engine, "discard_grads", "zero_grad"),
    ]
    spent: dict[str, list[float]] = {what: [] for _, _, what in places}
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]

    def timed(real: Any, into: list[float]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                into.append(time.perf_counter() - begin)

        return call

    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, args.vocab, (args.batch, args.tokens), generator=generator)
    steps = max(5, args.steps // 2)
    try:
        for owner, name, what in places:
            setattr(owner, name, timed(getattr(owner, name), spent[what]))
        for _ in range(steps):
            managed.step({"input_ids": ids, "labels": ids}, keep=False)
    finally:
        for owner, name, real in before:
            setattr(owner, name, real)
    lines = ["| where | us per step | calls per step | median us per call |", "|---|---:|---:|---:|"]
    for what, times in spent.items():
        if times:
            middle, calls = statistics.median(times) * 1e6, len(times) / steps
            lines.append(f"| {what} | {middle * calls:.0f} | {calls:.0f} | {middle:.1f} |")
    return lines


def profile(args: argparse.Namespace, managed: Side) -> list[str]:
    """Own time per step of every function of ours, and of what it calls in C, under cProfile (which adds its own)."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, args.vocab, (args.batch, args.tokens), generator=generator)
    profiler, steps = cProfile.Profile(), 10
    profiler.enable()
    for _ in range(steps):
        managed.step({"input_ids": ids, "labels": ids}, keep=False)
    profiler.disable()
    root = str(Path(gemini.__file__).parent)
    rows = []
    for (file, line, name), (_, calls, own, total, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        if file.startswith(root):
            where = f"{Path(file).relative_to(Path(root).parent)}:{line} {name}"
            rows.append((own / steps * 1e6, total / steps * 1e6, calls / steps, where))
    lines = [
        "Where the managed side is, per step under cProfile (own time; with what it calls; calls):",
        "",
        "| own us | with calls us | calls | function |",
        "|---:|---:|---:|---|",
    ]
    costliest = sorted(rows, reverse=True)[:25]
    return lines + [f"| {own:.0f} | {total:.0f} | {calls:.0f} | {where} |" for own, total, calls, where in costliest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, action="append", help="may be given several times (default: 256 and 512)")
    parser.add_argument("--precision", action="append", choices=tuple(DTYPES), help="default: bf16 and fp32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40, help="timed pairs of steps (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch and of the kernels")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="write the report here, as markdown")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels.set_num_threads(args.threads)
    report = [
        f"# Cost of management when everything fits, {time.strftime('%Y-%m-%d')}",
        "",
        f"Llama of {args.layers} layers, vocab {args.vocab}, {args.batch} x {args.tokens} tokens, HybridAdam and "
        f"clipping on both sides, {args.threads} threads, {args.steps} pairs of steps taking turns.",
        f"{platform.system()} {platform.release()}, {platform.processor() or platform.machine()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}; {kernels.capabilities()}; load "
        f"{os.getloadavg()[0]:.1f}.",
        f"Command: `python {' '.join(sys.argv)}`",
        "",
    ]
    for hidden in args.hidden or [256, 512]:
        for precision in args.precision or ["bf16", "fp32"]:
            report += compare(args, hidden, precision)
    print("\n".join(report))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(report) + "\n")


if __name__ == "__main__":
    main()
