"""QLoRA: adapters on a base of 4-bit codes compute the same bits wherever the codes live.

The plain side is transformers, PEFT and bitsandbytes as they are, in the ordinary loop.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers

import gemini
from gemini.errors import BudgetExceeded, GeminiError, PlanMismatch
from gemini.planning.trace import scale_bytes, with_4bit_base
from gemini.tiers import Tier
from tests.docs.doc_blocks import ROOT, blocks_of
from tests.train import helpers

bitsandbytes = pytest.importorskip("bitsandbytes", reason="pip install '.[quantized]'")

from tests.integrations.quantized_cases import adam_of, base_of, losses_of, quantized, save_base  # noqa: E402
from tests.world import world_of  # noqa: E402

NAME = "base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_base(folder)
    return folder


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    """What Gemini puts in the place of the library's function stays for good: each test begins without."""
    functions = bitsandbytes.autograd._functions
    found = functions.MatMul4Bit
    functions.MatMul4Bit = found.__mro__[1] if hasattr(found, "_gemini_saves") else found
    yield


def plain_run(make: Callable[[], Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make()
    return losses_of(model, adam_of(model)), model.state_dict()


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name, value in wanted.items() if not helpers.same_bits(found[name], value)]


def assert_trains_as_plain(make: Callable[[], Any], where: str, path: Path, **how: Any) -> Any:
    losses, state = plain_run(make)
    model = helpers.wrap(make(), where, path, **how)
    assert losses_of(model, adam_of(model)) == losses
    assert_same(model.state_dict(), state)
    world_of(model).check()
    return model


@pytest.mark.sweep(every=4)
@pytest.mark.parametrize(
    ("where", "how"),
    [
        *((where, {"checkpointing": again}) for where in helpers.ALL_PLACEMENTS for again in (False, True)),
        ("disk", {"double": False}),
        ("disk", {"kind": "fp4"}),
    ],
)
def test_same_bits_wherever_codes_live(where: str, how: dict[str, Any], base: Path, tmp_path: Path) -> None:
    assert_trains_as_plain(lambda: quantized(base, **how), where, tmp_path)


def test_with_all_else_in_fp32(base: Path, tmp_path: Path) -> None:
    def make() -> Any:  # as the authors of QLoRA and PEFT's guide have it
        model = peft.prepare_model_for_kbit_training(base_of(base))
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights="gaussian")
        return peft.get_peft_model(model, lora).train()

    assert_trains_as_plain(make, "disk", tmp_path, precision="fp32")


def test_codes_come_and_go_between_forward_and_backward(base: Path, tmp_path: Path) -> None:
    """Were they kept on ``ctx``, windows would have room for one module alone and nothing could leave them."""
    model = helpers.wrap(quantized(base), "disk", tmp_path)
    optimizer = adam_of(model)
    losses_of(model, optimizer, range(2))
    coded = [c for c in world_of(model).chunks if c.spec.coded]
    at_home = sum(chunk.weights.num_bytes for chunk in coded)
    model(**helpers.batch(0)).loss.backward()
    assert model.memory_report()["moved"]["nvme->cpu"] >= 2 * at_home


def test_half_a_byte_per_weight(base: Path) -> None:
    model = quantized(base)
    sizes = [p.quant_state.shape.numel() for p in model.parameters() if isinstance(p, bitsandbytes.nn.Params4bit)]
    model = gemini.GeminiDDP(model, gemini.GeminiConfig(memory=gemini.MemoryBudget(cpu="1GiB"), device="cpu"))
    coded = [c for c in world_of(model).chunks if c.spec.coded]
    assert sum(chunk.spec.payload for chunk in coded) == sum(sizes) // 2
    assert all(chunk.weights.num_bytes == chunk.spec.numel for chunk in coded)
    problem = world_of(model).problem
    planned = sum(problem.sizes[i]["weights"] for i in range(len(problem.layout.chunks)))
    report = model.memory_report()
    assert report["cpu"]["holders"]["weights"] == planned
    assert report["params"] == model.get_nb_trainable_parameters()[1]


def test_a_checkpoint_has_codes_and_scales(base: Path, tmp_path: Path) -> None:
    model = helpers.wrap(quantized(base), "disk", tmp_path)
    optimizer = adam_of(model)
    losses_of(model, optimizer, range(2))
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
    state, wanted = model.state_dict(), losses_of(model, optimizer, range(2, 4))

    other = quantized(base)
    for param in other.parameters():
        if isinstance(param, bitsandbytes.nn.Params4bit):
            param.data.bitwise_not_()
            param.quant_state.absmax.zero_()
            param.quant_state.offset.zero_()
    other = helpers.wrap(other, "ram", tmp_path)
    again = adam_of(other)
    gemini.load_checkpoint(tmp_path / "saved", other, again)
    assert_same(other.state_dict(), state)
    assert losses_of(other, again, range(2, 4)) == wanted


