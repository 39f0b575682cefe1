"""What a step of a plan has to do, in hops, and in which order: which hop waits for which.

A *hop* is one task on one track with its cost on one rank and the bytes that it takes over a boundary; what goes
between the GPU and NVMe makes two. Bytes come from the closed forms of ``gemini.planning.traffic``, so that what is
simulated is what the plan says and the runtime counts. There are two orders:

``serial``      fetch, compute, land, each after the other; updates in declaration order after backward
``overlapped``  fetches as early as the windows' room allows, landing and updates behind computing, each update in time
                for its chunk's next use
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

from gemini.planning import working
from gemini.planning.costs import RESOURCES, Cost, Costs, Grid
from gemini.planning.fluid import Fluid
from gemini.planning.layout import block_of
from gemini.planning.plan import Plan, standing, window_room
from gemini.planning.planes import GRAD, GRADS, WEIGHTS, compute_itemsize
from gemini.planning.timeline import TRACKS, Track
from gemini.planning.trace import Phase, chunks_of_params
from gemini.planning.traffic import fetch_traffic, gradient_traffic, path, update_tier, update_traffic
from gemini.planning.working import TILE, device_tile_numel, waiting_gradients
from gemini.tiers import BOUNDARIES, Boundary, Tier

COMPUTING = "computing"
LAUNCHING = "launching"
LANDING = "gradient landing"
UPDATE = "update"
ACTIVATION = "activation"
GATHERING = "all-gather"
REDUCING = "reduce-scatter"
SLICES = "slices of layers"
PARTS = "parts of sequences"


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
        parts, at = (tuple(_part(hop, n, count) for hop in self.hops) for n in range(count)), len(self.reads)
        return tuple(Update(own[:at], own[at], own[at + 1 :]) for own in parts)


def _part(hop: Hop, number: int, count: int) -> Hop:
    num_bytes = hop.num_bytes * (number + 1) // count - hop.num_bytes * number // count
    return hop._replace(cost=hop.cost._replace(seconds=hop.cost.seconds / count), num_bytes=num_bytes)


class Landing(NamedTuple):
    """Gradients of a chunk that are complete after a moment, and whether they are the chunk's last."""

    chunk: int
    hops: tuple[Hop, ...]
    is_last: bool


