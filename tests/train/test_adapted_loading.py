"""``from_pretrained(adapt=)``: whatever the function does to a model, the managed one has what plain transformers has
after it, and weights that it does not touch are not read for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import gemini
from gemini.train.loading import paging
from gemini.train.loading.stored_model import StoredModel
from tests.train.test_loading import FAMILIES, IDS, TEXT, assert_same, config_of, few_pages  # noqa: F401

Adapt = Callable[[Any], Any]
SMALL = {"vocab_size": 97, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64,
         "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **IDS, tie_word_embeddings=True)),
    "untied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **IDS)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(FAMILIES["gpt2"][0]()),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**TEXT, **IDS, head_dim=8)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT, **IDS, tie_word_embeddings=True)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TEXT)),
    "classifier": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT)),
    "t5": lambda: transformers.T5ForConditionalGeneration(FAMILIES["t5"][0]()),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**SMALL, **IDS)),
    "mixtral": lambda: transformers.MixtralForCausalLM(FAMILIES["mixtral"][0]()),  # fused when they are read
}


def saved(kind: str, folder: Path) -> type[Any]:
    """A model of random weights without a zero in it, in several files."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.state_dict().values()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.1)
    model.save_pretrained(folder, max_shard_size="20KB")
    return type(model)


def matrices(model: Any) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == 2]


def grow(model: Any) -> Any:
    model.resize_token_embeddings(104, mean_resizing=False)
    return model


def grow_around_the_mean(model: Any) -> Any:
    model.resize_token_embeddings(100, pad_to_multiple_of=8)
    return model


def shrink(model: Any) -> Any:
    model.resize_token_embeddings(80)
    return model


def in_place(model: Any) -> None:
    """Every way to write that torch has for a param, and nothing is returned."""
    zeroed, filled, copied, indexed, drawn, given, *_ = matrices(model)
    nn.init.zeros_(zeroed)
    nn.init.xavier_uniform_(drawn)
    given.data = torch.ones(given.shape)
    with torch.no_grad():
        filled.fill_(3).mul_(2)
        copied.copy_(torch.ones_like(copied))
        indexed[0] = 7


def other_memory(model: Any) -> None:
    square = next(p for p in matrices(model) if p.shape[0] == p.shape[1])
    square.data = square.data.t()
    other = next(p for p in matrices(model) if p.shape[0] != p.shape[1])
    other.data = other.data[:, ::2]


def other_params(model: Any) -> None:
    for module in [module for module in model.modules() if isinstance(module, nn.Linear)][:2]:
        module.bias = nn.Parameter(module.weight[:, 0].clone())


def same_values_anew(model: Any) -> None:
    module = [module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.Linear)][0]
    module.weight = nn.Parameter(module.weight, requires_grad=False)


def another_layer(model: Any) -> None:
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers.append(copy.deepcopy(layers[-1]))


def other_buffers(model: Any) -> None:
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(2)


CHANGES: list[Adapt] = [
    grow, grow_around_the_mean, shrink, in_place, other_memory, other_params, same_values_anew, another_layer,
    other_buffers,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", MODELS)
def test_a_change_is_that_of_a_loaded_model(kind: str, change: Adapt, tmp_path: Path) -> None:
    kind_of = saved(kind, tmp_path)
    torch.manual_seed(5)
    plain: Any = kind_of.from_pretrained(tmp_path)
    change(plain)
    torch.manual_seed(5)
    managed = gemini.from_pretrained(tmp_path, config_of(), model_class=kind_of, adapt=change)
    assert_same(managed, plain)


def _lora(**changes: Any) -> Any:
    import peft

    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**settings, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"layer_replication": [(0, 2), (1, 2)]},
    ],
    ids=lambda changes: next(iter(changes)) + "-" + str(next(iter(changes.values())))[:6],
)
def test_adapters_that_read_the_base(changes: dict[str, Any], tmp_path: Path) -> None:
    import peft

    kind = saved("untied", tmp_path)
    torch.manual_seed(5)
    plain = peft.get_peft_model(kind.from_pretrained(tmp_path), _lora(**changes))
    torch.manual_seed(5)
    managed = gemini.from_pretrained(
        tmp_path, config_of(), adapt=lambda model: peft.get_peft_model(model, _lora(**changes))
    )
    assert_same(managed, plain)


