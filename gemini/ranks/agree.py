"""How ranks agree before they do something together: each says one number, and words only where these are not alike.

A number is the checksum of what must be alike, or says that its rank refuses. If all are the same, all go on; else the
ranks tell each other their refusals and facts, and all raise. Ranks that agree send 8 bytes each and wait once, and a
refusal is heard in the message in which the others say that they would go on: nobody is left waiting.

:func:`agree` is for ranks that come to the same calls in the same order. Ranks that may stand elsewhere meet first
(:meth:`gemini.train.sharding.company.Company.agree`); what they say travels in the messages with which they meet. A
rank alone agrees with itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

import torch

from gemini.errors import GeminiError, RankLost, RankMismatch
from gemini.ranks.facts import Facts, first_difference
from gemini.ranks.handshake import error_called
from gemini.ranks.wire import Tag, Wire

_REFUSES = -1  # where others say a checksum, which is positive, or 0 for no facts


_ALIKE = "What is done on one rank must be done on all of them, with the same values"
WORDS = {
    "values": "{doing}: the ranks disagree about {what}: {first} on rank {rank}, {other} on rank {other_rank}. Nothing "
    f"was changed. {_ALIKE}",
    "step": "{doing}: the ranks disagree about {what}: {first} on rank {rank}, {other} on rank {other_rank}. No weight "
    f"was changed. {_ALIKE}",
    "slices": "{doing}: ranks with slices of one model disagree about {what}: {first} on rank {rank}, {other} on rank "
    f"{{other_rank}}. No weight was changed. {_ALIKE}",
    "start": "rank {other_rank} was started with another {what} than rank {rank}: {against}. All ranks must run the "
    "same program with the same settings on the same versions",
    "folder": "{doing} was called with another {what} on rank {other_rank} than on rank {rank}: {against}. Give all "
    "ranks the same (a name with the time in it differs: let one rank choose it)",
    "batch": "{doing} of rank {other_rank} has another {what} than that of rank {rank} ({against}): ranks that differ "
    "in tp or pp alone compute with the same batch. Give the sampler rank, world = gemini.data_rank(mesh)",
}
"""How an error says that two ranks differ in ``what``; ``against`` is both values in few words."""


class Attempt:
    """This rank's part of work that all do or none: what it raises inside is kept, for :func:`agree` to tell.

    Args:
        kept: which errors; others pass.
    """

    def __init__(self, kept: type[BaseException] = Exception):
        self.refusal: BaseException | None = None
        self._kept = kept

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, self._kept) or isinstance(error, (RankLost, RankMismatch)):
            return False  # of a lost rank and of a mismatch the others have heard, or never will
        self.refusal = error
        return True


def agree(
    wire: Wire, doing: str, facts: Callable[[], Facts] | None = None, refusal: BaseException | None = None, *,
    swap: Callable[[int], list[int]] | None = None, words: str = "values",
    refused: type[GeminiError] = GeminiError,
) -> None:  # fmt: skip
    """All ranks of ``wire`` come here, and go on together or not at all.

    Args:
        facts: what must be alike on all of them; not asked for where a rank is alone or refuses.
        refusal: why this rank will not.
        swap: how each rank's number reaches all, where they travel in other messages; else on the wire.
        words: which of ``WORDS`` say what differs.
        refused: what a refusal that is no error of ours becomes on the other ranks.

    Raises:
        RankMismatch: on every rank, naming what differs.
        GeminiError: naming the rank that refuses, of the type of its refusal; on that rank the refusal itself.
        RankLost: if a rank does not answer.
    """
    if wire.size == 1:
        if refusal is not None:
            raise refusal
        return
    found = Facts({}) if facts is None or refusal is not None else facts()
    own = _REFUSES if refusal is not None else 0 if facts is None else found.checksum
    heard = _swap(wire, own, doing) if swap is None else swap(own)
    if _REFUSES in heard or len(set(heard)) > 1:
        tell(wire, doing, found, refusal, words=words, refused=refused)


def tell(
    wire: Wire, doing: str, facts: Facts, refusal: BaseException | None = None, *, words: str = "values",
    refused: type[GeminiError] = GeminiError,
) -> NoReturn:  # fmt: skip
    """All ranks of ``wire`` come here when they do not agree; raises as :func:`agree`, always."""
    said = [facts.told(), None if refusal is None else [type(refusal).__name__, str(refusal)]]
    heard = [json.loads(text) for text in wire.exchange_texts(json.dumps(said, default=str), doing)]
    if refusal is not None:
        raise refusal
    for rank, (_, why) in zip(wire.global_ranks, heard, strict=True):
        if why is not None:
            raise error_called(why[0], refused)(f"rank {rank} refused {doing}: {why[1]}")
    for rank, (other, _) in zip(wire.global_ranks, heard, strict=True):
        if (found := first_difference(heard[0][0], other, facts.names)) is not None:
            where = {"doing": doing, "rank": wire.global_ranks[0], "other_rank": rank, "against": found.against}
            raise RankMismatch(WORDS[words].format(**where, **found._asdict()))
    raise RankMismatch(f"{doing}: the ranks disagree. Nothing was changed")


def _swap(wire: Wire, number: int, doing: str) -> list[int]:
    heard: list[int] = wire.swap(Tag.AGREEMENT, torch.tensor([number], device="cpu"), doing).view(-1).tolist()
    return heard
