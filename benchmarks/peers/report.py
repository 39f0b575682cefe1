"""The report of a comparison: tables of speed, memory, goals and losses, from what was measured of each peer."""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks._report import head, mb, table
from benchmarks._rounds import Spread, median_ratio, ratios
from benchmarks.peers.peer import BASES, PEERS, Seen

FIRST_RTOL, MEAN_RTOL = 2e-3, 1e-3
"""How far losses may be from the first peer's: at the first step, where all have the same weights, and on average over
all steps. bf16 rounds to 2^-9 = 2e-3 of a value; README.md says what a wrong optimizer gives."""


def speed_table(args: argparse.Namespace, seen: Mapping[str, Seen]) -> list[str]:
    bases = [name for name in BASES if name in seen]
    rows = []
    for name, own in seen.items():
        step = statistics.median(own.seconds) / args.steps
        over = [Spread.of(ratios(seen[base].seconds, own.seconds)).told(2) for base in bases]
        rows.append([name, f"{args.tokens / step:.0f}", f"{step * 1e3:.0f}", *over,
                     f"{statistics.median(own.cpu) / args.steps:.2f}"])  # fmt: skip
    names = ["peer", "tokens/s", "ms per step", *(f"speed over {base} (range)" for base in bases), "CPU s per step"]
    return table(names, rows)


def memory_table(seen: Mapping[str, Seen], num_params: int) -> list[str]:
    rows = [
        [name, mb(own.life_peak), mb(own.step_peak), mb(own.empty), f"{(own.step_peak - own.empty) / num_params:.1f}",
         f"{own.idle:.1%}"]
        for name, own in seen.items()
    ]  # fmt: skip
    names = ["peer", "peak RSS", "peak RSS in steps", "RSS before the model", "bytes per param", "CPU while idle"]
    return table(names, rows)


def loss_table(args: argparse.Namespace, seen: Mapping[str, Seen]) -> tuple[list[str], list[str]]:
    """Losses by step, and who does not train the same thing as the first peer."""
    base = seen[next(iter(seen))].losses
    rows, wrong = [], []
    for name, own in seen.items():
        offs = [abs(a - b) / abs(b) for a, b in zip(own.losses, base, strict=True)]
        first, mean = offs[0], statistics.fmean(offs)
        if not first <= FIRST_RTOL or not mean <= MEAN_RTOL or not own.losses[-1] < own.losses[0]:
            wrong.append(f"{name}: its losses are off by {first:.1e} at first and {mean:.1e} on average")
        rows.append([name, *(f"{own.losses[i]:.4f}" for i in shown(len(base))), f"{first:.1e}", f"{mean:.1e}",
                     f"{max(offs):.1e}"])  # fmt: skip
    names = ["loss at step", *(str(i) for i in shown(len(base))), "off at first", "off on average", "off at most"]
    return table(names, rows), wrong


def shown(steps: int) -> list[int]:
    """At most eight steps, spread out, with the first and the last."""
    return sorted({round(i * (steps - 1) / 7) for i in range(8)})


class Goal(NamedTuple):
    fast: Sequence[str]
    base: Sequence[str]
    least: float


def goals_of(tokens: int) -> list[Goal]:
    """Small steps: what the optimizer and the drive cost. Large ones: nobody may be faster."""
    if tokens < 1024:
        return [
            Goal(("gemini", "gemini-transient"), ("deepspeed-cpu",), 2.33),
            Goal(
                ("gemini-nvme", "gemini-nvme-budget", "gemini-transient-nvme", "gemini-transient-nvme-states"),
                ("deepspeed-nvme", "deepspeed-nvme-pipelined", "deepspeed-nvme-all"),
                3.0,
            ),
            Goal(
                ("gemini-compact-nvme", "gemini-compact-transient-nvme"),
                ("deepspeed-nvme", "deepspeed-nvme-pipelined", "deepspeed-nvme-all"),
                4.0,
            ),
            Goal(("gemini", "gemini-transient"), ("plain",), 1.2),
        ]
    return [Goal(("gemini", "gemini-transient"), BASES, 1.0)]


