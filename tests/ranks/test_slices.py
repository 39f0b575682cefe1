"""Models in slices against the whole model: losses and gradients of families with a plan of transformers or of ours."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

from gemini.train.slices.slicing import cuts_of, expanded, plan_of, slice_tensors
from tests.ranks.pool import Failure, Pools

FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe", "phi3",
    "olmo", "olmo2", "glm", "glm4", "gpt_neox", "cohere", "cohere2", "granite", "starcoder2", "nemotron", "ernie4_5",
    "smollm3", "gpt2", "opt", "bloom", "bert", "t5",
)  # fmt: skip


def small(kind: str) -> Any:
    """In fp32, and every param drawn, norms and biases too."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    config: Any = AutoConfig.for_model(
        kind, vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    sizes = {
        "head_dim": 8, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64, "d_model": 64, "d_kv": 8,
        "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 8,
    }  # fmt: skip
    for name, size in sizes.items():
        if getattr(config, name, None) is not None and name not in config.attribute_map:
            setattr(config, name, size)
    for name in ("dropout", "dropout_rate", "attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout",
                 "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"):  # fmt: skip
        if hasattr(config, name):
            setattr(config, name, 0.0)
    kinds = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}
    torch.manual_seed(0)
    model: Any = kinds.get(kind, AutoModelForCausalLM).from_config(config, attn_implementation="eager").float()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.02)
    return model


def compare(kind: str, by_hand: bool = False) -> tuple[float, float, int]:
    """How far the loss is off, the worst gradient in parts of the largest, and how many params are cut."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    whole = small(kind)
    sliced: Any = copy.deepcopy(slice_tensors(copy.deepcopy(whole), mesh, plan_of(whole) if by_hand else None))
    losses = []
    for model in (whole, sliced):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(float(loss.detach()))
    shards = cuts_of(whole, expanded(whole, plan_of(whole)), dist.get_rank(), size)
    largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    worst = 0.0
    for (name, param), other in zip(whole.named_parameters(), sliced.parameters(), strict=True):
        if param.grad is not None:
            mine = shards[name].of(param.grad) if name in shards else param.grad
            worst = max(worst, float((mine - other.grad).abs().max()) / largest)
    return abs(losses[0] - losses[1]), worst, len(shards)


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("size", [2, 4])
def test_slices_compute_what_the_whole_model_does(size: int, kind: str, pool_of: Pools) -> None:
    for off, worst, num_cut in pool_of(size).run(compare, kind):
        assert num_cut >= 8 and off < 2e-6 and worst < 1e-5, (off, worst, num_cut)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "bloom", "t5"])
def test_a_plan_that_is_given_divides_the_heads_of_what_it_cuts(kind: str, pool_of: Pools) -> None:
    for off, worst, _ in pool_of(2).run(compare, kind, True):
        assert off < 2e-6 and worst < 1e-5, (off, worst)


def cut_mlps_alone() -> bool:
    """Whether a model whose MLPs alone are cut computes what it did."""
    whole, mesh = small("opt"), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    styles = {name: style for name, style in plan_of(whole).items() if name.endswith(("fc1", "fc2"))}
    sliced: Any = slice_tensors(copy.deepcopy(whole), mesh, styles)
    ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    return torch.allclose(sliced(input_ids=ids).logits, whole(input_ids=ids).logits, atol=1e-5)


def test_heads_of_an_attention_that_is_whole_stay_as_they_are(pool_of: Pools) -> None:
    assert all(pool_of(2).run(cut_mlps_alone))


def refuse_heads(kind: str) -> None:
    sizes = {"vocab_size": 128, "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 24}
    config: Any = transformers.AutoConfig.for_model(kind, **sizes)
    slice_tensors(transformers.AutoModel.from_config(config), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_heads_that_do_not_divide_are_refused(kind: str, pool_of: Pools) -> None:
    for outcome in pool_of(2).outcomes(refuse_heads, kind):
        assert isinstance(outcome, Failure) and outcome.kind == "ValueError", outcome
        assert "num_attention_heads=3, which is not a multiple of 2" in outcome.text
