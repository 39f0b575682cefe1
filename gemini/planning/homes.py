"""Which home for every plane costs a step least: an integer program over chunks, its few budgets and tracks. The rows
that couple chunks are the budgets of the tiers, so the linear relaxation is fractional in a handful of chunks only, and
rounding it loses next to nothing. What a placement really costs is counted afterwards, from its moves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from gemini.planning.costs import Speeds
from gemini.planning.placement import Placement, Problem, spread_evenly
from gemini.planning.planes import GRADS, WEIGHTS, PlaneKind
from gemini.planning.program import Row, solve
from gemini.planning.traffic import Traffic, fetch_traffic, gradient_traffic, update_tier, update_traffic
from gemini.tiers import DRIVE, FILED, Tier


class HomeChoice(NamedTuple):
    """What chunks that are alike can choose: homes, and what each costs and frees against all on the CPU tier."""

    chunks: Sequence[int]
    homes: Mapping[PlaneKind, Tier]
    excludes: tuple[PlaneKind, ...]
    seconds: Mapping[str, float]
    num_bytes: Mapping[Tier, int]
    streamed: bool = False


def cheapest_homes(
    problem: Problem,
    fetches: Sequence[int],
    speeds: Speeds,
    *,
    accumulate: int = 1,
    overlapped: bool = False,
    compute_seconds: float = 0.0,
    streaming: bool = False,
) -> Placement | None:
    """The placement that the program finds, the same on every rank; None if it finds none (whether the model fits is
    for others to say). ``fetches``: how often a step gathers the weights of each chunk, if nothing stays.
    ``overlapped``: minimise the busiest track, which takes ``compute_seconds`` (forward and backward) at least, and
    only then the sum of all; else the sum. ``streaming``: updates may be streamed through the GPU; what that takes of
    it is left for it.
    """
    of_chunks = _Choices(problem, fetches, speeds, accumulate)
    base: dict[str, float] = {}
    used = problem.spoken_for(streams=streaming)
    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, sizes in enumerate(problem.sizes):
        for track, seconds in of_chunks.seconds_with(index, {}, fetches[index]).items():
            base[track] = base.get(track, 0.0) + seconds
        used[Tier.CPU] = used.get(Tier.CPU, 0) + sum(sizes.values())
        if problem.durable:
            used[DRIVE] = used.get(DRIVE, 0) + 2 * sum(problem.durable_bytes(index).values())
        # What chunks of layers that are alike can choose is the same: only how many of them choose it is asked for.
        chunk = problem.layout.chunks[index]
        key = replace(chunk, index=0, slots=()), *(slot.numel for slot in chunk.slots), fetches[index], *sizes.items()
        alike[key].append(index)
    every = [(indices, of_chunks.of(indices[0], streaming=streaming)) for indices in alike.values()]
    choices = [choice._replace(chunks=indices) for indices, of_first in every for choice in of_first]
    chosen = _solve(problem, choices, base, used, overlapped, compute_seconds)
    if chosen is None:
        return None
    homes = [dict.fromkeys(sizes, Tier.CPU) for sizes in problem.sizes]
    assigned = [*_assigned(chosen)]
    for index, choice in assigned:
        homes[index].update(choice.homes)
    return Placement(tuple(homes), frozenset(index for index, choice in assigned if choice.streamed))


def _assigned(chosen: Sequence[tuple[HomeChoice, int]]) -> Iterator[tuple[int, HomeChoice]]:
    """Which of the chunks that are alike take what was chosen so many times: those first that leave less to others. The
    first chunks, needed first, are on the GPU; those on a drive are spread, and so are the few that most leave.
    """
    taken: defaultdict[tuple[int, PlaneKind], bool] = defaultdict(bool)
    for choice, times in sorted(chosen, key=lambda each: -len(each[0].excludes)):
        free = [index for index in choice.chunks if not any(taken[index, kind] for kind in choice.excludes)]
        if (is_most := times < len(free) <= 1.5 * times) or any(tier.in_files for tier in choice.homes.values()):
            free.sort(key=spread_evenly, reverse=not is_most)  # the very first one is among the most
        for index in free[:times]:
            taken.update(dict.fromkeys(((index, kind) for kind in choice.excludes), True))
            yield index, choice


class _Choices(NamedTuple):
    """The choices that there are for each chunk, each against all its planes on the CPU tier."""

    problem: Problem
    fetches: Sequence[int]
    speeds: Speeds
    accumulate: int

    def of(self, index: int, *, streaming: bool) -> Iterator[HomeChoice]:
        """Those of a chunk in one order, by which ties between them are broken."""
        problem, make, most = self.problem, partial(self._placed, index), self.fetches[index]
        chunk = problem.layout.chunks[index]
        least = min(most, 1 if chunk.trainable else 0)  # a frozen one stays from step to step
        everything = list(problem.sizes[index])
        grads = [kind for kind in GRADS if kind in everything]
        saves_fetches = least < most  # where gathered weights stay between forward and backward
        # Weights that live on the GPU: among ranks each of them has only a part.
        from_gpu = 0 if problem.layout.ranks == 1 else most
        if problem.compute is Tier.GPU:
            # The update runs where the states live.
            yield make(everything, Tier.GPU, excludes=everything, times=from_gpu)
            if len(everything) > 1:
                yield make([WEIGHTS], Tier.GPU, times=from_gpu)
            if saves_fetches:
                yield make([], Tier.GPU, excludes=[WEIGHTS], times=least, stays=True)
            if streaming and chunk.trainable:
                # Each excludes every other choice: what an update brings depends on all homes at once.
                for kinds in ([], [WEIGHTS], grads, [WEIGHTS, *grads]) if grads else ([], [WEIGHTS]):
                    fetched = from_gpu if WEIGHTS in kinds else most
                    yield make(kinds, Tier.GPU, excludes=everything, times=fetched, streamed=True)
                    if fetched == most and saves_fetches:
                        yield make(kinds, Tier.GPU, excludes=everything, times=least, stays=True, streamed=True)
        for tier in (tier for tier in FILED if tier in problem.budgets):
            yield make([WEIGHTS], tier, times=most)
            if saves_fetches:
                yield make([WEIGHTS], tier, times=least, stays=True)
            rule = problem.rule
            states = [kind for kind in rule.states if kind in everything and kind not in rule.in_memory]
            for group in (*([kind] for kind in states), grads):
                if group:
                    yield make(group, tier, times=most)

    def _placed(
        self,
        index: int,
        kinds: Sequence[PlaneKind],
        tier: Tier,
        *,
        times: int,
        excludes: Sequence[PlaneKind] = (),
        stays: bool = False,
        streamed: bool = False,
    ) -> HomeChoice:
        """Planes of ``kinds`` on ``tier``, weights gathered ``times`` (``stays``: kept between forward and backward).
        ``excludes``: the planes that no other choice may place as well, if they are not just ``kinds``.
        """
        problem, sizes = self.problem, self.problem.sizes[index]
        after = self.seconds_with(index, dict.fromkeys(kinds, tier), times, streamed=streamed)
        before = self.seconds_with(index, {}, self.fetches[index])
        # In one order: what is added up of these in another one may round to another choice on another rank.
        change = {track: after.get(track, 0.0) - before.get(track, 0.0) for track in (after | before)}
        num_bytes: Counter[Tier] = Counter()
        for kind in kinds:
            # What is durable has slots on the drive wherever it lives: living there takes no more.
            has_slots = tier is DRIVE and kind in problem.durable_bytes(index)
            num_bytes[tier] += 0 if has_slots else sizes[kind]
            num_bytes[Tier.CPU] -= sizes[kind]
        if stays:
            num_bytes[problem.compute] += problem.window_bytes(index)
        return HomeChoice((index,), dict.fromkeys(kinds, tier), tuple(excludes or kinds), change, num_bytes, streamed)

    def seconds_with(
        self, index: int, homes: Mapping[PlaneKind, Tier], times: int, *, streamed: bool = False
    ) -> dict[str, float]:
        """Seconds of a chunk by track, with ``homes``, all else on the CPU tier, and weights gathered ``times``."""
        problem, speeds = self.problem, self.speeds
        homes = {**dict.fromkeys(problem.sizes[index], Tier.CPU), **homes}
        moved: Traffic = update_traffic(problem, homes, index, streamed=streamed)
        for traffic, repeats in (
            (fetch_traffic(problem, homes, index), times),
            (gradient_traffic(problem, homes, index, streamed=streamed), self.accumulate),
        ):
            for boundary, num_bytes in traffic.items():
                moved[boundary] += repeats * num_bytes
        seconds: dict[str, float] = {}
        for boundary, num_bytes in moved.items():
            # Of a drive both directions at once, as what it reads it does not write.
            track = boundary.outer.value if boundary.outer.in_files else boundary.way.figure
            seconds[track] = seconds.get(track, 0.0) + speeds.seconds(boundary, num_bytes)
        chunk = problem.layout.chunks[index]
        if chunk.trainable:
            tier = update_tier(problem, homes, streamed=streamed)
            each = speeds.update(tier, problem.rule.of(chunk.exact))
            seconds["update gpu" if tier is Tier.GPU else "update"] = each * chunk.numel / problem.layout.ranks
        return seconds


def _solve(
    problem: Problem,
    choices: Sequence[HomeChoice],
    base: Mapping[str, float],
    used: Mapping[Tier, int],
    overlapped: bool,
    compute_seconds: float,
) -> list[tuple[HomeChoice, int]] | None:
    """The choices that cost least beside what is ``used`` of budgets, and how many take each; None without any."""
    if not choices:
        return []
    scale, last = sum(base.values()) or 1.0, len(choices)
    rows = [*_exclusions(choices), *_budgets(problem, choices, used)]
    costs = [sum(choice.seconds.values()) / scale * (0.01 if overlapped else 1.0) for choice in choices]
    # Of equals the first chunks are on the GPU, as of those that are alike.
    for column, choice in enumerate(choices):
        slower = any(tier.in_files for tier in choice.homes.values())
        costs[column] += 1e-9 * (1 if slower else choice.chunks[0] / len(problem.layout.chunks))
    if overlapped:
        # One more number, which no track may exceed: the time of the busiest.
        costs.append(1.0)
        for track in sorted({*base, *(track for choice in choices for track in choice.seconds)}):
            spent = {column: choice.seconds.get(track, 0.0) / scale for column, choice in enumerate(choices)}
            busy = {column: share for column, share in spent.items() if share}
            rows.append(({**busy, last: -1.0}, -base.get(track, 0.0) / scale))
    most = [len(choice.chunks) for choice in choices]
    chosen = solve(costs, rows, most, least=compute_seconds / scale, gap=2e-3, nodes=50)
    return None if chosen is None else [(choices[column], times) for column, times in sorted(chosen.items())]


def _exclusions(choices: Sequence[HomeChoice]) -> Iterator[Row]:
    """Each plane is placed by one choice at most: that of all alike chunks by as many as they are."""
    placing: defaultdict[tuple[int, PlaneKind], dict[int, float]] = defaultdict(dict)
    for column, choice in enumerate(choices):
        for kind in choice.excludes:
            placing[choice.chunks[0], kind][column] = 1.0
    numbers = {choice.chunks[0]: float(len(choice.chunks)) for choice in choices}
    return ((columns, numbers[first]) for (first, _), columns in placing.items() if len(columns) > 1)


def _budgets(problem: Problem, choices: Sequence[HomeChoice], used: Mapping[Tier, int]) -> Iterator[Row]:
    """Each tier has room for what is placed there; in MiB, so that numbers are of one size."""
    mebibyte = 2.0**20
    for tier, budget in problem.budgets.items():
        taken = {column: choice.num_bytes.get(tier, 0) / mebibyte for column, choice in enumerate(choices)}
        yield {column: size for column, size in taken.items() if size}, (budget - used.get(tier, 0)) / mebibyte
