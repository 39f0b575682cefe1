"""Traces of models with Liger's kernels (https://github.com/linkedin/Liger-Kernel), which need not be there: a model on
fake tensors is put together as ``liger_kernel.transformers`` does it, of functions that keep and touch what its kernels
do. They compute nothing.

    norm     ops/rms_norm.py      keeps its input and a number per row; the gradient is written over that of the output
    SwiGLU   ops/swiglu.py        keeps both factors, over which their gradients are written
    rope     ops/rope.py          in place; keeps cos and sin
    head     ops/fused_linear_cross_entropy.py: logits of a few tokens at a time, over which their gradients are
             written; keeps the gradients of its input and of the weight, added up in the dtype of that

and of linear layers of ``torchao.float8`` (float8/float8_linear.py) as they are in compiled blocks: what makes codes of
a factor reads it twice, for its largest value and its codes, and keeps the factor itself for backward.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.patches import replaced_for_thread

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of which all four kernels are put in by its ``apply_liger_kernel_to_...``."""

_LIBRARY = torch.library.Library("gemini_fused", "FRAGMENT")


def _op(schema: str, results: Any) -> Any:
    """An operation of one kernel, of which there are results without values alone."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, results, "Meta")
    return getattr(torch.ops.gemini_fused, name).default


_norm = _op(
    "norm(Tensor x, Tensor weight) -> (Tensor, Tensor)",
    lambda x, weight: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)),
)
_norm_back = _op(
    "norm_back(Tensor(a!) dy, Tensor x, Tensor weight, Tensor rows) -> (Tensor(a!), Tensor)",
    lambda dy, x, weight, rows: (dy, torch.empty_like(weight)),
)
_swiglu = _op("swiglu(Tensor gate, Tensor up) -> Tensor", lambda gate, up: torch.empty_like(gate))
_swiglu_back = _op(
    "swiglu_back(Tensor(a!) gate, Tensor(b!) up, Tensor dy) -> (Tensor(a!), Tensor(b!))",
    lambda gate, up, dy: (gate, up),
)
_rotate = _op(
    "rotate(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin) -> (Tensor(a!), Tensor(b!))",
    lambda q, k, cos, sin: (q, k),
)
_cross_entropy = _op(
    "cross_entropy(Tensor(a!) logits, Tensor target) -> (Tensor(a!), Tensor)",
    lambda logits, target: (logits, logits.new_empty(target.shape, dtype=torch.float32)),
)


_codes = _op(
    "codes(Tensor x, Tensor once_more) -> (Tensor, Tensor)",
    lambda x, once_more: (x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty((), dtype=torch.float32)),
)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        flat = x.contiguous().view(-1, x.shape[-1])
        y, rows = _norm(flat, weight)
        ctx.save_for_backward(flat, weight, rows)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dx, dw = _norm_back(grads[0].contiguous().view(-1, grads[0].shape[-1]), *ctx.saved_tensors)
        return dx.view(grads[0].shape), dw


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        flat = [each.contiguous().view(-1, each.shape[-1]) for each in (gate, up)]
        ctx.save_for_backward(*flat)
        return _swiglu(*flat).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(each.view(grads[0].shape) for each in _swiglu_back(*ctx.saved_tensors, grads[0].contiguous()))


def _turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    return [each.transpose(1, 2) for each in _rotate(*(x.transpose(1, 2).contiguous() for x in (q, k)), cos, sin)]


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return tuple(_turned(q, k, cos, sin))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (*_turned(*grads, *ctx.saved_tensors), None, None)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        tokens, (words, width) = x.shape[0], weight.shape
        # As many logits at once as there are elements in its input, in a power of two of tokens.
        size = min(1 << (math.ceil(tokens / math.ceil(words / width)) - 1).bit_length(), tokens)
        dx, dw = torch.zeros_like(x), torch.zeros_like(weight) if weight.requires_grad else None
        losses, storage = x.new_zeros(tokens, dtype=torch.float32), x.new_empty(size, words)
        for start in range(0, tokens, size):
            part = x[start : start + size]
            logits = torch.mm(part, weight.t(), out=storage[: len(part)])
            logits, losses[start : start + size] = _cross_entropy(logits, target[start : start + size])
            torch.mm(logits, weight, out=dx[start : start + size])
            if dw is not None:
                torch.addmm(dw, logits.t(), part, out=dw)
        ctx.save_for_backward(dx, dw)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (*ctx.saved_tensors, None)


def _in_float8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (codes, scale), (turned, other) = _codes(a, a), _codes(b.t(), b.t())
    return torch._scaled_mm(codes, turned.t(), scale, other, out_dtype=a.dtype)


class _Float8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _in_float8(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad, wanted = grads[0].reshape(-1, grads[0].shape[-1]), ctx.needs_input_grad
        dx = _in_float8(grad, weight).view(x.shape) if wanted[0] else None
        return dx, _in_float8(grad.t(), x.reshape(-1, x.shape[-1])) if wanted[1] else None


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in float8."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Float8.apply(input, self.weight)
        return made if self.bias is None else made + self.bias


def _rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **how: Any) -> Any:
    return _Rope.apply(q, k, cos, sin)


def _with_loss(model: Any, input_ids: Any = None, labels: Any = None, **inputs: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    hidden = model.model(input_ids=input_ids, **inputs).last_hidden_state
    target = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return CausalLMOutputWithPast(loss=_HeadLoss.apply(hidden.view(-1, hidden.shape[-1]), model.lm_head.weight, target))


@contextmanager
def with_kernels(model: nn.Module, kernels: str | None) -> Iterator[None]:
    """Inside, ``model``, a copy that nobody else has, runs with them. ValueError for what they are not for."""
    if kernels is None:
        yield
        return
    inside: Any = getattr(model, "get_base_model", lambda: model)  # of adapters
    whole = inside()
    config: Any = getattr(whole, "config", None)
    is_known = kernels == "liger" and getattr(config, "model_type", "") in FAMILIES and hasattr(whole, "lm_head")
    if not is_known or config.hidden_act not in ("silu", "swish"):
        raise ValueError(
            f"kernels={kernels!r} for {type(whole).__name__}: there is liger, for language models of "
            f"{', '.join(FAMILIES)} with silu"
        )
    for layer in whole.model.layers:
        layer.mlp.forward = partial(lambda m, x: m.down_proj(_SwiGLU.apply(m.gate_proj(x), m.up_proj(x))), layer.mlp)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.forward = partial(lambda norm, x: _Norm.apply(x, norm.weight), norm)
    whole.model.norm.forward = partial(lambda norm, x: _Norm.apply(x, norm.weight), whole.model.norm)
    whole.forward = partial(_with_loss, whole)
    with replaced_for_thread(sys.modules[type(whole).__module__], "apply_rotary_pos_emb", _rope):
        yield
