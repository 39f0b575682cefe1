"""``from_pretrained`` and ``from_config``: the values, buffers, ties, reports and random numbers of plain transformers.

Weights are compared with those of a plain model that was wrapped, so that what a frozen param loses is the same. The
pages that params may take while they are drawn are made so few that every param goes home and comes back.
"""

import copy
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import core_model_loading as conversions

import gemini
from gemini.train.loading import from_pretrained, skeleton
from gemini.train.loading.from_pretrained import Made, StoredModel, reading_of
from gemini.train.params.by_name import ByName
from gemini.train.params.handle import TensorSlice
from tests.hunts.zoo.configs import tiny_config
from tests.world import world_of

TEXT = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _vision() -> Any:
    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"]
    )
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1) | dict.fromkeys(
        ("encoder_ffn_dim", "decoder_ffn_dim"), 64
    )
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    return transformers.DetrConfig(use_timm_backbone=False, backbone_config=backbone, d_model=32, **sizes, **heads)


FAMILIES: dict[str, tuple[Any, Any]] = {
    # tied, non-persistent buffers
    "llama": (lambda: transformers.LlamaConfig(**TEXT, **IDS, tie_word_embeddings=True), None),
    # an initialization that rescales params of modules below
    "gpt2": (
        lambda: transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32, **IDS),
        None,
    ),
    # experts that the file keeps apart and the model fuses
    "mixtral": (lambda: transformers.MixtralConfig(**TEXT, **IDS, num_key_value_heads=2, num_local_experts=4), None),
    # one embedding for encoder, decoder and head
    "t5": (
        lambda: transformers.T5Config(
            vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=1
        ),
        transformers.AutoModelForSeq2SeqLM,
    ),
    # parametrized weights (weight norm)
    "wav2vec2": (
        lambda: transformers.Wav2Vec2Config(
            **{**TEXT, "vocab_size": 32}, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3),
            num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        ),
        transformers.AutoModelForCTC,
    ),
    # an initialization that draws numbers beside those of params
    "zamba": (lambda: tiny_config("zamba", "ZambaForCausalLM"), None),
    # frozen params, batch norms with persistent buffers, a sub-model with a config of its own
    "detr": (_vision, transformers.AutoModelForObjectDetection),
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(skeleton, "ROOM", 20_000)
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def config_of(precision: str = "bf16", **changes: Any) -> gemini.GeminiConfig:
    return gemini.GeminiConfig(precision=precision, device="cpu", memory=gemini.MemoryBudget(cpu="64MiB"), **changes)


def plain_model(family: str, seed: int = 3, **kwargs: Any) -> nn.Module:
    make, auto = FAMILIES[family]
    torch.manual_seed(seed)
    return (auto or transformers.AutoModelForCausalLM).from_config(make(), **kwargs)


def assert_same(managed: Any, plain: nn.Module, precision: str = "bf16") -> None:
    """``plain`` is wrapped for it."""
    assert type(managed)._gemini_original is type(plain)
    assert managed.training == plain.training
    buffers, plain_buffers = dict(managed.named_buffers()), dict(plain.named_buffers())
    assert list(buffers) == list(plain_buffers)
    for name, buffer in buffers.items():
        assert buffer.dtype == plain_buffers[name].dtype and torch.equal(buffer, plain_buffers[name]), name
        assert (name in managed.state_dict()) == (name in plain.state_dict()), f"{name} is persistent in one of them"
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in managed.named_parameters()] == names
    ties = [sorted(h.names) for h in world_of(managed).handles]
    wrapped: Any = gemini.GeminiDDP(plain, config_of(precision))
    assert ties == [sorted(h.names) for h in world_of(wrapped).handles]
    for name in names:
        mine, theirs = managed.full_param(name, torch.float32), wrapped.full_param(name, torch.float32)
        assert torch.equal(mine, theirs), name
        assert managed.get_parameter(name).requires_grad == wrapped.get_parameter(name).requires_grad, name
    world_of(managed).check()


# ---- from a config ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_weights_are_those_of_plain_transformers(family: str) -> None:
    plain = plain_model(family)
    after = torch.rand(3)
    make, auto = FAMILIES[family]
    torch.manual_seed(3)
    managed = gemini.from_config(make(), config_of(), model_class=auto)
    assert torch.equal(after, torch.rand(3)), "what is drawn next differs"
    assert_same(managed, plain)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", None), ("fp16", None), ("fp32", torch.bfloat16)])
