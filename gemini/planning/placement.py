"""Which tier is home to each plane of each chunk: from a layout and budgets, integers all the way. ``fill_fastest``
(the fastest tier first) and ``by_fractions`` (the field's usual knobs) both end in ``check_fits``, which refuses a
model that cannot fit: with the missing bytes and the cheapest change that would make it fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate

from gemini.errors import BudgetExceeded, human_bytes
from gemini.planning.layout import DEFAULT_MAX_CHUNK, Layout
from gemini.planning.planes import (
    ADAM,
    GRAD,
    GRADS,
    WEIGHTS,
    WHOLE_TEMPORARIES,
    PlaneKind,
    PlaneSpec,
    RuleSpec,
    bytes_by_kind,
    plane_specs,
    precision_of,
)
from gemini.planning.working import whole_numel
from gemini.tiers import DRIVE, FILED, Tier

Homes = Mapping[PlaneKind, Tier]


@dataclass(frozen=True)
class StaticPlacement:
    """Place fixed fractions of weights and optimizer states on the tiers. Each fraction is between 0 and 1 and is met
    to within one chunk. What is not covered stays in host memory.

    Args:
        weights_on_gpu: weights that stay on the GPU (first chunks first). Without a GPU it has no effect, and warns.
        optimizer_on_gpu: masters and states on the GPU, where they are then updated (first chunks first).
        weights_on_nvme: weights in the spill file (last chunks first).
        optimizer_on_nvme: masters, states and retained gradients in the spill file (last chunks first).
        updates_on_gpu: states in host memory that are copied to the GPU for their update, and back (first chunks
            first). Without a GPU it has no effect, and warns.

    Raises:
        ValueError: for a fraction outside of 0 to 1, or two that add up to more than 1.
    """

    weights_on_gpu: float = 0.0
    optimizer_on_gpu: float = 0.0
    weights_on_nvme: float = 0.0
    optimizer_on_nvme: float = 0.0
    updates_on_gpu: float = 0.0

    def __post_init__(self) -> None:
        for name, fraction in vars(self).items():
            if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
                raise ValueError(f"StaticPlacement({name}=) is a fraction between 0 and 1, got {fraction!r}")
        for what in ("weights", "optimizer"):
            shares = {tier: self.share(what, tier) for tier in Tier if self.share(what, tier)}
            if sum(shares.values()) > 1:
                listed = " and ".join(f"{what}_on_{tier.value}={share:g}" for tier, share in shares.items())
                raise ValueError(f"StaticPlacement: {listed} make more than 1")

    def share(self, what: str, tier: Tier) -> float:
        """The fraction of "weights" or of "optimizer" that a tier is to have; host memory has what is left."""
        return float(getattr(self, f"{what}_on_{tier.value}", 0.0))


@dataclass(frozen=True)
class Placement:
    """The home tier of every plane of every chunk: ``homes[chunk_index][WEIGHTS]``.

    Attributes:
        homes: by chunk.
        streamed: chunks with planes in host memory that pass through the GPU for their update, which runs there.

    Raises:
        ValueError: for a streamed chunk that is not there, or has nothing in host memory, or something on NVMe.
    """

    homes: tuple[Homes, ...]
    streamed: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for index in sorted(self.streamed):
            if not 0 <= index < len(self.homes):
                raise ValueError(f"the update of chunk {index} is streamed, and there are {len(self.homes)} chunks")
            if not can_stream(self.homes[index]):
                listed = ", ".join(f"{kind} on {tier.value}" for kind, tier in self.homes[index].items())
                raise ValueError(
                    f"the update of chunk {index} is streamed from host memory through the GPU, and its planes live "
                    f"elsewhere ({listed}): leave it out of streamed, or put them on cpu"
                )


def can_stream(homes: Homes) -> bool:
    """Whether an update may be streamed: something comes from host memory, and nothing from further away."""
    return Tier.CPU in homes.values() and not any(tier in FILED for tier in homes.values())


@dataclass(frozen=True)
class Problem:
    """All that placing needs to know: the chunks, the bytes per element, and the bytes that are spoken for.

    Attributes:
        budgets: bytes per tier; a tier that is absent does not exist. Those of one of ``sharing`` ranks, which divide
            the host memory and drives of a machine.
        compute: the tier on which forward and backward run (GPU, or CPU on a machine without one).
        working_set: bytes of gathered weights that one module needs at once, at worst.
        staging: bytes of host staging that are reserved if any plane has to be staged.
        device_staging: bytes of the GPU that are reserved if any update is streamed through it.
        in_flight: bytes of the computing tier for whole gradients that wait to be divided among ranks, or for their
            update.
        flights: bytes of the computing tier for offloaded activations on their way.
        waiting: bytes of the computing tier that gathered weights leave to gradients on their way to the host, as far
            as they have more than ``working_set``.
        exchange: bytes of host memory for pieces on their way between ranks.
        factors: bytes of host memory for states that are no planes.
        activations: bytes of the computing tier that are left to activations and workspaces.
        beside: bytes of the computing tier that the process takes whatever it does: on a GPU a context and kernels.
        others: bytes of the computing tier that another model with the same budget gathers at once, at worst, while
            this one does not compute.
        max_chunk: what the layout was cut with.
        offloaded: bytes of checkpointed activations that wait in the tier ``offload_to``.
        rule: of the updates; it says which planes there are.
        durable: whether weights and states have two slots each on NVMe, wherever they live.
    """

    layout: Layout
    precision: str
    gradients: str
    budgets: Mapping[Tier, int]
    compute: Tier
    working_set: int
    staging: int
    activations: int = 0
    in_flight: int = 0
    flights: int = 0
    waiting: int = 0
    exchange: int = 0
    max_chunk: int = DEFAULT_MAX_CHUNK
    offloaded: int = 0
    offload_to: Tier | None = None
    device_staging: int = 0
    rule: RuleSpec = ADAM
    factors: int = 0
    beside: int = 0
    durable: bool = False
    others: int = 0
    sharing: int = 1

    def durable_bytes(self, index: int) -> dict[PlaneKind, int]:
        """Bytes of each plane of a chunk that outlives the process: of none without ``durable``."""
        sizes = self.sizes[index] if self.durable else {}
        return {kind: num_bytes for kind, num_bytes in sizes.items() if kind not in GRADS}

    def spare_slots(self, placement: Placement) -> int:
        """Bytes of NVMe for slots of durable planes beside those that they live in."""
        return sum(
            (1 if homes[kind] is DRIVE else 2) * num_bytes
            for i, homes in enumerate(placement.homes)
            for kind, num_bytes in self.durable_bytes(i).items()
        )

    @cached_property
    def temporaries(self) -> int:
        """Bytes that an update of a whole param takes beside planes: in host memory, and on the tier that computes."""
        return 4 * WHOLE_TEMPORARIES * whole_numel(self.layout, self.rule)

    @cached_property
    def forms(self) -> list[dict[PlaneKind, PlaneSpec]]:
        """By chunk, the form of each of its planes."""
        return [
            plane_specs(
                precision_of(chunk, self.precision),
                self.gradients,
                self.rule.of(chunk.exact),
                trainable=chunk.trainable,
                coded=chunk.coded,
            )
            for chunk in self.layout.chunks
        ]

    @cached_property
    def sizes(self) -> list[dict[PlaneKind, int]]:
        """By chunk, the bytes of each of its planes on one rank: its shard."""
        numels = [chunk.numel // self.layout.ranks for chunk in self.layout.chunks]
        return [bytes_by_kind(forms.values(), numel) for forms, numel in zip(self.forms, numels, strict=True)]

    def window_bytes(self, index: int) -> int:
        """Bytes of a chunk's gathered weights: the whole chunk, in the compute dtype or as it is coded."""
        chunk = self.layout.chunks[index]
        return chunk.numel * chunk.itemsize(self.precision)

    def needs_window(self, index: int, home: Tier) -> bool:
        """Whether the weights must be gathered into other memory than their home before a module can read them."""
        if self.layout.ranks > 1 or home is not self.compute:
            return True
        chunk = self.layout.chunks[index]
        return chunk.trainable and precision_of(chunk, self.precision) == "fp16"  # read from an fp32 master

    def moving(self, placement: Placement) -> frozenset[int]:
        """The chunks of which that is so under ``placement``."""
        return frozenset([i for i, homes in enumerate(placement.homes) if self.needs_window(i, homes[WEIGHTS])])

    def for_windows(self, *, gathers: bool) -> int:
        """Bytes of the computing tier for gathered weights: of this model, if it gathers any, or of others."""
        return max(self.working_set if gathers else 0, self.others)

    def spoken_for_by_name(
        self, *, gathers: bool = True, stages: bool = True, streams: bool = False
    ) -> dict[Tier, dict[str, int]]:
        """Bytes that no plane may take, by tier and by taker: where some weights have to be gathered into windows,
        some plane cannot be worked on in place (on an accelerator that is always possible: reads by name), some update
        is streamed through the GPU.
        """
        taken = defaultdict[Tier, dict[str, int]](dict)
        taken[self.compute] = {"context": self.beside, "activations": self.activations}
        if gathers or self.others:
            taken[self.compute]["windows"] = self.for_windows(gathers=gathers)
        taken[self.compute] |= {"gradients in flight": self.in_flight, "activations in flight": self.flights}
        if streams:
            taken[Tier.GPU]["staging"] = self.device_staging
        if stages or gathers or self.durable or self.compute is Tier.GPU:  # what is committed from memory is staged
            taken[Tier.CPU]["staging"] = self.staging
        taken[Tier.CPU] |= {"exchange": self.exchange, "factors": self.factors}
        for tier in {Tier.CPU, self.compute}:
            taken[tier]["temporaries"] = self.temporaries
        if self.offload_to is not None:
            taken[self.offload_to]["saved activations"] = self.offloaded
        return dict(taken)

    def spoken_for(self, *, gathers: bool = True, stages: bool = True, streams: bool = False) -> dict[Tier, int]:
        """Bytes per tier that no plane may take: the sums of :meth:`spoken_for_by_name`."""
        return _sums(self.spoken_for_by_name(gathers=gathers, stages=stages, streams=streams))

    def waiting_in(self, placement: Placement) -> int:
        """Bytes of gradients that wait for their way to the host under ``placement``."""
        leaves = any(homes.get(GRAD, self.compute) is not self.compute for homes in placement.homes)
        return self.waiting if leaves else 0

    def demands_by_name(self, placement: Placement) -> dict[Tier, dict[str, int]]:
        """Bytes that are spoken for under ``placement``, by tier and by what takes it."""
        gathers = bool(self.moving(placement))
        stages = any(tier is not self.compute for homes in placement.homes for tier in homes.values())
        return self.spoken_for_by_name(gathers=gathers, stages=stages, streams=bool(placement.streamed))

    def demands(self, placement: Placement) -> dict[Tier, int]:
        """Bytes per tier that are spoken for under ``placement``."""
        return _sums(self.demands_by_name(placement))

    def held(self, placement: Placement) -> dict[Tier, dict[str, int]]:
        """Bytes that each tier would hold: planes, then what gathering, staging and activations need."""
        held: dict[Tier, dict[str, int]] = {tier: {} for tier in Tier if tier in self.budgets}
        for homes, sizes in zip(placement.homes, self.sizes, strict=True):
            for kind, num_bytes in sizes.items():
                at = held.setdefault(homes[kind], {})
                at[kind] = at.get(kind, 0) + num_bytes
        for tier, taken in self.demands_by_name(placement).items():
            held.setdefault(tier, {}).update({what: num_bytes for what, num_bytes in taken.items() if num_bytes})
        if self.durable:
            held.setdefault(DRIVE, {})["spare slots"] = self.spare_slots(placement)
        return held


