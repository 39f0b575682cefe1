"""Peers "gemini*": one script, several ways to place the same exact training.

    gemini                         everything in memory, gradients="retain"
    gemini-nvme                    weights, residual, moments and retained gradients in the spill file
    gemini-nvme-budget             placement="auto" in a memory budget (--cpu-budget) with a drive behind it
    gemini-transient               in memory, gradients="transient" and HybridAdam(step_in_backward=True): no clipping
    gemini-transient-nvme          the same in the spill file
    gemini-transient-nvme-states   the same, but the weights stay in memory: residual and moments in the spill file

``settings["config"]`` are further fields of ``GeminiConfig`` (``overlap``, ``update_threads``, ...), for comparing ours
with ours.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import contract
import torch

import gemini
from gemini import kernels


def placing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``GeminiConfig``: where a peer keeps what."""
    peer = settings["peer"]
    if "-nvme" not in peer:
        return {"memory": gemini.MemoryBudget(cpu=settings["cpu"])}
    drive = {"nvme": "16GiB", "nvme_path": tempfile.mkdtemp(dir=settings["spill"])}
    if peer.endswith("-budget"):
        return {"memory": gemini.MemoryBudget(cpu=settings["cpu_budget"], **drive)}
    weights = 0.0 if peer.endswith("-states") else 1.0
    memory = settings["cpu_beside_nvme"] if weights else settings["cpu_budget"]
    return {
        "memory": gemini.MemoryBudget(cpu=memory, **drive),
        "placement": gemini.StaticPlacement(weights_on_nvme=weights, optimizer_on_nvme=1.0),
    }


class GeminiTrainer:
    def __init__(self, settings: Mapping[str, Any]):
        kernels.set_num_threads(settings["threads"])
        self.clip = settings["clip"]
        transient = "transient" in settings["peer"]
        self.config: dict[str, Any] = {"precision": "bf16", "gradients": "transient" if transient else "retain"}
        self.config |= {"device": "cpu"} | settings["config"]
        placed = placing(settings)
        model = contract.make_model(settings["shape"])
        self.model = gemini.GeminiDDP(model, gemini.GeminiConfig(**self.config, **placed))
        self.optimizer = gemini.HybridAdam(self.model.parameters(), **contract.HYPER, step_in_backward=transient)

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = self.model(**batch).loss
        loss.backward()
        if self.clip is not None:
            self.model.clip_grad_norm_(self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def finish(self) -> None:
        self.model.memory_report()  # sees a finished world: it waits for updates and moves in flight

    def notes(self) -> dict[str, Any]:
        report: Any = self.model.memory_report()
        notes: dict[str, Any] = {name: value for name, value in self.config.items() if name != "device"}
        tiers = [tier for tier in ("cpu", "nvme") if tier in report]
        notes |= {tier: {name: report[tier][name] for name in ("budget", "peak")} for tier in tiers}
        notes["lines"] = [line for line in str(report).splitlines() if line.startswith(("cpu ", "nvme ", "moved"))]
        return {"gemini": gemini.__version__} | notes | {"kernels": str(kernels.capabilities())}


if __name__ == "__main__":
    contract.run(GeminiTrainer)
