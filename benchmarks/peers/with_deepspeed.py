"""Peers "deepspeed-*": ZeRO-3 with params and optimizer offloaded, on DeepSpeed's CPU accelerator.

    deepspeed-cpu             offload_param and offload_optimizer to "cpu"
    deepspeed-nvme            both to "nvme", in the least memory; ``max_in_cpu`` as it comes (1e9 elements), so that
                              weights this small stay in memory and only masters, states and gradients do not
    deepspeed-nvme-pipelined  the same with pipeline_read and pipeline_write: more buffers
    deepspeed-nvme-all        as deepspeed-nvme, with ``max_in_cpu`` 0: the weights are on the drive too

and on a GPU ZeRO-3 with both in pinned host memory. Its CPU Adam is compiled at the first use
(``TORCH_EXTENSIONS_DIR``). Gradient checkpointing is of the reentrant kind, which its partitioned params ask for.

Everything else is left as it comes, but for what a user has to choose or is told to: ``config_for`` says which and why.
``settings["config"]`` is merged into the config last.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed  # type: ignore[import-not-found, unused-ignore]
import torch

from benchmarks.peers import contract

SUB_GROUP = 10_000_000
"""Elements: seven sub-groups of a model of 71M."""


def config_for(settings: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """``largest``: elements of the largest param."""
    peer, on_card = settings["peer"], contract.on_card(settings)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": contract.micro_batch(settings),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings["clip"] or 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": contract.hyper(settings)},
        "zero_optimization": {
            "stage": 3,
            # Page-locking serves copies to a GPU; else it would only be a second copy of everything in locked memory.
            "offload_param": {"device": "cpu", "pin_memory": on_card},
            "offload_optimizer": {"device": "cpu", "pin_memory": on_card},
        },
        "steps_per_print": 10**9,
    }
    if peer.startswith("deepspeed-nvme"):
        folder = tempfile.mkdtemp(dir=settings["spill"])
        zero = config["zero_optimization"]
        # A buffer must hold the largest param; the default of 1e8 elements would take 1 GB for a model of 0.14 GB.
        zero["offload_param"] = {"device": "nvme", "nvme_path": folder, "buffer_size": largest}
        # By default one sub-group, the unit of reading, updating and writing, holds the whole of a model this small.
        zero["sub_group_size"] = SUB_GROUP
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder, "buffer_count": 5}
        if peer == "deepspeed-nvme-pipelined":  # one sub-group is read, one updated, one written
            zero["offload_optimizer"] |= {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
        if peer == "deepspeed-nvme-all":
            zero["offload_param"]["max_in_cpu"] = 0
            # As they come, all weights stay live once gathered, and each holds a buffer: "Not enough buffers".
            zero |= {"stage3_max_live_parameters": largest, "stage3_max_reuse_distance": 0,
                     "stage3_prefetch_bucket_size": 0}  # fmt: skip
        # Deeper than the defaults of 8 and 1, as DeepSpeed's tuning guide does; as fast or faster in every trial here.
        config["aio"] = {"queue_depth": 32, "intra_op_parallelism": 2}
    return merged(config, settings.get("config", {}))


def merged(config: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with what ``more`` says instead, dict by dict."""
    result = dict(config)
    for name, value in more.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = merged(result[name], value) if both else value
    return result


class DeepSpeedTrainer(contract.Trainer):
    def __init__(self, settings: Mapping[str, Any]):
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        deepspeed.init_distributed("nccl" if contract.on_card(settings) else "gloo")
        if contract.is_large(settings):
            from benchmarks.gpu._llama import PiecewiseLlama

            PiecewiseLlama.reentrant = True
        model = contract.make_model(settings)
        self.config = config_for(settings, max(param.numel() for param in model.parameters()))
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=self.config)

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def notes(self) -> dict[str, Any]:
        optimizer = self.engine.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)
        away = sum(1 for param in self.engine.parameters() if param.ds_tensor.status.name == "NOT_AVAILABLE")
        return {
            "deepspeed": deepspeed.__version__,
            "optimizer": f"{type(optimizer).__name__} over {type(inner).__name__}",
            "params that wait on the drive": away,
            "config": self.config,
        }


if __name__ == "__main__":
    contract.run(DeepSpeedTrainer)
