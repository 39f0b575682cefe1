"""How ranks agree before they do something together: each says one number, and words only where these are not alike.

A number is the checksum of what must be alike (:class:`Facts`), or says that its rank refuses. If all are the same, all
go on; else the ranks tell each other their refusals and facts, and all raise. Ranks that agree send 8 bytes each and
wait once, and a refusal is heard in the message in which the others say that they would go on: nobody is left waiting.

:func:`agree` is for ranks that come to the same calls in the same order. Ranks that may stand elsewhere meet first
(:meth:`gemini.train.sharding.shards.Company.agree`); what they say travels in the messages with which they meet. A
rank alone agrees with itself. :class:`Handshake` is for work of which the first rank hears what each has made.

Floats are compared by their bits, and NaN is equal to itself.

What comes next is agreed on as well, so that no collective ever depends on who arrives first. A rank that needs the
others makes a :class:`Request` and waits until all ranks have said what they want; where they follow a script together
it need not. From these requests, the same on every rank, follows what is done: weights or values that any rank needs
are served first, by all, whatever they want themselves; gradients are reduced when no rank needs anything served, the
last chunk of the layout first; who begins a step goes on by itself; everything else is done when all ranks stand at the
same point. So ranks may take different paths through a model (an expert that only one of them uses, one more
evaluation, a longer ``generate``) and neither hang nor mix up messages, and the order of sums follows from the programs
alone, not from their timing or from budgets.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from gemini import errors
from gemini.errors import GeminiError, RankLost, RankMismatch
from gemini.ranks.wire import Tag, Wire, guarded

_SAID: dict[str, dict[int, str]] = {
    "the gradient": {0: "none", 1: "there"},
    "what zero_grad(set_to_none=False) left": {0: "nothing", 1: "zeros"},
    "the param group": {-1: "none"},
    "requires_grad": {0: "False", 1: "True"},
}
"""How values of columns read, where not as numbers."""


class Facts:
    """Values (as in JSON) by what they are called, in the order in which an error looks for one that differs. A value
    that is an array is a column: it has an item for each of ``names``, the same params on all ranks.
    """

    def __init__(self, values: Mapping[str, Any], names: Sequence[str] = ()):
        self.values, self.names = values, names

    def __or__(self, other: Facts) -> Facts:
        """Join with the facts of ``other``, about the same params."""
        return Facts({**self.values, **other.values}, self.names or other.names)

    @property
    def checksum(self) -> int:
        """A number of 32 bits, never 0, whichever order the values are in."""
        # Plain values sorted by name, then the columns, which all ranks give in the same order.
        plain = {name: value for name, value in self.values.items() if not isinstance(value, array)}
        found = zlib.crc32(json.dumps(plain, sort_keys=True, default=str).encode())
        for column in self.values.values():
            found = zlib.crc32(column.tobytes(), found) if isinstance(column, array) else found
        # 0 is what a rank says that has no facts.
        return found or 1

    def told(self) -> dict[str, Any]:
        """The values as the other ranks hear them: a column is a table of words by param."""
        return {what: self._table(what, v) if isinstance(v, array) else v for what, v in self.values.items()}

    def _table(self, what: str, column: array[Any]) -> dict[str, str]:
        words = _SAID.get(what, {})
        return {name: words.get(value, str(value)) for name, value in zip(self.names, column, strict=True)}


def value_facts(values: Iterable[tuple[str, torch.Tensor]]) -> Facts:
    """Checksums of tensors by name. One after the other: nothing is kept of them."""
    return Facts({f"the values of {name!r}": checksum_text(value) for name, value in values})


def checksum_of(tensor: torch.Tensor) -> int:
    """Sum up the bits of its values in 32 bits; not its dtype and shape."""
    # The bits that a reader sees: a conjugated or negated view has others in memory.
    data = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().view(-1)
    return zlib.crc32(data.view(torch.uint8).numpy().data) if data.numel() else 0


def checksum_text(value: torch.Tensor) -> str:
    """Describe one tensor by its checksum and dtype."""
    return f"checksum {checksum_of(value):08x} ({str(value.dtype).removeprefix('torch.')})"


def plain(value: Any) -> Any:
    """A hyperparameter as it is used: a float, whichever kind of number or tensor it was given as."""
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # refused, after the ranks have compared it
        return str(value)


def _difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first fact that two ranks differ in, as ``WORDS`` tell it; of a table its first entry."""
    # In the order of the facts: a cause stands before what follows from it.
    for fact in {**first, **other}:
        a, b = first.get(fact, "none"), other.get(fact, "none")
        if a == b:
            continue
        if not (isinstance(a, dict) and isinstance(b, dict)):
            return {"fact": fact, "what": fact, "first": a, "other": b, "against": f"{b!r} against {a!r}"}
        keys = [key for key in {**a, **b} if a.get(key) != b.get(key)]
        a, b = a.get(keys[0]), b.get(keys[0])
        against = f"{len(keys)} differ, the first is {keys[0]!r}: {b} against {a}"
        return {"fact": fact, "what": f"{fact} of {keys[0]!r}", "first": a, "other": b, "against": against}
    return None


