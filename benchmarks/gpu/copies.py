"""Copies between host and GPU while training, against what the link can do: at least 90 % of pinned copies.

    python benchmarks/gpu/copies.py --out FOLDER
    python benchmarks/gpu/copies.py --device standin --tiny        # to try the script

First the link alone, through torch with pinned memory: host to GPU, GPU to host, and both at once. Then some steps of
a model whose chunks all live in host memory, recorded (``model.recording()``): bytes that each track moved over the
seconds that it was busy. A recorded step waits at every boundary between modules and a track counts as busy until its
end is noticed, so the tracks are at least as fast as this says; the same steps unrecorded say how much of the link the
whole step used.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import gemini
from benchmarks._report import table
from benchmarks._rounds import Spread
from benchmarks.gpu import _llama, _part
from benchmarks.gpu._card import Card, host_budget
from benchmarks.gpu._training import CLIPPED, Training, tight_gpu, trace_of
from gemini.planning.timeline import Track

GOAL = 0.90
WAYS = {"host to GPU": (Track.H2D, "cpu->gpu"), "GPU to host": (Track.D2H, "gpu->cpu")}


class Link:
    """Buffers on both sides; copies in either direction on a stream of its own."""

    def __init__(self, card: Card, num_bytes: int):
        self.card, self.num_bytes = card, num_bytes
        numel = num_bytes // 4
        self.here = [torch.randn(numel, device=card.torch) for _ in WAYS]
        self.host = [torch.randn(numel, pin_memory=card.real) for _ in WAYS]
        self.streams = [torch.cuda.Stream() for _ in WAYS] if card.real else [None, None]

    def copy(self, way: int) -> None:
        into, source = (self.here[0], self.host[0]) if way == 0 else (self.host[1], self.here[1])
        into.copy_(source, non_blocking=True)

    def rates(self, ways: Sequence[int], copies: int) -> list[float]:
        """bytes/s of each way while all of them are under way, ``copies`` of each."""
        self.card.synchronize()
        stamps: list[list[Any]] = [[] for _ in WAYS]
        for number in range(copies + 1):
            for way in ways:
                with torch.cuda.stream(self.streams[way]) if self.card.real else contextlib.nullcontext():
                    stamps[way].append(self.card.stamp())
                    if number < copies:
                        self.copy(way)
        self.card.synchronize()
        return [copies * self.num_bytes / self.card.seconds(stamps[way][0], stamps[way][-1]) for way in ways]


def link_alone(card: Card, num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """bytes/s by round."""
    link, found = Link(card, num_bytes), {}
    for number in range(rounds + 1):
        rates = {
            "host to GPU": link.rates([0], 4), "GPU to host": link.rates([1], 4), "both": link.rates([0, 1], 4)
        }  # fmt: skip
        if number:
            for name, (first, *second) in rates.items():
                key = f"{name}, alone" if name != "both" else "host to GPU, both at once"
                found.setdefault(key, []).append(first)
                for rate in second:
                    found.setdefault("GPU to host, both at once", []).append(rate)
    return found


def tracks_in_training(training: Training, steps: int) -> list[dict[str, Any]]:
    """For each recorded step: its seconds, and by direction the bytes and the seconds that the track was busy."""
    found = []
    for _ in range(steps):
        with training.model.recording() as recording:
            training.step(training.batch())
        timeline = recording.timeline
        own: dict[str, Any] = {"step": timeline.step_seconds, "stalls": dict(timeline.stalls)}
        for name, (track, _) in WAYS.items():
            spans = [span for span in timeline.spans if span.track is track]
            busy = timeline.busy.get(track, 0.0)
            num_bytes = sum(span.num_bytes for span in spans)
            rates = [span.num_bytes / (span.stop - span.start) for span in spans if span.num_bytes]
            own[name] = {"bytes": num_bytes, "busy": busy, "copies": len(rates),
                         "median rate of a copy": statistics.median(rates) if rates else 0.0}  # fmt: skip
        found.append(own)
    return found


def measure(args: argparse.Namespace, card: Card, results: _part.Results) -> None:
    num_bytes, rounds = (2**20, 2) if args.tiny else (2**30, 7)
    raw = link_alone(card, num_bytes, rounds)
    results.add("link, bytes/s", raw)
    card.forget()
    rows = [[name, *(f"{value / 1e9:.2f}" for value in Spread.of(rates))] for name, rates in raw.items()]
    results.say("The link, pinned memory", "", *table(["way", "GB/s", "least", "most"], rows))
    shape = _llama.SHAPES["tiny" if args.tiny else args.shape]
    tokens, seq_len = (64, 32) if args.tiny else (args.tokens, args.seq_len)
    trace = trace_of(shape, tokens, seq_len, card)
    memory = gemini.MemoryBudget(gpu=args.gpu or tight_gpu(shape, trace, {}, card), cpu=host_budget(args.host))
    settings = {"memory": memory, "placement": gemini.StaticPlacement(), "trace": trace}
    training = Training(card, shape, tokens, seq_len, settings)
    training.use(CLIPPED)
    seconds, _ = training.timed_steps(1 if args.tiny else 3, 1 if args.tiny else 2)
    report = training.finish()
    moved, waited = report["moved"], report["stalls"].get("gradient landing", 0.0)
    recorded = tracks_in_training(training, 1 if args.tiny else 3)
    results.add("steps", {"shape": shape._asdict(), "params": shape.params, "tokens": tokens, "seconds": seconds,
                          "moved in a step": dict(moved), "waited in a step": dict(report["stalls"]),
                          "recorded": recorded, "build seconds": training.build_seconds})  # fmt: skip
    training.close()
    rows = []
    lines = [
        _part.verdict_between(
            "seconds of a step that the launching thread waits for gradients to land", waited, 0, 0.001
        )
    ]
    for name, (_, boundary) in WAYS.items():
        rates = [own[name]["bytes"] / own[name]["busy"] for own in recorded if own[name]["busy"]]
        alone, both = (Spread.of(raw[f"{name}, {how}"]).median for how in ("alone", "both at once"))
        if not rates:
            lines.append(f"- {name}: nothing moved")
            continue
        of_step = moved.get(boundary, 0) / statistics.median(seconds)
        rows.append([name, f"{moved.get(boundary, 0) / 1e9:.2f}", f"{statistics.median(rates) / 1e9:.2f}",
                     f"{alone / 1e9:.2f}", f"{both / 1e9:.2f}", f"{of_step / 1e9:.2f}"])  # fmt: skip
        lines.append(
            _part.verdict(f"{name}, track while busy over the link alone", statistics.median(rates) / alone, GOAL)
        )
        lines.append(
            f"- {name}, track while busy over the link with both at once: {statistics.median(rates) / both:.3f}"
        )
    results.say(
        f"Training of {shape.params:,} params, all chunks in host memory, {tokens} tokens per step, clipping: "
        f"{statistics.median(seconds):.3f} s per step",
        "",
        *table(["way", "GB per step", "GB/s of the track while busy", "link alone", "link, both at once",
                "GB/s over the whole step"], rows),
        *lines,
        "",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> _part.Results:
    parser = _part.make_parser(__doc__, seconds=90)
    parser.add_argument("--shape", choices=_llama.SHAPES, default="3b", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="per step (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=4096, help="(default: %(default)s)")
    parser.add_argument(
        "--gpu", type=_part.parse_bytes, default=None, help="GPU budget (default: activations and some blocks)"
    )
    return _part.run("copies", parser, measure, argv)


if __name__ == "__main__":
    main()