def _sums(by_name: Mapping[Tier, Mapping[str, int]]) -> dict[Tier, int]:
    return {tier: sum(taken.values()) for tier, taken in by_name.items()}


def fill_fastest(problem: Problem) -> Placement:
    """Each plane in the fastest tier that still has room: weights first, then gradients, then optimizer states (on an
    accelerator those of a chunk together or not at all, because that decides where its update runs). If everything fits
    the computing tier, nothing is kept free for gathering. Raises BudgetExceeded if it does not fit.
    """
    everything = sum(sum(own.values()) for own in problem.sizes) + problem.activations + problem.beside
    stages = everything > problem.budgets[problem.compute]
    placement = _fill(problem, problem.spoken_for(gathers=False, stages=stages))
    if problem.demands(placement) != problem.spoken_for(gathers=False, stages=stages):
        placement = _fill(problem, problem.spoken_for())  # some weights move: leave room to gather them
    check_fits(problem, placement)
    return placement


def _fill(problem: Problem, taken: Mapping[Tier, int]) -> Placement:
    """Fill the fastest tiers first, with weights and then with states, beside the bytes that are ``taken``."""
    sizes = problem.sizes
    indices = range(len(sizes))
    tiers = [tier for tier in Tier if tier in problem.budgets]
    room = {tier: problem.budgets[tier] - taken.get(tier, 0) for tier in tiers}
    homes: list[dict[PlaneKind, Tier]] = [{} for _ in indices]

    def place(index: int, kinds: Sequence[PlaneKind], among: Sequence[Tier]) -> None:
        """All ``kinds`` in one tier, the first with room; the last tier takes them anyway (checked at the end)."""
        kinds = [kind for kind in kinds if kind in sizes[index]]
        num_bytes = sum(sizes[index][kind] for kind in kinds)
        tier = next((tier for tier in among if room[tier] >= num_bytes), among[-1])
        room[tier] -= num_bytes
        homes[index].update(dict.fromkeys(kinds, tier))

    for i in indices:
        place(i, [WEIGHTS], tiers)
    below = [tier for tier in tiers if tier is not Tier.GPU] or tiers
    in_memory = [tier for tier in below if not tier.in_files]
    states = [*GRADS, *problem.rule.states]
    for i in indices:
        if Tier.GPU in tiers and room[Tier.GPU] >= sum(sizes[i].get(kind, 0) for kind in states):
            place(i, states, [Tier.GPU])
    for kind in states:  # a drive that has some of them has the time of all forward: nothing waits for the last ones
        for i in sorted(indices, key=spread_evenly):
            if kind not in homes[i]:
                place(i, [kind], in_memory if kind in problem.rule.in_memory else below)
    return Placement(tuple(homes))