def test_a_checkpoint_of_codes_is_not_one_of_numbers(base: Path, tmp_path: Path) -> None:
    model = helpers.wrap(quantized(base), "ram", tmp_path)
    gemini.save_checkpoint(tmp_path / "saved", model, adam_of(model))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    other = helpers.wrap(peft.get_peft_model(plain, lora), "ram", tmp_path)
    with pytest.raises(PlanMismatch, match="base_layer"):
        gemini.load_checkpoint(tmp_path / "saved", other, adam_of(other))


def test_the_adapter_opens_with_plain_peft(base: Path, tmp_path: Path) -> None:
    model = helpers.wrap(quantized(base), "disk", tmp_path)
    losses_of(model, adam_of(model))
    model.save_pretrained(tmp_path / "adapter")
    opened = peft.PeftModel.from_pretrained(base_of(base), tmp_path / "adapter", autocast_adapter_dtype=False).train()
    batch = helpers.batch(9)
    assert helpers.same_bits(model(**batch).logits, opened(**batch).logits)


def test_the_base_is_exported_with_its_scales(base: Path, tmp_path: Path) -> None:
    model = helpers.wrap(base_of(base).requires_grad_(False).train(), "disk", tmp_path)
    model.save_pretrained(tmp_path / "out")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="cpu").train()
    assert opened.config.quantization_config.load_in_4bit
    batch = helpers.batch(9)
    assert helpers.same_bits(model(**batch).logits, opened(**batch).logits)


def test_evaluation_leaves_codes_as_they_are(base: Path, tmp_path: Path) -> None:
    """On processors with AVX512-BF16 the library packs them anew for another kernel."""
    make = lambda: quantized(base)  # noqa: E731
    losses, state = plain_run(make)
    model = helpers.wrap(make(), "disk", tmp_path)
    ids = helpers.batch(0)["input_ids"]
    model.eval()
    with torch.no_grad():
        evaluated = model(input_ids=ids).logits
        model.generate(ids, max_new_tokens=3, do_sample=False)
    model.train()
    assert helpers.same_bits(model(input_ids=ids).logits, evaluated)
    assert losses_of(model, adam_of(model)) == losses
    assert_same(model.state_dict(), state)


def test_released_it_is_an_ordinary_model(base: Path, tmp_path: Path) -> None:
    plain = quantized(base)
    layer = plain.get_submodule(NAME.removesuffix(".weight"))
    packs = layer.support_avx512bf16_for_cpu
    model = gemini.release(helpers.wrap(quantized(base), "disk", tmp_path))
    layer = model.get_submodule(NAME.removesuffix(".weight"))
    assert type(layer.weight) is bitsandbytes.nn.Params4bit
    assert layer.support_avx512bf16_for_cpu == packs
    assert_same(model.state_dict(), plain.state_dict())
    assert losses_of(helpers.wrap(model, "disk", tmp_path), adam_of(model)) == losses_of(plain, adam_of(plain))


