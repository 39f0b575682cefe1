"""Peers "gemini*": one script, several ways to place the same exact training.

    gemini                         everything in memory, gradients="retain"
    gemini-nvme                    weights, residual, states and retained gradients in the spill file
    gemini-nvme-budget             placement="auto" in a memory budget (--cpu-budget) with a drive behind it
    gemini-transient               in memory, gradients="transient" and HybridAdam(step_in_backward=True): no clipping
    gemini-transient-nvme          the same in the spill file
    gemini-transient-nvme-states   the same, but the weights stay in memory: residual and states in the spill file
    gemini-compact-nvme            as gemini-nvme, with compact states; gemini-compact-transient-nvme likewise

On a GPU there is one, under a GPU budget with its states where the plan puts them: with clipping updates run after
backward, beside the next forward; without, inside backward. ``settings["config"]`` are further fields of
``GeminiConfig`` (``overlap``, ``update_threads``, ...), for comparing ours with ours.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


import gemini
from benchmarks.peers import contract
from gemini import kernels
from tests import kernel_settings


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


class GeminiTrainer(contract.Trainer):
    def __init__(self, settings: Mapping[str, Any]):
        kernel_settings.set_num_threads(settings["threads"])
        self.clip = settings["clip"]
        in_backward = not self.clip if contract.is_large(settings) else "transient" in settings["peer"]
        self.config: dict[str, Any] = {}
        self.model = self.of_card(settings) if contract.is_large(settings) else self.of_cpu(settings, in_backward)
        parameters, hyper = self.model.parameters(), contract.hyper(settings)
        self.optimizer = gemini.HybridAdam(parameters, **hyper, step_in_backward=in_backward)

    def of_cpu(self, settings: Mapping[str, Any], transient: bool) -> Any:
        self.config = {"precision": "bf16", "gradients": "transient" if transient else "retain"}
        self.config |= {"states": "compact"} if "compact" in settings["peer"] else {}
        self.config |= {"device": "cpu"} | settings["config"]
        config = gemini.GeminiConfig(**self.config, **placing(settings))
        return gemini.GeminiDDP(contract.make_model(settings), config)

    def of_card(self, settings: Mapping[str, Any]) -> Any:
        from benchmarks.gpu import _llama
        from benchmarks.gpu._card import Card
        from benchmarks.gpu._training import Training, trace_of

        card, shape = Card(settings["device"]), _llama.SHAPES[settings["shape"]]
        tokens, seq_len = max(settings["tokens"]), settings["seq_len"]
        memory = gemini.MemoryBudget(gpu=settings["gpu"], cpu=settings["host"])
        config = {"memory": memory, "trace": trace_of(shape, tokens, seq_len, card), "offload_activations": "auto"}
        return Training(card, shape, tokens, seq_len, config).model

    def clip_grads(self, norm: float) -> None:
        self.model.clip_grad_norm_(norm)

    def finish(self) -> None:
        self.model.memory_report()  # sees a finished world: it waits for updates and moves in flight

    def notes(self) -> dict[str, Any]:
        report: Any = self.model.memory_report()
        notes: dict[str, Any] = {name: value for name, value in self.config.items() if name != "device"}
        tiers = [tier for tier in ("gpu", "cpu", "nvme") if tier in report]
        notes |= {tier: {name: report[tier][name] for name in ("budget", "peak")} for tier in tiers}
        notes["lines"] = [line for line in str(report).splitlines() if line.startswith(("cpu ", "nvme ", "moved"))]
        notes |= {"gemini": gemini.__version__, "kernels": str(kernels.capabilities())}
        return notes | ({} if self.config else {"plan": str(self.model._gemini_engine.decision.plan)})


if __name__ == "__main__":
    contract.run(GeminiTrainer)
