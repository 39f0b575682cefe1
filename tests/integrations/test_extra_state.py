"""A run that the bridges resume has the same bits where modules keep state of their own (``get_extra_state``, a buffer
that grows); hooks before saving and loading see what they see with accelerate alone.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from gemini.integrations.accelerate import GeminiAccelerator
from torch import nn
from transformers import Trainer

import gemini
from tests.integrations.test_accelerate_loop import Run
from tests.integrations.trainer_cases import Stop, assert_same_run, llama, make, masters, rows, train_new


class Tracked(nn.Module):
    """A loss over the largest so far, which is state of no other kind; and a buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.llama, self.top = llama(), 1.0
        self.register_buffer("order", torch.empty(0, dtype=torch.int64))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.llama(input_ids=input_ids, labels=labels).loss
        if self.training:
            self.top = max(self.top, 1.5 * float(loss.detach()))
            self.order = torch.cat([self.order, input_ids[:, 0].cpu()])
        return {"loss": loss / self.top + 0.1 * self.order.float().mean()}

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.top], dtype=torch.float64)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.top = float(state)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        self.order = state[f"{prefix}order"].clone()
        super()._load_from_state_dict(state, prefix, *args)


def test_a_resumed_trainer(tmp_path: Path) -> None:
    whole, record = train_new(tmp_path / "whole", model=Tracked())
    half, _ = train_new(tmp_path / "half", model=Tracked(), callbacks=[Stop(3)])
    again, rest = make(tmp_path / "half", model=Tracked())
    again.train(resume_from_checkpoint=True)
    assert rest.of("loss") == record.of("loss")[3:]
    assert_same_run(whole, again)
    assert again.model.top == whole.model.top and torch.equal(again.model.order, whole.model.order)
    stock, plain = train_new(tmp_path / "stock", Trainer, model=Tracked())
    assert record.of("loss") == pytest.approx(plain.of("loss"), rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_a_resumed_accelerator(precision: str, tmp_path: Path) -> None:
    def start() -> tuple[Any, Any, Any]:
        accelerator = GeminiAccelerator(cpu=True, mixed_precision=precision)
        model = Tracked()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = model(**rows(step, step + 1))["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first, second = start(), start()
    train(*first, range(3))
    first[0].save_state(tmp_path)
    second[0].load_state(tmp_path)
    assert train(*second, range(3, 6)) == train(*first, range(3, 6))
    assert second[1].top == first[1].top and torch.equal(second[1].order, first[1].order)
    for name, master in masters(first[1]).items():
        assert torch.equal(master, second[1].full_param(name, torch.float32)), name


class Hooks:
    """As scripts of diffusers: each model is saved and loaded by the script, and taken out of what accelerate has."""

    def __init__(self, accelerator: Accelerator, *, pop: bool = True):
        self.pop, self.seen = pop, list[Any]()
        accelerator.register_save_state_pre_hook(self.save)
        accelerator.register_load_state_pre_hook(self.load)

    def save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        shapes = [{name: tuple(value.shape) for name, value in state.items()} for state in weights]
        self.seen.append(([type(model) for model in models], shapes))
        for model in models:
            torch.save(model.state_dict(), Path(folder) / "own.pt")
            if self.pop:
                weights.pop()

    def load(self, models: list[Any], folder: str) -> None:
        self.seen.append(len(models))
        while self.pop and models:
            models.pop().load_state_dict(torch.load(Path(folder) / "own.pt"))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "no"])
@pytest.mark.parametrize("pop", [True, False])
def test_hooks_see_what_they_see_with_accelerate(pop: bool, precision: str, tmp_path: Path) -> None:
    seen = []
    for kind in (Accelerator, GeminiAccelerator):
        accelerator = kind(cpu=True)
        hooks = Hooks(accelerator, pop=pop)
        model = llama()
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.save_state(folder := tmp_path / kind.__name__)
        accelerator.load_state(folder)
        seen.append([(len(one[0]), one[1]) if isinstance(one, tuple) else one for one in hooks.seen])
        assert (folder / "model.safetensors").exists() == (kind is Accelerator and not pop)
    assert seen[0] == seen[1] and seen[0][1] == 1
    first, second = Run(precision=precision), Run(precision=precision)
    Hooks(first.accelerator, pop=pop)
    Hooks(second.accelerator, pop=pop)
    first.train(0, 4)
    first.accelerator.save_state(tmp_path / "state")
    second.accelerator.load_state(tmp_path / "state")
    assert second.train(4, 8) == first.train(4, 8)
    assert_same_run(first.pair, second.pair)


def test_weights_that_a_hook_loads_stay(tmp_path: Path) -> None:
    """Others than those that were saved, as with accelerate."""
    run = Run()
    run.train(0, 4)
    name = "model.norm.weight"
    run.accelerator.register_load_state_pre_hook(
        lambda models, folder: models.pop().load_state_dict({name: torch.full((32,), 7.0)}, strict=False)
    )
    run.accelerator.save_state(tmp_path / "state")
    before = masters(run.model)
    run.accelerator.load_state(tmp_path / "state")
    for own, master in masters(run.model).items():
        assert torch.equal(master, torch.full((32,), 7.0) if own == name else before[own])


@pytest.mark.parametrize("changed", ["replaced", "in place"])
def test_weights_that_a_hook_changes_are_refused(changed: str, tmp_path: Path) -> None:
    """They would not come back: what is saved of a managed model is what it has."""
    run = Run()

    def hook(models: list[Any], weights: list[Any], folder: str) -> None:
        if changed == "replaced":
            weights[0] = copy.copy(weights[0])
        else:
            weights[0].popitem()

    handle = run.accelerator.register_save_state_pre_hook(hook)
    with pytest.raises(gemini.GeminiError, match=r"has changed the weights of a managed model.*weights\.pop"):
        run.accelerator.save_state(tmp_path / "state")
    handle.remove()
    run.accelerator.save_state(tmp_path / "state")
