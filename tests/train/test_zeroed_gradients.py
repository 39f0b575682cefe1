"""``zero_grad(set_to_none=False)``: what gets no gradient afterwards is updated with zeros, as in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from tests.train.helpers import (
    ALL_PLACEMENTS,
    PLACEMENTS,
    Blocks,
    Plain,
    adam,
    assert_same_state,
    make_config,
    noise,
    wrap,
)

PATHS = ((0, 1), (1, 2), (1,), (2, 0), (0, 1))
"""Which layers each step uses: layer 2 has had no gradient when the first step is over, and so has no zeros then."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def loss_of(model: Any, step: int, precision: str) -> torch.Tensor:
    model.path = PATHS[step]
    return model(noise(2, 5, 32, seed=step, dtype=DTYPES[precision])).float().square().mean()  # type: ignore[no-any-return]


def train_plain(plain: Plain, zeroing: list[str], *, clip: bool) -> None:
    kept: dict[str, torch.Tensor] = {}
    for step, how in enumerate(zeroing):
        plain.backward(loss_of(plain.model, step, plain.precision))
        plain.grads = {**kept, **plain.grads}
        there = dict(plain.grads)
        if clip:
            plain.clip(0.01)
        plain.step()
        kept = {} if how == "none" else {name: torch.zeros_like(grad) for name, grad in there.items()}


def zero(model: Any, optimizer: Any, how: str) -> None:
    if how == "parts":
        for layer in model.layers:
            layer.zero_grad(set_to_none=False)
    elif how == "none":
        optimizer.zero_grad()
    else:
        (model if how == "model" else optimizer).zero_grad(set_to_none=False)


@pytest.mark.parametrize("how", ["optimizer", "model", "parts"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("where", ALL_PLACEMENTS)
def test_unused_params_are_updated_with_zeros(where: str, precision: str, how: str, tmp_path: Path) -> None:
    zeroing = [how, how, how, "none", how]
    plain = Plain(Blocks(), precision, scale=2.0**16 if precision == "fp16" else None)
    train_plain(plain, zeroing, clip=True)
    model = wrap(Blocks(), where, tmp_path, precision=precision)
    optimizer, scaler = adam(model), gemini.GradScaler(init_scale=2.0**16, enabled=precision == "fp16")
    for step, zeroed in enumerate(zeroing):
        scaler.scale(loss_of(model, step, precision)).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.01)
        scaler.step(optimizer)
        scaler.update()
        assert model.full_grad("layers.1.weight") is None, "the step has used it"
        zero(model, optimizer, zeroed)
        grad = model.full_grad("layers.1.weight")
        assert grad is None if zeroed == "none" else grad is not None and not grad.any()
    assert_same_state(model, plain)


@pytest.mark.parametrize("where", PLACEMENTS)
def test_when_the_optimizer_steps_in_backward(where: str, tmp_path: Path) -> None:
    plain = Plain(Blocks())
    train_plain(plain, ["optimizer"] * 5, clip=False)
    model = wrap(Blocks(), where, tmp_path)
    optimizer = adam(model, step_in_backward=True)
    for step in range(5):
        loss_of(model, step, "bf16").backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert_same_state(model, plain)


def test_a_skipped_step_leaves_zeros_as_well(tmp_path: Path) -> None:
    model = wrap(Blocks(), "ram", tmp_path, precision="fp16")
    optimizer, scaler = adam(model), gemini.GradScaler(init_scale=2.0**16)
    scaler.scale(loss_of(model, 0, "fp16") * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=False)
    scaler.scale(loss_of(model, 2, "fp16")).backward()
    scaler.step(optimizer)
    steps = {name: int(optimizer.full_state(name)["step"]) for name in ("layers.0.weight", "layers.1.weight")}
    assert steps == {"layers.0.weight": 1, "layers.1.weight": 1}


def test_a_gradient_of_zeros_is_dropped_as_any_other(tmp_path: Path) -> None:
    model = wrap(Blocks(), "disk", tmp_path)
    optimizer = adam(model)
    loss_of(model, 0, "bf16").backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model.layers[1].weight.grad = None
    assert model.full_grad("layers.1.weight") is None and model.full_grad("layers.1.bias") is not None
    loss_of(model, 3, "bf16").backward()
    optimizer.step()
    assert [int(optimizer.full_state(f"layers.1.{name}")["step"]) for name in ("weight", "bias")] == [1, 2]


def test_gradients_that_are_kept_nowhere_cannot_be_zeros(tmp_path: Path) -> None:
    model = gemini.GeminiDDP(Blocks(), make_config(Blocks(), "ram", tmp_path, gradients="transient"))
    optimizer = adam(model, step_in_backward=True)
    loss_of(model, 0, "bf16").backward()
    optimizer.step()
    with pytest.raises(gemini.GeminiError, match=r'set_to_none=False.*gradients="transient".*zero_grad\(\)'):
        optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad()


def test_a_gradient_that_a_step_has_used_is_not_added_to(where: str, tmp_path: Path) -> None:
    """torch would add; params that get no gradient, or were dropped one by one, are nobody's business."""
    plain, model = Plain(Blocks()), wrap(Blocks(), where, tmp_path)
    optimizer = adam(model)
    plain.backward(loss_of(plain.model, 0, "bf16"))
    plain.step()
    loss_of(model, 0, "bf16").backward()
    optimizer.step()
    loss_of(model, 1, "bf16").backward()  # another loss may bring gradients that nobody uses
    for use in (optimizer.step, lambda: model.clip_grad_norm_(1.0), lambda: model.full_grad("layers.1.weight")):
        with pytest.raises(gemini.GeminiError, match=r"step\(\) has used the one before it without zero_grad\(\)"):
            use()
    optimizer.zero_grad()
    plain.backward(loss_of(plain.model, 1, "bf16"))
    plain.step()
    loss_of(model, 1, "bf16").backward()
    optimizer.step()
    for layer in (model.layers[1], model.layers[2]):
        for param in layer.parameters():
            param.grad = None
    plain.backward(loss_of(plain.model, 2, "bf16"))
    plain.step()
    loss_of(model, 2, "bf16").backward()
    optimizer.step()
    assert_same_state(model, plain)