def test_what_a_release_needs_is_half_a_byte_per_weight(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = helpers.wrap(quantized(base), "disk", tmp_path)
    needed = sum(p.nbytes for p in quantized(base).parameters())
    free = SimpleNamespace(available=needed - 1)
    monkeypatch.setattr("gemini.train.wrap.psutil.virtual_memory", lambda: free)
    with pytest.raises(BudgetExceeded, match="nothing was changed"):
        gemini.release(model)
    free.available = needed
    gemini.release(model)


def test_merging_gives_an_ordinary_model_or_is_refused(base: Path, tmp_path: Path) -> None:
    model = helpers.wrap(quantized(base), "disk", tmp_path)
    for merge in (model.merge_adapter, model.unmerge_adapter):
        with pytest.raises(GeminiError, match="on a base of 4-bit codes.*merge_and_unload"):
            merge()
    assert_same(model.merge_and_unload().state_dict(), quantized(base).merge_and_unload().state_dict())


def test_peft_counts_weights_and_not_bytes(base: Path, tmp_path: Path) -> None:
    wanted = quantized(base).get_nb_trainable_parameters()
    model = helpers.wrap(quantized(base), "disk", tmp_path)
    assert model.get_nb_trainable_parameters() == wanted
    param = model.get_parameter(NAME)
    assert isinstance(param, bitsandbytes.nn.Params4bit)
    with model.gathered([param]):
        assert type(param) is bitsandbytes.nn.Params4bit


def test_a_step_is_traced_ahead_of_time(base: Path, tmp_path: Path) -> None:
    batch = helpers.batch(0)
    found = gemini.trace(quantized(base), batch, target="cuda")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    imagined = with_4bit_base(gemini.trace(peft.get_peft_model(plain, lora), batch, target="cuda"))
    assert found.params == imagined.params and found.fingerprint == imagined.fingerprint
    assert (found.flops, found.buffer_bytes, found.num_params) == (
        imagined.flops, imagined.buffer_bytes, imagined.num_params
    )  # fmt: skip
    assert found.num_params == sum(p.numel() for p in peft.get_peft_model(plain, lora).parameters())
    peaks = [
        {(m.phase, m.module): m.peak_bytes for m in trace.moments if m.module.endswith("up_proj.base_layer")}
        for trace in (found, imagined)
    ]
    assert peaks[0].keys() == peaks[1].keys() and len(peaks[0]) == 8
    assert all(abs(peaks[1][key] - peak) <= 2048 for key, peak in peaks[0].items())  # half a weight
    trace = gemini.trace(quantized(base), batch, target="cpu")
    config = gemini.GeminiConfig(trace=trace, memory=gemini.MemoryBudget(cpu="1GiB"), device="cpu")
    model = gemini.GeminiDDP(quantized(base), config)
    assert losses_of(model, adam_of(model)) == plain_run(lambda: quantized(base))[0]


def test_bytes_of_scales(base: Path) -> None:
    param = dict(base_of(base, double=True).named_parameters())[NAME.removeprefix("base_model.model.").replace(
        ".base_layer", ""
    )]  # fmt: skip
    state = param.quant_state
    tensors = [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    assert sum(t.nbytes for t in tensors) == scale_bytes(state.shape.numel())


def test_the_page_runs_as_printed(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [b for b in blocks_of(ROOT / "docs" / "guide" / "qlora.md") if b.language == "python"]
    (tmp_path / "base").symlink_to(base)
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block.code.replace('"/scratch"', repr(str(tmp_path / "scratch"))), names)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert names["model"].memory_report()["nvme"]["used"]


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_eight_bits_are_refused(base: Path) -> None:
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, quantization_config=config, device_map="cpu")
    # A layer that is not quantized yet has ordinary numbers, and computes in a way of its own.
    for refused in (model, bitsandbytes.nn.Linear8bitLt(8, 8, has_fp16_weights=False)):
        with pytest.raises(TypeError, match="is a Int8Params.*load_in_4bit=True"):
            gemini.GeminiDDP(refused)


def test_dora_is_refused(base: Path) -> None:
    with pytest.raises(ValueError, match="DoRA .use_dora=True. on 4-bit weights.*bf16"):
        gemini.GeminiDDP(quantized(base, dora=True))


def test_codes_kept_as_other_numbers_are_refused(base: Path) -> None:
    with pytest.raises(ValueError, match="bnb_4bit_quant_storage.*Leave"):
        gemini.GeminiDDP(base_of(base, bnb_4bit_quant_storage=torch.bfloat16))


def test_weights_not_quantized_yet_are_refused() -> None:
    with pytest.raises(ValueError, match="'0.weight' is not quantized yet.*Call model.to"):
        gemini.GeminiDDP(torch.nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64)))


def test_codes_packed_for_inference_are_refused(base: Path) -> None:
    model = base_of(base)
    model.model.layers[0].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match="packed for inference.*wrap the model before"):
        gemini.GeminiDDP(model)


def test_codes_are_not_trained_and_take_no_numbers(base: Path, tmp_path: Path) -> None:
    model = helpers.wrap(quantized(base), "disk", tmp_path)
    param = model.get_parameter(NAME)
    with pytest.raises(RuntimeError, match="floating point"):
        param.requires_grad_(True)
    with pytest.raises(ValueError, match="is quantized, its values are codes"), torch.no_grad():
        param.copy_(torch.randn(param.shape))
    assert model.full_param(NAME, torch.float32).dtype is torch.uint8


def test_files_are_not_streamed_in_4_bits(base: Path) -> None:
    config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ValueError, match=r"quantization_config=\) is not possible.*device_map=\"cpu\""):
        gemini.from_pretrained(base, quantization_config=config)


def test_stages_and_slices_are_refused(base: Path) -> None:
    model = base_of(base)
    with pytest.raises(ValueError, match="Pipeline of a model with 4-bit codes.*Use dp"):
        gemini.Pipeline(model, micro_batches=2, schedule="bfs")
    from gemini.train.slices.layers import Slices
    from gemini.train.slices.slicing import _make_slices

    with pytest.raises(ValueError, match="tensor parallel does not slice 4-bit weights .*Use dp"):
        _make_slices(model, Slices.__new__(Slices))


def test_codes_are_parked_and_handed_out_apart(base: Path, tmp_path: Path) -> None:
    def run(*, parks: bool) -> Any:
        memory = gemini.MemoryBudget(gpu="64MiB", cpu="64MiB")
        model = gemini.GeminiDDP(quantized(base), gemini.GeminiConfig(memory=memory, device="standin"))
        optimizer, losses = adam_of(model), list[float]()
        for step in range(3):
            if parks:
                with model.parked():
                    assert world_of(model).used(Tier.GPU) == 0
                    weights = dict(gemini.weights_for(model, adapters="apart"))
                    with pytest.raises(GeminiError, match="a base of 4-bit codes"):
                        gemini.weights_for(model)
                assert_same({name: weights[name] for name in (NAME,)}, {NAME: model.state_dict()[NAME]})
            losses += losses_of(model, optimizer, range(step, step + 1))
        return losses, model.state_dict()

    wanted, found = run(parks=False), run(parks=True)
    assert found[0] == wanted[0]
    assert_same(found[1], wanted[1])
