"""Peer "fsdp2": torch's FSDP2 with ``CPUOffloadPolicy``, one rank, on a CPU (gloo) or on a GPU.

As its documentation and torchtitan have it: fp32 params (they are the masters), ``fully_shard`` on every layer and then
on the model, ``MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)``: weights are cast to bf16 when they are
gathered, gradients come back as fp32. AdamW is torch's with ``fused=True``, the fastest of its variants on a CPU.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from benchmarks.peers import contract
from benchmarks.peers.contract import HYPER as HYPER


def shard(model: Any, device: str = "cpu", **options: Any) -> None:
    """Every layer, and what is left."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


class Fsdp2Trainer(contract.Trainer):
    def __init__(self, settings: Mapping[str, Any]):
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        on_card = contract.on_card(settings)
        if on_card:
            torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_card else "gloo")
        self.clip = settings["clip"]
        self.model = contract.make_model(settings)
        for param in self.model.parameters():
            param.data = param.data.float()
        shard(
            self.model, "cuda" if on_card else "cpu", offload_policy=CPUOffloadPolicy(pin_memory=on_card),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **contract.hyper(settings), fused=True)

    def notes(self) -> dict[str, Any]:
        kinds = sorted({f"{param.dtype} on {param.device}" for param in self.model.parameters()})
        return {"params": ", ".join(kinds), "optimizer": "torch.optim.AdamW(fused=True)"}


if __name__ == "__main__":
    import torch.distributed.fsdp  # what imports take is not the model's

    contract.run(Fsdp2Trainer)
