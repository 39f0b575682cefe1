"""What guessing steps inside backward is worth: step times with clipping, guessed and not.

    python -m benchmarks.speculation FOLDER [--placement durable] [--rounds 6] [--steps 4] [--tokens 256] [--layers 16]

All weights and states are on NVMe in a durable store, and a commit follows every step (``durable``); or in the spill
file (``nvme``) or in memory (``memory``), where ``--memory`` must have room for copies of what updates overwrite, 12
bytes per param. Three thresholds: never met, always met, and met by
one step in eight. Each is trained in the ordinary loop and with ``HybridAdam(step_in_backward=True, speculate=True)``,
the runs take turns round by round, and both must leave the same bits. Torch computes with one thread, and an update has
one, so that neither takes the other's core. Beside them stand the seconds of forward (T_f),
backward (T_b) and of the updates alone (W), and what a step takes at best:

    ordinary          T_b + max(T_f, W)
    guessed, right    max(T_f + T_b, W)
"""

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import gemini
from benchmarks._models import square_layers
from benchmarks._report import add_out, head, publish, set_threads, table
from benchmarks._rounds import in_turn, ratios

NEVER, ALWAYS = 1e9, 1e-9
"""Thresholds that no step meets, and every one."""
THRESHOLDS = {
    "never met": lambda step: NEVER,
    "met by 1 of 8 steps": lambda step: ALWAYS if step % 8 == 5 else NEVER,
    "always met": lambda step: ALWAYS,
}
PLACES = {
    "durable": "on NVMe in a durable store, a commit behind every step",
    "nvme": "on NVMe in the spill file",
    "memory": "in memory",
}
GOAL_RIGHT, GOAL_WRONG = 1.10, 1.05


class Run:
    """One model on a store of its own."""

    def __init__(self, folder: Path, args: argparse.Namespace, threshold: str, *, speculate: bool):
        folder.mkdir()
        self.folder, self.args, self.threshold, self.num_steps = folder, args, threshold, 0
        self.commits = args.placement == "durable"
        below = {} if args.placement == "memory" else {"nvme": "64GiB", "nvme_path": folder, "durable": self.commits}
        memory = gemini.MemoryBudget(cpu=args.memory, **below)
        share = 0 if args.placement == "memory" else 1
        placement = gemini.StaticPlacement(weights_on_nvme=share, optimizer_on_nvme=share)
        config = gemini.GeminiConfig(memory=memory, device="cpu", placement=placement, update_threads=1)
        self.model: Any = gemini.GeminiDDP(square_layers(args.layers, args.width), config)
        how = {"step_in_backward": True, "speculate": True} if speculate else {}
        self.optimizer = gemini.HybridAdam(self.model.parameters(), lr=1e-4, **how)

    def batch(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.num_steps)
        return torch.randn(self.args.tokens, self.args.width, generator=generator).bfloat16()

    def loss(self) -> torch.Tensor:
        return self.model(self.batch()).float().square().mean()

    def steps(self) -> float:
        """Seconds of a step, of some."""
        began, commit = time.perf_counter(), None
        for _ in range(self.args.steps):
            self.loss().backward()
            self.model.clip_grad_norm_(THRESHOLDS[self.threshold](self.num_steps))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.commits:
                commit = gemini.save_checkpoint(self.folder, self.model, self.optimizer, wait=False)
            self.num_steps += 1
        if commit is not None:
            commit.wait()
        self.model._gemini_engine.drain()
        return (time.perf_counter() - began) / self.args.steps

    def parts(self) -> tuple[float, float, float]:
        """Seconds of a forward, of its backward, and of the updates, each by itself. Not with guesses."""
        began = time.perf_counter()
        loss = self.loss()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.model._gemini_engine.drain()
        update = time.perf_counter()
        self.optimizer.zero_grad()
        if self.commits:
            gemini.save_checkpoint(self.folder, self.model, self.optimizer)
        return forward - began, backward - forward, update - backward

    def bits(self) -> str:
        """Of all weights and states."""
        found = hashlib.sha256()
        for name, _ in self.model.named_parameters():
            state = self.optimizer.full_state(name)
            for tensor in (self.model.full_param(name), *(state[kind] for kind in sorted(state))):
                found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        return found.hexdigest()


def compare(args: argparse.Namespace, folder: Path) -> list[str]:
    runs = {
        (threshold, speculate): Run(folder / f"{number}-{speculate}", args, threshold, speculate=speculate)
        for number, threshold in enumerate(THRESHOLDS)
        for speculate in (False, True)
    }
    alone = Run(folder / "alone", args, "never met", speculate=False)
    seconds: dict[tuple[str, bool], list[float]] = {which: [] for which in runs}
    parts: list[tuple[float, float, float]] = []
    for number, which in in_turn(runs, args.rounds):
        found = runs[which].steps()
        if which == next(iter(runs)):
            found_parts = alone.parts()
            parts += [found_parts] if number >= 0 else []
        if number >= 0:
            seconds[which].append(found)
    forward, backward, update = (statistics.median(part[i] for part in parts) for i in range(3))
    bound = {False: backward + max(forward, update), True: max(forward + backward, update)}
    lines = head(
        "Steps that clip, guessed inside backward",
        [
            f"{args.layers} layers of {args.width} x {args.width}, bf16, {args.tokens} tokens a step, weights and "
            f"states {PLACES[args.placement]}. {args.rounds} rounds of {args.steps} steps each, in turn. "
            f"Alone: T_f {forward * 1e3:.0f} ms, T_b {backward * 1e3:.0f} ms, W {update * 1e3:.0f} ms.",
        ],
    )
    rows = []
    for (threshold, speculate), run in runs.items():
        medians = seconds[threshold, speculate]
        counted = run.model.memory_report()["speculation"]
        rows.append([
            threshold, "guessed" if speculate else "ordinary", f"{statistics.median(medians) * 1e3:.0f}",
            f"{statistics.median(medians) / bound[speculate and threshold != 'always met']:.3f}",
            f"{counted['kept']} / {counted['undone']}",
        ])  # fmt: skip
    lines += table(["threshold", "steps", "ms", "step / at best", "updates kept / undone"], rows)
    lines += [""]
    right = [value / bound[True] for value in seconds["never met", True]]
    lines.append(_verdict("guessed, never met: step / max(T_f + T_b, W)", right, GOAL_RIGHT))
    for threshold in THRESHOLDS:
        found_ratios = ratios(seconds[threshold, True], seconds[threshold, False])
        goal = {"always met": GOAL_WRONG}.get(threshold, 1.0)
        lines.append(_verdict(f"guessed / ordinary, {threshold}", found_ratios, goal))
        same = runs[threshold, True].bits() == runs[threshold, False].bits()
        lines.append(f"- bits of weights and states, {threshold}: {'the same' if same else 'NOT the same'}")
    return lines


def _verdict(what: str, found: Sequence[float], goal: float) -> str:
    median = statistics.median(found)
    met = "met" if median <= goal else "MISSED"
    return f"- {what}: {median:.3f} ({min(found):.3f} to {max(found):.3f}); goal at most {goal:.2f}: {met}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the drive that is measured")
    parser.add_argument("--placement", choices=PLACES, default="durable")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="of each run in a round")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256, help="of a step: so many that T is about W")
    parser.add_argument("--memory", default="256MiB", help="budget of host memory of each run")
    add_out(parser)
    args = parser.parse_args()
    set_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        report = compare(args, Path(name))
    publish(report, args.out)


if __name__ == "__main__":
    main()
