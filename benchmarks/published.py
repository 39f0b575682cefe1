"""What the planner says of published training speeds: of others' systems where it can play them, and of ours there.

    python benchmarks/published.py --cache FILE --out benchmarks/reports/published_systems_DATE.md

``published.json`` has the rows: what was published, where it stands, and the machine and step it was measured on.
Nothing is run here and nothing is fitted. Each step is traced on fake tensors, planned in nearly all of the memory
the machine has, and played on figures of data sheets. *Ours*: exact states in bf16, homes and moves chosen by
``gemini.plan``; where a row says "chosen" the step is chosen too, as ``gemini plan --fastest`` does it, with
``--kernels liger`` for the models that have them, else with ``--tile-tokens auto``; otherwise every block is
checkpointed, with the quickest of the micro-batches that a row names. Where a row says "fp16_accumulation", ours
computes in fp16 and sums products in fp16, as ``gemini plan --precision fp16 --fp16-accumulation`` does. *Theirs*: the
same layers, all on the GPUs (or all on the drives), with their own micro-batch and checkpointing, where that describes
what they did. Of a step of more than three micro-batches (chosen: four) few are played: each further one takes what
the last one took.
"""

import argparse
import json
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from transformers import AutoConfig

import gemini
from benchmarks._report import add_out, head, publish, table
from gemini.errors import BudgetExceeded
from gemini.jobs import planner
from gemini.jobs.models import lora_on
from gemini.jobs.settings import PlanSettings
from gemini.planning.hardware import Hardware, load_hardware
from gemini.planning.trace import Phase
from gemini.planning.working import MARGIN
from gemini.tiers import Tier
from gemini.tracing.fused import FAMILIES
from gemini.train.loading.skeleton import skeleton_from_config

DATA = json.loads(Path(__file__).with_suffix(".json").read_text())
BESIDE, STAGING = 2**30, 2**31
"""Bytes of each GPU for its context and kernels; of host memory for each rank, where all is on the GPUs."""
FAR = 0.2
"""Predictions of theirs that are further off than this are misses, and have to be explained."""


@cache
def trace_of(
    model: str, samples: int, length: int, checkpointing: bool, lora: int | None, fp16_accumulation: bool = False
) -> gemini.MemoryTrace:
    config = AutoConfig.for_model(**DATA["models"][model], use_cache=False)
    adapted = lora and lora_on(lora)(skeleton_from_config(config).model, low_cpu_mem_usage=True)
    return gemini.trace(
        adapted or config,
        gemini.batch_for(config, samples, length),
        target="cuda",
        checkpointing="non-reentrant" if checkpointing else None,
        precision="fp16" if fp16_accumulation else "bf16",
        fp16_accumulation=fp16_accumulation,
    )


def hardware_of(name: str, ranks: int) -> Hardware:
    """A machine of ours with the figures that a row's machine has instead."""
    figures = dict(DATA["machines"][name])
    hardware = load_hardware(figures.pop("like")).with_gpus(min(ranks, 8))
    figures.pop("said", None)
    if "dram_bandwidth" in figures:
        figures["update_cpu"] = 26 / figures["dram_bandwidth"]
    return hardware.with_figures("peak: of the published machine, or assumed", **figures)


def flops_of(trace: gemini.MemoryTrace) -> float:
    """FLOP per token of a forward and a backward, without what is computed again."""
    return 3 * sum(moment.flops for moment in trace.moments if moment.phase is Phase.FORWARD) / trace.tokens


def choose(row: dict[str, Any], side: dict[str, Any], folder: Path) -> tuple[float, str]:
    """The row's unit per second of the step that is chosen, and which that is; 0 if none fits."""
    hardware, model = hardware_of(side.get("on", row["on"]), 1), DATA["models"][row["model"]]
    config, known = folder / f"{row['model']}.json", folder / "machine.json"
    config.write_text(json.dumps(model))
    known.write_text(hardware.to_json())
    has_kernels, sums_in_fp16 = model["model_type"] in FAMILIES, bool(side.get("fp16_accumulation"))
    settings = PlanSettings(
        config=str(config),
        machine=str(known),
        seq_len=row["length"],
        fastest=True,
        tokens_per_step=row["tokens"],
        kernels="liger" if has_kernels else None,
        tile_tokens=None if has_kernels else "auto",
        precision="fp16" if sums_in_fp16 else "bf16",
        fp16_accumulation=sums_in_fp16,
        gpu=f"{int(hardware.capacity(Tier.GPU) or 0) - BESIDE}B",
        cpu=f"{int(MARGIN * (hardware.capacity(Tier.CPU) or 0))}B",
        nvme="0B",
    )
    with Console(stderr=True, quiet=True).status("") as status:
        way, found, _ = planner.choose(planner.Way(settings), status)
    if not found:
        return 0.0, ""
    own = way.settings
    words = [f"{own.batch_size} x {own.accumulate}"]
    words += ["block by block"] if own.order == "bfs" else []
    words += [f"{own.kept_blocks} kept"] if own.kept_blocks else [] if own.gradient_checkpointing else ["all kept"]
    words += ["on the host"] if own.offload_activations == "cpu" else []
    words += [f"tiles {own.tile_tokens}"] if own.tile_tokens else []
    rate = row["tokens"] / found[0].seconds
    if row["unit"] == "TFLOP/s":
        rate *= flops_of(trace_of(row["model"], 1, row["length"], True, None)) / 1e12
    return rate, ", ".join(words)


