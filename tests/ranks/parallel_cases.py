"""Models, meshes and settings for what is parallel in slices and stages."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gemini
from tests.world import world_of

LR, EPS = 1e-2, 1e-3
"""The update of a gradient near zero is as good as drawn with a small ``eps``: rounding would be all that is seen."""


def mesh_of(sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def llama(**changes: Any) -> Any:
    """Tied, with heads for four slices."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 64,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).float()


def num_batches(sizes: dict[str, int]) -> int:
    """Ranks of a mesh that compute with batches of their own."""
    return math.prod(size for name, size in sizes.items() if name in ("dp", "dp_replicate"))


def config_for(where: str, folder: str, **settings: Any) -> gemini.GeminiConfig:
    memory: dict[str, Any] = {"cpu": "64MiB"}
    more: dict[str, Any] = {"device": "standin" if where == "standin" else "cpu", "overlap": where != "serial"}
    if where != "ram":
        memory |= {"nvme": "64MiB", "nvme_path": folder}
        on_disk = (0.3, 0.5) if where == "standin" else (1, 1)
        more["placement"] = gemini.StaticPlacement(weights_on_nvme=on_disk[0], optimizer_on_nvme=on_disk[1])
    if where == "standin":
        memory["gpu"] = "1MiB"
    more["memory"] = gemini.MemoryBudget(**memory)
    return gemini.GeminiConfig(**{"precision": "fp32", **more, **settings})


def planes_of(model: Any) -> dict[str, torch.Tensor]:
    """Every plane of the params that are here, whole where they are slices, by the names of the whole model."""
    by_names, found = world_of(model).by_names, {}
    for handle in by_names.handles:
        for kind, plane in handle.chunk.planes.items():
            if kind != "grad" and plane.block == 1:
                value = by_names.read_plane(handle, kind)
                found[f"{kind}/{handle.whole_name}"] = by_names.joined(handle, value)
        found[f"steps/{handle.whole_name}"] = torch.tensor(handle.num_steps)
    return found


def step_refused(optimizer: Any, model: Any, before: dict[str, torch.Tensor]) -> tuple[str, bool]:
    """What a step with a gradient that is not finite says, and whether the weights are still those ``before`` it."""
    said = ""
    try:
        optimizer.step()
    except gemini.NonFiniteGradient as e:
        said = str(e)
    optimizer.zero_grad()
    after = model.state_dict()
    return said, all(torch.equal(after[name], value) for name, value in before.items())
