"""Attention over sequences of which every rank has a part, around the kernel that the user has chosen.

Two kinds. *Ulysses*: an all-to-all makes of a part of the tokens of all heads all tokens of a part of the heads, the
kernel computes as ever, another one takes its result back; a rank has each head whole, and all ranks have the same to
do. *Gathered*: keys and values of the whole sequence are gathered, and a rank computes the rows of its own queries;
any number of heads will do, and the last rank of a causal model has most to do.

transformers asks for an attention by its name. One is registered for each kernel ("gemini_context_sdpa"), which finds
out by the module that calls it whose it is.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.ranks.agree import Facts, agree
from gemini.ranks.wire import Tag, Wire, add_up

_WHAT = "an exchange of attention (context parallel)"


class Exchange:
    """The exchange among the ranks of one context group.

    Args:
        meet: waits until every rank of the model stands at such an exchange, serving those that still need weights. So
            ranks may take different paths in between.
    """

    def __init__(self, wire: Wire, meet: Callable[[], object]):
        self._wire, self._meet = wire, meet
        self.rank, self.size = wire.rank, wire.size

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """``parts[i]`` goes to rank i; ``[i]`` of the result is what rank i has sent."""
        self._meet()
        each = [1] * self.size
        return self._wire.all_to_all(Tag.CONTEXT, parts, each, each, _WHAT)

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """``own`` of every rank, stacked."""
        self._meet()
        return self._wire.swap(Tag.CONTEXT, own, _WHAT)

    def compare(self, facts: Facts, refusal: Exception | None) -> None:
        """See that ranks are about to compute parts of one batch: as :func:`gemini.ranks.agree.agree`."""
        self._meet()
        agree(self._wire, "the part of a batch", lambda: facts, refusal, words="batch")


class ImaginedExchange(Exchange):
    """The last rank of ``size``, as it looks to who traces it: what others would send has shapes and no values.

    ``sent``: bytes that it would send, under "cp".
    """

    def __init__(self, size: int, sent: Counter[str]):
        self.rank, self.size, self._sent = size - 1, size, sent

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """Give memory of the shape of ``parts``."""
        self._sent["cp"] += parts.nbytes * (self.size - 1) // self.size
        return torch.empty_like(parts.contiguous())

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Give memory for as many of the shape of ``own`` as there are ranks."""
        self._sent["cp"] += own.nbytes * (self.size - 1)
        return own.new_empty((self.size, *own.shape))

    def compare(self, facts: Facts, refusal: Exception | None) -> None:
        """Let the others have the same."""


