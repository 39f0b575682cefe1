"""What race_hunt and fault_hunt train: drawn recipes, the ordinary loop, and the run in which all is done in turn."""

import contextlib
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn

import gemini
from gemini.train.update.guess import GuessRecord
from tests import models
from tests.scaling import backward, clip_grads, make_step, new_scaler, scaler_of
from tests.world import world_of

NUM_STEPS = 3
FAMILIES = ("gpt2", "llama", "tied", "mixtral", "t5", "some unused")


class AlwaysPays(GuessRecord):
    """So that every step is guessed, whatever those before have shown."""

    pays = True  # type: ignore[assignment]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bits."""

    family: str
    checkpointing: bool
    precision: str
    gradients: str
    in_backward: bool
    max_norm: float | None
    loop: str = "plain"
    """How the micro-batches of a step are computed: "plain", with "micro_batch" or with "train_step"."""
    averaged: bool = False
    """Whether params have a moving average."""
    states: str = "exact"

    @property
    def num_micro(self) -> int:
        sums = self.gradients.startswith("accumulate") or self.loop == "train_step"
        return (3 if self.loop == "train_step" else 2) if sums else 1

    @property
    def rule(self) -> gemini.rules.UpdateRule | None:
        return gemini.optim.AveragedRule(decay=0.75) if self.averaged else None

    def make_model(self) -> nn.Module:
        """The same weights every time."""
        model: Any = models.SomeUnused() if self.family == "some unused" else models.make_model(self.family)
        if self.checkpointing:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # transformers renames it
                model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def batches(self, step: int) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(50 + step)
        shapes = [(2, 5 + (step + number) % 3) for number in range(self.num_micro)]
        ids = [torch.randint(1, models.VOCAB, shape, generator=generator) for shape in shapes]
        return [{"input_ids": i, "labels": i} for i in ids]

    def wrap(self, config: gemini.GeminiConfig, *, guesses: bool = False) -> tuple[Any, gemini.HybridAdam]:
        """``guesses``: updates begin inside backward before it is known whether they clip."""
        model: Any = gemini.GeminiDDP(self.make_model(), config)
        new_scaler(model, 2.0**12)
        vectors = [p for p in model.parameters() if p.dim() == 1]
        rest = [p for p in model.parameters() if p.dim() > 1]
        groups = [{"params": rest, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        if guesses:
            world_of(model).guess_by(AlwaysPays())
        in_backward = self.in_backward or guesses
        return model, gemini.HybridAdam(groups, betas=(0.9, 0.95), step_in_backward=in_backward, speculate=guesses)


def draw_recipe(rng: random.Random) -> Recipe:
    family = rng.choice(FAMILIES)
    precision = rng.choice(("bf16", "bf16", "bf16", "fp32", "fp16"))
    gradients = rng.choice(("retain", "accumulate", "transient"))
    in_backward = gradients == "transient" or rng.random() < 0.25
    if in_backward and precision == "fp16":  # whether the step is skipped is known only at its end
        precision = "bf16"
    clipped = rng.random() < 0.6
    return Recipe(
        family,
        checkpointing=family in ("gpt2", "llama") and rng.random() < 0.4,
        precision=precision,
        gradients=gradients,
        in_backward=in_backward,
        max_norm=0.5 if clipped and not in_backward else None,
    )


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """Everything that can be read after a number of steps; ``grads`` of the backward that came next."""

    weights: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]
    states: dict[int, dict[str, torch.Tensor]]
    eval_loss: float
    averages: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)


@dataclass
class Steps:
    """What the loop itself sees."""

    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)