def spread_evenly(index: int) -> float:
    """A number below 1: those above any bound are at even distances (multiples of the golden ratio)."""
    return index * (5**0.5 - 1) / 2 % 1


def by_fractions(problem: Problem, static: StaticPlacement) -> Placement:
    """Place as ``static`` asks for; BudgetExceeded if it does not fit, ValueError for a tier without a budget."""
    for tier in reversed(Tier):
        streamed = static.updates_on_gpu if tier is Tier.GPU else 0.0
        fraction = max(static.share("weights", tier), static.share("optimizer", tier), streamed)
        if fraction and tier not in problem.budgets:
            remedy = f"{tier.value}_path=" if tier.in_files else "a device with its own memory"
            raise ValueError(
                f"StaticPlacement puts {fraction:.0%} on {tier.value}, which does not exist: give {remedy}"
            )
    homes: list[dict[PlaneKind, Tier]] = []
    weights = _by_share(problem, [WEIGHTS], "weights", static)
    states = _by_share(problem, [*problem.rule.states, *GRADS], "optimizer", static)
    for planes, weights_home, states_home in zip(problem.sizes, weights, states, strict=True):
        homes.append({kind: weights_home if kind == WEIGHTS else states_home for kind in planes})
        if states_home in FILED:
            homes[-1].update((kind, Tier.CPU) for kind in planes if kind in problem.rule.in_memory)
    placement = Placement(tuple(homes), _streamed(problem, homes, static.updates_on_gpu))
    check_fits(problem, placement)
    return placement


