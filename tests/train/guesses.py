"""Models that guess updates inside backward, for the tests of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from tests.train import helpers
from tests.train.helpers import Blocks, adam, make_config, squares
from tests.world import world_of

ALWAYS, NEVER = 1e-6, 1e6
"""Thresholds that every step, and none, is clipped at."""
GUESSES = {"step_in_backward": True, "speculate": True}
THRESHOLDS = {
    "never": [NEVER] * 6,
    "always": [ALWAYS] * 6,
    "sometimes": [NEVER, ALWAYS, NEVER, NEVER, ALWAYS, NEVER],
}
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "store": ("disk", {"durable": True}),
    "half in a store": ("half", {"durable": True}),
    "GPU and store": ("standin", {"durable": True}),
    "memory": ("ram", {}),
    "spill file": ("disk", {"cpu": "64MiB"}),
    "half in memory": ("half", {}),
    "GPU": ("standin", {}),
}
"""Where chunks live, with memory to undo them from: a placement of ``make_config``, and what else the budget has."""


class OwnLoss(Blocks):
    """It computes its loss itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().square().mean()


class Large(Blocks):
    """Layers of several tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(3))


def model_of(path: Path, place: str = "store", *, make: Callable[[], Any] = Blocks, **how: Any) -> Any:
    """Blocks there. One thread updates, so that what is in memory is updated beside training as well."""
    raw, (where, memory) = make(), PLACES[place]
    states = how.pop("states", "exact")
    config = make_config(raw, where, path, **how)
    if where != "ram":
        memory = {"nvme": "64MiB", "nvme_path": path, **memory}
    budget = gemini.MemoryBudget(**{**vars(config.memory), **memory})
    return gemini.GeminiDDP(raw, replace(config, memory=budget, update_threads=1, states=states))


def guessing(path: Path, place: str = "store", **how: Any) -> tuple[Any, Any]:
    model = model_of(path, place, **how)
    return model, adam(model, **GUESSES)


def plainly(path: Path, make: Callable[[], Any] = Blocks, **how: Any) -> tuple[Any, Any]:
    """The same without updates inside backward, and without a store."""
    raw, states = make(), how.pop("states", "exact")
    model = gemini.GeminiDDP(raw, replace(make_config(raw, "ram", path, **how), states=states))
    return model, adam(model)


def train(model: Any, optimizer: Any, number: int, clip: float, store: Path | None = None) -> None:
    """One step of the ordinary loop, with a commit behind it perhaps."""
    helpers.train(model, optimizer, [number], squares, clip=clip)
    if store is not None:
        gemini.save_checkpoint(store, model, optimizer, extra=number, wait=False)


def counts(model: Any) -> tuple[int, int]:
    """Updates that were kept, and undone."""
    found = model.memory_report()["speculation"]
    return found["kept"], found["undone"]


def guess_always(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the steps before have shown."""
    monkeypatch.setattr(type(world_of(model).guesses), "pays", True)


def let_guesses_end(model: Any) -> None:
    """A guess that a step asks for before it has begun is an update like others."""
    for job in world_of(model).updates_in_flight:
        job.wait_until_over()
