"""What the tests of 4-bit bases share: a small Llama on disk, and the same model with adapters on its codes."""

from pathlib import Path
from typing import Any

import peft
import torch
import transformers

import gemini
from tests.train import helpers

STEPS = 3


def save_base(folder: Path) -> None:
    helpers.llama(layers=4).to(torch.bfloat16).save_pretrained(folder)


def base_of(folder: Path, *, double: bool = True, kind: str = "nf4", **how: Any) -> Any:
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=double, **how,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )


def quantized(folder: Path, *, checkpointing: bool = False, dora: bool = False, **how: Any) -> Any:
    """Adapters that add something from the start, on the base in ``folder``."""
    model = base_of(folder, **how)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    torch.manual_seed(1)
    lora = peft.LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights="gaussian", use_dora=dora
    )
    return peft.get_peft_model(model, lora, autocast_adapter_dtype=False).train()


def adam_of(model: Any) -> gemini.HybridAdam:
    return gemini.HybridAdam([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def losses_of(model: Any, optimizer: Any, steps: Any = range(STEPS)) -> list[float]:
    """The ordinary loop."""
    losses = []
    for seed in steps:
        loss = model(**helpers.batch(seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
