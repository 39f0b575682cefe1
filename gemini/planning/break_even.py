"""From how many tokens per step on offloading costs nothing: a closed form over the lanes of a predicted step.

Computing takes longer the more tokens a step has; what weights, gradients and optimizer states take on the bus, on the
drive and in Adam does not. With ``s`` times the tokens, lane ``l`` is busy for ``a_l s + b_l`` seconds, computing for
``c s + f`` (``f``: updates that run on the GPU), and a step of the overlapped schedule takes the longest of these and
``r``, what no overlap has hidden. Offload is free where that is at most ``1 + e`` times computing alone:

    max(c s + f, max_l(a_l s + b_l)) + r <= (1 + e)(c s + f)

which is one lower bound on ``s`` for each lane, ``(b_l + r - (1 + e) f) / ((1 + e) c - a_l)``, and one for ``r``,
``(r / e - f) / c``. The serial schedule adds the lanes up instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from gemini.planning.timeline import Lane, Span, Timeline

TOLERANCE = 0.05
"""The part of computing alone by which a step may be longer and its offload still be called free."""


class Grow(Enum):
    """How a step gets more tokens: by a larger micro-batch, or by more micro-batches of the same size.

    A larger micro-batch lengthens computing and the moves of activations; another micro-batch repeats all that belongs
    to a moment: every weight is fetched again.
    """

    BATCH = "a larger micro-batch"
    ACCUMULATE = "more micro-batches"


class LaneTime(NamedTuple):
    """Seconds that a lane is busy: with what grows with the tokens, and with what does not."""

    growing: float = 0.0
    fixed: float = 0.0

    @property
    def total(self) -> float:
        return self.growing + self.fixed


def lane_times(timeline: Timeline, grow: Grow = Grow.BATCH) -> dict[Lane, LaneTime]:
    """What keeps each lane busy, by whether it grows with the tokens."""
    grows: Callable[[Span], bool]
    if grow is Grow.BATCH:

        def grows(span: Span) -> bool:
            return span.moment >= 0 and (span.lane is Lane.COMPUTE or span.chunk < 0)
    else:

        def grows(span: Span) -> bool:
            return span.moment >= 0

    found: dict[Lane, LaneTime] = {}
    for span in timeline.spans:
        before, seconds = found.get(span.lane, LaneTime()), span.stop - span.start
        more = LaneTime(before.growing + seconds, before.fixed)
        found[span.lane] = more if grows(span) else LaneTime(before.growing, before.fixed + seconds)
    return found


def break_even(
    timeline: Timeline, *, serial: bool = False, grow: Grow = Grow.BATCH, tolerance: float = TOLERANCE
) -> int | None:
    """The fewest tokens per step from which on it takes at most ``1 + tolerance`` times what computing alone does.

    Args:
        timeline: a predicted step.
        serial: it was predicted for the serial schedule, in which nothing overlaps.
        grow: how a step gets more tokens.

    Returns:
        None if no number of tokens is enough, or nothing computes in the step.
    """
    times = lane_times(timeline, grow)
    compute = times.pop(Lane.COMPUTE, LaneTime())
    if not compute.growing or not timeline.tokens:
        return None
    if serial:
        # The step grows by the part of the lanes that grows; all else stays.
        growing = sum(lane.growing for lane in times.values())
        stays = timeline.step_seconds - compute.total - growing
        bounds = [(stays - tolerance * compute.fixed, tolerance * compute.growing - growing)]
    else:
        hidden = max([compute.total, *(lane.total for lane in times.values())])
        rest = max(0.0, timeline.step_seconds - hidden)
        bounds = [
            (lane.fixed + rest - (1 + tolerance) * compute.fixed, (1 + tolerance) * compute.growing - lane.growing)
            for lane in times.values()
        ]
        bounds.append((rest - tolerance * compute.fixed, tolerance * compute.growing))
    scale = 0.0
    for needed, gained in bounds:
        if gained < 0 or (gained == 0 and needed > 0):
            return None  # a lane that grows faster than computing overtakes it, if not now then with more tokens
        if needed > 0:
            scale = max(scale, needed / gained)
    return math.ceil(scale * timeline.tokens)