def _by_share(problem: Problem, kinds: Sequence[PlaneKind], what: str, static: StaticPlacement) -> list[Tier]:
    """By chunk the home of these planes: the first ones on the GPU, the last in files, the slowest of these behind."""
    sizes = [sum(planes.get(kind, 0) for kind in kinds) for planes in problem.sizes]
    total, share, tiers = sum(sizes) or 1, {tier: static.share(what, tier) for tier in Tier}, list[Tier]()
    for middle in _middles(sizes):
        home, end = Tier.GPU if middle < share[Tier.GPU] * total else Tier.CPU, 1.0
        for tier in reversed(FILED):
            end -= share[tier]
            if home is Tier.CPU and middle > end * total:
                home = tier
        tiers.append(home)
    return tiers


def _middles(sizes: Collection[int]) -> Iterator[float]:
    """Where the middle of each lies, in bytes: what has its middle in a share belongs to that."""
    return (end - size / 2 for size, end in zip(sizes, accumulate(sizes), strict=True))


def _streamed(problem: Problem, homes: Sequence[Homes], fraction: float) -> frozenset[int]:
    """The first chunks of those whose states live in host memory: this fraction of the bytes of their states."""
    sizes: dict[int, int] = {}
    for index, planes in enumerate(homes):
        on_cpu = all(tier is Tier.CPU for kind, tier in planes.items() if kind != WEIGHTS)
        if problem.layout.chunks[index].trainable and on_cpu and can_stream(planes):
            sizes[index] = sum(n for kind, n in problem.sizes[index].items() if kind != WEIGHTS)
    wanted = fraction * sum(sizes.values())
    return frozenset(index for index, middle in zip(sizes, _middles(sizes.values()), strict=True) if middle < wanted)


