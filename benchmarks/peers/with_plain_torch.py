"""Peer "plain": bf16 weights and fp32 masters in ordinary torch, as users write it.

    model in bf16;  masters = fp32 copies;  AdamW(masters)
    each step: backward, gradients cast to fp32, clipped, AdamW, masters copied back into the weights

``torch.optim.AdamW`` as it comes (variant "plain"), and with ``fused=True`` (variant "plain-fused"), which is several
times as fast on a CPU. 2 + 4 + 8 bytes per param, and 2 to 6 more for gradients.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.peers import contract


class PlainTrainer(contract.Trainer):
    def __init__(self, settings: Mapping[str, Any]):
        self.model = contract.make_model(settings)
        self.clip = settings["clip"]
        self.params = list(self.model.parameters())
        self.masters = [param.detach().float() for param in self.params]
        self.flags: dict[str, Any] = {"fused": True} if settings["peer"] == "plain-fused" else {}
        self.optimizer = torch.optim.AdamW(self.masters, **contract.hyper(settings), **self.flags)

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = self.model(**batch).loss
        loss.backward()
        for param, master in zip(self.params, self.masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            param.grad = None
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)
        return loss.detach()

    def notes(self) -> dict[str, Any]:
        return {"optimizer": f"torch.optim.AdamW({', '.join(f'{k}={v}' for k, v in self.flags.items())})"}


if __name__ == "__main__":
    contract.run(PlainTrainer)
