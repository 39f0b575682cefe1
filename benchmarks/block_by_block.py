"""Micro-batches block by block (``gemini.train_step``) against one after another, in turn. ``python -m
benchmarks.block_by_block 64MiB FOLDER``: all of a Llama on the drive there; without a folder in memory. ``TOKENS=128``,
``ROUNDS=9`` and ``GRADIENTS=retain`` in the environment: of a micro-batch, and of each way. ``python -m
benchmarks.block_by_block all FOLDER``: on the drive, and in memory with both kinds of gradients, at 32 and 128 tokens.
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

COUNT, SHAPE = 8, {"hidden": 384, "layers": 8, "vocab": 2048, "batch": 1}
WAYS = ("block by block", "one after another")


def measure(memory: str, folder: str, gradients: Any, tokens: int) -> tuple[list[list[str]], str]:
    """A row of each way, and how they compare."""
    shape, moved, runs, processor = {**SHAPE, "tokens": tokens}, {}, {}, {name: list[float]() for name in WAYS}
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
    case = f"{'drive' if folder else 'memory'}, {gradients}, {tokens} tokens"
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
    cases = [(memory, folder, os.environ.get("GRADIENTS", "accumulate"), int(os.environ.get("TOKENS", "32")))]
    if memory == "all":
        where = [("64MiB", folder, "accumulate"), ("512MiB", "", "retain"), ("512MiB", "", "accumulate")]
        cases = [(*case, tokens) for tokens in (32, 128) for case in where]
    found = [measure(*case) for case in cases]
    rows = [row for rows, _ in found for row in rows]
    columns = ["case", "", "s per step", "processor's s", "MB read", "MB written"]
    lines = [*table(columns, rows), "", *(told for _, told in found)]
    publish([*head("Block by block", [f"{COUNT} x {SHAPE}"]), *lines], None)
