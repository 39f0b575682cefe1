"""What the PEFT tests share: tiny models with adapters that are not at their start, and the methods that must work."""

from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import nn

from tests.train import helpers

CAUSAL = {"task_type": "CAUSAL_LM"}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

CONFIGS: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules="all-linear", **CAUSAL),
    "rslora with dropout": lambda: peft.LoraConfig(
        r=4, lora_dropout=0.3, use_rslora=True, target_modules="all-linear", **CAUSAL
    ),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules="all-linear", **CAUSAL),
    "modules to save": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], **CAUSAL
    ),
    "lora bias": lambda: peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], bias="all", **CAUSAL),
    "trainable tokens": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], trainable_token_indices=[1, 2], **CAUSAL
    ),
    "experts": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS, **CAUSAL),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, **CAUSAL),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "ia3": lambda: peft.IA3Config(
        target_modules=["q_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL
    ),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], **CAUSAL),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=["q_proj", "v_proj"], **CAUSAL),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=["q_proj", "v_proj"], **CAUSAL),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=["q_proj", "v_proj"], **CAUSAL),
    "oft coft": lambda: peft.OFTConfig(
        oft_block_size=4, coft=True, eps=1e-2, target_modules=["q_proj", "v_proj"], **CAUSAL
    ),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj", "v_proj"], **CAUSAL),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=["q_proj", "v_proj"], **CAUSAL),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=["q_proj", "v_proj"], **CAUSAL),
    "vblora": lambda: peft.VBLoRAConfig(
        r=4, num_vectors=16, vector_length=4, target_modules=["q_proj", "o_proj"], **CAUSAL
    ),
    "unilora": lambda: peft.UniLoraConfig(r=4, theta_d_length=64, target_modules=["q_proj", "o_proj"], **CAUSAL),
    "ln tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"], **CAUSAL),
    "adaption prompt": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **CAUSAL),
    "token embeddings": lambda: peft.TrainableTokensConfig(token_indices=[1, 2, 3], **CAUSAL),
}


def llama(**how: Any) -> Any:
    """Two layers are enough to see one go while the other is read."""
    return helpers.llama(layers=2, **how)


def move_adapters(model: nn.Module) -> None:
    """Add noise to what is trained: at its start an adapter adds nothing, and would hide what it should add."""
    generator = torch.Generator().manual_seed(3)
    for param in model.parameters():
        if param.requires_grad:
            param.data.add_(torch.randn(param.shape, generator=generator).to(param.dtype) * 0.05)


def maker(
    config: Callable[[], peft.PeftConfig] | str, base: Callable[..., nn.Module] = llama, **how: Any
) -> Callable[[], Any]:
    """Makes the same PeftModel of an fp32 base every time."""

    def make() -> Any:
        torch.manual_seed(1)
        model = peft.get_peft_model(base(**how), (CONFIGS[config] if isinstance(config, str) else config)())
        move_adapters(model)
        return model

    return make


def cast_params(model: nn.Module, precision: str) -> Any:
    """Params only: ``module.to`` would also cast the buffers of rotary embeddings."""
    for param in model.parameters():
        param.data = param.data.to(helpers.DTYPES[precision])
    return model


def seeded(model: Any, seed: int) -> torch.Tensor:
    """The loss on a batch, with the dropout of that seed."""
    torch.manual_seed(seed)
    return helpers.on_batch(model, seed)


def logits(model: Any, seed: int = 3) -> torch.Tensor:
    with torch.no_grad():
        return model(**helpers.batch(seed)).logits
