"""Training with a scaler where the precision is fp16, which needs one, and without elsewhere: one loop for all."""

import weakref
from typing import Any

import torch

import gemini
from tests.world import world_of

_scalers: weakref.WeakKeyDictionary[Any, gemini.GradScaler] = weakref.WeakKeyDictionary()


def scaler_of(model: Any) -> gemini.GradScaler:
    """The scaler that a model is trained with, the same in all its steps: it scales managed fp16 alone."""
    return _scalers.get(model) or new_scaler(model)


def new_scaler(model: Any, init_scale: float = 2.0**16) -> gemini.GradScaler:
    """A scaler with which it is trained from now on."""
    enabled = isinstance(model, gemini.GeminiDDP) and world_of(model).config.precision == "fp16"
    _scalers[model] = gemini.GradScaler(init_scale=init_scale, enabled=enabled)
    return _scalers[model]


def backward(model: Any, loss: torch.Tensor) -> None:
    scaler_of(model).scale(loss).backward()


def clip_grads(model: Any, optimizer: Any, max_norm: float) -> torch.Tensor:
    """Clip what is there, after the last backward of a step."""
    scaler_of(model).unscale_(optimizer)
    return model.clip_grad_norm_(max_norm)


def make_step(model: Any, optimizer: Any) -> None:
    scaler = scaler_of(model)
    scaler.step(optimizer)
    scaler.update()
