"""Ranks that load one model and adapt it on the way have the first one's values, whatever each of them draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers

import gemini
from tests.ranks.pool import Pools

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "use_dora": True}


def adapt(model: Any) -> Any:
    model.resize_token_embeddings(104, mean_resizing=False)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA))  # type: ignore[arg-type]


def load_adapted(folder: str, rank_seed: bool) -> torch.Tensor:
    torch.manual_seed(5 + dist.get_rank() * rank_seed)
    memory = gemini.MemoryBudget(cpu="64MiB")
    config = gemini.GeminiConfig(precision="fp32", device="cpu", memory=memory)
    model = gemini.from_pretrained(folder, config, adapt=adapt)
    return torch.cat([model.full_param(name).flatten() for name, _ in model.named_parameters()])


@pytest.mark.parametrize("rank_seed", [True, False], ids=["other seeds", "one seed"])
def test_ranks_have_the_first_one_s(rank_seed: bool, pool_of: Pools, tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, intermediate_size=64, tie_word_embeddings=True)  # type: ignore[arg-type]
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    torch.manual_seed(5)
    plain = adapt(transformers.LlamaForCausalLM.from_pretrained(tmp_path))
    wanted = torch.cat([param.detach().flatten() for param in plain.parameters()])
    for found in pool_of(2).run(load_adapted, str(tmp_path), rank_seed):
        assert torch.equal(found, wanted)
