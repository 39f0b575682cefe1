"""accelerate's ``ParallelismConfig`` as a mesh of Gemini's: which dims there are, and which of them Gemini has."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Parallel(NamedTuple):
    """What a config means here.

    Attributes:
        mesh: its dims by accelerate's names, which Gemini knows too; None if it asks for nothing.
        attention: for ``GeminiConfig(context_attention=)``; None leaves the choice to that.
    """

    mesh: DeviceMesh | None = None
    attention: str | None = None

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
    return Parallel(mesh, "ulysses" if config.sp_size > 1 else None)
