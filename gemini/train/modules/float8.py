"""Linear layers that multiply in float8, by torchao (https://github.com/pytorch/ao). ``torchao.float8`` makes codes and
scales of both operands in each call, so weights stay what they are to chunks, optimizers and checkpoints. Layers stay
the same objects: hooks, names and references to them hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from gemini.train.modules.reading import Structure

_SIDES = 16
"""Elements of which both sides of a weight must be multiples: ``torch._scaled_mm`` takes no others."""

_ROUTERS = ("gate", "router")
"""Last names of layers that choose experts: few columns, and a choice that rounding would change."""


def is_float8(module: nn.Module) -> bool:
    """Whether a layer multiplies in float8: torchao's, or that of a trace."""
    return any(c.__name__ == "Float8Linear" for c in type(module).__mro__)


def float8_layers(structure: Structure, kept_fp32: Collection[int]) -> list[nn.Linear]:
    """Find the layers that may multiply in float8: linear ones of repeated blocks, but for adapters, routers, those of
    ``kept_fp32`` (ids of params), and weights with a side that is no multiple of 16. ValueError if there is none.
    """
    apart = structure.adapters.union(kept_fp32)
    layers = [
        module
        for path, module in structure.modules
        if type(module) is nn.Linear
        and any(part.isdigit() for part in path.split("."))
        and path.rpartition(".")[2] not in _ROUTERS
        and id(module.weight) not in apart
        and not any(side % _SIDES for side in module.weight.shape)
    ]
    if not layers:
        raise ValueError(
            f"float8=True: this {type(structure.model).__name__} has no nn.Linear in a repeated block (layers.0) with "
            f"sides that are multiples of {_SIDES}. Leave it out"
        )
    return layers


def compute_in_float8(layers: list[nn.Linear], device: str) -> Callable[[], None]:
    """Let ``layers`` multiply in float8, with one scale per tensor; the function that is returned takes that back.
    Where ``device`` (of a config) has no such products, float8 values are multiplied in bf16. ImportError without
    torchao.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ModuleNotFoundError as e:
        raise ImportError(
            f"float8=True needs torchao, the extra 'float8' of Gemini: pip install torchao ({e})", name="torchao"
        ) from e
    on_cuda = device.startswith("cuda") and torch.cuda.is_available()
    has_products = on_cuda and torch.cuda.get_device_capability(device) >= (8, 9)
    config, given = Float8LinearConfig(emulate=not has_products), dict[nn.Linear, list[str]]()

    def take_away() -> None:
        for layer, names in given.items():
            layer.__class__ = nn.Linear
            for name in names:
                layer.__dict__.pop(name, None)

    # All are made before any layer changes: what torchao refuses leaves the model as it was.
    sizes = [(layer.in_features, layer.out_features) for layer in layers]
    likes = [nn.Linear(*size, bias=False, device="meta") for size in sizes]
    for layer, made in zip(layers, [convert_to_float8_training(like, config=config) for like in likes], strict=True):
        given[layer] = [name for name in made.__dict__ if name not in layer.__dict__]
        layer.__dict__.update({name: made.__dict__[name] for name in given[layer]})
        layer.__class__ = type(made)
    return take_away
