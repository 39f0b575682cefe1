"""Which models context parallel refuses, by the name of what stands in the way."""

import importlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.train.context import Attend, ContextParallel, ImaginedExchange, part_of, transformer_in
from tests.models import llama

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def of(name: str, config: str, model: str, **changes: Any) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{name}")
    return getattr(module, model)(getattr(module, config)(**{**SMALL, **changes}))  # type: ignore[no-any-return]


def with_conv() -> nn.Module:
    model = llama()
    model.model.layers[1].short = nn.Conv1d(32, 32, 3)
    return model


def with_compiled_block() -> nn.Module:
    model = llama()
    model.model.layers[0].compile(backend="eager")
    return model


CASES: dict[str, tuple[Any, str]] = {
    "mamba": (lambda: of("mamba", "MambaConfig", "MambaForCausalLM", state_size=4), "Mamba"),
    "linear attention": (
        lambda: of(
            "qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=16, shared_expert_intermediate_size=16, head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        ),
        "layers of type 'linear_attention'",
    ),
    "conv": (
        lambda: of("lfm2", "Lfm2Config", "Lfm2ForCausalLM", layer_types=["conv", "full_attention"]),
        "layers of type 'conv'",
    ),
    "sliding window": (
        lambda: of("mistral", "MistralConfig", "MistralForCausalLM", sliding_window=8), "'sliding_attention', a window"
    ),
    "some sliding": (
        lambda: of("gemma2", "Gemma2Config", "Gemma2ForCausalLM", head_dim=8), "layers of type 'sliding_attention'"
    ),
    "two sequences": (
        lambda: of(
            "t5", "T5Config", "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4
        ),
        "an encoder and a decoder",
    ),
    "alibi": (lambda: of("bloom", "BloomConfig", "BloomForCausalLM", n_head=4, n_layer=1), "Bloom"),
    "dynamic rope": (
        lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "type 'dynamic'"
    ),
    "a conv inside": (with_conv, r"layers.1.short \(Conv1d\) has a state along the sequence"),
    "positions": (
        lambda: of("roberta", "RobertaConfig", "RobertaForCausalLM", is_decoder=True), "begin after its padding token"
    ),
    "flex": (lambda: llama(attn_implementation="flex_attention"), "attn_implementation='flex_attention'"),
    "compiled": (with_compiled_block, "parts of LlamaForCausalLM are compiled"),
    "not of transformers": (lambda: nn.Linear(4, 4), "Linear is no model of transformers"),
}  # fmt: skip


@pytest.mark.sweep(every=1)
@pytest.mark.parametrize("name", CASES)
def test_what_looks_along_the_sequence_is_refused_by_name(name: str) -> None:
    make, says = CASES[name]
    with pytest.raises(GeminiError, match=says):
        transformer_in(make())


def test_heads_that_cannot_be_divided() -> None:
    with pytest.raises(GeminiError, match=r"divides the 4 heads of attention among cp=8 ranks, .* a mesh whose cp"):
        ContextParallel(llama(), ImaginedExchange(8, Counter()))


def test_an_interrupt_before_anything_was_put_leaves_the_forward_of_another_library() -> None:
    model: Any = llama()
    model.forward = theirs = model.forward
    ContextParallel(model, ImaginedExchange(2, Counter())).take_away()
    assert model.__dict__["forward"] is theirs


def test_a_part_of_the_model_alone_and_models_that_borrow_its_config() -> None:
    model: Any = llama()
    ContextParallel(model, ImaginedExchange(2, Counter())).put()
    ids = torch.ones(1, 4, dtype=torch.int64)
    for with_gradients in (False, True):  # whole sequences were taken for parts: other ranks got other hidden states
        with (
            torch.set_grad_enabled(with_gradients),
            pytest.raises(GeminiError, match="a part of a model .* was called by"),
        ):
            model.model(ids)
    assert model.config._attn_implementation == "gemini_context_sdpa"
    with torch.no_grad():
        assert model(ids).logits.shape == (1, 4, 64), "whole sequences are for evaluation"
    other = type(model)(model.config)
    with pytest.raises(GeminiError, match="belongs to a model that is under context parallel"):
        other(ids)


@pytest.mark.sweep(every=1)
@pytest.mark.parametrize("name", ["position_bias", "s_aux", "sliding_window"])
def test_attention_that_is_told_more_than_parts_know(name: str) -> None:
    x = torch.ones(1, 4, 2, 8)
    attend = Attend(ImaginedExchange(2, Counter()), "sdpa")
    attend.in_forward = True
    with pytest.raises(GeminiError, match="which context parallel does not divide"):
        attend(nn.Linear(1, 1), x, x, x, None, **{name: torch.ones(1)})


IDS = torch.zeros(2, 8, dtype=torch.long)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"input_ids": IDS[0]}, "input_ids"),
        ({"labels": IDS[:, :6]}, "labels"),
        ({"labels": IDS[0], "attention_mask": torch.tensor([[1] * 7 + [0]] * 2)}, "labels"),
        ({"labels": IDS, "attention_mask": torch.tensor([[1, 1, 1, 0]] * 2)}, "attention_mask"),
        ({"position_ids": torch.arange(6)[None]}, "position_ids"),
        ({"position_ids": torch.tensor(0)}, "position_ids"),
    ],
)
def test_a_batch_of_other_shapes_is_refused_by_name(changes: dict[str, torch.Tensor], name: str) -> None:
    with pytest.raises(ValueError, match=rf"sequence_batch: '{name}' has shape .* so it cannot be cut"):
        part_of({"input_ids": IDS, **changes}, 0, 2)


def test_one_mask_and_one_row_of_positions_are_for_all_rows() -> None:
    mask, labels = torch.tensor([[1] * 7 + [0]]), torch.full((2, 8), -100)
    part = part_of({"input_ids": IDS, "labels": labels, "attention_mask": mask, "position_ids": torch.arange(8)}, 1, 2)
    assert part["position_ids"].tolist() == [[4, 5, 6, 7]] and part["input_ids"].shape == (2, 4)
