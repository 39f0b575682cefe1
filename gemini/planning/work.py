"""What a step of a plan has to do, whatever the schedule: gathering, computing, landing gradients, updating, in hops.

A *hop* is one task on one track with its cost on one rank and the bytes that it takes over a boundary; what goes
between the GPU and NVMe makes two. Bytes come from the closed forms of ``gemini.planning.traffic``, so that what is
simulated is what the plan says and the runtime counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from gemini.planning.costs import Cost, Costs
from gemini.planning.mesh import Grid, MeshSizes
from gemini.planning.plan import Plan
from gemini.planning.planes import GRAD, GRADS, WEIGHTS
from gemini.planning.timeline import Track
from gemini.planning.traffic import Boundary, fetch_traffic, gradient_traffic, path, update_tier, update_traffic
from gemini.tiers import Tier

COMPUTING = "computing"
LANDING = "gradient landing"
UPDATE = "update"
ACTIVATION = "activation"
GATHERING = "all-gather"
REDUCING = "reduce-scatter"
SLICES = "slices of layers"
PARTS = "parts of sequences"

_TRACKS = {
    Boundary(Tier.CPU, Tier.GPU): Track.H2D,
    Boundary(Tier.GPU, Tier.CPU): Track.D2H,
    Boundary(Tier.NVME, Tier.CPU): Track.NVME_READ,
    Boundary(Tier.CPU, Tier.NVME): Track.NVME_WRITE,
}


class Hop(NamedTuple):
    """One task: where it shows, where it queues, what it costs, and what waits for it says it waited for."""

    track: Track
    queue: str
    cost: Cost
    name: str
    cause: str
    chunk: int = -1
    boundary: Boundary | None = None
    num_bytes: int = 0


class Update(NamedTuple):
    """One update of a chunk: what is brought, the update, what is written back."""

    reads: tuple[Hop, ...]
    update: Hop
    writes: tuple[Hop, ...]

    @property
    def hops(self) -> tuple[Hop, ...]:
        return (*self.reads, self.update, *self.writes)

    @property
    def staged(self) -> int:
        """Bytes of staging that it passes through, as a whole."""
        return max(sum(hop.num_bytes for hop in hops) for hops in (self.reads, self.writes))

    def pieces(self, count: int) -> tuple[Update, ...]:
        """The same in ``count`` equal parts, which together move just as many bytes."""
        if count == 1:
            return (self,)
        return tuple(
            Update(
                tuple(_part(hop, number, count) for hop in self.reads),
                _part(self.update, number, count),
                tuple(_part(hop, number, count) for hop in self.writes),
            )
            for number in range(count)
        )


def _part(hop: Hop, number: int, count: int) -> Hop:
    num_bytes = hop.num_bytes * (number + 1) // count - hop.num_bytes * number // count
    return hop._replace(cost=hop.cost._replace(seconds=hop.cost.seconds / count), num_bytes=num_bytes)


class Landing(NamedTuple):
    """Gradients of a chunk that are complete after a moment, and whether they are the chunk's last."""

    chunk: int
    hops: tuple[Hop, ...]
    is_last: bool


