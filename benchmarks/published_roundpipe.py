"""What the simulator says of RoundPipe's published case: Llama-3.1 8B, all params trained, on one RTX 4090.

    python benchmarks/published_roundpipe.py > benchmarks/reports/published_roundpipe_DATE.md

Nothing is run and nothing is fitted: the machine is ``gemini/machines/rtx4090.json`` with more host memory, the shares
of the peaks are those of ``gemini.planning.costs.Efficiency``, as for every other machine. What was published gives no
length of sequence and no batch with its 3,142 tokens/s, so batches of several sizes are planned, of sequences of 2,048
tokens, with blocks checkpointed and without.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gemini
from benchmarks._report import table
from benchmarks.long_plans import GIB, LLAMA3_8B, Case, Place, plan_of
from gemini.errors import BudgetExceeded
from gemini.planning.costs import Efficiency

PUBLISHED = 3142
SEQUENCE = 2048
GPU = Place("24 GiB GPU", "rtx4090", 24 * GIB, 192 * GIB)
PER_TOKEN = 6 * (8_030_261_248 - 128256 * 4096)
"""Model FLOP of a token without attention: the embedding multiplies nothing."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    known: dict[Any, gemini.MemoryTrace] = {}
    peak = GPU.hardware.get("gpu_flops_bf16", needed_for="this comparison")
    share = Efficiency().matrix
    rows = []
    for tokens, checkpointing, tiles in (
        (4096, True, None), (16384, True, "auto"), (65536, True, "auto"), (4096, False, None), (16384, False, "auto"),
        (32768, False, "auto"),
    ):  # fmt: skip
        case = Case(LLAMA3_8B, GPU, tokens, tiles=tiles, checkpointing=checkpointing, sequence=SEQUENCE)
        name = [f"{tokens:,}", "checkpointed" if checkpointing else "kept"]
        try:
            made = plan_of(case, known)
        except BudgetExceeded as e:
            rows.append([*name, "", str(e).partition("does not fit: ")[2].partition(" (")[0], "", "", ""])
            continue
        timeline = gemini.simulate(made, GPU.hardware)
        rate = timeline.tokens_per_second
        work = timeline.flops / timeline.step_seconds / 1e12
        rows.append([
            *name, "" if made.trace.tile_tokens is None else f"{made.trace.tile_tokens:,}", f"{rate:,.0f}",
            f"{rate / PUBLISHED:.0%}", f"{work:.0f}", timeline.bound_by.value,
        ])  # fmt: skip
    names = ["tokens in a step", "blocks", "tiles of", "tokens/s", "of published", "TFLOP/s done", "bound by"]
    print(*table(names, rows), sep="\n")
    done = PUBLISHED * PER_TOKEN
    print(
        f"\npublished: {PUBLISHED:,} tokens/s = {done / 1e12:.0f} TFLOP/s of model work without attention, "
        f"{done / peak:.0%} of the data sheet's {peak / 1e12:.1f}; with every block computed again "
        f"{done * 4 / 3 / 1e12:.0f}. Taken here: {share:.0%} of the peak."
    )


if __name__ == "__main__":
    main()