def bytes_per_tier(problem: Problem, placement: Placement) -> dict[Tier, int]:
    """The sums of :meth:`Problem.held`."""
    return _sums(problem.held(placement))


def check_fits(problem: Problem, placement: Placement) -> None:
    """Refuse a placement that a budget cannot hold. Raises BudgetExceeded with the missing bytes of each tier and the
    cheapest change; ValueError if it is of other chunks or planes, streams updates that do not exist (frozen chunks),
    or where there is no GPU, or puts into a file what stays in memory.
    """
    if len(placement.homes) != len(problem.sizes):
        raise ValueError(f"the placement has homes for {len(placement.homes)} chunks, of {len(problem.sizes)}")
    if placement.streamed and problem.compute is not Tier.GPU:
        raise ValueError("the placement streams updates through a GPU, and this machine has none: leave streamed= out")
    if frozen := [index for index in placement.streamed if not problem.layout.chunks[index].trainable]:
        raise ValueError(
            f"the placement streams updates of frozen chunks {sorted(frozen)}: leave them out of streamed="
        )
    for index, (homes, sizes) in enumerate(zip(placement.homes, problem.sizes, strict=True)):
        if homes.keys() != sizes.keys():
            raise ValueError(f"the placement has homes for {[*homes]} of chunk {index}, which has {[*sizes]}")
        filed = [kind for kind in homes if homes[kind] in FILED and kind in problem.rule.in_memory]
        if filed:
            raise ValueError(
                f"{filed[0]} has less than a byte per param and stays in memory: put it on cpu, not "
                f"{homes[filed[0]].value}"
            )
    used = bytes_per_tier(problem, placement)
    missing = {t: n - problem.budgets.get(t, 0) for t, n in used.items() if n > problem.budgets.get(t, 0)}
    if not missing:
        return
    lines = [
        f"{human_bytes(gap)} missing on {tier.value} (needs {human_bytes(used[tier])}, "
        f"budget {human_bytes(problem.budgets.get(tier, 0))})"
        for tier, gap in missing.items()
    ]
    what = f"{problem.layout.payload:,} params, {problem.precision}, gradients={problem.gradients!r}"
    each, change = f" for each of {problem.sharing} ranks", _cheapest_change(problem, missing)
    gaps = "; ".join(lines) + (each if problem.sharing > 1 else "")
    raise BudgetExceeded(f"the model ({what}) does not fit: {gaps}. Cheapest change: {change}")


