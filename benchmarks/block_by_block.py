"""Micro-batches block by block (``gemini.train_step``) against one after another, in turn. ``python -m
benchmarks.block_by_block 64MiB FOLDER``: all of a Llama on the drive there; without a folder in memory. ``TOKENS=128``
and ``ROUNDS=9`` in the environment: of a micro-batch, and of each way."""

import os
import statistics
import sys

import gemini
from benchmarks._models import make_batch, make_llama
from benchmarks._report import head, mb, publish, table
from benchmarks._rounds import Spread, measure_in_turn, ratios, seconds_of

COUNT, SHAPE = 8, {"hidden": 384, "layers": 8, "vocab": 2048, "batch": 1, "tokens": int(os.environ.get("TOKENS", "32"))}
WAYS, moved, runs = ("block by block", "one after another"), {}, {}


def step(name: str) -> None:
    (model, optimizer), parts = runs[name], [make_batch(SHAPE, number, 0) for number in range(COUNT)]
    for part in parts if name == WAYS[1] else [gemini.train_step(model, parts)][:0]:
        (model(**part).loss / COUNT).backward()
    optimizer.step()
    optimizer.zero_grad()
    moved[name] = model.memory_report()["moved"]  # waits for the updates


below = {"nvme": "16GiB", "nvme_path": sys.argv[2]} if sys.argv[2:] else {}
how = {"placement": gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)} if below else {}
memory = gemini.MemoryBudget(cpu=sys.argv[1], **below)
for name in WAYS:
    (model := make_llama(SHAPE)).activation_checkpointing_enable()
    model = gemini.GeminiDDP(model, gemini.GeminiConfig(memory=memory, device="cpu", gradients="accumulate", **how))
    runs[name] = model, gemini.HybridAdam(model.parameters(), lr=1e-4)
seconds = measure_in_turn(WAYS, int(os.environ.get("ROUNDS", "5")), lambda name: seconds_of(lambda: step(name)))
rows = [
    [name, Spread.of(seconds[name]).told(2), mb(moved[name].get("nvme->cpu", 0)), mb(moved[name].get("cpu->nvme", 0))]
    for name in WAYS
]
quicker = statistics.median(ratios(seconds[WAYS[1]], seconds[WAYS[0]]))
lines = [*table(["", "s per step", "MB read", "MB written"], rows), "", f"Block by block {quicker:.2f} times as quick."]
publish([*head("Block by block", [f"{COUNT} x {SHAPE}"]), *lines], None)
