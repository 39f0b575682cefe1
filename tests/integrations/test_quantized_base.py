"""QLoRA: adapters on a base of 4-bit codes compute the same bits wherever the codes live.

The plain side is transformers, PEFT and bitsandbytes as they are, in the ordinary loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import gemini
from tests.train import helpers

bitsandbytes = pytest.importorskip("bitsandbytes", reason="pip install '.[quantized]'")

BF16 = torch.bfloat16
STEPS = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama in bf16."""
    folder = tmp_path_factory.mktemp("base")
    helpers.llama(layers=4).to(BF16).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    """What Gemini puts in the place of the library's function stays for good: each test begins without."""
    functions = bitsandbytes.autograd._functions
    found = functions.MatMul4Bit
    functions.MatMul4Bit = found.__mro__[1] if hasattr(found, "_gemini_saves") else found
    yield


def quantized(base: Path, *, double: bool = True, checkpointing: bool = False, kind: str = "nf4", **how: Any) -> Any:
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=BF16, bnb_4bit_use_double_quant=double,
        **how,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, dtype=BF16, device_map="cpu"
    )
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights="gaussian")
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False).train()


def trained(model: Any) -> list[Any]:
    return [param for param in model.parameters() if param.requires_grad]


def losses_of(model: Any, optimizer: Any, steps: Any = range(STEPS)) -> list[float]:
    losses = []
    for seed in steps:
        loss = model(**helpers.batch(seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_run(make: Callable[[], Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make()
    return losses_of(model, gemini.HybridAdam(trained(model), lr=1e-2)), model.state_dict()


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name, value in wanted.items() if not helpers.same_bits(found[name], value)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("where", helpers.ALL_PLACEMENTS)
def test_same_bits_wherever_codes_live(where: str, checkpointing: bool, base: Path, tmp_path: Path) -> None:
    def make() -> Any:
        return quantized(base, checkpointing=checkpointing)

    losses, state = plain_run(make)
    model = helpers.wrap(make(), where, tmp_path)
    assert losses_of(model, gemini.HybridAdam(trained(model), lr=1e-2)) == losses
    assert_same(model.state_dict(), state)
    helpers.engine_of(model).check_invariants()
