"""Context parallel: a model computes parts of sequences, each rank of a mesh's ``cp`` its own.

A batch of :func:`sequence_batch` is the part that one rank computes, and carries a mark. A forward with it exchanges
keys and values inside attention; one without computes whole sequences as ever, and that is for evaluation and
``generate``: with gradients it is refused. Models can do it in which attention alone looks at other tokens, and asks
transformers for it by name; all others are refused by the name of what stands in the way.

Attention goes around the kernel that the user has chosen, as in *Ulysses*: an all-to-all makes of a part of the tokens
of all heads all tokens of a part of the heads, the kernel computes as ever, another one takes its result back; a rank
has each head whole, and all ranks have the same to do. transformers asks for an attention by its name. One is
registered for each kernel ("gemini_context_sdpa"), which finds out by the module that calls it whose it is.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from gemini.errors import GeminiError, RankMismatch
from gemini.patches import Overrides, replaced
from gemini.ranks.agree import Facts, agree, checksum_of
from gemini.ranks.group import place_in, size_of
from gemini.ranks.wire import Tag, Wire
from gemini.train.modules.reading import is_compiled

MARK = "sequence_part"
"""The entry of a batch that says which part it is: rank, number of parts, tokens of the whole, and two checksums."""
_INPUTS = ("input_ids", "inputs_embeds")
IGNORED = -100


def sequence_batch(batch: Mapping[str, Any], mesh: DeviceMesh | None) -> dict[str, Any]:
    """This rank's part of a batch for a causal language model, along ``cp`` of the mesh. Call ``model(**part)`` with
    it.

    Labels are shifted before they are cut, so the last token of a part still predicts the first token of the next part.
    The mean of the losses of all ranks is the mean over all labelled tokens of the batch (``labels`` of -100 do not
    count), however many are in each part. Gradients are those of this mean.

    Args:
        batch: ``input_ids`` (batch x tokens) or ``inputs_embeds`` (batch x tokens x width); ``labels`` as in
            transformers (not shifted), or ``shift_labels``; and any other tensors whose second dimension is the tokens.
            An ``attention_mask`` may only hide padding at the end, where labels must be -100. ``num_items_in_batch``:
            what the sum of the losses is divided by, if it is not the number of labelled tokens of this batch.
        mesh: None, or a mesh without a dimension ``cp`` of 2 or more, returns the batch unchanged.

    Returns:
        A dict of tensors: the parts, ``position_ids``, ``shift_labels``, ``num_items_in_batch``, and ``sequence_part``,
        by which the model recognizes a part.

    Raises:
        ValueError: if ``cp`` does not divide the number of tokens, for padding elsewhere than at the end, for packed
            sequences (``position_ids`` that start again), and for tensors that cannot be cut.
    """
    if mesh is None or (size := size_of(mesh, "cp")) == 1:
        return dict(batch)
    return part_of(batch, place_in(mesh, "cp"), size)


def part_of(batch: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Part ``rank`` of ``size`` parts of a batch (:func:`sequence_batch`)."""
    found = next((name for name in _INPUTS if isinstance(batch.get(name), torch.Tensor)), None)
    if found is None:
        raise ValueError(f"sequence_batch: the batch has neither of {' and '.join(_INPUTS)}, only {', '.join(batch)}")
    inputs = batch[found]
    tokens = inputs.shape[1] if inputs.dim() > 1 else 0
    _refuse_shape(found, inputs, tokens, 1)
    if tokens % size:
        raise ValueError(
            f"sequence_batch: {tokens} tokens cannot be cut into cp={size} parts: pad the sequences to "
            f"{-(-tokens // size) * size} (labels of {IGNORED} there), or cut them to {tokens // size * size}"
        )
    # What is read before it is cut; masks and positions may have other dimensions before that of the tokens.
    for name, dim in {"labels": 1, "shift_labels": 1, "attention_mask": -1, "position_ids": -1}.items():
        if isinstance(batch.get(name), torch.Tensor):
            _refuse_shape(name, batch[name], tokens, dim)
    whole = {name: value for name, value in batch.items() if value is not None}
    shifted = whole.pop("shift_labels", None)
    labels, items = whole.pop("labels", None), whole.pop("num_items_in_batch", None)
    if shifted is None and labels is not None:
        # Before they are cut: the last token of a part predicts the first one of the next.
        shifted = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    _refuse_padding(whole.pop("attention_mask", None), labels if labels is not None else shifted)
    positions = whole.pop("position_ids", None)
    expected = torch.arange(tokens, device=inputs.device)[None]
    if positions is not None and not bool((positions == expected).all()):
        raise ValueError(
            "sequence_batch: position_ids are not 0, 1, 2, ...: packed sequences are not cut. Give each its own row"
        )
    # Of the whole, before it is cut: a part goes on where the one before it ends.
    whole["position_ids"] = expected
    if shifted is not None:
        whole["shift_labels"] = shifted
    part = slice(rank * tokens // size, (rank + 1) * tokens // size)
    cut = {name: _cut(name, value, tokens, part) for name, value in whole.items()}
    if shifted is not None:
        cut["labels"] = cut["shift_labels"]
        # Of the whole batch: a part with few labels must not weigh as much as one with many.
        rated = int((shifted != IGNORED).sum()) if items is None else float(items)
        cut["num_items_in_batch"] = torch.tensor(rated / size, dtype=torch.float32, device=inputs.device)
    sums = [checksum_of(inputs), 0 if shifted is None else checksum_of(shifted)]
    cut[MARK] = torch.tensor([rank, size, tokens, *sums], dtype=torch.int64)
    return cut


def _cut(name: str, value: Any, tokens: int, part: slice) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    _refuse_shape(name, value, tokens, 1)
    return value[:, part].contiguous()


def _refuse_shape(name: str, value: torch.Tensor, tokens: int, dim: int) -> None:
    """Raise ValueError if a dimension of a tensor, the second or the last, is not the tokens of the inputs."""
    if value.dim() <= max(dim, 0) or value.shape[dim] != tokens:
        raise ValueError(
            f"sequence_batch: {name!r} has shape {tuple(value.shape)}, and its {'last' if dim < 0 else 'second'} "
            f"dimension should be the {f'{tokens} tokens' if tokens else 'tokens'}, so it cannot be cut"
        )


def _refuse_padding(mask: Any, labels: torch.Tensor | None) -> None:
    """Tokens at the end that are not rated change nothing of those before them: no mask is needed for them."""
    if mask is None or bool(mask.bool().all()):
        return
    padding = ~mask.bool()
    at_the_end = mask.dim() == 2 and not bool((padding[:, :-1] & ~padding[:, 1:]).any())
    if not at_the_end or labels is None or bool((padding & (labels != IGNORED)).any()):
        raise ValueError(
            "sequence_batch: attention_mask hides tokens. Padding may stand at the end of a sequence, with labels of "
            f"{IGNORED}; other masks are not cut"
        )


# ---- attention ------------------------------------------------------------------------------------------------------

_WHAT = "an exchange of attention (context parallel)"


class Exchange:
    """The exchange among the ranks of one context group. ``meet`` waits until every rank of the model stands at such an
    exchange, serving those that still need weights: ranks may take different paths in between.
    """

    def __init__(self, wire: Wire, meet: Callable[[], object]):
        self._wire, self._meet = wire, meet
        self.rank, self.size = wire.rank, wire.size

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """``parts[i]`` goes to rank i; ``[i]`` of the result is what rank i has sent."""
        self._meet()
        each = [1] * self.size
        return self._wire.all_to_all(Tag.CONTEXT, parts, each, each, _WHAT)

    def compare(self, facts: Facts, refusal: Exception | None) -> None:
        """See that ranks are about to compute parts of one batch: as :func:`gemini.ranks.agree.agree`."""
        self._meet()
        agree(self._wire, "the part of a batch", lambda: facts, refusal, words="batch")


class ImaginedExchange(Exchange):
    """The last rank of ``size``, as it looks to who traces it: what others would send has shapes and no values. The
    bytes that it would send are counted in ``sent``, under "cp".
    """

    def __init__(self, size: int, sent: Counter[str]):
        self.rank, self.size, self._sent = size - 1, size, sent

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        self._sent["cp"] += parts.nbytes * (self.size - 1) // self.size
        return torch.empty_like(parts.contiguous())

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


PREFIX = "gemini_context_"

# transformers knows an attention by its name alone, and calls it with the module: that says whose it is.
_attending: weakref.WeakKeyDictionary[nn.Module, Attend] = weakref.WeakKeyDictionary()


def register(kernel: str) -> str:
    """Tell transformers of the attention around ``kernel``; its name."""
    from transformers import AttentionInterface

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        if module not in _attending:
            raise GeminiError(
                f"the attention {PREFIX}{kernel} belongs to a model that is under context parallel, and this "
                f"{type(module).__name__} is not in one: its config says attn_implementation={PREFIX + kernel!r}, set "
                f"{kernel!r} in its place"
            )
        return _attending[module](module, *args, **kwargs)

    AttentionInterface.register(PREFIX + kernel, attention)
    return PREFIX + kernel


class Attend:
    """The attention of one model: ``kernel`` as transformers calls it."""

    def __init__(self, exchange: Exchange, kernel: str):
        self._exchange, self._kernel = exchange, kernel
        self.in_forward = False  # whether the model computes a part of a sequence now
        self.num_calls = 0
        self._masks: dict[Any, torch.Tensor] = {}

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
        # What checkpointing computes again is inside of a backward.
        if not self.in_forward and torch._C._current_graph_task_id() == -1:
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
        self.check_heads(query.shape[1])
        return self._by_heads(module, causal, how, query, key, value), None

    def check_heads(self, heads: int) -> None:
        """See that so many query heads can be divided among the ranks. Raises GeminiError."""
        if heads % self._exchange.size:
            raise GeminiError(
                f"context parallel divides the {heads} heads of attention among cp={self._exchange.size} ranks, and "
                "they must divide evenly: use a mesh whose cp divides them"
            )

    def _by_heads(
        self,
        module: nn.Module,
        causal: bool,
        how: dict[str, Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        size, heads, groups = self._exchange.size, key.shape[1], query.shape[1] // key.shape[1]
        # As few copies as will do: keys travel that often.
        times = next(t for t in range(1, groups + 1) if groups % t == 0 and heads * t % size == 0)
        if times > 1:  # each rank needs a whole number of heads of keys
            key, value = (x.repeat_interleave(times, 1) for x in (key, value))
        query, key, value = _ExchangeDims.apply(self._exchange, 1, 2, query, key, value)
        # Kernels of transformers repeat keys by this attribute, which counts the heads of the whole model.
        with replaced(module, "num_key_value_groups", query.shape[1] // key.shape[1]):
            # Of a causal model the last query sees all keys, and each one before it one fewer.
            mask = self._causal_mask(query) if causal and self._kernel == "eager" else None
            out = kernel_of(module, self._kernel)(module, query, key, value, mask, is_causal=causal, **how)[0]
        (out,) = _ExchangeDims.apply(self._exchange, 1, 2, out)
        return out

    def _causal_mask(self, query: torch.Tensor) -> torch.Tensor:
        """What is added to the scores of an eager attention: the least number where a key comes after the query."""
        tokens, dtype = query.shape[2], query.dtype
        sought = (tokens, query.device, dtype)
        if sought not in self._masks:
            # Layers in turn ask for the same one; of the sizes before it nobody asks again.
            self._masks.clear()
            sees = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()[None, None]
            self._masks[sought] = torch.zeros_like(sees, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)
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


def kernel_of(module: nn.Module, name: str) -> Callable[..., tuple[torch.Tensor, Any]]:
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


# ---- models ---------------------------------------------------------------------------------------------------------

_ALONG_THE_SEQUENCE = re.compile(
    r"Mamba|SSM|RWKV|Rwkv|LinearAttention|DeltaNet|ShortConv|Recurrent|RetNet|XLSTM|Hyena|Lightning\w*Attention"
)


def transformer_in(model: nn.Module) -> Any:
    """The outer model of transformers in ``model``. Raises GeminiError, naming why there is none to be divided."""
    from transformers import PreTrainedModel

    found = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    none = f"{type(model).__name__} is no model of transformers, whose attention could be divided"
    for why in _obstacles(found[0]) if found else [none]:
        raise GeminiError(f"context parallel (a mesh with a dimension cp): {why}. Use a mesh without cp")
    return found[0]


def _obstacles(model: Any) -> Iterator[str]:
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        yield f"{name} has an encoder and a decoder, whose sequences are two"
    parts = [part for part in getattr(config, "sub_configs", None) or () if getattr(config, part, None) is not None]
    if parts:
        yield f"{name} is made of several models ({', '.join(parts)}), whose sequences are others"
    if not model._can_set_attn_implementation():
        yield f"{name} does not ask transformers for its attention by name"
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        yield f"the forward of {name} takes no position_ids, so that a part would begin at position 0"
    kernel = config._attn_implementation
    if kernel not in ("eager", "sdpa") and "flash" not in str(kernel):
        yield f"attn_implementation={kernel!r} is not one it goes around (eager, sdpa, flash_attention_2)"
    yield from _layers(config, name, knows_windows="flash" in str(kernel))
    for path, module in model.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            yield f"positions of {name} begin after its padding token, and those of a part at 0, 1, 2, ..."
        if isinstance(module, (nn.Conv1d, nn.RNNBase)) or _ALONG_THE_SEQUENCE.search(type(module).__name__):
            kind = type(module).__name__
            yield f"{path} ({kind}) has a state along the sequence, which would begin anew in each part"
    if any(map(is_compiled, model.modules())):
        yield f"parts of {name} are compiled, and ranks meet inside its attention, where nothing can be compiled"
    for rope in _rope_types(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        if rope in ("dynamic", "longrope"):
            yield f"rotary positions of type {rope!r} depend on the length of the sequence, of which a rank sees a part"


def _layers(config: Any, name: str, *, knows_windows: bool) -> Iterator[str]:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention"] if windowed else []
    for kind in sorted(set(kinds) - {"full_attention", "attention"}):
        if kind not in ("sliding_attention", "chunked_attention"):
            yield f"{name} has layers of type {kind!r}, which look along the sequence otherwise than by full attention"
        elif kind == "chunked_attention" or not knows_windows:
            yield (
                f"{name} has layers of type {kind!r}, a window that its kernel "
                f"({config._attn_implementation}) knows from a mask of the whole sequence alone; flash_attention_2 "
                "takes a sliding window as a number, and sliding_window=None in the config turns it off"
            )


def _rope_types(rope: Any) -> Iterator[str]:
    if isinstance(rope, dict):
        for key, value in rope.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            yield from _rope_types(value)


class ContextParallel(Overrides):
    """Context parallel of one model, whose heads Gemini has divided among ``slices`` ranks. Raises GeminiError, naming
    why the model cannot compute parts; nothing was changed.
    """

    def __init__(self, model: nn.Module, exchange: Exchange, slices: int = 1):
        super().__init__()
        self._model, self._exchange = transformer_in(model), exchange
        self._kernel = self._model.config._attn_implementation
        self._attend = Attend(exchange, self._kernel)
        heads = getattr(self._model.config, "num_attention_heads", None)
        if isinstance(heads, int):
            self._attend.check_heads(heads // slices)
        configs = {id(m.config): m.config for m in self._model.modules() if hasattr(m, "config")}.values()
        self._configs = [config for config in configs if hasattr(config, "_attn_implementation_internal")]

    def put(self) -> None:
        """Let the model compute parts, until :meth:`take_away`."""
        _attending.update(dict.fromkeys(self._model.modules(), self._attend))
        self._name_attention(register(self._kernel))
        # Another library may have put a forward of its own on this model, which comes back.
        self._put(self._model, "forward", self._divided(self._model.forward))

    def take_away(self) -> None:
        """Let the model compute whole sequences again."""
        super().take_away()
        self._name_attention(self._kernel)
        for module in self._model.modules():
            _attending.pop(module, None)

    def _name_attention(self, name: str) -> None:
        for config in self._configs:
            config._attn_implementation_internal = name

    def _divided(self, whole: Any) -> Any:
        @functools.wraps(whole)
        def forward(*args: Any, **kwargs: Any) -> Any:
            mark = kwargs.pop(MARK, None)
            if mark is None:
                return self._on_whole_sequences(whole, args, kwargs)
            # Before any key travels: parts of different batches have shapes that meet, and mean nothing.
            self._compare(*mark.tolist())
            # A cache would hold the keys of this part only, and the next token would look at these.
            kwargs.setdefault("use_cache", False)
            # Counted, to find a model whose attention never asks: its parts would be computed as if they were wholes.
            self._attend.num_calls = 0
            with replaced(self._attend, "in_forward", True), self._watched_loss(kwargs):
                output = whole(*args, **kwargs)
            if not self._attend.num_calls:
                raise GeminiError(
                    f"context parallel: {type(self._model).__name__} did not call the attention functions of "
                    "transformers, so no rank saw the parts of the others. Use a mesh without cp"
                )
            return output

        return forward

    def _on_whole_sequences(self, whole: Any, args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise GeminiError(
                "this model is under context parallel and was given a batch that is not cut: train it with "
                "model(**gemini.sequence_batch(batch, mesh)), the same batch on all ranks of cp. Whole sequences are "
                "for evaluation, under torch.no_grad()"
            )
        # The user's own kernel for the time of this forward: no rank meets another in it.
        divided = self._configs[0]._attn_implementation
        self._name_attention(self._kernel)
        try:
            return whole(*args, **kwargs)
        finally:
            self._name_attention(divided)

    def _compare(self, number: int, size: int, *sums: int) -> None:
        """See that all ranks of a context group have parts of the same batch, each its own."""
        refusal, exchange = None, self._exchange
        if (number, size) != (exchange.rank, exchange.size):
            refusal = RankMismatch(
                f"this rank was given part {number} of {size} of a sequence, and is rank {exchange.rank} of "
                f"{exchange.size} along cp: cut batches with the mesh that the model was wrapped with"
            )
        exchange.compare(Facts(dict(zip(("length", "input", "labels"), sums, strict=True))), refusal)

    @contextmanager
    def _watched_loss(self, kwargs: dict[str, Any]) -> Iterator[None]:
        """See that a loss is made of labels that are shifted already, and that the model does not shift them again."""
        model = self._model
        if kwargs.get("shift_labels") is None:
            yield
            return
        original = model.loss_function
        name = getattr(original, "__name__", type(original).__name__)
        if name != "ForCausalLMLoss":
            raise GeminiError(
                f"context parallel: {type(model).__name__} has the loss {name}, and labels can be cut only for "
                "ForCausalLMLoss of transformers. Leave labels out of the batch, and compute the loss from the logits"
            )
        seen: list[bool] = []

        @functools.wraps(original)
        def watched(*args: Any, **how: Any) -> Any:
            seen.append(how.get("shift_labels") is not None)
            return original(*args, **how)

        # transformers keeps it there, if anybody has set one for this model.
        with replaced(model, "_loss_function", watched):
            yield
        if not all(seen) or not seen:
            raise GeminiError(
                f"context parallel: {type(model).__name__} does not pass shift_labels to its loss, and would shift "
                "labels again. Leave labels out of the batch, and compute the loss from the logits"
            )