T = TypeVar("T")
R = TypeVar("R")


class Handshake:
    """The steps of work that errors call ``doing``, of the ranks of ``group`` (on the CPU; None in one process)."""

    def __init__(self, group: dist.ProcessGroup | None, doing: str):
        self._group, self._doing = group, doing
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def step(self, work: Callable[[], T], conclude: Callable[[list[T]], R]) -> R:
        """Do ``work`` on every rank, then ``conclude`` on the first one from what each has given; all get its result.
        No rank comes back before all have done their work, well or not. Raises GeminiError on every rank, naming the
        one that failed (an interrupt of this rank stays what it is); RankLost if a rank died or does not answer.
        """
        if self._group is None:
            return conclude([work()])
        given = self._told(self._group, work)
        concluded: list[Any] = self._told(self._group, lambda: conclude(given) if self.rank == 0 else None)
        return concluded[0]  # type: ignore[no-any-return]

    def _told(self, group: dist.ProcessGroup, work: Callable[[], T]) -> list[T]:
        """The results of ``work`` on each rank."""
        # A failure is kept until the others have heard of it: raised here, they would wait until the timeout.
        given: T | None = None
        failure: BaseException | None = None
        try:
            given = work()
        except BaseException as e:
            failure = e
        rows: list[Any] = [None] * self.size
        with guarded(self._doing):
            dist.all_gather_object(rows, (given, failure and _as_failure(failure)), group=group)
        # An interrupt is this program's own: the others get an error that names this rank, here it stays what it is.
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        ranks = dist.get_process_group_ranks(group)
        failed = [(rank, *why) for rank, (_, why) in zip(ranks, rows, strict=True) if why is not None]
        if failed:
            rank, kind, why = failed[0]
            others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise error_called(kind)(f"{self._doing} failed on rank {rank}{others}: {why}") from failure
        return [given for given, _ in rows]


def error_called(name: str) -> type[GeminiError]:
    """The class of ours with that name, else that of ranks that differ: what another rank raised, raised here."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, GeminiError) else RankMismatch


def _as_failure(cause: BaseException) -> tuple[str, str]:
    """A failure as other ranks hear of it: the class of the error it becomes there, and its text."""
    if isinstance(cause, OSError):
        return "StorageError", str(cause.strerror or cause)
    if isinstance(cause, GeminiError):
        return type(cause).__name__, str(cause)
    return "GeminiError", f"{type(cause).__name__}: {cause}"


_REFUSES = -1  # where others say a checksum, which is positive, or 0 for no facts


WORDS = {
    "values": "{doing}: the ranks disagree about {what}: {first} on rank {rank}, {other} on rank {other_rank}. Nothing "
    "was changed. What is done on one rank must be done on all of them, with the same values",
    "start": "rank {other_rank} was started with another {fact} than rank {rank}: {against}. All ranks must run the "
    "same program with the same settings on the same versions",
    "folder": "{doing} was called with another {fact} on rank {other_rank} than on rank {rank}: {against}. Give all "
    "ranks the same (a name with the time in it differs: let one rank choose it)",
    "batch": "{doing} of rank {other_rank} has another {fact} than that of rank {rank} ({against}): ranks that differ "
    "in tp, pp or cp alone compute with the same batch. Give the sampler rank, world = gemini.data_rank(mesh)",
}
"""How an error says that two ranks differ in a fact; ``against`` is both values in few words."""


class Attempt:
    """This rank's part of work that all do or none: what of ``kept`` it raises is kept, for :func:`agree` to tell."""

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
    wire: Wire,
    doing: str,
    facts: Callable[[], Facts] | None = None,
    refusal: BaseException | None = None,
    *,
    swap: Callable[[int], list[int]] | None = None,
    tag: Tag = Tag.AGREEMENT,
    words: str = "values",
) -> None:
    """Let all ranks of ``wire``, which all come here, go on together or not at all. ``facts``: what must be alike on
    all of them; not asked for where a rank is alone or refuses. ``refusal``: why this rank will not. ``swap``: how each
    rank's number reaches all, if not on the wire, as ``tag``. ``words``: which of ``WORDS`` say what differs.

    Raises RankMismatch on every rank, naming what differs; GeminiError naming the rank that refuses, of the type of its
    refusal if that is ours (there the refusal itself); RankLost if a rank does not answer.
    """
    if wire.size == 1:
        if refusal is not None:
            raise refusal
        return
    found, own = Facts({}), 0
    # A rank that refuses may be in no state to say its facts; one that cannot say them refuses, for the others wait.
    with Attempt() as saying:
        if facts is not None and refusal is None:
            said = facts()
            own, found = said.checksum, said
    if (refusal := refusal or saying.refusal) is not None:
        own = _REFUSES
    heard = swap(own) if swap else wire.swap(tag, torch.tensor([own], device="cpu"), doing).view(-1).tolist()
    # All ranks hear the same numbers: either all of them tell, or none does.
    if _REFUSES in heard or len(set(heard)) > 1:
        tell(wire, doing, found, refusal, words=words)


