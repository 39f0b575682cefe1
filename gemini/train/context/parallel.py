"""Context parallel: a model computes parts of sequences, each rank of a mesh's ``cp`` its own.

A batch of :func:`sequence_batch` is the part that one rank computes, and carries a mark. A forward with it exchanges
keys and values inside attention; one without computes whole sequences as ever, and that is for evaluation and
``generate``: with gradients it is refused. Models can do it in which attention alone looks at other tokens, and asks
transformers for it by name; all others are refused by the name of what stands in the way.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from gemini.errors import GeminiError, RankMismatch
from gemini.ranks.agree import Facts, checksum_of
from gemini.ranks.group import Ranks, place_in, size_of
from gemini.train.context.attention import Attend, Exchange, ImaginedExchange, register
from gemini.train.modules.reading import compiled_part

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
    size = 1 if mesh is None else size_of(mesh, "cp")
    if size == 1 or mesh is None:
        return dict(batch)
    return part_of(batch, place_in(mesh, "cp"), size)


def part_of(batch: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Part ``rank`` of ``size`` parts of a batch (:func:`sequence_batch`)."""
    found = next((name for name in _INPUTS if isinstance(batch.get(name), torch.Tensor)), None)
    if found is None:
        raise ValueError(f"sequence_batch: the batch has neither of {' and '.join(_INPUTS)}, only {', '.join(batch)}")
    inputs = batch[found]
    tokens = inputs.shape[1]
    if tokens % size:
        raise ValueError(
            f"sequence_batch: {tokens} tokens cannot be cut into cp={size} parts: pad the sequences to "
            f"{-(-tokens // size) * size} (labels of {IGNORED} there), or cut them to {tokens // size * size}"
        )
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
    if value.dim() < 2 or value.shape[1] != tokens:
        raise ValueError(
            f"sequence_batch: {name!r} has shape {tuple(value.shape)}, and its second dimension should be the "
            f"{tokens} tokens, so it cannot be cut"
        )
    return value[:, part].contiguous()


def _refuse_padding(mask: Any, labels: torch.Tensor | None) -> None:
    """Tokens at the end that are not rated change nothing of those before them: no mask is needed for them."""
    if mask is None or bool(mask.bool().all()):
        return
    padding = ~mask.bool()
    at_the_end = mask.dim() == 2 and not bool((padding[:, :-1] & ~padding[:, 1:]).any())
    if not at_the_end or labels is None or bool((labels[padding] != IGNORED).any()):
        raise ValueError(
            "sequence_batch: attention_mask hides tokens. Padding may stand at the end of a sequence, with labels of "
            f"{IGNORED}; other masks are not cut"
        )


_ALONG_THE_SEQUENCE = re.compile(
    r"Mamba|SSM|RWKV|Rwkv|LinearAttention|DeltaNet|ShortConv|Recurrent|RetNet|XLSTM|Hyena|Lightning\w*Attention"
)
_FULL = ("full_attention", "attention")


def transformer_in(model: nn.Module) -> Any:
    """The outermost model of transformers in ``model`` (also inside of an adapter), with its own loss. Raises
    GeminiError, naming why there is none that can be divided.
    """
    from transformers import PreTrainedModel

    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None:
        why: str | None = f"{type(model).__name__} is no model of transformers, whose attention could be divided"
    else:
        why = next(_obstacles(found), None)
    if why is not None:
        raise GeminiError(f"context parallel (a mesh with a dimension cp): {why}. Use a mesh without cp")
    return found


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
    if any(compiled_part(module) is not None for module in model.modules()):
        yield f"parts of {name} are compiled, and ranks meet inside its attention, where nothing can be compiled"
    for rope in _rope_types(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        if rope in ("dynamic", "longrope"):
            yield f"rotary positions of type {rope!r} depend on the length of the sequence, of which a rank sees a part"


def _layers(config: Any, name: str, *, knows_windows: bool) -> Iterator[str]:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention"] if windowed else []
    for kind in sorted(set(kinds) - set(_FULL)):
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


_LOSS = "ForCausalLMLoss"


def divide_sequences(model: nn.Module, ranks: Ranks, kind: str, meet: Callable[[], object]) -> ContextParallel:
    """Let ``model`` compute the parts of sequences that its ranks have; ``meet`` as :class:`Exchange` says. Raises as
    :class:`ContextParallel`.
    """
    exchange = Exchange(ranks.context, meet)
    slices = 1 if ranks.parts.size == 1 else ranks.same_batch.size
    divided = ContextParallel(model, exchange, kind, slices)
    divided.put()
    return divided


def imagine_parts(model: nn.Module, size: int, kind: str, sent: Counter[str], *, slices: int = 1) -> None:
    """Let a model without values compute the last of ``size`` parts of a sequence, to be traced; ``sent``: see
    :class:`~gemini.train.context.attention.ImaginedExchange`. Raises as :class:`ContextParallel`.
    """
    ContextParallel(model, ImaginedExchange(size, sent), kind, slices).put()


class ContextParallel:
    """The parts that are put around one model.

    Args:
        exchange: among the ranks that have parts of the same sequences.
        kind: of attention (:mod:`gemini.train.context.attention`).
        slices: among how many ranks Gemini has divided the heads of the model.

    Raises:
        GeminiError: naming why the model cannot compute parts; nothing was changed.
    """

    def __init__(self, model: nn.Module, exchange: Exchange, kind: str, slices: int = 1):
        self._model, self._exchange = transformer_in(model), exchange
        self._kernel = self._model.config._attn_implementation
        self._attend = Attend(exchange, self._kernel, kind)
        heads = getattr(self._model.config, "num_attention_heads", None)
        if isinstance(heads, int):
            self._attend.kind_for(heads // slices)
        configs = {id(m.config): m.config for m in self._model.modules() if hasattr(m, "config")}.values()
        self._configs = [config for config in configs if hasattr(config, "_attn_implementation_internal")]
        # Another library may have put a forward of its own on this model: it is put back.
        self._before: Any = None

    def put(self) -> None:
        """Let the model compute parts, until :meth:`take_away`."""
        self._before = self._model.__dict__.get("forward")
        self._attend.serve(self._model)
        self._name_attention(register(self._kernel))
        self._model.__dict__["forward"] = self._divided(self._model.forward)

    def take_away(self) -> None:
        """Let the model compute whole sequences again."""
        self._model.__dict__.pop("forward", None)
        if self._before is not None:
            self._model.__dict__["forward"] = self._before
        self._name_attention(self._kernel)
        self._attend.leave(self._model)

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
            self._attend.in_forward, self._attend.num_calls = True, 0
            try:
                with self._watched_loss(kwargs):
                    output = whole(*args, **kwargs)
            finally:
                self._attend.in_forward = False
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
        if name != _LOSS:
            raise GeminiError(
                f"context parallel: {type(model).__name__} has the loss {name}, and labels can be cut only for {_LOSS} "
                "of transformers. Leave labels out of the batch, and compute the loss from the logits"
            )
        seen: list[bool] = []

        @functools.wraps(original)
        def watched(*args: Any, **how: Any) -> Any:
            seen.append(how.get("shift_labels") is not None)
            return original(*args, **how)

        # transformers keeps it there, if anybody has set one for this model.
        own = model.__dict__.get("_loss_function")
        model._loss_function = watched
        try:
            yield
        finally:
            del model._loss_function
            if own is not None:
                model._loss_function = own
        if not all(seen) or not seen:
            raise GeminiError(
                f"context parallel: {type(model).__name__} does not pass shift_labels to its loss, and would shift "
                "labels again. Leave labels out of the batch, and compute the loss from the logits"
            )
