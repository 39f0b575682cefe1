"""Gemini's ZeRO-3 against torch's FSDP2, on the same model, data and hyperparameters, interleaved in one run.

    python benchmarks/fsdp2_peer.py

Each system is a group of rank processes of its own (gloo, CPU, fp32), so that each has its own peak memory; the groups
take turns in blocks of a few steps (A B C D A B C D ...), and whoever is not computing waits on a pipe. A ratio is
taken inside a round, so that a busy machine hurts everybody alike; what is printed is the median over rounds. FSDP2
runs as its documentation says (``fully_shard`` on every layer and the root), with and without ``CPUOffloadPolicy``,
and once with ``reshard_after_forward=False``, its counterpart to a budget that lets gathered weights stay; its
optimizer and its clipping are the fastest variants of torch's that work here, found out in processes of their own.
Losses must agree with FSDP2's. ``--profile`` says where our time goes.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._memory import trim
from benchmarks._models import (
    add_model_arguments,
    make_batch,
    make_llama,
    shape_of,
    smallest_budget,
    train_step,
)  # fmt: skip
from benchmarks._processes import Group, run_script
from benchmarks._report import add_report_arguments, head, mb, publish, set_threads, table
from benchmarks._rounds import Spread, in_turn, ratios
from benchmarks._timers import timed
from benchmarks.peers.with_fsdp2 import HYPER, shard

SYSTEMS = ("fsdp2", "fsdp2-keep", "fsdp2-offload", "gemini", "gemini-tight")
VARIANTS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False}}
AGREE_STEPS, AGREE_RTOL = 10, 1e-4
WAITING = "waiting for the other ranks' bytes"


# ---- a rank ----------------------------------------------------------------------------------------------------------


def make_orders(settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    import torch.distributed as dist

    set_threads(settings["threads"])
    dist.init_process_group("gloo")
    rank, shape = dist.get_rank(), settings["shape"]
    model = make_llama(shape)
    if settings["system"].startswith("fsdp2"):
        model, optimizer, clip = peer(model, settings)
    else:
        model, optimizer, clip = ours(model, settings)
    trim()
    batch = {"number": 0}

    def one() -> tuple[float, float]:
        data = make_batch(shape, batch["number"], rank)
        batch["number"] += 1
        return train_step(model, optimizer, clip, data)

    def block(steps: int) -> dict[str, Any]:
        dist.barrier()
        begin, worked = time.perf_counter(), time.process_time()
        done = [one() for _ in range(steps)]
        seconds, cpu = time.perf_counter() - begin, time.process_time() - worked
        losses, norms = zip(*done, strict=True)
        return {"seconds": seconds, "cpu": cpu, "losses": losses, "norms": norms}

    def variants(rounds: int) -> dict[str, Any]:
        return time_variants(model, make_batch(shape, 0, rank), rounds)

    def profile(steps: int) -> list[Any]:
        return time_parts(one, dist.barrier, steps)

    def report() -> dict[str, Any]:
        return dict(model.memory_report()) if hasattr(model, "memory_report") else {}

    return {"block": block, "variants": variants, "profile": profile, "report": report}


def ours(model: Any, settings: dict[str, Any]) -> tuple[Any, Any, Callable[[float], Any]]:
    import gemini

    memory = gemini.MemoryBudget(cpu=settings["budget"])
    model = gemini.GeminiDDP(model, gemini.GeminiConfig(precision="fp32", memory=memory, device="cpu"))
    return model, gemini.HybridAdam(model.parameters(), **HYPER), model.clip_grad_norm_


def peer(model: Any, settings: dict[str, Any]) -> tuple[Any, Any, Callable[[float], Any]]:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy

    options: dict[str, Any] = {}
    if settings["system"] == "fsdp2-offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if settings["system"] == "fsdp2-keep":
        options["reshard_after_forward"] = False
    shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER, **VARIANTS[settings.get("adam", "fused")])
    foreach = {"foreach": True, "plain": False}[settings.get("clip", "foreach")]

    def clip(max_norm: float) -> Any:
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=foreach)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    return model, optimizer, clip


def time_variants(model: Any, batch: Any, rounds: int) -> dict[str, Any]:
    """Seconds of torch's variants of clipping and of AdamW on sharded params (lr 0: nothing changes)."""
    import torch

    model(**batch).loss.backward()
    times: dict[str, Any] = {"clip": {}, "adam": {}}
    for name, foreach in (("foreach", True), ("plain", False)):
        times["clip"][name] = clock(
            lambda foreach=foreach: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach), rounds
        )
    for name, flags in VARIANTS.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, **flags)
        times["adam"][name] = clock(optimizer.step, rounds)
    return times


