"""How ranks agree before they do something together: each says one number, and words only where these are not alike.

A number is the checksum of what must be alike (:class:`Facts`), or says that its rank refuses. If all are the same, all
go on; else the ranks tell each other their refusals and facts, and all raise. Ranks that agree send 8 bytes each and
wait once, and a refusal is heard in the message in which the others say that they would go on: nobody is left waiting.

:func:`agree` is for ranks that come to the same calls in the same order. Ranks that may stand elsewhere meet first
(:meth:`gemini.train.sharding.company.Company.agree`); what they say travels in the messages with which they meet. A
rank alone agrees with itself. :class:`Handshake` is for work of which the first rank hears what each has made.

Floats are compared by their bits, and NaN is equal to itself.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from gemini import errors
from gemini.errors import GeminiError, RankLost, RankMismatch
from gemini.ranks.wire import Tag, Wire, guarded

_COLUMNS: dict[str, Callable[[str], str]] = {
    "the gradient": lambda value: "there" if value == "1" else "none",
    "what zero_grad(set_to_none=False) left": lambda value: "zeros" if value == "1" else "nothing",
    "the param group": lambda value: "none" if value == "-1" else value,
    "requires_grad": lambda value: str(value == "1"),
    "the number of updates": str,
    "the clipping": str,
}
"""Columns by name, and how their values read."""


class Facts:
    """Values (as in JSON) by what they are called, in the order in which an error looks for one that differs.

    A value that is an array is a column: it has an item for each param. ``names``: of these, the same on all ranks.
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
        """The values as the other ranks with the same params hear them."""
        return {name: list(map(repr, v)) if isinstance(v, array) else v for name, v in self.values.items()}


class Difference(NamedTuple):
    """A fact that two ranks differ in, with the value of each."""

    what: str
    first: Any
    other: Any

    @property
    def against(self) -> str:
        """Both values; of a table, how many of its entries differ, and the first of them."""
        a, b = self.first, self.other
        if isinstance(a, dict) and isinstance(b, dict):
            keys = [key for key in {**a, **b} if a.get(key) != b.get(key)]
            return f"{len(keys)} differ, the first is {keys[0]!r}: {b.get(keys[0])} against {a.get(keys[0])}"
        return f"{b!r} against {a!r}"


def value_facts(values: Iterable[tuple[str, torch.Tensor]]) -> Facts:
    """Checksums of tensors, by what they are called. One after the other: nothing is kept of them."""
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


