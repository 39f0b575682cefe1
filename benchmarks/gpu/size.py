"""The largest model that trains on this machine in exact mode: 12 bytes per param over card, host memory and drive.

    python benchmarks/gpu/size.py --params 18e9 --spill FOLDER_ON_THE_DRIVE --out FOLDER
    python benchmarks/gpu/size.py --arithmetic                         # only what would fit
    python benchmarks/gpu/size.py --device standin --tiny              # to try the script

A Llama is made from a config straight into the tiers, never whole in memory, and makes five real steps: AdamW on an
exact fp32 master, gradient checkpointing, updates inside backward. The arithmetic comes first.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

import gemini
from benchmarks._memory import free_disk
from benchmarks._report import table
from benchmarks.biggest_model import BYTES_PER_PARAM as BYTES_BY_STATES
from benchmarks.biggest_model import CHUNK, shape_of
from benchmarks.gpu import _llama, _part
from benchmarks.gpu._card import Card, host_budget
from benchmarks.gpu._training import IN_BACKWARD, Training, trace_of
from gemini.errors import human_bytes, parse_bytes
from gemini.planning.working import activation_bytes

BYTES_PER_PARAM = BYTES_BY_STATES["exact"]


class Room(NamedTuple):
    """Bytes per tier for planes, after what is spoken for."""

    gpu: int
    cpu: int
    nvme: int

    @property
    def params(self) -> float:
        return sum(self) / BYTES_PER_PARAM


def budgets(args: argparse.Namespace, card: Card) -> gemini.MemoryBudget:
    """Nearly all of the GPU that is free, the share of host memory that was said, and the drive but for a reserve."""
    nvme = 2**26 if args.tiny else max(0, free_disk(args.spill) - args.keep_free)
    gpu = card.tiny_budget if args.tiny else int(card.free_bytes * args.gpu_share)
    cpu = 3 * 2**20 if args.tiny else host_budget(args.host)
    drive: dict[str, Any] = {"nvme": nvme, "nvme_path": args.spill} if nvme > 2**20 else {}
    return gemini.MemoryBudget(gpu=gpu, cpu=cpu, **drive)


def room_of(memory: gemini.MemoryBudget, shape: _llama.Shape, spoken_for: int) -> Room:
    """``spoken_for``: bytes of the GPU that activations and what is not managed take."""
    gpu, cpu, nvme = (memory.bytes_of(tier) or 0 for tier in gemini.Tier)
    # Windows for the weights of two blocks or the head, and as much again for gradients of chunks that wait.
    windows = 2 * 2 * max(2 * shape.of_layer, shape.hidden * shape.vocab)
    return Room(max(gpu - spoken_for - windows, 0), max(cpu - 2**30, 0), nvme)


def measure(args: argparse.Namespace, card: Card, results: _part.Results) -> None:
    shape = _llama.SHAPES["tiny"] if args.tiny else shape_of(args.params, args.vocab)
    tokens = 32 if args.tiny else args.tokens
    trace = trace_of(shape, tokens, tokens, card)
    memory = budgets(args, card)
    room = room_of(memory, shape, activation_bytes(trace, offloaded=False) + card.beside_bytes)
    results.add("arithmetic", {"params": shape.params, "room": room._asdict(), "most params": room.params})
    results.say(
        f"Llama of {shape.layers} layers of {shape.hidden} (MLP {shape.intermediate}, vocabulary {shape.vocab}): "
        f"{shape.params:,} params take {human_bytes(BYTES_PER_PARAM * shape.params)}. Room for planes, after windows, "
        f"activations and staging: GPU {human_bytes(room.gpu)}, host {human_bytes(room.cpu)}, drive "
        f"{human_bytes(room.nvme)}: at most {room.params / 1e9:.1f} G params.",
        "",
    )
    if args.arithmetic:
        return
    if shape.params > room.params:
        raise SystemExit(f"it does not fit: at most --params {room.params:.3g}")
    settings = {
        "memory": memory, "placement": "auto", "gradients": "transient", "trace": trace, "max_chunk": CHUNK,
        "precision": "bf16",
    }  # fmt: skip
    training = Training(card, shape, tokens, tokens, settings)
    results.add("build", {"seconds": training.build_seconds, "plan": str(training.model._gemini_engine.decision.plan)})
    training.use(IN_BACKWARD)
    batch = training.batch()  # the same one every time: its loss has to fall
    for number in range(args.steps):
        if number and results.left() < 1.2 * results.raw["steps"][-1]["seconds"]:
            results.say(f"{number} of {args.steps} steps: no time left")
            break
        begin = time.perf_counter()
        loss = float(training.step(batch))
        report = training.finish()
        results.append("steps", {
            "seconds": time.perf_counter() - begin, "loss": loss, "moved": dict(report["moved"]),
            "stalls": dict(report["stalls"]), "torch": card.peaks(), "rss": psutil.Process().memory_info().rss,
            "tiers": {name: {key: report[name][key] for key in ("budget", "peak", "used", "holders")}
                      for name in ("gpu", "cpu", "nvme") if name in report},
            "bytes_per_param": report["bytes_per_param"],
        })  # fmt: skip
    steps = results.raw["steps"]
    rows = [
        [number + 1, f"{own['loss']:.4f}", f"{own['seconds']:.1f}",
         ", ".join(f"{way} {human_bytes(n)}" for way, n in own["moved"].items() if n), human_bytes(own["rss"])]
        for number, own in enumerate(steps)
    ]  # fmt: skip
    last = steps[-1]
    tiers = [
        [name, *(human_bytes(own[key]) for key in ("budget", "peak", "used"))] for name, own in last["tiers"].items()
    ]
    results.say(
        f"Built in {training.build_seconds:.0f} s. {len(steps)} steps of {tokens} tokens, "
        f"{last['bytes_per_param']:.2f} bytes per param.",
        "",
        *table(["step", "loss", "seconds", "moved", "RSS after"], rows),
        *table(["tier", "budget", "peak", "at the end"], tiers),
        f"- trained {shape.params / 1e9:.2f} G params for {len(steps)} steps; goal 18 G for 5: "
        f"{'met' if shape.params >= 18e9 and len(steps) >= 5 else 'MISSED'}; the loss "
        f"{'fell' if last['loss'] < steps[0]['loss'] else 'DID NOT FALL'}",
        "",
    )
    training.close()


def main(argv: Sequence[str] | None = None) -> _part.Results:
    parser = _part.make_parser(__doc__, seconds=480)
    add = parser.add_argument
    add("--params", type=float, default=18.2e9, help="at least (default: %(default)g)")
    add("--vocab", type=int, default=32000)
    add("--tokens", type=int, default=2048, help="per step, one sequence (default: %(default)s)")
    add("--steps", type=int, default=5, help="(default: %(default)s)")
    add("--gpu-share", type=float, default=0.93, help="of the GPU's free bytes, the GPU budget (default: %(default)s)")
    add("--keep-free", type=parse_bytes, default=6 * 2**30, help="of the drive (default: 6 GiB)")
    add("--arithmetic", action="store_true", help="only say what would fit")
    return _part.run("size", parser, measure, argv)


if __name__ == "__main__":
    main()