def tell(
    wire: Wire, doing: str, facts: Facts, refusal: BaseException | None = None, *, words: str = "values"
) -> NoReturn:
    """Raise as :func:`agree` does, always: all ranks of ``wire`` come here when they do not agree."""
    said = [facts.told(), None if refusal is None else [type(refusal).__name__, str(refusal) or type(refusal).__name__]]
    heard = [json.loads(text) for text in wire.exchange_texts(json.dumps(said, default=str), doing)]
    # Only now: the others needed this rank's words.
    if refusal is not None:
        raise refusal
    for rank, (_, why) in zip(wire.global_ranks, heard, strict=True):
        if why is not None:
            raise error_called(why[0])(f"rank {rank} refused {doing}: {why[1]}")
    # Everyone is compared with the first rank, so that all ranks raise the same words.
    for rank, (other, _) in zip(wire.global_ranks, heard, strict=True):
        if (found := _difference(heard[0][0], other)) is not None:
            found |= {"doing": doing, "rank": wire.global_ranks[0], "other_rank": rank}
            raise RankMismatch(WORDS[words].format(**found))
    # Bits that no words tell apart, such as two kinds of NaN.
    raise RankMismatch(f"{doing}: the ranks disagree. Nothing was changed")


class Point(IntEnum):
    """Places where ranks meet, and how an error calls them."""

    words: str

    def __new__(cls, number: int, words: str = "") -> Point:
        point = int.__new__(cls, number)
        point._value_, point.words = number, words
        return point

    GATHER = 0, "a forward or backward (it needs weights)"
    READ = 1, "reading a param by name"
    REDUCE = 2, "a backward (its gradients are to be reduced)"
    END_BACKWARD = 3, "the end of a backward"
    SYNC_GRADS = 4, "clip_grad_norm_ or optimizer.step()"
    SAVE_CHECKPOINT = 5, "save_checkpoint"
    LOAD_CHECKPOINT = 6, "load_checkpoint"
    EXPORT = 7, "save_pretrained"
    WRITE = 8, "gathered(write=True)"
    STEP = 9, "optimizer.step()"
    LOAD_MODEL = 10, "load_state_dict"
    LOAD_OPTIMIZER = 11, "optimizer.load_state_dict"
    COPY = 12, "a write to a param (param.copy_)"
    CONTEXT = 13, "attention over the parts of a sequence"
    BEGIN_STEP = 14, "a forward or backward (it begins)"
    PARK = 15, "parked()"
    SWAP = 16, "swapped_in()"
    LEAVE = 17, "a collective of the Trainer (or of accelerate)"


SERVED = (Point.GATHER, Point.READ)
"""Points at which a rank waits for what all of them give it."""
_REDUCING = (Point.REDUCE, Point.END_BACKWARD, Point.CONTEXT)
"""Points at which a rank takes part in a reduction, whatever it has of the gradients."""


class Request(NamedTuple):
    """One rank's wish: a point, which chunk or param it is about, what else others must know; for errors its steps."""

    point: Point
    about: int = 0
    detail: int = 0
    num_steps: int = 0

    @property
    def subject(self) -> tuple[Point, int]:
        return self.point, self.about


def choose(requests: Sequence[Request]) -> tuple[Point, int] | None:
    """Choose what is done now, from what all ranks want; None if nothing can be. A pure function of the requests."""
    served = [request.subject for request in requests if request.point in SERVED]
    if served:
        # Any order would do that is the same on all ranks.
        return min(served)
    if any(request.point is Point.BEGIN_STEP for request in requests):
        return Point.BEGIN_STEP, 0  # who begins a step needs nobody to begin it as well
    reduced = [request.about for request in requests if request.point is Point.REDUCE]
    if reduced and all(request.point in _REDUCING for request in requests):
        # Backward goes through the layout from its end: what comes first there is complete first.
        return Point.REDUCE, max(reduced)
    # Everything else is for all ranks at once.
    return requests[0].subject if all(request.subject == requests[0].subject for request in requests) else None


def mismatch(requests: Sequence[Request], ranks: Sequence[int]) -> RankMismatch:
    """The error for requests of these ranks that can never meet."""
    where = "; ".join(
        f"rank {rank} is at {request.point.words} after {request.num_steps} steps"
        for rank, request in zip(ranks, requests, strict=True)
    )
    return RankMismatch(
        f"the ranks of this model were asked to do different things: {where}. Every rank must make the same backwards "
        "and steps, and call save_checkpoint, load_checkpoint and save_pretrained together. If the data of one rank "
        "ends early, give all the same number of batches (DistributedSampler(drop_last=True), or stop all at the "
        "shortest)"
    )
