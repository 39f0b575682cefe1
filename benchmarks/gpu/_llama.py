"""The models of the GPU benchmarks: Llama shapes of public configs, weights that cost no time, a loss in pieces, FLOPs.

Drawing 8G normal numbers takes minutes on a CPU and says nothing here, so weights repeat one random tile
(:func:`quick_weights`). Logits of a vocabulary of 128,256 in fp32 are 16.8 GB at 32,768 tokens, so the loss is computed
over pieces of the sequence, recomputed in backward, as fused losses do (:class:`PiecewiseLlama`). Everybody who is
compared trains this model.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from benchmarks import _models

PIECE = 1024
"""Tokens whose logits exist at one time: 1024 x 128,256 x (2 + 4 + 4 + 4) bytes = 1.8 GB."""
STD = 0.02


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False

    @property
    def of_layer(self) -> int:
        """Elements of the matrices of a layer."""
        keys = self.hidden * self.hidden * self.kv_heads // self.heads
        return 2 * self.hidden * self.hidden + 2 * keys + 3 * self.hidden * self.intermediate

    @property
    def params(self) -> int:
        tables = self.hidden * self.vocab * (1 if self.tied else 2)
        return self.layers * (self.of_layer + 2 * self.hidden) + tables + self.hidden

    def flops(self, tokens: int, seq_len: int) -> int:
        """Of forward and backward of a step, without any recomputation.

        6 per token and matrix element that multiplies (the head, not the embedding), and 12 x layers x hidden x
        sequence for attention, of which the causal mask leaves half: "PaLM: Scaling Language Modeling with Pathways",
        arXiv:2204.02311, appendix B, which counts the whole of attention.
        """
        matrices = self.layers * self.of_layer + self.hidden * self.vocab
        return tokens * (6 * matrices + 6 * self.layers * self.hidden * seq_len)


SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8, 128256),  # config.json of Llama-3.1-8B
    "3b": Shape(3072, 8192, 28, 24, 8, 128256, tied=True),  # of Llama-3.2-3B
    "200m": Shape(1024, 2816, 12, 16, 16, 32000),
    "tiny": Shape(64, 128, 3, 4, 2, 512),
    "tiny-tied": Shape(64, 128, 3, 4, 2, 512, tied=True),
}


def config_of(shape: Shape, seq_len: int) -> LlamaConfig:
    return _models.llama_config(
        shape.hidden, shape.layers, shape.vocab, intermediate=shape.intermediate, heads=shape.heads,
        kv_heads=shape.kv_heads, positions=seq_len, tie_word_embeddings=shape.tied, dtype="bfloat16", bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


class PiecewiseLlama(LlamaForCausalLM):
    """The loss of each piece of the tokens by itself, its logits made again in backward. No logits are given."""

    reentrant = False
    """Of the blocks: DeepSpeed ZeRO-3 partitions params between forward and recomputation, which the non-reentrant kind
    refuses. Pieces of the loss are of that kind everywhere: the other would give the head a gradient for each of them,
    and DeepSpeed takes one."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> CausalLMOutput:
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        hidden, targets = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        piece = PIECE if self.config.vocab_size > 1000 else 16  # tiny models have several pieces as well
        losses = [
            checkpoint(self._loss_of, hidden[at : at + piece], targets[at : at + piece],
                       use_reentrant=False)
            for at in range(0, len(targets), piece)
        ]  # fmt: skip
        return CausalLMOutput(loss=torch.stack(losses).sum() / len(targets))

    def _loss_of(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.lm_head(hidden).float(), targets, reduction="sum")


@contextlib.contextmanager
def quick_weights() -> Iterator[None]:
    """Models that are built inside get repeated tiles of normal numbers, the same in every process; norms get ones."""
    # Whatever dtype and device are the default by now: the same numbers for everybody.
    generator = torch.Generator("cpu").manual_seed(0)
    tile = torch.randn(2**20, generator=generator, dtype=torch.float32, device="cpu") * STD

    def fill(module: Any) -> None:
        weight = module.weight.data
        if weight.is_meta or type(weight) is not torch.Tensor:  # nothing to fill, or a fake tensor
            return
        values = tile.to(weight.device, weight.dtype)
        flat = weight.view(-1)
        for at in range(0, flat.numel(), len(values)):
            part = flat[at : at + len(values)]
            part.copy_(values[: len(part)])

    kept = nn.Linear.reset_parameters, nn.Embedding.reset_parameters, PreTrainedModel._init_weights
    nn.Linear.reset_parameters = nn.Embedding.reset_parameters = fill  # type: ignore[assignment, method-assign]
    PreTrainedModel._init_weights = lambda self, module: None  # of the model inside as well: it would draw them again
    try:
        yield
    finally:
        nn.Linear.reset_parameters, nn.Embedding.reset_parameters, PreTrainedModel._init_weights = kept


def plain_model(shape: Shape, seq_len: int, device: str = "cpu") -> Any:
    """An ordinary bf16 model with all its weights on ``device``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device), quick_weights():
            model = PiecewiseLlama(config_of(shape, seq_len))
    finally:
        torch.set_default_dtype(before)
    return with_checkpointing(model)


def with_checkpointing(model: Any) -> Any:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": PiecewiseLlama.reentrant})
    return model


def make_batch(shape: Shape, tokens: int, seq_len: int, step: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    return _models.skewed_batch(shape.vocab, max(tokens // seq_len, 1), min(seq_len, tokens), step, device)
