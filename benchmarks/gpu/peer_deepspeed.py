"""Peer "deepspeed": ZeRO-3 with ``offload_param`` and ``offload_optimizer`` to pinned host memory.

Its CPU Adam is compiled at the first use (``TORCH_EXTENSIONS_DIR``). Everything is left as it comes but for what a user
has to choose: bf16, the offloads, clipping. Gradient checkpointing is of the reentrant kind, which its partitioned
params ask for.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if os.environ.get("GEMINI_PEER_DEVICE") == "standin":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # type: ignore[import-not-found, unused-ignore]
import torch

from benchmarks.gpu import _peer
from benchmarks.gpu._llama import PiecewiseLlama


def config_for(settings: Mapping[str, Any]) -> dict[str, Any]:
    on_card = settings["device"] == "cuda"
    return {
        "train_micro_batch_size_per_gpu": max(1, max(settings["tokens"]) // settings["seq_len"]),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings["clip"] or 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": _peer.HYPER},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": on_card},
            "offload_optimizer": {"device": "cpu", "pin_memory": on_card},
        },
        "steps_per_print": 10**9,
    }


class DeepSpeedTrainer:
    def __init__(self, settings: Mapping[str, Any]):
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        deepspeed.init_distributed("nccl" if settings["device"] == "cuda" else "gloo")
        PiecewiseLlama.reentrant = True
        model = _peer.make_model(settings)
        self.config = config_for(settings)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=self.config)

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def finish(self) -> None:
        pass

    def notes(self) -> dict[str, Any]:
        optimizer = self.engine.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)
        told = f"{type(optimizer).__name__} over {type(inner).__name__}"
        return {"deepspeed": deepspeed.__version__, "optimizer": told, "config": self.config}


if __name__ == "__main__":
    _peer.run(DeepSpeedTrainer)
