"""Linear layers that multiply in float8 by torchao, whose emulation computes on CPUs: the same bits wherever chunks
live, whoever puts the layers in, and the model as it was afterwards.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

pytest.importorskip("torchao", reason="pip install '.[float8]'")
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import gemini
from gemini.errors import GeminiError, PlanMismatch
from gemini.planning.trace import Product
from gemini.train.modules.float8 import is_float8
from tests.train.helpers import adam, gpt2, llama, manage, mixtral, t5

FLOAT8: dict[str, Any] = {"float8": True}
STEPS = 3


def batch(seed: int, rows: int = 2) -> dict[str, torch.Tensor]:
    """Of 16 tokens a row: what a product in float8 takes as its inner side."""
    ids = torch.randint(2, 96, (rows, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def train(model: Any, count: int = 1) -> list[float]:
    optimizer, losses = adam(model), list[float]()
    for number in range(STEPS):
        for part in range(count):
            loss = model(**batch(number * count + part)).loss
            (loss / count).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in gemini.release(model).state_dict().items()}


def by_hand(model: nn.Module, **how: Any) -> nn.Module:
    """As torchao's own page puts them in."""
    config = Float8LinearConfig(emulate=True, **how)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: "layers" in name)
    return model


def of_float8(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_float8(module)]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
def test_the_bits_are_torchaos_wherever_chunks_live(again: bool, tmp_path: Path) -> None:
    models: dict[str, Any] = {"plain": llama(), "by hand": by_hand(llama()), "memory": llama(), "drive": llama()}
    for model in models.values():
        if again:
            model.gradient_checkpointing_enable()
    how: dict[str, dict[str, Any]] = {"memory": FLOAT8, "drive": FLOAT8}
    for name, model in models.items():
        homes: dict[str, Any] = {"cpu": "1GiB", "nvme": None} if name != "drive" else {}
        models[name] = manage(model, tmp_path, **homes, **how.get(name, {}))
    assert of_float8(models["memory"]) == of_float8(models["by hand"]) == of_float8(models["drive"])
    assert len(of_float8(models["memory"])) == 3 * 7 and not of_float8(models["plain"])
    losses = {name: train(model) for name, model in models.items()}
    found = {name: bits(model) for name, model in models.items()}
    for name in ("memory", "drive"):
        assert losses[name] == losses["by hand"] and same(found[name], found["by hand"]), name
    assert losses["plain"] != losses["memory"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_layers_that_a_program_has_put_in_are_managed(recipe: str, tmp_path: Path) -> None:
    def made() -> nn.Module:
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        model: nn.Module = convert_to_float8_training(
            llama(), config=config, module_filter_fn=lambda layer, name: "layers" in name
        )
        return model

    here, there = manage(made(), tmp_path, cpu="1GiB", nvme=None), manage(made(), tmp_path)
    assert train(here) == train(there) and same(bits(here), bits(there))
    assert of_float8(here), "they are the program's own, and stay"


@pytest.mark.parametrize("make", [mixtral, t5], ids=["mixtral", "t5"])
def test_other_families(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    here, there = (
        manage(make(), tmp_path, cpu="1GiB", nvme=None, **FLOAT8),
        manage(make(), tmp_path, **FLOAT8),
    )
    assert of_float8(here) and not any("gate" in name.rpartition(".")[2] for name in of_float8(here))
    assert train(here) == train(there) and same(bits(here), bits(there))


def test_block_by_block_is_one_after_another(tmp_path: Path) -> None:
    ways = [manage(llama(), tmp_path, gradients="accumulate", **FLOAT8) for name in "ab"]
    optimizers = [adam(model) for model in ways]
    for number in range(STEPS):
        parts = [batch(number * 2 + part) for part in range(2)]
        gemini.train_step(ways[0], parts)
        for part in parts:
            (ways[1](**part).loss / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert same(*(bits(model) for model in ways))


def test_compiled_blocks(tmp_path: Path) -> None:
    ways = [manage(llama(), tmp_path, cpu="1GiB", nvme=None, **FLOAT8), manage(llama(), tmp_path, **FLOAT8)]
    for model in ways:
        model.compile(backend="aot_eager")
    assert train(ways[0]) == train(ways[1])
    assert same(*(bits(model) for model in ways))


def test_drawn_and_loaded_models_have_them(tmp_path: Path) -> None:
    source: Any = llama()
    source.save_pretrained(tmp_path / "model")
    config = gemini.GeminiConfig(float8=True, device="cpu", memory=gemini.MemoryBudget(cpu="1GiB"))
    loaded = gemini.from_pretrained(tmp_path / "model", config)
    torch.manual_seed(5)
    drawn = gemini.from_config(source.config, config)
    torch.manual_seed(5)
    built = manage(transformers.AutoModelForCausalLM.from_config(source.config), tmp_path, **FLOAT8)
    wrapped = manage(source, tmp_path, **FLOAT8)
    assert len(of_float8(loaded)) == len(of_float8(drawn)) == len(of_float8(built)) == 21
    assert train(loaded) == train(wrapped) and train(drawn) == train(built)
    assert not of_float8(gemini.release(loaded)) and not of_float8(gemini.release(drawn))


@pytest.mark.parametrize("end", ["release", "refused"])
def test_the_model_is_as_it_was_afterwards(end: str, tmp_path: Path) -> None:
    """The same layers, with what hung on them before and meanwhile."""
    model: Any = llama()
    layers, seen = dict(model.named_modules()), list[str]()
    layers["model.layers.0.mlp.up_proj"].register_forward_hook(lambda *_: seen.append("hook"))
    before = {name: set(module.__dict__) for name, module in layers.items()}
    if end == "refused":
        with pytest.raises(gemini.BudgetExceeded):
            manage(model, tmp_path, cpu="1KiB", nvme=None, **FLOAT8)
    else:
        model = manage(model, tmp_path, **FLOAT8)
        train(model)
        assert seen == ["hook"] * STEPS
        gemini.release(model)
    assert dict(model.named_modules()) == layers and not of_float8(model)
    assert {name: set(module.__dict__) for name, module in layers.items()} == before


def test_what_torchao_refuses_leaves_every_layer_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[nn.Module]()

    def third_fails(like: nn.Module, **how: Any) -> nn.Module:
        made.append(like)
        if len(made) == 3:
            raise RuntimeError("a layer that cannot be converted")
        return convert_to_float8_training(like, **how)  # type: ignore[no-any-return]

    monkeypatch.setattr("torchao.float8.convert_to_float8_training", third_fails)
    model = llama()
    with pytest.raises(RuntimeError, match="a layer that cannot be converted"):
        manage(model, tmp_path, **FLOAT8)
    assert not of_float8(model) and len(made) == 3


def test_what_stays_as_it_is(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow, self.router = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(32, 16)
            self.exact, self.base = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [self.wide(x), self.exact(x), self.base(x), self.narrow(x).mean() + self.router(x).mean()]
            return x + sum(parts)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x).float().square().mean()  # type: ignore[no-any-return]

    model = manage(Model(), tmp_path, keep_fp32=["blocks.*.exact"], **FLOAT8)
    assert of_float8(model) == [f"blocks.{n}.{name}" for n in range(2) for name in ("wide", "base")]
    model(torch.randn(16, 32)).backward()
    with pytest.raises(ValueError, match="float8=True: this GPT2LMHeadModel has no nn.Linear in a repeated block"):
        manage(gpt2(), tmp_path, **FLOAT8)


def test_adapters_stay_in_the_compute_dtype(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(r=16, target_modules="all-linear"))
    model = manage(adapted, tmp_path, **FLOAT8)
    assert of_float8(model) and all(name.endswith("base_layer") for name in of_float8(model))
    assert train(model)


def test_it_goes_with_bf16_and_whole_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in ("fp16", "fp32"):
        with pytest.raises(ValueError, match=f'float8=True with precision="{precision}": use precision="bf16"'):
            gemini.GeminiConfig(precision=precision, float8=True)
    with pytest.raises(TypeError, match="float8= is True or False, got 'on'"):
        gemini.GeminiConfig(float8="on")  # type: ignore[arg-type]
    with pytest.raises(GeminiError, match="no MLPs and no experts"):
        manage(llama(), tmp_path, tile_tokens="mlp=8", **FLOAT8)  # scales are of all tokens
    manage(llama(), tmp_path, tile_tokens="head=8", **FLOAT8)
    with pytest.raises(ValueError, match=r"tensor parallel does not slice layers that multiply in float8 \('model.lay"):
        gemini.trace(llama(), batch(0), precision="bf16", target="cpu", tensor_parallel=2, float8=True)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ImportError, match="float8=True needs torchao, the extra 'float8' of Gemini"):
        manage(llama(), tmp_path, **FLOAT8)


def test_a_trace_knows_products_in_float8(tmp_path: Path) -> None:
    how: dict[str, Any] = {"precision": "bf16", "target": "cpu"}
    plain, quick = (gemini.trace(llama(), batch(0), **how, float8=on) for on in (False, True))
    assert quick.float8 and not plain.float8 and quick.from_json(quick.to_json()) == quick and "float8" in str(quick)

    def shapes(trace: gemini.MemoryTrace, dtype: str) -> list[Product]:
        return [p._replace(dtype="") for m in trace.moments for p in m.products if dtype in ("all", p.dtype)]

    assert sum(p.times for p in shapes(quick, "float8")) == 3 * 3 * 7 and quick.flops == plain.flops
    assert [p.flops for p in shapes(quick, "")] == [p.flops for p in shapes(plain, "all") if 96 in p[:4]], "the head"
    # As they compute without being compiled: what makes codes is many operations.
    eager = gemini.trace(by_hand(llama()), batch(0), **how)
    assert eager.float8 is False, "emulated products are in the compute dtype"
    assert sum(m.num_ops for m in eager.moments) > 2 * sum(m.num_ops for m in quick.moments)
    for trace, model, config in ((quick, llama(), {}), (plain, llama(), FLOAT8)):
        with pytest.raises(PlanMismatch, match="the trace has float8=.* and this run has"):
            manage(model, tmp_path, trace=trace, **config)
    assert train(manage(llama(), tmp_path, trace=quick, **FLOAT8))
