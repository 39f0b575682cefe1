"""What every peer on the card has in common: the model, the batches, the hyperparameters, and the orders it obeys.

A peer is a script with a class that trains, ended by ``run(Trainer)``. It needs torch and transformers and nothing of
Gemini (but for Gemini's own). Orders come as lines of JSON on stdin (``benchmarks/_ranks.serve``), and between them the
process sleeps in a read. Everybody starts from the same bf16 weights and sees the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from benchmarks import _ranks
from benchmarks.gpu import _llama

HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Trainer(Protocol):
    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Forward, backward, clipping, update. The loss, detached."""

    def finish(self) -> None:
        """Wait for what the steps so far have left in flight: it belongs to their time."""

    def notes(self) -> dict[str, Any]:
        """What a report should say of this peer."""


def shape_of(settings: Mapping[str, Any]) -> _llama.Shape:
    return _llama.SHAPES[settings["shape"]]


def make_model(settings: Mapping[str, Any]) -> Any:
    """On the CPU; its dtype is bf16, gradient checkpointing is on."""
    return _llama.plain_model(shape_of(settings), settings["seq_len"])


def run(build: Callable[[dict[str, Any]], Trainer]) -> None:
    _ranks.serve(lambda settings: _orders(build, settings))


def _orders(build: Callable[[dict[str, Any]], Trainer], settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    torch.set_num_threads(settings["threads"])
    begin = time.perf_counter()
    trainer = build(settings)
    on_card = settings["device"] == "cuda"
    built, done = time.perf_counter() - begin, {"steps": 0}

    def synchronize() -> None:
        trainer.finish()
        if on_card:
            torch.cuda.synchronize()

    def block(steps: int, tokens: int) -> dict[str, Any]:
        where = "cuda" if on_card else "cpu"
        batches = [
            _llama.make_batch(shape_of(settings), tokens, settings["seq_len"], done["steps"] + number, where)
            for number in range(steps)
        ]
        synchronize()
        if on_card:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        losses = [trainer.step(batch) for batch in batches]
        synchronize()
        seconds = time.perf_counter() - begin
        done["steps"] += steps
        peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        with open("/proc/self/status") as status:
            rss = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
        return {"seconds": seconds, "losses": [float(loss) for loss in losses], "rss": rss,
                "card": peaks if on_card else {}}  # fmt: skip

    def rest() -> None:
        """Give back what torch keeps for later: the card is others' now."""
        synchronize()
        if on_card:
            torch.cuda.empty_cache()

    def about() -> dict[str, Any]:
        return {"torch": torch.__version__, "build seconds": built, "notes": trainer.notes()}

    return {"block": block, "rest": rest, "about": about}
