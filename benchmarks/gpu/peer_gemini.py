"""Peer "gemini": ``GeminiDDP`` and ``HybridAdam`` under a GPU budget, states where the plan puts them.

With clipping updates run after backward, beside the next forward; without, inside backward.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)  # one process, no process group

import torch  # noqa: E402

import gemini  # noqa: E402
from benchmarks.gpu import _peer  # noqa: E402
from benchmarks.gpu._card import Card  # noqa: E402
from benchmarks.gpu._training import Schedule, Training, trace_of  # noqa: E402


class GeminiTrainer:
    def __init__(self, settings: Mapping[str, Any]):
        card, shape = Card(settings["device"]), _peer.shape_of(settings)
        tokens, seq_len = max(settings["tokens"]), settings["seq_len"]
        memory = gemini.MemoryBudget(gpu=settings["gpu"], cpu=settings["host"])
        config = {"memory": memory, "trace": trace_of(shape, tokens, seq_len, card), "offload_activations": "auto"}
        self.clip = settings["clip"]
        self.training = Training(card, shape, tokens, seq_len, config)
        self.training.use(Schedule("", clip=False, in_backward=not self.clip))

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        training = self.training
        loss: torch.Tensor = training.model(**batch).loss
        loss.backward()
        if self.clip:
            training.model.clip_grad_norm_(self.clip)
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss.detach()

    def finish(self) -> None:
        self.training.finish()

    def notes(self) -> dict[str, Any]:
        report = self.training.finish()
        tiers = {name: {key: report[name][key] for key in ("budget", "peak")} for name in ("gpu", "cpu")}
        return tiers | {"moved": dict(report["moved"]), "plan": str(self.training.model._gemini_engine.plan)}


if __name__ == "__main__":
    _peer.run(GeminiTrainer)