class _ExchangeDims(torch.autograd.Function):
    """Exchange tensors of which each rank has a part along dim ``join`` for tensors that are whole there, with a
    part along dim ``split``. All are of one dtype, and travel together.
    """

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, split: int, join: int, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how, size = (exchange, split, join), exchange.size
        stacked = [torch.stack(part.chunk(size, split)) for part in parts]
        # One message for queries, keys and values: what counts on the wire is how many there are.
        received = exchange.all_to_all(torch.cat([part.view(size, -1) for part in stacked], 1))
        pieces = received.split([part[0].numel() for part in stacked], 1)
        return tuple(
            torch.cat(piece.reshape(part.shape).unbind(), join) for piece, part in zip(pieces, stacked, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The way back is the same exchange with the dims swapped, so it needs nothing of the forward.
        exchange, split, join = ctx.how
        return None, None, None, *_ExchangeDims.apply(exchange, join, split, *grads)


class _Gather(torch.autograd.Function):
    """The parts of all ranks along ``dim``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, dim: int) -> torch.Tensor:
        ctx.how = exchange, dim
        return torch.cat(exchange.all_gather(x).unbind(), dim)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange, dim = ctx.how
        received = exchange.all_to_all(torch.stack(grads[0].chunk(exchange.size, dim)))
        # In fp32 and in the order of ranks, whatever arrived first: the same bits in every run.
        total = torch.empty_like(received[0], dtype=torch.float32)
        add_up(received.unbind(), total)
        return total.to(received.dtype), None, None


PREFIX = "gemini_context_"
ULYSSES, GATHERED = "ulysses", "gathered"
Attention = Callable[..., tuple[torch.Tensor, Any]]

# transformers knows an attention by its name alone, and calls it with the module: that says whose it is.
_attending: weakref.WeakKeyDictionary[nn.Module, Attend] = weakref.WeakKeyDictionary()


def register(kernel: str) -> str:
    """Tell transformers of the attention around ``kernel``; its name."""
    from transformers import AttentionInterface

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        found = _attending.get(module)
        if found is None:
            raise GeminiError(
                f"the attention {PREFIX}{kernel} belongs to a model that is under context parallel, and this "
                f"{type(module).__name__} is not in one: its config says attn_implementation={PREFIX + kernel!r}, set "
                f"{kernel!r} in its place"
            )
        return found(module, *args, **kwargs)

    AttentionInterface.register(PREFIX + kernel, attention)
    return PREFIX + kernel


class Attend:
    """The attention of one model.

    Args:
        kernel: as transformers calls it.
        kind: "ulysses", "gathered", or "auto" (Ulysses where the heads can be divided).
    """

    def __init__(self, exchange: Exchange, kernel: str, kind: str):
        self._exchange, self._kernel, self._kind = exchange, kernel, kind
        self.in_forward = False
        """Whether the model computes a part of a sequence now."""
        self.num_calls = 0
        self._masks: dict[Any, torch.Tensor] = {}

    def serve(self, model: nn.Module) -> None:
        """Become the attention of all modules of a model."""
        for module in model.modules():
            _attending[module] = self

    def leave(self, model: nn.Module) -> None:
        """Leave the modules of a model without it."""
        for module in model.modules():
            _attending.pop(module, None)

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **how: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Compute like transformers: ``query`` is batch x heads x tokens of this rank x width, and so are ``key``
        and ``value``, of as many heads or fewer; the result is batch x tokens x heads x width.
        """
        if not self.in_forward and not torch.is_grad_enabled():  # what is computed again in backward has gradients
            raise GeminiError(
                "a part of a model under context parallel was called by itself: call the whole model, with a batch "
                "of gemini.sequence_batch, or (without gradients) with whole sequences"
            )
        self._refuse_what_is_not_divided(module, attention_mask, how)
        self.num_calls += 1
        # They count within this part; the kernel would look for packed sequences in them.
        for name in ("position_ids", "cache_position"):
            how.pop(name, None)
        causal = how.pop("is_causal", None)
        causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
        way = self._ulysses if self.kind_for(query.shape[1]) == ULYSSES else self._gathered
        return way(module, causal, how, query, key, value), None

    def kind_for(self, heads: int) -> str:
        """Choose the kind that divides so many query heads. Raises GeminiError if Ulysses was asked for and cannot."""
        if self._kind == "auto":
            return ULYSSES if heads % self._exchange.size == 0 else GATHERED
        if self._kind == ULYSSES and heads % self._exchange.size:
            can = ", ".join(str(n) for n in range(2, heads + 1) if heads % n == 0)
            raise GeminiError(
                f'context_attention="ulysses" divides {heads} heads among cp={self._exchange.size} ranks, and they '
                f'must divide evenly: cp can be {can}. Or leave it "auto", or set "gathered", for any number of heads'
            )
        return self._kind

    def _ulysses(self, module: nn.Module, causal: bool, how: dict[str, Any], *qkv: torch.Tensor) -> torch.Tensor:
        query, key, value = qkv
        size, heads, groups = self._exchange.size, key.shape[1], query.shape[1] // key.shape[1]
        # As few copies as will do: keys travel that often.
        times = next(t for t in range(1, groups + 1) if groups % t == 0 and heads * t % size == 0)
        if times > 1:  # each rank needs a whole number of heads of keys
            key, value = (x.repeat_interleave(times, 1) for x in (key, value))
        query, key, value = _ExchangeDims.apply(self._exchange, 1, 2, query, key, value)
        # Kernels of transformers repeat keys by this attribute, which counts the heads of the whole model.
        with _groups_of(module, query.shape[1] // key.shape[1]):
            out = self._compute(module, causal, how, query, key, value)
        (out,) = _ExchangeDims.apply(self._exchange, 1, 2, out)
        return out

    def _gathered(self, module: nn.Module, causal: bool, how: dict[str, Any], *qkv: torch.Tensor) -> torch.Tensor:
        query, key, value = qkv
        tokens, width = query.shape[2], key.shape[-1]
        # Together, so that keys and values are one message.
        both = _Gather.apply(torch.cat((key, value), -1), self._exchange, 2)
        if causal:
            # What comes after this part is seen by none of its tokens: the kernel need not mask it.
            both = both[:, :, : (self._exchange.rank + 1) * tokens]
        return self._compute(module, causal, how, query, both[..., :width], both[..., width:])

    def _compute(self, module: nn.Module, causal: bool, how: dict[str, Any], *qkv: torch.Tensor) -> torch.Tensor:
        """Call the kernel. Of a causal model the last query sees all keys, and each one before it one fewer."""
        mask, (query, key, _) = None, qkv
        if causal and self._kernel == "eager":
            mask = self._mask(query, key, additive=True)
        elif causal and self._kernel == "sdpa" and query.shape[2] < key.shape[2]:
            mask = self._mask(query, key, additive=False)
        return kernel_of(module, self._kernel)(module, *qkv, mask, is_causal=causal, **how)[0]

    def _mask(self, query: torch.Tensor, key: torch.Tensor, *, additive: bool) -> torch.Tensor:
        rows, columns = query.shape[2], key.shape[2]
        if query.is_cuda and not additive:  # kernels of a GPU know this one without its values
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(rows, columns)
        sought = (rows, columns, query.device, query.dtype if additive else torch.bool)
        if sought not in self._masks:
            # Layers in turn ask for the same one; of the sizes before it nobody asks again.
            self._masks.clear()
            sees = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)[None, None]
            if additive:
                sees = torch.zeros_like(sees, dtype=query.dtype).masked_fill_(~sees, torch.finfo(query.dtype).min)
            self._masks[sought] = sees
        return self._masks[sought]

    def _refuse_what_is_not_divided(self, module: nn.Module, mask: Any, how: dict[str, Any]) -> None:
        what = [name for name in ("position_bias", "s_aux", "cu_seq_lens_q", "cache") if how.get(name) is not None]
        if mask is not None:
            what.append("an attention mask")
        if "flash" not in self._kernel and how.get("sliding_window") is not None:
            what.append("a sliding window")
        if what:
            raise GeminiError(
                f"{type(module).__name__} gives its attention {' and '.join(what)}, which context parallel does not "
                "divide among ranks: train it without a dimension cp"
            )


def kernel_of(module: nn.Module, name: str) -> Attention:
    """The attention that transformers knows by ``name``; of a model's own eager one by the file of ``module``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name == "eager":
        found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if found is None:
            raise GeminiError(
                f"{type(module).__name__} has no eager attention that context parallel could call: build the model "
                'with attn_implementation="sdpa"'
            )
        return found  # type: ignore[no-any-return]
    return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]


@contextmanager
def _groups_of(module: nn.Module, groups: int) -> Any:
    """Let an attention know how many query heads share a head of keys, while it has some of its heads."""
    before = getattr(module, "num_key_value_groups", None)
    if before is not None:
        module.num_key_value_groups = groups  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is not None:
            module.num_key_value_groups = before
