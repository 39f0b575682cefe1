"""The tokens from which on offload is free, found by playing: against steps whose length is known at every size."""

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from traces import decoder_trace

import gemini
from gemini.planning.sizes import TOLERANCE, break_even
from gemini.planning.timeline import Span, Timeline, Track
from gemini.tiers import Tier

TRACE = decoder_trace(hidden=64, layers=2, vocab=100, tokens=1000)
PLAN = gemini.plan(TRACE, None, {Tier.CPU: 1 << 30})


def played(plan: gemini.Plan, seconds: float, compute: float) -> Timeline:
    spans = (Span(Track.COMPUTE, 0.0, compute, "forward", moment=0),)
    return Timeline("predicted", "a step", seconds, plan.trace.tokens, 0, spans, {}, {}, (), {})


def found_for(compute: float, fetch: float, activations: float, rest: float) -> tuple[int | None, Any]:
    """The tokens that are found for a step that is as long as its longest track and ``rest``; and its part beyond
    computing at so many tokens.
    """

    def length(scale: float) -> float:
        return max(compute * scale, fetch + activations * scale) + rest

    def play(plan: gemini.Plan) -> Timeline:
        scale = plan.trace.tokens / TRACE.tokens
        return played(plan, length(scale), compute * scale)

    return break_even(PLAN, play, play(PLAN)), lambda tokens: length(tokens / 1000) / (compute * tokens / 1000) - 1


seconds = st.floats(0, 10, allow_nan=False).map(lambda x: round(x, 3))


@example(compute=9.33984375, fetch=0.0, activations=9.805, rest=1.0)
@example(compute=1.0, fetch=0.0, activations=0.0, rest=0.0)
@given(compute=st.floats(0.1, 10), fetch=seconds, activations=seconds, rest=seconds)
def test_it_is_about_the_smallest_number_at_which_the_step_is_as_long_as_its_computing(
    compute: float, fetch: float, activations: float, rest: float
) -> None:
    found, over = found_for(compute, fetch, activations, rest)
    if found is None:  # a track that grows as fast as computing, or nearly
        assert activations > 1.03 * compute
    else:
        assert over(1.001 * found) <= TOLERANCE
        assert found == 1000 or over(0.8 * found) > TOLERANCE


def test_what_is_free_as_it_is_needs_no_more_than_that() -> None:
    assert found_for(1.0, 0.5, 0.0, 0.01)[0] == 1000


def test_activations_that_take_longer_than_computing_are_never_hidden() -> None:
    assert found_for(1.0, 0.0, 2.0, 0.0)[0] is None


def test_without_work_there_is_none() -> None:
    def play(plan: gemini.Plan) -> Timeline:
        return Timeline("predicted", "a step", 1.0, 1000, 0, (), {}, {}, (), {})

    assert break_even(PLAN, play, play(PLAN)) is None
