"""Steps that are compared by time: what one takes at least, and what it takes with very many micro-batches. ``gemini
plan --fastest`` searches with these.

What a step takes at least is a closed form: the longest of its tracks if each had the machine to itself, with as many
planes on the computing tier as its budget holds at all. A step that was played takes no less, so a search that looks at
the smallest of these first may end where the next one is above the best step.

A step with more sequences in it comes from traces of two smaller ones: all bytes and all work of a moment are a part
that is there once and a part that comes again with every sequence. So many steps are looked at that tracing each would
take minutes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from gemini.planning.costs import Cost, Costs, Efficiency
from gemini.planning.hardware import Hardware
from gemini.planning.placement import Problem
from gemini.planning.plan import Plan
from gemini.planning.planes import GRADS, WEIGHTS
from gemini.planning.timeline import Timeline
from gemini.planning.token_tiles import as_tiles, tile_sizes
from gemini.planning.trace import MemoryTrace, Moment, Phase, Product, chunks_of_params
from gemini.planning.traffic import path
from gemini.tiers import Tier

FEW, MANY = 2, 4
"""Micro-batches of a step that is played in the place of one with more than ``MANY``: each further one takes as long as
the mean of those between the two.
"""


def step_seconds(plan: Plan, play: Callable[[Plan], Timeline]) -> float:
    """How long a step takes as it is played; with more than ``MANY`` micro-batches as that goes on."""
    if plan.accumulate <= MANY:
        return play(plan).step_seconds
    few, many = (play(replace(plan, accumulate=number)).step_seconds for number in (FEW, MANY))
    return many + (plan.accumulate - MANY) * (many - few) / (MANY - FEW)


def least_seconds(
    trace: MemoryTrace,
    problem: Problem,
    hardware: Hardware,
    *,
    accumulate: int = 1,
    schedule: str = "overlapped",
    local_ranks: int = 1,
) -> float:
    """What a step of any plan of ``problem`` takes at least when it is played.

    Raises:
        MissingFigure: if the hardware lacks a speed.
    """
    layout, compute, is_overlapped = problem.layout, problem.compute, schedule == "overlapped"
    costs = Costs(
        hardware,
        Efficiency(),
        compute=compute,
        precision=problem.precision,
        local_ranks=local_ranks,
        beside=is_overlapped,
    )
    measured = (trace.target == "cpu") == (compute is Tier.CPU) and trace.seconds is not None
    seconds = [costs.compute(moment, measured=measured).seconds for moment in trace.moments]
    forward = sum(s for s, moment in zip(seconds, trace.moments, strict=True) if moment.phase is Phase.FORWARD)
    taken = problem.spoken_for(gathers=False, stages=False)
    room = {tier: max(budget - taken.get(tier, 0), 0) for tier, budget in problem.budgets.items()}
    own = room[compute] if compute is Tier.GPU else 0
    sizes = problem.sizes
    trained = [index for index, chunk in enumerate(layout.chunks) if chunk.trainable]

    # An update that passes through the GPU leaves neither its time nor its gradients to the host.
    on_host = [] if compute is Tier.GPU and hardware.has("update_gpu") else trained
    narrow = {index: layout.chunks[index].itemsize(problem.precision) for index in on_host}
    updates = [costs.update(problem, index, Tier.CPU) for index in on_host]
    updating = sum(update.seconds for update in updates)
    spared = own * max((u.seconds / sum(sizes[i].values()) for i, u in zip(on_host, updates, strict=True)), default=0.0)
    part = max(1 - spared / updating, 0.0) if updating else 0.0
    work = [Cost(sum(u.seconds for u in updates) * part, updates[0].loads)] if updates else []
    if compute is Tier.GPU:
        leaving = sum(layout.chunks[index].payload // layout.ranks * narrow[index] for index in on_host)
        landing = sum(sizes[index].get(kind, 0) for index in on_host for kind in GRADS)
        by_param, fetched = chunks_of_params(trace, layout), 0
        for phases in ((Phase.FORWARD,), (Phase.RECOMPUTE, Phase.BACKWARD)):
            read = {by_param[p] for moment in trace.moments if moment.phase in phases for p in moment.params}
            # A window holds what is computed with, which may be narrower than what is kept.
            crossing = (min(sizes[i][WEIGHTS], problem.window_bytes(i) // layout.ranks) for i in read)
            fetched += max(sum(crossing) - own, 0)
        leaving, landing = max(leaving - own, 0), max(landing - own, 0)
        saved = sum(moment.saved_bytes for moment in trace.moments) if problem.offload_to else 0
        restored = sum(moment.restored_bytes for moment in trace.moments) if problem.offload_to else 0
        (inward,), (outward,) = path(Tier.CPU, compute), path(compute, Tier.CPU)
        work += [
            costs.move(inward, accumulate * (fetched + restored)),
            costs.move(outward, accumulate * (leaving + saved)),
            # Sums that the host adds to: what comes, and sums that are read and written.
            costs.landing((accumulate - 1) * (leaving + 2 * landing)),
        ]
    files = [tier for tier in problem.budgets if tier.in_files]
    in_memory = sum(num_bytes for tier, num_bytes in room.items() if not tier.in_files)
    # What is trained is read and written at least once; what of it is on a drive, there.
    on_drive = max(sum(sum(sizes[index].values()) for index in trained) - in_memory, 0)
    if len(files) == 1:
        work += [costs.move(way, on_drive) for way in (*path(files[0], Tier.CPU), *path(Tier.CPU, files[0]))]

    computing = accumulate * sum(seconds)
    if not is_overlapped:
        return computing + sum(cost.seconds for cost in work)
    # With clipping updates begin when backward is over, and the last one is waited for in forward.
    exposed = max(updating * part - forward, 0.0) if problem.gradients != "transient" else 0.0
    used: dict[str, float] = defaultdict(float)
    for cost in work:
        for resource, load in cost.loads.items():
            used[resource] += cost.seconds * load
    return max(computing + exposed, *(cost.seconds for cost in work), *used.values(), 0.0)


# ---- more sequences --------------------------------------------------------------------------------------------------

NUMBERS = [f.name for f in fields(Moment) if f.type == "int"]


def resized(one: Any, two: Any, number: int) -> Any:
    """The trace of a step of ``number`` times the sequences of ``one``, where ``two`` is of two times as many.

    Raises:
        ValueError: if they are not alike: something is there in one of them only, or is no number and differs.
    """
    if type(one) is not type(two):
        raise ValueError(f"{one!r} and {two!r} are not of two sizes of one step")
    if one == two:
        return one
    if isinstance(one, (int, float)) and not isinstance(one, bool):
        return one + (two - one) * (number - 1)
    if isinstance(one, MemoryTrace) and isinstance(one.tile_tokens, str):
        first, second = (tile_sizes(trace.tile_tokens) for trace in (one, two))
        tiles = as_tiles(resized(first, second, number))
        return replace(
            resized(replace(one, tile_tokens=None), replace(two, tile_tokens=None), number), tile_tokens=tiles
        )
    if is_dataclass(one):
        own = {f.name: resized(getattr(one, f.name), getattr(two, f.name), number) for f in fields(one)}
        if isinstance(one, Moment):
            # A sum over vocabulary and tokens, in parts of so many elements, takes fewer operations in larger tiles.
            own["num_ops"] = max(own["num_ops"], two.num_ops)
            if any(own[name] < 0 for name in NUMBERS):
                raise ValueError(f"{one.module} has other work with more sequences")
        return replace(one, **own)  # type: ignore[type-var]
    if isinstance(one, dict) and one.keys() == two.keys():
        return {key: resized(value, two[key], number) for key, value in one.items()}
    if isinstance(one, tuple) and one and isinstance(one[0], Product):
        return _products(one, two, number)
    if isinstance(one, tuple) and len(one) == len(two):
        parts = [resized(*both, number) for both in zip(one, two, strict=True)]
        return type(one)(*parts) if hasattr(one, "_fields") else tuple(parts)
    raise ValueError(f"{one!r} in one step and {two!r} in the other")


def _products(one: tuple[Product, ...], two: tuple[Product, ...], number: int) -> tuple[Product, ...]:
    """Each with the one of twice the sequences that differs from it in one dimension at most. Two that have one shape
    by chance, with as many tokens as a layer is wide, are one with ``times`` in a trace.
    """
    if len(one) != len(two):
        one, two = (tuple(p._replace(times=1) for p in own for _ in range(int(p.times))) for own in (one, two))
    made, rest = list[Product](), [*two]
    for product in one:
        alike = [
            p for p in rest if sum(a != b for a, b in zip(product, p, strict=True)) <= 1 and p.flops >= product.flops
        ]
        # Most of them double: one that is the same is another one's, if there is one that does.
        twin = next((p for p in alike if p.flops == 2 * product.flops), alike[0] if alike else None)
        if twin is None:
            raise ValueError(f"products of other kinds in one step and in the other: {one}, {two}")
        rest.remove(twin)
        made.append(Product._make(a + (b - a) * (number - 1) for a, b in zip(product, twin, strict=True)))
    if rest:
        raise ValueError(f"products of other kinds in one step and in the other: {one}, {two}")
    return tuple(sorted(made))
