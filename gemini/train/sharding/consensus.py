"""Before a collective operation all ranks exchange whether they can do it, so that all proceed or all raise."""

from __future__ import annotations

import atexit
import json
import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

from gemini.errors import RankMismatch
from gemini.ranks.agreement import Point
from gemini.ranks.handshake import error_called
from gemini.ranks.subgroup import end_subgroup, make_subgroup
from gemini.ranks.wire import guarded

if TYPE_CHECKING:
    from gemini.train.sharding.shards import Shards

_waiting: weakref.WeakSet[Shards] = weakref.WeakSet()  # those that have such a group


def agree(shards: Shards | None, point: Point, doing: str, refusal: Exception | None, **facts: str) -> None:
    """Wait until all ranks of the model want the same, then go on together or not at all.

    Args:
        shards: of this model; None in one process.
        doing: for error messages, "save_checkpoint" say.
        refusal: why this rank will not.
        facts: what must be the same on every rank, by name.

    Raises:
        RankMismatch: if facts differ.
        GeminiError: naming the rank that refuses, of the type of its refusal; on that rank the refusal itself.
    """
    if shards is None:
        if refusal is not None:
            raise refusal
        return
    shards.meet_all(point)
    tell(shards, doing, refusal, **facts)


def tell(shards: Shards, doing: str, refusal: BaseException | None, **facts: str) -> None:
    """The same for ranks that stand together already."""
    everyone = shards.ranks.everyone
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


def group_for(shards: Shards | None) -> dist.ProcessGroup | None:
    """All ranks of a model, to wait for each other's disks; None in one process. Made by all at the first use.

    It is another group than those of training, whose messages go on while a checkpoint is written behind it, and waits
    as long as torch does by default (half an hour), whatever was chosen to notice a rank that hangs in a step.
    """
    if shards is None:
        return None
    if shards.waiting_group is None:
        shards.waiting_group = make_subgroup(shards.ranks.everyone.global_ranks, "gloo")
        _waiting.add(shards)
    return shards.waiting_group


def end_group_of(shards: Shards) -> None:
    """The model ends."""
    group, shards.waiting_group = shards.waiting_group, None  # its threads live as long as somebody refers to it
    if group is not None:
        end_subgroup(group)


@atexit.register
def _end_groups() -> None:
    """A thread of gloo may be the last to let go of a tensor, which takes the interpreter: they end before it does."""
    for shards in list(_waiting):
        end_group_of(shards)


def wait_for_all(shards: Shards, doing: str) -> None:
    """Let one rank work on something long, while the others wait here."""
    guarded(doing, lambda: dist.barrier(group_for(shards)))
