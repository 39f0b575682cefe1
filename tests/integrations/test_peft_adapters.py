"""What people do with adapters around training: save, open, merge, switch, and add some too late."""

import gc
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import gemini
from gemini.errors import GeminiError
from tests.integrations.peft_cases import CONFIGS, cast_params, llama, logits, maker, move_adapters
from tests.train import helpers
from tests.train.helpers import DTYPES, PLACEMENTS, adam, make_config, same_bits, snapshot, train, wrap
from tests.world import world_of


def trained(method: str, where: str, path: Path, base: Any = llama, **how: Any) -> Any:
    model = wrap(maker(method, base)(), where, path, **how)
    train(model, adam(model), range(2))
    return model


def plain_of(model: Any, method: str, precision: str = "bf16", base: Any = llama) -> Any:
    """The same values in a PeftModel that is not managed."""
    plain = cast_params(maker(method, base)(), precision)
    plain.load_state_dict(model.state_dict())
    return plain


def assert_same_weights(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert same_bits(found[name], value), name


# ---- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize(
    ("method", "where", "precision"),
    [("lora", "disk", "bf16"), ("dora", "standin", "bf16"), ("modules to save", "disk", "bf16"),
     ("prompt", "disk", "fp16"), ("prefix", "standin", "bf16"), ("p-tuning", "ram", "bf16"), ("ia3", "ram", "fp16"),
     ("trainable tokens", "disk", "fp32")],
)  # fmt: skip
def test_plain_peft_opens_what_was_saved(method: str, where: str, precision: str, tmp_path: Path) -> None:
    model = trained(method, where, tmp_path, precision=precision)
    before = snapshot(model)
    model.save_pretrained(tmp_path / "out")
    helpers.assert_same_snapshot(before, snapshot(model))
    base = cast_params(llama(), precision)
    opened = peft.PeftModel.from_pretrained(base, tmp_path / "out", autocast_adapter_dtype=False)
    cast_params(opened, precision)
    assert torch.equal(logits(opened.eval()), logits(model.eval()))


def test_a_part_of_a_model_gives_its_state_dict(tmp_path: Path) -> None:
    model = wrap(llama(), "disk", tmp_path)
    whole, part = model.state_dict(), model.model.layers[1].state_dict()
    assert_same_weights(part, {n[15:]: v for n, v in whole.items() if n.startswith("model.layers.1.")})


# ---- merging ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(every=3)
@pytest.mark.parametrize(
    ("method", "where", "precision", "safe"),
    [("lora", "ram", "bf16", False), ("lora", "disk", "bf16", True), ("dora", "disk", "bf16", False),
     ("dora", "standin", "fp32", True), ("modules to save", "disk", "fp16", True), ("ia3", "standin", "bf16", False),
     ("experts", "disk", "bf16", False)],
)  # fmt: skip
def test_merging_gives_the_bits_of_plain_peft(
    method: str, where: str, precision: str, safe: bool, tmp_path: Path
) -> None:
    base = helpers.mixtral if method == "experts" else llama
    model = trained(method, where, tmp_path, base, precision=precision)
    plain = plain_of(model, method, precision, base)
    before = model.state_dict()
    for managed_step, plain_step in (
        (lambda: model.merge_adapter(safe_merge=safe), lambda: plain.merge_adapter(safe_merge=safe)),
        (model.unmerge_adapter, plain.unmerge_adapter),
    ):
        managed_step()
        plain_step()
        assert_same_weights(model.state_dict(), plain.state_dict())
        assert torch.equal(logits(model), logits(plain))
        world_of(model).check()
        if managed_step != model.unmerge_adapter:
            assert any(not same_bits(value, before[name]) for name, value in model.state_dict().items())
    merged, wanted = model.merge_and_unload(safe_merge=safe), plain.merge_and_unload(safe_merge=safe)
    assert_same_weights(merged.state_dict(), wanted.state_dict())
    assert torch.equal(logits(merged), logits(wanted))
    assert {p.dtype for p in merged.parameters()} == {DTYPES[precision]}


