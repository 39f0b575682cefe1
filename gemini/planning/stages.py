"""The stages of a pipeline, out of the trace of the whole model: which blocks, and the step of each.

What a stage does in a micro-batch are the moments of its blocks; the first one has what comes before the blocks as
well, and the last one what comes after them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from gemini.planning.products import scaled
from gemini.planning.trace import MemoryTrace, Moment, Phase


def balanced(weights: Sequence[float], num_stages: int) -> list[tuple[int, int]]:
    """Ranges of blocks, one for each stage and none empty, whose heaviest is as light as can be.

    ``weights``: of each block, and at last of what the last stage has besides.
    """
    blocks, rest = weights[:-1], weights[-1]
    sums = [0.0]
    for weight in blocks:
        sums.append(sums[-1] + weight)
    number = len(blocks)
    # least[s][i]: the heaviest of s stages that have the first i blocks, at best, and where the last of them begins.
    least: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(1, num_stages + 1):
        row = {}
        for stop in range(stage, number + 1):
            extra = rest if stop == number else 0.0
            row[stop] = min(
                (max(least[-1][start][0], sums[stop] - sums[start] + extra), start)
                for start in range(stage - 1, stop) if start in least[-1]
            )  # fmt: skip
        least.append(row)
    cuts = [number]
    for stage in range(num_stages, 0, -1):
        cuts.append(least[stage][cuts[-1]][1])
    return list(pairwise(reversed(cuts)))


class Blocks:
    """The blocks of a traced model: the numbered modules with the most params.

    Raises:
        ValueError: for a model without any.
    """

    def __init__(self, trace: MemoryTrace):
        sizes: Counter[str] = Counter()
        numbers: dict[str, set[int]] = {}
        for param in trace.params:
            parts = param.name.split(".")
            for at, part in enumerate(parts):
                if part.isdecimal():
                    path = ".".join(parts[:at])
                    sizes[path] += param.numel
                    numbers.setdefault(path, set()).add(int(part))
        if not sizes:
            raise ValueError(f"{trace.model} has no numbered blocks to make pipeline stages of")
        path = max(sizes, key=lambda path: (sizes[path], -len(path)))
        self.number = max(numbers[path]) + 1
        self._pattern = re.compile(re.escape(f"{path}." if path else "") + r"(\d+)(?:\.|$)")
        self._trace = trace

    def of(self, name: str) -> int | None:
        """The block that a module or param is in."""
        found = self._pattern.match(name)
        return None if found is None else int(found[1])

    def of_moments(self) -> list[int]:
        """For each moment the block that it belongs to: -1 for what comes before the first, ``number`` for what comes
        after the last. What runs between two blocks, and in backward after the first, belongs to the one that ran last.
        """
        found: list[int] = []
        now, phase = -1, Phase.FORWARD
        for moment in self._trace.moments:
            if phase is Phase.FORWARD and moment.phase is not Phase.FORWARD:
                now = self.number
            phase = Phase.FORWARD if moment.phase is Phase.FORWARD else Phase.BACKWARD
            block = self.of(moment.module)
            if block is not None:
                now = block
            elif phase is Phase.FORWARD and now == self.number - 1:
                now = self.number
            found.append(now)
        return found

    def weights(self, seconds: Sequence[float]) -> list[float]:
        """Of each block, and at last of what comes after them; ``seconds`` are those of the moments."""
        found = [0.0] * (self.number + 1)
        for block, more in zip(self.of_moments(), seconds, strict=True):
            found[max(block, 0)] += more
        return found


def stage_trace(trace: MemoryTrace, blocks: Blocks, start: int, stop: int, *, boundary_bytes: int) -> MemoryTrace:
    """The step of the stage that has blocks ``[start, stop)``, in one micro-batch.

    ``boundary_bytes``: of the hidden states that a stage is given.
    """
    first, last = start == 0, stop == blocks.number
    owners = blocks.of_moments()

    def is_here(block: int) -> bool:
        return start <= block < stop or (first and block < 0) or (last and block >= blocks.number)

    kept = [at for at, block in enumerate(owners) if is_here(block)]
    moments = [trace.moments[at] for at in kept]
    base = 0 if first or not kept or not kept[0] else trace.moments[kept[0] - 1].live_bytes - boundary_bytes
    read = {index for moment in moments for index in (*moment.params, *moment.gradients)}
    ran = {index for moment in trace.moments for index in moment.params}
    own = [i for i in range(len(trace.params)) if i in read or (first and i not in ran)]
    number = {index: position for position, index in enumerate(own)}
    elsewhere = {i for at, block in enumerate(owners) if not is_here(block) for i in trace.moments[at].params}

    def here(indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(number[i] for i in indices if i in number)

    def moved(moment: Moment) -> Moment:
        live = max(moment.live_bytes - base, 0)
        return replace(
            moment, params=here(moment.params), gradients=here(moment.gradients), live_bytes=live,
            peak_bytes=max(moment.peak_bytes - base, live),
        )  # fmt: skip

    together = {found for indices in trace.read_together if len(found := here(indices)) > 1}
    return replace(
        trace,
        params=tuple(replace(trace.params[i], apart=trace.params[i].apart or i in elsewhere) for i in own),
        moments=tuple(map(moved, moments)),
        read_together=tuple(sorted(together)),
        tiled=None,
    )


def kept_by(trace: MemoryTrace) -> int:
    """Bytes that a micro-batch keeps between its forward and its backward."""
    forward = [moment.live_bytes for moment in trace.moments if moment.phase is Phase.FORWARD]
    return forward[-1] if forward else 0


def in_flight(trace: MemoryTrace, number: int) -> MemoryTrace:
    """The same step, with what so many micro-batches at once keep for backward, this one of them."""
    more = (number - 1) * kept_by(trace)
    moments = (
        replace(moment, live_bytes=moment.live_bytes + more, peak_bytes=moment.peak_bytes + more)
        for moment in trace.moments
    )
    return replace(trace, moments=tuple(moments))


def breadth_first(trace: MemoryTrace, number: int) -> MemoryTrace:
    """One step of all micro-batches, each moment for all of them before the next one: what they keep is there as often,
    and only one of them computes.
    """

    def of_all(moment: Moment) -> Moment:
        live = number * moment.live_bytes
        counted = ("saved_bytes", "restored_bytes", "flops", "touched_bytes", "num_ops", "tp_bytes", "cp_bytes")
        times = {name: number * getattr(moment, name) for name in counted}
        return replace(
            moment, live_bytes=live, peak_bytes=live + moment.peak_bytes - moment.live_bytes,
            seconds=None if moment.seconds is None else number * moment.seconds,
            products=scaled(moment.products, number), attention=moment.attention.scaled(number), **times,
        )  # fmt: skip

    return replace(trace, moments=tuple(map(of_all, trace.moments)), tokens=number * trace.tokens)
