"""What a durable store costs: bytes written per step and step time, beside the same run on a nameless spill file.

    python -m benchmarks.durable FOLDER [--rounds 12] [--steps 3]

All weights and states on NVMe, a commit behind every step. The two runs take turns, round by round; bytes are those
that the process handed to the drive (``/proc/self/io``), medians are over rounds.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import gemini
from benchmarks._models import square_layers


def made(folder: Path, durable: bool, layers: int) -> tuple[Any, Any]:
    memory = gemini.MemoryBudget(cpu="256MiB", nvme="4GiB", nvme_path=folder, durable=durable)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    config = gemini.GeminiConfig(memory=memory, device="cpu", placement=placement)
    model = gemini.GeminiDDP(square_layers(layers, 1024), config)
    # Guesses begin by themselves on a store, and gain more than it costs.
    return model, gemini.HybridAdam(model.parameters(), lr=1e-3)


def written() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["write_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    x = torch.randn(256, 1024, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folders = {durable: Path(name) / str(durable) for durable in (False, True)}
        runs = {}
        for durable, folder in folders.items():
            folder.mkdir()
            runs[durable] = made(folder, durable, options.layers)
        found: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
        for number in range(options.rounds + 1):
            for durable in (False, True) if number % 2 else (True, False):
                model, optimizer = runs[durable]
                before, began, commit = written(), time.perf_counter(), None
                for _ in range(options.steps):
                    model(x).float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if durable:
                        commit = gemini.save_checkpoint(folders[True], model, optimizer, wait=False)
                if commit is not None:
                    commit.wait()
                model._gemini_engine.drain()
                if number:  # the first round warms up
                    seconds = (time.perf_counter() - began) / options.steps
                    found[durable].append((seconds, (written() - before) // options.steps))
        seconds, num_bytes = ({d: statistics.median(v[i] for v in of) for d, of in found.items()} for i in (0, 1))
        print(f"bytes written per step: {num_bytes[False]:,.0f} without, {num_bytes[True]:,.0f} with a store, "
              f"ratio {num_bytes[True] / num_bytes[False]:.4f}")  # fmt: skip
        print(f"step: {seconds[False] * 1e3:.1f} ms without, {seconds[True] * 1e3:.1f} ms with, "
              f"ratio {seconds[True] / seconds[False]:.3f}")  # fmt: skip
        began = time.perf_counter()
        runs[True][0]._gemini_engine.drain()
        gemini.load_checkpoint(folders[True], *runs[True])
        print(f"loading the store: {time.perf_counter() - began:.2f} s", end="; ")
        gemini.save_checkpoint(Path(name) / "checkpoint", *runs[False])
        began = time.perf_counter()
        gemini.load_checkpoint(Path(name) / "checkpoint", *runs[False])
        print(f"an ordinary checkpoint: {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