def clock(function: Callable[[], Any], rounds: int) -> float | str:
    """The median of a few calls after a first one; the error if it does not work."""
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        try:
            function()
        except Exception as e:
            return f"{type(e).__name__}: {e}".splitlines()[0][:100]
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def time_parts(one: Callable[[], Any], barrier: Callable[[], Any], steps: int) -> list[Any]:
    """Seconds per step inside our own functions, without what another of them takes inside; plain timers."""
    from gemini import kernels
    from gemini.memory.movement.manager import Manager
    from gemini.memory.movement.mover import Mover
    from gemini.ranks import wire
    from gemini.train.gradients.store import GradientStore
    from gemini.train.passes.stepping import Stepping
    from gemini.train.sharding.reduction import Reduction
    from gemini.train.sharding.scripted import Channel
    from gemini.train.sharding.shards import Shards
    from gemini.train.update.updates import Updates

    places: list[tuple[Any, str, str]] = [
        (Channel, "gather", "all_gather: starting"), (Mover, "fetch", "all_gather: own shard"),
        (wire.Pending, "wait", WAITING), (Shards, "_exchange", "agreement: starting"),
        (Reduction, "take", "gradients into their chunk, scaled"), (Reduction, "reduce", "reduce_scatter: starting"),
        (wire, "add_up", "reduce_scatter: adding up"), (GradientStore, "land_piece", "landing, with the norm"),
        (Reduction, "settle", "norms: starting"), (Manager, "populate", "memory for windows and gradients"),
        (Stepping, "clip_grad_norm", "clip_grad_norm_"), (Updates, "_run_now", "adam: around the kernel"),
        (kernels, "update", "adam: kernel"),
    ]  # fmt: skip
    barrier()
    with timed(places, charged=WAITING) as found:  # a wait counts for what is waited for
        begin = time.perf_counter()
        for _ in range(steps):
            one()
        whole = time.perf_counter() - begin
    parts = {what: (sum(own for _, own in calls) / steps, len(calls) / steps) for what, calls in found.items()}
    return [whole / steps, parts]


# ---- the coordinator -------------------------------------------------------------------------------------------------


def settings_of(args: argparse.Namespace, system: str, fastest: Mapping[str, str]) -> dict[str, Any]:
    settings = {"system": system, "shape": shape_of(args), "threads": args.threads}
    need, layout = smallest_budget(vars(args), args.ranks, "fp32")
    per_rank = sum(need.values()) + (4 * layout.numel if system == "gemini" else 0)
    return settings | dict(fastest) | {"budget": per_rank * args.ranks}


def start(args: argparse.Namespace, system: str, fastest: Mapping[str, str]) -> Group:
    settings = settings_of(args, system, fastest)
    return Group(__file__, settings, args.ranks, threads=args.threads, timeout=args.timeout)


def find_fastest(args: argparse.Namespace) -> tuple[dict[str, str], str]:
    """The variants of clipping and AdamW that serve FSDP2 best, and a sentence about it."""
    with start(args, "fsdp2", {}) as group:
        times = group.order("variants", rounds=3)[0]
    fastest, said = {}, []
    for what, by_name in times.items():
        working = {name: seconds for name, seconds in by_name.items() if isinstance(seconds, float)}
        fastest[what] = min(working, key=lambda name: working[name])
        shown = [f"{name} {s * 1e3:.1f} ms" if isinstance(s, float) else f"{name} {s}" for name, s in by_name.items()]
        said.append(f"{what}: {', '.join(shown)}, taken: {fastest[what]}")
    return fastest, "FSDP2's variants: " + "; ".join(said) + "."


def take_turns(args: argparse.Namespace, groups: Mapping[str, Group]) -> dict[str, dict[str, Any]]:
    """Blocks of steps in turns: per system the seconds of each round, the mean loss of each step, and peaks."""
    seen: dict[str, dict[str, Any]] = {
        s: {"seconds": [], "cpu": [], "losses": [], "norms": [], "anon": 0} for s in groups
    }
    for number, system in in_turn(groups, args.rounds, order="as given"):
        group, own = groups[system], seen[system]
        done = group.order("block", watch=True, steps=args.steps)
        if number >= 0:
            own["seconds"].append(max(rank["seconds"] for rank in done))
            own["cpu"].append(sum(rank["cpu"] for rank in done))
            print(f"round {number}: {system} {own['seconds'][-1]:.2f}", file=sys.stderr, flush=True)
        own["losses"] += [statistics.fmean(step) for step in zip(*(r["losses"] for r in done), strict=True)]
        own["norms"] += done[0]["norms"]
        own["anon"] = max(own["anon"], *(rank.peak_anon for rank in group.ranks))
    for system, group in groups.items():
        seen[system]["rss"] = max(rank.status()["VmHWM"] for rank in group.ranks)
        seen[system]["report"] = group.order("report")[0]
    return seen


def tell_profile(profiles: Mapping[str, list[Any]]) -> list[str]:
    lines = []
    for system, (whole, parts) in profiles.items():
        rows = [
            [what, f"{seconds * 1e3:.1f}", f"{seconds / whole:.1%}", f"{calls:.0f}"]
            for what, (seconds, calls) in sorted(parts.items(), key=lambda item: -item[1][0])
        ]
        rest = whole - sum(seconds for seconds, _ in parts.values())
        rows.append(["everything else: the model's own forward and backward", f"{rest * 1e3:.1f}",
                     f"{rest / whole:.1%}", ""])  # fmt: skip
        lines += [f"Where rank 0 of {system} spends a step of {whole * 1e3:.0f} ms (own time):", ""]
        lines += table(["where", "ms per step", "share", "calls per step"], rows)
    return lines