class Work:
    """All the hops of a plan on one rank; ``grid``: where the ranks are."""

    def __init__(self, plan: Plan, costs: Costs, grid: Grid, *, measured: bool):
        self.plan = plan
        self.problem = plan.problem
        self.ranks = plan.layout.ranks
        self.moving = plan.problem.moving(plan.placement)
        self.fetch, self.landings, self.update = cache(self._fetch), cache(self._landings), cache(self._update)
        self._costs = costs
        self._grid = grid
        self._measured = measured

    def _move(
        self, boundary: Boundary, num_bytes: int, name: str, cause: str, chunk: int = -1, *, copies: int = 1
    ) -> Hop:
        track, cost = TRACKS[boundary], self._costs.move(boundary, num_bytes, copies=copies)
        return Hop(track, track.value, cost, name, cause, chunk, boundary, num_bytes)

    def _share(self, track: Track, num_bytes: int, name: str, cause: str, index: int) -> Hop:
        """``num_bytes`` that those who have parts of a chunk are to have, or to add up."""
        sent = num_bytes * (self.ranks - 1) // self.ranks
        return Hop(track, track.value, self._costs.ring(self._grid.shards, sent), name, cause, index, None, sent)

    def exchange(self, moment: int) -> tuple[Hop, ...]:
        """Messages of a moment's layers to their other slices, and to other parts of the sequences: computing waits."""
        traced = self.plan.trace.moments[moment]
        name = f"exchange of {traced.module or self.plan.trace.model}"
        sent = ((self._grid.slices, traced.tp_bytes, SLICES), (self._grid.parts, traced.cp_bytes, PARTS))
        return tuple(
            Hop(Track.EXCHANGE, Track.EXCHANGE.value, self._costs.ring(group, n), name, cause, num_bytes=n)
            for group, n, cause in sent
            if n
        )

    @cached_property
    def computing(self) -> tuple[Hop, ...]:
        """One per moment."""
        found = []
        for moment in self.plan.trace.moments:
            cost = self._costs.compute(moment, measured=self._measured)
            name = f"{moment.phase.value} {moment.module or self.plan.trace.model}"
            found.append(Hop(Track.COMPUTE, Track.COMPUTE.value, cost, name, COMPUTING))
        return tuple(found)

    @cached_property
    def launching(self) -> tuple[float, ...]:
        """One per moment: seconds of the thread that launches it."""
        chunk_of, homes = chunks_of_params(self.plan.trace, self.plan.layout), self.plan.placement.homes
        leaves = [own.get(GRAD) is not self.problem.compute for own in homes]
        found = []
        for moment in self.plan.trace.moments:
            hooked = self.plan.trace.micro_batches * sum(chunk_of[p] in self.moving for p in moment.params)
            hooked += sum(leaves[chunk_of[p]] for p in moment.gradients)
            found.append(self._costs.launching(moment, hooked, measured=self._measured))
        return tuple(found)

    def _fetch(self, index: int) -> list[Hop]:
        """Gathering a chunk: from its home into the window, then the other ranks' parts."""
        problem, homes = self.problem, self.plan.placement.homes[index]
        home, name = homes[WEIGHTS], f"fetch chunk {index}"
        cause = f"fetch from {home.value}"
        moved = fetch_traffic(problem, homes, index)
        hops = [self._move(way, moved[way], name, cause, index) for way in path(home, problem.compute)]
        wide = problem.sizes[index][WEIGHTS]
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

    def _landings(self, *, adding: bool) -> tuple[tuple[Landing, ...], ...]:
        """Per moment the gradients that are complete after it; those that no moment names come last. Several ranks
        wait for all of a chunk. ``adding``: to those of an earlier micro-batch.
        """
        trace, layout = self.plan.trace, self.plan.layout
        last = len(trace.moments) - 1
        at = {trace.params[p].name: m for m, moment in enumerate(trace.moments) for p in moment.gradients}
        found: list[list[Landing]] = [[] for _ in trace.moments]
        for index, chunk in enumerate(layout.chunks):
            if not chunk.trainable:
                continue
            numels, copies = Counter[int](), Counter[int]()
            for slot in chunk.slots:
                numels[at.get(slot.name, last)] += slot.numel
                copies[at.get(slot.name, last)] += 1
            if self.ranks > 1:
                numels, copies = Counter({max(numels): chunk.payload}), Counter({max(numels): 1})
            placement = self.plan.placement
            homes, streamed = placement.homes[index], index in placement.streamed
            moved = gradient_traffic(self.problem, homes, index, adding=adding, streamed=streamed)
            done = 0
            for moment in sorted(numels):
                before, done = done, done + numels[moment]
                share = {way: n * done // chunk.payload - n * before // chunk.payload for way, n in moved.items()}
                hops = self._landing(index, numels[moment], share, copies[moment], adding=adding)
                found[moment].append(Landing(index, tuple(hops), done == chunk.payload))
        return tuple(tuple(landings) for landings in found)

    def _landing(
        self, index: int, numel: int, moved: Mapping[Boundary, int], copies: int, *, adding: bool
    ) -> list[Hop]:
        problem, homes, name = self.problem, self.plan.placement.homes[index], f"land gradients of chunk {index}"
        narrow = problem.layout.chunks[index].itemsize(problem.precision)
        hops: list[Hop] = []
        if self.ranks > 1:
            hops.append(self._share(Track.REDUCE, numel * narrow, f"reduce-scatter chunk {index}", REDUCING, index))
        to_host = [boundary for boundary in BOUNDARIES if boundary.target is Tier.CPU]
        to_files = [boundary for boundary in BOUNDARIES if boundary.target.in_files]
        hops += [self._move(way, moved[way], name, LANDING, index, copies=copies) for way in to_host if moved.get(way)]
        home = homes.get(GRAD)
        wide = sum(spec.block_bytes for kind, spec in problem.forms[index].items() if kind in GRADS)
        # By one copy into its plane, summed up before it leaves: the host has nothing to do.
        straight = (
            problem.compute is Tier.GPU and home is Tier.CPU and wide == narrow and not adding and self.ranks == 1
        )
        if home is not None and not straight:
            # Copied into its plane, or into staging for it, with its norm in the same pass; or read and added to.
            on_gpu, num_bytes = home is Tier.GPU, (narrow + wide * (2 if adding else 1)) * numel // self.ranks
            cost = self._costs.gpu_pass(num_bytes) if on_gpu else self._costs.landing(num_bytes)
            hops.append(Hop(Track.UPDATE, "copy" if on_gpu else "host", cost, name, LANDING, index))
        hops += [self._move(way, moved[way], name, LANDING, index) for way in to_files if moved.get(way)]
        return hops

    def _update(self, index: int) -> Update:
        """One update of a chunk."""
        problem, homes, name = self.problem, self.plan.placement.homes[index], f"update chunk {index}"
        streamed = index in self.plan.placement.streamed
        where = update_tier(problem, homes, streamed=streamed)
        cost = self._costs.update(problem, index, where)
        update = Hop(Track.UPDATE, "update on gpu" if where is Tier.GPU else "update", cost, name, UPDATE, index)
        moved = update_traffic(problem, homes, index, streamed=streamed)
        hops = {way: self._move(way, moved[way], name, UPDATE, index) for way in BOUNDARIES if moved[way]}
        reads = tuple(hop for way, hop in hops.items() if way.target is where)
        writes = tuple(hop for way, hop in hops.items() if way.source is where)
        return Update(reads, update, writes)

    @property
    def landing_room(self) -> int:
        """Bytes that gradients on their way out of the computing tier may take: those of a block, and what is free."""
        problem, tier = self.problem, self.problem.compute
        waiting = waiting_gradients(problem.layout, compute_itemsize(problem.precision))
        return max(problem.in_flight, waiting) + max(problem.budgets[tier] - self.plan.bytes_per_tier.get(tier, 0), 0)

    @cached_property
    def flight_room(self) -> int:
        """Bytes that activations on their way, out or back, may take of the computing tier."""
        free = self.problem.budgets[self.problem.compute] - self.plan.bytes_per_tier.get(self.problem.compute, 0)
        depth = max(working.FLIGHTS[self.problem.offload_to or Tier.GPU], working.flight_bytes(self.plan.trace))
        room = min(depth, self.problem.flights + max(free, 0))
        return room * self.plan.trace.micro_batches  # a moment's are those of all that pass through it in turn

    def carried_bytes(self, moment: int, *, back: bool) -> int:
        """Bytes of inputs of checkpointed blocks that are taken away after a moment, or brought ``back`` before it."""
        traced = self.plan.trace.moments[moment]
        return 0 if self.problem.offload_to is None else traced.restored_bytes if back else traced.saved_bytes

    def carry(self, moment: int, *, back: bool) -> tuple[Hop, ...]:
        away, num_bytes = self.problem.offload_to, self.carried_bytes(moment, back=back)
        if away is None or not num_bytes:
            return ()
        ways = path(away, self.problem.compute) if back else path(self.problem.compute, away)
        name = "restore activations" if back else "offload activations"
        return tuple(self._move(way, num_bytes, name, ACTIVATION) for way in ways)


STEPS = 4
"""Steps that an overlapped schedule is played for; the last one is taken. The first begins with nothing pending, and
activations that leave more slowly than they are made have filled their room by then.
"""

SLOTS = 4
"""Pieces of updates under way at once, as in the engine: one or two are read, one is updated, one is written."""

PIECES = 8
"""Into so many pieces at most an update that passes through staging is cut. (The engine's tiles are smaller.)"""

MANY_PIECES = 512
"""Not more pieces than these where chunks are many: then a chunk is a small part of all work."""


class Task(NamedTuple):
    """The work that a task of the fluid model stands for."""

    hop: Hop
    step: int
    moment: int


class Change(NamedTuple):
    """Bytes that a tier holds more or fewer from the start or the end of a task on (task -1: from the beginning)."""

    task: int
    at_end: bool
    tier: Tier
    holder: str
    num_bytes: int


class Graph:
    """The tasks of some steps, and what they change in memory."""

    def __init__(self, work: Work):
        self.work = work
        self.fluid = Fluid(RESOURCES)
        self.tasks: list[Task] = []
        self.changes: list[Change] = []
        self.begins: list[int] = []
        """Per step of an overlapped schedule, the task that its first moment computes in."""
        trace, away = work.plan.trace, work.problem.offload_to
        # By moment, of what is saved for backward: where it is in the plan's own account, which has room for flights.
        self._elsewhere = [0] * len(trace.moments) if away is None else [*working.carried_away(trace)]
        for index in standing(work.plan):
            self.window(-1, index, at_end=True)

    def add(
        self, hop: Hop, step: int, moment: int, after: Iterable[int], urgency: float = 0, takes: int = 0, gives: int = 0
    ) -> int:
        self.tasks.append(Task(hop, step, moment))
        seconds, loads = hop.cost
        return self.fluid.add(hop.queue, seconds, after=after, loads=loads, urgency=urgency, takes=takes, gives=gives)

    def chain(
        self, hops: Iterable[Hop], step: int, moment: int, after: Iterable[int], urgency: float = 0, staged: int = 0
    ) -> list[int]:
        """One after the other; from the first to the last they hold ``staged`` bytes of the buffer."""
        hops, found = list(hops), list[int]()
        for number, hop in enumerate(hops):
            takes = staged if number == 0 else 0
            gives = staged if number == len(hops) - 1 else 0
            found.append(self.add(hop, step, moment, found[-1:] or after, urgency, takes, gives))
        return found

    def change(self, task: int, holder: str, num_bytes: int, *, at_end: bool, tier: Tier | None = None) -> None:
        if num_bytes:
            self.changes.append(Change(task, at_end, tier or self.work.problem.compute, holder, num_bytes))

    def window(self, task: int, index: int, sign: int = 1, *, at_end: bool) -> None:
        """A chunk's window is there from a task on, or (``sign`` -1) no more."""
        self.change(task, "windows", sign * self.work.problem.window_bytes(index), at_end=at_end)

    def live(self, task: int, moment: int, before: int) -> int:
        """Activations during and after a moment; returns those after it. On the host no budget counts them."""
        traced = self.work.plan.trace.moments[moment]
        peak, live = (own - self._elsewhere[moment] for own in (traced.peak_bytes, traced.live_bytes))
        if self.work.problem.compute is Tier.GPU:
            self.change(task, "activations", peak - before, at_end=False)
            self.change(task, "activations", live - peak, at_end=True)
        return live

    def carried(self, moment: int, tasks: list[int], *, back: bool, left: int | None = None) -> None:
        """Activations are taken away by ``tasks``, or ``back``: there they are from the first of these on, or until the
        last. ``left``: what took them away, if it may still be under way when they are back.
        """
        away, num_bytes = self.work.problem.offload_to, self.work.carried_bytes(moment, back=back)
        if tasks and away is not None:
            task, change = (tasks[-1] if left is None else left, -num_bytes) if back else (tasks[0], num_bytes)
            self.change(task, "activations", change, at_end=back, tier=away)


_NOTHING = Hop(Track.COMPUTE, "nothing", Cost(0.0, {}), "", COMPUTING)
"""The end of several tasks."""


def _launch(hop: Hop, seconds: float) -> Hop:
    """The time of the thread that launches a moment."""
    return Hop(Track.COMPUTE, LAUNCHING, Cost(seconds, {}), f"launch {hop.name}", LAUNCHING)


def _over(flights: deque[tuple[int, int]], room: int) -> list[int]:
    """Take the first of what has so many bytes each off until there is room for the others: what that was."""
    held, found = sum(num_bytes for _, num_bytes in flights), list[int]()
    while flights and held > max(room, 0):
        first, num_bytes = flights.popleft()
        held -= num_bytes
        found.append(first)
    return found


def _awaited_together(work: Work) -> dict[int, list[int]]:
    """By chunk whose weights do not move: those of its block, whose updates a block waits for before it computes."""
    found: dict[str, list[int]] = {}
    for index, chunk in enumerate(work.plan.layout.chunks):
        block = block_of(chunk.slots[0].name)
        if block and index not in work.moving:
            found.setdefault(block, []).append(index)
    return {index: chunks for chunks in found.values() for index in chunks}


def least_of(work: Work, *, is_serial: bool) -> float:
    """Seconds that no step is below: all that there is to do, if it is ``is_serial``; else what the busiest queue and
    the busiest resource have to do; and, where updates wait for the norm, those of all chunks that are read up to some
    moment, with the computing behind it. What comes back of saved activations is left out: it may not have left.
    """
    plan, n = work.plan, work.plan.accumulate
    exchanged = [work.exchange(moment) for moment in range(len(work.computing))]
    chain = [
        hop.cost.seconds + sum(e.cost.seconds for e in own) for hop, own in zip(work.computing, exchanged, strict=True)
    ]
    hops = [(n, hop) for hop in (*work.computing, *(hop for own in exchanged for hop in own))]
    hops += [(n, hop) for moment in range(len(chain)) for hop in work.carry(moment, back=False)]
    for times, moves, adding in ((1, plan.moves, False), (n - 1, plan.moves_of(1), True)):
        hops += [(times, hop) for own in moves for index in own.fetch for hop in work.fetch(index) if times]
        landings = work.landings(adding=adding) if times else ()
        hops += [(times, hop) for own in landings for landing in own for hop in landing.hops]
    first_use = {i: at for at, access in reversed([*enumerate(plan.accesses)]) for i in access.chunks}
    updates: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for index, chunk in enumerate(plan.layout.chunks):
        for hop in work.update(index).hops if chunk.trainable else ():
            hops.append((1, hop))
            of_queue, at = updates[hop.queue], first_use.get(index, len(chain))
            of_queue[at] = of_queue.get(at, 0.0) + hop.cost.seconds
    queues, resources = defaultdict[str, float](float), defaultdict[str, float](float)
    for times, hop in hops:
        queues[hop.queue] += times * hop.cost.seconds
        for resource, load in hop.cost.loads.items():
            resources[resource] += times * hop.cost.seconds * load
    if is_serial:
        return sum(queues.values())
    whole, least = n * sum(chain), max(*queues.values(), *resources.values(), n * sum(chain))
    if plan.problem.gradients == "transient":
        return least
    before = [0.0, *accumulate(chain)]
    for seconds in updates.values():
        moments = sorted(moment for moment in seconds if moment < len(chain))
        until = accumulate(seconds[moment] for moment in moments)
        least = max([least, *(u + whole - before[moment] for moment, u in zip(moments, until, strict=True))])
    return least


def serial(work: Work) -> Graph:
    """The engine with ``overlap=False``: one thing at a time. One step; the next is the same."""
    order = _Serial(work)
    for batch in range(work.plan.accumulate):
        for moment in range(len(work.plan.trace.moments)):
            order.add_moment(batch, moment)
    if not order.updates_inside:
        for index, chunk in enumerate(work.plan.layout.chunks):
            if chunk.trainable:
                order.add_update(index, -1)
    return order.graph


class _Serial:
    """The order of :func:`serial` in the making: whatever is added comes after all that was."""

    def __init__(self, work: Work):
        self.graph, self._work = Graph(work), work
        self.updates_inside = work.problem.gradients == "transient"
        self._last: list[int] = []  # the task that the next one waits for; none at first
        self._gathered = set(standing(work.plan))
        self._live = 0  # bytes of activations

    def add_moment(self, batch: int, moment: int) -> None:
        """Fetch, launch, compute and land, with what is carried away and back."""
        work, graph = self._work, self.graph
        now, hop = work.plan.moves_of(batch)[moment], work.computing[moment]
        for index in now.evict:
            self._drop(index, len(graph.tasks), at_end=False)  # before the first task of this moment
        graph.carried(moment, self._do(work.carry(moment, back=True), moment), back=True)
        for index in now.fetch:
            tasks = self._do(work.fetch(index), moment)
            self._drop(index, tasks[0], at_end=False)  # gathered anew in the next micro-batch
            self._gathered.add(index)
            graph.window(tasks[0], index, at_end=False)
        # Launching is beside computing: only what is longer shows.
        launching = work.launching[moment] - hop.cost.seconds
        if launching > 0:
            self._do([_launch(hop, launching)], -1)
        (computing,) = self._do([hop], moment)
        self._live = graph.live(computing, moment, self._live)
        self._do(work.exchange(moment), moment)
        graph.carried(moment, self._do(work.carry(moment, back=False), moment), back=False)
        for landing in work.landings(adding=batch > 0)[moment]:
            self._do(landing.hops, moment)
            if self.updates_inside and landing.is_last and batch == work.plan.accumulate - 1:
                self.add_update(landing.chunk, moment)

    def add_update(self, index: int, moment: int) -> None:
        """Update a chunk (``moment`` -1: after backward), whose gathered copy is then of the step before."""
        self._drop(index, self._do(self._work.update(index).hops, moment)[-1], at_end=True)

    def _do(self, hops: Iterable[Hop], moment: int) -> list[int]:
        tasks = self.graph.chain(hops, 0, moment, self._last)
        self._last = tasks[-1:] or self._last
        return tasks

    def _drop(self, index: int, task: int, *, at_end: bool) -> None:
        if index in self._gathered:
            self._gathered.remove(index)
            self.graph.window(task, index, -1, at_end=at_end)


def _pieces(work: Work, trained: list[int]) -> dict[int, tuple[Update, ...]]:
    """The update of each chunk, cut where it passes through staging."""
    updates = {index: work.update(index) for index in trained}
    most = max(1, min(PIECES, MANY_PIECES // max(sum(update.staged > 0 for update in updates.values()), 1)))
    found = {}
    device_tile = device_tile_numel(max(chunk.numel for chunk in work.plan.layout.chunks))
    for index, update in updates.items():
        tile = device_tile if index in work.plan.placement.streamed else TILE // SLOTS
        tiles = -(-(work.plan.layout.chunks[index].numel // work.ranks) // tile)
        found[index] = update.pieces(max(1, min(most, tiles)) if update.staged else 1)
    return found


@dataclass
class _Stay:
    """A chunk in its window. Moments count through all steps; -1 is before the first."""

    chunk: int
    fetched: int
    first_use: int
    last_use: int
    room_after: int = -1  # there is room for the chunk when this moment is computed


def _stays(work: Work, num_moments: int) -> list[_Stay]:
    """All of them, in the order in which the plan fetches."""
    plan, per_batch = work.plan, len(work.plan.moves)
    found = [_Stay(index, -1, -1, -1) for index in standing(plan)]
    current = {stay.chunk: stay for stay in found}
    for at in range(num_moments):
        batch, moment = divmod(at, per_batch)
        moves = plan.moves_of(batch % plan.accumulate)[moment]
        for index in moves.evict:
            current.pop(index, None)
        for index in moves.fetch:
            current[index] = _Stay(index, at, at, at)
            found.append(current[index])
        for stay in [current[i] for i in plan.accesses[moment].chunks if i in work.moving and i in current]:
            if stay.last_use == stay.fetched:
                stay.first_use = at
            stay.last_use = at
    _find_room(work, found)
    return found


def _find_room(work: Work, stays: Iterable[_Stay]) -> None:
    """A window is let go after its last use, so that the room is there for the next fetch in order."""
    room, held, after = window_room(work.problem, work.plan.placement), 0, -1
    ends: list[tuple[int, int]] = []  # a heap: the last uses of what is in the room, with the chunk
    for stay in stays:
        size = work.problem.window_bytes(stay.chunk)
        while ends and held + size > room and ends[0][0] < max(stay.fetched, 0):
            free_at, gone = heapq.heappop(ends)
            held -= work.problem.window_bytes(gone)
            after = max(after, free_at)
        held += size
        if held > room:
            after = max(after, stay.fetched - 1)
        heapq.heappush(ends, (stay.last_use, stay.chunk))
        stay.room_after = after


class _Moment(NamedTuple):
    """A moment of some step."""

    at: int  # its place among those of all steps
    step: int
    batch: int  # the micro-batch
    number: int  # in the trace


class _Carried:
    """Activations that leave behind forward and come back ahead of backward, in the order of :class:`_Overlap`."""

    def __init__(self, work: Work, graph: Graph, computed: Sequence[int]):
        """``computed``: the tasks of the moments so far."""
        self._work, self._graph, self._computed = work, graph, computed
        self._moments = work.plan.trace.moments
        self._saved: list[tuple[int, int]] = []  # what backward will ask for: (the end of the save, bytes)
        self._leaving: deque[tuple[int, int]] = deque()  # those of it that are on their way, the oldest first
        self._used: list[int] = []  # the ends of those that backward has used while they left
        # Those that come, by the moments that ask for them: (moment, bytes). They have room behind the moment `taken`.
        self._coming: deque[tuple[int, int]] = deque()
        self._taken = 0
        self._turn = next((n for n, moment in enumerate(self._moments) if moment.phase is not Phase.FORWARD), 0)

    def begin(self, now: _Moment) -> list[int]:
        """Tasks to be over before a moment is computed: it has what it asks for, and there is room for its own."""
        # The oldest have left where there is no room for more.
        after = _over(self._leaving, self._work.flight_room - self._work.carried_bytes(now.number, back=False))
        return after + self._restore(now) + (self._all_left() if not now.number else [])

    def leave(self, now: _Moment, tasks: list[int]) -> None:
        """Let what a moment saved leave by these tasks."""
        self._graph.carried(now.number, tasks, back=False)
        self._saved.append((tasks[-1], self._moments[now.number].saved_bytes))
        self._leaving.append(self._saved[-1])

    def _restore(self, now: _Moment) -> list[int]:
        """Bring activations back, when backward has begun and there is room for them. What has not left is there."""
        hops, num_bytes = self._work.carry(now.number, back=True), self._moments[now.number].restored_bytes
        if not hops:
            return []
        left, latest = self._take(num_bytes)
        # None comes before backward has begun, which computes behind forward's last moment.
        first = now.at - now.number + self._turn
        if self._taken < first:
            self._taken = first
            self._coming.clear()
        self._coming.append((now.at, num_bytes))
        self._taken = max([self._taken, *_over(self._coming, self._work.flight_room)])
        after = left + ([self._computed[self._taken - 1]] if self._taken else [])
        if left:
            tasks = self._graph.chain(hops, now.step, now.number, after, now.at)
        else:
            tasks = [self._graph.add(_NOTHING, now.step, -1, after)]
        self._graph.carried(now.number, tasks, back=True, left=None if left or latest < 0 else latest)
        return tasks[-1:] + (self._all_left() if left else [])

    def _take(self, num_bytes: int) -> tuple[list[int], int]:
        """Take what was saved last: the ends of the saves that are elsewhere by now, and of the last one that is not
        (-1 without any), whose memory backward has when it has left.
        """
        left, latest = list[int](), -1
        while self._saved and num_bytes > 0:
            end, own = self._saved.pop()
            num_bytes -= own
            if self._leaving and self._leaving[-1][0] == end:
                self._used.append(self._leaving.pop()[0])
                latest = max(latest, end)
            else:
                left.append(end)
        return left, latest

    def _all_left(self) -> list[int]:
        """Tasks to be over before others have the memory of what backward used while it left."""
        ends, self._used = self._used, []
        return ends


class _Overlap:
    """The order of :func:`overlapped` in the making, moment after moment. Tasks are known by their numbers."""

    def __init__(self, work: Work, *, clipping: bool):
        self._work, self._plan, self._clipping = work, work.plan, clipping
        self._per_batch, self.per_step = len(self._plan.moves), len(self._plan.moves) * self._plan.accumulate
        self.graph = Graph(work)
        self._computed: list[int] = []
        self._live = 0
        self._stays = _stays(work, (STEPS + 1) * self.per_step)
        self._coming = deque(stay for stay in self._stays if stay.fetched >= 0)
        self._fetched: dict[int, int] = {}  # what a moment that reads the chunk has to wait for

        trained = [index for index, chunk in enumerate(self._plan.layout.chunks) if chunk.trainable]
        first_use = {i: at for at in reversed(range(self._per_batch)) for i in self._plan.accesses[at].chunks}
        self._first_use = {index: first_use.get(index, self.per_step) for index in trained}
        self._pieces = _pieces(work, trained)
        staged = (piece.staged for parts in self._pieces.values() for piece in parts)
        self.graph.fluid.buffer = SLOTS * max(staged, default=0)
        self._updated: dict[int, int] = {}  # the end of a chunk's last update

        self._launches, self._together = any(work.launching), _awaited_together(work)
        self._launched: list[int] = []  # the last moment that was, and what the next one is launched after besides
        self._due: dict[int, int] = {}  # updates that the thread which launches has not waited for

        self._landed: dict[int, list[int]] = {}  # by chunk, gradients that no update has used
        self._landing: deque[tuple[int, int]] = deque()  # gradients on their way: (when they have left, bytes)
        self._room = work.landing_room
        self._landed_here: list[int] = []  # what the next moment waits for: landed by the host that computes, or room

        self._carried = _Carried(work, self.graph, self._computed)

    def moment(self, at: int) -> _Moment:
        step, rest = divmod(at, self.per_step)
        return _Moment(at, step, *divmod(rest, self._per_batch))

    def begin(self, now: _Moment) -> None:
        """Compute a moment, behind what it reads."""
        while self._coming and self._coming[0].fetched == now.at:
            self._fetch(self._coming.popleft())
        read = self._plan.accesses[now.number].chunks
        after = self._computed[-1:] + [self._fetched.pop(index) for index in read if index in self._fetched]
        after += [*self._carried.begin(now), *self._landed_here]
        self._landed_here.clear()
        if self._launches:
            after.append(self._launch(now, read))
        self._computed.append(self.graph.add(self._work.computing[now.number], now.step, now.number, after, now.at))
        if not now.batch and not now.number:
            self.graph.begins.append(self._computed[-1])
        self._live = self.graph.live(self._computed[-1], now.number, self._live)

    def end(self, now: _Moment) -> None:
        """Add what comes behind a moment: its layers' messages, saved activations, gradients and updates."""
        self._computed[-1:] = self._behind(self._work.exchange(now.number), now)[-1:] or self._computed[-1:]
        saved = self._behind(self._work.carry(now.number, back=False), now)
        if saved:
            self._carried.leave(now, saved)
        for landing in self._work.landings(adding=now.batch > 0)[now.number]:
            self._land(landing, now)
        while self._room < 0 and self._landing:  # what is computed next has the room of the oldest ones
            end, num_bytes = self._landing.popleft()
            self._room += num_bytes
            self._landed_here.append(end)
        if self._clipping and now.at % self.per_step == self.per_step - 1:  # the norm needs every gradient
            self._update_all(now)

    def finish(self) -> None:
        """Fetch what has room before the moment that was begun last, beside the step before; let all windows go."""
        while self._coming and self._coming[0].room_after < len(self._computed) - 1:
            self._fetch(self._coming.popleft())
        for stay in self._stays:
            if 0 <= stay.last_use < len(self._computed):
                self.graph.window(self._computed[stay.last_use], stay.chunk, -1, at_end=True)

    def _behind(self, hops: Iterable[Hop], now: _Moment) -> list[int]:
        return self.graph.chain(hops, now.step, now.number, self._computed[-1:], now.at)

    def _fetch(self, stay: _Stay) -> None:
        now = self.moment(stay.fetched)
        after = [self._computed[stay.room_after]] if stay.room_after >= 0 else []
        after += [self._updated[stay.chunk]] if stay.chunk in self._updated else []
        tasks = self.graph.chain(self._work.fetch(stay.chunk), now.step, now.number, after, stay.first_use)
        self.graph.window(tasks[0], stay.chunk, at_end=False)
        self._fetched[stay.chunk] = tasks[-1]

    def _launch(self, now: _Moment, read: Iterable[int]) -> int:
        """Launch a moment, behind the updates of what it reads in place."""
        awaited = {other for index in read for other in self._together.get(index, (index,))}
        self._launched += [self._due.pop(index) for index in sorted(awaited) if index in self._due]
        hop = _launch(self._work.computing[now.number], self._work.launching[now.number])
        self._launched = [self.graph.add(hop, now.step, -1, self._launched)]
        return self._launched[0]

    def _land(self, landing: Landing, now: _Moment) -> None:
        tasks = self._behind(landing.hops, now)
        if self._work.problem.compute is Tier.CPU and all(hop.boundary is None for hop in landing.hops):
            self._landed_here += tasks[-1:]
        elif tasks:
            # What the host adds has left before that. Ranks, and files, keep their gradients until all is over.
            has_left = landing.hops[-1].queue == "host" and self._work.ranks == 1
            self._landing.append((tasks[-2:][0] if has_left else tasks[-1], landing.hops[0].num_bytes))
            self._room -= landing.hops[0].num_bytes
        self._landed.setdefault(landing.chunk, []).extend(tasks[-1:] or self._computed[-1:])
        if landing.is_last and now.batch == self._plan.accumulate - 1 and not self._clipping:
            self._update(landing.chunk, now, now.number, self._landed.pop(landing.chunk))

    def _update_all(self, now: _Moment) -> None:
        """Update in the order of next use, behind the norm."""
        # Its sums leave behind all gradients, by the same engine. The thread that launches waits for it.
        everything = sorted({end for ends in self._landed.values() for end in ends} | {self._computed[-1]})
        norm = self.graph.add(_NOTHING, now.step, -1, everything)
        self._launched += [norm] if self._launches else []
        for index in sorted(self._first_use, key=lambda index: (self._first_use[index], index)):
            self._update(index, now, -1, [norm])
        self._landed.clear()

    def _update(self, index: int, now: _Moment, moment: int, after: Iterable[int]) -> None:
        urgency = (now.step + 1) * self.per_step + self._first_use[index]
        ends = [
            self.graph.chain(piece.hops, now.step, moment, after, urgency, piece.staged)[-1]
            for piece in self._pieces[index]
        ]
        end = ends[0] if len(ends) == 1 else self.graph.add(_NOTHING, now.step, -1, ends)
        self._updated[index] = self._due[index] = end
        if index not in self._work.moving:
            self._fetched[index] = end


def overlapped(work: Work, *, clipping: bool) -> Graph:
    """Everything that may run beside computing does: ``STEPS`` steps, and the beginning of one more. Updates have a
    worker of their own, which takes them in the order of their next use, reads ahead and writes behind; fetches have
    another. Gradients that leave the computing tier land beside computing; those in host memory between two moments.
    """
    order = _Overlap(work, clipping=clipping)
    for at in range(STEPS * order.per_step):
        now = order.moment(at)
        order.begin(now)
        order.end(now)
    order.begin(order.moment(STEPS * order.per_step))
    order.finish()
    return order.graph
