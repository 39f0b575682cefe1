"""Mixtures of experts over ``ep``: models, batches, and the same steps in one process."""

import contextlib
from typing import Any, NamedTuple

import torch

import gemini
from tests import scaling
from tests.ranks.parallel_cases import Found, config_for, hybrid_adam, mesh_of, plain_adamw, train
from tests.ranks.test_slices import small

MAX_NORM = 0.5
KINDS = (
    "afmoe", "aria_text", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v32", "deepseek_v4",
    "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss",
    "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hy_v3", "hy_v4", "inkling2_text",
    "inkling_text", "jamba", "kimi_linear", "kolibri1", "laguna", "mellum", "minimax", "minimax_m2",
    "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe",
    "qwen3_next", "qwen4_exp_text", "solar_open",
)  # fmt: skip
"""Families with a plan for experts of which :func:`tiny` makes one that computes."""


class Case(NamedTuple):
    kind: str = "qwen3_moe"
    idle: bool = False
    """Whether the second half of the experts gets no token."""
    kernel: str | None = None
    checkpointing: bool = False
    backwards: int = 1
    in_no_sync: bool = True
    """Whether all backwards of a step but the last are."""
    balances: bool = False
    """Whether the router adds a loss for the balance of its experts."""


def deepseek() -> Any:
    """A layer without experts, one with four; experts are chosen in groups, and one is shared."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    }  # fmt: skip
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes)).float()


def tiny(kind: str) -> Any:
    """One of any family with four experts, from a few sizes that its config knows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    text = AutoConfig.for_model(kind).get_text_config()
    sizes = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "head_dim": 16, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
        "moe_num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2,
        "shared_expert_intermediate_size": 64, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "qk_head_dim": 16, "first_k_dense_replace": 1,
        "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64,
        "num_hidden_layers": 4 if kind in ("beam", "flint") else 2,  # of which the last ones have experts
    }  # fmt: skip
    known = {name: size for name, size in sizes.items() if getattr(text, name, None) is not None}
    config = type(text)(**known)
    config.use_cache = False
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().train()


def moe(case: Case) -> Any:
    """Two layers of four experts each."""
    model = (deepseek() if case.kind == "deepseek_v3" else small(case.kind)).train()
    model.config.output_router_logits = case.balances
    if case.kernel is not None:
        model.set_experts_implementation(case.kernel)
    if case.checkpointing:
        model.activation_checkpointing_enable()
    if case.idle:
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _, __, out: (*out[:-1], out[-1] % 2))
    return model


def ids_of(step: int, part: int) -> torch.Tensor:
    """Parts of a batch have other numbers of tokens."""
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(3, 128, (2, 12 + 4 * (part % 3)), generator=generator)


def loss_of(model: Any, step: int, part: int) -> torch.Tensor:
    ids = ids_of(step, part)
    return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def spread(sizes: dict[str, int], where: str, folder: str, case: Case, *, steps: int = 2, **settings: Any) -> Found:
    """Steps over a mesh."""
    mesh = mesh_of(sizes)
    model: Any = gemini.GeminiDDP(moe(case), config_for(where, folder, **settings), mesh=mesh)
    inside = settings.get("gradients") == "transient"
    part, world = gemini.data_rank(mesh)

    def compute(step: int) -> float:
        for number in range(case.backwards):
            with model.no_sync() if case.in_no_sync and number + 1 < case.backwards else contextlib.nullcontext():
                loss = loss_of(model, step, part + world * number)
                scaling.backward(model, loss / case.backwards)
        return float(loss.detach())

    max_norm = None if inside else MAX_NORM
    optimizer = hybrid_adam(model, step_in_backward=inside)
    return train(model, optimizer, compute, steps=steps, max_norm=max_norm, reads_grads=not inside)


def plainly(parts: int, case: Case, *, steps: int = 2, max_norm: float = MAX_NORM) -> Found:
    """The same in one process, with the mean over all parts."""
    model = moe(case)

    def compute(step: int) -> float:
        loss = torch.stack([loss_of(model, step, part) for part in range(parts)]).mean()
        loss.backward()
        return float(loss.detach())

    return train(model, plain_adamw(model), compute, steps=steps, max_norm=max_norm, reads_grads=True)


def worst_grad(found: Found, plain: Found) -> float:
    """In parts of the largest gradient."""
    largest = max(float(grad.abs().max()) for grad in plain.grads.values())
    return max(float((found.grads[name] - grad).abs().max()) for name, grad in plain.grads.items()) / largest
