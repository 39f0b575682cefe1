"""Which bytes cross which boundary when chunks are gathered, gradients land and updates run: closed forms of what the
mover does, byte for byte (a test compares them with ``memory_report()["moved"]``), for one rank's part of a chunk. What
goes between the GPU and NVMe counts on both boundaries; what ranks send each other is not in here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache

from gemini.planning.layout import page_up
from gemini.planning.placement import Homes, Placement, Problem
from gemini.planning.planes import ALIGN, GRAD, GRAD_ERROR, GRADS, PAGE, WEIGHTS
from gemini.tiers import Boundary, Tier

Traffic = Counter[Boundary]


@cache
def path(source: Tier, target: Tier) -> tuple[Boundary, ...]:
    """The boundaries between two tiers: GPU and NVMe reach each other through host memory."""
    if source is target:
        return ()
    if source.spec.through is target or target.spec.through is source:
        return (Boundary(source, target),)
    between = source.spec.through or target.spec.through
    assert between is not None, (source, target)
    return (*path(source, between), *path(between, target))


def _move(source: Tier, target: Tier, num_bytes: int) -> Traffic:
    return Counter(dict.fromkeys(path(source, target), num_bytes))


def fetch_traffic(problem: Problem, homes: Homes, index: int) -> Traffic:
    """Gathering the weights of a chunk into its window once. A window on a GPU holds the compute dtype: a wider master
    (fp16) is cast on the host and crosses narrow.
    """
    wide, narrow = problem.sizes[index][WEIGHTS], problem.window_bytes(index) // problem.layout.ranks
    ways = path(homes[WEIGHTS], problem.compute)
    return Counter({way: narrow if way.target is Tier.GPU else wide for way in ways})


def gradient_traffic(
    problem: Problem, homes: Homes, index: int, *, adding: bool = False, streamed: bool = False
) -> Traffic:
    """Landing the gradients of a chunk once, each param as it arrives (or, transient, bringing it to the update, unless
    that is ``streamed``). ``adding``: to those of an earlier backward, which have to be read first.
    """
    chunk, moved = problem.layout.chunks[index], Counter[Boundary]()
    if not chunk.trainable:
        return moved
    home = homes.get(GRAD, update_tier(problem, homes, streamed=streamed))
    itemsize = chunk.itemsize(problem.precision)
    planes = [spec for kind, spec in problem.forms[index].items() if kind in GRADS]
    for slot in chunk.slots:
        numel = slot.numel // problem.layout.ranks
        if problem.compute is Tier.GPU and home is not Tier.GPU:
            moved[Boundary(Tier.GPU, Tier.CPU)] += numel * itemsize
        if home.in_files:
            in_pages = sum(spec.block_bytes * page_up(numel, max(ALIGN, PAGE // spec.block_bytes)) for spec in planes)
            moved.update(_move(Tier.CPU, home, in_pages))
            moved.update(_move(home, Tier.CPU, in_pages if adding else 0))
    return moved


def update_traffic(problem: Problem, homes: Homes, index: int, *, streamed: bool = False) -> Traffic:
    """One update of a chunk: planes that are not where it runs come there, and all but the gradient go back."""
    chunk, moved = problem.layout.chunks[index], Counter[Boundary]()
    where = update_tier(problem, homes, streamed=streamed)
    if not chunk.trainable:
        return moved
    for kind, num_bytes in problem.sizes[index].items():
        if kind == GRAD_ERROR:
            continue
        source = problem.compute if kind == WEIGHTS and _reads_window(problem, homes, index, where) else homes[kind]
        moved.update(_move(source, where, num_bytes))
        if kind != GRAD:
            moved.update(_move(where, homes[kind], num_bytes))
    return moved


def _reads_window(problem: Problem, homes: Homes, index: int, where: Tier) -> bool:
    """Whether an update takes the weights from where they are gathered: it begins inside backward (gradients are not
    kept), spares the drive, and finds them whole and as wide as at home.
    """
    chunk, wide = problem.layout.chunks[index], problem.sizes[index][WEIGHTS]
    return (
        problem.gradients == "transient"
        and homes[WEIGHTS].in_files
        and where is Tier.CPU
        and problem.layout.ranks == 1
        and wide == chunk.numel * chunk.itemsize(problem.precision)
    )


def update_tier(problem: Problem, homes: Homes, *, streamed: bool = False) -> Tier:
    """The tier of a chunk's update: the GPU if all that it touches stands there or is streamed, else on the host."""
    on_gpu = streamed or (problem.compute is Tier.GPU and all(tier is Tier.GPU for tier in homes.values()))
    return Tier.GPU if on_gpu else Tier.CPU


def step_traffic(problem: Problem, placement: Placement, fetched: Iterable[int], *, backwards: int = 1) -> Traffic:
    """All of a step: ``fetched`` names a chunk for every time its weights are gathered."""
    moved: Traffic = Counter()
    for index, times in Counter(fetched).items():
        for boundary, num_bytes in fetch_traffic(problem, placement.homes[index], index).items():
            moved[boundary] += times * num_bytes
    for index, homes in enumerate(placement.homes):
        streamed = index in placement.streamed
        for backward in range(backwards):
            moved.update(gradient_traffic(problem, homes, index, adding=backward > 0, streamed=streamed))
        moved.update(update_traffic(problem, homes, index, streamed=streamed))
    return +moved


def by_name(traffic: Mapping[Boundary, int]) -> dict[str, int]:
    """Bytes by the names of ``memory_report()["moved"]``."""
    return {str(boundary): num_bytes for boundary, num_bytes in sorted(traffic.items(), key=lambda item: str(item[0]))}
