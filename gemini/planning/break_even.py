"""From how many tokens per step on offloading costs nothing: a closed form over the tracks, and a search by playing.

Computing takes longer the more tokens a step has; what weights, gradients and optimizer states take on the bus, on the
drive and in Adam does not. With ``s`` times the tokens, track ``l`` is busy for ``a_l s + b_l`` seconds, computing for
``c s + f`` (``f``: updates that run on the GPU), and a step of the overlapped schedule takes the longest of these and
``r``, what no overlap has hidden. Offload is free where that is at most ``1 + e`` times computing alone:

    max(c s + f, max_l(a_l s + b_l)) + r <= (1 + e)(c s + f)

which is one lower bound on ``s`` for each track, ``(b_l + r - (1 + e) f) / ((1 + e) c - a_l)``, and one for ``r``,
``(r / e - f) / c``. The serial schedule adds the tracks up instead. The form is exact where computing is in proportion
to the tokens and ``r`` is constant; where launching operations takes as long as computing, or an update may hide behind
forward alone, they are not quite, so the form is where a search begins that plays the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from gemini.planning.plan import Plan
from gemini.planning.timeline import Timeline, Track
from gemini.planning.trace import times

TOLERANCE = 0.05
"""The part of computing alone by which a step may be longer and its offload still be called free."""


class Grow(Enum):
    """How a step gets more tokens: by a larger micro-batch, or by more micro-batches of the same size.

    A larger micro-batch lengthens computing and the moves of activations; another micro-batch repeats all that belongs
    to a moment: every weight is fetched again.
    """

    BATCH = "a larger micro-batch"
    ACCUMULATE = "more micro-batches"


class TrackTime(NamedTuple):
    """Seconds that a track is busy: with what grows with the tokens, and with what does not."""

    growing: float = 0.0
    fixed: float = 0.0

    @property
    def total(self) -> float:
        return self.growing + self.fixed


def track_times(timeline: Timeline, grow: Grow = Grow.BATCH) -> dict[Track, TrackTime]:
    """What keeps each track busy, by whether it grows with the tokens."""
    found: dict[Track, TrackTime] = {}
    for span in timeline.spans:
        growing, fixed = found.get(span.track, TrackTime())
        seconds = span.stop - span.start
        grows = span.moment >= 0 and (grow is Grow.ACCUMULATE or span.track is Track.COMPUTE or span.chunk < 0)
        found[span.track] = TrackTime(growing + seconds, fixed) if grows else TrackTime(growing, fixed + seconds)
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
    tracks = track_times(timeline, grow)
    compute, others = tracks.pop(Track.COMPUTE, TrackTime()), tracks.values()
    if not compute.growing or not timeline.tokens:
        return None
    # Lower bounds on how many times the tokens there must be: seconds to make up for, and those that each gains.
    if serial:  # the step is the sum of all tracks: it grows by the part of them that grows, and all else stays
        growing = sum(track.growing for track in others)
        stays = timeline.step_seconds - compute.total - growing
        bounds = [(stays - tolerance * compute.fixed, tolerance * compute.growing - growing)]
    else:  # the step is the longest track and what no overlap hides
        rest = max(0.0, timeline.step_seconds - max([compute.total, *(track.total for track in others)]))
        allowed = 1 + tolerance
        bounds = [
            (track.fixed + rest - allowed * compute.fixed, allowed * compute.growing - track.growing)
            for track in others
        ]
        bounds.append((rest - tolerance * compute.fixed, tolerance * compute.growing))
    scale = 0.0
    for needed, gained in bounds:
        if gained < 0 or (gained == 0 and needed > 0):
            return None  # a track that grows faster than computing overtakes it, if not now then with more tokens
        if needed > 0:
            scale = max(scale, needed / gained)
    return math.ceil(scale * timeline.tokens)


def played_break_even(
    plan: Plan,
    play: Callable[[Plan], Timeline],
    timeline: Timeline,
    *,
    serial: bool = False,
    tolerance: float = TOLERANCE,
    accuracy: float = 0.005,
    plays: int = 6,
) -> int | None:
    """As :func:`break_even` with a larger micro-batch, found by playing the plan with more and less work in it.

    Args:
        plan: what is played.
        play: predicts a step of a plan.
        timeline: ``play(plan)``.
        serial: ``play`` predicts the serial schedule.
        accuracy: by how much a step may be less over its computing than ``tolerance`` at the answer.
        plays: how often to play at most.

    Returns:
        Tokens at which a step is free as played, or None if no number that was tried is. Where offload is free as it
        is, the closed form, or the tokens there are if those are fewer.
    """
    first = break_even(timeline, serial=serial, tolerance=tolerance)
    if first is None or not timeline.tokens:
        return None

    # Scales between which the answer is, each with by how many seconds a step is longer there than it may be.
    costs: tuple[float, float] | None = None
    free: tuple[float, float] | None = None
    was_free, part, scale = False, 0.0, 1.0
    for _ in range(plays + 1):
        played = timeline if scale == 1.0 else play(with_work(plan, scale))
        compute = played.busy[Track.COMPUTE]
        over = played.step_seconds - (1 + tolerance) * compute
        if over > 0:
            costs = (scale, over)
        else:
            free, part = (scale, over), played.step_seconds / compute - 1
            if -over <= accuracy * compute:
                break
        if costs is None:  # as it is: fewer tokens are nothing that anyone asks for
            return min(first, timeline.tokens)
        if free is None:
            # What is not hidden stays about the same, so it is a smaller part of more work.
            more = min(max((played.step_seconds / compute - 1) / tolerance, 1.25), 64.0)
            scale = max(first / timeline.tokens, 1.02 * more * scale if scale > 1.0 else 1.25)
        elif costs[0] < free[0] / 4:
            scale = max(0.95 * free[0] * part / tolerance, math.sqrt(costs[0] * free[0]))
            scale = min(scale, 0.9 * free[0])
        elif was_free and over <= 0:
            scale = math.sqrt(costs[0] * free[0])  # a line did not come to the other side: something jumps between
        else:
            # Both are near: a straight line, and a little to the side on which it is free.
            scale = costs[0] + (free[0] - costs[0]) * costs[1] / (costs[1] - free[1])
            scale = min(1.01 * scale, (scale + free[0]) / 2)
        was_free = over <= 0
    return None if free is None else math.ceil(free[0] * timeline.tokens)


def with_work(plan: Plan, scale: float) -> Plan:
    """The plan of a step with ``scale`` times the tokens in each micro-batch, as far as its time goes.

    Its memory is left as it is, so that the same plan can be played.
    """
    moments = tuple(times(moment, scale) for moment in plan.trace.moments)
    return replace(plan, trace=replace(plan.trace, moments=moments, tokens=round(plan.trace.tokens * scale)))
