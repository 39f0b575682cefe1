"""Which attention a model is built with, on a fake ``flash_attn`` too, and what a trace of it needs."""

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import gemini
from gemini.jobs.settings import TraceSettings
from gemini.jobs.trace import take_trace
from gemini.tracing.ahead import FLASH
from tests.train import helpers


def llama_config(**changes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaConfig(**{"vocab_size": 96, "pad_token_id": 0, **sizes, **changes})


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A flash_attn with torch's own attention behind it; the shapes of its calls."""
    seen: list[tuple[int, ...]] = []

    def flash_attn_func(
        q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
        window_size: Any = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
    ) -> Any:  # fmt: skip
        seen.append(tuple(q.shape))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    package, padding = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.bert_padding")
    for module in (package, padding):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        setattr(package, name, flash_attn_func)
    padding.pad_input = padding.unpad_input = None
    utils = transformers.modeling_flash_attention_utils
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setitem(utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "general_availability_check", lambda: True)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    return seen


def settings(**how: Any) -> gemini.GeminiConfig:
    return gemini.GeminiConfig(memory=gemini.MemoryBudget(cpu="64MiB"), **how)


def of(model: Any) -> str:
    return model.config._attn_implementation


def test_what_is_asked_for_is_used(flash_attn: list[tuple[int, ...]], tmp_path: Path) -> None:
    config = llama_config()
    model = gemini.from_config(config, settings(), attn_implementation=FLASH)
    helpers.train(model, helpers.adam(model), range(1))
    assert of(model) == FLASH and flash_attn == [(2, 7, 2, 16)] * 2
    model.save_pretrained(tmp_path / "model")
    assert of(gemini.from_pretrained(tmp_path / "model", settings(), attn_implementation=FLASH)) == FLASH
    assert of(gemini.from_pretrained(tmp_path / "model", settings(), attn_implementation="eager")) == "eager"


@pytest.mark.parametrize("said", [None, "auto"])
def test_without_a_word_it_is_what_the_config_says_or_transformers_chooses(said: str | None, tmp_path: Path) -> None:
    assert of(gemini.from_config(llama_config(attn_implementation="eager"), settings())) == "eager"
    model = gemini.from_config(llama_config(), settings(), attn_implementation=said)
    assert of(model) == "sdpa"
    model.save_pretrained(tmp_path / "model")
    assert of(gemini.from_pretrained(tmp_path / "model", settings(), attn_implementation=said)) == "sdpa"


def test_flash_attention_that_is_not_there_is_refused_by_transformers(tmp_path: Path) -> None:
    gemini.from_config(llama_config(), settings()).save_pretrained(tmp_path / "model")
    for refused in (
        lambda: gemini.from_config(llama_config(), settings(), attn_implementation=FLASH),
        lambda: gemini.from_config(llama_config(attn_implementation=FLASH), settings()),
        lambda: gemini.from_config(llama_config(), settings(), attn_implementation={"": FLASH}),
        lambda: gemini.from_pretrained(tmp_path / "model", settings(), attn_implementation=FLASH),
    ):
        with pytest.raises(ImportError, match="FlashAttention2 .*to be installed"):
            refused()


def peak(config: Any, **how: Any) -> int:
    ids = torch.zeros(1, 64, dtype=torch.long, device="meta")
    return gemini.trace(config, {"input_ids": ids, "labels": ids}, target="cuda", **how).peak_bytes


def test_a_trace_needs_no_package_and_counts_what_each_implementation_keeps() -> None:
    wide = {"num_attention_heads": 16, "hidden_size": 128}  # scores are larger than all else
    flash = peak(llama_config(attn_implementation=FLASH, **wide))
    assert flash == peak(llama_config(**wide)) == peak(llama_config(attn_implementation="sdpa", **wide))
    assert peak(llama_config(attn_implementation="eager", **wide)) > flash + 16 * 64 * 64 * 2
    model = transformers.LlamaForCausalLM(llama_config(**wide))
    model.config._attn_implementation_internal = FLASH
    assert peak(model) == flash and of(model) == FLASH


def test_the_command_line_s_trace(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path / "llama")
    transformers.T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2).save_pretrained(tmp_path / "t5")
    asked = {"seq_len": 16, "attn_implementation": FLASH}
    assert take_trace(TraceSettings(config=str(tmp_path / "llama"), **asked)).moments
    with pytest.raises(Exception, match="T5ForConditionalGeneration has none in transformers"):
        take_trace(TraceSettings(config=str(tmp_path / "t5"), **asked))
    with pytest.raises(
        Exception, match="flash_attention_2 does not go with --target cpu: it computes in bf16 and fp16 on CUDA only"
    ):
        TraceSettings(config=str(tmp_path / "llama"), target="cpu", **asked).check()