TAKEN_OUT = (
    "lora", "dora", "trainable tokens", "experts", "ia3", "loha", "oft", "oft coft", "boft", "hra", "fourierft",
    "vblora", "unilora",
)  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("method", TAKEN_OUT)
def test_a_merged_adapter_is_disabled(method: str, precision: str, where: str, tmp_path: Path) -> None:
    """PEFT unmerges inside of the forward, layer by layer; with its bits, and for good."""
    base = helpers.mixtral if method == "experts" else llama
    plain, model = plain_pair(method, base, where, tmp_path, precision)
    for each in (model, plain):
        each.eval()
        each.merge_adapter()
    with model.disable_adapter(), plain.disable_adapter():
        for _ in range(2):
            assert torch.equal(logits(model), logits(plain))
    assert_same_weights(model.state_dict(), plain.state_dict())
    assert torch.equal(logits(model), logits(plain))
    for each in (model, plain):
        each.merge_adapter()
    part, same = model.base_model.model, plain.base_model.model  # called below the adapters' model
    with model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(logits(part), logits(same))
    assert_same_weights(model.state_dict(), plain.state_dict())
    world_of(model).check()


def plain_pair(method: str, base: Any, where: str, path: Path, precision: str) -> tuple[Any, Any]:
    """A model that is not managed, and one that is, with the same values."""
    model = wrap(maker(method, base)(), where, path, precision=precision)
    plain = plain_of(model, method, precision, base)
    for name, buffer in plain.named_buffers():  # random projections
        buffer.data = model.get_buffer(name).to(buffer.device)
    return plain, model


def test_after_merge_and_unload_nothing_is_managed(tmp_path: Path) -> None:
    model = trained("lora", "disk", tmp_path)
    manager = world_of(model).reference()
    merged = model.merge_and_unload()
    gc.collect()
    assert manager() is None  # and with it chunks and spill file
    assert type(merged) is transformers.LlamaForCausalLM and type(model) is peft.PeftModelForCausalLM
    assert all(type(p) is torch.nn.Parameter and not hasattr(p, "_gemini") for p in merged.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in merged.modules())
    assert torch.equal(merged.lm_head.weight.float().to(torch.bfloat16), merged.lm_head.weight)
    merged.requires_grad_(True)
    merged.save_pretrained(tmp_path / "merged")
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    assert torch.equal(logits(opened), logits(merged))
    again = gemini.GeminiDDP(merged, make_config(merged, "ram", tmp_path))
    train(again, adam(again), range(1))


def test_unload_gives_the_base(tmp_path: Path) -> None:
    base = trained("dora", "disk", tmp_path).unload()
    assert_same_weights(base.state_dict(), cast_params(llama(), "bf16").state_dict())


def test_no_memory_to_gather_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained("lora", "disk", tmp_path)
    before = snapshot(model)
    nothing = type("Free", (), {"available": 1000})
    with monkeypatch.context() as patch, pytest.raises(gemini.BudgetExceeded, match="merge_adapter"):
        patch.setattr("gemini.train.wrap.psutil.virtual_memory", nothing)
        model.merge_and_unload()
    helpers.assert_same_snapshot(before, snapshot(model))
    train(model, adam(model), range(1))


def test_prompts_cannot_be_merged(tmp_path: Path) -> None:
    model = trained("prompt", "ram", tmp_path)
    for merge in (model.merge_adapter, model.unmerge_adapter, model.merge_and_unload):
        with pytest.raises(GeminiError, match="merge"):
            merge()
    assert isinstance(model, gemini.GeminiDDP)


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_bad_adapter_is_not_merged(where: str, tmp_path: Path) -> None:
    model = trained("lora", where, tmp_path)
    name = next(n for n, p in model.named_parameters() if p.requires_grad)
    with model.gathered(model.get_parameter(name), write=True):
        model.get_parameter(name).data.fill_(float("nan"))
    before = snapshot(model)
    with pytest.raises(ValueError, match="NaN"):
        model.merge_adapter(safe_merge=True)
    helpers.assert_same_snapshot(before, snapshot(model))
    world_of(model).check()


