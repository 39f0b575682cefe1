"""What the tests of pipelines share: a deep model, batches, and runs of a pipeline and of plain accumulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import gemini
from tests.ranks.parallel_cases import EPS, LR, config_for, llama, mesh_of
from tests.ranks.pool import Pool
from tests.world import world_of

Pools = Callable[[int], Pool]
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


class Found(NamedTuple):
    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    fetched: int
    """Gathers of weights in the last step."""


def accumulated(num_batches: int, micro_batches: int, make: Callable[[], Any] = deep) -> Found:
    """One process of plain torch, the mean over micro-batches and over the batches of all ranks."""
    model: Any = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for rank in range(num_batches):
            for part in ids_of(step, rank).chunk(micro_batches):
                loss = model(input_ids=part, labels=part).loss / micro_batches / num_batches
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return Found(losses, norms, dict(model.state_dict()), 0)


def run(
    pipe: gemini.Pipeline, batch: Callable[[int], torch.Tensor], optimizer: Any
) -> tuple[list[float], list[float], int]:  # fmt: skip
    manager = world_of(pipe.model).manager
    losses, norms, fetched = [], [], 0
    for step in range(STEPS):
        before, ids = manager.num_gathers, batch(step)
        losses.append(pipe.step(input_ids=ids, labels=ids).item())
        fetched = manager.num_gathers - before
        norms.append(float(pipe.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    world_of(pipe.model).check()
    return losses, norms, fetched


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
    optimizer = gemini.HybridAdam(pipe.parameters(), lr=LR, eps=EPS, weight_decay=0.1)
    losses, norms, fetched = run(pipe, lambda step: ids_of(step, gemini.data_rank(mesh).rank), optimizer)
    return Found(losses, norms, pipe.model.state_dict(dtype=torch.float32), fetched)


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
