"""What one rank holds when N of them share a model, measured from outside: 1/N of the state, and what is gathered.

    python benchmarks/rank_memory.py

For each world size the ranks get the smallest budget that the plan accepts with everything in memory. The parent
samples their anonymous memory while they train. Three things are compared per rank: the arithmetic (bytes per param
over N, the working set, gradients in flight, pieces in exchange), the peak in the ledger, and the measured peak minus
a stated baseline. What the ranks do not share is then taken away from what was measured; the rest must fall as 1/N.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._memory import MALLOC, trim
from benchmarks._models import add_model_arguments, make_batch, make_llama, shape_of, smallest_budget, train_step
from benchmarks._processes import Group, run_script
from benchmarks._report import MB, add_report_arguments, head, mb, publish, set_threads, table

SLOPE_TOLERANCE = 0.03
ABOVE, BELOW = 32 * MB, 8 * MB
"""What the measured peak may be off the arithmetic, whatever the number of ranks. Above: one more gradient in backward,
weights packed for a product, buffers of sockets; below: pages of the exchange that are never touched."""


# ---- a rank ----------------------------------------------------------------------------------------------------------


def make_orders(settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    import gemini

    set_threads(1)
    dtype = "bfloat16" if settings["precision"] == "bf16" else "float32"
    state: dict[str, Any] = {}

    def wrap(model: Any, cpu: Any) -> Any:
        memory = gemini.MemoryBudget(cpu=cpu)
        return gemini.GeminiDDP(
            model, gemini.GeminiConfig(precision=settings["precision"], memory=memory, device="cpu")
        )

    def warm_up() -> None:
        # What the first step of any model leaves behind (threads, caches of primitives, sockets) belongs to before.
        shape = {"hidden": 64, "layers": 1, "vocab": 512, "batch": 1, "tokens": 32}
        model = wrap(make_llama(shape, dtype), "2GiB")
        optimizer = gemini.HybridAdam(model.parameters())
        train_step(model, optimizer, model.clip_grad_norm_, make_batch(shape, 0, 0))
        del model, optimizer
        trim()

    def build() -> int:
        state["model"] = make_llama(settings["shape"], dtype)
        return sum(param.numel() for param in state["model"].parameters())

    def manage() -> None:
        state["model"] = wrap(state["model"], settings["budget"])
        state["optimizer"] = gemini.HybridAdam(state["model"].parameters(), lr=1e-4)
        trim()

    def train(steps: int) -> dict[str, Any]:
        import os

        model, rank = state["model"], int(os.environ["RANK"])
        for number in range(steps):
            batch = make_batch(settings["shape"], number, rank)
            loss, _ = train_step(model, state["optimizer"], model.clip_grad_norm_, batch)
        report = model.memory_report()
        return {"cpu": report["cpu"], "loss": loss}

    return {"warm_up": warm_up, "build": build, "manage": manage, "train": train}


# ---- from outside ----------------------------------------------------------------------------------------------------


def baseline_bytes(args: argparse.Namespace) -> int:
    """What a step takes beside the model, from the shape alone: torch's gradient of one param, and activations."""
    itemsize = 2 if args.precision == "bf16" else 4
    tokens = args.batch * args.tokens
    largest = max(args.vocab * args.hidden, args.hidden * (args.hidden * 8 // 3))
    per_layer = 16 * args.hidden * tokens * itemsize  # input, norms, q, k, v, attention, three of the MLP
    logits = 4 * args.vocab * tokens * 4  # in fp32: logits, log-softmax, and their gradients
    return largest * itemsize + args.layers * per_layer + logits


def one_size(args: argparse.Namespace, size: int) -> list[dict[str, Any]]:
    """Train with ``size`` ranks; per rank what was measured, what the ledger says, what the arithmetic says."""
    need, layout = smallest_budget(vars(args), size, args.precision)
    settings = {"shape": shape_of(args), "precision": args.precision, "budget": sum(need.values()) * size}
    with Group(__file__, settings, size, environment=lambda rank: MALLOC, timeout=args.timeout) as group:
        group.order("warm_up")
        ready = [rank.status()["RssAnon"] for rank in group.ranks]
        group.order("build")
        group.order("manage")
        wrapped = [rank.status()["RssAnon"] for rank in group.ranks]
        trained = group.order("train", watch=True, steps=args.steps)
        peaks = [rank.peak_anon for rank in group.ranks]
        whole_life = [rank.status()["VmHWM"] for rank in group.ranks]
    # Staging is in every plan that gathers, but where all planes are in memory nothing is ever staged.
    not_shared = sum(num_bytes for what, num_bytes in need.items() if what not in ("planes", "staging"))
    return [
        {
            "size": size, "rank": rank, "planes": need["planes"], "not_shared": not_shared,
            "ready": ready[rank], "wrapped": wrapped[rank] - ready[rank], "ledger": trained[rank]["cpu"]["peak"],
            "staging": trained[rank]["cpu"]["holders"].get("staging", 0), "budget": trained[rank]["cpu"]["budget"],
            "peak": peaks[rank] - ready[rank] - baseline_bytes(args), "rss": whole_life[rank],
        }
        for rank in range(size)
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, hidden=1024, layers=10, vocab=8192, batch=1, tokens=32)
    parser.add_argument("--ranks", type=int, action="append", help="may be given several times (default: 1, 2 and 4)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--steps", type=int, default=3)
    add_report_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.layers, args.vocab, args.steps = 512, 4, 4096, 2
    sizes = args.ranks or [1, 2, 4]
    by_size = {}
    for size in sizes:
        by_size[size] = one_size(args, size)
        print(f"{size} ranks: {[mb(row['peak']) for row in by_size[size]]} MB", file=sys.stderr, flush=True)
    misses, rows = [], []
    for row in (row for own in by_size.values() for row in own):
        expected = row["planes"] + row["not_shared"]
        off = row["peak"] - expected
        rows.append(
            [f"{row['size']} ranks, rank {row['rank']}", mb(row["planes"]), mb(row["not_shared"]), mb(expected),
             mb(row["ledger"]), mb(row["ledger"] - row["staging"]), mb(row["wrapped"]), mb(row["peak"]),
             f"{off / MB:+.1f}", mb(row["ready"]), mb(row["rss"])]
        )  # fmt: skip
        if not -BELOW <= off <= ABOVE:
            misses.append(f"{rows[-1][0]}: the measured peak is {off / MB:+.1f} MB off the arithmetic")
        if row["ledger"] > row["budget"]:
            misses.append(f"{rows[-1][0]}: the ledger's peak is over its budget")
    slopes = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        shared = [max(row["peak"] - row["not_shared"] for row in by_size[size]) for size in (a, b)]
        planes = [by_size[size][0]["planes"] for size in (a, b)]
        slope = (shared[0] - shared[1]) / (planes[0] - planes[1])
        slopes.append(
            [f"{a} -> {b} ranks", mb(shared[0]), mb(shared[1]), mb(planes[0] - planes[1]),
             mb(shared[0] - shared[1]), f"{slope:.3f}"]
        )  # fmt: skip
        if abs(slope - 1) > SLOPE_TOLERANCE and not args.quick:
            misses.append(f"{a} -> {b} ranks: memory falls {slope:.3f} times as fast as the state")
    _, layout = smallest_budget(vars(args), 1, args.precision)
    state, grads = 12, 2 if args.precision == "bf16" else 4
    report = head(
        "Memory of a rank",
        [
            f"Llama of {args.layers} layers of {args.hidden}, vocab {args.vocab}: {layout.payload:,} params in "
            f"{args.precision}, {args.batch} x {args.tokens} tokens per rank, {args.steps} steps, budgets the smallest "
            "that the plan accepts.",
        ],
    )
    report += [
        f"In MB (10^6). planes: {state} + {grads} bytes per param over N. not shared: gathered weights of one module, "
        "gradients on their way, pieces in exchange. ledger: its peak, also without the staging that a plan with "
        "gathers holds ready and that nothing used here. wrapped: anonymous memory after wrapping (states and "
        "gradients have not been touched). measured: the peak of anonymous memory over all steps, sampled from outside "
        "every 4 ms, minus the baseline: what the rank had before the model was built (\"before\"; interpreter, torch, "
        f"transformers, a step of a tiny model) and {mb(baseline_bytes(args))} MB from the shape for torch's own "
        "gradient of the largest param and activations. Freed blocks of a MiB and more go back to the system at once "
        f"({', '.join(f'{name}={value}' for name, value in MALLOC.items())}). "
        "RSS: the peak of its whole life, building the whole model and file pages included.",
        "",
    ]  # fmt: skip
    report += table(
        ["rank", "planes", "not shared", "arithmetic", "ledger", "without staging", "wrapped", "measured", "off",
         "before", "RSS"], rows
    )  # fmt: skip
    report += ["Measured peak (the highest rank) without what is not shared, against the fall of the planes:", ""]
    report += table(["from, to", "measured", "measured", "planes fall", "measured falls", "ratio"], slopes)
    fine = f"Every peak is within {mb(ABOVE)} MB of the arithmetic, whatever N."
    report += [f"MISSED: {miss}" for miss in misses] or [fine]
    publish(report, args.out, theme=None if args.quick else "rank_memory")
    return 1 if misses else 0


if __name__ == "__main__":
    run_script(make_orders, main)
