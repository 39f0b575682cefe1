"""Which attention a model is built with: the rule as a pure function, and models on a fake ``flash_attn``."""

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
from gemini.train.loading import attention
from gemini.train.loading.attention import FLASH, Attention, Conditions, choose
from tests.train import helpers

ALL = Conditions(cuda=True, half=True, package=True, hub=False, supported=True, deterministic=False)
NONE = Conditions(cuda=False, half=False, package=False, hub=False, supported=False, deterministic=True)


def llama_config(**changes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaConfig(**{"vocab_size": 96, "pad_token_id": 0, **sizes, **changes})


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [None, "auto"])
def test_flash_is_chosen_where_everything_is_there(said: str | None) -> None:
    assert choose(said, None, ALL) == FLASH


@pytest.mark.parametrize("lacking", ["cuda", "half", "package", "supported", "deterministic"])
def test_and_left_to_transformers_where_anything_is_not(lacking: str) -> None:
    assert choose(None, None, ALL._replace(**{lacking: lacking == "deterministic"})) is None


@pytest.mark.parametrize("has", [ALL, NONE])
@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention", "somebody/own-kernel"])
def test_what_the_user_or_the_config_says_wins(name: str, has: Conditions) -> None:
    assert choose(name, None, has) == name
    assert choose(name, "eager", has) == name
    assert choose("auto", name, has) is None  # transformers reads the config itself


def test_the_user_may_ask_for_it_with_deterministic_algorithms() -> None:
    assert choose(FLASH, "sdpa", ALL._replace(deterministic=True, supported=False)) == FLASH


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("package", "needs the package flash_attn, .*scaled_dot_product.*pip install '..flash.'"),
        ("cuda", "runs on CUDA devices.*Leave it out"),
        ("half", "computes in bf16 and fp16 only.*Leave it out"),
    ],
)
def test_flash_where_it_cannot_run_is_refused_with_the_remedy(lacking: str, message: str) -> None:
    has = ALL._replace(**{lacking: False})
    with pytest.raises(ValueError, match=f"^attn_implementation='{FLASH}' {message}"):
        choose(FLASH, None, has)
    with pytest.raises(ValueError, match=f"^the config's attn_implementation='{FLASH}' {message}"):
        choose(None, FLASH, has)


def test_the_hub_s_kernels_stand_in_for_the_package() -> None:
    assert choose(FLASH, None, ALL._replace(package=False, hub=True)) == FLASH
    assert choose(None, None, ALL._replace(package=False, hub=True)) is None


# ---- what there is ---------------------------------------------------------------------------------------------------


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A flash_attn with torch's own attention behind it, and a CPU that counts as a GPU; the shapes of its calls."""
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
    monkeypatch.setattr(attention, "_computes_on_cuda", lambda device: device != "cpu")
    return seen


def test_conditions_are_those_of_this_machine() -> None:
    has = attention.conditions(llama_config(), transformers.AutoModelForCausalLM, "bf16", None)
    assert has == Conditions(torch.cuda.is_available(), True, has.package, has.hub, True, False)
    assert not attention.conditions(llama_config(), transformers.LlamaForCausalLM, "fp32", "standin").half
    assert not attention.conditions(llama_config(), transformers.LlamaForCausalLM, "bf16", "standin").cuda


def test_a_class_without_flash_or_with_wide_heads_is_not_given_it() -> None:
    auto = transformers.AutoModelForCausalLM
    assert attention.supports_flash(auto, llama_config())
    assert not attention.supports_flash(auto, llama_config(head_dim=512))
    assert not attention.supports_flash(transformers.T5ForConditionalGeneration, transformers.T5Config())
    assert not attention.supports_flash(auto, transformers.GptOssConfig())  # needs kernels of its own
    assert not attention.supports_flash(auto, transformers.T5Config())  # no causal language model
    vision = transformers.LlavaConfig()
    assert not attention.conditions(vision, transformers.LlavaForConditionalGeneration, "bf16", None).supported


def test_deterministic_algorithms_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (llama_config(), transformers.LlamaForCausalLM, "bf16", None)
    torch.use_deterministic_algorithms(True)
    try:
        assert attention.conditions(*asked).deterministic
        monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
        assert not attention.conditions(*asked).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert not attention.conditions(*asked).deterministic


def test_a_package_that_cannot_be_imported_is_warned_of_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c104')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    with pytest.warns(UserWarning, match="cannot be imported .undefined symbol"):
        assert not attention.has_package()


# ---- models ----------------------------------------------------------------------------------------------------------


def settings(**how: Any) -> gemini.GeminiConfig:
    return gemini.GeminiConfig(memory=gemini.MemoryBudget(cpu="64MiB"), **how)


def of(model: Any) -> str:
    return model.config._attn_implementation


def test_flash_is_used_where_it_is_there(flash_attn: list[tuple[int, ...]], tmp_path: Path) -> None:
    config = llama_config()
    model = gemini.from_config(config, settings())
    helpers.train(model, helpers.adam(model), range(1))
    assert of(model) == FLASH and flash_attn == [(2, 7, 2, 16)] * 2
    assert config._attn_implementation is None  # what was chosen for one model is not what the user said for the next
    assert of(gemini.from_config(config, settings(device="cpu"))) == "sdpa"
    assert of(gemini.from_config(config, settings(precision="fp32"))) == "sdpa"
    assert of(gemini.from_config(config, settings(), attn_implementation="eager")) == "eager"
    assert of(gemini.from_config(llama_config(attn_implementation="eager"), settings())) == "eager"
    model.save_pretrained(tmp_path / "model")
    assert of(gemini.from_pretrained(tmp_path / "model", settings())) == FLASH
    assert of(gemini.from_pretrained(tmp_path / "model", settings(), attn_implementation="sdpa")) == "sdpa"


def test_without_it_nothing_crashes(tmp_path: Path) -> None:
    assert of(gemini.from_config(llama_config(), settings())) == "sdpa"
    model = gemini.from_config(llama_config(), settings(), attn_implementation="auto")
    assert of(model) == "sdpa"
    model.save_pretrained(tmp_path / "model")
    for refused in (
        lambda: gemini.from_config(llama_config(), settings(), attn_implementation=FLASH),
        lambda: gemini.from_config(llama_config(attn_implementation=FLASH), settings()),
        lambda: gemini.from_config(llama_config(), settings(), attn_implementation={"": FLASH}),
        lambda: gemini.from_pretrained(tmp_path / "model", settings(), attn_implementation=FLASH),
    ):
        with pytest.raises(ValueError, match="needs the package flash_attn.*pip install '."):
            refused()


def test_what_transformers_refuses_of_it_is_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_computes_on_cuda", lambda device: True)
    with pytest.raises(ValueError, match="attn_implementation='flash_attention_3': .*Leave it out for torch's"):
        gemini.from_config(llama_config(), settings(), attn_implementation="flash_attention_3")


# ---- traces ----------------------------------------------------------------------------------------------------------


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
    with pytest.raises(Exception, match="flash_attention_2 computes in bf16 and fp16 on CUDA only: .*--target cpu"):
        TraceSettings(config=str(tmp_path / "llama"), target="cpu", **asked).check()


def test_a_dict_of_implementations_is_passed_on() -> None:
    keyword = Attention({"": "sdpa", "vision_config": "eager"}).keyword(llama_config(), transformers.LlamaForCausalLM)
    assert keyword == {"attn_implementation": {"": "sdpa", "vision_config": "eager"}}
