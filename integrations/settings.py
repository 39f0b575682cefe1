"""From what a framework was told (precision flags, its device, how ranks share a model) to what Gemini is given.

A flag that says nothing ("no", None) leaves the choice to the config; where neither says anything it is fp32, as in
the framework. A flag and a config that differ are refused: one of them is a mistake, and which one only the user knows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gemini.config import GeminiConfig
from gemini.errors import warn
from gemini.memory.devices.device import torch_device_of
from gemini.planning.plan import Plan
from gemini.train.ddp import GeminiDDP
from gemini.train.modules.mixed import half_of

_UNSAID = (None, "no")
ORDERS = (None, "dfs", "bfs")
"""Of micro-batches: as the plan of a model was made for, one after another, or block by block."""


def check_config(config: Any, name: str = "gemini_config") -> None:
    """Refuse what is not a config."""
    if config is not None and not isinstance(config, GeminiConfig):
        raise TypeError(f"{name}= is a gemini.GeminiConfig, or None for defaults; got {type(config).__name__}")


def check_precision(flag: str | None, config: GeminiConfig | None, where: str) -> str:
    """Compare a framework's precision flag ("bf16", "fp16", "no" or None) with the config of the model; returns what is
    computed in.
    """
    if flag not in (*_UNSAID, "bf16", "fp16"):
        raise ValueError(f"{where} asks for {flag}: Gemini computes in bf16, fp16 or fp32")
    if config is not None and flag not in _UNSAID and config.precision not in (None, flag):
        raise ValueError(
            f"{where} asks for {flag}, and the model is to be managed in {config.precision} "
            f"(GeminiConfig(precision={config.precision!r})): say {flag} in both, or only in one of them"
        )
    return precision_of(flag, config)


def precision_of(flag: str | None, config: GeminiConfig | None) -> str:
    """What is computed in: what the config says, else what the flag says, else fp32."""
    return (config or GeminiConfig()).resolved("fp32" if flag is None or flag in _UNSAID else flag).precision


def warn_half(model: nn.Module, config: GeminiConfig | None, computed: str, unsaid: str, flag: str) -> None:
    """Say it where weights in half precision are going to be computed with in another one that nobody asked for.

    Args:
        unsaid: what was not given.
        flag: what would be, with ``{}`` in the place of the precision.
    """
    half = None if isinstance(model, GeminiDDP) else half_of(model)
    if half not in (None, computed) and (config is None or config.precision is None):
        warn(
            f"the model's weights are {half}, and {unsaid}: it is trained in {computed}. Give {flag.format(half)} to "
            f"compute in {half} (with exact fp32 masters), or GeminiConfig(precision=...) to choose"
        )


def config_of(model: Any) -> GeminiConfig | None:
    """The config of a model that is managed already, else None."""
    return model.__dict__["_gemini_engine"].config if isinstance(model, GeminiDDP) else None


def order_of(config: GeminiConfig | None, asked: str | None = None) -> str:
    """ "bfs" for block by block, or "dfs": what was ``asked`` for, else what the plan of a config was made for."""
    plan = None if config is None else config.placement
    return asked or ("bfs" if isinstance(plan, Plan) and plan.trace.micro_batches > 1 else "dfs")


def resolve_config(
    config: GeminiConfig | None, flag: str | None, device: torch.device, *, accumulates: bool = False
) -> GeminiConfig:
    """The config for a model that is not managed yet.

    Args:
        config: the user's, or None for measured budgets.
        flag: the framework's precision, compared before; it holds where the config says none.
        device: where the framework puts batches; the model computes there too.
        accumulates: whether several backwards make a step. Then "retain" becomes "accumulate": room for fp32 sums is
            needed for sure, and what does not fit is refused before the first step. A plan that was made for block by
            block knows what is added up.
    """
    config = config or GeminiConfig()
    config = config.resolved(precision_of(flag, config))
    if accumulates and config.gradients == "retain" and order_of(config) == "dfs":
        config = replace(config, gradients="accumulate")
    if config.device is None:
        return replace(config, device=str(device))
    if torch_device_of(config.device).type != device.type:
        raise ValueError(
            f"GeminiConfig(device={config.device!r}), but batches are put on {device}: leave device= out, or tell the "
            'framework the same (use_cpu=True, Accelerator(cpu=True), Trainer(accelerator="cpu"))'
        )
    return config


# ---- ranks -------------------------------------------------------------------------------------------------------


class Parallel(NamedTuple):
    """What a config means here.

    Attributes:
        mesh: its dims by accelerate's names, which Gemini knows too; None if it asks for nothing.
    """

    mesh: DeviceMesh | None = None

    def size_of(self, dim: str) -> int:
        """Ranks along one of the dims; 1 where there is no such dim."""
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return self.mesh.size(names.index(dim)) if self.mesh is not None and dim in names else 1


def parallel_of(config: Any, num_processes: int, device_type: str) -> Parallel:
    """The mesh of a config.

    ``dp_shard_size`` and ``dp_replicate_size`` divide chunks and replicate them; ``cp_size``, and ``sp_size`` by
    Ulysses, divide sequences; ``tp_size`` slices layers. What accelerate needs for them (FSDP, DeepSpeed) is not
    needed.
    """
    if config is None or config.total_size == 1:
        return Parallel()
    parts = config.cp_size * config.sp_size
    dims = {
        "dp_replicate": config.dp_replicate_size,
        "dp_shard": config.dp_shard_size,
        "cp": parts,
        "tp": config.tp_size,
    }
    total = math.prod(dims.values())
    if total != num_processes:
        left = num_processes * config.dp_shard_size / total
        remedy = f": dp_shard_size={int(left)} would do" if left == int(left) >= 1 else ""
        raise ValueError(
            f"parallelism_config: dp_replicate_size={config.dp_replicate_size} x dp_shard_size={config.dp_shard_size} "
            f"x cp_size (or sp_size)={parts} x tp_size={config.tp_size} is {total}, and there are {num_processes} "
            f"processes{remedy}"
        )
    kept = {name: size for name, size in dims.items() if size > 1}
    mesh = init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    return Parallel(mesh)