class Work:
    """All the hops of a plan on one rank; ``grid``: where the ranks are, by default all on one machine."""

    def __init__(self, plan: Plan, costs: Costs, grid: Grid | None = None, *, measured: bool):
        self.plan = plan
        self.problem = plan.problem
        self.ranks = plan.layout.ranks
        self._costs = costs
        self._grid = Grid(MeshSizes(dp=self.ranks), self.ranks) if grid is None else grid
        self._measured = measured
        self._fetches: dict[int, tuple[Hop, ...]] = {}
        self._updates: dict[int, Update] = {}

    def _move(self, boundary: Boundary, num_bytes: int, name: str, cause: str, chunk: int = -1) -> Hop:
        track = _TRACKS[boundary]
        cost = {
            Track.H2D: self._costs.h2d, Track.D2H: self._costs.d2h,
            Track.NVME_READ: self._costs.nvme_read, Track.NVME_WRITE: self._costs.nvme_write,
        }[track](num_bytes)  # fmt: skip
        return Hop(track, track.value, cost, name, cause, chunk, boundary, num_bytes)

    def _share(self, track: Track, num_bytes: int, name: str, cause: str, index: int) -> Hop:
        """``num_bytes`` that those who have parts of a chunk are to have, or to add up."""
        sent = num_bytes * (self.ranks - 1) // self.ranks
        return Hop(track, track.value, self._costs.ring(self._grid.shards, sent), name, cause, index, None, sent)

    def exchange(self, moment: int) -> tuple[Hop, ...]:
        """What a moment's layers say to their other slices, and to other parts of the sequences: computing waits."""
        traced, found = self.plan.trace.moments[moment], []
        for group, sent, cause in (
            (self._grid.slices, traced.tp_bytes, SLICES), (self._grid.parts, traced.cp_bytes, PARTS),
        ):  # fmt: skip
            if sent:
                name = f"exchange of {traced.module or self.plan.trace.model}"
                cost = self._costs.ring(group, sent)
                found.append(Hop(Track.EXCHANGE, Track.EXCHANGE.value, cost, name, cause, num_bytes=sent))
        return tuple(found)

    @cached_property
    def computing(self) -> tuple[Hop, ...]:
        """One per moment."""
        found = []
        for moment in self.plan.trace.moments:
            cost = self._costs.compute(moment, measured=self._measured)
            name = f"{moment.phase.value} {moment.module or self.plan.trace.model}"
            found.append(Hop(Track.COMPUTE, Track.COMPUTE.value, cost, name, COMPUTING))
        return tuple(found)

    def fetch(self, index: int) -> tuple[Hop, ...]:
        """Gathering a chunk: from its home into the window, then the other ranks' parts."""
        if index not in self._fetches:
            self._fetches[index] = tuple(self._fetch(index))
        return self._fetches[index]

    def _fetch(self, index: int) -> list[Hop]:
        problem, homes = self.problem, self.plan.placement.homes[index]
        home, name = homes[WEIGHTS], f"fetch chunk {index}"
        cause = f"fetch from {home.value}"
        moved = fetch_traffic(problem, homes, index)
        hops = [self._move(way, moved[way], name, cause, index) for way in path(home, problem.compute)]
        wide = problem.plane_bytes(index)[WEIGHTS]
        narrow = problem.window_bytes(index) // self.ranks
        if problem.compute is Tier.CPU and (home is Tier.CPU or wide != narrow):
            # A copy (cast, in fp16) by the host that computes.
            hops.append(Hop(Track.UPDATE, "host", self._costs.host_pass(wide + narrow), name, cause, index))
        elif home is Tier.GPU:
            hops.append(Hop(Track.GATHER, "copy", self._costs.gpu_pass(wide + narrow), name, cause, index))
        if self.ranks > 1:
            title = f"all-gather chunk {index}"
            hops.append(self._share(Track.GATHER, problem.window_bytes(index), title, GATHERING, index))
        return hops

    def landings(self, *, adding: bool) -> tuple[tuple[Landing, ...], ...]:
        """Per moment: the gradients that are complete after it. A param whose gradient no moment names comes last.

        Several ranks wait for all gradients of a chunk, and divide their sum; one rank lands each as it comes.
        ``adding``: to those of an earlier micro-batch.
        """
        return self._adding if adding else self._first

    @cached_property
    def _first(self) -> tuple[tuple[Landing, ...], ...]:
        return self._landings(adding=False)

    @cached_property
    def _adding(self) -> tuple[tuple[Landing, ...], ...]:
        return self._landings(adding=True)

    def _landings(self, *, adding: bool) -> tuple[tuple[Landing, ...], ...]:
        trace, layout = self.plan.trace, self.plan.layout
        last = len(trace.moments) - 1
        at = {trace.params[p].name: m for m, moment in enumerate(trace.moments) for p in moment.gradients}
        found: list[list[Landing]] = [[] for _ in trace.moments]
        for index, chunk in enumerate(layout.chunks):
            if not chunk.trainable:
                continue
            numels: Counter[int] = Counter()
            for slot in chunk.slots:
                numels[at.get(slot.name, last)] += slot.numel
            if self.ranks > 1:
                numels = Counter({max(numels): chunk.payload})
            placement = self.plan.placement
            homes, streamed = placement.homes[index], index in placement.streamed
            moved = gradient_traffic(self.problem, homes, index, adding=adding, streamed=streamed)
            done = 0
            for moment in sorted(numels):
                before, done = done, done + numels[moment]
                share = {way: n * done // chunk.payload - n * before // chunk.payload for way, n in moved.items()}
                hops = self._landing(index, numels[moment], share)
                found[moment].append(Landing(index, tuple(hops), done == chunk.payload))
        return tuple(tuple(landings) for landings in found)

    def _landing(self, index: int, numel: int, moved: Mapping[Boundary, int]) -> list[Hop]:
        problem, homes, name = self.problem, self.plan.placement.homes[index], f"land gradients of chunk {index}"
        narrow = problem.layout.chunks[index].itemsize(problem.precision)
        hops: list[Hop] = []
        if self.ranks > 1:
            hops.append(self._share(Track.REDUCE, numel * narrow, f"reduce-scatter chunk {index}", REDUCING, index))
        off, up, down = Boundary(Tier.GPU, Tier.CPU), Boundary(Tier.NVME, Tier.CPU), Boundary(Tier.CPU, Tier.NVME)
        hops += [self._move(way, moved[way], name, LANDING, index) for way in (off, up) if moved.get(way)]
        home = homes.get(GRAD)
        if home is not None:  # copied into its plane, or into staging for it, with its norm in the same pass
            wide = sum(spec.block_bytes for kind, spec in problem.plane_specs(index).items() if kind in GRADS)
            on_gpu, num_bytes = home is Tier.GPU, (narrow + wide) * numel // self.ranks
            cost = self._costs.gpu_pass(num_bytes) if on_gpu else self._costs.landing(num_bytes)
            hops.append(Hop(Track.UPDATE, "copy" if on_gpu else "host", cost, name, LANDING, index))
        if moved.get(down):
            hops.append(self._move(down, moved[down], name, LANDING, index))
        return hops

    def update(self, index: int) -> Update:
        """One update of a chunk."""
        if index not in self._updates:
            self._updates[index] = self._update(index)
        return self._updates[index]

    def _update(self, index: int) -> Update:
        problem, homes, name = self.problem, self.plan.placement.homes[index], f"update chunk {index}"
        streamed = index in self.plan.placement.streamed
        where = update_tier(problem, homes, streamed=streamed)
        numel = problem.layout.chunks[index].numel // self.ranks
        grad_bytes = numel * problem.layout.chunks[index].itemsize(problem.precision)
        rule = problem.rule.of(problem.layout.chunks[index].exact)
        cost = self._costs.update(
            problem.plane_bytes(index), where, grad_bytes=grad_bytes, beyond_bytes=rule.beyond_bytes
        )
        update = Hop(Track.UPDATE, "update on gpu" if where is Tier.GPU else "update", cost, name, UPDATE, index)
        moved = update_traffic(problem, homes, index, streamed=streamed)
        hops = {way: self._move(way, moved[way], name, UPDATE, index) for way in _TRACKS if moved[way]}
        reads = tuple(hop for way, hop in hops.items() if way.target is where)
        writes = tuple(hop for way, hop in hops.items() if way.source is where)
        return Update(reads, update, writes)

    @property
    def activations_at(self) -> Tier | None:
        """Where checkpointed activations wait, if it is not where they are."""
        wanted = self.plan.offload_activations
        return None if wanted is None or Tier(wanted) is self.problem.compute else Tier(wanted)

    def save(self, moment: int) -> tuple[Hop, ...]:
        """Taking the inputs of checkpointed blocks away after a moment."""
        away, num_bytes = self.activations_at, self.plan.trace.moments[moment].saved_bytes
        if away is None or not num_bytes:
            return ()
        ways = path(self.problem.compute, away)
        return tuple(self._move(way, num_bytes, "offload activations", ACTIVATION) for way in ways)

    def restore(self, moment: int) -> tuple[Hop, ...]:
        """Bringing them back before one."""
        away, num_bytes = self.activations_at, self.plan.trace.moments[moment].restored_bytes
        if away is None or not num_bytes:
            return ()
        ways = path(away, self.problem.compute)
        return tuple(self._move(way, num_bytes, "restore activations", ACTIVATION) for way in ways)