def test_precision_and_dtype_of_drawn_weights(precision: str, dtype: torch.dtype | None) -> None:
    kwargs = {} if dtype is None else {"dtype": dtype}
    plain = plain_model("gpt2", **kwargs)
    torch.manual_seed(3)
    managed = gemini.from_config(FAMILIES["gpt2"][0](), config_of(precision), **kwargs)
    assert_same(managed, plain, precision)


def test_params_go_home_and_come_back_while_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, brought = [], []
    for name, log in (("send_home", sent), ("bring_in", brought)):
        original = getattr(skeleton.Pager, name)

        def spy(self: Any, param: Any, *args: Any, _log: list = log, _original: Any = original, **kw: Any) -> None:
            _original(self, param, *args, **kw)
            _log.append((id(param), sum(p.nbytes for p in self._inside.values())))

        monkeypatch.setattr(skeleton.Pager, name, spy)
    managed = gemini.from_config(FAMILIES["gpt2"][0](), config_of())
    largest = max(p.numel() * 4 for p in managed.parameters())
    assert max(held for _, held in brought) <= max(skeleton.ROOM, largest)
    assert len(sent) > 2 * len({key for key, _ in sent}) - 5, "hardly anything came back"


def test_a_constructor_that_is_not_deterministic_is_refused() -> None:
    calls = []

    def make() -> nn.Module:
        calls.append(0)
        return nn.Sequential(nn.Linear(4, 4), *([nn.Linear(4, 4)] if len(calls) > 1 else []))

    with pytest.raises(gemini.GeminiError, match="came out differently when it was built a second time"):
        skeleton.DrawnModel(make).manage(config_of())


class SharedAfterCopying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.copies = copy.deepcopy(self.heads)
        for head, other in zip(self.heads, self.copies, strict=True):
            head.weight = other.weight


class ReadsMoreThanThereIsRoomFor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        assert skeleton.ROOM < 80 * 80 * 4
        self.a, self.b, self.c = (nn.Linear(80, 80, bias=False) for _ in range(3))
        with torch.no_grad():
            self.b.weight.copy_(torch.stack([self.a.weight, self.b.weight, self.c.weight]).sum(0))


