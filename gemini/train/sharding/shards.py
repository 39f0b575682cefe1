"""ZeRO-3 over chunks: each rank keeps a shard of every plane; whole weights exist for a moment.

    gather   own shard from its home into the window, the others' beside it: all-gather
    read     a param's values by name, to those ranks that ask

and gradients in ``gemini.train.sharding.reduction``. What is in flight is in the ledger: windows while they are filled,
whole gradients as "gradients in flight", pieces on the wire as "exchange".
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gemini.errors import GeminiError, RankLost, RankMismatch
from gemini.memory.chunks.chunk import Chunk
from gemini.memory.devices.device import DONE, Event
from gemini.memory.movement.mover import Mover, tiles
from gemini.memory.movement.transfers import Worker
from gemini.memory.store import ChunkStore
from gemini.patches import replaced
from gemini.planning.layout import part_of
from gemini.planning.planes import PlaneKind
from gemini.planning.timeline import Track
from gemini.planning.working import replica_scratch_bytes
from gemini.ranks.agree import SERVED, Facts, Point, Request, agree, choose, mismatch
from gemini.ranks.group import Ranks
from gemini.ranks.wire import Tag, Wire
from gemini.tiers import Tier
from gemini.train.params.by_name import host_part, read_range
from gemini.train.params.handle import ParamHandle, ParamSet
from gemini.train.sharding.scripted import Channel, LibraryChannel, ScriptedStep

if TYPE_CHECKING:
    from gemini.train.sharding.reduction import Reduction

_PARTED = -1  # where the ranks of a replica stand that cannot agree among themselves


class Company:
    """The company of a rank that shares its params with none: nobody need ask whether there are others."""

    def __init__(self, ranks: Ranks, mover: Mover):
        self.ranks, self._mover = ranks, mover
        self.sent_last_step: Counter[str] = Counter()
        """Bytes by what they were sent for."""

    @property
    def divides(self) -> bool:
        """Whether each rank has a part of every chunk; of a param perhaps all or nothing, and yet all read together."""
        return self.ranks.wire.size > 1

    def agree(
        self,
        point: Point,
        doing: str,
        facts: Callable[[], Facts] | None = None,
        refusal: BaseException | None = None,
        *,
        among: Wire | None = None,
        words: str = "values",
    ) -> None:
        """Wait until all ranks of the model stand at ``point``, serving those that do not yet; then go on together, or
        not at all: see :func:`gemini.ranks.agree.agree`. ``among``: who must agree, if more than have the same params.
        """
        everyone, among = self.ranks.everyone, among or self.ranks.everyone

        def meet(number: int) -> list[int]:
            return [said for row in self.meet_all(point, number) for said in row]

        # Those with the same params meet first, and serve each other; then all of the job stand together.
        if among is not everyone:
            meet(0)
        agree(among, doing, facts, refusal, swap=meet if among is everyone else None, words=words)

    def agree_on_folder(
        self, point: Point, doing: str, directory: str | os.PathLike[str], refusal: BaseException | None
    ) -> None:
        """Let all who write or read one model do it, in folders with the same name, or none."""
        # Only the name: mounts and drives differ between machines.
        facts = Facts({"directory": Path(os.fsdecode(directory)).name})
        self.agree(point, doing, lambda: facts, refusal, among=self.ranks.writers, words="folder")

    def meet_all(self, point: Point, detail: int = 0) -> list[list[int]]:
        """Wait until every rank of the model stands at ``point``; what each of them says, by replica."""
        return [[detail]]

    def read_into(self, handle: ParamHandle, kind: PlaneKind, out: torch.Tensor) -> None:
        """Read the values of a param in a plane, whole, into a flat host tensor of the plane's dtype."""
        read_range(self._mover, handle.chunk.planes[kind], handle, out)

    def begin_step(self) -> None:
        """Note that a forward begins that a backward may follow."""

    def end_step(self) -> None:
        """Note that an optimizer step is over."""

    def close(self) -> None:
        """End what goes on for the model, which ends."""