def _cheapest_change(problem: Problem, missing: Mapping[Tier, int]) -> str:
    """The least that would make it fit, found by placing again with more of one tier; of host memory and drives for
    all ranks of a machine, as budgets are given.
    """
    budgets, compute, at_least = problem.budgets, problem.compute, partial(_at_least, problem.sharing)
    floor = problem.spoken_for()[compute]
    if budgets.get(compute, 0) < floor:
        roomy = replace(problem, budgets={**budgets, compute: floor, DRIVE: 2**62})
        needed = bytes_per_tier(roomy, _fill(roomy, roomy.spoken_for()))
        floor = max(floor, needed[compute])  # where that is host memory, what no file holds is there as well
        short = [tier for tier, n in needed.items() if tier is not compute and n > budgets.get(tier, 0)]
        host = f" and the cpu budget to {at_least(Tier.CPU, needed[Tier.CPU])}" if Tier.CPU in short else ""
        disk = f", with nvme_path= and nvme={at_least(DRIVE, needed[DRIVE])}" if DRIVE in short else ""
        largest = max(problem.window_bytes(i) for i in range(len(problem.layout.chunks)))
        context = f" beside the {human_bytes(problem.beside)} of a CUDA context" if problem.beside else ""
        return (
            f"raise the {compute.value} budget to at least {at_least(compute, floor)}{host}{disk}: the gathered "
            f"weights of one module (largest chunk {human_bytes(largest)}), staging and activations must fit at "
            f"once{context}"
        )
    below = [tier for tier in Tier if tier in budgets and tier is not Tier.GPU]
    for tier in dict.fromkeys([DRIVE, *reversed(below)]):
        roomy = replace(problem, budgets={**budgets, tier: 2**62})
        needed = bytes_per_tier(roomy, _fill(roomy, roomy.spoken_for()))
        if all(needed[other] <= budget for other, budget in budgets.items() if other is not tier):
            if needed[tier] <= budgets.get(tier, 0):  # it is this placement that does not fit
                return "placement='auto', which these budgets hold"
            if tier not in budgets:
                roomy = replace(problem, budgets={**budgets, Tier.CPU: 2**62})
                whole = bytes_per_tier(roomy, fill_fastest(roomy))[Tier.CPU]
                more = f"raise the {below[-1].value} budget to {at_least(below[-1], whole)}"
                return f"give nvme_path= and nvme={at_least(tier, needed[tier])}, or {more}"
            return f"raise the {tier.value} budget to {at_least(tier, needed[tier])}"
    return "raise " + " and ".join(f"the {tier.value} budget by {at_least(tier, n)}" for tier, n in missing.items())


def _at_least(sharing: int, tier: Tier, num_bytes: int) -> str:
    """Rounded up, so that what the error says is enough."""
    num_bytes *= 1 if tier is Tier.GPU else sharing
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= 16 * unit:
            return f"{-(-num_bytes // unit)} {name}"
    return f"{num_bytes} B"
