"""A step with Liger's kernels, traced without them: what they keep by arithmetic, the work of the model as it is."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import gemini
from gemini.errors import PlanMismatch
from gemini.planning.trace import MemoryTrace, Phase
from gemini.tracing.fused import FAMILIES

LAYERS, HIDDEN, INNER, WORDS, HEADS, KV = 3, 64, 160, 512, 4, 2
BATCH, LENGTH = 2, 512
TOKENS = BATCH * LENGTH


def config(kind: str, **more: Any) -> Any:
    return AutoConfig.for_model(
        kind, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, vocab_size=WORDS, head_dim=16,
        num_attention_heads=HEADS, num_key_value_heads=KV, use_cache=False, tie_word_embeddings=False, **more,
    )  # fmt: skip


def traced(kind: str = "llama", **how: Any) -> MemoryTrace:
    ids = torch.empty(BATCH, LENGTH, dtype=torch.int64, device="meta")
    how = {"checkpointing": "non-reentrant", **how}
    return gemini.trace(config(kind), {"input_ids": ids, "labels": ids}, target="cuda", **how)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_kept_block_saves_what_the_kernels_do(kind: str) -> None:
    """In bf16, of each token: both norms' inputs and what they make, queries, keys, values, what attention makes, as
    autograd keeps it and as it is multiplied, and gate, up and their product; in fp32 a number per row and head.
    """
    fused, own = (traced(kind, kept_blocks=LAYERS, kernels=kernels) for kernels in ("liger", None))
    of_attention = HEADS * 16 * 3 + 2 * KV * 16
    by_hand = 2 * (4 * HIDDEN + of_attention + 3 * INNER)
    if kind == "qwen3":  # its norms of queries and keys are not Liger's: fp32 values, before and after
        assert fused.checkpoint_bytes < own.checkpoint_bytes
        return
    assert fused.checkpoint_bytes / LAYERS / TOKENS == pytest.approx(by_hand, rel=0.02)
    assert fused.checkpoint_bytes < 0.8 * own.checkpoint_bytes and fused.peak_bytes < own.peak_bytes


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, "non-reentrant"])
def test_the_work_is_that_of_the_model(kind: str, checkpointing: Any) -> None:
    """As many products, fewer operations, and each param has its gradient."""
    fused, own = (traced(kind, checkpointing=checkpointing, kernels=kernels) for kernels in ("liger", None))
    assert fused.kernels == "liger" and fused.flops == own.flops
    assert sum(m.num_ops for m in fused.moments) < 0.8 * sum(m.num_ops for m in own.moments)
    gradients = [sorted(p for m in trace.moments for p in m.gradients) for trace in (fused, own)]
    assert gradients[0] == gradients[1]
    blocks = [m for m in fused.moments if m.module.startswith("model.layers.") and m.phase is not Phase.FORWARD]
    like = [m for m in own.moments if m.module.startswith("model.layers.") and m.phase is not Phase.FORWARD]
    assert sum(m.touched_bytes for m in blocks) < 0.8 * sum(m.touched_bytes for m in like)
    assert MemoryTrace.from_json(fused.to_json()) == fused


def test_what_they_are_not_for_is_refused() -> None:
    ids = torch.empty(1, 64, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    with pytest.raises(ValueError, match="for language models of llama, mistral"):
        gemini.trace(
            AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=64), batch, kernels="liger"
        )
    with pytest.raises(ValueError, match="with silu"):
        gemini.trace(config("llama", hidden_act="gelu"), batch, kernels="liger")
    with pytest.raises(ValueError, match="without tiles"):
        traced(kernels="liger", tile_tokens=256)
    with pytest.raises(ValueError, match="there is liger"):
        traced(kernels="apex")


def test_a_model_without_them_does_not_take_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(config("llama"))
    model.gradient_checkpointing_enable()
    how = gemini.GeminiConfig(precision="bf16", device="cpu", trace=traced(kernels="liger"))
    with pytest.raises(PlanMismatch, match="computes without them"):
        gemini.GeminiDDP(model, how)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    monkeypatch.setattr(type(model.model.norm), "forward", forward)
    gemini.GeminiDDP(model, how)
