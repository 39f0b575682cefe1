"""Gradient accumulation with weights on a drive: breadth first (``gemini.Pipeline``) against the ordinary loop.

    python benchmarks/breadth_first.py --spill /scratch --micro-batches 8

Both have the same model, budget, optimizer and micro-batches, with checkpointed blocks, and take turns step by step;
ratios are taken inside a round. The budget holds a few blocks' weights: the ordinary loop fetches them for every
micro-batch, the pipeline twice in a step. Predicted is the larger of what a step computes (measured with all in memory)
and what it moves, at the rate at which the drive served the ordinary loop.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._models import add_model_arguments, make_batch, make_llama, shape_of
from benchmarks._report import add_out, head, mb, publish, set_threads, table
from benchmarks._rounds import measure_in_turn, ratios, seconds_of

BREADTH, ORDINARY = "breadth first", "accumulation"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, hidden=768, layers=12, vocab=8192, batch=8, tokens=64)
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=1400, help="MiB of host memory (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each (default: %(default)s)")
    parser.add_argument("--spill", default=tempfile.gettempdir(), help="folder of the drive (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch and kernels (default: %(default)s)")
    add_out(parser)
    args = parser.parse_args()
    set_threads(args.threads)
    import gemini

    shape = shape_of(args)
    on_disk = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=0)
    memory = gemini.MemoryBudget(cpu=f"{args.budget}MiB", nvme="16GiB", nvme_path=args.spill)
    config = gemini.GeminiConfig(
        precision="bf16", device="cpu", memory=memory, placement=on_disk, gradients="accumulate"
    )  # fmt: skip
    in_memory = gemini.GeminiConfig(
        precision="bf16", device="cpu", memory=gemini.MemoryBudget(cpu="8GiB"), gradients="accumulate"
    )
    runs = {BREADTH: _Run(BREADTH, shape, config, args), ORDINARY: _Run(ORDINARY, shape, config, args)}
    seconds = measure_in_turn(list(runs), args.rounds, lambda name: seconds_of(runs[name].step), warm_up=3)
    moved = {name: run.moved() for name, run in runs.items()}
    same = runs[BREADTH].losses == runs[ORDINARY].losses
    runs.clear()
    computing = {}
    for name in (BREADTH, ORDINARY):
        run = _Run(name, shape, in_memory, args)
        times = [seconds_of(run.step) for _ in range(4)]
        computing[name] = statistics.median(times[1:])
    tokens = shape["batch"] * shape["tokens"]
    # The rate at which the drive served the one that waits for it.
    rate = sum(moved[ORDINARY].values()) / statistics.median(seconds[ORDINARY])
    rows = []
    for name in (BREADTH, ORDINARY):
        median, both = statistics.median(seconds[name]), sum(moved[name].values())
        rows.append(
            [name, f"{median:.2f}", f"{tokens / median:.0f}", mb(moved[name].get("nvme->cpu", 0)),
             mb(moved[name].get("cpu->nvme", 0)), f"{computing[name]:.2f}", f"{max(computing[name], both / rate):.2f}"]
        )  # fmt: skip
    found = ratios(seconds[ORDINARY], seconds[BREADTH])
    report = head(
        "Breadth first against accumulation",
        [
            f"{args.micro_batches} micro-batches of {shape['batch'] // args.micro_batches} x {shape['tokens']} tokens; "
            f"{args.budget} MiB of host memory, weights on the drive, states and gradients in memory; the losses are "
            f"{'the same bits' if same else 'NOT the same'}.",
        ],
        args.threads,
        "transformers",
    )
    names = ["", "s per step", "tokens/s", "MB read", "MB written", "s in memory", "s predicted"]
    report += table(names, rows)
    report += [
        "",
        f"Accumulation over breadth first, round by round: median {statistics.median(found):.2f} "
        f"({min(found):.2f} to {max(found):.2f}).",
    ]
    publish(report, args.out)


class _Run:
    """One contender: a step at a time."""

    def __init__(self, name: str, shape: dict[str, int], config: Any, args: argparse.Namespace):
        import gemini

        self._shape, self._count, self._number = shape, args.micro_batches, 0
        self.losses: list[float] = []
        model = make_llama(shape)
        model.activation_checkpointing_enable()
        self._pipe: Any = None
        if name == BREADTH:
            self._pipe = gemini.Pipeline(model, config, micro_batches=self._count, schedule="bfs")
            self._model: Any = self._pipe.model
        else:
            self._model = gemini.GeminiDDP(model, config)
        self._optimizer = gemini.HybridAdam(self._model.parameters(), lr=1e-4)

    def step(self) -> None:
        import torch

        batch = make_batch(self._shape, self._number, 0)
        self._number += 1
        if self._pipe is not None:
            loss = self._pipe.step(**batch)
        else:
            parts = []
            for ids in batch["input_ids"].chunk(self._count):
                part = self._model(input_ids=ids, labels=ids).loss / self._count
                part.backward()
                parts.append(part.detach())
            loss = torch.stack(parts).sum()
        self._model.clip_grad_norm_(1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())

    def moved(self) -> dict[str, int]:
        return dict(self._model.memory_report()["moved"])


if __name__ == "__main__":
    main()