def test_adapters_of_transformers_itself(tmp_path: Path) -> None:
    """``model.add_adapter`` of transformers, without a PeftModel around the model."""

    def make() -> Any:
        torch.manual_seed(1)
        model = llama()
        model.add_adapter(CONFIGS["lora"]())
        move_adapters(model)
        return model

    model, _, plain = helpers.compare(make, "disk", tmp_path)
    model.save_pretrained(tmp_path / "out")
    opened = cast_params(peft.PeftModel.from_pretrained(llama(), tmp_path / "out"), "bf16")
    assert torch.equal(logits(opened), logits(model.eval()))
    assert torch.equal(logits(opened), logits(plain.model.eval()))
    with pytest.raises(GeminiError, match="wrap after"):
        model.add_adapter(CONFIGS["lora"](), "late")


# ---- several adapters ------------------------------------------------------------------------------------------------


def two_adapters() -> Any:
    model = maker("lora")()
    torch.manual_seed(5)
    model.add_adapter("second", CONFIGS["lora"]())
    return model


@pytest.mark.parametrize("where", PLACEMENTS)
def test_switching_adapters(where: str, tmp_path: Path) -> None:
    """An adapter that was not active when the model was wrapped has its exact master and states nevertheless."""
    both = two_adapters()
    for name, param in both.named_parameters():
        param.requires_grad_("lora_" in name)  # the plain loop then keeps masters of both
    plain = helpers.Plain(both)
    plain.model.set_adapter("default")
    model = wrap(two_adapters(), where, tmp_path, slack=2**18)
    adapters = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    assert model.memory_report()["trained_params"] == adapters
    optimizer = adam(model)
    for number, name in enumerate(("default", "second", "default")):
        model.set_adapter(name)
        plain.model.set_adapter(name)
        steps = range(2 * number, 2 * number + 2)
        assert train(model, optimizer, steps) == helpers.train_plain(plain, steps)
    helpers.assert_same_state(model, plain)
    with model.disable_adapter(), plain.model.disable_adapter():
        assert torch.equal(logits(model), logits(plain.model))
    assert torch.equal(logits(model), logits(plain.model))
    assert train(model, optimizer, range(6, 7)) == helpers.train_plain(plain, range(6, 7))
    helpers.assert_same_state(model, plain)


def test_loading_into_adapters_that_are_there(tmp_path: Path) -> None:
    first = wrap(two_adapters(), "disk", tmp_path, slack=2**18)
    train(first, adam(first), range(2))
    first.save_pretrained(tmp_path / "out")
    second = wrap(two_adapters(), "ram", tmp_path)
    second.load_adapter(tmp_path / "out", "default")
    second.load_adapter(tmp_path / "out" / "second", "second", is_trainable=True)
    assert_same_weights(second.state_dict(), first.state_dict())


@pytest.mark.parametrize(
    "add",
    [lambda model: model.add_adapter("late", CONFIGS["lora"]()), lambda model: model.load_adapter("nowhere", "late"),
     lambda model: model.add_weighted_adapter(["default", "second"], [1, 1], "late"),
     lambda model: model.delete_adapter("second")],
    ids=["add", "load", "weighted", "delete"],
)  # fmt: skip
def test_adapters_are_settled_when_the_model_is_wrapped(add: Any, tmp_path: Path) -> None:
    model = wrap(two_adapters(), "ram", tmp_path)
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(GeminiError, match=r"wrap after|before GeminiDDP\(model\)"):
        add(model)
    assert names == [name for name, _ in model.named_modules()] and list(model.peft_config) == ["default", "second"]
    train(model, adam(model), range(1))


