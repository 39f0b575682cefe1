"""Plans of long sequences and of large models on one GPU: what fits, how long a step takes, and what bounds it.

    python benchmarks/long_plans.py --report benchmarks/reports/long_plans_DATE.md

Nothing is run. Each step is traced ahead of time on fake tensors, planned in the budgets that are named, and played by
the simulator on a named machine (data sheet figures, the shares of peaks of ``gemini.planning.costs.Efficiency``). Of
the budget of a GPU a GiB is left to CUDA itself. Longest sequences are found by planning, not by division.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig

import gemini
from benchmarks._report import table
from gemini.errors import BudgetExceeded, human_bytes
from gemini.optim import LionRule, PlainSGDRule, SGDRule
from gemini.planning.hardware import Hardware, machine
from gemini.planning.sizes import break_even
from gemini.planning.timeline import Track
from gemini.planning.trace import tile_words
from gemini.planning.working import activation_bytes
from gemini.rules import AdamRule
from gemini.tiers import Tier

GIB = 2**30
BESIDE = GIB
"""Of a GPU: the context and its kernels."""

LLAMA3_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
LLAMA2_70B = {
    "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
RULES: dict[str, Callable[[], Any]] = {
    "Adam": AdamRule, "Lion": LionRule, "SGD with momentum": SGDRule, "SGD": PlainSGDRule,
}  # fmt: skip


class Place(NamedTuple):
    """A GPU with its host, in bytes, and the machine whose speeds it has."""

    name: str
    like: str
    gpu: int
    cpu: int
    nvme: int = 0

    @property
    def budgets(self) -> dict[Tier, int]:
        found = {Tier.GPU: self.gpu - BESIDE, Tier.CPU: self.cpu}
        return {**found, Tier.NVME: self.nvme} if self.nvme else found

    @property
    def hardware(self) -> Hardware:
        of_one = {"num_gpus": 1, "gpu_bytes": self.gpu, "cpu_bytes": self.cpu}
        if self.nvme:
            of_one["nvme_bytes"] = self.nvme
        return machine(self.like).with_figures("as given", **of_one)


class Case(NamedTuple):
    """What is planned for."""

    shape: dict[str, int]
    place: Place
    tokens: int
    rule: str = "Adam"
    states: str = "exact"
    gradients: str = "retain"
    offload: str | None = "cpu"
    tiles: str | None = "auto"
    checkpointing: bool = True
    sequence: int | None = None
    """Tokens of one sequence; None: all of them are one."""


def trace_of(case: Case, known: dict[Any, gemini.MemoryTrace]) -> gemini.MemoryTrace:
    key = (tuple(case.shape.items()), case.tokens, case.tiles, case.checkpointing, case.sequence)
    if key not in known:
        config = LlamaConfig(**case.shape, max_position_embeddings=2**22, use_cache=False, tie_word_embeddings=False)
        length = case.sequence or case.tokens
        ids = torch.empty(case.tokens // length, length, dtype=torch.int64, device="meta")
        known[key] = gemini.trace(
            config, {"input_ids": ids, "labels": ids}, target="cuda", tile_tokens=case.tiles,
            checkpointing="non-reentrant" if case.checkpointing else None,
        )  # fmt: skip
    return known[key]


def plan_of(case: Case, known: dict[Any, gemini.MemoryTrace]) -> gemini.Plan:
    return gemini.plan(
        trace_of(case, known), case.place.hardware, case.place.budgets, gradients=case.gradients,
        offload_activations=case.offload, optimizer=RULES[case.rule](), states=case.states,
    )  # fmt: skip


def row(case: Case, known: dict[Any, gemini.MemoryTrace]) -> list[Any]:
    """One line of a table: whether it fits, how fast, what bounds it, from how many tokens on offload is free."""
    params = trace_of(case, known).num_params / 1e9
    asked = [f"{params:.1f}B", case.place.name, f"{case.rule}, {case.states}", case.gradients, f"{case.tokens:,}"]
    try:
        made = plan_of(case, known)
    except BudgetExceeded as e:
        why = str(e).partition("does not fit: ")[2].partition(". Cheapest")[0]
        return [*asked, "", f"no: {why}", "", "", ""]
    play = partial(gemini.simulate, hardware=case.place.hardware)
    timeline = play(made)
    bounds = [f"{track.value} {seconds / timeline.step_seconds:.0%}"
              for track, seconds in sorted(timeline.busy.items(), key=lambda item: -item[1])[:2]]  # fmt: skip
    free = break_even(made, play, timeline)
    tiles = made.trace.tile_tokens
    return [
        *asked, "" if tiles is None else tile_words(tiles), f"{timeline.step_seconds:,.0f} s",
        f"{timeline.tokens_per_second:,.0f}", ", ".join(bounds), "none" if free is None else f"{free:,}",
    ]  # fmt: skip


NAMES = ["params", "on", "optimizer", "gradients", "tokens", "tiles of", "a step", "tokens/s", "busiest tracks",
         "offload is free from"]  # fmt: skip


def longest(case: Case, known: dict[Any, gemini.MemoryTrace]) -> int:
    """Tokens of one sequence, whole 4,096, to within 3 % the most that a plan fits."""
    each = activation_bytes(plan_of(case, known).trace, offloaded=True) / case.tokens
    guess = int((case.place.gpu - BESIDE - GIB) / each) // 4096
    while True:
        try:
            plan_of(case._replace(tokens=4096 * guess), known)
        except BudgetExceeded:
            guess = int(0.97 * guess)
        else:
            return 4096 * guess


GPU_24 = Place("24 GiB GPU, 192 GiB host", "rtx4090", 24 * GIB, 192 * GIB)
H200 = Place("H200, 512 GiB host", "dgx-h200", 140 * GIB, 512 * GIB)
GPU_70B = Place("24 GiB GPU, 256 GiB host, no drive", "rtx4090", 24 * GIB, 256 * GIB)
H200_SMALL = Place("H200, 128 GiB host, 64 GiB drive", "dgx-h200", 140 * GIB, 128 * GIB, 64 * GIB)


def per_token(known: dict[Any, gemini.MemoryTrace]) -> Iterator[str]:
    yield "## Bytes per token, Llama-3 8B"
    case = Case(LLAMA3_8B, GPU_24, 131072)
    whole = trace_of(case, known)
    rows = []
    for trace in whole.forms:
        name = "as it is" if trace.tile_tokens is None else f"in tiles of {tile_words(trace.tile_tokens)}"
        beside = (trace.peak_bytes - trace.checkpoint_bytes) / trace.tokens
        away = activation_bytes(trace, offloaded=True) / 1.05 / trace.tokens
        rows.append([name, f"{trace.peak_bytes / trace.tokens:,.0f}", f"{beside:,.0f}", f"{away:,.0f}",
                     f"{trace.flops / whole.flops - 1:+.1%}"])  # fmt: skip
    yield from table(["model", "peak", "beside inputs of blocks", "of the GPU with those offloaded", "work"], rows)


def sequences(known: dict[Any, gemini.MemoryTrace]) -> Iterator[str]:
    yield "## Long sequences, Llama-3 8B"
    rows = []
    for case, wanted in ((Case(LLAMA3_8B, GPU_24, 122880), 120_000), (Case(LLAMA3_8B, H200, 802816), 800_000)):
        rows.append(row(case, known))
        print(rows[-1], file=sys.stderr, flush=True)
        most = longest(case, known)
        rows.append(row(case._replace(tokens=most), known))
        print(f"{case.place.name}: wanted {wanted:,}, longest {most:,}", file=sys.stderr)
    yield from table(NAMES, rows)


def large(known: dict[Any, gemini.MemoryTrace]) -> Iterator[str]:
    yield "## Large models"
    rows = []
    cases = [Case(LLAMA2_70B, GPU_70B, 4096, "Adam", "compact", "transient"),
             Case(LLAMA2_70B, GPU_70B, 4096, "Lion", "compact", "transient"),
             Case(LLAMA2_70B, GPU_70B, 4096, "SGD with momentum", "compact", "transient"),
             Case(LLAMA2_70B, GPU_70B, 4096, "Lion", "compact", "retain")]  # fmt: skip
    for layers in (52, 56, 60):
        shape = {**LLAMA2_70B, "num_hidden_layers": layers}
        cases.append(Case(shape, H200_SMALL, 4096, "Adam", "compact", "transient"))
    for case in cases:
        rows.append(row(case, known))
        print(rows[-1], file=sys.stderr, flush=True)
    yield from table(NAMES, rows)


PARTS = {"per_token": per_token, "sequences": sequences, "large": large}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    args = parser.parse_args()
    known: dict[Any, gemini.MemoryTrace] = {}
    for name, part in PARTS.items():
        if args.only in (None, name):
            began = time.perf_counter()
            print(*part(known), sep="\n", end="\n\n", flush=True)
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    print(f"{human_bytes(BESIDE)} of each GPU are left to CUDA. Busy: {', '.join(t.value for t in Track)}.")


if __name__ == "__main__":
    main()