def copied_layers() -> nn.Module:
    """nn.TransformerEncoder deep-copies its layer: those params are never registered."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3, enable_nested_tensor=False)


@pytest.mark.parametrize("make", [copied_layers, SharedAfterCopying, ReadsMoreThanThereIsRoomFor])
def test_what_a_constructor_does_with_params_is_drawn_alike(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    assert_same(skeleton.DrawnModel(make).manage(config_of()), plain)


def test_no_budget_no_drawing() -> None:
    state = torch.get_rng_state()
    memory = gemini.MemoryBudget(cpu="100KiB")
    with pytest.raises(gemini.BudgetExceeded):
        gemini.from_config(FAMILIES["llama"][0](), gemini.GeminiConfig(device="cpu", memory=memory))
    assert torch.equal(state, torch.get_rng_state())
    assert nn.Module.register_parameter.__qualname__ == "Module.register_parameter"


def test_a_config_that_names_no_class() -> None:
    with pytest.raises(ValueError, match="pass model_class="):
        gemini.from_config(transformers.CLIPConfig(), config_of())


# ---- from files ------------------------------------------------------------------------------------------------------


def save(model: Any, folder: Path, **kwargs: Any) -> Path:
    model.save_pretrained(folder, **kwargs)
    return folder


@pytest.mark.parametrize("shard", ["5GB", "30KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_weights_are_those_of_plain_transformers(family: str, shard: str, tmp_path: Path) -> None:
    model = plain_model(family)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.add_(0.5)  # what is persistent must come from the file
    save(model, tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "30KB")
    plain, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    managed, mine = gemini.from_pretrained(tmp_path, config_of(), output_loading_info=True)
    assert mine == info
    assert_same(managed, plain)


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "zamba", "detr"])
def test_missing_and_unexpected_keys(family: str, tmp_path: Path) -> None:
    """What the file lacks is drawn as transformers draws it; both say so in the same words."""
    model = plain_model(family)
    save(model, tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    for name in sorted(values)[::3]:
        del values[name]
    save_file(values | {"extra.weight": torch.ones(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(7)
    plain, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    after = torch.rand(2)
    torch.manual_seed(7)
    managed, mine = gemini.from_pretrained(tmp_path, config_of(), output_loading_info=True)
    assert torch.equal(after, torch.rand(2))
    assert mine == info and info["missing_keys"] and info["unexpected_keys"] == {"extra.weight"}
    assert_same(managed, plain)


@pytest.mark.parametrize("dtype", [None, "auto", torch.float32, "float16"])
def test_dtype_is_transformers(dtype: Any, tmp_path: Path) -> None:
    save(plain_model("llama", dtype=torch.bfloat16), tmp_path)
    kwargs = {} if dtype is None else {"dtype": dtype}
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path, **kwargs)
    managed = gemini.from_pretrained(tmp_path, config_of("fp32"), **kwargs)
    assert managed.config.dtype == plain.config.dtype
    assert_same(managed, plain, "fp32")


@pytest.mark.parametrize("equal", [True, False])
def test_both_of_two_tied_params_in_the_file(equal: bool, tmp_path: Path) -> None:
    save(plain_model("llama"), tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    values["lm_head.weight"] = values["model.embed_tokens.weight"] + (0.0 if equal else 1.0)
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == equal
    managed = gemini.from_pretrained(tmp_path, config_of())
    assert_same(managed, plain)


def test_mismatched_sizes(tmp_path: Path) -> None:
    save(plain_model("llama"), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"intermediate_size": 80}))
    with pytest.raises(RuntimeError, match="size mismatch|mismatch"):
        gemini.from_pretrained(tmp_path, config_of())
    torch.manual_seed(1)
    plain, info = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, ignore_mismatched_sizes=True, output_loading_info=True
    )
    torch.manual_seed(1)
    managed, mine = gemini.from_pretrained(
        tmp_path, config_of(), ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert mine == info and info["mismatched_keys"]
    assert_same(managed, plain)


@pytest.mark.parametrize("wish", [{"device_map": "auto"}, {"state_dict": {}}, {"gguf_file": "model.gguf"}])
def test_what_cannot_be_streamed_is_refused(wish: dict[str, Any], tmp_path: Path) -> None:
    save(plain_model("llama"), tmp_path)
    with pytest.raises(ValueError, match=f"{next(iter(wish))}=.*Leave it out"):
        gemini.from_pretrained(tmp_path, config_of(), **wish)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is an adapter: load its base model"):
        gemini.from_pretrained(tmp_path, config_of())


def test_a_transformers_without_the_steps_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(plain_model("llama"), tmp_path)
    monkeypatch.delattr(transformers.PreTrainedModel, "_finalize_model_loading")
    with pytest.raises(gemini.GeminiError, match="has no _finalize_model_loading any more.*wrap it with GeminiDDP"):
        gemini.from_pretrained(tmp_path, config_of())


def test_a_failed_load_leaves_transformers_as_it_was(tmp_path: Path) -> None:
    save(plain_model("llama"), tmp_path)
    steps = dict(vars(transformers.PreTrainedModel))
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(Exception, match="(?i)header|invalid|deserializ"):
        gemini.from_pretrained(tmp_path, config_of())
    assert dict(vars(transformers.PreTrainedModel)) == steps


# ---- adapted on the way ----------------------------------------------------------------------------------------------


# ``from_pretrained(adapt=)``: whatever the function does to a model, the managed one has what plain transformers has
# after it, and weights that it does not touch are not read for it.


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


def assert_adapted_alike(kind: Any, folder: Path, adapt: Adapt, config: Any = None, precision: str = "bf16") -> None:
    """What ``adapt`` makes of a model of files is, on the way to a managed one, what it makes of a loaded one."""
    torch.manual_seed(5)
    plain = kind.from_pretrained(folder)
    plain = adapt(plain) or plain
    torch.manual_seed(5)
    managed = gemini.from_pretrained(folder, config or config_of(), model_class=kind, adapt=adapt)
    assert_same(managed, plain, precision)


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
    assert_adapted_alike(saved(kind, tmp_path), tmp_path, change)


def _adapted(**changes: Any) -> Any:
    import peft

    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**settings, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "all-linear"},
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

    assert_adapted_alike(
        saved("untied", tmp_path), tmp_path, lambda model: peft.get_peft_model(model, _adapted(**changes))
    )


def test_a_head_that_is_not_in_the_files_is_drawn_first(tmp_path: Path) -> None:
    """As plain transformers does, so that an adapter's copy of it has its values."""
    import peft

    saved("untied", tmp_path)
    lora = _adapted(task_type="SEQ_CLS")
    assert_adapted_alike(
        transformers.LlamaForSequenceClassification, tmp_path, lambda model: peft.get_peft_model(model, lora)
    )


