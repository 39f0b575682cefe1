"""The longest sequence of a 100M model that trains in a memory cgroup, as the model is and in tiles of tokens.

    python benchmarks/longest_sequence.py --spill /scratch

Each length is a process of its own, in a cgroup with a hard limit from its first instruction on: interpreter, torch,
model, activations and all. It makes one step (checkpointed blocks, their inputs and all planes on the drive); a length
counts if the process lives and its loss is a number. Lengths grow by a quarter until one is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _memory
from benchmarks._report import table

SHAPE = {"hidden": 768, "layers": 11, "vocab": 32000}


def child(settings: dict[str, Any]) -> None:
    """One step; one line of JSON."""
    import torch

    import gemini
    from benchmarks._models import build, llama_config

    torch.set_num_threads(settings["threads"])
    shape, length, tiles = SHAPE, settings["length"], settings["tiles"]
    config = llama_config(
        shape["hidden"], shape["layers"], shape["vocab"], intermediate=2048, positions=length, tie_word_embeddings=True
    )
    model = build(config, "bfloat16")
    memory = gemini.MemoryBudget(cpu=settings["budget"], nvme="4GiB", nvme_path=settings["spill"])
    model = gemini.GeminiDDP(
        model,
        gemini.GeminiConfig(
            memory=memory, placement=gemini.StaticPlacement(weights_on_nvme=1.0, optimizer_on_nvme=1.0), device="cpu",
            gradients="transient", offload_activations="nvme", tile_tokens=tiles,
        ),
    )  # fmt: skip
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-4, step_in_backward=True)
    ids = torch.arange(length)[None] % 1000
    began = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    model.memory_report()  # waits for all that is under way
    params = sum(p.numel() for p in model.parameters())
    print(json.dumps({"loss": loss.item(), "seconds": time.perf_counter() - began, "params": params}))


def run(args: argparse.Namespace, length: int, tiles: int | None) -> dict[str, Any] | None:
    """What a step of this length said, with the peak of its cgroup; None if it did not live."""
    settings = {"length": length, "tiles": tiles, "spill": str(args.spill), "budget": args.budget, "threads": 1}
    cage = _memory.Cage(args.limit * 2**20)
    try:
        done = subprocess.run(
            [*cage.prefix(), sys.executable, __file__, "--child", json.dumps(settings), "--spill", str(args.spill)],
            capture_output=True, text=True, timeout=args.patience, env={**os.environ, **_memory.MALLOC},
        )  # fmt: skip
        peak = cage.peak()
    finally:
        cage.close()
    print(f"{length} tokens, tiles {tiles}: exit code {done.returncode}, {peak / 2**20:.0f} MiB", file=sys.stderr)
    if done.returncode != 0:
        if done.returncode not in (-9, 137):
            print(done.stderr[-2000:], file=sys.stderr)
        return None
    said = json.loads(done.stdout.splitlines()[-1])
    return {**said, "peak": peak} if said["loss"] == said["loss"] else None


def longest(args: argparse.Namespace, first: int, tiles: int | None) -> tuple[int, dict[str, Any] | None]:
    length, best, said = first, 0, None
    while length <= args.most and (now := run(args, length, tiles)) is not None:
        best, said, length = length, now, length * 5 // 4 // 32 * 32
    return best, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spill", type=Path, required=True, help="a folder on the drive that holds the model")
    parser.add_argument("--limit", type=int, default=1280, help="of the cgroup, MiB (default: %(default)s)")
    parser.add_argument("--budget", default="320MiB", help="of chunks in memory (default: %(default)s)")
    parser.add_argument("--tiles", type=int, default=256, help="tokens of a tile (default: %(default)s)")
    parser.add_argument("--first", type=int, default=512, help="tokens to begin with (default: %(default)s)")
    parser.add_argument("--most", type=int, default=16384, help="tokens to end with (default: %(default)s)")
    parser.add_argument("--patience", type=int, default=1200, help="seconds for one length (default: %(default)s)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(json.loads(args.child))
        return
    whole, said = longest(args, args.first, None)
    tiled, said_tiled = longest(args, max(args.first, 4 * whole), args.tiles)
    rows = [
        [name, f"{tokens:,}", *([f"{of['peak'] / 2**20:,.0f}", f"{of['seconds']:.0f}"] if of else ["", ""])]
        for name, tokens, of in (("as it is", whole, said), (f"in tiles of {args.tiles}", tiled, said_tiled))
    ]
    params = (said or said_tiled or {"params": 0})["params"]
    print(f"{params:,} params in a memory cgroup of {args.limit:,} MiB; chunks in memory {args.budget}, the rest and "
          "the inputs of checkpointed blocks on the drive\n")  # fmt: skip
    print(*table(["model", "longest sequence that trained, tokens", "peak of the cgroup, MiB", "a step, s"], rows),
          sep="\n")  # fmt: skip
    print(f"\n{tiled / max(whole, 1):.1f} times as long")


if __name__ == "__main__":
    main()
