"""What must be alike on all ranks of a model before any of them changes a weight, and the error that names what is not.

Each rank updates its own shard by its own hyperparameters, and writes its own part of what is loaded; so ranks that
disagree would make a model that nobody asked for. They compare checksums, which travel in messages that they send
anyway. Only if these differ do they tell each other the facts themselves (:mod:`gemini.ranks.facts`), and all raise the
same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from gemini.ranks.agreement import Point
from gemini.ranks.facts import Facts, alone, tell_differing
from gemini.ranks.handshake import error_called
from gemini.train.sharding.shards import Shards

_REFUSES = -1
_LOW = 2**32


def meet_with(shards: Shards, point: Point, gradients: Facts, step: Facts | None) -> list[list[tuple[int, int]]]:
    """Every rank of the model stands at ``point``: the two checksums of each, by replica; 0 for none.

    They travel in one number of 63 bits.
    """
    said = (gradients.checksum >> 1) * _LOW + (0 if step is None else step.checksum)
    return [[divmod(other, _LOW) for other in row] for row in shards.meet_all(point, said)]


def refuse_differing(shards: Shards, doing: str, facts: Facts, *, untouched: str = "No weight") -> None:
    """All ranks of the model come here when their checksums differ; raises as :func:`tell_differing`."""
    names = [handle.name for handle in shards.params.handles]
    tell_differing(shards.ranks.everyone, "the ranks", doing, facts, names, untouched=untouched)


def agree_on_values(
    shards: Shards | None, point: Point, doing: str, facts: Callable[[], Facts], refusal: Exception | None = None
) -> None:
    """Every rank is about to write the same values, or none writes any.

    Args:
        shards: None in one process.
        facts: of what this rank writes; not asked for in one process.
        refusal: why this rank will not.

    Raises:
        RankMismatch: on every rank, naming what differs.
        GeminiError: naming the rank that refuses; on that rank the refusal itself.
    """
    if shards is None:
        alone(point, doing, facts, refusal)
        return
    if refusal is not None:
        everyone = _flat(shards.meet_all(point, _REFUSES))
        if any(said != _REFUSES for said in everyone):
            _tell(shards, doing, refusal)
        raise refusal
    found = facts()
    everyone = _flat(shards.meet_all(point, found.checksum))
    if _REFUSES in everyone:
        _tell(shards, doing, None)
    if len(set(everyone)) > 1:
        refuse_differing(shards, doing, found, untouched="Nothing")


def _flat(rows: list[list[int]]) -> list[int]:
    return [said for row in rows for said in row]


def _tell(shards: Shards, doing: str, refusal: Exception | None) -> None:
    """Some ranks refuse, and say why; the others raise that, of the same type if it is one of ours."""
    everyone = shards.ranks.everyone
    said = None if refusal is None else [type(refusal).__name__, str(refusal)]
    heard = [json.loads(text) for text in everyone.exchange_texts(json.dumps(said), doing)]
    for rank, other in enumerate(heard):
        if refusal is None and other is not None:
            raise error_called(other[0])(f"rank {everyone.global_ranks[rank]} refused {doing}: {other[1]}")
