"""Steps that are compared by time: one as it would be with other sequences in it, what it takes at least, and what it
takes with very many micro-batches. ``gemini plan --fastest`` searches with these.

All bytes and all work of a moment are a part that every sequence has again and a part that a step has once, so two
traces tell those of any size. What a step takes at least is a closed form: the longest of its tracks if each had the
machine to itself, with as many planes on the computing tier as its budget holds at all. A step that was played takes
no less, so a search that looks at the smallest of these first may end where the next one is above the best step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from itertools import groupby
from typing import Any

from gemini.planning.costs import Costs, Efficiency
from gemini.planning.hardware import Hardware
from gemini.planning.parallel import Blocks
from gemini.planning.placement import Problem
from gemini.planning.plan import Plan
from gemini.planning.planes import GRADS, WEIGHTS
from gemini.planning.products import Product, scaled
from gemini.planning.timeline import Timeline
from gemini.planning.trace import MemoryTrace, Moment, Phase, chunks_of_params
from gemini.planning.traffic import path
from gemini.tiers import Tier

FEW, MANY = 2, 4
"""Micro-batches of a step that is played in the place of one with more than ``MANY``: each further one takes as long as
the mean of those between the two.
"""


def resized(one: Any, two: Any, number: int) -> Any:
    """The trace of a step of ``number`` sequences, from those of one and of two sequences of the same length.

    Raises:
        ValueError: if they are not alike: something is there in one of them only, or is no number and differs.
    """
    if type(one) is not type(two):
        raise ValueError(f"{one!r} and {two!r} are not of two sizes of one step")
    if one == two:
        return one
    if isinstance(one, (int, float)) and not isinstance(one, bool):
        return one + (two - one) * (number - 1)
    if is_dataclass(one):
        own = {f.name: resized(getattr(one, f.name), getattr(two, f.name), number) for f in fields(one)}
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
    """Two that are of one shape by chance, with so many tokens as a layer is wide, are one with ``times`` in a trace."""
    if len(one) != len(two):
        one, two = (
            tuple(sorted(p._replace(times=1) for p in products for _ in range(int(p.times)))) for products in (one, two)
        )
    if len(one) == len(two):
        made = tuple(
            Product(*(a + (b - a) * (number - 1) for a, b in zip(*both, strict=True)))
            for both in zip(one, two, strict=True)
        )
        first, second, last = (sum(p.flops for p in products) for products in (one, two, made))
        if last == first + (second - first) * (number - 1):
            return made
    raise ValueError(f"products of other kinds in one step and in the other: {one}, {two}")


def block_by_block(trace: MemoryTrace, number: int) -> MemoryTrace:
    """One step of ``number`` micro-batches in the order of ``gemini.train_step``: each block takes them one after
    another while its weights are there, the last one with the head and backward at once.

    What the others keep is there as often; of a block's inner activations one micro-batch has some. Every gradient is
    added to the sums where those are kept, as without this order: where ``train_step`` has room to add them up on the
    device, it is quicker.

    Raises:
        ValueError: for a model that has no blocks, or shares params between the first and the last of them.
    """
    blocks = Blocks(trace)
    owners = [min(max(block, 0), blocks.number - 1) for block in blocks.of_moments()]
    runs = [list(run) for _, run in groupby(range(len(owners)), lambda at: owners[at])]
    reads = {
        owner: {p for at in range(len(owners)) if owners[at] == owner for p in trace.moments[at].params}
        for owner in set(owners)
    }
    for param in set.union(*(own for owner, own in reads.items() if owner < blocks.number - 1), set()):
        if param in reads[blocks.number - 1]:
            raise ValueError(f"{trace.params[param].name} is read in the last block or the head and before them")
    moments: list[Moment] = []
    start = 0
    for run in runs:
        own = [trace.moments[at] for at in run]
        # Those that are through the block, and those that are not yet.
        others = (number - 1) * max(start, own[-1].live_bytes)
        together = tuple(sorted({p for moment in own for p in moment.params}))
        for moment in own:
            more = others if moment is not own[-1] else (number - 1) * moment.live_bytes
            counted = {name: number * getattr(moment, name) for name in _COUNTED}
            moments.append(
                replace(
                    moment,
                    params=together,
                    live_bytes=moment.live_bytes + more,
                    peak_bytes=moment.peak_bytes + others,
                    seconds=None if moment.seconds is None else number * moment.seconds,
                    products=scaled(moment.products, number),
                    attention=moment.attention.scaled(number),
                    **counted,
                )
            )
        start = own[-1].live_bytes
    return replace(trace, moments=tuple(moments), tokens=number * trace.tokens, micro_batches=number, tiled=None)


_COUNTED = ("saved_bytes", "restored_bytes", "flops", "touched_bytes", "num_ops", "tp_bytes", "cp_bytes")
"""Of a moment, what each micro-batch has again."""


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
    layout, compute, on_gpu = problem.layout, problem.compute, problem.compute is Tier.GPU
    is_overlapped = schedule == "overlapped"
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
    computing = accumulate * sum(seconds)

    sizes = [problem.plane_bytes(index) for index in range(len(layout.chunks))]
    trained = [index for index, chunk in enumerate(layout.chunks) if chunk.trainable]
    taken = problem.spoken_for(gathers=False, stages=False)
    room = {tier: max(budget - taken.get(tier, 0), 0) for tier, budget in problem.budgets.items()}
    own = room[compute] if on_gpu else 0
    # An update that passes through the GPU leaves neither its time nor its gradients to the host.
    updates_here = trained if not (on_gpu and hardware.has("update_gpu")) else []

    backwards = accumulate * trace.micro_batches
    updating, per_byte = 0.0, 0.0
    landing = leaving = 0
    for index in updates_here:
        chunk, planes = layout.chunks[index], sizes[index]
        numel, narrow = chunk.numel // layout.ranks, chunk.itemsize(problem.precision)
        beyond = problem.rule.of(chunk.exact).beyond_bytes
        update = costs.update(planes, Tier.CPU, grad_bytes=numel * narrow, beyond_bytes=beyond).seconds
        updating, per_byte = updating + update, max(per_byte, update / sum(planes.values()))
        leaving += chunk.payload // layout.ranks * narrow
        landing += sum(planes.get(kind, 0) for kind in GRADS)
    updating = max(updating - own * per_byte, 0.0)

    tracks = [updating]
    if on_gpu:
        by_param = chunks_of_params(trace, layout)
        # A window holds what is computed with, which may be narrower than what is kept.
        crossing = [
            min(planes[WEIGHTS], problem.window_bytes(index) // layout.ranks) for index, planes in enumerate(sizes)
        ]
        fetched = 0
        for phases in ((Phase.FORWARD,), (Phase.RECOMPUTE, Phase.BACKWARD)):
            read = {by_param[p] for moment in trace.moments if moment.phase in phases for p in moment.params}
            fetched += max(sum(crossing[index] for index in read) - own, 0)
        away = problem.offload_to is not None
        saved = sum(moment.saved_bytes for moment in trace.moments) if away else 0
        restored = sum(moment.restored_bytes for moment in trace.moments) if away else 0
        for source, target, num_bytes in (
            (Tier.CPU, compute, accumulate * (fetched + restored)),
            (compute, Tier.CPU, backwards * max(leaving - own, 0) + accumulate * saved),
        ):
            (way,) = path(source, target)
            tracks.append(costs.move(way, num_bytes).seconds)
        # Sums that the host adds to: read and written.
        tracks.append((backwards - 1) * costs.landing(2 * max(landing - own, 0)).seconds)
    files = [tier for tier in problem.budgets if tier.in_files]
    in_memory = sum(n for tier, n in room.items() if not tier.in_files)
    # What is trained is read and written at least once; what of it is on a drive, there.
    on_drive = max(sum(sum(sizes[index].values()) for index in trained) - in_memory, 0)
    if len(files) == 1:
        for way in (*path(files[0], Tier.CPU), *path(Tier.CPU, files[0])):
            tracks.append(costs.move(way, on_drive).seconds)
    if not is_overlapped:
        return computing + sum(tracks)
    # With clipping updates begin when backward is over, and the last one is waited for in forward.
    exposed = max(updating - forward, 0.0) if problem.gradients != "transient" else 0.0
    return max(computing + exposed, *tracks)
