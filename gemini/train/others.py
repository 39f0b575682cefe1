"""What a forward has to do with ranks that have other parts of its sequences, slices of its model, or experts."""

from __future__ import annotations

import weakref

from torch import nn

from gemini.ranks.agreement import Point
from gemini.train.context.parallel import divide_sequences
from gemini.train.context.same_batch import compare_first_batch
from gemini.train.sharding.company import Company
from gemini.train.sharding.shards import Shards
from gemini.train.slices.experts import SpreadExperts


def join_others(model: nn.Module, company: Company, kind: str, spread: SpreadExperts | None) -> None:
    """Put it around the modules of ``model``.

    Args:
        kind: of attention over parts of sequences.
        spread: of a model that has some of its experts.
    """

    # What transformers knows of attention outlives the model.
    reference, ranks = weakref.ref(company), company.ranks

    def meet() -> None:
        found = reference()
        assert isinstance(found, Shards), "ranks with parts of a sequence share params"
        found.meet(Point.CONTEXT)

    divided = divide_sequences(model, ranks, kind, meet)
    if divided is not None:
        model.__dict__["_gemini_context"] = divided
    if ranks.same_batch is not None:
        model.__dict__["_gemini_hooks"].append(compare_first_batch(model, ranks.same_batch))
    if spread is not None:
        model.__dict__["_gemini_spread"] = spread
        spread.put_on(model, ranks)
