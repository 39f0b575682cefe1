"""Peer "fsdp2-offload": torch's FSDP2 with ``CPUOffloadPolicy(pin_memory=False)``, one rank, gloo.

As its documentation and torchtitan have it: fp32 params (they are the masters), ``fully_shard`` on every layer and then
on the model, ``MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)``: weights are cast to bf16 when they are
gathered, gradients come back as fp32. AdamW is torch's with ``fused=True``, the fastest of its variants on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import contract
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


class Fsdp2Trainer:
    def __init__(self, settings: Mapping[str, Any]):
        dist.init_process_group("gloo")
        self.clip = settings["clip"]
        self.model = contract.make_model(settings["shape"])
        for param in self.model.parameters():
            param.data = param.data.float()
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=False),
        }
        for layer in self.model.model.layers:
            fully_shard(layer, **options)
        fully_shard(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **contract.HYPER, fused=True)

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = self.model(**batch).loss
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def finish(self) -> None:
        pass

    def notes(self) -> dict[str, Any]:
        kinds = sorted({str(param.dtype) for param in self.model.parameters()})
        return {"params": ", ".join(kinds), "optimizer": "torch.optim.AdamW(fused=True)"}


if __name__ == "__main__":
    contract.run(Fsdp2Trainer)
