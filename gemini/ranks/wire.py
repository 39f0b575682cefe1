"""The wire between ranks: pieces of tensors sent and received directly, each kind of message under its own tag.

Collectives on CPU tensors are made here from torch's point-to-point calls, because gloo's own are slow: for 32 MB of
fp32 between two processes its all-gather took four times, and its reduce-scatter (an all-reduce of everything, of
which one part is kept) over twice the time of a direct exchange, and twice the bytes (docs/decisions). Sums are made
here, in fp32 and in the order of ranks, so that they are the same bits in every run. On CUDA tensors NCCL's
collectives are used.

Every wait ends: a rank that died closes its connections, one that hangs runs into the timeout of the process group.
"""

from __future__ import annotations

import re
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gemini.errors import GeminiError, RankLost
from gemini.memory.devices.device import Event
from gemini.waiting import PROGRESS


class Tag(IntEnum):
    """Kinds of messages; two ranks that stand at different points of a program never mix them up."""

    AGREEMENT = 1  # what a rank wants next, checksums, gradient norms
    ALL_GATHER = 2  # weights of chunks
    REDUCE_SCATTER = 3  # gradients of chunks, over the shard group
    ALL_REDUCE = 4  # sums of shards, over replicas
    BY_NAME = 5  # values of one param or state that somebody reads
    VALUES = 6  # small numbers and texts, and weights of the first rank at the start
    CONTEXT = 7  # parts of sequences (cp)
    HEADER = 8  # what a rank brings to a collective outside of agreements
    EXPERTS = 9  # tokens on their way to experts (ep)


class Pending(Event):
    """The end of messages on the wire, which must be waited for before their tensors are used again. Who waits first
    looks after them; any thread may. If a rank does not answer within the process group's time it ends as RankLost.
    """

    def __init__(self, works: list[tuple[int, Any]], who: Sequence[int], what: str):
        super().__init__()
        self._works, self._who, self.what = works, who, what
        self._turn = threading.Lock()

    def wait(self) -> None:
        # Two threads may want the same weights: the second one finds them there, or the same error.
        with self._turn:
            while self._works and self.error is None:
                peer, work = self._works[0]
                try:
                    with PROGRESS.elsewhere():
                        work.wait()
                except RuntimeError as e:
                    self.error = lost(self._who[peer], self.what, e)
                    self.error.__cause__ = e
                    break
                # Only when it is over: a wait that was interrupted can be made again.
                self._works.pop(0)
            if not self.is_complete():
                self.finish(self.error)
        if self.error is not None:
            raise self.error