def play(row: dict[str, Any], side: dict[str, Any]) -> float:
    """The row's unit per second by the simulator. Raises BudgetExceeded if the step does not fit."""
    ranks = row.get("gpus", 1)
    hardware = hardware_of(side.get("on", row["on"]), ranks)
    how = (side.get("checkpointing", True), row.get("lora"), bool(side.get("fp16_accumulation")))
    trace = trace_of(row["model"], side["samples"], row["length"], *how)
    budgets = {Tier.GPU: int(hardware.capacity(Tier.GPU) or 0) - BESIDE}
    all_on_it = STAGING * min(ranks, 8) if side.get("in") == "gpu" else None
    budgets[Tier.CPU] = side.get("cpu") or all_on_it or int(MARGIN * (hardware.capacity(Tier.CPU) or 0))
    if side.get("in") == "nvme":
        budgets[Tier.NVME] = int(MARGIN * (hardware.capacity(Tier.NVME) or 0))

    def seconds(micro_batches: int) -> float:
        settings = {"accumulate": micro_batches, "ranks": ranks, "local_ranks": min(ranks, 8), **side.get("plan", {})}
        return gemini.simulate(gemini.plan(trace, hardware, budgets, **settings), hardware).step_seconds

    number = max(1, row["tokens"] // (trace.tokens * ranks))
    step = seconds(min(number, 3))
    if number > 3:
        step += (number - 3) * (step - seconds(2))
    rate = number * trace.tokens / step
    return rate * {"tokens/s": ranks, "tokens/s each": 1, "TFLOP/s": flops_of(trace) / 1e12}[row["unit"]]


def predict(
    row: dict[str, Any], who: str, known: dict[str, Any], file: Path | None, folder: Path
) -> tuple[float | None, str]:
    """What ``who``, "theirs" or "ours", has in the row's unit; 0 if it does not fit, None if it is not predicted. And
    which step was chosen, if one was.
    """
    if who not in row:
        return None, ""
    names = ("model", "on", "gpus", "length", "tokens", "lora", "unit")
    key = json.dumps({name: row.get(name) for name in names} | row[who])  # what a prediction follows from
    if key not in known:
        try:
            is_chosen = row[who].get("chosen")
            known[key] = choose(row, row[who], folder) if is_chosen else (play(row, row[who]), "")
        except BudgetExceeded as e:
            known[key] = 0.0, ""
            print(f"{key}: {e}", file=sys.stderr)
        print(f"{row['system']}, {key}: {known[key]}", file=sys.stderr, flush=True)
        if file is not None:
            file.write_text(json.dumps(known))
    rate, words = known[key]
    return rate, words


def told(rate: float | None, published: float, form: str) -> list[str]:
    """What is predicted, and beside it the comparison with what was published."""
    if not rate:
        return ["" if rate is None else "does not fit", ""]
    return [f"{rate:,.0f}", form.format(rate / published - (form != "{:.2f}"))]


def report(known: dict[str, Any], file: Path | None, folder: Path) -> list[str]:
    lines, misses, summary, number = [], defaultdict(list), [], 0
    for kind in DATA["kinds"]:
        rows, errors, ratios = [], [], []
        for row in (row for row in DATA["rows"] if row["kind"] == kind):
            number += 1
            published = row["published"]
            (theirs, _), (ours, chosen) = (predict(row, who, known, file, folder) for who in ("theirs", "ours"))
            errors += [theirs / published - 1] if theirs else []
            ratios += [ours / published] if ours else []
            if 0 in (theirs, ours) or (theirs and abs(errors[-1]) > FAR) or (ours and ratios[-1] < 1):
                misses[f"({row['system']}): {row['why']}"].append(str(number))
            where = [number, row["system"], row["model"], f"{row.get('gpus', 1)} x {row['on']}", row["precision"]]
            step = [f"{row['tokens']:,}", f"{row['length']:,}", row["source"], f"{published:,} {row['unit']}"]
            compared = [*told(theirs, published, "{:+.0%}"), *told(ours, published, "{:.2f}")]
            rows.append([*where, *step, *compared, chosen])
        lines += [f"## {kind}", "", *table(DATA["columns"], rows)]
        each = [f"{sum(found) / len(errors):+.0%}" if errors else "" for found in (map(abs, errors), errors)]
        faster = sum(ratio >= 1 for ratio in ratios)
        summary.append([kind, len(rows), len(errors), each[0].lstrip("+"), each[1], len(ratios), faster])
    lines[:0] = ["## By class", "", *table(DATA["classes"], summary)]
    said = {"Sources": DATA["sources"], "Machines": {name: own["said"] for name, own in DATA["machines"].items()}}
    lines += ["## Misses", "", *(f"- **{', '.join(numbers)}** {why}" for why, numbers in misses.items()), ""]
    for title, texts in said.items():
        lines += [f"## {title}", "", *(f"- **{name}**: {text}" for name, text in texts.items()), ""]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="keep what was predicted in this file, and do not predict it again")
    add_out(parser)
    args = parser.parse_args()
    known = json.loads(args.cache.read_text()) if args.cache and args.cache.exists() else {}
    planner.Traces = cache(planner.Traces)  # type: ignore[misc]  # those of a model serve all its rows
    with TemporaryDirectory() as folder:
        lines = report(known, args.cache, Path(folder))
    publish([*head("Published systems, by the planner", DATA["said"]), *lines], args.out)


if __name__ == "__main__":
    main()
