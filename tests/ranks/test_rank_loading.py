"""Loading and drawing with several ranks: each keeps its part of what plain transformers would give the first rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

import gemini
from gemini.train.loading import paging
from tests.ranks.pool import Pools

CONFIG = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}


def fill(folder: str | None) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Load from ``folder`` or draw, with a generator that stands elsewhere on every rank; then what comes out of it."""
    paging.ROOM = 20_000
    torch.manual_seed(5 + dist.get_rank())
    config = gemini.GeminiConfig(device="cpu", memory=gemini.MemoryBudget(cpu="64MiB"))
    if folder is None:
        model = gemini.from_config(GPT2Config(**CONFIG), config)
    else:
        model = gemini.from_pretrained(folder, config)
    return model.state_dict(dtype=torch.float32), torch.rand(2).tolist()


def test_every_rank_has_what_the_first_one_draws(pool_of: Pools) -> None:
    (first, after), (second, other) = pool_of(2).run(fill, None)
    torch.manual_seed(5)
    plain = GPT2LMHeadModel(GPT2Config(**CONFIG))
    assert after == torch.rand(2).tolist()
    torch.manual_seed(6)
    assert other == torch.rand(2).tolist(), "another rank's own random numbers go on as if nothing had been drawn"
    for name, value in plain.state_dict().items():
        assert torch.equal(first[name], value) and torch.equal(second[name], value), name


def test_every_rank_loads_its_part(pool_of: Pools, tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(**CONFIG)).save_pretrained(tmp_path)
    values: dict[str, Any] = load_file(tmp_path / "model.safetensors")
    del values["transformer.h.1.mlp.c_fc.weight"]  # this one has to be drawn
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(5)
    plain = GPT2LMHeadModel.from_pretrained(tmp_path)
    for loaded, _ in pool_of(2).run(fill, str(tmp_path)):
        for name, value in plain.state_dict().items():
            assert torch.equal(loaded[name], value), name