def first_difference(first: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> Difference | None:
    """Find the first fact that two ranks differ in, by what :meth:`Facts.told` says; ``names`` of the params."""
    # In the order of the facts: a cause stands before what follows from it.
    for label in {**first, **other}:
        a, b = first.get(label, "none"), other.get(label, "none")
        if a == b:
            continue
        if label not in _COLUMNS:
            return Difference(label, a, b)
        # A column is told as the words of its items: the first that differ name the param.
        name, a, b = next(of for of in zip(names, a, b, strict=True) if of[1] != of[2])
        return Difference(f"{label} of {name!r}", _COLUMNS[label](a), _COLUMNS[label](b))
    return None


T = TypeVar("T")
R = TypeVar("R")
Failure = tuple[str, str]
"""A failure as other ranks hear of it: the class of the error it becomes there, and its text."""


class Handshake:
    """The steps of one piece of work, for error messages called ``doing``.

    Args:
        group: the ranks, on the CPU; None in one process.
    """

    def __init__(self, group: dist.ProcessGroup | None, doing: str):
        self._group, self._doing = group, doing
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def step(self, work: Callable[[], T], conclude: Callable[[list[T]], R]) -> R:
        """Do ``work`` on every rank, then ``conclude`` on the first one from what each has given; all get its result.

        No rank comes back before all have done their work, well or not.

        Raises:
            GeminiError: on every rank, naming the one that failed; an interrupt of this rank stays what it is.
            RankLost: if a rank died or does not answer.
        """
        if self._group is None:
            return conclude([work()])
        # A failure is kept until the others have heard of it: raised here, they would wait for this rank until the
        # timeout.
        given: Any = None
        concluded: Any = None
        failure: BaseException | None = None
        try:
            given = work()
        except BaseException as e:
            failure = e
        rows = self._gather((given, None if failure is None else _as_failure(failure)))
        failures = {rank: failed for rank, (_, failed) in enumerate(rows) if failed is not None}
        # What fails on the first rank now goes out with the result that the others wait for.
        if self.rank == 0 and not failures:
            try:
                concluded = conclude([given for given, _ in rows])
            except BaseException as e:
                failure, failures = e, {0: _as_failure(e)}
        concluded, failures = self._broadcast((concluded, failures))
        # An interrupt is this program's own: the others get an error that names this rank, here it stays what it is.
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if failures:
            raise self._error(failures) from failure
        return concluded

    def _gather(self, said: Any) -> list[Any]:
        """Collect what each rank says, on the first one; elsewhere nothing."""
        # torch wants the global rank of the receiver, also in a group of some ranks.
        heard: list[Any] | None = [None] * self.size if self.rank == 0 else None
        first = self._global_rank(0)
        with guarded(self._doing):
            dist.gather_object(said, heard, dst=first, group=self._group)
        return heard or []

    def _broadcast(self, said: Any) -> Any:
        """Hear what the first rank says."""
        heard = [said]
        first = self._global_rank(0)
        with guarded(self._doing):
            dist.broadcast_object_list(heard, src=first, group=self._group)
        return heard[0]

    def _error(self, failures: dict[int, Failure]) -> GeminiError:
        rank, (kind, why) = min(failures.items())
        others = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        return error_called(kind)(f"{self._doing} failed on rank {self._global_rank(rank)}{others}: {why}")

    def _global_rank(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)


def error_called(name: str, default: type[GeminiError] = GeminiError) -> type[GeminiError]:
    """The class of ours with that name, else ``default``: what another rank raised, raised here."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, GeminiError) else default


def _as_failure(cause: BaseException) -> Failure:
    if isinstance(cause, OSError):
        return "StorageError", str(cause.strerror or cause)
    if isinstance(cause, GeminiError):
        return type(cause).__name__, str(cause)
    return "GeminiError", f"{type(cause).__name__}: {cause}"


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
    wire: Wire,
    doing: str,
    facts: Callable[[], Facts] | None = None,
    refusal: BaseException | None = None,
    *,
    swap: Callable[[int], list[int]] | None = None,
    words: str = "values",
    refused: type[GeminiError] = GeminiError,
) -> None:
    """Let all ranks of ``wire``, which all come here, go on together or not at all.

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
    # A rank that refuses may be in no state to say its facts.
    found = Facts({}) if facts is None or refusal is not None else facts()
    own = _REFUSES if refusal is not None else 0 if facts is None else found.checksum
    heard = _swap(wire, own, doing) if swap is None else swap(own)
    # All ranks hear the same numbers: either all of them tell, or none does.
    if _REFUSES in heard or len(set(heard)) > 1:
        tell(wire, doing, found, refusal, words=words, refused=refused)


def tell(
    wire: Wire,
    doing: str,
    facts: Facts,
    refusal: BaseException | None = None,
    *,
    words: str = "values",
    refused: type[GeminiError] = GeminiError,
) -> NoReturn:
    """Raise as :func:`agree` does, always: all ranks of ``wire`` come here when they do not agree."""
    said = [facts.told(), None if refusal is None else [type(refusal).__name__, str(refusal)]]
    heard = [json.loads(text) for text in wire.exchange_texts(json.dumps(said, default=str), doing)]
    # Only now: the others needed this rank's words.
    if refusal is not None:
        raise refusal
    for rank, (_, why) in zip(wire.global_ranks, heard, strict=True):
        if why is not None:
            raise error_called(why[0], refused)(f"rank {rank} refused {doing}: {why[1]}")
    # Everyone is compared with the first rank, so that all ranks raise the same words.
    for rank, (other, _) in zip(wire.global_ranks, heard, strict=True):
        if (found := first_difference(heard[0][0], other, facts.names)) is not None:
            where = {"doing": doing, "rank": wire.global_ranks[0], "other_rank": rank, "against": found.against}
            raise RankMismatch(WORDS[words].format(**where, **found._asdict()))
    # Bits that no words tell apart, such as two kinds of NaN.
    raise RankMismatch(f"{doing}: the ranks disagree. Nothing was changed")


def _swap(wire: Wire, number: int, doing: str) -> list[int]:
    heard: list[int] = wire.swap(Tag.AGREEMENT, torch.tensor([number], device="cpu"), doing).view(-1).tolist()
    return heard