# ---- too late, or not possible ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "adapt",
    [lambda m: peft.get_peft_model(m, CONFIGS["lora"]()), lambda m: peft.get_peft_model(m, CONFIGS["prompt"]()),
     lambda m: peft.get_peft_model(m, CONFIGS["ia3"]()), lambda m: peft.get_peft_model(m.model, CONFIGS["lora"]()),
     lambda m: peft.inject_adapter_in_model(CONFIGS["lora"](), m), lambda m: m.add_adapter(CONFIGS["lora"]()),
     lambda m: m.load_adapter("nowhere")],
    ids=["lora", "prompt", "ia3", "part", "inject", "transformers", "transformers load"],
)  # fmt: skip
def test_peft_on_a_managed_model_is_refused_and_changes_nothing(adapt: Any, tmp_path: Path) -> None:
    model = wrap(llama(), "disk", tmp_path)
    optimizer = adam(model)
    train(model, optimizer, range(1))
    names, before, attributes = [name for name, _ in model.named_modules()], snapshot(model), set(vars(model))
    with pytest.raises(GeminiError, match=r"GeminiDDP\(get_peft_model\(model, peft_config\), config\)"):
        adapt(model)
    assert names == [name for name, _ in model.named_modules()] and attributes == set(vars(model))
    assert all(param.requires_grad for param in model.parameters())
    helpers.assert_same_snapshot(before, snapshot(model))
    train(model, optimizer, range(1, 2))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_param_that_comes_later_is_refused(frozen: bool, tmp_path: Path) -> None:
    model = wrap(llama(), "disk", tmp_path)
    optimizer = adam(model)
    train(model, optimizer, range(1))
    model.model.layers[1].extra = torch.nn.Linear(2, 2, bias=False).requires_grad_(not frozen)
    model.model.embed_tokens(torch.zeros(1, 3, dtype=torch.long))  # a part without it goes on, and settles nothing
    for call in (model, model.model, model.model.layers[1]):
        for _ in range(2):  # a second try too
            with pytest.raises(GeminiError, match=r"extra.weight' was added to the model after"):
                call(torch.zeros(1, 3, dtype=torch.long))
    for call in (
        lambda: model.clip_grad_norm_(1.0),
        lambda: gemini.save_checkpoint(tmp_path / "saved", model, optimizer),
        lambda: gemini.load_checkpoint(tmp_path / "saved", model, optimizer),
    ):
        with pytest.raises(GeminiError, match=r"extra.weight' was added to the model after"):
            call()
    del model.model.layers[1].extra
    train(model, optimizer, range(1, 2))
    box, content = torch.nn.ModuleList(), torch.nn.Linear(2, 2).requires_grad_(not frozen)
    model.model.box = box
    train(model, optimizer, range(2, 3))
    box.append(content)
    with pytest.raises(GeminiError, match=r"box.0.weight' was added to the model after"):
        model(**helpers.batch(0))
    del model.model.box
    train(model, optimizer, range(3, 4))
    model.model.layers[1].register_parameter("late", torch.nn.Parameter(torch.zeros(2), requires_grad=not frozen))
    with pytest.raises(GeminiError, match=r"layers.1.late' was added to the model after"):
        model(**helpers.batch(0))


def test_adalora_is_refused(tmp_path: Path) -> None:
    config = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), config)
    move_adapters(model)
    with pytest.raises(ValueError, match="AdaLoRA chooses the ranks of its adapters by p.grad"):
        wrap(model, "ram", tmp_path)
    assert not any(hasattr(p, "_gemini") for p in model.parameters())


class WithAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mha(x, x, x)[0]


def test_adapters_that_make_params_anew_are_refused() -> None:
    """What PEFT puts around nn.MultiheadAttention does so whenever params are listed. Merged, it is an ordinary one."""
    model: Any = peft.get_peft_model(WithAttention(), peft.LoraConfig(target_modules=["mha"], init_lora_weights=False))
    x = torch.ones(2, 3, 6)
    wanted = model(x)
    config = gemini.GeminiConfig(precision="fp32", device="cpu")
    with pytest.raises(TypeError, match=r"'base_model.*in_proj_weight' is made anew.*model\.merge_and_unload\(\)"):
        gemini.GeminiDDP(model, config)
    assert torch.equal(model(x), wanted)
    torch.testing.assert_close(gemini.GeminiDDP(model.merge_and_unload(), config)(x), wanted)
