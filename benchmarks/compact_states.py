"""Times updates of compact states against exact ones and torch's AdamW, and trains the same small model with both.

    python benchmarks/compact_states.py --params 64e6 --rounds 7 --threads 1 --steps 0
    python benchmarks/compact_states.py --params 0 --steps 1000 --seeds 0 1 2

Speed: one update of as many params, all contenders in turn in each round, ratios inside a round. A compact update moves
12 bytes per param (weight, residual, codes and scales both ways, the gradient once) and an exact one 26: from a drive
bytes decide, in memory the arithmetic does.

Training: a Llama of bytes on the source of Python's standard library, AdamW, warm-up and cosine, gradients clipped; the
held-out loss is of other files. "exact again" begins with an init that differs by one part in a million: the distance
between two runs that no one would call different, beside which that of compact to exact is to be read.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import add_out, head, publish, table
from benchmarks._rounds import Spread, measure_in_turn, median_ratio, seconds_of
from gemini import kernels
from gemini.optim import LionRule, SGDRule
from gemini.optim.compact import CompactRule
from gemini.rules import AdamRule, Arrays, Segment, UpdateRule, Where

RUNS = ["exact", "compact", "exact again"]
EXACT, COMPACT, FUSED = "gemini AdamW, exact", "gemini AdamW, compact", "torch AdamW fused fp32"


# ---- speed -----------------------------------------------------------------------------------------------------------


class Contender(NamedTuple):
    """What is timed, and the bytes per param that it reads and writes."""

    run: Callable[[], None]
    num_bytes: float


def contenders(n: int) -> dict[str, Contender]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(n, generator=generator) * 0.02
    grad = torch.randn(n, generator=generator) * 1e-3
    grad16 = grad.bfloat16()
    param = torch.nn.Parameter(weights.clone())
    param.grad = grad
    fused = torch.optim.AdamW([param], lr=1e-4, fused=True)
    found = {FUSED: Contender(fused.step, 28.0)}
    rules: dict[str, UpdateRule] = {
        EXACT: AdamRule(), COMPACT: CompactRule(AdamRule()), "gemini Lion, compact": CompactRule(LionRule()),
        "gemini SGD with momentum, compact": CompactRule(SGDRule()),
    }  # fmt: skip
    for name, rule in rules.items():
        found[name] = Contender(_updater(rule, weights, grad16), float(rule.spec.touched))
    return found


def _updater(rule: UpdateRule, weights: Tensor, grad: Tensor) -> Callable[[], None]:
    n = weights.numel()
    hi, lo = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=getattr(torch, rule.spec.residual))
    kernels.split_master(weights, hi, lo)
    states = {s.kind: torch.zeros(s.num_items(n), dtype=getattr(torch, s.dtype)) for s in rule.spec.planes}
    group = {**rule.defaults, **({"momentum": 0.9} if "momentum" in rule.defaults else {})}
    step = 0

    def update() -> None:
        nonlocal step
        step += 1
        arrays = Arrays(hi, lo, states, grad)
        rule.run(arrays, [Segment(0, n, rule.scalars(group, step, 1.0), Where("weight", 0))])

    return update


def speed(n: int, rounds: int, threads: int) -> list[str]:
    kernels.set_num_threads(threads)
    torch.set_num_threads(threads)
    all_of_them = contenders(n)
    times = measure_in_turn(list(all_of_them), rounds, lambda name: seconds_of(all_of_them[name].run))
    rows = []
    for name, contender in all_of_them.items():
        spread = Spread.of(times[name])
        rate = contender.num_bytes * n / spread.median / 1e9
        ratio = median_ratio(times[FUSED], times[name])
        each = (f"{s / n * 1e9:.3f}" for s in spread[:2])
        rows.append([name, *each, f"{rate:.1f}", contender.num_bytes, f"{ratio:.2f}"])
    return table(["update", "ns/param", "best", "GB/s", "bytes/param", "speed over torch"], rows)


# ---- training --------------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """Bytes as tokens: of the files to train on, and of others."""

    train: Tensor
    held_out: Tensor


def read_text() -> Text:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts: list[list[bytes]] = [[], []]
    for number, path in enumerate(files):
        parts[number % 10 == 0].append(path.read_bytes())
    return Text(*(torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8).long() for part in parts))


def make_model(hidden: int, layers: int, seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 64 * 64, num_hidden_layers=layers,
            num_attention_heads=hidden // 64, max_position_embeddings=256, use_cache=False,
        )
    )  # fmt: skip


def batches(text: Tensor, count: int, size: int, length: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - length, (count, size), generator=generator)
    return [torch.stack([text[start : start + length] for start in row.tolist()]) for row in starts]


class Trained(NamedTuple):
    held_out: float
    bytes_per_param: float
    vanished: float
    """The share of first moments that are 0 where their gradients have not been: what a byte cannot hold."""


def train_one(args: argparse.Namespace, text: Text, seed: int, states: str, *, again: bool = False) -> Trained:
    import gemini

    model = make_model(args.hidden, args.layers, seed)
    if again:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + 1e-6 * torch.randn(param.shape))
    model = gemini.GeminiDDP(model, gemini.GeminiConfig(precision="bf16", device="cpu", states=states))
    optimizer = gemini.HybridAdam(model.parameters(), lr=args.lr, weight_decay=0.1, betas=(0.9, args.beta2))
    warm = max(args.steps // 20, 1)

    def rate(step: int) -> float:
        return min((step + 1) / warm, 0.1 + 0.45 * (1 + math.cos(math.pi * step / args.steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for ids in batches(text.train, args.steps, args.batch, args.length, seed):
        model(input_ids=ids, labels=ids).loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = [
            model(input_ids=ids, labels=ids).loss.item() for ids in batches(text.held_out, args.held_out, 8, 128, 999)
        ]
    zeros = total = 0
    for name, _ in model.named_parameters():
        state = optimizer.full_state(name)
        moved = state["exp_avg_sq"] > 0
        zeros, total = zeros + int(((state["exp_avg"] == 0) & moved).sum()), total + int(moved.sum())
    bytes_per_param = model.memory_report()["bytes_per_param"]
    return Trained(sum(losses) / len(losses), bytes_per_param, zeros / max(total, 1))


def training(args: argparse.Namespace) -> list[str]:
    text = read_text()
    rows = []
    for seed in args.seeds:
        exact = 0.0
        for told in args.runs:
            states = "compact" if told == "compact" else "exact"
            found = train_one(args, text, seed, states, again=told == "exact again")
            exact = exact or found.held_out
            gap = found.held_out / exact - 1
            said = f"{found.bytes_per_param:.2f}", f"{found.held_out:.5f}", f"{gap:+.3%}", f"{found.vanished:.2%}"
            rows.append([seed, told, *said])
            print("|", " | ".join(map(str, rows[-1])), "|", flush=True)
    return table(["seed", "states", "bytes/param", "held-out loss", "gap", "first moments at 0"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=64e6, help="elements of an update; 0 times none")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of every contender (default: %(default)s)")
    parser.add_argument("--isa", default=None, help="instruction set of gemini's kernels (default: the best)")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps of the training; 0 trains nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of init and data")
    parser.add_argument("--runs", nargs="+", default=RUNS, choices=RUNS, help="what is trained (default: all)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=64, help="batches of 1024 bytes that are held out")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="its layers (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--beta2", type=float, default=0.999, help="of AdamW (default: %(default)s)")
    add_out(parser)
    args = parser.parse_args()
    report: list[str] = []
    if args.params:
        what = f"{int(args.params):,} params, {args.threads} threads, median of {args.rounds} interleaved rounds."
        with kernels.use_isa(args.isa):
            report += [*head("Compact states", [what]), *speed(int(args.params), args.rounds, args.threads)]
    if args.steps:
        tokens = f"{args.batch} x {args.length} tokens"
        what = f"{args.steps} steps of {tokens}, hidden size {args.hidden}, {args.layers} layers, lr {args.lr:g}."
        report += [*head("Training with compact states", [what]), *training(args)]
    publish(report, args.out)


if __name__ == "__main__":
    main()