def compare(args: argparse.Namespace, seen: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Tables of speed, memory and losses; and what is wrong."""
    base = next(iter(seen))
    tokens = args.ranks * args.batch * args.tokens * args.steps
    rows, wrong = [], []
    for system, own in seen.items():
        speed = statistics.median(tokens / s for s in own["seconds"])
        over = [
            Spread.of(ratios(seen[other]["seconds"], own["seconds"])).told() for other in SYSTEMS[:3] if other in seen
        ]
        count = min(AGREE_STEPS, len(own["losses"]))
        pairs = list(zip(own["losses"][:count], seen[base]["losses"][:count], strict=True))
        off = max(abs(a - b) / abs(b) for a, b in pairs)
        if not off <= AGREE_RTOL:
            wrong.append(f"{system}: losses differ from {base}'s by {off:.1e} within {count} steps")
        rows.append([system, f"{speed:.0f}", *over, f"{statistics.median(own['cpu']) / args.steps:.2f}",
                     mb(own["rss"]), mb(own["anon"]), f"{off:.1e}"])  # fmt: skip
    names = ["system", "tokens/s", *(f"speed over {s} (range)" for s in SYSTEMS[:3] if s in seen), "CPU s per step",
             "peak RSS per rank", "peak anonymous in steps", "losses off by"]  # fmt: skip
    lines = table(names, rows)
    steps = len(seen[base]["losses"])
    shown = [*range(min(AGREE_STEPS, steps)), *range(AGREE_STEPS, steps, 5)]
    lines += ["Mean loss over ranks, and the gradient norm before clipping, by step:", ""]
    lines += table(
        ["step", *(f"{s}: loss, norm" for s in seen)],
        [[i, *(f"{o['losses'][i]:.6f}, {o['norms'][i]:.5f}" for o in seen.values())] for i in shown],
    )
    lines += ["Seconds per block, by round:", ""]
    lines += table(
        ["system", *(str(i + 1) for i in range(args.rounds))],
        [[s, *(f"{x:.2f}" for x in own["seconds"])] for s, own in seen.items()],
    )
    for system, own in seen.items():
        if own["report"]:
            cpu = own["report"]["cpu"]
            lines += [f"{system}: budget {mb(cpu['budget'])} MB per rank, peak in the ledger {mb(cpu['peak'])} MB, "
                      f"sent in a step {({k: mb(v) for k, v in own['report']['sent'].items()})} MB.", ""]  # fmt: skip
    return lines, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="may be given several times (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="after one to warm up (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="of a block (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="of each rank")
    parser.add_argument("--profile", action="store_true", help="also say where our time goes")
    add_report_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.layers, args.vocab, args.tokens, args.rounds, args.steps = 256, 4, 2048, 64, 3, 3
    fastest, said = find_fastest(args)
    profiles: dict[str, list[Any]] = {}
    with ExitStack() as stack:
        groups = {s: stack.enter_context(start(args, s, fastest)) for s in args.system or SYSTEMS}
        seen = take_turns(args, groups)
        for system, group in groups.items():
            if args.profile and system.startswith("gemini"):
                profiles[system] = group.order("profile", steps=args.steps)[0]
    lines, wrong = compare(args, seen)
    _, layout = smallest_budget(vars(args), args.ranks, "fp32")
    report = head(
        "Gemini and FSDP2",
        [
            f"Llama of {args.layers} layers of {args.hidden}, vocab {args.vocab}: {layout.payload:,} params in fp32 "
            f"over {args.ranks} ranks (gloo), {args.batch} x {args.tokens} tokens per rank and step, AdamW {HYPER}, "
            f"clipping to 1.0; {args.rounds} rounds of {args.steps} steps per system after one to warm up.",
            said,
        ],
        threads=args.threads,
    )
    report += [
        "fsdp2: reshard_after_forward as by default; fsdp2-keep: False; fsdp2-offload: CPUOffloadPolicy(pin_memory="
        "False). gemini: a budget with room for all gathered weights; gemini-tight: the smallest the plan accepts with "
        "every state in memory. Speed over 1 is faster. CPU s per step: of all ranks and all their threads, which a "
        "busy machine changes less than the time. Memory in MB (10^6), the highest rank; RSS is of the whole "
        "life of a process, building the whole model included; anonymous memory is sampled during steps, the heap "
        "trimmed before them in every system. torch's clipping sums squares in fp32, Gemini's in fp64: the norms may "
        "differ from the fourth digit on.",
        "",
        *lines,
        *tell_profile(profiles),
    ]
    count = min(AGREE_STEPS, (args.rounds + 1) * args.steps)
    report += [f"WRONG: {w}" for w in wrong] or [f"All losses agree to {AGREE_RTOL} over the first {count} steps."]
    publish(report, args.out, theme=None if args.quick else "fsdp2_peer")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_script(make_orders, main)
