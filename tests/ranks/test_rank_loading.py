"""Loading and drawing with several ranks: each keeps its part of what plain transformers would give the first rank.

Ranks that adapt it on the way have the first one's values, whatever each of them draws; the model's state and the
optimizer's are loaded in any order.
"""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import gemini
from gemini.train.loading import skeleton
from tests import models
from tests.ranks.pool import Pools
from tests.train.helpers import POSITIONS, TOKENS, adam, train
from tests.train.test_order_of_loading import ORDERS

CONFIG = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}


def fill(folder: str | None) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Load from ``folder`` or draw, with a generator that stands elsewhere on every rank; then what comes out of it."""
    skeleton.ROOM = 20_000
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


def masters(order: str, mesh: str) -> list[bool]:
    """Whether each master is what it was where the states were saved, on this rank."""
    made = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(mesh,))

    def start() -> Any:
        config = gemini.GeminiConfig(precision="bf16", device="cpu", memory=gemini.MemoryBudget(cpu="64MiB"))
        torch.manual_seed(0)
        plain = models.llama(num_attention_heads=2, num_key_value_heads=2, **POSITIONS, **TOKENS)
        model = gemini.GeminiDDP(plain, config, mesh=made)
        return model, adam(model)

    (first, optimizer), (second, others) = start(), start()
    train(first, optimizer, range(2))
    train(second, others, [3])
    ORDERS[order](second, others, first.state_dict(), optimizer.state_dict())
    losses = [train(model, of, range(2, 4)) for model, of in ((first, optimizer), (second, others))]
    names = [name for name, _ in first.named_parameters()]
    same = [torch.equal(first.full_param(n, torch.float32), second.full_param(n, torch.float32)) for n in names]
    return [*same, losses[0] == losses[1]]


@pytest.mark.parametrize("mesh", ["dp", "tp"])
@pytest.mark.parametrize("order", ["optimizer_first", "as_torch_does", "in_parts", "twice", "model_first"])
def test_any_order_gives_the_same_bits(order: str, mesh: str, pool_of: Pools) -> None:
    for found in pool_of(2).run(masters, order, mesh):
        assert all(found)


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