class Shards(Company):
    """The company of a rank that shares its params with others. ``exchange``: bytes of host memory for pieces on the
    wire. ``kinds``: of planes. ``follows``: whether steps may follow a script.
    """

    in_order = True

    def __init__(
        self,
        ranks: Ranks,
        params: ParamSet,
        store: ChunkStore,
        *,
        exchange: int,
        kinds: tuple[PlaneKind, ...],
        follows: bool = False,
    ):
        super().__init__(ranks, store.mover)
        self.params = params
        across = 0 if ranks.replicas.size == 1 else replica_scratch_bytes(ranks.wire.size, exchange)
        self.scratch, self.replica_scratch = store.device.make_host_buffer(exchange).split([exchange - across, across])
        self.num_exchanges = 0
        """How often the ranks have told each other what they want."""
        self._num_steps = 0
        self.channel = (Channel if ranks.wire.library is None else LibraryChannel)(ranks.wire, store, self.scratch)
        self._chunks, self._device = store.chunks, store.device
        self._kinds = kinds
        self._manager = store.manager
        self.reducing: Reduction
        """Adds up gradients when all ranks stand there; it sets itself here as it is made."""
        # Without a second rank, or where attention asks in between, nothing follows a script.
        self._lanes = (Worker("collectives"), Worker("reduce")) if follows and ranks.wire.size > 1 else ()
        self.step: ScriptedStep | None = None
        """The script under way."""
        self.num_scripted = 0
        self._numbers = {handle.name: number for number, handle in enumerate(params.handles)}
        self._read: torch.Tensor | None = None
        self._sent_before: Counter[str] = Counter()

    def close(self) -> None:
        if self.step is not None:  # landings wait for what was offered; the others hear no word of it, nor are heard
            self.step.is_parted = True
            self.step.part()
        for lane in self._lanes:
            lane.close()

    def end_step(self) -> None:
        """Count an optimizer step: what was sent since the last one is what the report shows."""
        self._num_steps += 1
        self.reducing.end_step()
        total, ranks = Counter[str](), self.ranks  # since the start, by collective
        for wire in {ranks.wire, ranks.everyone, ranks.replicas, ranks.context, ranks.experts}:
            for tag, num_bytes in wire.sent.items():
                total["agreement" if tag in (Tag.HEADER, Tag.VALUES) else tag.name.lower()] += num_bytes
        self.sent_last_step = total - self._sent_before
        self._sent_before = total

    # ---- a step that follows a script -------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A forward that a backward may follow begins: if all ranks are about to do the same, they follow a script."""
        if not self._lanes:
            return
        self.finish()
        completed = self.reducing.completed()
        if completed is None:
            return
        # Windows that are filled on this rank may be empty on another: they are part of what the checksum says.
        there = [chunk.spec.index for chunk in self._chunks if chunk.gathered and not chunk.resident]
        script = self._manager.foresight.script(there, completed)
        if script is None or not (script.gathers or script.reductions):
            return
        heard = self.reach(Request(Point.BEGIN_STEP, 0, script.checksum))
        # One that does something else has heard of it in this message, and asks for what it needs.
        if any(other.point is not Point.BEGIN_STEP or other.detail != script.checksum for other in heard):
            return
        self.num_scripted += 1
        self.step = ScriptedStep(script, self.channel, self._manager, self._lanes)

    def upcoming(self) -> Iterator[tuple[int, int]]:
        """List what the script gathers next, (moment, chunk); nothing where ranks ask each other."""
        return iter(()) if self.step is None else self.step.upcoming()

    def follow(self) -> None:
        """Gather what the script gathers for the moment of a chunk that was acquired, also if it is here still."""
        step, place = self.step, self._manager.foresight.place
        while step is not None and place is not None and (following := step.next_gather()) is not None:
            chunk = self._chunks[following.chunk]
            if following.moment > place or not chunk.gathered:
                return
            # Other ranks may have let go of it, and the script gathers it on all.
            arrival = step.gather(chunk, again=True)
            if arrival is None:
                return
            with self.channel.during(Track.GATHER, chunk):
                arrival.wait_on_device()

    def finish(self, *, at_end: bool = False) -> bool:
        """Leave the script, if one is followed. ``at_end``: where a backward ends, and not because something else is
        wanted. True if that ends it on every rank: its gradients, and their norms, are the same thing on all.
        """
        step = self.step
        if step is None:
            return False
        with self._mover.about("other ranks", "wait for other ranks"):
            is_through = step.finish()
            self.step = None  # and not before: what broke off is finished before anything else is asked
            has_all = False
            try:
                self.reducing.leave_script()
                has_all = is_through and at_end
            finally:  # also when a reduction has failed here: the others wait for what this rank says
                is_alike = bool(step.script.reductions) and self.reducing.end_script(has_all=has_all)
        return is_alike

    # ---- asking -----------------------------------------------------------------------------------------------------

    def reach(self, request: Request) -> list[Request]:
        """Wait, serving other ranks, until ``request`` is done or all ranks stand at its point; what all want then. A
        script is left first. No worker may come here: the training thread may be asking for something else. Raises
        RankMismatch, on every rank, if the requests can never meet; RankLost if a rank died or does not answer.
        """
        self.finish()
        chosen = None
        with self._mover.about("other ranks", "wait for other ranks"):
            try:
                while chosen != request.subject:
                    # The same list on every rank, so that all of them choose the same.
                    said = torch.tensor([*request[:3], self._num_steps], dtype=torch.int64, device="cpu")
                    rows = self.ranks.wire.swap(Tag.AGREEMENT, said, request.point.words).tolist()
                    self.num_exchanges += 1
                    requests = [Request(Point(point), *others) for point, *others in rows]
                    chosen = choose(requests)
                    if chosen is None:
                        raise mismatch(requests, self.ranks.wire.global_ranks)
                    point, index = chosen
                    if point in SERVED:
                        self._serve(chosen, [rank for rank, other in enumerate(requests) if other.subject == chosen])
                    elif point is Point.REDUCE:
                        self.reducing.reduce(index, requests)
                    # Else it was what other ranks wanted: this one says the same again, until its own turn comes.
                return requests
            except RankMismatch:
                # The other replicas wait for this one at another point, and would wait until the timeout.
                with contextlib.suppress(RankLost):
                    self._tell_replicas(_PARTED)
                raise

    def meet(self, point: Point, detail: int = 0) -> list[int]:
        """Wait until every rank of the shard group stands at ``point``; what each of them says."""
        return [request.detail for request in self.reach(Request(point, 0, detail))]

    def meet_all(self, point: Point, detail: int = 0) -> list[list[int]]:
        """Raises RankMismatch, on every rank, if those of some replica, or the replicas, want other things."""
        row = self.meet(point, detail)
        if self.ranks.replicas.size == 1:
            return [row]
        said = self._tell_replicas(point, *row)
        if any(other[0] != point for other in said):
            where = "; ".join(
                f"the ranks of replica {number} disagree, their own error says about what"
                if other[0] == _PARTED
                else f"replica {number} is at {Point(other[0]).words}"
                for number, other in enumerate(said)
            )
            raise RankMismatch(
                f"the replicas of this model were asked to do different things: {where}. Every rank must make the "
                "same backwards and steps, and save and load together"
            )
        return [other[1 : 1 + len(row)] for other in said]

    def _tell_replicas(self, point: int, *details: int) -> list[list[int]]:
        """Hear where the ranks of one shard stand; always as many numbers, so that different points meet as well."""
        said = torch.zeros(1 + self.ranks.wire.size, dtype=torch.int64, device="cpu")
        said[: 1 + len(details)] = torch.tensor([point, *details], dtype=torch.int64, device="cpu")
        return self.ranks.replicas.swap(Tag.AGREEMENT, said, "comparing replicas").tolist()

    # ---- weights ------------------------------------------------------------------------------------------------

    def gather(self, chunk: Chunk) -> Event:
        """Fill a populated window with the weights of all ranks; the end of the copy out of this rank's home."""
        arrival = None if self.step is None else self.step.gather(chunk)
        if arrival is not None:
            return arrival
        # A worker must not ask the others: the training thread may be asking them for something else.
        if self._mover.in_worker:  # it is gathered when it is needed
            raise GeminiError(f"it is not the turn of {chunk.name} in the script of this step")
        # Where all ranks gather it, serving says when the copy out of its home is over; else nothing is copied behind.
        chunk.fetched = DONE
        self.reach(Request(Point.GATHER, chunk.spec.index))
        return chunk.fetched

    def _serve(self, subject: tuple[Point, int], receivers: list[int]) -> None:
        """Give what this rank keeps of a chunk's weights, or of a param's plane, to those who asked; all ranks do."""
        point, index = subject
        if point is Point.READ:
            number, kind = divmod(index, len(self._kinds))
            self._serve_read(self.params.handles[number], self._kinds[kind], receivers)
            return
        chunk = self._chunks[index]
        chunk.settle()
        # If all want it an all-gather is the shortest way; else nobody may be made to hold a whole chunk.
        if len(receivers) == self.ranks.wire.size:
            chunk.fetched = self.channel.fetch(chunk)
            self.channel.gather(chunk)
        else:
            self._send_weights(chunk, receivers)

    def _send_weights(self, chunk: Chunk, receivers: list[int]) -> None:
        """Send weights that only some ranks need: host tile by host tile, so that the others need no memory for it."""
        mover, wire, plane = self._mover, self.ranks.wire, chunk.weights
        shard, what = plane.numel, f"sending the weights of {chunk.name}"
        taking, dtype = wire.rank in receivers, chunk.flat.dtype
        # So many elements on the wire that those of every rank fit the scratch area in fp32.
        piece = max(self.scratch.numel() // (4 * max(wire.size, 4)) // 2048 * 2048, 2048)
        for start, stop in tiles(0, shard, min(mover.tile, piece)):
            own, _ = mover.host_tile(0, plane, start, stop)
            if own.dtype != dtype:  # as modules read it
                own = mover.scratch(2, dtype, stop - start).copy_(own)
            received = {}
            if taking:
                room = self.scratch.view(dtype)[: (stop - start) * len(wire.peers)].view(-1, stop - start)
                received = dict(zip(wire.peers, room, strict=True))
            outgoing = {receiver: own for receiver in receivers if receiver != wire.rank}
            with self.channel.during(Track.GATHER, chunk):
                wire.start(Tag.ALL_GATHER, outgoing, received, what).wait()
            for rank, part in [*received.items(), *([(wire.rank, own)] if taking else [])]:
                into = chunk.flat[rank * shard + start : rank * shard + stop]
                # As in an all-gather: what others sent counts as sent by them.
                crosses = part.numel() * part.element_size() if rank == wire.rank else 0
                with mover.crossing(Tier.CPU, self._device.tier, crosses):
                    self._device.copy(into, part, "fetch").wait()

    # ---- by name ------------------------------------------------------------------------------------------------

    def read_into(self, handle: ParamHandle, kind: PlaneKind, out: torch.Tensor) -> None:
        # Where the others' parts go while this rank serves and is served.
        with replaced(self, "_read", out):
            self.reach(Request(Point.READ, self._numbers[handle.name] * len(self._kinds) + self._kinds.index(kind)))

    def _serve_read(self, handle: ParamHandle, kind: PlaneKind, receivers: list[int]) -> None:
        handle.chunk.settle()
        wire, plane, what = self.ranks.wire, handle.chunk.planes[kind], f"reading {kind} of {handle.name}"
        for owner in range(wire.size):
            part = part_of(handle.slot, handle.chunk.spec.numel, wire.size, owner)
            for start, stop in tiles(0, part.numel, self._mover.tile):
                own = None
                if owner == wire.rank:
                    own = host_part(self._mover, plane, part.start + start, part.start + stop)
                    wire.start(Tag.BY_NAME, {t: own for t in receivers if t != owner}, {}, what).wait()
                if wire.rank in receivers:
                    assert self._read is not None
                    into = self._read[(part.offset + start) // plane.block : plane.items(part.offset + stop)]
                    if own is not None:
                        into.copy_(own)
                    else:
                        wire.start(Tag.BY_NAME, {}, {owner: into}, what).wait()
