"""accelerate's ``ParallelismConfig`` as a mesh of Gemini's: which dims there are, and which of them Gemini has."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Parallel(NamedTuple):
    """What a config means here.

    Attributes:
        mesh: its dims by accelerate's names, which Gemini knows too.
        attention: for ``GeminiConfig(context_attention=)``; None leaves the choice to that.
    """

    mesh: DeviceMesh
    attention: str | None

    @property
    def context_size(self) -> int:
        """Ranks that have parts of the same sequences."""
        names = self.mesh.mesh_dim_names or ()
        return int(self.mesh.mesh.shape[names.index("cp")]) if "cp" in names else 1


def parallel_of(config: Any, num_processes: int, device_type: str) -> Parallel | None:
    """The mesh of a config; None for one that asks for nothing.

    ``dp_shard_size`` and ``dp_replicate_size`` divide chunks and replicate them; ``cp_size``, and ``sp_size`` by
    Ulysses, divide sequences. What accelerate needs for them (FSDP, DeepSpeed) is not needed.

    Raises:
        ValueError: for tensor parallel, and sizes whose product is not the number of processes.
    """
    if config is None or config.total_size == 1:
        return None
    if config.tp_size > 1:
        raise ValueError(
            f"parallelism_config: tp_size={config.tp_size} slices the model, which Gemini does not do. It divides "
            "chunks over dp_shard_size, replicates them over dp_replicate_size and divides sequences over cp_size"
        )
    replicas, shards, parts = config.dp_replicate_size, config.dp_shard_size, config.cp_size * config.sp_size
    if replicas * shards * parts != num_processes:
        left = num_processes / (replicas * parts)
        remedy = f": dp_shard_size={int(left)} would do" if left == int(left) >= 1 else ""
        raise ValueError(
            f"parallelism_config: dp_replicate_size={replicas} x dp_shard_size={shards} x cp_size (or sp_size)={parts} "
            f"is {replicas * shards * parts}, and there are {num_processes} processes{remedy}"
        )
    dims = {"dp_replicate": replicas, "dp_shard": shards, "cp": parts}
    kept = {name: size for name, size in dims.items() if size > 1}
    mesh = init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    return Parallel(mesh, "ulysses" if config.sp_size > 1 else None)