def test_weights_that_nobody_touches_are_not_read_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    saved("llama", tmp_path)
    read: list[str] = []
    original = StoredModel.read
    monkeypatch.setattr(StoredModel, "read", lambda self, name: read.append(name) or original(self, name))
    gemini.from_pretrained(tmp_path, config_of(), adapt=lambda model: peft.get_peft_model(model, _adapted()))
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
    assert max(in_memory) <= changed + skeleton.ROOM < sum(p.nbytes for p in plain.parameters()) / 2
    assert_same(managed, plain)


def test_one_load_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """What stands for weights that are not there yet is nobody's to change."""
    kind = saved("untied", tmp_path)
    for change in (in_place, lambda model: None, another_layer):
        assert_adapted_alike(kind, tmp_path, change)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_changes_on_their_way_to_a_file(precision: str, tmp_path: Path) -> None:
    kind = saved("llama", tmp_path / "model")
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=str(tmp_path))
    on_nvme = gemini.StaticPlacement(weights_on_nvme=1.0, optimizer_on_nvme=1.0)
    config = gemini.GeminiConfig(precision=precision, device="cpu", memory=memory, placement=on_nvme)  # type: ignore[arg-type]
    assert_adapted_alike(kind, tmp_path / "model", grow, config, precision)


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


# ---- what of a checkpoint's tensors a slice is made of ---------------------------------------------------------------

# The operations of transformers over slices against slices of what they make.


CONVERSIONS: dict[str, tuple[list[Any], tuple[int, ...], int, int]] = {
    "as it is": ([], (8, 4), 1, 1),
    "stacked": ([conversions.MergeModulelist(dim=0)], (4, 8), 1, 4),
    "stacked side by side": ([conversions.MergeModulelist(dim=0), conversions.Concatenate(dim=1)], (4, 8), 2, 4),
    "side by side": ([conversions.Concatenate(dim=0)], (8, 4), 2, 1),
    "interleaved": ([conversions.Interleave(dim=1)], (4, 8, 4), 1, 1),
    "transposed": ([conversions.Transpose(0, 1)], (8, 4), 1, 1),
}
"""Operations, the shape of each tensor, how many patterns there are and how many tensors of each."""


def converted(operations: list[Any], by_pattern: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    values: Any = by_pattern
    patterns = list(by_pattern)
    for operation in operations:
        values = operation.convert(values, source_patterns=patterns, target_patterns=["made"], config=None)
    (made,) = values.values()
    return made[0] if isinstance(made, list) else made


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_slices_of_sources_make_the_slice(kind: str) -> None:
    operations, shape, num_patterns, of_each = CONVERSIONS[kind]
    tensors = torch.arange(num_patterns * of_each * torch.Size(shape).numel()).view(num_patterns, of_each, *shape)
    patterns = {f"p{at}": list(tensors[at]) for at in range(num_patterns)}
    whole = converted(operations, {name: list(found) for name, found in patterns.items()})
    made = Made((), tuple(operations), shape, (of_each,) * num_patterns)
    ways = {}
    for dim, groups, rank in itertools.product(range(whole.dim()), (1, 2), range(2)):
        cut = TensorSlice(tuple(whole.shape), dim, groups, rank, 2)
        reading = reading_of(cut, made)
        ways[dim, groups] = reading is not None
        if reading is None:
            continue
        read = {
            name: [
                part
                for number, tensor in enumerate(found)
                if (part := reading.shard_tensor(tensor, number, dtype=whole.dtype)) is not None
            ]
            for name, found in patterns.items()
        }
        assert sum(part.numel() for found in read.values() for part in found) == cut.of(whole).numel()
        assert torch.equal(converted(operations, read), cut.of(whole))
    assert [way for way, is_read in ways.items() if is_read] == {
        "as it is": [(0, 1), (0, 2), (1, 1), (1, 2)],
        "stacked": [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)],
        "stacked side by side": [(0, 1), (1, 2), (2, 1), (2, 2)],
        "side by side": [(0, 2), (1, 1), (1, 2)],
        "interleaved": [(0, 1), (0, 2), (2, 1), (2, 2)],
        "transposed": [],
    }[kind]