def test_a_head_that_is_not_in_the_files_is_drawn_first(tmp_path: Path) -> None:
    """As plain transformers does, so that an adapter's copy of it has its values."""
    import peft

    saved("untied", tmp_path)
    kind = transformers.LlamaForSequenceClassification
    lora = _lora(task_type="SEQ_CLS")
    torch.manual_seed(5)
    plain = peft.get_peft_model(kind.from_pretrained(tmp_path), lora)
    torch.manual_seed(5)
    managed = gemini.from_pretrained(
        tmp_path, config_of(), model_class=kind, adapt=lambda model: peft.get_peft_model(model, lora)
    )
    assert_same(managed, plain)


def test_weights_that_nobody_touches_are_not_read_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    saved("llama", tmp_path)
    read: list[str] = []
    original = StoredModel.read
    monkeypatch.setattr(StoredModel, "read", lambda self, name: read.append(name) or original(self, name))
    gemini.from_pretrained(tmp_path, config_of(), adapt=lambda model: peft.get_peft_model(model, _lora()))
    assert read == []
    gemini.from_pretrained(tmp_path, config_of(), adapt=grow)
    assert read == ["model.embed_tokens.weight"]


def test_what_was_only_read_makes_room(tmp_path: Path) -> None:
    """And what was written to, or may be yet through memory that somebody holds, stays."""
    kind = saved("untied", tmp_path)
    in_memory: list[int] = []

    def look(model: Any) -> None:
        first, second, third, fourth, *_ = matrices(model)
        first.data.mul_(2)
        held = second.data
        array = third.detach().numpy()
        fourth.data = fourth.data.t().contiguous().t()
        for _ in range(2):
            for param in model.parameters():
                assert not param.isnan().any()
                in_memory.append(sum(p.nbytes for p in model.parameters() if type(p) is nn.Parameter))
        held.mul_(3)
        array *= 4

    plain: Any = kind.from_pretrained(tmp_path)
    look(plain)
    in_memory.clear()
    managed = gemini.from_pretrained(tmp_path, config_of(), adapt=look)
    changed = sum(param.nbytes for param in matrices(plain)[:4])
    assert max(in_memory) <= changed + paging.ROOM < sum(p.nbytes for p in plain.parameters()) / 2
    assert_same(managed, plain)


def test_one_load_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """What stands for weights that are not there yet is nobody's to change."""
    kind = saved("untied", tmp_path)
    for change in (in_place, None, another_layer):
        torch.manual_seed(5)
        plain: Any = kind.from_pretrained(tmp_path)
        if change is not None:
            change(plain)
        torch.manual_seed(5)
        assert_same(gemini.from_pretrained(tmp_path, config_of(), adapt=change), plain)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_changes_on_their_way_to_a_file(precision: str, tmp_path: Path) -> None:
    kind = saved("llama", tmp_path / "model")
    torch.manual_seed(5)
    plain = grow(kind.from_pretrained(tmp_path / "model"))
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=str(tmp_path))
    on_nvme = gemini.StaticPlacement(weights_on_nvme=1.0, optimizer_on_nvme=1.0)
    config = gemini.GeminiConfig(precision=precision, device="cpu", memory=memory, placement=on_nvme)  # type: ignore[arg-type]
    torch.manual_seed(5)
    assert_same(gemini.from_pretrained(tmp_path / "model", config, adapt=grow), plain, precision)


def test_files_of_torch_save(tmp_path: Path) -> None:
    kind = saved("untied", tmp_path / "model")
    plain: Any = kind.from_pretrained(tmp_path / "model")
    plain.config.save_pretrained(tmp_path)
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
    torch.manual_seed(5)
    grow(plain)
    torch.manual_seed(5)
    assert_same(gemini.from_pretrained(tmp_path, config_of(), adapt=grow), plain)


def test_what_is_returned_is_a_model(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(TypeError, match=r"adapt= returned a tuple: it takes the model, changes it and returns it"):
        gemini.from_pretrained(tmp_path, config_of(), adapt=lambda model: (model, None))


def test_params_that_come_to_share_memory_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)

    def alias(model: Any) -> None:
        first, second = (p for n, p in model.named_parameters() if "q_proj" in n)
        first.data = second.data

    with pytest.raises(ValueError, match="share memory and are different tensors"):
        gemini.from_pretrained(tmp_path, config_of(), adapt=alias)