def lost(rank: int | None, what: str, cause: BaseException) -> GeminiError:
    """The error for a rank that did not answer; None if nobody knows which one."""
    reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    if rank is None:
        return RankLost(
            f"{what} failed: {reason}. Another rank died, was stopped, or hangs: its own output says why. Start again "
            "from the last checkpoint (torchrun --max-restarts does it)"
        )
    return RankLost(
        f"rank {rank} did not answer during {what} ({reason}). It died, was stopped, or hangs: its own output says "
        "why. Training cannot go on without it: end this process too and start again from the last checkpoint "
        "(torchrun --max-restarts does both)"
    )


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Around a collective of the library: a failure is a lost rank, whichever it was."""
    try:
        with PROGRESS.elsewhere():
            yield
    except RuntimeError as e:
        raise lost(None, what, e) from e


class Wire:
    """Messages among the ranks of one group of CPU tensors (gloo); without one a rank alone, who has nobody to send to.
    ``library``: the same ranks in a group for CUDA tensors (NCCL). ``sent`` counts the bytes this rank sent, by tag.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, library: dist.ProcessGroup | None = None):
        self.group, self.library = group, library
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        # Of a rank alone its own, in the job of which it may be one of many.
        own = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.global_ranks = [own] if group is None else dist.get_process_group_ranks(group)
        self.sent: Counter[Tag] = Counter()

    @property
    def peers(self) -> list[int]:
        """The other ranks, beginning with the next one, so that not all send to the same rank first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def start(
        self, tag: Tag, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], what: str
    ) -> Pending:
        """Send ``outgoing[rank]`` to, and receive ``incoming[rank]`` from, the ranks named; contiguous CPU tensors."""
        works: list[tuple[int, Any]] = []
        for peer in self.peers:
            try:
                # An empty tensor is no message, on either side.
                if peer in incoming and incoming[peer].numel():
                    payload = _as_bytes(incoming[peer])
                    works.append((peer, dist.irecv(payload, group=self.group, group_src=peer, tag=tag)))
                if peer in outgoing and outgoing[peer].numel():
                    payload = _as_bytes(outgoing[peer])
                    works.append((peer, dist.isend(payload, group=self.group, group_dst=peer, tag=tag)))
                    self.sent[tag] += payload.numel()
            except RuntimeError as e:
                raise lost(self.global_ranks[peer], what, e) from e
        return Pending(works, self.global_ranks, what)

    def swap(self, tag: Tag, value: torch.Tensor, what: str) -> torch.Tensor:
        """Hear every rank's ``value``, stacked in their order; on the CPU, or by the library for CUDA tensors."""
        if self.library is not None and value.is_cuda:
            stacked = value.new_empty((self.size, *value.shape))
            self.all_gather_by_library(tag, stacked.flatten(), value.contiguous().flatten(), what)
            return stacked
        everyone = torch.empty((self.size, *value.shape), dtype=value.dtype, device="cpu")
        everyone[self.rank].copy_(value)
        # Sent from its row, which is contiguous and lives as long as the messages.
        value = everyone[self.rank]
        incoming = {peer: everyone[peer] for peer in self.peers}
        self.start(tag, dict.fromkeys(self.peers, value), incoming, what).wait()
        return everyone

    def begin_all_gather(self, tag: Tag, flat: torch.Tensor, what: str) -> Pending:
        """Fill ``flat`` (n equal sections) from the section that each rank has filled."""
        sections = flat.chunk(self.size)
        incoming = {peer: sections[peer] for peer in self.peers}
        return self.start(tag, dict.fromkeys(self.peers, sections[self.rank]), incoming, what)

    def all_to_all(
        self, tag: Tag, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], what: str
    ) -> torch.Tensor:
        """``sent[i]`` of the rows in turn go to rank i; of the result ``received[i]`` in turn come from there."""
        rows = rows.contiguous()
        into = rows.new_empty((sum(received), *rows.shape[1:]))
        if self.library is not None and rows.is_cuda:
            splits = list(received), list(sent)
            with guarded(what):
                dist.all_to_all_single(into, rows, *splits, group=self.library)
            return into
        # This rank's own rows are copied while those of the others travel.
        outgoing, incoming = rows.split(list(sent)), into.split(list(received))
        pending = self.start(tag, {p: outgoing[p] for p in self.peers}, {p: incoming[p] for p in self.peers}, what)
        incoming[self.rank].copy_(outgoing[self.rank])
        pending.wait()
        return into

    def all_reduce(self, tag: Tag, flat: torch.Tensor, scratch: torch.Tensor, what: str) -> None:
        """Replace ``flat`` by the sum over ranks, in fp32 and in their order, rounded once to its dtype. ``scratch``:
        uint8, at least ``2 * flat.numel() * 4`` bytes, and 4 for each rank.
        """
        # Each rank adds up one part of all ranks' tensors and sends the sum to the others.
        cuts = [flat.numel() * i // self.size for i in range(self.size + 1)]
        parts = [flat[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        own = parts[self.rank]
        width = own.numel() * flat.element_size()
        received = {peer: scratch[i * width : (i + 1) * width].view(flat.dtype) for i, peer in enumerate(self.peers)}
        # Behind what is received, of which a small tensor leaves more than its share: parts are rounded up.
        behind = -(-len(self.peers) * width // 4) * 4
        total = scratch[behind : behind + own.numel() * 4].view(torch.float32)
        self.start(tag, {peer: parts[peer] for peer in self.peers}, received, what).wait()
        add_up([own if rank == self.rank else received[rank] for rank in range(self.size)], total)
        # The one rounding: every rank sends the bits that it keeps itself.
        own.copy_(total)
        self.start(tag, dict.fromkeys(self.peers, own), {peer: parts[peer] for peer in self.peers}, what).wait()

    def broadcast(self, tag: Tag, value: torch.Tensor, source: int, what: str) -> None:
        """Overwrite ``value`` with that of rank ``source``."""
        outgoing = dict.fromkeys(self.peers, value) if self.rank == source else {}
        self.start(tag, outgoing, {} if self.rank == source else {source: value}, what).wait()

    def exchange_texts(self, text: str, what: str) -> list[str]:
        """Hear every rank's ``text``, in the order of ranks."""
        texts = [text] * self.size
        if self.size > 1:
            with guarded(what):
                dist.all_gather_object(texts, text, group=self.group)
        return texts

    def all_gather_by_library(self, tag: Tag, into: torch.Tensor, own: torch.Tensor, what: str) -> None:
        """``own`` of every rank (perhaps its place in ``into``), one behind the other, on the stream of the caller."""
        # torch 2.13 warns of the old names of this and the next, which 2.11 alone has.
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with guarded(what):
            call(into, own, group=self.library)
        self.sent[tag] += own.nbytes * (self.size - 1)

    def reduce_scatter_by_library(self, tag: Tag, into: torch.Tensor, whole: torch.Tensor, what: str) -> None:
        """This rank's section (perhaps its place) of the sum over ranks of ``whole``, on the stream of the caller."""
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with guarded(what):
            call(into, whole, group=self.library)
        self.sent[tag] += into.nbytes * (self.size - 1)

    def reduce_scatter(
        self,
        tag: Tag,
        own: torch.Tensor | None,
        senders: Mapping[int, torch.dtype],
        shard: int,
        scratch: torch.Tensor,
        what: str,
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Sums over ranks of this rank's section, piece by piece: ``(start, stop, fp32 sum)`` within the section. A sum
        is overwritten by the one after the next. ``own``: this rank's whole contribution, ``size`` sections of
        ``shard`` elements; None if it has none. ``senders``: the ranks that contribute, and the dtype of what they
        send. ``scratch``: uint8, from which the length of a piece follows.
        """
        others = [rank for rank in senders if rank != self.rank]
        piece = min(scratch.numel() // (4 * max(2 * self.size, 4)), shard)
        # Two sets by turns: a piece arrives in one while the other is added up; a sum stays until the next but one.
        slots = scratch[: 8 * piece * (len(others) + 1)].view(2, len(others) + 1, 4 * piece)
        ranges = [(a, min(a + piece, shard)) for a in range(0, shard, piece)]

        def begin(index: int) -> tuple[Pending, dict[int, torch.Tensor]]:
            a, b = ranges[index]
            received = {rank: slots[index % 2, i].view(senders[rank])[: b - a] for i, rank in enumerate(others)}
            outgoing = {} if own is None else {p: own[p * shard + a : p * shard + b] for p in self.peers}
            return self.start(tag, outgoing, received, what), received

        under_way = begin(0) if ranges else None
        for index, (a, b) in enumerate(ranges):
            assert under_way is not None
            pending, received = under_way
            pending.wait()
            # On the wire while this piece is added up and used.
            under_way = begin(index + 1) if index + 1 < len(ranges) else None
            if own is not None:
                received[self.rank] = own[self.rank * shard + a : self.rank * shard + b]
            total = slots[index % 2, -1].view(torch.float32)[: b - a]
            # In the order of ranks, in which the bits of the sum are defined.
            add_up([received[rank] for rank in sorted(received)], total)
            yield a, b, total


def add_up(terms: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """``total`` (fp32) = terms in order. The order is the contract: sums of floats depend on it."""
    if not terms:
        total.zero_()
    elif len(terms) == 1:
        total.copy_(terms[0])
    else:
        if terms[0].dtype is torch.float32 and terms[1].dtype is torch.float32:
            torch.add(terms[0], terms[1], out=total)
        else:
            total.copy_(terms[0]).add_(terms[1])
        for term in terms[2:]:
            total.add_(term)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: gloo need not know its dtype."""
    assert tensor.is_contiguous()
    return tensor.detach().view(-1).view(torch.uint8)


_OF_TORCH = str(Path(dist.__file__).parent)
_GONE = re.compile(r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|remote process|aborted", re.I)
"""Words of gloo, NCCL and the store for a rank that does not answer (torch 2.11 to 2.13)."""


@contextmanager
def collectives_of(whom: str) -> Iterator[None]:
    """Turn what a collective of torch in code of ``whom`` raises because a rank is gone into a lost rank. Raises
    RankLost, instead of torch's error; it names the rank where there is one other only.
    """
    try:
        yield
    except GeminiError:
        raise
    except RuntimeError as e:
        # Raised by torch.distributed itself: code of the program may say such words of something else.
        where = traceback.extract_tb(e.__traceback__)[-1].filename
        if not (where.startswith(_OF_TORCH) and _GONE.search(str(e))):
            raise
        # torch does not say which rank is gone: with one other there is no doubt.
        is_pair = dist.is_initialized() and dist.get_world_size() == 2
        raise lost(1 - dist.get_rank() if is_pair else None, f"a collective of {whom}", e) from e
