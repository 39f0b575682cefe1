"""Models, meshes and settings for what is parallel in slices and stages."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gemini
from tests.scaling import backward, make_step, scaler_of
from tests.train.helpers import same_bits
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


class Found(NamedTuple):
    """What came of some steps."""

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]
    """Of the first step, whole."""
    fetched: int = 0
    """Gathers of weights in the last step."""
    whole: dict[str, torch.Tensor] = {}  # noqa: RUF012
    """What no slice has a part of: its bits on this rank."""


def train(
    model: Any, optimizer: Any, compute: Callable[[int], float], *, steps: int = 2, max_norm: float | None = 0.5,
    reads_grads: bool = False, clip: Callable[[float], Any] | None = None,
) -> Found:  # fmt: skip
    """The ordinary loop, of a managed model or of plain torch.

    Args:
        compute: makes forward and backward of a step, and says the loss.
        max_norm: None where updates are made inside backward, and nothing is left to clip.
    """
    managed = hasattr(model, "full_grad")
    if clip is None:
        clip = model.clip_grad_norm_ if managed else partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
    losses, norms, grads = [], [], {}
    for step in range(steps):
        losses.append(compute(step))
        if reads_grads and not step:
            named = model.named_parameters()
            grads = {name: (model.full_grad(name) if managed else p.grad).clone() for name, p in named}
        if max_norm is not None:
            scaler_of(model).unscale_(optimizer)
            norms.append(float(clip(max_norm)))
        make_step(model, optimizer)
        optimizer.zero_grad()
    if managed:
        world_of(model).check()
    return Found(losses, norms, model.state_dict(dtype=torch.float32) if managed else dict(model.state_dict()), grads)


def plain_adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1)


def hybrid_adam(model: Any, **how: Any) -> Any:
    return gemini.HybridAdam(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1, **how)


def assert_same_runs(runs: list[list[Found]]) -> None:
    """Every rank has found the same bits in all of them."""
    for found in runs[1:]:
        for own, first in zip(found, runs[0], strict=True):
            assert (own.losses, own.norms) == (first.losses, first.norms)
            assert all(same_bits(value, first.state[name]) for name, value in own.state.items())


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
        make_step(model, optimizer)
    except gemini.NonFiniteGradient as e:
        said = str(e)
    optimizer.zero_grad()
    after = model.state_dict()
    return said, all(torch.equal(after[name], value) for name, value in before.items())


def nan_on_one(
    sizes: dict[str, int], make: Callable[[], Any], loss_of: Callable[[Any, int, int], torch.Tensor], precision: str,
    name: str,
) -> tuple[str, bool, float]:  # fmt: skip
    """What a step says in which rank 1 alone has NaN in the gradient of a param, whether weights are as before, and the
    loss scale after it.
    """
    mesh = mesh_of(sizes)
    model: Any = gemini.GeminiDDP(make(), config_for("ram", "", precision=precision), mesh=mesh)
    optimizer = gemini.HybridAdam(model.parameters(), lr=LR)
    before = model.state_dict()
    loss = loss_of(model, 0, gemini.data_rank(mesh).rank)
    if dist.get_rank() == 1:
        world_of(model).by_names[name].param.register_hook(lambda grad: grad * float("nan"))
    backward(model, loss)
    refused = step_refused(optimizer, model, before)
    return *refused, scaler_of(model).get_scale()


def assert_all_found_nan(found: list[tuple[str, bool, float]], precision: str) -> None:
    for said, is_as_before, scale in found:
        assert is_as_before and scale == found[0][2]
        assert (not said and scale == 2.0**15) if precision == "fp16" else "holds inf or NaN" in said