@pytest.mark.parametrize(
    "made",
    [Made((), None, (8,), ()), Made((), (), (8, 8), ()), Made((), (conversions.MergeModulelist(dim=0),), (4,), (3,))],
    ids=["one of several", "another shape", "fewer experts"],
)
def test_what_is_not_understood_is_read_whole(made: Made | None) -> None:
    assert reading_of(TensorSlice((8, 4), 0, 1, 0, 2), made) is None


# ---- other threads meanwhile -----------------------------------------------------------------------------------------


def _while_it(owner: Any, step: str, call: Callable[[], Any], other: Callable[[], Any], patch: Any) -> tuple[Any, Any]:
    """Both results, where ``other`` runs on a second thread at the first ``step`` of what ``call`` does on this one."""
    at_step, main, found, took = getattr(owner, step), threading.get_ident(), list[Any](), list[Any]()

    def with_other(*args: Any, **kwargs: Any) -> Any:
        result = at_step(*args, **kwargs)
        if threading.get_ident() == main and not took:
            took.append(True)
            with ThreadPoolExecutor(1) as pool:
                found.append(pool.submit(other).result(timeout=120))
        return result

    patch.setattr(owner, step, with_other)
    return call(), found[0]


@pytest.mark.parametrize("family", ["llama", "mixtral"])  # as they are in the file, and converted
@pytest.mark.parametrize(("owner", "step"), [(from_pretrained, "_shapes"), (ByName, "write_whole")])
def test_a_plain_load_in_another_thread_is_a_plain_load(
    family: str, owner: Any, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other weights with the same names, and of a model with other names."""
    ours, theirs, others = plain_model(family), plain_model(family, seed=5), plain_model("gpt2")
    for name, model in (("ours", ours), ("theirs", theirs), ("others", others)):
        model.save_pretrained(tmp_path / name)

    def load() -> list[Any]:
        return [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("theirs", "others")]

    managed, loaded = _while_it(
        owner, step, lambda: gemini.from_pretrained(tmp_path / "ours", config_of()), load, monkeypatch
    )
    for found, wanted in zip(loaded, (theirs, others), strict=True):
        values = wanted.state_dict()
        assert found.state_dict().keys() == values.keys()
        assert all(torch.equal(value, values[name]) for name, value in found.state_dict().items())
    assert_same(managed, ours.eval())


def test_a_model_is_drawn_in_another_thread_while_from_config_finds_out_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list(plain_model("llama").state_dict().values())
    _, found = _while_it(
        transformers.LlamaForCausalLM,
        "__init__",
        lambda: gemini.from_config(FAMILIES["llama"][0](), config_of()),
        lambda: list(plain_model("llama").state_dict().values()),
        monkeypatch,
    )
    assert all(torch.equal(value, wanted) for value, wanted in zip(found, drawn, strict=True))


def test_attention_in_another_thread_is_torch_s_while_a_step_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, q = plain_model("llama"), torch.ones(1, 4, 8, 8)
    batch = {"input_ids": torch.ones(1, 8, dtype=torch.long), "labels": torch.ones(1, 8, dtype=torch.long)}
    _, names = _while_it(
        transformers.LlamaForCausalLM,
        "forward",
        lambda: gemini.trace(model, batch, target="cuda"),
        lambda: nn.functional.scaled_dot_product_attention(q.requires_grad_(), q, q).grad_fn.name(),
        monkeypatch,
    )
    assert names == "ScaledDotProductFlashAttentionForCpuBackward0"
