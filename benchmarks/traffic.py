"""Bytes that each rank sends per step, against the least that ZeRO-3 can do with, computed from the layout.

    python benchmarks/traffic.py

With N ranks and weights of T bytes a rank sends its shard of T/N bytes to the N - 1 others: (N-1)/N T per all-gather of
the whole model. Where the budget lets gathered weights stay, forward gathers each chunk once and backward finds it; in
a budget of just the working set backward gathers again, all but what is still there when forward ends. The
reduce-scatter sends (N-1)/N of the gradient bytes, once. What the ranks tell each other besides is the share of
control. The script fails if a rank sends more than that.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._models import add_model_arguments, make_batch, make_llama, shape_of, smallest_budget
from benchmarks._processes import Group, run_script
from benchmarks._report import add_report_arguments, head, mb, publish, set_threads, table

CONTROL_LIMIT = 0.01
"""The share of all bytes that control messages may take in a model of ordinary size."""


# ---- a rank ----------------------------------------------------------------------------------------------------------


def make_orders(settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    import gemini

    set_threads(1)
    shape = settings["shape"]
    model = make_llama(shape)
    memory = gemini.MemoryBudget(cpu=settings["budget"])
    model = gemini.GeminiDDP(
        model, gemini.GeminiConfig(precision=settings["precision"], memory=memory, device="cpu")
    )  # fmt: skip
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-4)
    engine = model._gemini_engine
    rank = engine.shards.ranks.rank

    def step(number: int) -> dict[str, Any]:
        before = engine.store.manager.num_gathers
        loss = model(**make_batch(shape, number, rank)).loss
        turn = [chunk.spec.index for chunk in engine.store.chunks if chunk.gathered]
        in_forward = engine.store.manager.num_gathers - before
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        report = model.memory_report()
        return {
            "sent": report["sent"], "turn": turn, "forward": in_forward,
            "backward": engine.store.manager.num_gathers - before - in_forward, "peak": report["cpu"]["peak"],
            "chunks": [chunk.numel for chunk in engine.decision.problem.layout.chunks],
            "params": engine.decision.problem.layout.payload,
        }  # fmt: skip

    return {"step": step}


# ---- the comparison --------------------------------------------------------------------------------------------------


def one_run(args: argparse.Namespace, size: int, precision: str, stays: bool, misses: list[str]) -> list[Any]:
    """One world size in one budget: a row of the table."""
    need, layout = smallest_budget(vars(args), size, precision)
    itemsize = 4 if precision == "fp32" else 2
    room = itemsize * layout.numel if stays else 0
    settings = {"shape": shape_of(args), "precision": precision, "budget": (sum(need.values()) + room) * size}
    with Group(__file__, settings, size, timeout=args.timeout) as group:
        steps = [group.order("step", number=number) for number in range(args.steps)]
    name = f"{size} ranks, {precision}, {'room for all' if stays else 'working set'}"
    last = steps[-1]
    if any(own["sent"] != before["sent"] for own, before in zip(steps[-2], last, strict=True)):
        misses.append(f"{name}: two steps did not send the same")
    shard = [numel // size * itemsize for numel in last[0]["chunks"]]
    once = (size - 1) * sum(shard)
    worst = max(last, key=lambda own: sum(own["sent"].values()))
    gathered, reduced = worst["sent"].get("all_gather", 0), worst["sent"].get("reduce_scatter", 0)
    # The chunk that forward uses last is being read when backward begins: it cannot have gone.
    least = once if stays else 2 * once - (size - 1) * shard[-1]
    ideal = once if stays else 2 * once - (size - 1) * sum(shard[index] for index in worst["turn"])
    control = sum(worst["sent"].values()) - gathered - reduced
    share = control / sum(worst["sent"].values())
    for what, measured, allowed in (("all-gather", gathered, least), ("reduce-scatter", reduced, once)):
        if measured > allowed:
            misses.append(f"{name}: {what} sends {measured:,} bytes per rank, {allowed:,} are needed")
    if gathered < ideal or reduced < once:
        misses.append(f"{name}: less was counted than can be: {gathered:,} gathered, {reduced:,} reduced")
    if share > CONTROL_LIMIT and not args.quick:
        misses.append(f"{name}: {share:.2%} of the bytes are control messages")
    return [
        name, len(shard), f"{worst['forward']} + {worst['backward']}", mb(ideal), mb(least),
        mb(gathered), f"{gathered / least:.4f}", mb(once), mb(reduced), f"{reduced / once:.4f}",
        f"{control:,} ({share:.3%})",
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, hidden=768, layers=12, vocab=8192, batch=1, tokens=32)
    parser.add_argument("--ranks", type=int, action="append", help="may be given several times (default: 2 and 4)")
    parser.add_argument("--precision", action="append", choices=("bf16", "fp32"), help="default: both")
    parser.add_argument("--steps", type=int, default=3, help="the last one is reported (default: %(default)s)")
    add_report_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.layers, args.vocab = 256, 6, 2048
    if args.steps < 2 or any(size < 2 for size in args.ranks or [2]):
        parser.error("at least two steps and two ranks")
    misses: list[str] = []
    rows = []
    for size in args.ranks or [2, 4]:
        for precision in args.precision or ["bf16", "fp32"]:
            for stays in (True, False):
                rows.append(one_run(args, size, precision, stays, misses))
                print(" | ".join(map(str, rows[-1])), file=sys.stderr, flush=True)
    _, layout = smallest_budget(vars(args), 1, "fp32")
    report = head(
        "Bytes sent per step",
        [
            f"Llama of {args.layers} layers of {args.hidden}, vocab {args.vocab}: {layout.payload:,} params; step "
            f"{args.steps} of {args.steps}, the rank that sent most, {args.batch} x {args.tokens} tokens per rank.",
        ],
    )
    report += [
        "In MB per rank and step. all-gather: the least is (N-1)/N of the weights once, or in a budget of the working "
        "set twice without the chunk that forward read last; \"if all at the turn stayed\" is twice without all that "
        "was there between forward and backward (the gradients on their way need room too, so it cannot quite be "
        "reached). reduce-scatter: (N-1)/N of the gradients. control: agreement, norms.",
        "",
    ]  # fmt: skip
    names = [
        "run", "chunks", "gathers, forward + backward", "all-gather, if all at the turn stayed", "all-gather, least",
        "measured", "ratio", "reduce-scatter, least", "measured", "ratio", "control, bytes",
    ]  # fmt: skip
    report += table(names, rows)
    report += [f"MISSED: {miss}" for miss in misses] or ["No rank sent more than the least."]
    publish(report, args.out, theme=None if args.quick else "traffic")
    return 1 if misses else 0


if __name__ == "__main__":
    run_script(make_orders, main)
