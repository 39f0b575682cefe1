"""Peer "fsdp2": torch's FSDP2 with ``CPUOffloadPolicy``, one rank, as its documentation and torchtitan have it.

fp32 params (they are the masters), ``fully_shard`` on every layer and then on the model, bf16 for forward and backward,
gradients reduced in fp32; torch's AdamW with ``fused=True`` on the CPU, the fastest of its variants there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from benchmarks.gpu import _peer


class Fsdp2Trainer:
    def __init__(self, settings: Mapping[str, Any]):
        on_card = settings["device"] == "cuda"
        if on_card:
            torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_card else "gloo")
        self.clip = settings["clip"]
        self.model = _peer.make_model(settings)
        for param in self.model.parameters():
            param.data = param.data.float()
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cuda" if on_card else "cpu", (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_card),
        }
        for layer in self.model.model.layers:
            fully_shard(layer, **options)
        fully_shard(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **_peer.HYPER, fused=True)

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def finish(self) -> None:
        pass

    def notes(self) -> dict[str, Any]:
        return {"params": "fp32 in host memory", "optimizer": "torch.optim.AdamW(fused=True) on the CPU"}


if __name__ == "__main__":
    _peer.run(Fsdp2Trainer)
