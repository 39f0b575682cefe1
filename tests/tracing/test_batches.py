"""Inputs and model classes that follow from a config."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import gemini
from gemini.tracing.ahead import model_class_for
from gemini.tracing.observer import count_tokens

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def config(kind: str, **changes: Any) -> Any:
    return getattr(transformers, kind)(**{**SMALL, **changes})


CASES = {
    "causal": (config("LlamaConfig"), "LlamaForCausalLM", {"input_ids": (2, 16), "labels": (2, 16)}, 32),
    "masked": (config("BertConfig"), "BertForMaskedLM", {"input_ids": (2, 16), "labels": (2, 16)}, 32),
    "sequences": (
        config("BertConfig", architectures=["BertForSequenceClassification"]),
        "BertForSequenceClassification", {"input_ids": (2, 16), "labels": (2,)}, 32,
    ),
    "a base model": (config("LlamaConfig", architectures=["LlamaModel"]), "LlamaForCausalLM", None, 32),
    "encoder and decoder": (
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=2,
                              decoder_start_token_id=0),
        "T5ForConditionalGeneration", {"input_ids": (2, 16), "labels": (2, 16)}, 64,
    ),
    "images": (
        transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
                               image_size=16, patch_size=8),
        "ViTForImageClassification", {"pixel_values": (2, 3, 16, 16), "labels": (2,)}, 2,
    ),
    "speech to text": (
        transformers.WhisperConfig(vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1,
                                   encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48,
                                   decoder_ffn_dim=48, max_source_positions=20, max_target_positions=32,
                                   num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                                   decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None),
        "WhisperForConditionalGeneration", {"input_features": (2, 8, 40), "labels": (2, 16)}, 32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("named", ["AutoModel", "LlamaConfig", "pipeline", "NoSuchModel"])
def test_an_architecture_that_is_no_model_is_passed_over(named: str) -> None:
    assert model_class_for(transformers.LlamaConfig(architectures=[named])) is transformers.LlamaForCausalLM
    with pytest.raises(
        ValueError, match=rf"CLIPTextConfig has no model class with a loss .*{named}.*: pass model_class="
    ):
        model_class_for(transformers.CLIPTextConfig(architectures=[named]))


@pytest.mark.parametrize("name", CASES)
def test_a_config_alone_is_enough_for_a_trace(name: str) -> None:
    made, kind, shapes, tokens = CASES[name]
    assert model_class_for(made).__name__ == kind
    batch = gemini.batch_for(made, 2, 16)
    assert all(tensor.is_meta for tensor in batch.values())
    if shapes is not None:
        assert {key: tuple(tensor.shape) for key, tensor in batch.items()} == shapes
    trace = gemini.trace(made, batch, target="cpu")
    assert trace.model == kind and trace.tokens == tokens and trace.flops > 0


def test_a_mask_of_ones_costs_no_scores() -> None:
    made = config("LlamaConfig")
    plain = gemini.trace(made, gemini.batch_for(made, 2, 16), target="cpu")
    batch = gemini.batch_for(made, 2, 16)
    masked_batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    masked = gemini.trace(made, masked_batch, target="cpu")
    assert masked.flops == plain.flops and masked.peak_bytes - plain.peak_bytes < 2 * 16 * 16
    padded = {name: torch.ones(2, 16, dtype=torch.long) for name in masked_batch}
    padded["attention_mask"][0, 8:] = 0
    assert gemini.trace(made, padded, target="cpu").peak_bytes > masked.peak_bytes


def test_what_cannot_be_guessed_is_asked_for() -> None:
    with pytest.raises(ValueError, match="model_class="):
        gemini.batch_for(transformers.CLIPTextConfig())
    made = transformers.ResNetConfig()
    with pytest.raises(ValueError, match="image_size"):
        gemini.batch_for(made)
    for none in ({"batch_size": 0}, {"seq_len": 0}):
        with pytest.raises(ValueError, match="each is at least 1"):
            gemini.batch_for(transformers.GPT2Config(), **none)
    with pytest.raises(
        TypeError, match="model_class= is a model class or an auto class of transformers, got 'GPT2LMHeadModel'"
    ):
        gemini.batch_for(transformers.GPT2Config(), model_class="GPT2LMHeadModel")


@pytest.mark.parametrize("batch", [(torch.zeros(1, 4),), [torch.zeros(1, 4)], torch.zeros(1, 4)])
def test_a_batch_without_names_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"got a (tuple|list|Tensor)"):
        gemini.trace(torch.nn.Linear(4, 4), batch)


def test_tokens_are_positions_or_else_samples() -> None:
    assert count_tokens({"input_ids": (2, 5), "labels": (2, 5)}) == 10
    t5 = SimpleNamespace(config=transformers.T5Config())
    assert count_tokens({"input_ids": (2, 5), "labels": (2, 3)}, t5) == 16
    assert count_tokens({"inputs_embeds": (2, 5, 8)}) == 10
    assert count_tokens({"pixel_values": (3, 3, 8, 8)}) == 3
    assert count_tokens({}) == 0
