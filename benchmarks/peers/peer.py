"""Who is compared, and what is kept of each: the values that the driver and the report share."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Peer(NamedTuple):
    script: str
    what: str
    nvme: bool = False
    clips: bool = True


PEERS = {
    "plain": Peer("with_plain_torch.py", "bf16 weights, fp32 masters, torch.optim.AdamW as it comes"),
    "plain-fused": Peer("with_plain_torch.py", "the same with AdamW(fused=True)"),
    "deepspeed-cpu": Peer("with_deepspeed.py", "ZeRO-3, params and optimizer offloaded to the CPU"),
    "deepspeed-nvme": Peer("with_deepspeed.py", "ZeRO-3, both offloaded to NVMe, max_in_cpu as it comes", nvme=True),
    "deepspeed-nvme-pipelined": Peer("with_deepspeed.py", "the same with pipeline_read and pipeline_write", nvme=True),
    "deepspeed-nvme-all": Peer("with_deepspeed.py", "ZeRO-3, both offloaded to NVMe, max_in_cpu 0", nvme=True),
    "fsdp2-offload": Peer("with_fsdp2.py", "CPUOffloadPolicy(pin_memory=False), fp32 params, bf16 compute"),
    "gemini": Peer("with_gemini.py", "all in memory, gradients retained"),
    "gemini-nvme": Peer("with_gemini.py", "all states and retained gradients in the spill file", nvme=True),
    "gemini-nvme-budget": Peer("with_gemini.py", "placement auto in --cpu-budget, NVMe behind it", nvme=True),
    "gemini-transient": Peer("with_gemini.py", "all in memory, step_in_backward", clips=False),
    "gemini-transient-nvme": Peer("with_gemini.py", "all states on NVMe, step_in_backward", nvme=True, clips=False),
    "gemini-transient-nvme-states": Peer(
        "with_gemini.py", "weights in memory, residual and states on NVMe, step_in_backward", nvme=True, clips=False
    ),
    "gemini-compact-nvme": Peer("with_gemini.py", "as gemini-nvme, with compact states", nvme=True),
    "gemini-compact-transient-nvme": Peer(
        "with_gemini.py", "as gemini-transient-nvme, with compact states", nvme=True, clips=False
    ),
}
BASES = ("plain", "plain-fused", "deepspeed-cpu", "deepspeed-nvme", "fsdp2-offload")
"""Whose speed the others' is divided by."""


@dataclass
class Seen:
    """What was measured of a peer."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    empty: int = 0
    life_peak: int = 0
    step_peak: int = 0
    idle: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)
