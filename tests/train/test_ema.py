"""Moving averages as a plane: the bits of a plain fp32 loop beside training, wherever chunks live, whatever a step is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini import optim
from gemini.errors import GeminiError, PlanMismatch, StorageError
from gemini.optim import AdamRule, AveragedRule
from gemini.planning.planes import ADAM
from gemini.planning.working import staging_bytes, staging_sets, tile_numel
from gemini.rules import UpdateRule
from gemini.tiers import Tier
from tests.plain import Plain
from tests.scaling import new_scaler
from tests.train import helpers
from tests.train.helpers import (
    Blocks,
    adam,
    assert_same_snapshot,
    assert_same_state,
    make_config,
    noise,
    same_bits,
    snapshot,
    squares,
    train,
    train_plain,
)
from tests.world import world_of

DECAY = 0.9
RULE = AveragedRule(decay=DECAY)


class PlainAverage(Plain):
    """The plain loop, and after each of its steps that of the average, over fp32 masters."""

    def __init__(self, model: nn.Module, *args: Any, decay: Callable[[int], float] = lambda step: DECAY, **how: Any):
        super().__init__(model, *args, **how)
        self.decay = decay
        self.averages = {name: self.master(name).clone() for name in self.states}

    @torch.no_grad()
    def step(self) -> None:
        before = {name: state["step"] for name, state in self.states.items()}
        super().step()
        for name, average in self.averages.items():
            if self.states[name]["step"] > before[name]:
                average.sub_((average - self.master(name)) * (1 - self.decay(self.states[name]["step"])))

    def averaged(self, name: str) -> torch.Tensor:
        return self.averages[name].view(self.model.get_parameter(name).shape)


def wrap(model: nn.Module, where: str, path: Path, rule: UpdateRule = RULE, **how: Any) -> Any:
    """Managed with averages, in budgets that have room for them in staging as well and for nothing else."""
    more = {key: how.pop(key) for key in ("update_threads", "durable") if key in how}
    config = make_config(model, where, path, **how)
    memory = vars(config.memory)
    if where in ("disk", "serial", "small"):
        largest = max(param.numel() for param in model.parameters())
        tile, sets = tile_numel(2 * largest), staging_sets(Tier.CPU, config.precision, overlap=True)
        memory = {**memory, "cpu": memory["cpu"] + sets * (staging_bytes(tile, rule.spec) - staging_bytes(tile, ADAM))}
    if "durable" in more:
        memory = {**memory, "cpu": "64MiB", "durable": more.pop("durable")}
    return gemini.GeminiDDP(model, replace(config, memory=gemini.MemoryBudget(**memory), optimizer=rule, **more))


def assert_same_averages(model: Any, plain: PlainAverage) -> None:
    """Masters, states and averages; and averages in the place of masters, which come back with all their bits."""
    assert_same_state(model, plain)
    ema = gemini.EMA(model)
    before = snapshot(model)
    for name in plain.states:
        assert same_bits(ema.full_param(name), plain.averaged(name)), name
    with ema.swapped_in():
        for name, param in plain.model.named_parameters():
            assert same_bits(model.full_param(name, torch.float32), plain.averaged(name)), name
            assert same_bits(ema.full_param(name), plain.averaged(name)), name
            assert same_bits(model.full_param(name), plain.averaged(name).to(param.dtype)), name
    assert_same_snapshot(snapshot(model), before)
    assert_same_state(model, plain)


# ---- the bits --------------------------------------------------------------------------------------------------------


def loss_of(model: Any, seed: int) -> torch.Tensor:
    dtype = model.get_parameter("layers.0.weight").dtype
    return model(noise(2, 5, 32, seed=seed, dtype=dtype)).float().square().mean()


def accumulate(model: Any, optimizer: Any, plain: Plain, seed: int) -> None:
    for micro in range(2):
        helpers.backward(model, loss_of(model, 2 * seed + micro))
        plain.backward(loss_of(plain.model, 2 * seed + micro))
    helpers.make_step(model, optimizer)
    optimizer.zero_grad()
    plain.step()


def clipped(model: Any, optimizer: Any, plain: Plain, seed: int) -> None:
    train(model, optimizer, [seed], loss_of)
    train_plain(plain, [seed], loss_of)


def not_clipped(model: Any, optimizer: Any, plain: Plain, seed: int) -> None:
    train(model, optimizer, [seed], loss_of, clip=None)
    train_plain(plain, [seed], loss_of, clip=None)


STEPS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "clipped": (clipped, {}, {}),
    "accumulated": (accumulate, {"gradients": "accumulate"}, {}),
    "in backward": (not_clipped, {}, {"step_in_backward": True}),
    "transient": (not_clipped, {"gradients": "transient"}, {"step_in_backward": True}),
}


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_the_bits_of_a_plain_loop(precision: str, how: str, where: str, tmp_path: Path) -> None:
    """In fp16 the first steps overflow: they are skipped, and averages stay with the weights."""
    step, config, of_optimizer = STEPS[how]
    if precision == "fp16" and of_optimizer:
        return
    scale = 2.0**30 if precision == "fp16" else None
    plain = PlainAverage(Blocks().to(torch.float32), precision, scale=scale)
    model = wrap(Blocks(), where, tmp_path, precision=precision, **config)
    new_scaler(model, scale or 1.0)
    optimizer = adam(model, **of_optimizer)
    for seed in range(7):
        step(model, optimizer, plain, seed)
        if seed in (0, 6):
            assert_same_averages(model, plain)
    handle = world_of(model).handles[0]
    assert 1 < handle.num_steps <= 7 and (handle.num_steps < 7) == (precision == "fp16")
