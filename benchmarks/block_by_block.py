"""Micro-batches block by block (``gemini.train_step``) against one after another, in turn.

    python -m benchmarks.block_by_block 64MiB FOLDER    # all of a Llama on the drive; without a folder in memory
    python -m benchmarks.block_by_block all FOLDER      # two models, drive and memory, both gradients, two lengths

In the environment: ``ROUNDS=9`` of each way, ``TOKENS=128`` of a micro-batch, ``GRADIENTS=retain``, and ``HIDDEN=1024``
for 6 layers of 12M params each in place of 8 of 1.8M.
"""

import os
import statistics
import sys
import time
from typing import Any

import gemini
from benchmarks._models import make_batch, make_llama
from benchmarks._report import head, mb, publish, table
from benchmarks._rounds import Spread, measure_in_turn, ratios, seconds_of

COUNT, SHAPE = 8, {"vocab": 2048, "batch": 1}
MODELS = {384: (8, "64MiB", "512MiB"), 1024: (6, "400MiB", "3GiB")}
"""By the hidden size: layers, memory with all on the drive, and memory that holds it all."""
WAYS = ("block by block", "one after another")


def measure(hidden: int, memory: str, folder: str, gradients: Any, tokens: int) -> tuple[list[list[str]], str]:
    """A row of each way, and how they compare."""
    shape = {**SHAPE, "hidden": hidden, "layers": MODELS[hidden][0], "tokens": tokens}
    moved, runs, processor = {}, {}, {name: list[float]() for name in WAYS}
    below: dict[str, Any] = {"nvme": "16GiB", "nvme_path": folder} if folder else {}
    how = {"placement": gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)} if below else {}
    budget = gemini.MemoryBudget(cpu=memory, **below)
    for name in WAYS:
        (model := make_llama(shape)).activation_checkpointing_enable()
        model = gemini.GeminiDDP(model, gemini.GeminiConfig(memory=budget, device="cpu", gradients=gradients, **how))
        runs[name] = model, gemini.HybridAdam(model.parameters(), lr=1e-4)

    def step(name: str) -> None:
        begin, (model, optimizer) = time.process_time(), runs[name]
        parts = [make_batch(shape, number, 0) for number in range(COUNT)]
        for part in parts if name == WAYS[1] else [gemini.train_step(model, parts)][:0]:
            (model(**part).loss / COUNT).backward()
        optimizer.step()
        optimizer.zero_grad()
        moved[name] = model.memory_report()["moved"]  # waits for the updates
        processor[name].append(time.process_time() - begin)

    rounds = int(os.environ.get("ROUNDS", "5"))
    seconds = measure_in_turn(WAYS, rounds, lambda name: seconds_of(lambda: step(name)))
    case = f"{hidden}, {'drive' if folder else 'memory'}, {gradients}, {tokens} tokens"
    rows = [
        [
            case,
            name,
            Spread.of(seconds[name]).told(2),
            Spread.of(processor[name][-rounds:]).told(2),
            mb(moved[name].get("nvme->cpu", 0)),
            mb(moved[name].get("cpu->nvme", 0)),
        ]
        for name in WAYS
    ]
    quicker, less = (statistics.median(ratios(of[WAYS[1]], of[WAYS[0]])) for of in (seconds, processor))
    return rows, f"{case}: block by block {quicker:.2f} times as quick, {less:.2f} by the processor's time."


if __name__ == "__main__":
    memory, folder = sys.argv[1], sys.argv[2] if sys.argv[2:] else ""
    asked = int(os.environ.get("HIDDEN", "384")), memory, folder, os.environ.get("GRADIENTS", "accumulate")
    cases = [(*asked, int(os.environ.get("TOKENS", "32")))]
    if memory == "all":
        homes = [(hidden, *home) for hidden, (_, low, high) in MODELS.items() for home in ((low, folder), (high, ""))]
        cases = [(*home, how, tokens) for tokens in (32, 128) for home in homes for how in ("retain", "accumulate")]
    found = [measure(*case) for case in cases]
    rows = [row for rows, _ in found for row in rows]
    columns = ["case", "", "s per step", "processor's s", "MB read", "MB written"]
    lines = [*table(columns, rows), "", *(told for _, told in found)]
    publish([*head("Block by block", [f"{COUNT} x {SHAPE}, by the hidden size {MODELS}"]), *lines], None)
