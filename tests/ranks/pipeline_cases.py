"""What the tests of pipelines share: a deep model, batches, and runs of a pipeline and of plain accumulation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import gemini
from tests.ranks.parallel_cases import Found, config_for, hybrid_adam, llama, mesh_of, plain_adamw, train
from tests.world import world_of

deep = partial(llama, num_hidden_layers=8, tie_word_embeddings=False)
half = partial(deep, num_hidden_layers=4)
"""Enough for two ranks with two stages each."""
STEPS = 2
EIGHT = {"pp": 2, "dp": 2, "tp": 2}
BESIDE = ({"pp": 2, "dp": 2}, {"dp_replicate": 2, "pp": 2}, {"pp": 2, "tp": 2}, EIGHT)
"""Stages and what is beside them."""
TIED = ("model.embed_tokens.weight", "lm_head.weight")


def ids_of(step: int, rank: int, rows: int = 16) -> torch.Tensor:
    return torch.randint(3, 128, (rows, 12), generator=torch.Generator().manual_seed(100 * step + rank))


def accumulated(num_batches: int, micro_batches: int, make: Callable[[], Any] = deep) -> Found:
    """One process of plain torch, the mean over micro-batches and over the batches of all ranks."""
    model: Any = make().train()

    def compute(step: int) -> float:
        total = 0.0
        for rank in range(num_batches):
            for part in ids_of(step, rank).chunk(micro_batches):
                loss = model(input_ids=part, labels=part).loss / micro_batches / num_batches
                loss.backward()
                total += loss.item()
        return total

    return train(model, plain_adamw(model), compute, steps=STEPS)


def run(pipe: gemini.Pipeline, batch: Callable[[int], torch.Tensor]) -> Found:
    """Steps of a pipeline with ``batch(step)``."""
    world, fetched = world_of(pipe.model), 0

    def compute(step: int) -> float:
        nonlocal fetched
        before, ids = world.num_gathers, batch(step)
        loss = pipe.step(input_ids=ids, labels=ids).item()
        fetched = world.num_gathers - before
        return loss  # type: ignore[no-any-return]

    return train(pipe.model, hybrid_adam(pipe), compute, steps=STEPS, clip=pipe.clip_grad_norm_)._replace(
        fetched=fetched
    )


def piped(
    sizes: dict[str, int], schedule: str, micro_batches: int, where: str, folder: str,
    make: Callable[[], Any] = deep, *, checkpointing: bool = False, stages: int | None = None, **settings: Any,
) -> Found:  # fmt: skip
    mesh, model = mesh_of(sizes), make().train()
    if checkpointing:
        model.activation_checkpointing_enable()
    pipe = gemini.Pipeline(
        model, config_for(where, folder, **settings), mesh=mesh, micro_batches=micro_batches, schedule=schedule,
        stages=stages,
    )  # fmt: skip
    return run(pipe, lambda step: ids_of(step, gemini.data_rank(mesh).rank))


class Stack(nn.Module):
    """Not of transformers: its forward gives the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        for block in self.blocks:
            x = block(x)
        return (self.down(x) - labels).square().mean()