def train(recipe: Recipe, model: Any, optimizer: gemini.HybridAdam, watch: Callable[[str, int], int]) -> Steps:
    """The ordinary loop. ``watch`` is told of points in it, and says with how many steps made it goes on."""
    steps, done = Steps(), 0
    while done < NUM_STEPS:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + done)
        batches = recipe.batches(done)
        if recipe.loop == "train_step":
            parts = [models.on(model.device, batch) for batch in batches]
            losses = gemini.train_step(model, parts, partial(scaled_loss, model, len(parts)))
            steps.losses |= {(done, number): loss.item() for number, loss in enumerate(losses)}
            del parts, losses
        for number, batch in enumerate(batches) if recipe.loop == "micro_batch" else ():
            part = models.on(model.device, batch)
            with contextlib.nullcontext() if number == len(batches) - 1 else model.no_sync():
                steps.losses[done, number] = model.micro_batch(partial(micro_batch, model, len(batches), part))
        for number, batch in enumerate(batches) if recipe.loop == "plain" else ():
            with contextlib.nullcontext() if number == len(batches) - 1 else model.no_sync():
                loss = model(**models.on(model.device, batch)).loss
                watch("forward", done)
                backward(model, loss / recipe.num_micro)
                steps.losses[done, number] = loss.item()
                del loss
        watch("backward", done)
        if recipe.max_norm is not None:
            steps.norms[done] = float(clip_grads(model, optimizer, recipe.max_norm))
        make_step(model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = 1e3  # an update that reads it now is too late
        done += 1
        watch("step", done)
        optimizer.zero_grad()
        done = watch("end", done)
    return steps


def scaled_loss(model: Any, number: int, output: Any, part: Any = None) -> torch.Tensor:
    return scaler_of(model).scale(output.loss / number)


def micro_batch(model: Any, number: int, part: dict[str, torch.Tensor]) -> float:
    loss = scaled_loss(model, number, model(**part))
    loss.backward()
    return loss.item()


def averages_of(recipe: Recipe, model: Any) -> dict[str, torch.Tensor]:
    if not recipe.averaged:
        return {}
    return {name: gemini.EMA(model).full_param(name) for name, _ in model.named_parameters()}


def eval_loss(recipe: Recipe, model: Any, mode: Any = torch.no_grad) -> float:
    model.eval()
    with mode():
        loss = model(**models.on(model.device, recipe.batches(0)[0])).loss.item()
    model.train()
    return loss


def look(recipe: Recipe, model: Any, optimizer: gemini.HybridAdam) -> World:
    """All that there is to see; the order of the groups' params is the same in every run."""
    states = optimizer.state_dict()["state"]
    weights, masters = model.state_dict(), model.state_dict(dtype=torch.float32)
    return World(weights, masters, states, eval_loss(recipe, model), averages_of(recipe, model))


@cache
def reference(recipe: Recipe) -> tuple[Steps, list[World]]:
    """Everything in memory and in turn."""
    config = gemini.GeminiConfig(
        device="cpu", memory=gemini.MemoryBudget(cpu="1GiB"), precision=recipe.precision, gradients=recipe.gradients,
        overlap=False, optimizer=recipe.rule, states=recipe.states,
    )  # fmt: skip
    model, optimizer = recipe.wrap(config)
    worlds = [look(recipe, model, optimizer)]

    def watch(point: str, done: int) -> int:
        if point == "backward" and recipe.gradients != "transient" and not recipe.in_backward:
            worlds[done].grads = {name: model.full_grad(name) for name, _ in model.named_parameters()}
        if point == "end":
            worlds.append(look(recipe, model, optimizer))
        return done

    return train(recipe, model, optimizer, watch), worlds


def same_all(found: dict[Any, Any], wanted: dict[Any, Any], what: str) -> None:
    assert found.keys() == wanted.keys(), (what, found.keys() ^ wanted.keys())
    for key, value in wanted.items():
        if isinstance(value, dict):
            same_all(found[key], value, f"{what} of {key}")
        elif value is None or not isinstance(value, torch.Tensor):
            assert found[key] == value, (what, key, found[key], value)
        else:
            models.assert_same_bits(found[key], value, f"{what} of {key}")
