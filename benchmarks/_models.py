"""The models that benchmarks train, their batches, the ordinary loop, and the memory that a plan needs for them."""

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHAPE = ("hidden", "layers", "vocab", "batch", "tokens")
WORDS = 256
"""Tokens are drawn from that many of the vocabulary, so that the loss falls within a few steps."""


def add_model_arguments(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """``--hidden``, ``--layers``, ...: the shape of a Llama and of its batches."""
    shape = {"hidden": 768, "layers": 12, "vocab": 4096, "batch": 2, "tokens": 128} | defaults
    words = {"batch": "sequences per rank and step", "tokens": "of a sequence"}
    for name, value in shape.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{words.get(name, '')} (default: %(default)s)")


def shape_of(args: argparse.Namespace) -> dict[str, int]:
    """What :func:`add_model_arguments` has asked for."""
    return {name: getattr(args, name) for name in SHAPE}


def llama_config(
    hidden: int, layers: int, vocab: int, *, intermediate: int | None = None, heads: int | None = None,
    kv_heads: int | None = None, positions: int = 64, **more: Any,
) -> Any:  # fmt: skip
    from transformers import LlamaConfig

    heads = heads or max(1, hidden // 64)
    return LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate or hidden * 11 // 4,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads or heads,
        max_position_embeddings=max(positions, 64), use_cache=False, **more,
    )  # fmt: skip


def build(config: Any, dtype: str = "float32") -> Any:
    """A causal LM; the same weights on every call and in every process. What its class keeps in fp32 stays so."""
    import torch
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping[type(config)]
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return kind(config).train()
    finally:
        torch.set_default_dtype(before)


def make_llama(shape: Mapping[str, int], dtype: str = "float32") -> Any:
    """``shape`` as from :func:`add_model_arguments`."""
    mlp = shape["hidden"] * 8 // 3 // 64 * 64
    return build(
        llama_config(shape["hidden"], shape["layers"], shape["vocab"], intermediate=mlp, positions=shape["tokens"]),
        dtype,
    )


def square_layers(layers: int, width: int) -> Any:
    """The same weights on every call."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))


def make_batch(shape: Mapping[str, int], step: int, rank: int) -> dict[str, Any]:
    """Tokens of a small part of the vocabulary, so that the loss falls within a few steps."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, min(shape["vocab"], WORDS), (shape["batch"], shape["tokens"]), generator=generator)
    return {"input_ids": ids, "labels": ids}


def uniform_batch(vocab: int, rows: int, tokens: int, seed: int) -> dict[str, Any]:
    """Tokens of the whole vocabulary."""
    import torch

    ids = torch.randint(0, vocab, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def skewed_batch(vocab: int, rows: int, tokens: int, step: int, device: str = "cpu") -> dict[str, Any]:
    """``step`` counts from 0 over the life of a contender: at the same step all see the same tokens. Frequent words
    are drawn more often (a squared uniform), so that there is something to learn at every learning rate.
    """
    import torch

    generator = torch.Generator("cpu").manual_seed(1000 + step)
    ids = (torch.rand(rows, tokens, generator=generator) ** 2 * min(WORDS, vocab)).long().to(device)
    return {"input_ids": ids, "labels": ids}


def train_step(
    model: Any, optimizer: Any, clip: Callable[[float], Any] | None, batch: Mapping[str, Any]
) -> tuple[float, float]:
    """The ordinary loop: the loss, and the gradient norm before clipping to 1 (0 without ``clip``)."""
    loss = model(**batch).loss
    loss.backward()
    norm = 0.0 if clip is None else clip(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()), float(norm)


def smallest_budget(
    shape: Mapping[str, int], ranks: int, precision: str, replicas: int = 1
) -> tuple[dict[str, int], Any]:
    """Bytes per rank that a plan asks for on the CPU when every plane stays in memory, by what for; and the layout."""
    import torch

    from gemini.planning import working
    from gemini.planning.layout import ParamSpec, make_layout
    from gemini.planning.planes import compute_itemsize, plane_specs
    from gemini.planning.working import PIECE, gradients_in_flight, scratch_bytes, staging_bytes, tile_numel
    from gemini.train.setup.problem import structural_trace

    with torch.device("meta"):
        model = make_llama(shape)
    named = list(model.named_parameters())
    layout = make_layout([ParamSpec(name, param.numel()) for name, param in named], ranks=ranks)
    tile = tile_numel(max(chunk.numel for chunk in layout.chunks))
    planes = sum(spec.block_bytes for spec in plane_specs(precision, "retain", trainable=True).values())
    need = {"planes": planes * layout.numel // ranks}
    size = compute_itemsize(precision)
    if ranks > 1:
        need["working set"] = working.gathered_at_once(structural_trace(model, precision), layout, precision)
        need["staging"] = staging_bytes(tile)
    if ranks * replicas > 1:
        need["gradients in flight"] = gradients_in_flight(layout, size)
        need["exchange"] = scratch_bytes(ranks, min(tile, PIECE), replicas)
        need.setdefault("staging", staging_bytes(tile))
    return need, layout
