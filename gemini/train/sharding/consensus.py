"""Before a collective operation all ranks exchange whether they can do it, so that all proceed or all raise."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from gemini.errors import RankMismatch
from gemini.ranks.agreement import Point
from gemini.ranks.group import Ranks
from gemini.ranks.handshake import error_called
from gemini.ranks.wire import Wire

if TYPE_CHECKING:
    from gemini.train.sharding.shards import Shards


def agree(
    ranks: Ranks | None, shards: Shards | None, point: Point, doing: str, refusal: Exception | None, **facts: str
) -> None:
    """Wait until all ranks that have one model want the same, then go on together or not at all.

    Args:
        ranks, shards: of this model; None in one process, and ``shards`` where no rank has the same params.
        doing: for error messages, "save_checkpoint" say.
        refusal: why this rank will not.
        facts: what must be the same on every rank, by name.

    Raises:
        RankMismatch: if facts differ.
        GeminiError: naming the rank that refuses, of the type of its refusal; on that rank the refusal itself.
    """
    if shards is not None:
        shards.meet_all(point)
    if ranks is not None:
        tell(ranks.writers, doing, refusal, **facts)
    elif refusal is not None:
        raise refusal


def tell(everyone: Wire, doing: str, refusal: BaseException | None, **facts: str) -> None:
    """The same for ranks that stand together already."""
    said = {"facts": facts, "kind": None if refusal is None else type(refusal).__name__, "why": str(refusal)}
    heard = [json.loads(text) for text in everyone.exchange_texts(json.dumps(said), doing)]
    if refusal is not None:
        raise refusal
    for rank, other in enumerate(heard):
        if other["kind"] is not None:
            kind = error_called(other["kind"])
            raise kind(f"rank {everyone.global_ranks[rank]} refused {doing}: {other['why']}")
        for name, value in other["facts"].items():
            if value != heard[0]["facts"][name]:
                raise RankMismatch(
                    f"{doing} was called with another {name} on rank {everyone.global_ranks[rank]} than on rank "
                    f"{everyone.global_ranks[0]}: {value!r} against {heard[0]['facts'][name]!r}. Give all ranks the "
                    "same (a name with the time in it differs: let one rank choose it)"
                )
