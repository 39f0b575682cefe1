"""Families for context parallel, what ranks are asked to run with parts of sequences, and what one process gets."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gemini
from tests.world import world_of

VOCAB = 64
_LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_MHA = {name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"}
_NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}


def _of(name: str, classes: str, **config: Any) -> Callable[[str], nn.Module]:
    def make(attention: str) -> nn.Module:
        module = importlib.import_module(f"transformers.models.{name}")
        made = getattr(module, f"{classes}Config")(**config, attn_implementation=attention)
        return getattr(module, f"{classes}{'LMHeadModel' if name == 'gpt2' else 'ForCausalLM'}")(made)  # type: ignore[no-any-return]

    return make


FAMILIES: dict[str, Callable[[str], nn.Module]] = {
    "llama": _of("llama", "Llama", **_LLAMA),
    "qwen2": _of("qwen2", "Qwen2", **_LLAMA),
    "qwen3": _of("qwen3", "Qwen3", **_LLAMA, head_dim=8),
    "mistral": _of("mistral", "Mistral", **_LLAMA, sliding_window=None),
    "mixtral": _of("mixtral", "Mixtral", **_LLAMA, num_local_experts=4, sliding_window=None),
    "gpt_neox": _of("gpt_neox", "GPTNeoX", **_MHA, **_NO_DROPOUT),
    "gpt2": _of(
        "gpt2", "GPT2", vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=8, n_positions=128, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
    "opt": _of(
        "opt", "OPT", vocab_size=VOCAB, hidden_size=64, word_embed_proj_dim=64, ffn_dim=96, num_hidden_layers=2,
        num_attention_heads=8, max_position_embeddings=128, dropout=0.0, attention_dropout=0.0, pad_token_id=0,
    ),
    "olmo2": _of("olmo2", "Olmo2", **_LLAMA),
    "odd_heads": _of(
        "llama", "Llama", **{**_LLAMA, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One training step on parts of sequences."""

    family: str = "llama"
    cp: int = 2
    attention: str = "sdpa"
    checkpointing: bool = False
    nvme: str = ""
    tile_tokens: int | None = None
    tokens: int = 48
    device: str = "cpu"


@dataclass
class Result:
    """What a rank has seen of it."""

    loss: float
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    norm: float = 0.0
    evaluated: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)


def divides(cp: int, family: str) -> bool:
    """Whether so many ranks can divide the heads of attention."""
    return (6 if family == "odd_heads" else 8) % cp == 0


def make(case: Case) -> nn.Module:
    torch.manual_seed(11)
    model = FAMILIES[case.family](case.attention).train()
    if case.checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def batch(case: Case, which: int = 0) -> dict[str, torch.Tensor]:
    """Two sequences with labels masked unevenly: all of the first part, and padding at the end of the second."""
    ids = torch.randint(1, VOCAB, (2, case.tokens), generator=torch.Generator().manual_seed(which))
    labels = ids.clone()
    labels[:, :5] = -100
    labels[0, : case.tokens // 2 + 3] = -100
    labels[1, -7:] = -100
    return {"input_ids": ids, "labels": labels}


def alone(case: Case, samples: int) -> Result:
    """The mean over ``samples`` batches in one process, without Gemini."""
    model = make(case)
    losses = []
    for which in range(samples):
        loss = model(**batch(case, which)).loss / samples
        loss.backward()
        losses.append(float(loss.detach()))
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads.values()]))
    return Result(sum(losses), grads, float(norm))


def step(case: Case, wrong: str = "") -> Result:
    """The same as ranks: ``cp`` of them have parts of the same batch, the others other batches."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // case.cp, case.cp), mesh_dim_names=("dp", "cp"))
    how = {"nvme_path": case.nvme} if case.nvme else {}
    config = gemini.GeminiConfig(
        precision="fp32", device=case.device, memory=gemini.MemoryBudget(cpu="128MiB", **how), max_chunk=8000,
        tile_tokens=case.tile_tokens,
        placement=gemini.StaticPlacement(weights_on_nvme=1.0, optimizer_on_nvme=1.0) if case.nvme else "auto",
    )  # fmt: skip
    model: Any = gemini.GeminiDDP(make(case), config, mesh=mesh)
    rank, parts = gemini.data_rank(mesh)
    assert parts == world // case.cp
    whole = batch(case, dist.get_rank() if wrong == "batch" else rank)
    if wrong == "whole":
        model(**whole)
    whole = {name: value.to(model.device) for name, value in whole.items()}
    loss = model(**gemini.sequence_batch(whole, mesh)).loss
    with torch.no_grad():  # between forward and backward: what is computed again is of the training forward
        evaluated = float(model(**whole).loss)
    loss.backward()
    losses: list[Any] = [None] * world
    dist.all_gather_object(losses, float(loss.detach()))
    result = Result(sum(losses) / world, evaluated=evaluated)
    for handle in world_of(model).handles:
        grad = model.full_grad(handle.name)
        if grad is not None:
            result.grads[handle.name] = grad.clone()
    result.norm = float(model.clip_grad_norm_(1e9))
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-3)
    optimizer.step()
    world_of(model).check()
    result.sent = dict(world_of(model).shards.sent_last_step)
    return result


def differences(found: Result, wanted: Result) -> tuple[float, float]:
    """Of the loss, and the largest of any gradient relative to the largest gradient of its param; of a param whose
    gradients are rounding alone (the bias of keys), to a thousandth of the largest one of the model.
    """
    assert found.grads.keys() == wanted.grads.keys()
    least = max(float(grad.abs().max()) for grad in wanted.grads.values()) / 1000
    worst = max(
        float((found.grads[name] - grad).abs().max()) / max(float(grad.abs().max()), least)
        for name, grad in wanted.grads.items()
    )
    return abs(found.loss - wanted.loss), worst
