"""The tokens from which on offload is free: by hand, and against playing the model of a step it solves."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gemini.planning.break_even import TOLERANCE, Grow, TrackTime, break_even, track_times
from gemini.planning.timeline import Span, Timeline, Track

NUM_TOKENS = 1000


def timeline(spans: list[Span], step_seconds: float, tokens: int = NUM_TOKENS) -> Timeline:
    return Timeline("predicted", "a step", step_seconds, tokens, 0, tuple(spans), {}, {}, (), {})


def spans_of(compute: float, update_on_gpu: float, fetch: float, activations: float, adam: float) -> list[Span]:
    return [
        Span(Track.COMPUTE, 0.0, compute, "forward", moment=0),
        Span(Track.COMPUTE, 0.0, update_on_gpu, "update chunk 1", chunk=1),
        Span(Track.H2D, 0.0, fetch, "fetch chunk 0", moment=0, chunk=0),
        Span(Track.H2D, 0.0, activations, "restore", moment=0),
        Span(Track.UPDATE, 0.0, adam, "update chunk 0", chunk=0),
    ]


def test_tracks_are_told_apart_by_what_grows() -> None:
    step = timeline(spans_of(8.0, 1.0, 3.0, 2.0, 5.0), 10.0)
    assert track_times(step) == {
        Track.COMPUTE: TrackTime(8.0, 1.0), Track.H2D: TrackTime(2.0, 3.0), Track.UPDATE: TrackTime(0.0, 5.0),
    }  # fmt: skip
    repeated = track_times(step, Grow.ACCUMULATE)
    assert repeated[Track.H2D] == TrackTime(5.0, 0.0) and repeated[Track.UPDATE] == TrackTime(0.0, 5.0)


@pytest.mark.parametrize(
    "spans, seconds, tokens, repeated",
    [
        # Adam takes 4 times as long as computing, all else is hidden: 4 times the tokens, less the tolerance.
        (spans_of(1.0, 0.0, 0.0, 0.0, 4.0), 4.0, 4 / 1.05, 4 / 1.05),
        # The same where the step is a tenth of a second longer than its longest track.
        (spans_of(1.0, 0.0, 0.0, 0.0, 4.0), 4.1, 4.1 / 1.05, 4.1 / 1.05),
        # What nothing hides has to be small against computing.
        (spans_of(1.0, 0.0, 0.0, 0.0, 0.5), 2.0, 1.0 / 0.05, 1.0 / 0.05),
        # Fetching is as long as computing twice: a larger micro-batch hides it, more of them never do.
        (spans_of(1.0, 0.0, 2.0, 0.0, 0.0), 2.0, 2 / 1.05, None),
        # Activations that take longer than computing are never hidden.
        (spans_of(1.0, 0.0, 0.0, 2.0, 0.0), 2.0, None, None),
        # An update on the GPU is computing too.
        (spans_of(1.0, 1.0, 0.0, 0.0, 4.2), 4.2, 4.2 / 1.05 - 1.0, 4.2 / 1.05 - 1.0),
        # Nothing moves.
        (spans_of(1.0, 0.0, 0.0, 0.0, 0.0), 1.0, 0.0, 0.0),
    ],
)
def test_by_hand(spans: list[Span], seconds: float, tokens: float | None, repeated: float | None) -> None:
    def expected(scale: float | None) -> object:
        return None if scale is None else pytest.approx(scale * NUM_TOKENS, abs=1.01)

    assert break_even(timeline(spans, seconds)) == expected(tokens)
    assert break_even(timeline(spans, seconds), grow=Grow.ACCUMULATE) == expected(repeated)


def test_the_serial_schedule_adds_up() -> None:
    step = timeline(spans_of(1.0, 0.0, 1.0, 0.0, 2.0), 4.0)
    assert break_even(step, serial=True) == pytest.approx(3.0 / TOLERANCE * NUM_TOKENS, abs=1.01)
    assert break_even(step, serial=True, grow=Grow.ACCUMULATE) is None  # every micro-batch waits for its fetches
    assert break_even(step, serial=True) > break_even(step)  # type: ignore[operator]


def test_without_work_there_is_none() -> None:
    assert break_even(timeline([Span(Track.UPDATE, 0.0, 1.0, "update", chunk=0)], 1.0)) is None
    assert break_even(timeline(spans_of(1.0, 0.0, 0.0, 0.0, 1.0), 1.0, tokens=0)) is None


seconds = st.floats(0, 10, allow_nan=False).map(lambda x: round(x, 3))


@example(compute=9.33984375, update=0.0, fetch=0.0, activations=9.805, adam=0.0, rest=1.0)
@given(compute=st.floats(0.1, 10), update=seconds, fetch=seconds, activations=seconds, adam=seconds, rest=seconds)
def test_it_is_the_smallest_number_at_which_the_step_is_as_long_as_its_computing(
    compute: float, update: float, fetch: float, activations: float, adam: float, rest: float
) -> None:
    longest = max(compute + update, fetch + activations, adam)
    found = break_even(timeline(spans_of(compute, update, fetch, activations, adam), longest + rest))

    def is_free(tokens: float, rounding: float = 1e-9) -> bool:
        scale = tokens / NUM_TOKENS
        alone = scale * compute + update
        return max(alone, fetch + scale * activations, adam) + rest <= (1 + TOLERANCE) * alone * (1 + rounding)

    if found is None:
        assert not is_free(1e12)
    else:
        assert is_free(found) and is_free(10 * found)
        assert found <= 1 or not is_free(math.floor((found - 1) * (1 - 1e-6)), rounding=-1e-9)