def goal_table(args: argparse.Namespace, seen: Mapping[str, Seen]) -> list[str]:
    rows = []
    for goal in goals_of(args.tokens):
        for base in (name for name in goal.base if name in seen):
            for fast in (name for name in goal.fast if name in seen):
                got = median_ratio(seen[base].seconds, seen[fast].seconds)
                what = f"speed of {fast} over {base}"
                rows.append([what, f"at least {goal.least}", f"{got:.2f}", met(got >= goal.least)])
    if "plain" in seen:
        limit = seen["plain"].life_peak
        for name in (name for name in seen if name.startswith("gemini")):
            peak = seen[name].life_peak
            rows.append([f"peak RSS of {name}, MB", f"below plain's {mb(limit)}", mb(peak), met(peak < limit)])
    return table(["goal", "aim", "measured", "met"], rows)


def met(yes: bool) -> str:
    return "yes" if yes else "NO"


def describe(name: str, own: Seen) -> str:
    notes = json.dumps(own.about["notes"], default=str)
    for path in (value for key, value in walk(own.about["notes"]) if key == "nvme_path"):
        notes = notes.replace(str(path), "DIR")
    packages = ", ".join(f"{package} {number}" for package, number in own.about["versions"].items())
    return f"- {name}: {PEERS[name].what}. {packages}, {own.about['threads']} threads. `{notes}`"


def walk(value: Any) -> list[tuple[str, Any]]:
    """Every key and value of nested dicts."""
    if not isinstance(value, Mapping):
        return []
    return [pair for key, inner in value.items() for pair in [(key, inner), *walk(inner)]]


def make(args: argparse.Namespace, seen: Mapping[str, Seen], free: int, warm_up: int) -> tuple[list[str], list[str]]:
    num_params = next(iter(seen.values())).about["num_params"]
    clip = "no clipping" if args.clip is None else f"clipping to {args.clip}"
    losses, wrong = loss_table(args, seen)
    report = head(
        f"Gemini and its peers, {args.tokens} tokens per step, {clip}",
        [
            f"Llama of {args.layers} layers of {args.hidden}, vocab {args.vocab}: {num_params:,} params, bf16 with "
            f"fp32 masters; {args.tokens // args.seq_len} x {args.seq_len} tokens per step, AdamW, {clip}, "
            f"{args.threads} threads each; {args.rounds} rounds of {args.steps} steps after {warm_up} to warm up.",
        ],
        threads=args.threads,
    )
    report += [
        "One process per peer, all alive, one at work at a time, every second round in the opposite order. Speed over "
        "1 is faster; ratios are taken inside a round, medians over rounds. CPU s: of all threads of the process, "
        "which a busy machine changes less than the time.",
        "",
        *speed_table(args, seen),
        "Memory in MB (10^6), of the whole process. Peak RSS: VmHWM or ru_maxrss, the larger, since it began, imports "
        "and building included. In steps: VmHWM since the end of the warm-up. Bytes per param: the latter less RSS "
        "before the model was built, so activations are in it. CPU while idle: the most of one core that a peer took "
        f"while others ran. At least {mb(free)} MB of the machine were free throughout.",
        "",
        *memory_table(seen, num_params),
        "Goals:",
        "",
        *goal_table(args, seen),
        f"All begin with the same bf16 weights and read the same tokens. Losses may be off {next(iter(seen))}'s by "
        f"{FIRST_RTOL} at the first step and {MEAN_RTOL} on average, relatively.",
        "",
        *losses,
        "Seconds per block, by round:",
        "",
        *table(
            ["peer", *(str(i + 1) for i in range(args.rounds))],
            [[name, *(f"{s:.2f}" for s in own.seconds)] for name, own in seen.items()],
        ),
        "What each is (DIR: on one drive, the same for all):",
        "",
        *(describe(name, own) for name, own in seen.items()),
        "",
    ]
    left_out = [name for name in PEERS if name not in seen]
    if left_out:
        why = "" if args.clip is None else " (step_in_backward cannot clip)"
        report += [f"Left out: {', '.join(left_out)}{why}.", ""]
    report += [f"WRONG: {w}" for w in wrong] or ["All losses agree."]
    return report, wrong
