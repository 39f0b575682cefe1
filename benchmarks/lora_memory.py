"""LoRA on a frozen base: the memory of PEFT alone, and with the base offloaded by Gemini, in one run.

    python benchmarks/lora_memory.py
    python benchmarks/lora_memory.py --quick

Each way is a process of its own, watched from outside: anonymous RSS, sampled every 4 ms. The same base, adapters,
batches and AdamW every time. PEFT alone runs as its guide has it (fp32 adapters on a bf16 base, ``torch.optim.AdamW``)
and once more with what Gemini computes (adapters in bf16 with exact masters, ``HybridAdam`` on the plain model), whose
losses must be the same bits as those with the base on the drive.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._memory import MALLOC, trim
from benchmarks._models import add_model_arguments, make_batch, make_llama, shape_of, train_step
from benchmarks._processes import Group, run_script
from benchmarks._report import MB, add_report_arguments, head, mb, publish, table

WAYS = {
    "peft": "PEFT alone, torch.optim.AdamW",
    "same": "PEFT alone, HybridAdam",
    "gemini": "Gemini, base on NVMe",
}
ON_TOP = 48 * MB
"""What Gemini may take beyond its ledger, more than PEFT alone takes beyond its weights and states."""


# ---- the watched process ---------------------------------------------------------------------------------------------


def make_orders(settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    import peft
    import torch

    import gemini

    way, shape = settings["way"], settings["shape"]
    state: dict[str, Any] = {}

    def build(shape: dict[str, int]) -> int:
        state["model"] = make_llama(shape, "bfloat16")
        return sum(param.numel() for param in state["model"].parameters())

    def adapt(memory: dict[str, Any]) -> int:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=settings["rank"], target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(state["model"], config, autocast_adapter_dtype=way == "peft")
        adapters = [param for param in model.parameters() if param.requires_grad]
        if way == "gemini":
            model = gemini.GeminiDDP(
                model,
                gemini.GeminiConfig(precision="bf16", memory=gemini.MemoryBudget(**memory), device="cpu"),
            )
        kind = torch.optim.AdamW if way == "peft" else gemini.HybridAdam
        state["model"], state["optimizer"] = model, kind(adapters, lr=settings["lr"], weight_decay=0.01)
        trim()
        return sum(param.numel() for param in adapters)

    def train(shape: dict[str, int], steps: int) -> dict[str, Any]:
        losses = [
            train_step(state["model"], state["optimizer"], None, make_batch(shape, step, 0))[0] for step in range(steps)
        ]
        report = dict(state["model"].memory_report()) if way == "gemini" else {}
        return {"losses": losses, "report": report}

    def warm_up() -> None:
        # What the first step of any model leaves behind (threads, caches of primitives) belongs to before.
        tiny = {"hidden": 64, "layers": 1, "vocab": 512, "batch": 1, "tokens": 32}
        build(tiny)
        adapt({"cpu": "1GiB"})
        train(tiny, 1)
        state.clear()
        trim()

    return {
        "warm_up": warm_up, "build": lambda: build(shape), "adapt": lambda: adapt(settings["memory"]),
        "train": lambda: train(shape, settings["steps"]),
    }  # fmt: skip


# ---- from outside ----------------------------------------------------------------------------------------------------


def one_way(args: argparse.Namespace, way: str, folder: str) -> dict[str, Any]:
    """Build, adapt and train in one process: what was measured, in bytes beyond what it had before the model."""
    settings = {"way": way, "shape": shape_of(args), "rank": args.rank, "lr": 1e-3, "steps": args.steps}
    settings["memory"] = {"cpu": args.cpu, "nvme": args.nvme, "nvme_path": folder}
    with Group(__file__, settings, environment=lambda rank: MALLOC, timeout=args.timeout, ranked=False) as group:
        (process,) = group.ranks
        group.order("warm_up")
        ready = process.status()["RssAnon"]
        measured: dict[str, Any] = {"ready": ready}
        for order in ("build", "adapt", "train"):
            (measured[order],) = group.order(order, watch=True)
            measured[f"{order} peak"] = process.peak_anon - ready
        measured["rss"] = process.status()["VmHWM"]
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, hidden=1024, layers=20, vocab=32000, batch=1, tokens=64)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cpu", default="160MB", help="host memory for Gemini (default: %(default)s)")
    parser.add_argument("--nvme", default="2GB", help="room on the drive (default: %(default)s)")
    parser.add_argument("--nvme-path", default=None, help="a folder on the drive (default: the folder for temporaries)")
    add_report_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.layers, args.vocab, args.steps, args.cpu = 512, 6, 8192, 2, "40MB"
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=args.nvme_path, prefix="lora-memory-") as folder:
        for way in WAYS:
            found[way] = one_way(args, way, folder)
            print(f"{WAYS[way]}: {mb(found[way]['train peak'])} MB", file=sys.stderr, flush=True)
    frozen, adapters = found["gemini"]["build"], found["gemini"]["adapt"]
    ledger = found["gemini"]["train"]["report"]["cpu"]
    # Weights, then what the optimizer keeps, then gradients: of PEFT alone all adapters' at once.
    state = {"peft": 2 * frozen + 16 * adapters, "same": 2 * frozen + 14 * adapters, "gemini": ledger["peak"]}
    misses = []
    rows = []
    for way, name in WAYS.items():
        own = found[way]
        before_training = max(own["build peak"], own["adapt peak"])
        rows.append(
            [name, mb(state[way]), mb(own["train peak"]), mb(own["train peak"] - state[way]), mb(before_training),
             mb(own["ready"]), mb(own["rss"])]
        )  # fmt: skip
    peak = {way: own["train peak"] for way, own in found.items()}
    for way in ("peft", "same"):
        if peak["gemini"] >= peak[way]:
            misses.append(f"with the base on the drive training takes more than {WAYS[way]}")
    if peak["gemini"] - state["gemini"] > peak["same"] - state["same"] + ON_TOP:
        misses.append("what comes on top of the ledger is more than what comes on top of PEFT's weights and states")
    if ledger["peak"] > ledger["budget"]:
        misses.append("the ledger's peak is over its budget")
    if found["gemini"]["train"]["losses"] != found["same"]["train"]["losses"]:
        misses.append("the losses are not those of the plain model with the same optimizer")
    report = head(
        "LoRA on a frozen base",
        [
            f"Llama of {args.layers} layers of {args.hidden}, vocab {args.vocab}: {frozen:,} frozen params in bf16, "
            f"{adapters:,} in adapters (LoRA of rank {args.rank} on every linear layer); {args.batch} x {args.tokens} "
            f"tokens, {args.steps} steps. Gemini: {args.cpu} of host memory, the rest on NVMe.",
        ],
    )
    report += [
        'In MB (10^6), beyond what the process had before the model ("before"; interpreter, torch, transformers, PEFT, '
        "a step of a tiny model). arithmetic: 2 bytes per frozen param; per adapter param 16 with torch (fp32: weight, "
        "gradient, two states) or 14 with HybridAdam; of Gemini the peak of its ledger for the CPU. measured: the "
        "peak of anonymous memory over all steps. on top: what is left, activations and temporaries. at the start: the "
        "peak while the model is built, adapted and wrapped; all ways build it whole in host memory. RSS: the peak of "
        "the whole life, file pages included.",
        "",
    ]  # fmt: skip
    report += table(
        ["", "arithmetic", "measured", "on top", "at the start", "before", "RSS"], rows
    )  # fmt: skip
    saved = peak["peft"] - peak["gemini"]
    report += [
        f"Training takes {mb(saved)} MB less than PEFT alone: {peak['gemini'] / peak['peft']:.2f} of it. The frozen "
        f"base is {mb(2 * frozen)} MB.",
        "",
        *table(
            ["loss of step", *(str(i + 1) for i in range(args.steps))],
            [[WAYS[way], *(f"{loss:.6f}" for loss in own["train"]["losses"])] for way, own in found.items()],
        ),
    ]
    fine = (
        "The losses with the base on the drive are the same bits as without Gemini (HybridAdam on the plain model); "
        "PEFT's own recipe computes its adapters in fp32."
    )
    report += [f"MISSED: {miss}" for miss in misses] or [fine]
    publish(report, args.out, theme=None if args.quick else "lora_memory")
    return 1 if misses else 0


if __name__ == "__main__":
    run_script(make_orders, main)
