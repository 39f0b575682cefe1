"""A model that computes parts of sequences: what is put around its forward, and taken away again.

A batch of :func:`gemini.sequence_batch` carries a mark. A forward with it exchanges keys and values inside attention;
one without computes whole sequences as ever, and that is for evaluation and ``generate``: with gradients it is refused.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gemini.errors import GeminiError, RankMismatch
from gemini.ranks.group import Ranks
from gemini.train.context.attention import Attend, register
from gemini.train.context.batch import MARK
from gemini.train.context.exchange import Exchange, ImaginedExchange
from gemini.train.context.suited import transformer_in

_LOSS = "ForCausalLMLoss"


def divide_sequences(model: nn.Module, ranks: Ranks, kind: str, meet: Callable[[], object]) -> ContextParallel | None:
    """Let ``model`` compute parts of sequences, if its ranks have parts; ``meet`` as :class:`Exchange` says.

    Raises:
        GeminiError: naming why it cannot; nothing was changed.
    """
    if ranks.context is None:
        return None
    exchange = Exchange(ranks.context, ranks.context_collective, meet)
    slices = 1 if ranks.parts is None or ranks.same_batch is None else ranks.same_batch.size
    divided = ContextParallel(model, exchange, kind, ranks.context.global_ranks, slices)
    divided.put()
    return divided


def imagine_parts(model: nn.Module, size: int, kind: str, sent: Counter[str], *, slices: int = 1) -> None:
    """Let a model without values compute the last of ``size`` parts of a sequence, to be traced; ``sent``: see
    :class:`~gemini.train.context.exchange.ImaginedExchange`.

    Raises:
        GeminiError: naming why it cannot.
    """
    ContextParallel(model, ImaginedExchange(size, sent), kind, range(size), slices).put()


class ContextParallel:
    """What was put around one model.

    Args:
        exchange: among the ranks that have parts of the same sequences.
        kind: of attention (:mod:`gemini.train.context.attention`).
        global_ranks: their numbers, for error messages.
        slices: among how many ranks Gemini has divided the heads of the model.

    Raises:
        GeminiError: naming why the model cannot compute parts; nothing was changed.
    """

    def __init__(
        self, model: nn.Module, exchange: Exchange, kind: str, global_ranks: Sequence[int], slices: int = 1
    ):  # fmt: skip
        self._model, self._exchange, self._global_ranks = transformer_in(model), exchange, global_ranks
        self._kernel = self._model.config._attn_implementation
        self._attend = Attend(exchange, self._kernel, kind)
        heads = getattr(self._model.config, "num_attention_heads", None)
        if isinstance(heads, int):
            self._attend.kind_for(heads // slices)
        self._configs = list({id(m.config): m.config for m in self._model.modules() if hasattr(m, "config")}.values())
        self._configs = [config for config in self._configs if hasattr(config, "_attn_implementation_internal")]
        self._before: Any = None

    def put(self) -> None:
        """Until :meth:`take_away`."""
        self._before = self._model.__dict__.get("forward")
        self._attend.serve(self._model)
        self._name_attention(register(self._kernel))
        self._model.__dict__["forward"] = self._divided(self._model.forward)

    def take_away(self) -> None:
        """The model computes whole sequences again."""
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
            self._compare(mark)
            kwargs.setdefault("use_cache", False)
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
        divided = self._configs[0]._attn_implementation
        self._name_attention(self._kernel)
        try:
            return whole(*args, **kwargs)
        finally:
            self._name_attention(divided)

    def _compare(self, mark: torch.Tensor) -> None:
        """All ranks of a context group have parts of the same batch, each its own.

        Raises:
            RankMismatch: on every rank, naming what differs.
        """
        rows = self._exchange.tell(mark)
        ranks, first = self._global_ranks, rows[0]
        for number, row in enumerate(rows):
            if row[:2] != [number, self._exchange.size]:
                raise RankMismatch(
                    f"rank {ranks[number]} was given part {row[0]} of {row[1]} of a sequence, and is rank {number} of "
                    f"{self._exchange.size} along cp: cut batches with the mesh that the model was wrapped with"
                )
            for what, own, other in zip(("length", "input", "labels"), row[2:], first[2:], strict=True):
                if own != other:
                    raise RankMismatch(
                        f"rank {ranks[number]} has a part of another batch than rank {ranks[0]}: another {what}. All "
                        "ranks of cp read the same samples: rank, world = gemini.data_rank(mesh) for the sampler"
                    )

    @contextmanager
    def _watched_loss(self, kwargs: dict[str, Any]) -> Iterator[None]:
        """See that a loss is made of labels that are shifted already.

        Raises:
            GeminiError: if the model makes it otherwise: by shifted labels that it shifts again.
        """
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
